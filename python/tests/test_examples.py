"""The examples for other front doors, run against the real packages: our exchange really runs."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.run
from ranks import scripts

from topreduce.torch.state_files import Place, StateFile

ROOT = Path(__file__).parents[2]
EXAMPLES = {
    "torch_ddp": (2, 19210),
    "torch_module": (2, 19210),
    "torch_fsdp": (4, 19210),
    "lightning_fsdp": (4, 19210),
    "accelerate_loop": (2, 19210),
    "lightning_strategy": (2, 19210),
    "transformers_trainer": (2, 35658),
}


def run(ranks: int, script: str, *options: str, **environment: str) -> str:
    """As torchrun runs it, in a fraction of the time."""
    outcomes = scripts("torch", "lightning", "accelerate", "transformers").run(
        ranks, str(ROOT / script), *options, **environment
    )
    assert all(each.code == 0 for each in outcomes), outcomes
    return "".join(each.output for each in outcomes)


def check_traffic(output: str, parameters: int) -> None:
    found = re.findall(r"(\d+) entries, (\d+) bytes", output)
    assert found, output
    entries, sent = map(int, found[-1])
    assert 0.002 * parameters < entries < 0.03 * parameters
    assert entries < sent < parameters


def run_alone(*command: str) -> str:
    """A program that starts its ranks itself, whose lines come whole."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    ended = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=inherited,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.long
def test_torchrun_starts_ranks_again_from_what_they_saved(tmp_path: Path) -> None:
    script = "python/tests/elastic_restart.py"
    folders = {each: tmp_path / each for each in ("whole", "killed")}
    for folder in folders.values():
        folder.mkdir()
    run(2, script, str(folders["whole"]))
    # It forks its ranks, which need not import torch then.
    torchrun = ["--standalone", "--start-method=fork", "--run-path", "--nproc-per-node=2"]
    # Else both tries have one store, and Gloo may find the addresses of the first in the second.
    run(
        1,
        torch.distributed.run.__file__,
        *[*torchrun, "--max-restarts=1", str(ROOT / script), str(folders["killed"])],
        TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
    )
    whole, killed = (
        [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]
        for folder in folders.values()
    )
    assert [each["started"] for each in whole] == [0, 0]
    assert [each["started"] for each in killed] == [10, 10]
    assert [each["ended"] for each in whole + killed] == 4 * [18]
    assert len({each["norm"] for each in whole + killed}) == 1


@pytest.mark.parametrize(
    "name",
    # Its two parts are others, each by itself.
    [
        pytest.param(each, marks=pytest.mark.long) if each == "lightning_fsdp" else each
        for each in EXAMPLES
    ],
)
def test_only_what_matters_travels(name: str) -> None:
    ranks, parameters = EXAMPLES[name]
    check_traffic(run(ranks, f"examples/{name}.py"), parameters)


def test_every_rank_keeps_what_it_owes_beside_lightnings_checkpoints(tmp_path: Path) -> None:
    run(2, "python/tests/lightning_resume.py", str(tmp_path))
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    for seen in ranks:
        assert seen["start"] == 0
        assert seen["resumed"] == seen["saved"] > 0
    assert ranks[0]["saved"] != ranks[1]["saved"]
    folders = [each.name for each in tmp_path.glob("*.topreduce")]
    assert folders == ["epoch=2.ckpt.topreduce"], "those of older ones are gone"
    files = sorted((tmp_path / folders[0]).iterdir())
    for rank, file in enumerate(files):
        tensors = [key for key in StateFile(file) if "/owed/" in key]
        assert tensors and all(key.startswith(f"rank{rank}/") for key in tensors)
    whole = torch.load(tmp_path / "epoch=2.ckpt", weights_only=False)
    assert "owed" not in str(whole.keys()) + str(whole["callbacks"].keys())
    step = whole["topreduce"]["step"]
    assert [file.name for file in files] == [Place(rank, 2).file(step) for rank in range(2)]


def test_the_trainer_resumes_what_each_rank_owes(tmp_path: Path) -> None:
    run(2, "python/tests/transformers_resume.py", str(tmp_path))
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    for seen in ranks:
        assert seen["start"] == 0
        assert seen["resumed"] == seen["saved"] > 0
    assert ranks[0]["saved"] != ranks[1]["saved"]
    files = (tmp_path / "checkpoint-8").glob("topreduce-*")
    assert sorted(file.name for file in files) == [Place(r, 2).file(8) for r in range(2)]


def test_a_run_survives_a_rank_that_is_killed_and_takes_a_new_one() -> None:
    output = run_alone("examples/torch_survive.py")
    assert "3 ranks go on from step" in output
    assert re.search(r"3 ranks .*, 0 joined, 1 lost \(they owed about", output)
    assert re.search(r"4 ranks go on from step \d+: \d were late, 1 joined", output)
    assert "one, two, four, five have the same parameters" in output


@pytest.mark.long
def test_a_quorum_of_torchft_loses_a_replica_and_gets_it_back() -> None:
    pytest.importorskip("torchft")
    output = run_alone("examples/torchft_quorum.py")
    assert re.search(r"is killed\n(?:step.*\n)*2 replicas go on from step", output)
    assert re.search(r"started again\n(?:step.*\n)*3 replicas go on from step", output)
    assert "have the same parameters" in output
