"""attach() on real DDP models, in real processes over Gloo."""

import copy
import gc
import io
import re
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from models import (
    Dictated,
    Run,
    adapter_of,
    attach_at_once,
    digest,
    flat,
    home,
    owed,
    rank_order_sum,
    small_integers,
    text,
)
from processes import Rank, group
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.nn.parallel import DistributedDataParallel
from torch.utils.tensorboard import SummaryWriter

import topreduce.torch
from topreduce.torch import steps

SPARSE = {
    "topk, model": ("topk", {"granularity": "model"}),
    "topk, bucket": ("topk", {"granularity": "bucket"}),
    "randk": ("randk", {}),
}
METHODS = {**SPARSE, "dense": ("dense", {})}
both_sizes = pytest.mark.parametrize("ranks", [2, 3])
every_method = pytest.mark.parametrize("name", METHODS)
every_sparse = pytest.mark.parametrize("name", SPARSE)


def attach(ddp: DistributedDataParallel, name: str, **settings: Any) -> topreduce.torch.Sync:
    method, own = METHODS[name]
    return attach_at_once(ddp, method, **own, **settings)


# ---- density 1 is plain DDP --------------------------------------------------------------------


def train_whole(rank: Rank, name: str, density: float | None) -> tuple[list[float], list[float]]:
    run, plain = Run(rank), Run(rank)
    attach(run.ddp, name, density=density)
    for step in range(12):
        alone = run.local_gradient(step)
        run.backward(step)
        # fp32 sums at any other place or in any other order differ in the last bits.
        assert torch.equal(run.mean_gradient(), rank_order_sum(alone) / rank.ranks)
        run.optimizer.step()
    plain.train(range(12))
    return run.losses, plain.losses


@both_sizes
@every_method
def test_density_one_is_plain_ddp(ranks: int, name: str) -> None:
    for ours, plain in group(ranks).run(train_whole, name, None if name == "dense" else 1.0):
        assert ours == pytest.approx(plain, rel=1e-4)


def train_with_options(rank: Rank, options: dict[str, Any]) -> tuple[list[float], list[float]]:
    run, plain = Run(rank, **options), Run(rank, **options)
    attach(run.ddp, "topk, bucket", density=1.0)
    for each in (run, plain):
        each.train(range(3))
        if not options.get("static_graph"):
            with each.ddp.no_sync():
                each.backward(3)
            each.ddp(text(rank.rank, 4)).backward()  # on top of what step 3 left
            each.optimizer.step()
        each.train(range(5, 8))
    return run.losses, plain.losses


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_as_bucket_view": True},
        {"find_unused_parameters": True},
        {"bucket_cap_mb": 0.01},
        {"static_graph": True, "bucket_cap_mb": 0.01},
    ],
    ids=str,
)
def test_ddp_options(options: dict[str, Any]) -> None:
    for ours, plain in group(2).run(train_with_options, options):
        assert ours == pytest.approx(plain, rel=1e-4)


def mixed_types(rank: Rank) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    ddp = DistributedDataParallel(Dictated(dtypes).to(home()))
    attach(ddp, "topk, bucket", density=1.0)
    for step in range(3):
        ddp.zero_grad()
        everyone = [small_integers(ddp.module, other, step) for other in range(rank.ranks)]
        ddp(everyone[rank.rank]).backward()
        for weight, *gradients in zip(ddp.module.weights, *everyone, strict=True):
            mean = sum(g.float() for g in gradients) / rank.ranks
            assert weight.grad.dtype == weight.dtype
            assert torch.equal(weight.grad, mean.to(weight.dtype))


@both_sizes
def test_parameters_of_other_types_go_through_fp32(ranks: int) -> None:
    group(ranks).run(mixed_types)


def train_unevenly(rank: Rank) -> tuple[str, Any, Any, int]:
    run, plain = Run(rank, bucket_cap_mb=0.02), Run(rank, bucket_cap_mb=0.02)
    sync = attach(run.ddp, "topk, bucket", density=1.0)
    for each in (run, plain):
        with each.ddp.join():
            each.train(range(3 + 2 * rank.rank))
    models = [flat(each.ddp.module, lambda p: p.detach()).numpy() for each in (run, plain)]
    return run.digest(), *models, len(sync.history())


def test_a_rank_that_has_joined_early_takes_part() -> None:
    (first, ours, plain, steps), (second, *_) = group(2).run(train_unevenly)
    assert first == second
    assert ours == pytest.approx(plain, abs=1e-5)
    assert steps == 5


# ---- the laws ----------------------------------------------------------------------------------


def keep_the_laws_exactly(rank: Rank, name: str) -> None:
    ddp = DistributedDataParallel(Dictated(), bucket_cap_mb=0.002)
    sync = attach(ddp, name, density=0.05, values="fp32")
    for step in range(8):
        ddp.zero_grad()
        gradients = small_integers(ddp.module, rank.rank, step)
        before = owed(sync)
        ddp(gradients).backward()
        after = owed(sync)
        settled = before + torch.cat([g.flatten() for g in gradients]) - after
        mean = torch.cat([w.grad.flatten() for w in ddp.module.weights])
        assert torch.equal(mean, rank_order_sum(settled) / rank.ranks)
        assert ((settled == 0) | (after == 0)).all()  # sent whole, or not at all
        stats = sync.stats()
        assert 0 < settled.count_nonzero() <= stats["selected"] <= 3 * stats["budget"]
        if name != "topk, bucket":
            assert stats["selected"] == stats["budget"] == round(0.05 * after.numel())


@both_sizes
@every_sparse
def test_laws_exactly(ranks: int, name: str) -> None:
    group(ranks).run(keep_the_laws_exactly, name)


def keep_the_laws_in_training(rank: Rank, name: str) -> None:
    run = Run(rank, bucket_cap_mb=0.02)
    sync = attach(run.ddp, name, density=0.01)
    for step in range(10):
        alone, before = run.local_gradient(step), owed(sync)
        run.backward(step)
        settled = before.double() + alone.double() - owed(sync).double()
        applied = run.mean_gradient().double() * rank.ranks
        torch.testing.assert_close(rank_order_sum(settled), applied, rtol=1e-5, atol=1e-6)
        assert applied.count_nonzero() > 0
        run.optimizer.step()


@both_sizes
@every_sparse
def test_laws_in_training(ranks: int, name: str) -> None:
    group(ranks).run(keep_the_laws_in_training, name)


def train_fifty(rank: Rank, name: str) -> tuple[str, list[float], dict[str, Any], int]:
    run = Run(rank)
    sync = attach(run.ddp, name, density=None if name == "dense" else 0.01)
    run.train(range(50))
    return run.digest(), run.losses, sync.stats(), len(sync.history())


@both_sizes
@every_method
def test_replicas_stay_identical(ranks: int, name: str) -> None:
    digests, losses, stats, lengths = zip(*group(ranks).run(train_fifty, name), strict=True)
    assert len(set(digests)) == 1
    assert all(sum(each[-5:]) < sum(each[:5]) for each in losses)
    assert set(lengths) == {50}
    if name != "dense":
        dense_bytes = 8 * stats[0]["entries"] * (ranks - 1) / ranks
        assert all(0 < each["bytes_sent"] < dense_bytes / 5 for each in stats)


# ---- buckets -----------------------------------------------------------------------------------


def train_with_cap(rank: Rank, name: str, cap: float) -> tuple[str, str, list[int]]:
    run = Run(rank, bucket_cap_mb=cap)
    sync = attach(run.ddp, name, density=0.02)
    adapter, cuts = adapter_of(sync), [0]
    reduce = adapter.reduce

    def count(bucket: Any) -> Any:
        cuts[-1] += 1
        if bucket.is_last():
            cuts.append(0)
        return reduce(bucket)

    adapter.reduce = count  # type: ignore[method-assign]
    run.train(range(6))
    return run.digest(), digest(owed(sync)), cuts[:-1]


@both_sizes
@every_sparse
def test_bucket_cut_does_not_matter(ranks: int, name: str) -> None:
    results = {cap: group(ranks).run(train_with_cap, name, cap) for cap in (25, 0.03, 0.0001)}
    assert len({model for ranks_ in results.values() for model, _, _ in ranks_}) == 1
    for rank in range(ranks):
        assert len({results[cap][rank][1] for cap in results}) == 1
    cuts = {cap: results[cap][0][2] for cap in results}
    assert cuts[25] == [1] * 6
    assert cuts[0.03][0] == 1 and cuts[0.03][1] > 2, "DDP cuts anew after the first step"
    assert cuts[0.0001][1] > 20


# ---- checkpoints -------------------------------------------------------------------------------


def interrupted(rank: Rank, name: str, settings: dict[str, Any]) -> None:
    whole = Run(rank, bucket_cap_mb=0.03)
    whole_sync = attach(whole.ddp, name, **settings)
    whole.train(range(20))

    first = Run(rank, bucket_cap_mb=0.03)
    first_sync = attach(first.ddp, name, **settings)
    first.train(range(10))
    file = io.BytesIO()
    parts = (first.ddp.module.state_dict(), first.optimizer.state_dict(), first_sync.state_dict())
    torch.save(parts, file)

    def second(with_debt: bool) -> tuple[str, str]:
        file.seek(0)
        model, optimizer, state = torch.load(file, weights_only=True)
        run = Run(rank, bucket_cap_mb=0.03)
        run.ddp.module.load_state_dict(model)
        run.optimizer.load_state_dict(optimizer)
        sync = attach(run.ddp, name, **settings)
        if with_debt:
            sync.load_state_dict(state)
        run.train(range(10, 20))
        return run.digest(), digest(owed(sync))

    assert second(with_debt=True) == (whole.digest(), digest(owed(whole_sync)))
    assert second(with_debt=False) != (whole.digest(), digest(owed(whole_sync)))


@every_sparse
def test_resume_is_exact(name: str) -> None:
    group(3).run(interrupted, name, {"density": 0.01})


def test_resume_inside_a_ramp_is_exact() -> None:
    ramp = {"density": 0.01, "warmup_steps": 4, "ramp_steps": 12}
    group(3).run(interrupted, "topk, bucket", ramp)


def cut_short(rank: Rank, name: str) -> None:
    run = Run(rank, bucket_cap_mb=0.02)
    sync = attach(run.ddp, name, density=0.01)
    run.train(range(3))
    before = sync.state_dict()

    def stop(_: torch.Tensor) -> None:
        raise KeyboardInterrupt

    run.ddp.module.places.weight.register_hook(stop)  # among the last to get its gradient
    with pytest.raises(KeyboardInterrupt):
        run.backward(3)
    after = sync.state_dict()
    assert after.keys() == before.keys()
    assert all(
        torch.equal(torch.as_tensor(after[k]), torch.as_tensor(before[k]))
        for k in before
        if not k.startswith(("settings", "texts"))
    )
    assert after["texts/choices"] == before["texts/choices"]
    sync.detach()


@every_sparse
def test_a_checkpoint_after_a_backward_that_was_cut_short(name: str) -> None:
    group(2).run(cut_short, name)


class Conv(torch.nn.Conv2d):
    """A weight that is not stored in the order of its shape."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__(3, 4, 5)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def keep_the_law_in_another_memory_order(rank: Rank) -> None:
    ddp = DistributedDataParallel(Conv())
    assert not ddp.module.weight.is_contiguous()
    sync = attach(ddp, "topk, model", density=0.1)
    torch.manual_seed(rank.rank)
    image = torch.randint(-2, 3, (1, 3, 9, 9)).float()
    alone = Conv()
    alone(image).sum().backward()
    ddp(image).sum().backward()
    debt = sync.state_dict()[f"rank{rank.rank}/owed/weight"]
    assert debt.shape == (4, 5, 5, 3)
    settled = alone.weight.grad - debt.permute(0, 3, 1, 2)
    assert settled.count_nonzero() > 0
    assert torch.equal(ddp.module.weight.grad, rank_order_sum(settled.contiguous()) / rank.ranks)


def test_channels_last() -> None:
    group(2).run(keep_the_law_in_another_memory_order)


# ---- warm-up and ramp --------------------------------------------------------------------------


def warm_up(rank: Rank) -> list[float]:
    run, dense = Run(rank), Run(rank)
    sync = attach(
        run.ddp, "topk, model", density=0.001, values="fp32", warmup_steps=3, ramp_steps=4
    )
    attach(dense.ddp, "dense")
    for step in range(5):
        run.train(range(step, step + 1))
        dense.train(range(step, step + 1))
        assert (run.digest() == dense.digest()) == (step < 3)
    run.train(range(5, 10))
    return [step["density"] for step in sync.history()]


@both_sizes
def test_warm_up_is_dense_and_the_ramp_geometric(ranks: int) -> None:
    ramp = [0.001 ** (i / 5) for i in range(1, 5)]
    for densities in group(ranks).run(warm_up):
        assert densities == pytest.approx([1, 1, 1, *ramp, 0.001, 0.001, 0.001])


def schedule_by_default(rank: Rank) -> list[float]:
    ddp = DistributedDataParallel(Dictated())
    sync = topreduce.torch.attach(ddp, "topk", density=0.01)
    for step in range(112):
        ddp(small_integers(ddp.module, rank.rank, step)).backward()
    return [step["density"] for step in sync.history()]


def test_a_training_begins_dense_unless_told_otherwise() -> None:
    ramp = [0.01 ** (i / 101) for i in range(1, 101)]
    for densities in group(2).run(schedule_by_default):
        assert densities == pytest.approx([1] * 10 + ramp + [0.01, 0.01])


def schedule_in_the_method(rank: Rank) -> list[float]:
    run = Run(rank)
    sync = topreduce.torch.attach(run.ddp, "topk:density=0.01,warmup_steps=2,ramp_steps=1")
    run.train(range(4))
    return [step["density"] for step in sync.history()]


def test_what_the_method_says_stands() -> None:
    for densities in group(2).run(schedule_in_the_method):
        assert densities == pytest.approx([1, 1, 0.1, 0.01])


# ---- a gradient that is not finite -------------------------------------------------------------


def one_bad_gradient(rank: Rank, name: str, bad: float) -> None:
    ddp = DistributedDataParallel(Dictated(), bucket_cap_mb=0.002)
    sync = attach(ddp, name, density=0.05)
    for step in range(5):
        ddp.zero_grad()
        gradients = small_integers(ddp.module, rank.rank, step)
        before, number = owed(sync), sync.state_dict()[f"rank{rank.rank}/step"]
        if step == 2 and rank.rank == 1:
            gradients[4][17] = bad
        ddp(gradients).backward()
        means = torch.cat([w.grad.flatten() for w in ddp.module.weights])
        if step == 2:
            assert not means.isfinite().any()
            assert torch.equal(owed(sync), before)
            assert sync.state_dict()[f"rank{rank.rank}/step"] == number
            assert sync.stats()["finite"] is False
        else:
            settled = before + torch.cat([g.flatten() for g in gradients]) - owed(sync)
            assert torch.equal(means, rank_order_sum(settled) / rank.ranks)
            assert sync.stats()["finite"] is True


@both_sizes
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@every_sparse
def test_one_bad_gradient_spoils_one_step_everywhere(ranks: int, name: str, bad: float) -> None:
    group(ranks).run(one_bad_gradient, name, bad)


# ---- the handle --------------------------------------------------------------------------------


def change_course(rank: Rank) -> None:
    run = Run(rank)
    sync = attach(run.ddp, "topk, model", density=0.01)
    run.train(range(2))
    assert sync.stats()["density"] == 0.01

    sync.configure(density=0.1, seed=3)
    run.train(range(2, 3))
    assert sync.stats()["density"] == 0.1
    assert sync.stats()["selected"] == round(0.1 * sync.stats()["entries"])

    debt = owed(sync)
    sync.bypass()
    alone = run.local_gradient(3)
    run.backward(3)
    assert torch.equal(run.mean_gradient(), rank_order_sum(alone) / rank.ranks)
    assert torch.equal(owed(sync), debt)
    sync.compress()
    run.train(range(4, 5))
    assert sync.stats()["density"] == 0.1
    assert not torch.equal(owed(sync), debt)

    # Nobody changes anything unless all want the same.
    debt, state = owed(sync), sync.state_dict()
    for changes in (
        {"density": 0.2 if rank.rank else 0.3},
        {"density": 2.0},
        {"density": 0.2} if rank.rank else {"colour": "red"},
        {"colour": "red"},
        {"feedback": "none"},
    ):
        with pytest.raises(ValueError, match=r"density|colour|feedback"):
            sync.configure(**changes)
        assert sync.state_dict().keys() == state.keys()
        assert sync.state_dict()["settings/density"] == "0.1"
    with pytest.raises(ValueError, match=r"rank 0: bypass\(\).*; rank 1: compress\(\)"):
        sync.compress() if rank.rank else sync.bypass()
    assert torch.equal(owed(sync), debt)
    run.train(range(5, 6))
    assert sync.stats()["density"] == 0.1


@both_sizes
def test_changes_are_made_by_all_ranks_or_none(ranks: int) -> None:
    group(ranks).run(change_course)


def detach_and_attach(rank: Rank) -> None:
    run, plain = Run(rank), Run(rank)
    first = attach(run.ddp, "topk, bucket", density=0.01)
    run.train(range(3))
    debt = owed(first)
    first.detach()
    first.detach()  # nothing left to do
    assert "detached" in repr(first)
    assert torch.equal(owed(first), debt)
    with pytest.raises(ValueError, match="detached"):
        first.bypass()

    plain.ddp.module.load_state_dict(run.ddp.module.state_dict())
    for step in range(3, 6):
        run.backward(step)
        plain.backward(step)
        torch.testing.assert_close(run.mean_gradient(), plain.mean_gradient())

    second = attach(run.ddp, "randk", density=0.5)
    with pytest.raises(ValueError, match=r"attached already: detach\(\)"):
        attach(run.ddp, "randk")
    run.train(range(6, 8))
    assert second.stats()["method"] == "randk"
    assert second.stats()["step"] == 1
    assert len(first.history()) == 3


@both_sizes
def test_detach_leaves_plain_ddp(ranks: int) -> None:
    group(ranks).run(detach_and_attach)


def copy_and_attach(rank: Rank) -> None:
    run = Run(rank)
    sync = attach(run.ddp, "topk, bucket")
    run.train(range(2))
    twin = copy.deepcopy(run.ddp)
    torch.save(run.ddp, io.BytesIO())
    twin.zero_grad()
    twin(text(rank.rank, 2)).backward()
    alone = run.local_gradient(2)
    torch.testing.assert_close(flat(twin, lambda p: p.grad), rank_order_sum(alone) / rank.ranks)
    assert len(sync.history()) == 2, "the copy is not attached"
    other = attach(twin, "dense")
    twin(text(rank.rank, 3)).backward()
    assert len(other.history()) == 1


def test_a_copy_of_an_attached_model_is_plain() -> None:
    group(2).run(copy_and_attach)


def look_at_the_handle(rank: Rank) -> str:
    ddp = DistributedDataParallel(Dictated())
    assert steps._HISTORY == 1000
    with mock.patch.multiple(steps, _HISTORY=10):
        sync = attach(ddp, "topk, model", density=0.01)
    assert sync.history() == [] and sync.stats() == sync.scalars() == {}
    sync.log(mock.Mock(spec=[]))  # nothing to write
    assert repr(sync).endswith("step 0; no step yet>")
    for _ in range(15):
        ddp(small_integers(ddp.module, rank.rank, 0)).backward()
    stats, history = sync.stats(), sync.history()
    assert [step["step"] for step in history] == list(range(5, 15))
    assert history[-1] == stats
    assert stats["method"] == "topk"
    assert stats["seconds_waited"] > 0
    listed = re.findall(r"^ +- (`.*?):", topreduce.torch.Sync.stats.__doc__ or "", re.M)
    assert sorted(re.findall(r"`(\w+)`", " ".join(listed))) == sorted(stats)
    assert {type(value) for value in stats.values()} <= {int, float, str, bool, dict}
    history.clear()
    stats.clear()
    assert sync.stats() and sync.history()
    return repr(sync)


def test_stats_history_and_repr() -> None:
    answers = group(2).run(look_at_the_handle)
    assert "topk, density 0.01, rank 0 of 2" in answers[0]
    assert "rank 1 of 2" in answers[1]
    assert "\n" not in answers[0]


class Wide(torch.nn.Module):
    """2 MB, nearly all of it in one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(700, 700), torch.nn.Linear(700, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x)).sum()


def curve(folder: str, tag: str) -> list[tuple[int, float]]:
    """As TensorBoard reads it."""
    events = EventAccumulator(folder).Reload()
    return [(point.step, point.value) for point in events.Scalars(tag)]


def watch(rank: Rank, folder: str) -> None:
    ddp = DistributedDataParallel(Wide(), bucket_cap_mb=0.5)
    sync = attach(ddp, "topk, bucket", density=0.01)
    assert "no step yet" in repr(sync)
    folder = f"{folder}/{rank.rank}"
    with SummaryWriter(folder) as writer:
        for _ in range(3):
            ddp(torch.ones(2, 700)).backward()
            sync.log(writer)
        sync.log(writer, step=77)
    flat = sync.scalars()
    assert flat["topreduce/bytes_sent"] == sync.stats()["bytes_sent"]
    assert flat["topreduce/seconds/network"] == sync.stats()["seconds"]["network"]
    assert all(type(value) is float for value in flat.values())
    assert flat.keys() == set(EventAccumulator(folder).Reload().Tags()["scalars"])
    assert curve(folder, "topreduce/bytes_sent")[2] == (2, sync.stats()["bytes_sent"])
    assert [step for step, _ in curve(folder, "topreduce/seconds/network")] == [0, 1, 2, 77]
    assert curve(folder, "topreduce/density")[3] == (77, pytest.approx(0.01))

    assert len(curve(folder, "topreduce/hidden")) == 4
    assert re.search(r"dense 19\d+ \(9\d\.\d% saved\), waited \d+\.\d+ s>", repr(sync))


def step_with_adam(rank: Rank) -> None:
    """A word about fused Adam, once, where it matters."""
    for size, method, fused, warned in (
        (1100, "topk, bucket", False, 1),
        (1100, "topk, bucket", True, 0),
        (1100, "dense", False, 0),
        (10, "topk, bucket", False, 0),
    ):
        ddp = DistributedDataParallel(torch.nn.Linear(size, 1000))
        sync = attach(ddp, method)
        other = torch.nn.Linear(size, 1000)
        other(torch.ones(1, size)).sum().backward()
        optimizers = [torch.optim.AdamW(each.parameters(), fused=fused) for each in (other, ddp)]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                ddp(torch.ones(1, size)).sum().backward()
                for optimizer in optimizers:
                    optimizer.step()
        about = [str(each.message) for each in caught if "fused=True" in str(each.message)]
        assert len(about) == warned, (size, method, fused, about)
        assert not about or about[0].startswith("on a CPU, AdamW takes about twice as long")
        sync.detach()

    # Several models, whose first steps come while torch walks over its hooks.
    models = [DistributedDataParallel(torch.nn.Linear(1100, 1000)) for _ in range(3)]
    attached = [attach(each, "topk, bucket") for each in models]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for model in models:
            model(torch.ones(1, 1100)).sum().backward()
            torch.optim.AdamW(model.parameters()).step()
    assert sum("fused=True" in str(each.message) for each in caught) == 3
    for sync in attached:
        sync.detach()


def test_a_hint_about_fused_adam() -> None:
    group(2).run(step_with_adam)


def test_curves(tmp_path: Path) -> None:
    group(2).run(watch, str(tmp_path))


def workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "topreduce"]


def come_and_go(rank: Rank) -> None:
    gc.collect()
    before = workers()
    run = Run(rank)
    attach(run.ddp, "topk, bucket")
    run.train(range(2))
    (worker,) = set(workers()) - set(before)
    del run
    gc.collect()
    worker.join(60)
    assert not worker.is_alive()


ENDS_WITHOUT_DETACH = """
import time, torch, torch.distributed as dist, topreduce.torch
from topreduce.torch.steps import Steps
close = Steps._close
def slowly(self, step, receiver):
    close(self, step, receiver)  # from here on backward() and the program go on
    time.sleep(0.5)
    print("worker done", flush=True)
Steps._close = slowly
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
sync = topreduce.torch.attach(model, "topk", density=0.5)
model(torch.ones(1, 4)).sum().backward()
"""


def test_a_program_may_end_without_detach() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", ENDS_WITHOUT_DETACH], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout) == (0, "worker done\n"), ended.stderr


def test_a_forgotten_model_leaves_no_thread() -> None:
    group(2).run(come_and_go)
