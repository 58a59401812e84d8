"""`topreduce lab` and the demo from the command line, with tiny models."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from topreduce.__main__ import main
from topreduce.lab import command, demo
from topreduce.lab.experiments import runs
from topreduce.lab.network.cluster import obstacle

TINY = ["--model", "gpt:0.6m", "--batch", "1", "--context", "8"]
needs_cluster = pytest.mark.skipif(obstacle() is not None, reason=str(obstacle()))


def lab(*words: str) -> int:
    return main(["lab", *words])


@needs_cluster
def test_a_race_without_root(tmp_path: Path) -> None:
    """The inner user namespace makes us an ordinary user, who then makes one of his own."""
    ordinary = ["unshare", "--user", "--map-user=1000", "--map-group=1000", "--"]
    methods = "noop,dense,powersgd:1,topk:density=0.02,values=bf16"
    race = f"lab race --hosts 2 --rate none --rounds 2 --turn 1 --methods {methods}"
    command = [sys.executable, "-m", "topreduce", *race.split(), *TINY, "--out", str(tmp_path)]
    assert subprocess.run([*ordinary, "id", "-u"], capture_output=True).stdout == b"1000\n"
    done = subprocess.run([*ordinary, *command], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert all(each.isprintable() or each == "\n" for each in done.stdout)

    results = json.loads((tmp_path / "results.json").read_text())
    rows = {row["label"]: row for row in results["race"]}
    labels = ["noop", "noop (A/A)", "dense", "powersgd:1", "topk:density=0.02,values=bf16"]
    assert list(rows) == labels
    for label, row in rows.items():
        assert label.split(",")[0] in done.stdout
        assert len(row["seconds"]) == len(row["bytes_sent"]) == len(row["losses"]) == 2
        assert min(row["seconds"]) > 0
    # A busy machine has TCP send some of a step twice, or a little later: not of both steps.
    dense, ours = (min(rows[label]["bytes_sent"]) for label in ("dense", labels[-1]))
    entries = rows["dense"]["parameters"]
    assert dense < 4.5 * entries, "two ranks send one copy each, and headers"
    assert max(rows["dense"]["bytes_sent"]) > 4 * entries
    assert min(rows["noop"]["bytes_sent"]) < 2000
    assert 2000 < ours < 0.05 * dense
    assert rows[labels[-1]]["stages"]["look"] > 0
    assert "<svg" in (tmp_path / "report.html").read_text()


@needs_cluster
def test_a_race_of_sharded_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two hosts of two ranks: what travels inside a host does not count."""
    race = "race --hosts 2 --shards 2 --rate none --rounds 2 --turn 1 --methods"
    methods = "noop,dense,topk:density=0.02"
    assert lab(*race.split(), methods, *TINY, "--out", str(tmp_path)) == 0
    assert "2 hosts with 2 shards each" in capsys.readouterr().out
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["ranks"] == 4
    rows = {row["label"]: row for row in results["race"]}
    entries = rows["dense"]["parameters"]
    noop, dense, ours = (min(rows[label]["bytes_sent"]) for label in methods.split(","))
    assert noop < 2000
    assert 4 * entries < max(rows["dense"]["bytes_sent"]) and dense < 4.7 * entries
    assert 2000 < ours < 0.06 * dense


@pytest.mark.long
def test_a_training_of_sharded_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "train --local --hosts 2 --shards 2 --rounds 1 --steps 4 --evaluate-every 2 --methods"
    methods = "dense,topk:density=0.05,warmup_steps=1,ramp_steps=0"
    code = lab(*words.split(), methods, *TINY, "--out", str(tmp_path))
    assert code == 0, capsys.readouterr().err
    runs = json.loads((tmp_path / "results.json").read_text())["runs"]
    assert [run["spec"].split(":")[0] for run in runs] == ["dense", "dense", "topk"]
    dense, again, sparse = runs
    assert dense["losses"][0] != again["losses"][0], "other weights and batches"
    assert sparse["losses"][0] == pytest.approx(dense["losses"][0])
    assert sparse["losses"][1] == pytest.approx(dense["losses"][1], abs=0.05)  # the warm-up
    assert sparse["density"][-1] < 0.2
    assert dense["evaluations"][-1]["loss"] < dense["evaluations"][0]["loss"]


@needs_cluster
def test_a_race_in_which_rates_change(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "race --hosts 2 --rate 200mbit --then 100mbit --rounds 2 --turn 1 --methods auto"
    assert lab(*words.split(), *TINY, "--compute", "10ms", "--out", str(tmp_path)) == 0
    assert "2 hosts at 200 Mb/s, then 100 Mb/s" in capsys.readouterr().out
    rows = json.loads((tmp_path / "results.json").read_text())["race"]
    for row in rows:
        assert len(row["densities"]) == len(row["waiting"]) == 45 + 2
        assert len(set(row["densities"])) > 1, "it looks for more"
        assert row["level"]
        assert "% allowed" in row["reason"]


@pytest.mark.long
def test_a_training_with_what_a_race_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "train --local --hosts 2 --rounds 1 --steps 3 --clock race --patience 1 --methods"
    assert lab(*words.split(), "dense,auto", *TINY, "--out", str(tmp_path)) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    (found,) = (row for row in results["race"] if row["label"] == "auto")
    assert found["level"] == found["levels"][-1]
    assert len(found["first_seconds"]) > 110, "from the first step on"
    run = results["runs"][-1]
    assert run["spec"] == "auto"
    assert len(run["waited"]) == len(run["density"]) == 3
    assert run["seconds"] == found["first_seconds"][:3]


def test_a_training_on_the_clock_of_a_race(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "--local --hosts 2 --rounds 1 --steps 4 --evaluate-every 2 --seeds 2 --compute 1ms"
    methods = "dense,bf16,topk:density=0.05,warmup_steps=1,ramp_steps=0,post_local_sgd:2,diloco:2"
    out = tmp_path / "a.json"
    code = lab("train", *words.split(), *TINY, "--methods", methods, "--out", str(tmp_path))
    assert code == 0, capsys.readouterr().err
    (tmp_path / "results.json").rename(out)
    results = json.loads(out.read_text())
    assert [(run["label"].split(":")[0], run["seed"]) for run in results["runs"]] == [
        (name, seed)
        for seed in (0, 1)
        for name in ("dense", "bf16", "topk", "post_local_sgd", "diloco")
    ]
    for run in results["runs"]:
        steps = [each["step"] for each in run["evaluations"]]
        assert steps[0] == 0 and steps[-1] == len(run["seconds"])
        if run["label"] == "dense":
            assert steps == [0, 2, 4]
        assert len(run["density"]) == (len(run["losses"]) if "topk" in run["spec"] else 0)
    dense, halved, sparse = results["runs"][:3]
    assert halved["losses"][0] == pytest.approx(dense["losses"][0])
    assert dense["evaluations"][-1]["loss"] < dense["evaluations"][0]["loss"], "it really trained"
    assert results["workload"]["compute"] == 0.001
    assert sparse["density"][0] == 1, "the warm-up"
    assert sparse["density"][-1] < 0.2
    assert {row["spec"] for row in results["race"]} == {
        "noop",
        "dense",
        "bf16",
        "topk:density=0.05,warmup_steps=1,ramp_steps=0",
    }
    printed = capsys.readouterr().out
    assert "(where dense ended)" in printed
    assert "Trained without the limit" in printed

    page = tmp_path / "both.html"
    other = tmp_path / "b.json"
    other.write_text(out.read_text())
    assert lab("report", str(out), str(other), "--out", str(page)) == 0
    assert "a: dense" in page.read_text()
    assert "b: dense" in page.read_text()

    drawn = tmp_path / "new" / "loss.svg"
    assert lab("plot", str(out), "--out", str(drawn)) == 0
    assert "Clock of a race: " in drawn.read_text() and "topk 5 %" in drawn.read_text()
    capsys.readouterr()
    assert lab("report", str(out), "--markdown") == 0
    assert "| dense (DDP) |" in capsys.readouterr().out


def test_the_demo_works_without_a_network_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "obstacle", lambda: "no namespaces today")
    asked = (
        f"--hosts 2 --seconds 300ms --methods topk:density=0.02 --model gpt:0.6m --out {tmp_path}"
    )
    assert demo.main(asked.split()) == 0
    printed = capsys.readouterr().out
    assert "no namespaces today" in printed
    assert "written by the model trained with topk" in printed
    assert "noop (A/A)" in printed
    (run,) = json.loads((tmp_path / "results.json").read_text())["runs"]
    assert sum(run["seconds"]) >= 0.3
    assert str(tmp_path / "report.html") in printed


OWN = """
import torch

class Task:
    def __init__(self):
        self.model = torch.nn.Linear(5, 1)

    def loss(self, model, rank, step):
        generator = torch.Generator().manual_seed(100 * step + rank + 10**6)
        inputs = torch.randn(8, 5, generator=generator)
        return (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
"""


def test_a_model_of_the_users(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models_of_mine.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    words = "train --local --hosts 2 --rounds 1 --steps 4 --evaluate-every 2 --methods dense,topk"
    code = lab(*words.split(), "--model", "models_of_mine:Task", "--out", str(tmp_path))
    assert code == 0, capsys.readouterr().err
    dense, *_ = json.loads((tmp_path / "results.json").read_text())["runs"]
    assert dense["parameters"] == 6
    assert dense["evaluations"][-1]["loss"] < dense["evaluations"][0]["loss"]
    said = " ".join(capsys.readouterr().out.split())
    before, after = re.finditer(r"topk: \d+ steps of training, of which 110 are", said)
    assert before.start() < said.index("of 1 rounds") < after.start()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("race --methods noop,diloco:30", "diloco:30: for `lab train` only"),
        ("plot results.json --out loss.png", "loss.svg"),
        ("report nowhere.json", "nowhere.json: No such file or directory"),
        ("race --methods tpok", "unknown method 'tpok'"),
        ("race --rate none --then 1gbit", "--then changes rates"),
        ("race --then none", "--then changes rates"),
        ("race --shards 2 --methods noop,powersgd:1", "take noop, dense, bf16"),
        ("race --rate fast", "100mbit"),
        ("race --hosts 3 --rate 1mbit,2mbit", "3 hosts"),
        ("race --local --delay 5ms", "leave --local out"),
        ("race --delay 2s", "at most 1 s"),
        ("train --seconds 3s --clock race", "--clock real"),
        ("train --compute 3ms --clock real", "--clock race"),
        ("race --model vgg", "unknown model 'vgg'"),
        ("race --model gpt:2m", "unknown model 'gpt:2m'; --help lists"),
        ("race --model no.such_module:make", "no.such_module"),
        ("race --model os.path:make", "has no function 'make'"),
        ("report nowhere.json", "nowhere.json"),
    ],
)
def test_mistakes_are_told_before_anything_starts(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lab(*words.split()) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("words", ["", "race --hosts 0", "race --compute 50"])
def test_wrong_options_are_refused(words: str) -> None:
    with pytest.raises(SystemExit) as caught:
        lab(*words.split())
    assert caught.value.code == 2


@pytest.mark.parametrize("limit", ["--rate 1gbit", "--delay 5ms"])
def test_a_network_that_cannot_be_is_refused(
    limit: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(command, "become_root", lambda *_: None)
    monkeypatch.setattr(runs, "obstacle", lambda: "no namespaces today")
    assert lab("race", *limit.split(), "--out", str(tmp_path)) == 1
    assert "no namespaces today\nIt needs root" in capsys.readouterr().err


def test_a_report_needs_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "other.json"
    file.write_text('{"format": 1, "race": [{}]}')
    assert lab("report", str(file)) == 2
    assert "not a results.json" in capsys.readouterr().err


@needs_cluster
def test_an_interrupt_leaves_nothing_behind(tmp_path: Path) -> None:
    marker = f"TOPREDUCE_TEST={tmp_path.name}-{os.getpid()}"
    name, _, value = marker.partition("=")
    words = "lab race --hosts 2 --rate none --rounds 100000 --methods noop,topk"
    process = subprocess.Popen(
        [sys.executable, "-m", "topreduce", *words.split(), *TINY, "--out", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, name: value},
    )
    deadline = time.monotonic() + 120
    while len(marked(marker)) < 6:  # the command, a helper of its, three keepers, two ranks
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert b"stopped" in errors
    assert b"Traceback" not in errors
    while marked(marker):
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.long
@needs_cluster
def test_a_benchmark_that_is_killed_leaves_nothing_behind(tmp_path: Path) -> None:
    def on_the_machine() -> set[str]:
        named = Path("/run/netns")
        return {name for _, name in socket.if_nameindex()} | {
            str(each) for each in (named.iterdir() if named.exists() else ())
        }

    marker = f"TOPREDUCE_TEST={tmp_path.name}-{os.getpid()}"
    name, _, value = marker.partition("=")
    before, deadline = on_the_machine(), time.monotonic() + 120
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).parents[2] / "bench/interface.py")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, name: value},
    )
    while len(marked(marker)) < 5:  # the benchmark, and a process for each host
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    process.kill()
    process.wait()
    while marked(marker):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert on_the_machine() <= before


def marked(marker: str) -> list[int]:
    """The processes that have this in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if marker.encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def test_results_are_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "results.json").write_text("hours of work")
    words = ["race", "--local", "--hosts", "2", "--methods", "noop", "--rounds", "1"]
    assert lab(*words, "--out", str(tmp_path)) == 2
    assert "has results already" in capsys.readouterr().err
    assert (tmp_path / "results.json").read_text() == "hours of work"
