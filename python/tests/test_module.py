"""A module without DistributedDataParallel: averaged as DDP would, whatever its loop looks like."""

import contextlib
import copy
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from accelerators import by_copy, by_torch, on_device
from models import (
    GPT,
    attach_at_once,
    digest,
    flat,
    made_at_home,
    owed,
    rank_order_sum,
    text,
)
from processes import Rank, accelerated, group
from scenarios import Branches, data
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import topreduce.torch
from topreduce.torch import CommError, Sync

TOPK = {"method": "topk", "density": 0.05}
Backward = Callable[[nn.Module, Sync | None, int], None]


def attach(module: nn.Module, *arguments: Any, **settings: Any) -> Sync:
    return attach_at_once(module, *arguments, group=dist.group.WORLD, **settings)


def compare(make: Callable[[], nn.Module], backward: Backward, steps: int = 4) -> Sync:
    """At density 1 every gradient is that of DDP."""
    plain = DistributedDataParallel(make(), find_unused_parameters=True)
    ours = make()
    sync = attach(ours, "topk", density=1.0)
    for step in range(steps):
        for model, handle in ((plain, None), (ours, sync)):
            model.zero_grad()
            backward(model, handle, step)
        pairs = zip(ours.named_parameters(), plain.module.parameters(), strict=True)
        for (name, mine), theirs in pairs:
            assert (mine.grad is None) == (theirs.grad is None), (step, name)
            if mine.grad is not None:
                rounds = mine.dtype == torch.bfloat16  # DDP's sums do, ours do not
                near = {"rtol": 0.02, "atol": 1e-3} if rounds else {}
                torch.testing.assert_close(
                    mine.grad, theirs.grad, msg=f"step {step}, {name}", **near
                )
    assert sync.stats()["step"] == steps - 1
    return sync


# ---- equal to DDP ------------------------------------------------------------------------------


def equal_ddp(rank: Rank) -> None:
    def once(model: nn.Module, sync: Sync | None, step: int) -> None:
        model(text(rank.rank, step)).backward()

    for dtype in (torch.float32, torch.bfloat16):
        sync = compare(lambda dtype=dtype: GPT().to(dtype), once)
        sync.detach()

    def some(model: nn.Module, sync: Sync | None, step: int) -> None:
        """`left` by rank 0 alone in odd steps, `right` by nobody in every third."""
        branches = "left " * (step % 2 == 0 or rank.rank == 0) + "right" * (step % 3 != 1)
        model(data(rank.rank, step), branches).backward()

    compare(Branches, some, steps=7)

    def accumulate(model: nn.Module, sync: Sync | None, step: int) -> None:
        """`left` is used only in passes that are held."""
        with sync.hold() if sync else model.no_sync():
            model(data(rank.rank, step, 1), "left").backward()
        model(data(rank.rank, step), "right" * (step % 2 == 0)).backward()

    compare(Branches, accumulate)

    # The handle of a DDP model has it too.
    plain, ours = (DistributedDataParallel(GPT()) for _ in range(2))
    sync = attach_at_once(ours, "topk", density=1.0)
    for model, silence in ((plain, plain.no_sync), (ours, sync.hold)):
        with silence():
            model(text(rank.rank, 0)).backward()
        model(text(rank.rank, 1)).backward()
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)

    def channels_last() -> nn.Module:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 2, 3))
        return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def picture(model: nn.Module, sync: Sync | None, step: int) -> None:
        torch.manual_seed(10 * step + rank.rank)
        model(torch.randn(2, 3, 8, 8)).square().mean().backward()

    compare(channels_last, picture)


def test_equals_ddp() -> None:
    group(2).run(equal_ddp)
    group(3).run(equal_ddp)


class Parts(Branches):
    """Used by its parts, as in reinforcement learning: nobody calls the module itself."""

    def value(self, x: Tensor) -> Tensor:
        return self.left(self.trunk(x)).square().mean()

    def policy(self, x: Tensor) -> Tensor:
        return self.right(self.trunk(x)).tanh().mean()


def other_loops(rank: Rank) -> None:
    """What DDP has no words for: against the mean of what each rank has alone."""

    def check(ours: nn.Module, backward: Callable[[nn.Module, int], None]) -> None:
        sync = attach(ours, "topk", density=1.0)
        for step in range(3):
            alone = copy.deepcopy(ours)
            for model in (alone, ours):
                model.zero_grad()
                backward(model, step)
            for mean, own in zip(ours.parameters(), alone.parameters(), strict=True):
                if own.grad is None:
                    assert mean.grad is None
                else:
                    expected = rank_order_sum(own.grad) / rank.ranks
                    torch.testing.assert_close(mean.grad, expected, msg=f"step {step}")
        sync.detach()

    def in_parts(model: nn.Module, step: int) -> None:
        model.value(data(rank.rank, step)).backward()
        model.policy(data(rank.rank, step, 1)).backward()

    check(Parts(), in_parts)

    def reentrant(model: nn.Module, step: int) -> None:
        x = data(rank.rank, step).requires_grad_()
        y = checkpoint(
            model.trunk, checkpoint(model.trunk, x, use_reentrant=True), use_reentrant=True
        )
        model.left(y).square().mean().backward()

    check(Parts(), reentrant)

    class Checkpointed(Branches):
        def forward(self, x: Tensor, branches: str = "") -> dict[str, list[Tensor]]:
            y = checkpoint(self.trunk, x, use_reentrant=True)
            return {"losses": [self.left(y).square().mean(), self.right(y).square().mean()]}

    def nested(model: nn.Module, step: int) -> None:
        first, second = model(data(rank.rank, step).requires_grad_())["losses"]
        (first + second).backward()

    check(Checkpointed(), nested)

    def twice(model: nn.Module, step: int) -> None:
        (model(data(rank.rank, step)) + model(data(rank.rank, step, 1))).backward()

    check(Branches(), twice)

    torch.manual_seed(1)
    layers = nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12))
    sync = attach(layers, "topk", density=1.0)
    compiled = torch.compile(layers, backend="aot_eager", fullgraph=True)
    for step in range(3):
        layers.zero_grad()
        alone = copy.deepcopy(layers)
        alone(data(rank.rank, step)).square().mean().backward()
        compiled(data(rank.rank, step)).square().mean().backward()
        for mean, own in zip(layers.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mean.grad, rank_order_sum(own.grad) / rank.ranks)
    assert sync.stats()["step"] == 2


def test_other_loops() -> None:
    group(2).run(other_loops)


# ---- the laws ----------------------------------------------------------------------------------


def keep_the_laws(rank: Rank) -> None:
    """Settled by the ranks is what everyone applies; replicas stay equal; overlap is there."""
    model = GPT()
    sync = attach(model, **TOPK)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(30):
        alone, before = copy.deepcopy(model), owed(sync)
        alone.zero_grad()
        alone(text(rank.rank, step)).backward()
        optimizer.zero_grad()
        loss = model(text(rank.rank, step))
        loss.backward()
        losses.append(loss.item())
        if step < 5:
            own, mean = (flat(each, lambda p: p.grad) for each in (alone, model))
            settled = before.double() + own.double() - owed(sync).double()
            applied = mean.double() * rank.ranks
            torch.testing.assert_close(rank_order_sum(settled), applied, rtol=1e-4, atol=1e-6)
        optimizer.step()
    assert losses[-1] < losses[0] - 0.5
    assert sync.stats()["budget"] < 0.06 * sync.stats()["entries"]
    everyone: list[Any] = [None] * rank.ranks
    dist.all_gather_object(everyone, digest(flat(model, lambda p: p.detach())))
    assert len(set(everyone)) == 1


def taken_early(rank: Rank) -> None:
    """Gradients are on their way before the backward pass ends."""
    model = GPT()
    sync = attach(model, **TOPK)
    sent: list[int] = []
    # The embedding's gradient is the last of the pass.
    for step in range(4):
        before = sync._comm.messages

        def look(gradient: Tensor, before: int = before) -> None:
            done = threading.Event()
            sync._steps._tasks.put(done.set)
            done.wait()
            sent.append(sync._comm.messages - before)

        x = model.tokens(text(rank.rank, step)[:, :-1])
        x.register_hook(look)
        handle = model.tokens.register_forward_hook(lambda *_, x=x: x)
        model(text(rank.rank, step)).backward()
        handle.remove()
    assert sent[0] == 0 and sent[-1] > 5, sent


def test_keeps_the_laws() -> None:
    group(2).run(keep_the_laws)
    group(2).run(taken_early)


# ---- weights, errors, detach -------------------------------------------------------------------


def one_start(rank: Rank) -> None:
    """Parameters and buffers of rank 0, on all; frozen ones too."""
    torch.manual_seed(rank.rank)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    model[0].bias.requires_grad_(False)
    model[1].running_mean += rank.rank
    if rank.rank:
        model[1].num_batches_tracked += 7
    attach(model)
    for tensor in (*model.parameters(), *model.buffers()):
        first = tensor.detach().clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, tensor)
    assert model[1].num_batches_tracked == 0
    torch.manual_seed(0)
    assert torch.equal(model[0].weight, nn.Linear(3, 3).weight)


def cut_short(rank: Rank) -> None:
    """A backward pass that user code ends in the middle leaves no trace."""
    model, twin = GPT(), GPT()
    sync, other = attach(model, **TOPK), attach(twin, **TOPK)
    for step in range(5):
        if step == 3:

            def interrupt(_: Tensor) -> None:
                raise KeyboardInterrupt

            handle = model.places.weight.register_hook(interrupt)  # among the last
            with pytest.raises(KeyboardInterrupt):
                model(text(rank.rank, 9)).backward()
            handle.remove()
            sync.state_dict()
        for each in (model, twin):
            each.zero_grad()
            each(text(rank.rank, step)).backward()
    assert torch.equal(*(flat(each, lambda p: p.grad) for each in (model, twin)))
    assert torch.equal(owed(sync), owed(other))


def fail(rank: Rank) -> str:
    """A rank that leaves: the others' backward() raises, gradients are zero; detach goes on."""
    model = GPT()
    sync = attach(model, **TOPK)
    model(text(rank.rank, 0)).backward()
    debt = owed(sync)
    if rank.rank == 1:
        sync._comm.close("had enough")
    message = ""
    with pytest.raises(CommError) as failure:
        model(text(rank.rank, 1)).backward()
    message = str(failure.value)
    assert flat(model, lambda p: p.grad).count_nonzero() == 0
    assert torch.equal(owed(sync), debt)
    with pytest.raises(CommError):
        model(text(rank.rank, 1)).backward()
    sync.detach()
    alone = copy.deepcopy(model)
    for each in (alone, model):
        each.zero_grad()
        each(text(rank.rank, 2)).backward()
    for mean, own in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mean.grad, rank_order_sum(own.grad) / rank.ranks)
    with sync.hold():
        model(text(rank.rank, 2)).backward()
    model.zero_grad()
    sync = attach(model, **TOPK)
    with pytest.warns(RuntimeWarning, match="the model was attached before"):
        model(text(rank.rank, 3)).backward()
    assert sync.stats()["step"] == 0
    return message


def dense_with_unused(rank: Rank) -> None:
    model = Branches()
    attach(model).detach()
    alone = copy.deepcopy(model)
    for each in (model, alone):
        each(data(rank.rank, 0), "left" * (rank.rank > 0)).backward()
    assert model.right.weight.grad is None
    mine = torch.zeros_like(alone.left.weight) if not rank.rank else alone.left.weight.grad
    torch.testing.assert_close(model.left.weight.grad, rank_order_sum(mine) / rank.ranks)


def not_finite(rank: Rank) -> None:
    model = GPT()
    sync = attach(model, **TOPK)
    model(text(rank.rank, 0)).backward()
    debt = owed(sync)
    model.zero_grad()
    (model(text(rank.rank, 1)) * (float("inf") if rank.rank == 1 else 1)).backward()
    assert flat(model, lambda p: p.grad).isnan().all()
    assert torch.equal(owed(sync), debt)
    assert not sync.stats()["finite"]


def come_and_go(rank: Rank) -> None:
    """A model takes its hooks and its worker with it; copies are not attached."""
    model = GPT()
    sync = attach(model, **TOPK)
    twin = copy.deepcopy(model)
    twin(text(rank.rank, 0)).backward()
    assert not sync.history()
    steps = weakref.ref(sync._steps)
    del sync
    model(text(rank.rank, 0)).backward()  # the model keeps what it needs
    assert steps() is not None and len(steps().history) == 1
    del model
    gc.collect()
    assert steps() is None
    dist.barrier()


def test_weights_errors_and_detach() -> None:
    for case in (one_start, cut_short, not_finite, dense_with_unused, come_and_go):
        group(3).run(case)
    for message in group(2).run(fail):
        assert "rank 1" in message, message


def on_a_device(rank: Rank) -> None:
    """The same bits as by way of main memory."""
    with on_device():
        found = [train_briefly(rank, how, torch.float32) for how in (by_copy(), NOTHING)]
    found += [train_briefly(rank, how, torch.bfloat16) for how in (NOTHING, by_torch())]
    assert [there for there, _ in found] == [False, True] * 2
    assert found[0][1] == found[1][1]
    assert found[2][1] == found[3][1]


NOTHING = contextlib.nullcontext()


def train_briefly(rank: Rank, how: Any, dtype: torch.dtype) -> tuple[bool, str]:
    """Whether gradients are on a device, and what they come to."""
    model = made_at_home(dtype)
    with how:
        sync = attach(model, "topk", density=0.05)
    for step in range(3):
        model.zero_grad()
        model(text(rank.rank, step).to(models.place)).backward()
    sync.detach()
    return sync._reducer.on_device, digest(flat(model, lambda p: p.grad))


def test_gradients_on_a_device() -> None:
    accelerated(2).run(on_a_device)


# ---- refusals ----------------------------------------------------------------------------------


def refuse(rank: Rank) -> None:
    world = dist.group.WORLD
    ddp = DistributedDataParallel(nn.Linear(2, 2))
    hooked = nn.Linear(2, 2)
    hooked.weight.register_post_accumulate_grad_hook(lambda p: None)
    for model, options, error, words in (
        (nn.Linear(2, 2), {}, TypeError, r"group=torch\.distributed\.group\.WORLD"),
        (
            nn.Linear(2, 2),
            {"group": "all"},
            TypeError,
            "group must be a process group or Ranks, not str",
        ),
        (ddp, {"group": world}, ValueError, "its own process group"),
        (nn.Sequential(ddp), {"group": world}, ValueError, "0 is a DistributedDataParallel, which"),
        (hooked, {"group": world}, ValueError, "weight has a post-accumulate hook.*optimizer"),
        (nn.Linear(2, 2, device="meta"), {"group": world}, ValueError, "meta device"),
        (
            nn.Linear(2, 2),
            {"group": world, "local_group": "host"},
            ValueError,
            "local_group is for",
        ),
    ):
        with pytest.raises(error, match=words):
            topreduce.torch.attach(model, **options)

    model = nn.Linear(2, 2)
    sync = attach(model)
    with pytest.raises(ValueError, match="attached already"):
        attach(model)
    model.weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(ValueError, match="weight has a post-accumulate hook"):
        model(torch.ones(1, 2)).sum().backward()
    sync.detach()

    model = nn.Linear(2, 2)
    attach(model)
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    with pytest.raises(ValueError, match="weight is another parameter than at attach"):
        model(torch.ones(1, 2)).sum().backward()

    # An optimizer in the backward pass, the way of torch.distributed.
    stepped = nn.Linear(2, 2)
    _apply_optimizer_in_backward(torch.optim.SGD, stepped.parameters(), {"lr": 0.1})
    with pytest.raises(ValueError, match="optimizer in it would let the ranks drift"):
        attach(stepped)

    # Parameters that another attached module holds.
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = first.weight
    attach(first)
    for other in (second, nn.Sequential(first)):
        with pytest.raises(ValueError, match="weight is averaged already"):
            attach(other)

    # Buffers and frozen parameters that differ.
    other = nn.Linear(2, 2)
    other.bias = nn.Parameter(torch.zeros(2 + rank.rank), requires_grad=False)
    with pytest.raises(ValueError, match=r"rank 0 has bias float32 \(2,\), rank 1 has bias"):
        attach(other)
    other = nn.Linear(2, 2)
    if rank.rank == 1:
        other.register_buffer("seen", torch.zeros(1))
    with pytest.raises(ValueError, match="rank 0 has none, rank 1 has seen float32"):
        attach(other)

    # A rank outside of the group; the next attach() does not hear of it.
    alone = dist.new_group([0])
    if rank.rank == 1:
        with pytest.raises(ValueError, match="this rank is not in the group"):
            topreduce.torch.attach(nn.Linear(2, 2), group=alone)
    attach(nn.Linear(2, 2))

    # One rank alone: the others are told.
    with pytest.raises(ValueError, match="post-accumulate"):
        attach(hooked if rank.rank == 1 else nn.Linear(2, 2))


def test_refusals() -> None:
    group(2).run(refuse)
