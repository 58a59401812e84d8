"""Gradients that attach() keeps while they are on their way: nobody can tell afterwards."""

import time

import pytest
import torch
from models import Run, adapter_of, owed
from models import attach_at_once as attach
from processes import Rank, group
from torch import Tensor

SETTINGS = {"granularity": "bucket", "density": 0.05, "bucket_cap_mb": 0.01}


def keep_or_not(rank: Rank, dtype: torch.dtype) -> None:
    """Bit for bit the same, whether gradients are new, views of a bucket, or kept by the user."""
    runs = [Run(rank, dtype), Run(rank, dtype, gradient_as_bucket_view=True), Run(rank, dtype)]
    syncs = [attach(run.ddp, **SETTINGS) for run in runs]
    for step in range(5):
        for run in runs:
            run.train(range(step, step + 1))
        runs[2].ddp.zero_grad(set_to_none=False)
        runs[2].optimizer = no_zeroing(runs[2].optimizer)
    kept = [len(adapter_of(sync)._taker.kept) for sync in syncs]
    assert kept[0] > 5
    assert kept[1:] == [0, 0]
    assert len({run.digest() for run in runs}) == 1
    for sync in syncs[1:]:
        assert torch.equal(owed(syncs[0]), owed(sync))


def no_zeroing(optimizer: torch.optim.SGD) -> torch.optim.SGD:
    optimizer.zero_grad = lambda: None  # type: ignore[method-assign, assignment, misc]
    return optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_kept_changes_no_bit(dtype: torch.dtype) -> None:
    group(2).run(keep_or_not, dtype)


def cut_short(rank: Rank) -> None:
    """The user's code raises when most gradients are exchanged, and debts are up to date."""
    run = Run(rank)
    sync = attach(run.ddp, **SETTINGS)
    run.train(range(4))
    debt = owed(sync)

    def fail(gradient: Tensor) -> Tensor:
        time.sleep(0.5)
        raise KeyError("the user's")

    run.ddp.module.tokens.weight.register_hook(fail)
    settled = sync.stats()["step"]
    with pytest.raises(KeyError):
        run.backward(4)
    run.ddp.zero_grad(set_to_none=False)
    assert torch.equal(owed(sync), debt)
    assert sync.stats()["step"] == settled
    assert all(p.grad is None or p.grad.count_nonzero() == 0 for p in run.ddp.parameters())


def test_a_pass_that_is_cut_short_leaves_what_is_owed() -> None:
    group(2).run(cut_short)
