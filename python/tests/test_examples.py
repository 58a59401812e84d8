"""The examples for other front doors, run against the real packages: our exchange really runs."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ranks import scripts

ROOT = Path(__file__).parents[2]
EXAMPLES = {
    "torch_module": (2, 19210),
    "torch_fsdp": (4, 19210),
    "lightning_fsdp": (4, 19210),
    "accelerate_loop": (2, 19210),
    "lightning_strategy": (2, 19210),
    "transformers_trainer": (2, 35658),
}


def run(ranks: int, script: str, *options: str) -> str:
    """As torchrun runs it, in a fraction of the time."""
    outcomes = scripts("torch", "lightning", "accelerate", "transformers").run(
        ranks, str(ROOT / script), *options
    )
    assert all(each.code == 0 for each in outcomes), outcomes
    return "".join(each.output for each in outcomes)


def check_traffic(output: str, parameters: int) -> None:
    found = re.findall(r"(\d+) entries, (\d+) bytes", output)
    assert found, output
    entries, sent = map(int, found[-1])
    assert 0.002 * parameters < entries < 0.03 * parameters
    assert entries < sent < parameters


def test_torchrun_itself() -> None:
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    ended = subprocess.run(
        [sys.executable, *torchrun, "examples/torch_ddp.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    check_traffic(ended.stdout, 19210)


@pytest.mark.parametrize("name", EXAMPLES)
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
    beside = sorted(file.name for file in tmp_path.glob("*.ckpt.*"))
    assert beside == ["epoch=2.ckpt.rank0", "epoch=2.ckpt.rank1"], "those of older ones are gone"
    for rank, file in enumerate(beside):
        state = torch.load(tmp_path / file, weights_only=True)
        tensors = {key for key, value in state.items() if isinstance(value, torch.Tensor)}
        assert tensors and all(key.startswith(f"rank{rank}/") for key in tensors)
    whole = torch.load(tmp_path / "epoch=2.ckpt", weights_only=False)
    assert "owed" not in str(whole.keys()) + str(whole["callbacks"].keys())
