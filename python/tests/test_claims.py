"""The claims of docs/evidence.md that are quick enough to look at in every run."""

import importlib
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from topreduce import Layout, StepStats

ROOT = Path(__file__).resolve().parents[2]
CLAIMS = ROOT / "bench/claims"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Imports a script by its name, with what it shares with others."""
    monkeypatch.syspath_prepend(str(CLAIMS))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before & {file.stem for file in CLAIMS.glob("*.py")}:
        sys.modules.pop(name)


def test_more_ranks_come_closer_with_arc_and_ef21m(script: Callable[[str], ModuleType]) -> None:
    speedup = script("speedup")

    def norm(ranks: int) -> float:
        setting = speedup.Setting("quadratic", "ARC-Top-K, EF21M", ranks, 0, 120)
        value: float = speedup.gradient_norm(setting)
        return value

    alone, together = norm(1), norm(8)
    assert together < alone / 3, "linear speed-up would make it an eighth"


def test_what_cancels_misleads_local_topk_and_not_arc(
    script: Callable[[str], ModuleType],
) -> None:
    training = script("training")
    rng = np.random.default_rng(0)
    rows = (np.arange(40) < 4)[:, None]
    common = rng.standard_normal((40, 32)) * rows  # few rows of the mean matter
    noise = 10 * rng.standard_normal((40, 32)) * ~rows
    inputs = [(common + sign * noise).ravel().astype(np.float32) for sign in (1, -1, 1, -1)]
    mean = common.ravel().astype(np.float32)
    layout = Layout([("x", (40, 32))])

    def left(method: str) -> float:
        out, _ = training.compressed(inputs, layout, f"{method}:density=0.1,values=fp32")
        error: float = training.relative_error(out, mean)
        return error

    assert left("arc_topk") < 1e-9
    assert left("topk") > 0.9, "what it sends adds up to nothing"


def test_equal_bytes_are_equal(script: Callable[[str], ModuleType]) -> None:
    arc = script("arc")
    layout = Layout([("a", (200, 50)), ("b", (50,))])
    wanted = arc.sent("arc_topk:density=0.2,values=fp32", layout)
    for method in ("topk", "randk"):
        density = arc.equal_density(method, layout)
        assert arc.sent(f"{method}:density={density},values=fp32", layout) == pytest.approx(
            wanted, rel=0.02
        )


def test_xi_is_zero_where_all_ranks_have_the_same(script: Callable[[str], ModuleType]) -> None:
    oktopk = script("oktopk")
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((3, 500)).astype(np.float32)

    def distances(vectors: Any, k: int = 20) -> dict[str, float]:
        arrived = oktopk.strongest(vectors.mean(axis=0), k)
        ranks = [{"a": each, "g": each, "mean": arrived, "selected": k} for each in vectors]
        found: dict[str, float] = oktopk.distances(ranks, k)
        return found

    alike = distances(vectors[[0, 0, 0]])
    assert alike == pytest.approx({"xi": 0, "delivered": 0, "threshold": 1}, abs=1e-6)
    assert distances(vectors)["xi"] > 0.1


def test_normal_vectors_keep_the_bound_of_gaussiank_and_flat_ones_do_not(
    script: Callable[[str], ModuleType],
) -> None:
    gaussian, training = script("gaussian"), script("training")
    rng = np.random.default_rng(0)
    normal = rng.standard_normal(20_000).astype(np.float32)
    for vector, holds in ((normal, True), (np.sign(normal), False)):
        seen = training.Look(0, 0, vector, np.zeros_like(vector), vector, StepStats)
        found = gaussian.look(seen)
        assert found["below_line"] is holds
        kept = [
            left <= (1 - share) ** 2
            for left, share in zip(found["left"], gaussian.SHARES, strict=True)
        ]
        assert all(kept) is holds


def test_subwords_spell_their_text(script: Callable[[str], ModuleType]) -> None:
    data = script("data")
    words = ["the", "other", "then", ".", "there"] * 6
    pieces, ids = data.subwords(words, merges=3)
    assert "".join(pieces[each] for each in ids) == "_the_other_then._there" * 6
    assert len(ids) < len("_the_other_then._there" * 6)


NAMES = [file.stem for file in sorted((CLAIMS / "results").glob("*.json"))]


def test_every_claim_has_its_section_results_and_figures() -> None:
    page = (ROOT / "docs/evidence.md").read_text(encoding="utf-8")
    scripts = [
        file.stem for file in CLAIMS.glob("*.py") if "    claim = Claim(" in file.read_text()
    ]
    assert sorted(scripts) == NAMES
    for name in NAMES:
        assert f"./run claims {name}" in page
    figures = set(re.findall(r"\]\((evidence/\w+\.svg)\)", page))
    assert figures == {f"evidence/{file.name}" for file in (ROOT / "docs/evidence").glob("*.svg")}
    assert not re.search(r"<!-- (.*) -->\n+<!-- end of \1 -->", page), "a table is empty"


@pytest.mark.parametrize("name", NAMES)
def test_what_is_kept_gives_the_tables_and_figures_of_the_page(
    name: str,
    script: Callable[[str], ModuleType],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shutil.copytree(CLAIMS / "results", tmp_path / "bench/claims/results")
    (tmp_path / "docs").mkdir()
    page = (ROOT / "docs/evidence.md").read_text(encoding="utf-8")
    places = re.compile(rf"(<!-- {name}(?: [^>]*)? -->\n).*?(\n<!-- end of )", re.DOTALL)
    emptied, tables = places.subn(r"\1\2", page)
    assert tables, "none in its place"
    (tmp_path / "docs/evidence.md").write_text(emptied, encoding="utf-8")
    monkeypatch.setattr(script("claim"), "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", [name, "--draw"])
    script(name).main()
    assert (tmp_path / "docs/evidence.md").read_text(encoding="utf-8") == page
    drawn = {file.name: file.read_bytes() for file in (tmp_path / "docs/evidence").iterdir()}
    kept = (ROOT / "docs/evidence").glob(f"{name}*.svg")
    assert drawn == {file.name: file.read_bytes() for file in kept}
