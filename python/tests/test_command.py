"""The command `topreduce`: the catalog on a terminal, for machines and for the README."""

import json
import subprocess
import sys

import pytest

import topreduce
from topreduce.__main__ import main

METHODS = topreduce.methods()
NAMES = [method["name"] for method in METHODS]


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


@pytest.mark.usefixtures("wide")
def test_methods_shows_all_of_the_catalog(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods"]) == 0
    shown, errors = capsys.readouterr()
    assert errors == ""
    words = " ".join(shown.split())
    for method in METHODS:
        assert f"\n{method['name']}\n" in f"\n{shown}"
        for word in ("summary", "feedback", "select_model", "select_bucket", "exchange", "paper"):
            assert method[word] in words
        for setting in method["settings"]:
            assert setting["name"] in words
            assert setting["default"] in words
            assert setting["meaning"] in words
    assert "(0, 1]" in words, "the range of the density"
    assert "auto | fp32 | bf16" in words, "the choices for values"
    assert "[select=carried]" in words, "where a setting belongs"


@pytest.mark.parametrize("columns", [1, 40, 80, 300])
def test_lines_fit_the_terminal(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["methods"]) == 0
    longest = max(map(len, capsys.readouterr().out.splitlines()))
    assert longest <= {80: 80, 300: 110}.get(columns, 80), "and stay readable in a narrow one"


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize("name", NAMES)
def test_one_method(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods", name]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"{name}\n")
    assert "density" in shown
    assert not any(f"\n{other}\n" in shown for other in NAMES)


@pytest.mark.usefixtures("wide")
def test_the_density_of_attach_stands_beside_that_of_the_reducer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for method in METHODS:
        assert main(["methods", method["name"]]) == 0
        line = next(each for each in capsys.readouterr().out.splitlines() if "  density  " in each)
        own = method["density"]
        both = own not in ("auto", "1")
        assert line.split(maxsplit=1)[1].startswith("attach() takes auto" if both else own)
        assert line.endswith(f"; Reducer takes {own}") == both
    (density,) = (each for each in METHODS[0]["settings"] if each["name"] == "density")
    assert "attach() takes auto" in density["meaning"]


def test_json_is_what_python_sees(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == METHODS
    assert main(["methods", "topk", "--json"]) == 0
    assert [method["name"] for method in json.loads(capsys.readouterr().out)] == ["topk"]


def test_markdown_is_a_table_between_markers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods", "--markdown"]) == 0
    first, *rows, last = capsys.readouterr().out.splitlines()
    assert (first, last) == ("<!-- methods -->", "<!-- /methods -->")
    assert {row.count("|") for row in rows} == {6}
    assert [row.split("`")[1] for row in rows[2:]] == NAMES


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"topreduce {topreduce.__version__}\n"


def test_an_unknown_method_suggests_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods", "tpok"]) == 2
    shown, errors = capsys.readouterr()
    assert shown == ""
    assert "unknown method 'tpok'; did you mean 'topk'?" in errors
    assert "known: " + ", ".join(NAMES) in errors
    for nothing_like_it in ("xyz", "nope"):
        assert main(["methods", nothing_like_it]) == 2
        assert "did you mean" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [[], ["method"], ["methods", "--yaml"], ["methods", "--json", "--markdown"]]
)
def test_a_wrong_command_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    shown, errors = capsys.readouterr()
    assert shown == ""
    assert errors.startswith("usage: topreduce")


def test_parts_that_need_more_are_imported_when_they_are_used() -> None:
    program = """
import sys, topreduce
assert not {"torch", "mpi4py"} & sys.modules.keys()
assert not hasattr(topreduce, "nothing")
sys.modules["torch"] = None  # as if it were not there
try:
    topreduce.torch
except ModuleNotFoundError as error:
    assert "pip install torch" in str(error), error
del sys.modules["torch"]
assert topreduce.torch.attach.__module__ == "topreduce.torch.attachment"
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()


def test_as_a_process() -> None:
    command = [sys.executable, "-m", "topreduce", "methods"]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == METHODS
    failed = subprocess.run([*command, "nothing"], capture_output=True, text=True, timeout=60)
    assert (failed.returncode, failed.stdout) == (2, "")
    assert "unknown method" in failed.stderr


def test_a_reader_that_has_seen_enough() -> None:
    command = f"{sys.executable} -m topreduce methods --json | true"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
