"""Checkpoints of attached models: bit-exact, by rank, for another number of ranks."""

import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models import Run, attach_at_once, digest, owed, rank_order_sum
from processes import Rank, group
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import topreduce.torch

SETTINGS: list[dict[str, Any]] = [
    {"method": "topk", "density": 0.01},
    {"method": "ok_topk", "density": 0.01, "granularity": "model"},
    {"method": "arc_topk", "density": 0.1, "feedback": "ef21"},
]
every_method = pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: s["method"])
CAP = {"bucket_cap_mb": 0.03}


def start(rank: Rank, settings: dict[str, Any]) -> tuple[Run, topreduce.torch.Sync]:
    run = Run(rank, **CAP)
    return run, attach_at_once(run.ddp, **settings)


def parts(run: Run, sync: topreduce.torch.Sync) -> dict[str, Any]:
    """A checkpoint as people write it; the handle saves and loads itself."""
    model = {"model": run.ddp.module.state_dict(), "optimizer": run.optimizer.state_dict()}
    return {**model, "sync": sync}


# ---- torch.distributed.checkpoint --------------------------------------------------------------


def through_dcp(rank: Rank, settings: dict[str, Any], folder: str, early: bool) -> None:
    whole, whole_sync = start(rank, settings)
    whole.train(range(12))
    first, first_sync = start(rank, settings)
    first.train(range(0 if early else 7))
    dcp.save(parts(first, first_sync), checkpoint_id=folder)

    second, second_sync = start(rank, settings)
    if not early:  # a step that moves nothing makes the optimizer's state, for dcp to load into
        for parameter in second.ddp.parameters():
            parameter.grad = torch.zeros_like(parameter)
        second.optimizer.step()
    checkpoint = parts(second, second_sync)
    if early:
        checkpoint.pop("optimizer")  # nothing was saved of it
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dcp.load(checkpoint, checkpoint_id=folder)
        second.ddp.module.load_state_dict(checkpoint["model"])
        if not early:
            second.optimizer.load_state_dict(checkpoint["optimizer"])
        second.train(range(0 if early else 7, 12))
    assert second.digest() == whole.digest()
    assert digest(state(second_sync)) == digest(state(whole_sync))


def state(sync: topreduce.torch.Sync) -> torch.Tensor:
    tensors = [v for v in sync.state_dict().values() if isinstance(v, torch.Tensor)]
    return torch.cat([tensor.flatten() for tensor in tensors])


@pytest.mark.parametrize("early", [True, False], ids=["right after attach", "later"])
@every_method
def test_distributed_checkpoint_is_exact(
    settings: dict[str, Any], early: bool, tmp_path: Path
) -> None:
    group(3).run(through_dcp, settings, str(tmp_path), early)


# ---- another number of ranks -------------------------------------------------------------------


def carry_on(rank: Rank, settings: dict[str, Any], folder: str, number: int) -> Any:
    """Trains a while, from what the ranks of the run before left in `folder`."""
    run, sync = start(rank, settings)
    before = Path(folder) / f"{number - 1}"
    if number > 0:
        model = torch.load(before / "model.pt", weights_only=True)
        saved = [torch.load(file, weights_only=True) for file in before.glob("rank*.pt")]
        run.ddp.module.load_state_dict(model)
        with pytest.raises(ValueError, match=r"saved by \d ranks.*topreduce\.torch\.reshard"):
            sync.load_state_dict(saved[0])
        sync.load_state_dict(topreduce.torch.reshard(saved, rank.ranks)[rank.rank])
    arrived = mean_owed(sync)
    run.train(range(8 * number, 8 * number + 8))
    here = Path(folder) / f"{number}"
    here.mkdir(exist_ok=True)
    torch.save(sync.state_dict(), here / f"rank{rank.rank}.pt")
    if rank.rank == 0:
        torch.save(run.ddp.module.state_dict(), here / "model.pt")
    dist.barrier()
    return arrived.numpy(), mean_owed(sync).numpy(), run.digest(), sync.stats()["step"]


def mean_owed(sync: topreduce.torch.Sync) -> torch.Tensor:
    return rank_order_sum(state(sync).double()) / dist.get_world_size()


@every_method
def test_from_four_ranks_to_two_to_three(settings: dict[str, Any], tmp_path: Path) -> None:
    left = None
    for number, ranks in enumerate((4, 2, 3)):
        results = group(ranks).run(carry_on, settings, str(tmp_path), number)
        assert len({model for _, _, model, _ in results}) == 1
        assert {step for *_, step in results} == {8 * number + 7}
        if left is not None:
            assert results[0][0] == pytest.approx(left, rel=1e-5, abs=1e-7)
            assert abs(left).max() > 0
        left = results[0][1]


def make_states(rank: Rank, folder: str) -> dict[str, Any]:
    run, sync = start(rank, SETTINGS[0])
    run.train(range(3))
    dcp.save({"sync": sync}, checkpoint_id=folder)
    return sync.state_dict()


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(torch.as_tensor(a[k]), torch.as_tensor(b[k]))
        for k in a
        if not isinstance(a[k], str)
    )


def test_reshard(tmp_path: Path) -> None:
    states = group(3).run(make_states, str(tmp_path))
    reshard = topreduce.torch.reshard
    for again, before in zip(reshard(states, 3), states, strict=True):
        assert same(again, before)
    # One file of torch.distributed.checkpoint holds all ranks.
    with tempfile.NamedTemporaryFile() as file:
        dcp_to_torch_save(tmp_path, file.name)
        merged = torch.load(file.name, weights_only=True)["sync"]
    for ranks in (1, 2, 5):
        for a, b in zip(reshard(merged, ranks), reshard(reversed(states), ranks), strict=True):
            assert same(a, b)
    key = "owed/head.weight" if "rank0/owed/head.weight" in states[0] else "owed/tokens.weight"
    old = [s[f"rank{r}/{key}"].double() for r, s in enumerate(states)]
    (one,) = reshard(states, 1)
    torch.testing.assert_close(one[f"rank0/{key}"].double(), sum(old) / 3)
    two = reshard(states, 2)
    torch.testing.assert_close(two[0][f"rank0/{key}"].double(), (2 * old[0] + old[1]) / 3)
    assert two[1]["ranks"] == 2
    assert two[1]["rank1/step"] == 3

    for wrong, message in (
        (states[:2], "state of rank 2 is missing"),
        ([], "format is None"),
        ([{**states[0], "settings/density": "0.5"}, *states[1:]], "density is 0.5 and 0.01"),
        ([{**states[0], "rank0/step": 2.0}, *states[1:]], r"step is 2\.0 on rank 0 and 3\.0"),
        ([{**states[0], "rank0/more": 2.0}, *states[1:]], "differs from rank 0 in more"),
        ([{**states[0], f"rank0/{key}": torch.zeros(3)}, *states[1:]], "another shape on rank"),
        ([*states, {**states[1], f"rank1/{key}": old[1] + 1}], f"two states of rank1.*in {key}"),
        ([{**states[0], "rank0/step": 2.0}, *states], "two states of rank0.*in step"),
    ):
        with pytest.raises(ValueError, match=message):
            reshard(wrong, 2)
    with pytest.raises(ValueError, match="at least 1"):
        reshard(states, 0)


# ---- a model without its debts -----------------------------------------------------------------


def forget(rank: Rank) -> None:
    run, sync = start(rank, SETTINGS[0])
    run.train(range(2))
    model, debts = run.ddp.state_dict(), sync.state_dict()

    def steps_that_warn(number: int) -> int:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run.train(range(2, 2 + number))
        return sum("what its ranks still owed was not" in str(each.message) for each in caught)

    assert steps_that_warn(2) == 0
    run.ddp.load_state_dict(model)
    assert steps_that_warn(2) == 1
    run.ddp.load_state_dict(model)
    sync.load_state_dict(debts)
    assert steps_that_warn(2) == 0
    sync.load_state_dict(debts)
    run.ddp.load_state_dict(model)
    assert steps_that_warn(2) == 0

    sync.detach()
    run.ddp.load_state_dict(model)
    again = attach_at_once(run.ddp, **SETTINGS[0])
    assert steps_that_warn(2) == 1
    again.detach()
    again = attach_at_once(run.ddp, **SETTINGS[0])
    again.load_state_dict(debts)
    assert steps_that_warn(2) == 0
    assert owed(again).count_nonzero() > 0


def test_a_model_that_comes_without_its_debts_is_reported() -> None:
    group(2).run(forget)


# ---- older versions ----------------------------------------------------------------------------


def load_first_version(rank: Rank, method: str, settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    sync = attach_at_once(ddp, method, density=0.1, **settings)
    saved = torch.load(Path(__file__).parent / "golden" / f"0.1_{method}_rank{rank.rank}.pt")
    sync.load_state_dict(saved)
    state = sync.state_dict()
    own = [key for key in saved if key.startswith(f"rank{rank.rank}/")]
    assert own and all(torch.equal(*map(torch.as_tensor, (saved[k], state[k]))) for k in own)
    for _ in range(2):
        ddp(torch.ones(4, 6)).square().mean().backward()
    assert sync.state_dict()[f"rank{rank.rank}/step"] == saved[f"rank{rank.rank}/step"] + 2


@pytest.mark.parametrize("method", ["topk", "ok_topk", "arc_topk", "gaussiank"])
def test_states_of_the_first_version(method: str) -> None:
    """Saved in November 2026 by version 0.1 as it was then, after five steps of two ranks."""
    feedback = {"feedback": "ef21m"} if method == "arc_topk" else {}
    group(2).run(load_first_version, method, feedback)
