"""The claims of docs/evidence.md that are quick enough to look at in every run."""

import importlib
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
CLAIMS = ROOT / "bench/claims"


@pytest.fixture
def speedup(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(CLAIMS))
    module = importlib.import_module("speedup")
    sys.modules.pop("speedup")
    return module


def test_more_ranks_come_closer_with_arc_and_ef21m(speedup: ModuleType) -> None:
    def norm(ranks: int) -> float:
        setting = speedup.Setting("quadratic", "ARC-Top-K, EF21M", ranks, 0, 120)
        value: float = speedup.gradient_norm(setting)
        return value

    alone, together = norm(1), norm(8)
    assert together < alone / 3, "linear speed-up would make it an eighth"


def test_every_claim_has_its_section_results_and_figures() -> None:
    page = (ROOT / "docs/evidence.md").read_text(encoding="utf-8")
    for results in sorted((CLAIMS / "results").glob("*.json")):
        kept = json.loads(results.read_text(encoding="utf-8"))
        assert kept["runs"], results.name
        assert f"./run claims {results.stem}" in page
    figures = set(re.findall(r"\]\((evidence/\w+\.svg)\)", page))
    assert figures == {f"evidence/{file.name}" for file in (ROOT / "docs/evidence").glob("*.svg")}
