"""Writes docs/python.md from the docstrings of the installed package.

.venv/bin/python docs/site/python_reference.py > docs/python.md
"""

import ast
import sys
from collections.abc import Iterator
from importlib.resources import files

_WIDEST = 96
_INTRODUCTION = """# Python reference

What `import topreduce` and `import topreduce.torch` bring, and what users call of it. How to use
it: [PyTorch](pytorch.md); the words: [Glossary](glossary.md). Made from the docstrings by
`docs/site/python_reference.py`; a test compares it.
"""
# Title, the file that defines it, and what of it; of classes all public methods, or those named.
_SECTIONS: list[tuple[str, list[tuple[str, str, tuple[str, ...]]]]] = [
    (
        "topreduce.torch",
        [
            ("torch/attachment.py", "attach", ()),
            ("torch/sync.py", "Sync", ()),
            ("torch/meeting.py", "Ranks", ("__init__", "alone", "rank", "size")),
            ("torch/rebuilding.py", "Rebuilt", ()),
            ("advice.py", "Advice", ("__str__",)),
            ("advice.py", "Row", ("_",)),
            ("torch/resharding.py", "reshard", ()),
            ("torch/lightning.py", "TopreduceStrategy", ("__init__",)),
            ("torch/huggingface.py", "TopreduceCallback", ("__init__",)),
        ],
    ),
    (
        "topreduce",
        [
            ("_core.pyi", "Layout", ("__init__", "names", "shapes", "sizes", "size")),
            (
                "_core.pyi",
                "Reducer",
                (
                    *("__init__", "average", "begin", "add", "finish", "abandon", "agree"),
                    *("configure", "bypass", "compress", "bypassed", "state", "load_state", "owed"),
                    *("stats", "step", "density", "level", "reason", "choices", "timed"),
                    *("spec", "layout"),
                ),
            ),
            ("_core.pyi", "StepStats", ()),
            (
                "_core.pyi",
                "Communicator",
                (
                    *("__init__", "rank", "size", "send_frame", "receive_frames", "accept"),
                    "set_timeout",
                ),
            ),
            ("mpi.py", "Communicator", ("__init__",)),
            ("_core.pyi", "run_ranks", ()),
            ("catalog.py", "methods", ()),
            ("_core.pyi", "CommError", ()),
            ("_core.pyi", "WireError", ()),
            ("_core.pyi", "DriftError", ()),
        ],
    ),
]
_MODULES = {
    "mpi.py": "topreduce.mpi",
    "advice.py": "topreduce.advice",
    "torch/lightning.py": "topreduce.torch.lightning",
    "torch/huggingface.py": "topreduce.torch.huggingface",
}
_ERRORS = {
    "CommError": "The network or a peer failed: the step did not happen, what is owed is as it "
    "was. With torch it is a torch.distributed.DistError.",
    "WireError": "A peer's message could not be trusted: damaged, foreign, or out of step.",
    "DriftError": "The ranks no longer hold the same model, or would apply different means: the "
    "step did not happen.",
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def page() -> str:
    """The whole page."""
    return "\n".join(_lines()).rstrip() + "\n"


def _lines() -> Iterator[str]:
    yield _INTRODUCTION
    for title, entries in _SECTIONS:
        yield f"## {title}\n"
        for file, name, members in entries:
            source = (files("topreduce") / file).read_text(encoding="utf-8")
            yield f"### {_MODULES.get(file, title)}.{name}\n"
            yield from _entry(_find(source, name), source.splitlines(), members)


def _find(source: str, name: str) -> ast.ClassDef | Function:
    for node in ast.parse(source).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name:
            return node
    raise LookupError(f"there is no {name}")


def _entry(
    node: ast.ClassDef | Function, source: list[str], members: tuple[str, ...]
) -> Iterator[str]:
    if not isinstance(node, ast.ClassDef):
        yield from _function(node)
        return
    yield from _text(_ERRORS.get(node.name) or ast.get_docstring(node) or "")
    fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
    if fields:
        yield "```py"
        yield from (source[each.lineno - 1].strip() for each in fields)  # with their comments
        yield "```\n"
    for each in node.body:
        if isinstance(each, ast.FunctionDef) and _is_shown(each, members):
            yield from _function(each)


def _is_shown(node: ast.FunctionDef, members: tuple[str, ...]) -> bool:
    if any(ast.unparse(each).endswith((".setter", "overload")) for each in node.decorator_list):
        return False
    if members:
        return node.name in members
    return not node.name.startswith("_")


def _function(node: Function) -> Iterator[str]:
    is_property = any(ast.unparse(each) == "property" for each in node.decorator_list)
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    yield "```py"
    if is_property:
        yield f"{node.name}: {ast.unparse(node.returns)}" if node.returns else node.name
    else:
        yield from _signature(node, returns)
    yield "```\n"
    yield from _text(ast.get_docstring(node) or "")


def _signature(node: Function, returns: str) -> Iterator[str]:
    arguments = node.args
    arguments.args = [each for each in arguments.args if each.arg not in ("self", "cls")]
    arguments.posonlyargs = [each for each in arguments.posonlyargs if each.arg != "self"]
    words = ast.unparse(arguments).removeprefix("/, ")
    line = f"{node.name}({words}){returns}"
    if len(line) <= _WIDEST:
        yield line
        return
    yield f"{node.name}("
    for piece in _pieces(words):
        yield f"    {piece},"
    yield f"){returns}"


def _pieces(words: str) -> Iterator[str]:
    """Arguments one by one; commas inside of brackets do not part them."""
    depth, start = 0, 0
    for place, letter in enumerate(words):
        depth += letter in "([{"
        depth -= letter in ")]}"
        if letter == "," and depth == 0:
            yield words[start:place].strip()
            start = place + 1
    yield words[start:].strip()


def _text(words: str) -> Iterator[str]:
    if words:
        yield words + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
