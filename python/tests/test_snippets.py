"""What the pages tell users to type: Python that knows its names, commands that are understood."""

import ast
import inspect
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

import topreduce.torch
from topreduce import _core
from topreduce.lab.arguments import make_parser
from topreduce.lab.experiments.methods import parse_methods
from topreduce.torch import attachment

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CATALOG = _core.catalog()
SETTINGS = {
    setting["name"]
    for stages in CATALOG.values()
    for entry in stages
    for setting in [entry, *entry.get("settings", [])]
}


def snippets(kind: str) -> Iterator[str]:
    """The fenced blocks of this kind, on all pages."""
    for page in PAGES:
        yield from re.findall(rf"^```{kind}\n(.*?)^```$", page.read_text(), re.M | re.S)


def python() -> list[ast.Module]:
    added = ["\n".join(re.findall(r"^\+(.*)$", block, re.M)) for block in snippets("diff")]
    return [ast.parse(block) for block in [*snippets("python"), *added] if "#include" not in block]


def calls(name: str) -> list[ast.Call]:
    """Of a function whose last name is this."""
    nodes = [node for block in python() for node in ast.walk(block) if isinstance(node, ast.Call)]
    return [node for node in nodes if ast.unparse(node.func).split(".")[-1] == name]


def commands() -> list[list[str]]:
    """Every `topreduce lab ...` that the pages show; a backslash continues a line."""
    text = "\n".join(page.read_text() for page in PAGES).replace("\\\n", " ")
    lines = re.findall("^topreduce lab .*$", text, re.M)
    return [shlex.split(line, comments=True) for line in lines]


def test_python_calls_what_the_handle_has() -> None:
    nodes = [node for block in python() for node in ast.walk(block)]
    used = {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "sync"
    }
    assert len(used) > 5
    assert not {name for name in used if not hasattr(topreduce.torch.Sync, name)}


@pytest.mark.parametrize("name", ["attach", "configure"])
def test_python_passes_arguments_that_are_taken(name: str) -> None:
    known = {*inspect.signature(topreduce.torch.attach).parameters, *SETTINGS}
    passed = {keyword.arg for call in calls(name) for keyword in call.keywords}
    assert passed
    assert passed <= known


def test_the_catalog_tells_with_what_attach_begins() -> None:
    told = {setting["name"]: setting["meaning"] for setting in CATALOG["settings"]}
    assert told["warmup_steps"].endswith(f"attach() takes {attachment.WARMUP_STEPS}")
    assert told["ramp_steps"].endswith(f"attach() takes {attachment.RAMP_STEPS}")


def test_commands_of_the_lab_are_understood() -> None:
    assert len(commands()) > 5
    for _, _, *words in commands():
        asked = make_parser().parse_args(words)
        if asked.command not in ("report", "plot"):
            parse_methods(asked.methods)


def test_python_that_is_whole_runs() -> None:
    whole = [block for block in snippets("python") if "import topreduce\n" in block]
    assert whole
    for block in whole:
        exec(compile(block, "a page", "exec"), {})
