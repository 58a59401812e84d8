"""Puts a training of the lab into README.md: the table, and the picture docs/loss.svg it shows.

.venv/bin/python docs/site/readme.py results/.../results.json

What they are made of stays in docs/loss.json; without an argument they are made from it anew.
"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from topreduce.lab.report.markdown import markdown
from topreduce.lab.report.plot import loss_plot
from topreduce.lab.report.results import Results, load

ROOT = Path(__file__).parents[2]
BEGIN = "<!-- made by docs/site/readme.py -->\n"
END = "\n<!-- end of what it made -->"
_UNUSED = ("bytes_sent", "losses", "density", "kept_energy", "owed_norm", "waited")


def filled(page: str, results: Results) -> str:
    """The page with the table between its marks."""
    before, rest = page.split(BEGIN, 1)
    return f"{before}{BEGIN}{markdown(results)}{END}{rest.split(END, 1)[1]}"


def keep(results: Results, file: Path) -> None:
    """What picture and table need, with numbers short enough to read."""
    kept = _rounded(dataclasses.asdict(results))
    for run in kept["runs"]:
        run |= {key: [] for key in _UNUSED} | {"sample": ""}
    file.write_text(json.dumps(kept) + "\n")


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list) else value


def main() -> None:
    kept = ROOT / "docs/loss.json"
    if len(sys.argv) > 1:
        keep(load(Path(sys.argv[1])), kept)
    results = load(kept)
    (ROOT / "docs/loss.svg").write_text(loss_plot(results))
    readme = ROOT / "README.md"
    readme.write_text(filled(readme.read_text(encoding="utf-8"), results), encoding="utf-8")


if __name__ == "__main__":
    main()
