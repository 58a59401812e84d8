"""The examples for other front doors, run against the real packages: our exchange really runs."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
FORKED, FOUR = (
    ["python/tests/ranks.py", ranks] for ranks in "24"
)  # as torchrun starts ranks, in a third of the time


def run(*command: str) -> str:
    ended = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.parametrize(
    ("name", "launcher", "parameters"),
    [
        ("torch_ddp", TORCHRUN, 19210),
        ("torch_module", [*FORKED, "torch"], 19210),
        ("torch_fsdp", [*FOUR, "torch"], 19210),
        ("lightning_fsdp", [*FOUR, "lightning"], 19210),
        ("accelerate_loop", [*FORKED, "accelerate"], 19210),
        ("lightning_strategy", [*FORKED, "lightning"], 19210),
        ("transformers_trainer", [*FORKED, "transformers"], 35658),
    ],
)
def test_only_what_matters_travels(name: str, launcher: list[str], parameters: int) -> None:
    output = run(*launcher, f"examples/{name}.py")
    found = re.findall(r"(\d+) entries, (\d+) bytes", output)
    assert found, output
    entries, sent = map(int, found[-1])
    assert 0.002 * parameters < entries < 0.03 * parameters
    assert entries < sent < parameters


def test_every_rank_keeps_what_it_owes_beside_lightnings_checkpoints(tmp_path: Path) -> None:
    run(*FORKED, "lightning", "python/tests/lightning_resume.py", str(tmp_path))
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    for seen in ranks:
        assert seen["start"] == 0
        assert seen["resumed"] == seen["saved"] > 0
    assert ranks[0]["saved"] != ranks[1]["saved"]
    beside = sorted(file.name for file in tmp_path.glob("*.ckpt.*"))
    assert beside == ["epoch=2.ckpt.rank0", "epoch=2.ckpt.rank1"], "those of older ones are gone"
    for rank, file in enumerate(beside):
        state = torch.load(tmp_path / file, weights_only=True)
        tensors = {key for key, value in state.items() if isinstance(value, torch.Tensor)}
        assert tensors and all(key.startswith(f"rank{rank}/") for key in tensors)
    whole = torch.load(tmp_path / "epoch=2.ckpt", weights_only=False)
    assert "owed" not in str(whole.keys()) + str(whole["callbacks"].keys())
