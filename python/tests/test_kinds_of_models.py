"""Models in bf16 at low density, and models that inductor has compiled."""

import contextlib
import os
import shutil
from pathlib import Path
from unittest import mock

import models
import pytest
import torch
from accelerators import by_torch, on_device
from models import Dictated, Run, attach_at_once, digest, owed, rank_order_sum, small_integers
from processes import Rank, accelerated, group
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

# ---- bf16 --------------------------------------------------------------------------------------


def keep_the_law_in_bf16(rank: Rank, foreign: bool) -> None:
    """What the ranks settle, exactly, is what all of them get, rounded once."""
    with on_device() if foreign else contextlib.nullcontext():
        model = Dictated([torch.bfloat16]).to(models.place)
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.002)
        sync = attach_at_once(ddp, "topk", density=0.01, values="fp32")
    assert sync._reducer.on_device == foreign
    for step in range(8):
        ddp.zero_grad()
        gradients = small_integers(ddp.module, rank.rank, step)
        before = owed(sync)
        ddp(gradients).backward()
        settled = before + torch.cat([g.flatten() for g in gradients]).float().cpu() - owed(sync)
        mean = torch.cat([w.grad.flatten() for w in ddp.module.weights]).cpu()
        assert mean.dtype == torch.bfloat16
        assert torch.equal(mean, (rank_order_sum(settled) / rank.ranks).bfloat16())
        assert 0 < sync.stats()["selected"] <= 3 * sync.stats()["budget"] < 0.05 * mean.numel()
    assert owed(sync).count_nonzero() > 0.5 * mean.numel()


@pytest.mark.parametrize("foreign", [False, True], ids=["main memory", "device"])
def test_bf16_at_one_percent_keeps_the_law(foreign: bool) -> None:
    (accelerated if foreign else group)(3).run(keep_the_law_in_bf16, foreign)


def train_in_bf16(rank: Rank) -> tuple[str, list[float]]:
    """As people do, by the core and by torch operations: the same."""
    runs, debts = [], []
    for how in (contextlib.nullcontext(), by_torch()):
        run = Run(rank, dtype=torch.bfloat16)
        with how:
            sync = attach_at_once(run.ddp, "topk", density=0.01, warmup_steps=3, ramp_steps=5)
        run.train(range(40))
        assert sync.stats()["density"] == 0.01
        debts.append(digest(owed(sync)))
        runs.append(run)
    assert runs[0].digest() == runs[1].digest()
    assert debts[0] == debts[1]
    return runs[0].digest(), runs[0].losses


def test_bf16_at_one_percent_learns() -> None:
    digests, losses = zip(*group(2).run(train_in_bf16), strict=True)
    assert len(set(digests)) == 1
    assert all(sum(each[-5:]) < 0.9 * sum(each[:5]) for each in losses)


# ---- inductor ----------------------------------------------------------------------------------


class Small(nn.Module):
    """One kernel each way: a compiler takes seconds for each."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 600).reshape(20, 30))

    def forward(self, x: Tensor) -> Tensor:
        return (x[:, :, None] * self.weight).tanh().sum()


def keep_the_law_compiled(rank: Rank, folder: str) -> None:
    """On rank 0; one that did not compile its model works with it."""
    plain = Small()
    ddp = DistributedDataParallel(Small() if rank.rank else torch.compile(Small()))
    sync = attach_at_once(ddp, "topk", density=0.05)
    with (
        mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder),
        # In this process, without headers for the many kernels of other models, and without vector
        # instructions, each kind of which it would try by a compilation.
        torch._inductor.config.patch(
            {"compile_threads": 1, "cpp_cache_precompile_headers": False, "cpp.vec_isa_ok": False}
        ),
    ):
        for step in range(4):
            x = torch.randn(8, 20, generator=torch.Generator().manual_seed(10 * step + rank.rank))
            before, alone, mean = owed(sync), gradient_of(plain, x), gradient_of(ddp, x)
            total = rank_order_sum(before + alone - owed(sync)) / rank.ranks
            torch.testing.assert_close(total, mean, rtol=1e-4, atol=1e-6)
            assert 0 < mean.count_nonzero() < 0.5 * mean.numel()
    if rank.rank == 0:
        assert list(Path(folder).rglob("*.so")), "inductor made machine code"


def gradient_of(model: nn.Module, x: Tensor) -> Tensor:
    model.zero_grad()
    model(x).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_a_model_that_inductor_compiled(tmp_path: Path) -> None:
    group(2).run(keep_the_law_compiled, str(tmp_path), seconds=300)
