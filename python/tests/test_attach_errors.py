"""What attach() and its handle do when something is wrong, in real processes over Gloo."""

import os
import re
import signal
import time
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from models import Dictated, Run, adapter_of, owed, rank_order_sum, small_integers
from models import attach_at_once as attach
from processes import Processes, Rank, group
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from topreduce.torch import CommError, meeting

MODEL = {"granularity": "model", "density": 0.05}
BUCKET = {"granularity": "bucket", "density": 0.05}


# ---- a network that fails ----------------------------------------------------------------------


def break_down(
    rank: Rank, settings: dict[str, Any], healthy: int, options: dict[str, Any]
) -> tuple[str, str]:
    run = Run(rank, bucket_cap_mb=0.02, **options)
    sync = attach(run.ddp, **settings, timeout=timedelta(seconds=50))
    run.train(range(healthy))
    debt = owed(sync)
    if rank.rank == 1:
        some = (rank.ranks - 1) * (settings is BUCKET and healthy > 0)
        sync._comm.fail_at(some, "the cable is cut")
    with pytest.raises(CommError) as failure:
        run.backward(healthy)
    assert "Timed out" not in str(failure.value)
    assert run.mean_gradient().count_nonzero() == 0
    assert torch.equal(owed(sync), debt)

    same = re.escape(str(failure.value))
    with pytest.raises(dist.DistError, match=same) as again:
        run.backward(healthy)
    assert type(again.value) is CommError
    for change in (sync.bypass, lambda: sync.configure(density=0.5)):
        with pytest.raises(CommError, match=same):
            change()
    assert "broken" in repr(sync)

    # DDP goes on by itself, and a new handle takes over what was owed.
    state = sync.state_dict()
    sync.detach()
    run.train(range(healthy, healthy + 2))
    anew = attach(run.ddp, **settings)
    anew.load_state_dict(state)
    assert torch.equal(owed(anew), debt)
    run.train(range(healthy + 2, healthy + 4))
    return str(failure.value), run.digest()


@pytest.mark.parametrize(
    ("ranks", "options"),
    [(2, {"static_graph": True}), (3, {})],
    ids=["2 ranks, static graph", "3 ranks"],
)
@pytest.mark.parametrize("healthy", [0, 3])
@pytest.mark.parametrize("settings", [MODEL, BUCKET], ids=["model", "bucket"])
def test_one_broken_rank_stops_all_at_once(
    ranks: int, settings: dict[str, Any], healthy: int, options: dict[str, Any]
) -> None:
    messages, digests = zip(*group(ranks).run(break_down, settings, healthy, options), strict=True)
    assert len(set(digests)) == 1
    for rank, message in enumerate(messages):
        assert "the cable is cut" in message
        assert "detach()" in message
        if rank != 1:
            # A peer that gave up because of it may be heard first.
            assert re.match(r"(rank \d gave up: )?rank 1 gave up: CommError: ", message), message
            assert f"; noticed by rank {rank} of {ranks}, step {healthy}, " in message


def lose_a_rank(rank: Rank) -> str | None:
    run = Run(rank)
    sync = attach(run.ddp, **BUCKET, timeout=timedelta(seconds=50))
    run.train(range(2))
    debt = owed(sync)
    if rank.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(CommError) as failure:
        run.backward(2)
    assert "Timed out" not in str(failure.value)
    assert torch.equal(owed(sync), debt)
    return str(failure.value)


def test_a_killed_rank() -> None:
    messages = Processes(3).run(lose_a_rank, dying=[1])
    assert messages[1] is None
    assert "rank 1 is gone" in messages[0] and "may have died" in messages[0]
    assert "rank 1 is gone" in messages[2] and "may have died" in messages[2]


def be_busy(rank: Rank) -> str:
    """The last rank comes when the others have given up."""
    run = Run(rank)
    attach(run.ddp, **BUCKET, timeout=timedelta(seconds=2))
    run.train(range(2))
    if rank.rank == rank.ranks - 1:
        dist.barrier()
    with pytest.raises(CommError) as failure:
        run.backward(2)
    if rank.rank < rank.ranks - 1:
        dist.barrier()
    return str(failure.value)


def test_a_silent_rank_is_waited_for_no_longer_than_the_timeout() -> None:
    *waited, late = group(3).run(be_busy)
    for rank, message in enumerate(waited):
        assert re.match(r"rank [012] (is silent|gave up|is gone): ", message)
        assert f"; noticed by rank {rank} of 3, step 2, " in message
        assert "Timed out waiting 2000ms" in message
        assert "rank 2 did not come, and may just be busy, evaluating or saving" in message
        assert "timeout=" in message
    assert "did not come" not in late.partition("gave up")[0]
    assert re.match(r"rank [01] (gave up|is gone): .*; noticed by rank 2 of 3, step 2, ", late)
    assert re.search(r"rank [01] gave up: CommError: .*Timed out", late)


def inherit_the_timeout(rank: Rank) -> None:
    """As long as the process group that DDP uses, unless told otherwise."""
    patient = dist.new_group(range(rank.ranks), timeout=timedelta(minutes=47))
    ddp = DistributedDataParallel(Dictated(), process_group=patient)
    for timeout, expected in ((None, timedelta(minutes=47)), (timedelta(minutes=3),) * 2):
        sync = attach(ddp, timeout=timeout)
        assert sync._comm.timeout == expected
        sync.detach()


def test_the_timeout_is_that_of_the_process_group() -> None:
    group(2).run(inherit_the_timeout)


def make_a_mistake(rank: Rank, settings: dict[str, Any]) -> None:
    run, undisturbed = Run(rank), Run(rank)
    sync, twin = attach(run.ddp, **settings), attach(undisturbed.ddp, **settings)
    undisturbed.train(range(4))
    healthy = 2 if settings is MODEL else 0  # later, gradients are on their way by then
    run.train(range(healthy))
    adapter = adapter_of(sync)
    numbers, adapter._numbers = adapter._numbers, {}
    with pytest.raises(ValueError, match=r"that was not there at attach\(\)"):
        run.backward(healthy)
    assert run.mean_gradient().count_nonzero() == 0
    adapter._numbers = numbers
    run.train(range(healthy, 4))
    assert run.digest() == undisturbed.digest()
    assert torch.equal(owed(sync), owed(twin))


@pytest.mark.parametrize("settings", [MODEL, BUCKET], ids=["model", "bucket"])
def test_a_mistake_before_anything_was_sent_leaves_the_handle_usable(
    settings: dict[str, Any],
) -> None:
    group(2).run(make_a_mistake, settings)


# ---- attach() that is refused ------------------------------------------------------------------


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class DeepSpeedEngine(nn.Module):
    pass


def wrong_models(rank: Rank) -> None:
    ddp = DistributedDataParallel(Dictated())
    for model, advice in (
        (nn.Linear(2, 2), r"not Linear: wrap it first: attach\(DistributedDataParallel\(model\)"),
        (Wrapper(ddp), r"not Wrapper: .* attach\(model\.module, \.\.\.\)"),
        (DeepSpeedEngine(), "not DeepSpeedEngine: it shards its gradients.*or Distributed"),
        (torch.compile(ddp), r"not OptimizedModule: .* attach\(model\._orig_mod, \.\.\.\)"),
        (nn.Linear(2, 2, device="meta"), r"not Linear: it is on the meta device; .*to_empty.*wrap"),
        (3, "not int: pass the model that DistributedDataParallel returned"),
    ):
        with pytest.raises(TypeError, match=advice):
            attach(model)

    hooked = DistributedDataParallel(Dictated())
    hooked.register_comm_hook(None, allreduce_hook)
    with pytest.raises(ValueError, match="already has allreduce_hook: wrap the model in a new"):
        attach(hooked)
    frozen = nn.Linear(2, 2)
    frozen.bias.requires_grad_(False)
    thawed = DistributedDataParallel(frozen)
    frozen.bias.requires_grad_(True)
    with pytest.raises(ValueError, match="bias was frozen when DDP wrapped it"):
        attach(thawed)
    with pytest.raises(ValueError, match=r"weights\.0 is complex"):
        attach(DistributedDataParallel(Dictated([torch.complex64])))
    with pytest.raises(ValueError, match="sparse=False"):
        attach(DistributedDataParallel(nn.Sequential(nn.Embedding(3, 4, sparse=True))))
    for wrong, meant in (
        (ddp.module.weights[3], r"not Parameter: write 'weights\.3'"),
        ([ddp.module.weights], r"not ParameterList: write 'weights\.\*'"),
        ({"*bias"}, r"a list of names and patterns, .*not set$"),
    ):
        with pytest.raises(TypeError, match=meant):
            attach(ddp, keep_dense=wrong)


def test_models_that_cannot_be_attached() -> None:
    group(2).run(wrong_models)


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "density 0": ({"density": 0.0}, r"density.*0"),
    "density above 1": ({"density": 1.5}, r"density.*1\.5"),
    "unknown method": ({"method": "topkk"}, "topkk.*topk"),
    "unknown setting": ({"densty": 0.1}, "densty.*density"),
    "unknown feedback": ({"feedback": "residul"}, "residul.*residual"),
    "a percentage": ({"density": "1%"}, "density=1% must be a share.*: write 0.01"),
    "a percentage in words": ({"method": "topk:density=1%"}, "density=1% must be.*: write 0.01"),
    "keep_dense that fits nothing": ({"keep_dense": ["no.such*"]}, r"no\.such\*"),
    "a part of a name": (
        {"keep_dense": "s.3"},
        r"'s\.3'; did you mean '\*s\.3\*'\? It fits 'weights",
    ),
    "limits of dense": ({"method": "dense", "overhead": 0.1}, "overhead: for density=auto only"),
    "local_group": ({"local_group": "hosts"}, "local_group must be 'host', or the process group"),
    "timeout": ({"timeout": timedelta(0)}, "positive timedelta"),
}


def mistaken(rank: Rank, mistakes: dict[str, Any], message: str) -> None:
    ddp = DistributedDataParallel(Dictated())
    with pytest.raises(ValueError, match=message):
        attach(ddp, **mistakes)
    # The same on rank 1 alone: the others hear of it, and nobody waits.
    others = rf"nothing was changed, on any rank: rank 1 refused: ValueError: [^;]*{message}"
    others += r"(?s:.*)\. Correct that, then make the call again, on all ranks$"
    with pytest.raises(ValueError, match=message if rank.rank == 1 else others):
        attach(ddp, **mistakes if rank.rank == 1 else {})

    sync = attach(ddp, density=0.1)
    ddp(small_integers(ddp.module, rank.rank, 0)).backward()
    assert sync.stats()["step"] == 0


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_on_one_or_all_ranks(mistake: str) -> None:
    group(3).run(mistaken, *MISTAKES[mistake])


class Renamed(Dictated):
    def __init__(self) -> None:
        super().__init__()
        self.others = self.weights
        del self.weights


def differ(rank: Rank, what: str) -> None:
    odd = rank.rank == rank.ranks - 1
    if what == "method":
        expected = r"rank 0: method topk\n.*rank 1: method randk"
        ddp, arguments = DistributedDataParallel(Dictated()), {"method": "randk" if odd else "topk"}
    elif what == "density":
        expected = r"rank 0: density = 0\.1\n.*rank 1: density = 0\.2"
        ddp, arguments = DistributedDataParallel(Dictated()), {"density": 0.2 if odd else 0.1}
    else:
        expected = r"rank 0: parameter weights\.0.*\n.*rank 1: parameter others\.0"
        ddp, arguments = DistributedDataParallel(Renamed() if odd else Dictated()), {}
    with pytest.raises(ValueError, match=expected):
        attach(ddp, **arguments)


@pytest.mark.parametrize("what", ["method", "density", "model"])
def test_ranks_that_differ(what: str) -> None:
    group(2).run(differ, what)


def attach_alone(rank: Rank) -> None:
    ddp = DistributedDataParallel(Dictated())
    for _ in range(2 if rank.rank == 0 else 0):
        words = r"not all ranks .* attach\(\).* within 0:00:01 \(rank 1 did not come, and may"
        with pytest.raises(CommError, match=words):
            attach(ddp, timeout=timedelta(seconds=1))
    dist.barrier()
    attach(ddp)
    ddp(small_integers(ddp.module, rank.rank, 0)).backward()


def test_attach_on_some_ranks_only() -> None:
    group(2).run(attach_alone)


def come_before_the_others(rank: Rank) -> None:
    """Ranks whose time runs out one after the other; who left before is not called absent."""
    ddp = DistributedDataParallel(Dictated())
    for absent in (1, 2):
        dist.barrier()
        if rank.rank != absent:
            time.sleep(0.3 * rank.rank)
            with pytest.raises(CommError, match=rf"\(rank {absent} did not come, and may"):
                attach(ddp, timeout=timedelta(seconds=1.5))
    dist.barrier()
    attach(ddp)
    ddp(small_integers(ddp.module, rank.rank, 0)).backward()


def test_who_left_before_is_not_called_absent() -> None:
    group(3).run(come_before_the_others)


def attach_without_a_store(rank: Rank) -> None:
    def gone(*arguments: Any) -> None:
        raise dist.DistNetworkError("Connection reset by peer")

    ddp = DistributedDataParallel(Dictated())
    words = r"cannot reach the store.*Connection reset by peer"
    with mock.patch.object(meeting, "_next_place", gone), pytest.raises(CommError, match=words):
        attach(ddp)
    attach(ddp)


def test_attach_where_the_store_is_gone() -> None:
    group(2).run(attach_without_a_store)


def attach_to_a_part_of_the_world(rank: Rank) -> None:
    pair = dist.new_group([0, 2])
    if rank.rank == 1:
        return
    ddp = DistributedDataParallel(Dictated(), process_group=pair)
    for _ in range(2):
        sync = attach(ddp, density=1.0)
        ddp.zero_grad()
        everyone = [small_integers(ddp.module, other, 0) for other in (0, 2)]
        ddp(everyone[rank.rank // 2]).backward()
        for weight, first, second in zip(ddp.module.weights, *everyone, strict=True):
            assert torch.equal(weight.grad, (first + second) / 2)
        sync.detach()


def test_attach_to_a_part_of_the_world() -> None:
    group(3).run(attach_to_a_part_of_the_world)


def attach_alone_in_the_world(rank: Rank) -> None:
    alone = [dist.new_group([each]) for each in range(rank.ranks)][rank.rank]
    ddp = DistributedDataParallel(Dictated(), process_group=alone)
    sync = attach(ddp, density=0.05)
    before, gradients = owed(sync), small_integers(ddp.module, rank.rank, 0)
    ddp(gradients).backward()
    settled = before + torch.cat([g.flatten() for g in gradients]) - owed(sync)
    assert torch.equal(torch.cat([w.grad.flatten() for w in ddp.module.weights]), settled)
    assert sync.stats()["bytes_sent"] == 0


def test_one_rank_sends_nothing() -> None:
    group(2).run(attach_alone_in_the_world)


# ---- checkpoints that do not fit ---------------------------------------------------------------


def refuse_states(rank: Rank) -> None:
    ddp = DistributedDataParallel(Dictated())
    sync = attach(ddp, **MODEL)
    ddp(small_integers(ddp.module, rank.rank, 0)).backward()
    good, prefix = sync.state_dict(), f"rank{rank.rank}/"
    weight = f"{prefix}owed/weights.4"
    other = attach(DistributedDataParallel(nn.Linear(2, 2)), **MODEL).state_dict()
    forgetful = attach(DistributedDataParallel(Dictated()), feedback="none", **MODEL).state_dict()
    foreign = attach(DistributedDataParallel(Dictated()), "ok_topk", **MODEL).state_dict()

    def without(key: str) -> dict[str, Any]:
        return {name: value for name, value in good.items() if name != key}

    nan = good[weight].clone()
    nan[3] = float("nan")
    for state, message in (
        ([], "not a state_dict"),
        ({}, "not a state_dict"),
        ({"a": torch.zeros(2)}, "not a state_dict"),
        ({**good, "format": 99}, "format is 99"),
        ({**good, "ranks": 7}, "saved by 7 ranks, but this run has 2"),
        ({k.replace(prefix, "rank9/"): v for k, v in good.items()}, "it is of rank9"),
        (other, r"another model.*missing .*weights\.0.*not known here: bias, weight$"),
        (forgetful, "with feedback='none', but this run has feedback='residual': attach as it"),
        (
            foreign,
            "saved with method='ok_topk', select='reused', exchange='ok_topk', but this run has "
            r"method='topk', select='topk', exchange='gather': attach as it was .* configure\(\)",
        ),
        (without(weight), r"missing weights\.4"),
        (without(f"{prefix}step"), "missing step"),
        (
            {**good, weight: good[weight][:-1]},
            r"weights\.4 is float32 \(699,\), here float32 \(700,",
        ),
        ({**good, weight: good[weight].double()}, r"weights\.4 is float64"),
        ({**good, weight: 3}, r"weights\.4 is a number"),
        ({**good, f"{prefix}step": "two"}, "step is str, here a number"),
        ({**good, weight: nan}, r"infinity or NaN in owed/weights\.4"),
        ({**good, f"{prefix}step": -1.0}, r"step is -1\.0"),
    ):
        with pytest.raises(ValueError, match=message):
            sync.load_state_dict(state)  # type: ignore[arg-type]
        now = sync.state_dict()
        assert all(
            torch.equal(torch.as_tensor(now[k]), torch.as_tensor(good[k]))
            for k in good
            if k.startswith(prefix)
        )

    sync.bypass()
    bypassed = sync.state_dict()
    sync.load_state_dict(good)
    assert sync.state_dict()[f"{prefix}bypassed"] == 0
    sync.load_state_dict(bypassed)
    alone = small_integers(ddp.module, rank.rank, 1)
    ddp.zero_grad()
    ddp(alone).backward()
    mean = torch.cat([w.grad.flatten() for w in ddp.module.weights])
    assert torch.equal(mean, rank_order_sum(torch.cat([g.flatten() for g in alone])) / rank.ranks)


def load_different_steps(rank: Rank) -> None:
    run = Run(rank)
    sync = attach(run.ddp, **BUCKET)
    states = []
    for step in range(3):
        states.append(sync.state_dict())
        run.train(range(step, step + 1))
    debt = owed(sync)
    sync.load_state_dict(states[1 + rank.rank])
    loaded = owed(sync)
    words = r"rank 0: the first step after .*, step 1; rank 1: .*, step 2\. .* of the same step"
    with pytest.raises(ValueError, match=words):
        run.backward(3)
    assert torch.equal(owed(sync), loaded)
    sync.load_state_dict(states[2])
    run.train(range(2, 3))
    assert sync.stats()["step"] == 2
    assert not torch.equal(owed(sync), debt)  # the model has moved on


def test_ranks_that_load_different_steps_are_told() -> None:
    group(2).run(load_different_steps)


def test_states_that_do_not_fit_change_nothing() -> None:
    group(2).run(refuse_states)
