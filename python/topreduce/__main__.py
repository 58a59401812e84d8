"""The command ``topreduce``."""

import argparse
import difflib
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence

from topreduce import Layout, __version__, advice, catalog, units
from topreduce.catalog import Item

_WIDEST = 110
_WIDEST_RANGE = 22  # a long list of choices goes over several lines


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 2 if the command line was wrong."""
    parser = argparse.ArgumentParser(
        prog="topreduce",
        description="Averages gradients over slow networks: sends the entries that matter.",
    )
    parser.add_argument("--version", action="version", version=f"topreduce {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    _add_methods(commands)
    _add_advise(commands)
    commands.add_parser("lab", help="race and train on an emulated cluster", add_help=False)
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["lab"]:
        return _lab(words[1:])
    arguments = parser.parse_args(words)
    try:
        for line in arguments.run(arguments):
            print(line)
        sys.stdout.flush()
    except ValueError as error:
        print(f"topreduce {arguments.command}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader, `head` for one, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _lab(words: list[str]) -> int:
    try:
        from topreduce.lab import command  # torch is imported by those who use it
    except ImportError as error:
        print(error, file=sys.stderr)
        return 1
    return command.main(words)


# ---- topreduce advise ---------------------------------------------------------------------------


def _add_advise(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "advise",
        help="predict what method auto would send on a network, and the time of a step",
        description="Predicts a step: what density=auto would send, its time and its bytes.",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--entries", help="number of parameters of the model, such as 10m or 1.3b")
    what.add_argument("--model", help="a model of the lab, such as gpt:10m")
    parser.add_argument("--ranks", type=int, default=4, help="number of ranks (4)")
    parser.add_argument("--rate", default="1gbit", help="rate of every link, each way (1gbit)")
    parser.add_argument("--delay", default="0s", help="one-way delay between any two ranks (0s)")
    parser.add_argument(
        "--compute", required=True, help="time of a step without averaging, such as 300ms"
    )
    parser.add_argument(
        "--overhead",
        type=float,
        default=0.05,
        help="share of a step that may be spent waiting (0.05)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_advise)


def _advise(asked: argparse.Namespace) -> Iterable[str]:
    if asked.ranks < 1:
        raise ValueError(f"--ranks must be at least 1, not {asked.ranks}")
    if not 0 < asked.overhead <= 1:
        raise ValueError(f"--overhead must be a number in (0, 1], not {asked.overhead:g}")
    layout = None if asked.model is None else _lab_layout(asked.model)
    site = advice.Site(
        entries=units.parse_count(asked.entries) if layout is None else layout.size,
        ranks=asked.ranks,
        computed=units.parse_seconds(asked.compute),
        rate=units.parse_rate(asked.rate),
        delay=units.parse_seconds(asked.delay),
    )
    if site.computed == 0:
        raise ValueError("--compute must be more than 0")
    found = advice.advise(site, overhead=asked.overhead, layout=layout)
    return [advice.as_json(found)] if asked.json else advice.lines(found)


def _lab_layout(model: str) -> Layout:
    from topreduce.lab.tasks.models import MODELS, Workload, make_task

    if model not in MODELS:
        raise ValueError(f"--model must be one of {', '.join(MODELS)}, not {model!r}")
    parameters = make_task(Workload(model=model)).model.named_parameters()
    return Layout([(name, list(each.shape)) for name, each in parameters])


# ---- topreduce methods --------------------------------------------------------------------------


def _add_methods(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "methods",
        help="list the methods, their stages and settings",
        description="Lists every method, or shows one: what it does, its stages, its settings.",
    )
    parser.add_argument("name", nargs="?", help="show this method only")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print topreduce.methods() as JSON")
    form.add_argument(
        "--markdown", action="store_true", help="print the table of docs/algorithms.md"
    )
    parser.set_defaults(run=_methods)


def _methods(arguments: argparse.Namespace) -> Iterable[str]:
    methods = catalog.methods()
    if arguments.name is not None:
        methods = [_find(methods, arguments.name)]
    if arguments.json:
        return [json.dumps(methods, indent=2)]
    if arguments.markdown:
        return _markdown(methods)
    return _describe(methods)


def _find(methods: list[Item], name: str) -> Item:
    names = [method["name"] for method in methods]
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
        hint = f"did you mean '{near[0]}'? " if near else ""
        raise ValueError(f"unknown method '{name}'; {hint}known: {', '.join(names)}")
    return methods[names.index(name)]


def _describe(methods: list[Item]) -> Iterator[str]:
    width = min(_WIDEST, shutil.get_terminal_size().columns)
    for method in methods:
        yield method["name"]
        yield from _hanging("  ", method["summary"], width)
        selects = catalog.selects(method)
        for kind, stage in catalog.stages(method):
            when = f" (granularity {selects[stage['name']]})" if kind == "select" else ""
            yield from _hanging(
                f"  {kind:<9} ", f"{stage['name']}{when}: {stage['summary']}", width
            )
        yield from _hanging("  density   ", _density(method["density"]), width)
        if method["paper"]:
            yield from _hanging("  paper     ", method["paper"], width)
        own = [setting for setting in method["settings"] if "stage" in setting]
        yield from _table(own, width)
        yield ""
    yield "settings of every method"
    yield from _table(catalog.common_settings(), width)


def _density(own: str) -> str:
    """What a method sends that is named without a density."""
    if own == "1":
        return "1: everything"
    found = "auto, found while running"
    return found if own == "auto" else f"attach() takes {found}; Reducer takes {own}"


def _table(settings: list[Item], width: int) -> Iterator[str]:
    """Name, default, range and meaning of each, in columns as wide as needed."""
    rows = [
        (
            each["name"],
            each["default"] or "-",
            textwrap.wrap(catalog.allowed(each), _WIDEST_RANGE),
            _meaning(each),
        )
        for each in settings
    ]
    names = max((len(name) for name, *_ in rows), default=0)
    defaults = max((len(default) for _, default, *_ in rows), default=0)
    ranges = max((len(line) for *_, allowed, _ in rows for line in allowed), default=0)
    for name, default, allowed, meaning in rows:
        lines = _hanging(
            f"    {name:<{names}}  {default:<{defaults}}  {allowed[0]:<{ranges}}  ", meaning, width
        )
        indent = 4 + names + 2 + defaults + 2
        for i, rest in enumerate(allowed[1:], start=1):
            line = lines[i] if i < len(lines) else ""
            below = f"{'':<{indent}}{rest:<{ranges}}{line[indent + ranges :]}".rstrip()
            lines[i : i + 1] = [below]
        yield from lines


def _meaning(setting: Item) -> str:
    return (
        f"{setting['meaning']} [{setting['stage']}]" if "stage" in setting else setting["meaning"]
    )


def _hanging(first: str, text: str, width: int) -> list[str]:
    """`text` beside `first`, further lines below it."""
    room = max(30, width - len(first))
    lines = textwrap.wrap(text, room, break_on_hyphens=False)
    return [(first if i == 0 else " " * len(first)) + line for i, line in enumerate(lines)]


def _markdown(methods: list[Item]) -> Iterator[str]:
    yield "<!-- methods -->"
    yield "| method | feedback | select | exchange | what it does |"
    yield "|---|---|---|---|---|"
    for method in methods:
        selects = catalog.selects(method)
        chosen = "; ".join(f"`{name}` ({when})" for name, when in selects.items()) or "-"
        cells = [f"`{method['name']}`", f"`{method['feedback']}`", chosen]
        cells += [f"`{method['exchange']}`", method["summary"]]
        yield f"| {' | '.join(cells)} |"
    yield "<!-- /methods -->"


if __name__ == "__main__":
    sys.exit(main())
