"""The documentation names what there is, and nothing else."""

import re
import runpy
from pathlib import Path

import pytest
import torch

import topreduce.torch
from topreduce import _core
from topreduce.__main__ import main

ROOT = Path(__file__).parents[2]
ALGORITHMS = (ROOT / "docs/algorithms.md").read_text(encoding="utf-8")
KINDS = {"Methods": "methods", "Exchange": "exchange", "Select": "select", "Feedback": "feedback"}
CATALOG = _core.catalog()
ROWS = {
    "methods": {"is", "use it", "not", "paper"},
    "exchange": {"idea", "rounds", "sent per rank", "drops", "use it", "not", "paper"},
    "select": {"idea", "chooses", "use it", "not", "paper"},
    "feedback": {"idea", "law", "use it", "not", "paper"},
}


def blocks(kind: str) -> dict[str, str]:
    """The text under every third-level heading of a section, by name."""
    title = next(title for title, each in KINDS.items() if each == kind)
    section = re.search(rf"^## {title}$(.*?)(?=^## |\Z)", ALGORITHMS, re.M | re.S)
    assert section is not None, title
    headings = re.split(r"^### `(\w+)`$", section[1], flags=re.M)
    return dict(zip(headings[1::2], headings[2::2], strict=True))


def rows(block: str) -> dict[str, str]:
    """Its table, without the settings."""
    found = re.findall(r"^\| ([a-z ]+) \| (.*) \|$", block, re.M)
    return dict(found)


@pytest.mark.parametrize("kind", sorted(CATALOG.keys() - {"settings"}))
def test_every_entry_has_its_block(kind: str) -> None:
    assert list(blocks(kind)) == [entry["name"] for entry in CATALOG[kind]]


@pytest.mark.parametrize("kind", sorted(CATALOG.keys() - {"settings"}))
def test_blocks_answer_every_question(kind: str) -> None:
    for name, block in blocks(kind).items():
        missing = ROWS[kind] - rows(block).keys()
        assert not missing, f"{kind} {name}: {missing}"
        if kind == "exchange":
            assert "```" in block, f"{name} communicates and has no picture"


@pytest.mark.parametrize("kind", ["exchange", "select", "feedback"])
def test_settings_are_those_of_the_catalog(kind: str) -> None:
    for entry in CATALOG[kind]:
        block = blocks(kind)[entry["name"]]
        told = re.findall(r"`(\w+)=([^`]*)`", rows(block).get("settings", ""))
        known = [(setting["name"], setting["default"]) for setting in entry["settings"]]
        assert told == known, entry["name"]


def test_whole_specs_are_accepted() -> None:
    layout = topreduce.Layout([("weight", (8, 8))])
    specs = re.findall(r'`"(\w+:[^"`]+)"`', ALGORITHMS)
    assert len(specs) >= 8, "published forms"
    for spec in specs:
        topreduce.Reducer(layout, spec)


def test_methods_name_their_stages() -> None:
    for method in topreduce.methods():
        text = rows(blocks("methods")[method["name"]])["is"]
        stages = [method["feedback"], method["select_bucket"], method["select_model"]]
        assert set(re.findall(r"`(\w+)`", text)) == {*stages, method["exchange"]} - {""}
        assert not method["paper"] or re.findall(r"\d{4}\.\d{5}", method["paper"])[0] in text_of(
            method["name"]
        )


def text_of(method: str) -> str:
    return rows(blocks("methods")[method])["paper"]


def test_the_table_of_methods_is_that_of_the_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = (ROOT / "docs/algorithms.md").read_text(encoding="utf-8")
    assert main(["methods", "--markdown"]) == 0
    assert capsys.readouterr().out in page


def test_the_python_reference_is_that_of_the_docstrings() -> None:
    """To put it right: .venv/bin/python docs/site/python_reference.py > docs/python.md"""
    page = runpy.run_path(str(ROOT / "docs/site/python_reference.py"))["page"]()
    assert page == (ROOT / "docs/python.md").read_text(encoding="utf-8")
    for name in (*topreduce.__all__, *(f"torch.{each}" for each in topreduce.torch.__all__)):
        shared = name.removeprefix("torch.") in topreduce.__all__ and name.startswith("torch.")
        assert f"### topreduce.{name}\n" in page or shared or name == "__version__", name


def test_the_torch_that_is_asked_for_is_the_one_that_is_tested() -> None:
    tested = ".".join(torch.__version__.split(".")[:2])
    asked = re.findall(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert asked == [tested, tested]
    for page in ("README.md", "docs/pytorch.md"):
        words = " ".join((ROOT / page).read_text(encoding="utf-8").split())
        assert f"{tested} or later" in words and "untested" in words, page
