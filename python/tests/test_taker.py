"""Gradients that are taken before DDP's buckets are full: that they are, and are the right ones."""

import copy
import gc
import io
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Run, adapter_of, attach_at_once, owed, rank_order_sum, text
from processes import Rank, group
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from topreduce.torch import CommError, Sync

TOPK = {"method": "topk", "density": 0.05}
WIDTH = 16


class Stack(nn.Module):
    """Layers, the first of which is used twice; `wrap` says how a layer is called."""

    def __init__(self, wrap: Callable[..., Tensor] = lambda layer, x: layer(x)) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self._wrap = wrap

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.layers[0], *self.layers):
            x = torch.tanh(self._wrap(layer, x))
        return x.square().mean()


def reentrant(layer: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(layer, x, use_reentrant=True)  # type: ignore[no-any-return]


def data(rank: int, step: int) -> Tensor:
    rng = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, WIDTH, generator=rng)


def gradients(model: nn.Module) -> list[Tensor]:
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]


Make = Callable[[], DistributedDataParallel]
Backward = Callable[[DistributedDataParallel, int], None]


def compare(make: Make, backward: Backward, steps: int = 5, **settings: Any) -> Sync:
    """With density 1 every step gives what plain DDP gives."""
    plain, ours = make(), make()
    sync = attach_at_once(ours, "topk", density=1.0, **settings)
    for step in range(steps):
        for ddp in (plain, ours):
            ddp.zero_grad()
            backward(ddp, step)
        for mean, expected in zip(gradients(ours), gradients(plain), strict=True):
            torch.testing.assert_close(mean, expected, msg=f"step {step}")
    return sync


def wait_for_worker(sync: Sync) -> None:
    while sync._steps._tasks.brought:  # it takes gradients without a task
        time.sleep(0.001)
    done = threading.Event()
    sync._steps._tasks.put(done.set)
    done.wait()


def watch_exchanges(sync: Sync) -> list[list[int]]:
    """By step: how many messages were sent when each bucket of DDP was full; one for a bucket of
    ours and a peer.
    """
    adapter, seen = adapter_of(sync), []
    reduce, close, ends = adapter.reduce, sync._steps._close, [sync._comm.messages]

    def look(bucket: Any) -> Any:
        adapter._taker.flush()
        wait_for_worker(sync)
        if bucket.index() == 0:
            seen.append([])
        seen[-1].append(sync._comm.messages - ends[-1])
        return reduce(bucket)

    def closed(*arguments: Any) -> None:
        close(*arguments)
        ends.append(sync._comm.messages)

    adapter.reduce = look  # type: ignore[method-assign]
    sync._steps._close = closed  # type: ignore[method-assign]
    return seen


# ---- that they are taken early -----------------------------------------------------------------


def overlap(rank: Rank, dtype: torch.dtype, options: dict[str, Any]) -> None:
    run = Run(rank, dtype=dtype, **options)  # one bucket of DDP
    sync = attach_at_once(run.ddp, **TOPK)
    seen = watch_exchanges(sync)
    run.train(range(5))
    buckets = len(sync._reducer.buckets)
    assert buckets > 8
    assert seen[0] == [0]  # what comes when, is learnt
    assert [len(step) for step in seen] == [1] * 5
    for step in seen[2:]:
        assert step == [buckets]  # all of them, when DDP had filled its bucket
    assert all(0 <= step["hidden"] <= 1 for step in sync.history())
    sync.configure(granularity="model")
    run.train(range(5, 7))
    assert seen[-1] == [0]
    assert sync.stats()["hidden"] < 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
def test_exchanges_start_before_a_bucket_is_full(dtype: torch.dtype, views: bool) -> None:
    group(2).run(overlap, dtype, {"gradient_as_bucket_view": views})


def go_without_tasks(rank: Rank, dtype: torch.dtype) -> int:
    run = Run(rank, dtype=dtype)
    sync = attach_at_once(run.ddp, **TOPK)
    run.train(range(2))
    steps, tasks = sync._steps, []
    hand_over = steps.hand_over

    def count(step: Any, task: Callable[[], None]) -> None:
        tasks.append(task)
        time.sleep(0.05)  # until the worker has begun the step
        hand_over(step, task)
        time.sleep(0.05)

    steps.hand_over = count  # type: ignore[method-assign]
    run.train(range(2, 3))
    return len(tasks)


def test_gradients_in_fp32_need_no_python_of_the_worker() -> None:
    """But the first ones of a step, which begin it, and the hook of DDP's bucket."""
    assert group(2).run(go_without_tasks, torch.float32) == [2, 2]
    assert min(group(2).run(go_without_tasks, torch.bfloat16)) > 8


class Backwards(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for layer in reversed(self.layers):
            x = torch.tanh(layer(x))
        return x.sum()


def follow_the_backward_pass(rank: Rank) -> list[list[int]]:
    """Registered in the order in which the backward pass comes to them: not the usual one."""
    ddp = DistributedDataParallel(Backwards())
    sync = attach_at_once(ddp, **TOPK)
    assert sync._reducer.buckets == [[6, 7], [4, 5], [2, 3], [0, 1]]
    for step in range(3):
        ddp(data(rank.rank, step)).backward()
    order: list[list[int]] = sync._reducer.buckets
    return order


def test_buckets_follow_the_backward_pass() -> None:
    for buckets in group(2).run(follow_the_backward_pass):
        assert buckets == [[0, 1], [2, 3], [4, 5], [6, 7]]


# ---- parameters that are called several times --------------------------------------------------


def call_several_times(rank: Rank, options: dict[str, Any]) -> None:
    sync = compare(
        lambda: DistributedDataParallel(Stack(reentrant), **options),
        lambda ddp, step: ddp(data(rank.rank, step).requires_grad_()).backward(),
    )
    assert set(adapter_of(sync)._taker._calls) == {1, 2}


@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
def test_reentrant_checkpoints(views: bool) -> None:
    options = {"static_graph": True, "gradient_as_bucket_view": views}
    group(2).run(call_several_times, options)


def call_another_number_of_times(rank: Rank) -> None:
    """Learnt once; later the count differs: it is taken when DDP says so, for good."""
    ddp = DistributedDataParallel(Stack())
    sync = attach_at_once(ddp, "topk", density=1.0)
    taker = adapter_of(sync)._taker
    for step in range(5):
        if step == 2:
            taker._calls[0] = 2  # as if it had been called twice
        ddp.zero_grad()
        alone = copy.deepcopy(ddp.module)
        alone(data(rank.rank, step)).backward()
        ddp(data(rank.rank, step)).backward()
        for mean, mine in zip(gradients(ddp), gradients(alone), strict=True):
            assert torch.equal(mean, rank_order_sum(mine) / rank.ranks)
        assert taker._calls[0] == (1 if step < 2 else -1)


def test_another_number_of_calls() -> None:
    group(2).run(call_another_number_of_times)


# ---- gradients that change after they were taken -----------------------------------------------


class Tampering:
    """Changes a gradient between its accumulation and DDP, by a hook that nobody can see."""

    def __init__(self, module: nn.Module) -> None:
        self.on = False
        self._parameter = module.layers[2].weight
        self._node = self._parameter.view_as(self._parameter).grad_fn.next_functions[0][0]
        self._node.register_hook(self._tamper)

    def _tamper(self, *_: object) -> None:
        if self.on:
            self._parameter.grad.mul_(2)


def tamper_from_the_first_step(rank: Rank) -> None:
    def make() -> DistributedDataParallel:
        module = Stack()
        module.tampering = Tampering(module)
        module.tampering.on = True
        return DistributedDataParallel(module)

    sync = compare(make, lambda ddp, step: ddp(data(rank.rank, step)).backward())
    assert adapter_of(sync)._taker._calls.count(-1) == 1


def tamper_later(rank: Rank) -> str:
    module = Stack()
    tampering = Tampering(module)
    ddp = DistributedDataParallel(module)
    sync = attach_at_once(ddp, **TOPK)
    for step in range(3):
        ddp(data(rank.rank, step)).backward()
    debt = owed(sync)
    tampering.on = rank.rank == 1
    with pytest.raises(ValueError if rank.rank == 1 else CommError) as failure:
        ddp(data(rank.rank, 3)).backward()
    assert all(gradient.count_nonzero() == 0 for gradient in gradients(ddp))
    assert torch.equal(owed(sync), debt)
    tampering.on = False
    sync.detach()
    ddp(data(rank.rank, 4)).backward()
    return str(failure.value)


def test_a_gradient_that_changes_later_is_never_averaged_in_silence() -> None:
    group(2).run(tamper_from_the_first_step)
    for message in group(2).run(tamper_later):
        assert "the gradient of layers.2.weight changed after it was taken" in message


def change_by_hooks(rank: Rank, when: str) -> None:
    """As people clip or scale gradients one by one."""
    hooked = []

    def clamp(parameter: nn.Parameter) -> None:
        parameter.grad.clamp_(-0.001, 0.001)

    def hook(ddp: DistributedDataParallel) -> None:
        hooked.append(ddp)
        for weight in (ddp.module.layers[1].weight, ddp.module.layers[3].bias):
            weight.register_post_accumulate_grad_hook(clamp)
        ddp.module.layers[2].weight.register_hook(lambda gradient: gradient * 3)

    def make() -> DistributedDataParallel:
        ddp = DistributedDataParallel(Stack())
        if when == "before":
            hook(ddp)
        return ddp

    def backward(ddp: DistributedDataParallel, step: int) -> None:
        if when == "later" and step == 2:
            hook(ddp)
        ddp(data(rank.rank, step)).backward()

    compare(make, backward)
    assert len(hooked) == 2


@pytest.mark.parametrize("when", ["before", "later"])
def test_hooks_of_users(when: str) -> None:
    group(2).run(change_by_hooks, when)


# ---- passes that are not averaged, and passes that are cut short --------------------------------


def odd_passes(rank: Rank) -> None:
    def backward(ddp: DistributedDataParallel, step: int) -> None:
        with ddp.no_sync():
            silent = ddp(data(rank.rank, step))
        silent.backward()  # what counts is where the forward pass was
        loud = ddp(data(rank.rank, 10 + step))
        with ddp.no_sync():
            loud.backward()
        if rank.rank == 1:  # nothing that the others need to hear of
            again = ddp.module(data(rank.rank, 20 + step))
            again.backward()
            with torch.no_grad():
                ddp.module(data(rank.rank, step))
        both = ddp(data(rank.rank, 30 + step)) + ddp(data(rank.rank, 40 + step))
        both.backward()

    compare(lambda: DistributedDataParallel(Stack()), backward)


def twice_through_one_graph(rank: Rank) -> None:
    """The second time DDP averages nothing; one rank alone does it."""

    def backward(ddp: DistributedDataParallel, step: int) -> None:
        loss = ddp(data(rank.rank, step))
        loss.backward(retain_graph=True)
        if rank.rank == 0:
            loss.backward()

    compare(lambda: DistributedDataParallel(Stack()), backward)


def test_passes_that_are_not_averaged() -> None:
    group(2).run(odd_passes)
    group(2).run(twice_through_one_graph)


def cut_short(rank: Rank, caps: dict[str, Any]) -> None:
    """In the middle: DDP goes on in a new wrapper. Before the first gradient: in the old one."""
    run, undisturbed = Run(rank, **caps), Run(rank, **caps)
    sync, twin = (attach_at_once(each.ddp, **TOPK) for each in (run, undisturbed))
    undisturbed.train(range(6))
    run.train(range(3))

    def interrupt(_: Tensor) -> None:
        raise KeyboardInterrupt

    loss = run.ddp(text(rank.rank, 3))
    loss.register_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        loss.backward()
    run.train(range(3, 4))

    handle = run.ddp.module.places.weight.register_hook(interrupt)  # among the last
    with pytest.raises(KeyboardInterrupt):
        run.backward(4)
    handle.remove()
    assert len(adapter_of(sync)._taker._taken) > 10
    state = sync.state_dict()
    sync.detach()
    run.ddp = DistributedDataParallel(run.ddp.module, **caps)
    sync = attach_at_once(run.ddp, **TOPK)
    sync.load_state_dict(state)
    run.train(range(4, 6))
    assert run.digest() == undisturbed.digest()
    assert torch.equal(owed(sync), owed(twin))


@pytest.mark.parametrize("caps", [{}, {"bucket_cap_mb": 0.02}], ids=str)
def test_a_pass_that_was_cut_short(caps: dict[str, Any]) -> None:
    group(2).run(cut_short, caps)


# ---- other kinds of models ---------------------------------------------------------------------


class Picture(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 2, 3))
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def other_models(rank: Rank) -> None:
    def picture(ddp: DistributedDataParallel, step: int) -> None:
        torch.manual_seed(10 * step + rank.rank)
        ddp(torch.randn(2, 3, 8, 8)).square().mean().backward()

    compare(lambda: DistributedDataParallel(Picture()), picture)

    # DDP inside of what is compiled.
    plain, ours = (DistributedDataParallel(Stack()) for _ in range(2))
    compiled = [torch.compile(ddp, backend="eager") for ddp in (plain, ours)]
    attach_at_once(ours, "topk", density=1.0)
    for step in range(4):
        for model in compiled:
            model.zero_grad()
            model(data(rank.rank, step)).backward()
        for mean, expected in zip(gradients(ours), gradients(plain), strict=True):
            torch.testing.assert_close(mean, expected)


def test_other_models() -> None:
    group(2).run(other_models)


# ---- hooks come and go -------------------------------------------------------------------------


def hooks_of(ddp: DistributedDataParallel) -> int:
    return sum(len(p._post_accumulate_grad_hooks or ()) for p in ddp.parameters())


def come_and_go(rank: Rank) -> None:
    run = Run(rank)
    sync = attach_at_once(run.ddp, **TOPK)
    run.train(range(3))
    count = len(list(run.ddp.parameters()))
    assert hooks_of(run.ddp) == count
    for kind in (copy.deepcopy, through_a_file):
        for model in (run.ddp, run.ddp.module):
            twin = kind(model)
            calls = len(sync.history())
            twin(text(rank.rank, 0)).backward()
            assert len(sync.history()) == calls
    sync.detach()
    assert hooks_of(run.ddp) == 0 and not run.ddp._forward_hooks

    sync = attach_at_once(run.ddp, **TOPK)
    assert hooks_of(run.ddp) == count
    # Wrapped anew, without detach: the old hooks go with the old wrapper.
    module = run.ddp.module
    del sync
    run.ddp = DistributedDataParallel(module)
    gc.collect()
    assert hooks_of(run.ddp) == 0
    sync = attach_at_once(run.ddp, **TOPK)
    seen = watch_exchanges(sync)
    run.train(range(3, 6))
    assert seen[-1] == [len(sync._reducer.buckets)]


def through_a_file(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_hooks_come_and_go() -> None:
    group(2).run(come_and_go)


def hold_nobody_up(rank: Rank) -> None:
    """A parameter with a hook of its own is waited for, and the others go on."""
    run = Run(rank)
    run.ddp.module.head.weight.register_post_accumulate_grad_hook(lambda p: None)
    sync = attach_at_once(run.ddp, **TOPK)
    seen = watch_exchanges(sync)
    run.train(range(4))
    late = next(i for i, b in enumerate(sync._reducer.buckets) if 0 in b)
    assert late == len(sync._reducer.buckets) - 1  # it comes when DDP's bucket is full
    assert seen[-1] == [late]
    dist.barrier()


def test_a_parameter_that_is_late_holds_up_its_own_bucket() -> None:
    group(2).run(hold_nobody_up)


# ---- gradients that are not what they seem -------------------------------------------------------


class Signs(nn.Module):
    """Autograd leaves a gradient whose sign is still to be turned: its memory has the other one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.turned = nn.Parameter(torch.full((1,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        turned = torch.complex(torch.ones(1), self.turned).conj() * torch.tensor([1 + 3j])
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return turned.real.sum() + x.sum()


def take_a_turned_sign(rank: Rank) -> None:
    alone = Signs()
    alone(torch.ones(2, 8)).backward()
    assert alone.turned.grad is not None and alone.turned.grad.is_neg()
    ddp = DistributedDataParallel(Signs())
    attach_at_once(ddp, "topk", density=1, granularity="bucket", bucket_cap_mb=0)
    for _ in range(4):
        ddp.zero_grad()
        ddp(torch.ones(2, 8)).backward()
        assert ddp.module.turned.grad.item() == alone.turned.grad.item()


def test_a_gradient_whose_sign_is_to_be_turned() -> None:
    group(2).run(take_a_turned_sign)


class Mixed(Stack):
    """Two types of parameters: DDP has a bucket for each, also in its first pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].to(torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layers[0](x.double())).float()
        for layer in self.layers[1:]:
            x = torch.tanh(layer(x))
        return x.sum()


def step_a_static_graph(rank: Rank, static: bool) -> None:
    ddp = DistributedDataParallel(Mixed(), static_graph=static)
    sync = attach_at_once(ddp, "topk", density=1, values="fp32", granularity="bucket")
    for step in range(3):
        ddp.zero_grad()
        ddp(data(rank.rank, step)).backward()
        alone = [Mixed() for _ in range(2)]
        for other, model in enumerate(alone):
            model.load_state_dict(ddp.module.state_dict())
            model(data(other, step)).backward()
        for mean, *parts in zip(
            *(model.parameters() for model in (ddp.module, *alone)), strict=True
        ):
            expected = (parts[0].grad + parts[1].grad) / 2
            torch.testing.assert_close(mean.grad, expected, check_dtype=False)
    assert sync.stats()["step"] == 2


@pytest.mark.parametrize("static", [False, True])
def test_static_graphs_with_several_buckets_in_the_first_pass(static: bool) -> None:
    group(2).run(step_a_static_graph, static)
