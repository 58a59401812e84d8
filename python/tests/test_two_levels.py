"""Several ranks per machine: dense inside, sparse between one delegate each, in real processes."""

import copy
import io
import os
import re
import time
import warnings
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models import Dictated, Run, attach_at_once, digest, owed, small_integers
from processes import Processes, Rank, group
from scenarios import SCENARIOS, Actor
from torch.nn.parallel import DistributedDataParallel

import topreduce
import topreduce.torch
from topreduce.lab.network.cluster import INTERFACE, cluster, obstacle
from topreduce.lab.network.namespaces import bytes_through, enter
from topreduce.torch import CommError, Sync, WireError
from topreduce.torch import machines as connections
from topreduce.torch.two_levels import on_two_levels

Machines = Sequence[Sequence[int]]
TWO_BY_TWO: Machines = [[0, 1], [2, 3]]
CAP = {"bucket_cap_mb": 0.03}
SETTINGS: list[dict[str, Any]] = [
    {"method": "topk", "density": 0.01},
    {"method": "topk", "density": 0.01, "granularity": "model", "values": "int4"},
    {"method": "ok_topk", "density": 0.01, "ramp_steps": 2},
    {"method": "arc_topk", "density": 0.1, "feedback": "ef21"},
    {"method": "dense"},
]


def machine_of(rank: Rank, machines: Machines) -> int:
    return next(i for i, ranks in enumerate(machines) if rank.rank in ranks)


def local_group(rank: Rank, machines: Machines) -> dist.ProcessGroup:
    groups = [dist.new_group(list(ranks)) for ranks in machines]
    return groups[machine_of(rank, machines)]


def attach(rank: Rank, ddp: Any, machines: Machines = TWO_BY_TWO, **settings: Any) -> Sync:
    return attach_at_once(ddp, local_group=local_group(rank, machines), **settings)


def everyones(values: torch.Tensor) -> list[torch.Tensor]:
    """By rank."""
    received = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(received, values)
    return received


def fed(gradients: list[torch.Tensor], machines: Machines) -> list[torch.Tensor]:
    """What the delegates bring: by machine, the sum in rank order * machines / ranks."""
    sums = [gradients[ranks[0]].clone() for ranks in machines]
    for total, ranks in zip(sums, machines, strict=True):
        for other in ranks[1:]:
            total += gradients[other]
    return [total / (len(gradients) / len(machines)) for total in sums]


def debts(sync: Sync, like: torch.Tensor) -> torch.Tensor:
    """What this rank owes: nothing, unless it is a delegate."""
    has = any("/owed/" in key for key in sync.state_dict())
    return owed(sync) if has else torch.zeros_like(like)


# ---- what it computes --------------------------------------------------------------------------


def equal_machine_means(rank: Rank, machines: Machines, settings: dict[str, Any]) -> None:
    """Bit for bit a run of one rank per machine on the machines' means."""
    run = Run(rank, **CAP)
    sync = attach(rank, run.ddp, machines, **settings)
    layout = topreduce.Layout(
        [(name, list(p.shape)) for name, p in run.ddp.module.named_parameters()]
    )
    twins = [topreduce.Reducer(layout, **settings) for _ in machines]
    for step in range(5):
        means = fed(everyones(run.local_gradient(step)), machines)
        expected = [mean.numpy() for mean in means]

        def average(comm: topreduce.Communicator, arrays: Any = expected) -> None:
            twins[comm.rank].begin(comm)
            twins[comm.rank].add(range(len(layout.names)), arrays[comm.rank])
            twins[comm.rank].finish()

        topreduce.run_ranks(len(machines), average)
        run.backward(step)
        assert torch.equal(run.mean_gradient(), torch.from_numpy(expected[0])), step
        assert sync.stats()["bytes_sent"] > 0
        run.optimizer.step()
    machine = machine_of(rank, machines)
    if rank.rank == machines[machine][0]:
        state = twins[machine].state()["entries"]
        for quantity, arrays in state.items():
            for name, array in arrays.items():
                ours = sync.state_dict()[f"rank{machine}/{quantity}/{name}"].numpy()
                assert ours.tobytes() == array.tobytes(), (quantity, name)


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "-".join(map(str, s.values())))
def test_it_is_a_run_of_one_rank_per_machine(settings: dict[str, Any]) -> None:
    group(4).run(equal_machine_means, TWO_BY_TWO, settings)


@pytest.mark.parametrize("machines", [[[0], [1, 2, 3]], [[0, 2], [1, 3]], [[0, 3], [1], [2]]])
def test_machines_of_any_size(machines: Machines) -> None:
    group(4).run(equal_machine_means, machines, SETTINGS[0])


def equal_in_pieces(rank: Rank) -> None:
    with mock.patch.multiple(connections, _PIECE=1000):
        equal_machine_means(rank, [[0, 1, 2], [3]], SETTINGS[0])


def test_large_buckets_are_added_up_piece_by_piece() -> None:
    group(4).run(equal_in_pieces)


def mixed_types(rank: Rank) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    ddp = DistributedDataParallel(Dictated(dtypes))
    attach(rank, ddp, method="topk", density=1.0)
    everyone = [small_integers(ddp.module, other, 0) for other in range(rank.ranks)]
    ddp(everyone[rank.rank]).backward()
    for weight, *gradients in zip(ddp.module.weights, *everyone, strict=True):
        mean = sum(gradient.float() for gradient in gradients) / rank.ranks
        assert torch.equal(weight.grad, mean.to(weight.dtype))


def test_parameters_of_other_types() -> None:
    group(4).run(mixed_types)


def equal_flat(rank: Rank) -> None:
    """Machines of one rank each are what attach is without them."""
    flat, levels = Run(rank, **CAP), Run(rank, **CAP)
    first = attach_at_once(flat.ddp, **SETTINGS[0])
    second = attach(rank, levels.ddp, [[0], [1], [2], [3]], **SETTINGS[0])
    for run in (flat, levels):
        run.train(range(5))
    assert flat.digest() == levels.digest()
    # Gradients come in another order, so they are cut into other buckets.
    bytes_sent = [sync.stats()["bytes_sent"] for sync in (first, second)]
    assert bytes_sent[0] == pytest.approx(bytes_sent[1], rel=0.1)
    ours, theirs = second.state_dict(), first.state_dict()
    assert ours.keys() == theirs.keys()
    assert digest(owed(second)) == digest(owed(first))


def test_one_rank_per_machine_is_the_flat_run() -> None:
    group(4).run(equal_flat)


def be_one_machine(rank: Rank) -> None:
    """All on one host: a dense mean, and nothing for the network."""
    run = Run(rank, **CAP)
    with pytest.warns(
        RuntimeWarning, match=r"found one machine, .* for all 4 ranks: every step is de"
    ):
        sync = attach_at_once(run.ddp, "topk", density=0.01, local_group="host")
    assert "no step yet" in repr(sync)
    for step in range(3):
        (mean,) = fed(everyones(run.local_gradient(step)), [range(rank.ranks)])
        run.backward(step)
        assert torch.equal(run.mean_gradient(), mean)
        run.optimizer.step()
    assert sync.stats()["bytes_sent"] == 0
    # The terms of sums to their owners, the sums to the delegate, the mean to all; headings.
    entries = 4 * sync.stats()["entries"]
    payload = (3 / 4 + 3) * entries if rank.rank == 0 else (3 / 4 + 1 / 4) * entries
    assert payload - 100 < sync.stats()["bytes_inside"] < payload + 3000
    assert f"sent {sync.stats()['bytes_inside']} bytes inside the machine" in repr(sync)
    assert sync.stats()["density"] == 1.0
    assert debts(sync, mean).count_nonzero() == 0
    state = sync.state_dict()
    assert (state["ranks"], state["rank0/step"], state["rank0/bypassed"]) == (1, 3, 0)
    sync.bypass()
    assert "bypassed" in repr(sync)
    sync.compress()
    run.train(range(3, 4))
    assert sync.stats()["step"] == 3


def test_one_machine_averages_densely() -> None:
    group(4).run(be_one_machine)


def be_clones(rank: Rank, folder: str) -> None:
    """Machines that were copied have one name, and boots of their own."""
    boot = Path(folder) / f"boot of machine {rank.rank // 2}"
    boot.write_text(f"{rank.rank // 2}\n")
    run = Run(rank, **CAP)
    with mock.patch.multiple(connections, _BOOT=boot), warnings.catch_warnings():
        warnings.simplefilter("error")
        sync = attach_at_once(run.ddp, local_group="host", **SETTINGS[0])
    run.train(range(2))
    assert f"machine {rank.rank // 2} of 2" in repr(sync)
    assert sync.stats()["bytes_sent"] > 0

    missing = Path(folder) / "no such file"  # not Linux: the name must do
    with mock.patch.multiple(connections, _BOOT=missing), pytest.warns(RuntimeWarning, match="one"):
        sync = attach_at_once(Run(rank, **CAP).ddp, local_group="host", **SETTINGS[0])
    assert "machine 0 of 1" in repr(sync)


def test_cloned_machines_are_told_apart(tmp_path: Path) -> None:
    group(4).run(be_clones, str(tmp_path))


# ---- DDP as people use it ----------------------------------------------------------------------

USES = ["plain", "static graph", "unused parameters", "no_sync and unused", "gradients are views"]


def equal_plain_ddp(rank: Rank) -> None:
    for name in USES:
        actor, plain = Actor(rank, SCENARIOS[name]), Actor(rank, SCENARIOS[name])
        attach(rank, actor.ddp, method="topk", density=1.0)
        for step in range(4):
            for each in (actor, plain):
                each.backward(step)
            for ours, theirs in zip(actor.trained, plain.trained, strict=True):
                assert (ours.grad is None) == (theirs.grad is None), (name, step)
            torch.testing.assert_close(actor.mean(), plain.mean(), msg=f"{name}, step {step}")
            for each in (actor, plain):
                each.update()


def test_density_one_is_plain_ddp() -> None:
    group(4).run(equal_plain_ddp)


def keep_the_laws(rank: Rank, name: str, machines: Machines) -> None:
    """What the delegates settle is what everyone applies; all ranks have the same bits."""
    few = 0.01 if name == "plain" else 0.05
    for settings in ({"method": "topk", "density": few}, {"method": "ok_topk", "density": 0.05}):
        actor = Actor(rank, SCENARIOS[name])
        sync = attach(rank, actor.ddp, machines, **settings)
        for step in range(6):
            alone = actor.alone(step)
            brought = fed(everyones(alone.double()), machines)
            before = debts(sync, alone).double()
            actor.backward(step)
            settled = before - debts(sync, alone).double()
            if any("/owed/" in key for key in sync.state_dict()):
                settled += brought[machine_of(rank, machines)]
            applied = actor.mean().double() * len(machines)
            torch.testing.assert_close(
                sum(everyones(settled)), applied, rtol=1e-4, atol=1e-6, msg=f"step {step}"
            )
            assert applied.count_nonzero() > 0
            actor.update()
            assert len({digest(each) for each in everyones(actor.weights())}) == 1
        assert [step["step"] for step in sync.history()] == list(range(6))


@pytest.mark.parametrize("name", ["plain", "unused parameters", "no_sync"])
def test_laws(name: str) -> None:
    group(4).run(keep_the_laws, name, TWO_BY_TWO)


def test_laws_of_uneven_machines() -> None:
    group(4).run(keep_the_laws, "plain", [[0, 1, 2], [3]])


def run_out_of_data(rank: Rank, by_all: bool) -> None:
    """Within a machine, then whole machines: the means of plain DDP."""
    plain, actor = Actor(rank, SCENARIOS["plain"]), Actor(rank, SCENARIOS["plain"])
    sync = attach(rank, actor.ddp, method="topk", density=1.0)
    for each in (plain, actor):
        with each.ddp.join(divide_by_initial_world_size=by_all):
            for step in range(2 + (3 - rank.rank)):
                each.backward(step)
                each.update()
    torch.testing.assert_close(actor.weights(), plain.weights())
    assert len(sync.history()) == 5


@pytest.mark.parametrize("by_all", [True, False], ids=["by all ranks", "by those present"])
def test_ranks_that_run_out_of_data(by_all: bool) -> None:
    group(4).run(run_out_of_data, by_all)


# ---- steps that fail ---------------------------------------------------------------------------


def bad_gradients(rank: Rank) -> None:
    """Infinity on a rank that owes nothing, under loss scales that differ: no trace anywhere."""
    ddp = DistributedDataParallel(Dictated(), bucket_cap_mb=0.002)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (3 + rank.rank), growth_interval=100)
    sync = attach(rank, ddp, method="topk", density=0.05, scaler=scaler)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
    for step in range(5):
        scale = scaler.get_scale()
        gradients = small_integers(ddp.module, rank.rank, step)
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        brought = fed(everyones(flat), TWO_BY_TWO)[rank.rank // 2]
        before = debts(sync, flat)
        optimizer.zero_grad()
        factor = torch.tensor(-float("inf")) if step == 2 and rank.rank == 3 else torch.ones(())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            scaler.scale(ddp([gradient * factor for gradient in gradients])).backward()
        means = torch.cat([w.grad.flatten() for w in ddp.module.weights]) / scale
        after = debts(sync, flat)
        settled = before + brought - after if rank.rank % 2 == 0 else torch.zeros_like(flat)
        if step == 2:
            assert not means.isfinite().any()
            assert torch.equal(after, before)
            assert sync.stats()["finite"] is False
        else:
            assert torch.equal(means, sum(everyones(settled)) / 2)
            assert sync.stats()["finite"] is True
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == scale * (0.5 if step == 2 else 1)
    assert sync.state_dict()[f"rank{rank.rank // 2}/step"] == 4


def test_a_bad_gradient_leaves_no_trace() -> None:
    group(4).run(bad_gradients)


def break_down(rank: Rank, broken: int, part: str) -> str:
    run = Run(rank, bucket_cap_mb=0.02)
    sync = attach(rank, run.ddp, timeout=timedelta(seconds=50), **SETTINGS[0])
    run.train(range(3))
    before = debts(sync, run.mean_gradient())
    if rank.rank == broken:
        getattr(sync._comm, part).fail_at(2, "the cable is cut")
    with pytest.raises(CommError) as failure:
        run.backward(3)
    assert run.mean_gradient().count_nonzero() == 0
    assert torch.equal(debts(sync, before), before)
    with pytest.raises(CommError):
        sync.configure(density=0.5)
    state = sync.state_dict()
    sync.detach()
    run.train(range(3, 4))
    again = attach(rank, run.ddp, **SETTINGS[0])
    again.load_state_dict(state)
    run.train(range(4, 6))
    assert len({digest(each) for each in everyones(run.mean_gradient())}) == 1
    return str(failure.value)


@pytest.mark.parametrize(("broken", "part"), [(1, "inside"), (2, "between"), (2, "inside")])
def test_one_broken_rank_stops_all_machines(broken: int, part: str) -> None:
    for rank, message in enumerate(group(4).run(break_down, broken, part)):
        assert "the cable is cut" in message, message
        assert rank == broken or f"; noticed by rank {rank} of 4, " in message, message
        if rank != broken:
            assert f"rank {broken} gave up: CommError: the cable is cut" in message


def miss_the_mean(rank: Rank) -> tuple[str, str, str]:
    """Rank 1 breaks when the delegates have committed: all others take the step."""
    whole, run = Run(rank), Run(rank)
    attach(rank, whole.ddp, **SETTINGS[0])
    sync = attach(rank, run.ddp, timeout=timedelta(seconds=50), **SETTINGS[0])
    whole.train(range(3))
    run.train(range(2))
    if rank.rank == 1:
        inside = sync._comm.inside  # type: ignore[attr-defined]
        inside.hand_out = mock.Mock(side_effect=CommError("the cable is cut"))
        with pytest.raises(CommError, match="the cable is cut"):
            run.backward(2)
    else:
        run.train(range(2, 3))
    with pytest.raises(CommError) as failure:
        run.backward(3)
    return whole.digest(), run.digest(), str(failure.value)


def test_a_rank_that_misses_the_mean_stops_the_next_step() -> None:
    for rank, (whole, run, message) in enumerate(group(4).run(miss_the_mean)):
        assert (whole == run) == (rank != 1)
        assert "the cable is cut" in message


def be_busy(rank: Rank, machines: Machines, late: int) -> str:
    """The late rank comes when the others have given up."""
    run = Run(rank)
    attach(rank, run.ddp, machines, timeout=timedelta(seconds=2), **SETTINGS[0])
    run.train(range(2))
    if rank.rank == late:
        dist.barrier()
    with pytest.raises(CommError) as failure:
        run.backward(2)
    if rank.rank != late:
        dist.barrier()
    return str(failure.value)


@pytest.mark.parametrize(
    ("machines", "late"), [([[0, 1], [2]], 1), (TWO_BY_TWO, 2)], ids=["a member", "a delegate"]
)
def test_a_busy_rank_is_named_on_every_machine(machines: Machines, late: int) -> None:
    """Also by ranks that wait for others which wait for it, all for the same two seconds."""
    ranks = sum(map(len, machines))
    for rank, message in enumerate(group(ranks).run(be_busy, machines, late)):
        assert f"; noticed by rank {rank} of {ranks}, " in message
        named = f"Timed out waiting 2000ms (rank {late} did not come, and may just be busy"
        assert (named in message) == (rank != late), message
        assert message.count("did not come") == (rank != late), message


def be_slow(rank: Rank) -> None:
    """Gradients of rank 3 come late, one after the other: nobody is silent for the time-out. But
    rank 1 hears nothing for longer: its delegate waits for rank 2, which waits for rank 3."""
    run = Run(rank, bucket_cap_mb=0.001)
    sync = attach(rank, run.ddp, timeout=timedelta(seconds=2.5), **SETTINGS[0])
    run.train(range(2))
    if rank.rank == 3:
        for block in run.ddp.module.blocks:
            for layer in (block.up, block.attention):
                layer.bias.register_hook(lambda _: time.sleep(1))
    run.train(range(2, 3))
    assert len(sync.history()) == 3


def test_waits_may_add_up() -> None:
    group(4).run(be_slow)


class Twins(torch.nn.Module):
    """Two buckets that look alike."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8)
        self.second.bias = None


def drop_a_step(rank: Rank) -> str:
    """Rank 1 alone leaves a step in the middle and begins the next: nobody mixes the two."""
    sync = attach(rank, DistributedDataParallel(Twins()), method="topk", density=0.5)
    steps, reducer = sync._steps, sync._reducer

    def two_buckets() -> None:
        steps._begin(1.0)
        reducer.add([0], np.ones(64, np.float32))
        if rank.rank == 1:
            steps._begin(1.0)
        reducer.add([0 if rank.rank == 1 else 1], np.ones(64, np.float32))
        reducer.finish()

    with pytest.raises((CommError, WireError)) as failure:
        two_buckets()
    steps.fail(failure.value)
    return str(failure.value)


def test_a_rank_that_drops_a_step_is_found_out() -> None:
    messages = group(4).run(drop_a_step)
    assert re.match(
        r"rank 1 has gone on to step 0; noticed by .*inside machine 0, step 0", messages[0]
    )
    assert "gave up: WireError" in messages[2]


# ---- the handle --------------------------------------------------------------------------------


def change_course(rank: Rank) -> tuple[list[dict[str, Any]], str]:
    run = Run(rank)
    sync = attach(rank, run.ddp, method="topk", density=0.01, granularity="model", ramp_steps=1)
    assert sync.history() == []
    run.train(range(2))
    sync.configure(density=0.1)
    run.train(range(2, 3))
    before = debts(sync, run.mean_gradient())
    sync.bypass()
    (one, two) = fed(everyones(run.local_gradient(3)), TWO_BY_TWO)
    run.backward(3)
    assert torch.equal(run.mean_gradient(), (one + two) / 2)
    assert torch.equal(debts(sync, before), before)
    sync.compress()
    sync.configure(method="ok_topk")
    for changes in (
        {"density": 0.2 if rank.rank == 3 else 0.3},
        {"density": 2.0},
        {"colour": "red"} if rank.rank == 1 else {"density": 0.2},
        {"feedback": "none"},
    ):
        with pytest.raises(ValueError, match=r"density|colour|feedback"):
            sync.configure(**changes)
    run.train(range(4, 5))
    assert sync.stats() == sync.history()[-1]
    return sync.history(), repr(sync)


def test_all_ranks_of_a_machine_tell_its_story() -> None:
    answers = group(4).run(change_course)
    for history, words in answers:
        assert [step["step"] for step in history] == list(range(5))
        densities = [step["density"] for step in history]
        assert densities == pytest.approx([0.1, 0.01, 0.1, 1.0, 0.1])
        assert [step["method"] for step in history] == ["topk"] * 4 + ["ok_topk"]
        assert all(step["seconds_waited"] > 0 for step in history)
        assert all(step["seconds"]["inside"] > 0 for step in history)
        assert "% saved" in words
    for member, delegate in ((1, 0), (3, 2)):
        for ours, theirs in zip(answers[member][0], answers[delegate][0], strict=True):
            keys = ours.keys() - {
                "seconds",
                "seconds_computed",
                "seconds_waited",
                "hidden",
                "bytes_inside",
            }
            assert {key: ours[key] for key in keys} == {key: theirs[key] for key in keys}
    assert "ok_topk, density 0.1, rank 3 of 4, machine 1 of 2, " in answers[3][1]


def refuse(rank: Rank) -> None:
    run = Run(rank)
    one, other = dist.new_group([0, 1]), dist.new_group([1, 2, 3])
    pair = [one, one, local_group(rank, TWO_BY_TWO), local_group(rank, TWO_BY_TWO)]
    for wrong, message in (
        ("rack", "must be 'host', or the process group .*, not 'rack'"),
        (one if rank.rank < 2 else other, r"rank 1: local_group=\[0, 1\]; rank 2: .*\[1, 2, 3\]"),
        (None if rank.rank == 2 else pair[rank.rank], r"rank 1: local_group=\[0, 1\]; rank 2: no"),
        (dist.GroupMember.NON_GROUP_MEMBER, "this rank is not in that group; give each rank"),
    ):
        with pytest.raises(ValueError, match=message):
            attach_at_once(run.ddp, local_group=wrong)
    with pytest.raises(ValueError, match="density"):
        attach(rank, run.ddp, density=2.0 if rank.rank == 1 else 0.1)
    sync = attach(rank, run.ddp, **SETTINGS[0])
    run.train(range(2))
    assert len(sync.history()) == 2


def test_refusals() -> None:
    group(4).run(refuse)


# ---- what crosses the network card -------------------------------------------------------------


def count_crossings(rank: Rank, hosts: list[str]) -> list[list[tuple[int, int]]]:
    """Bytes that left this rank's host, and that this rank booked, in each of 4 steps: flat, on two
    levels, and of two ranks that are alone on their hosts."""
    enter(hosts[rank.rank // 2])
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    everyone, firsts = dist.new_group(range(4)), dist.new_group([0, 2])
    machines = local_group(rank, TWO_BY_TWO)
    counts = []
    for ranks, local in ((everyone, None), (everyone, machines), (firsts, None)):
        takes_part = ranks is everyone or rank.rank in (0, 2)
        if takes_part:
            run = Run(rank, process_group=ranks)
            sync = attach_at_once(run.ddp, "topk", density=0.5, local_group=local)
            run.train(range(2))
        seen = []
        for step in range(2, 6):
            dist.barrier()  # on connections that were there before the hosts
            before = bytes_through(INTERFACE)[0]
            dist.barrier()
            if takes_part:
                run.train(range(step, step + 1))
            dist.barrier()
            seen.append(bytes_through(INTERFACE)[0] - before)
        booked = [step["bytes_sent"] for step in sync.history()[2:6]]
        counts.append(list(zip(seen, booked, strict=True)))
    return counts


@pytest.mark.skipif(obstacle() is not None, reason=str(obstacle()))
def test_one_exchange_crosses_the_network_card() -> None:
    processes = Processes(4)
    with cluster([None, None]) as hosts:
        results = processes.run(count_crossings, [host.namespace.path for host in hosts])
        processes.stop()
    for rank in (0, 2):
        # TCP repeats bytes on a busy machine, so the step with the fewest counts.
        flat, levels, pair = (min(seen for seen, _ in steps) for steps in results[rank])
        booked = [booked for _, booked in results[rank][1]]
        assert flat > 2 * levels, results[rank]
        assert min(booked) < levels < 2 * max(booked), results[rank]
        assert pair < 1.5 * levels and levels < 1.5 * pair, results[rank]


# ---- checkpoints -------------------------------------------------------------------------------


def interrupted(rank: Rank, settings: dict[str, Any], folder: str) -> None:
    whole, whole_sync = start(rank, settings)
    whole.train(range(10))
    first, first_sync = start(rank, settings)
    first.train(range(5))
    file = io.BytesIO()
    torch.save(first_sync.state_dict(), file)
    file.seek(0)
    own = torch.load(file, weights_only=True)
    dcp.save({"sync": first_sync}, checkpoint_id=folder)
    states: list[Any] = [None] * rank.ranks
    dist.all_gather_object(states, own)
    delegate = states[rank.rank // 2 * 2]
    assert {key for key in states[1] if "rank0/" in key} == {"rank0/bypassed", "rank0/step"}

    def resumed(load: Any) -> tuple[str, str]:
        run, sync = start(rank, settings)
        run.ddp.module.load_state_dict(first.ddp.module.state_dict())
        run.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
        load(sync)
        assert "step 5" in repr(sync)
        run.train(range(5, 10))
        return run.digest(), digest(state(sync))

    expected = whole.digest(), digest(state(whole_sync))
    assert resumed(lambda sync: sync.load_state_dict(own)) == expected
    assert resumed(lambda sync: sync.load_state_dict(delegate)) == expected
    assert resumed(lambda sync: dcp.load({"sync": sync}, checkpoint_id=folder)) == expected
    with pytest.raises(ValueError, match="holds nothing of rank"):
        whole_sync.load_state_dict(states[0 if rank.rank > 1 else 2])

    # To ranks without machines and back: the mean of what is owed stays.
    flat = topreduce.torch.reshard(states, 4)
    alone = attach_at_once(Run(rank, **CAP).ddp, **settings)
    alone.load_state_dict(flat[rank.rank])
    dist.all_gather_object(states, alone.state_dict())
    _, back = start(rank, settings)
    back.load_state_dict(topreduce.torch.reshard(states, 2)[rank.rank // 2])
    assert digest(state(back)) == digest(state(first_sync))


def start(rank: Rank, settings: dict[str, Any]) -> tuple[Run, Sync]:
    run = Run(rank, **CAP)
    return run, attach(rank, run.ddp, **settings)


def state(sync: Sync) -> torch.Tensor:
    tensors = [v for v in sync.state_dict().values() if isinstance(v, torch.Tensor)]
    return torch.cat([torch.zeros(1), *(tensor.flatten() for tensor in tensors)])


@pytest.mark.parametrize(
    "settings", [{**SETTINGS[0], "warmup_steps": 2, "ramp_steps": 6}, SETTINGS[3]], ids=str
)
def test_resume_is_exact(settings: dict[str, Any], tmp_path: Path) -> None:
    group(4).run(interrupted, settings, str(tmp_path))


def hand_over_in_another_order(rank: Rank) -> None:
    """Buckets of equal size are no identity, inside a machine either."""
    world = dist.group.WORLD
    levels = connections.Levels(world, dist.new_group([0, 1]), timedelta(seconds=20))
    layout = topreduce.Layout([("a", (8,)), ("b", (8,))])
    reducer = on_two_levels(levels, layout, "topk", {})
    reducer.begin(levels)
    order = [0, 1] if rank.rank == 0 else [1, 0]
    gradients = [np.full(8, 1.0 + 99 * number, np.float32) for number in order]
    reducer.add([order[0]], gradients[0])
    with pytest.raises(WireError, match="the same buckets in the same order"):
        reducer.add([order[1]], gradients[1])
    levels.close()


def test_another_order_inside_a_machine_is_refused() -> None:
    group(2).run(hand_over_in_another_order)
