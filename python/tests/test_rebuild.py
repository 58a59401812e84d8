"""sync.rebuild: ranks that are lost, late, new, or back after a pause, in real processes."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import GPT, Run, attach_at_once, digest, flat, owed, rank_order_sum, text
from processes import Rank, group
from sharded import Case, build, mesh_of
from sharded import attach as attach_shards
from torch.distributed.distributed_c10d import _get_default_store
from torch.nn.parallel import DistributedDataParallel

import topreduce.torch
from topreduce.torch import CommError, DriftError, Ranks, Sync, rebuilding

# One message to each rank, then the vote: frames can be counted.
EXACT: dict[str, Any] = {"method": "topk", "density": 0.01, "granularity": "model"}
USUAL: dict[str, Any] = {"method": "topk", "density": 0.01}


def members(ranks: list[int]) -> dist.ProcessGroup:
    """Of ranks that are left; once for these ranks, since torch names such a group after them."""
    return dist.new_group(ranks, use_local_synchronization=True)


def seen(run: Run, sync: Sync) -> dict[str, Any]:
    """What must be the same on all ranks: parameters and optimizer state."""
    momentum = [run.optimizer.state[each]["momentum_buffer"] for each in run.ddp.parameters()]
    return {
        "step": sync.step,
        "model": run.digest(),
        "optimizer": digest(torch.cat([each.flatten() for each in momentum])),
    }


# ---- ranks that die ----------------------------------------------------------------------------


def die_in_the_vote(rank: Rank) -> Any:
    """Rank 3 tells one rank its vote and dies; rank 2 dies while the others are rebuilt."""
    run = Run(rank, bucket_cap_mb=0.03)
    sync = attach_at_once(run.ddp, **EXACT, verify_every=1)
    run.train(range(4))
    if rank.rank == 3:
        sync._comm.fail_at(1, "killed", "vote")  # one word of the vote has gone
    before, model = owed(sync), run.digest()
    try:
        run.train(range(4, 5))
        committed = True
        with pytest.raises(CommError, match="rank 3"):
            run.backward(5)
    except CommError:
        committed = False
        if rank.rank == 3:
            os._exit(1)
        assert torch.equal(owed(sync), before), "as before the step"
        assert run.digest() == model
        assert not run.mean_gradient().any()
    if rank.rank == 2:

        def die(*arguments: object) -> None:
            os._exit(1)

        rebuilding.give = die
    with pytest.raises(CommError, match="rank 2"):
        sync.rebuild(members([0, 1, 2]), optimizer=run.optimizer)
    with pytest.raises(CommError, match="rank 2"):
        run.backward(5)  # broken, until it is rebuilt
    rebuilt = sync.rebuild(members([0, 1]), optimizer=run.optimizer)
    after = seen(run, sync)
    run.rank = rank.rank
    run.train(range(5, 9))
    return committed, vars(rebuilt), after, seen(run, sync), owed(sync).numpy()


def test_a_rank_that_missed_the_last_commit_follows() -> None:
    results = group(4).run(die_in_the_vote, dying=[2, 3])[:2]
    assert [committed for committed, *_ in results] == [True, False]
    for _, rebuilt, after, end, _ in results:
        assert after["step"] == rebuilt["step"] == 5
        assert rebuilt["late"] == [1]
        assert (rebuilt["lost"], rebuilt["scale"], rebuilt["ranks"]) == (2, 1.0, 2)
        assert rebuilt["lost_norm"] > 0
        assert after == results[0][2]
        assert end == results[0][3]
        assert end["step"] == 9
    assert (results[0][-1] != results[1][-1]).any()


# ---- ranks that come ---------------------------------------------------------------------------


def join(rank: Rank, kind: str) -> Any:
    """Ranks 0 to 2 train; rank 3, with another model, joins them."""
    newcomer = rank.rank == 3
    mine = [dist.new_group([0, 1, 2]), dist.new_group([3])][newcomer]
    model = GPT()
    if newcomer:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
    if kind == "ddp":
        ddp = DistributedDataParallel(model, process_group=mine, bucket_cap_mb=0.03)
        sync = attach_at_once(ddp, **USUAL, verify_every=1)
        forward: Callable[[Any], Any] = ddp
    else:
        sync = attach_at_once(model, **USUAL, group=mine, verify_every=1)  # type: ignore[arg-type]
        forward = model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)

    def train(until: int) -> None:
        while sync.step < until:
            optimizer.zero_grad()
            forward(text(rank.rank, sync.step)).backward()
            optimizer.step()
            scheduler.step()

    if not newcomer:
        train(6)
        sums = owed(sync).double()
        dist.all_reduce(sums, group=mine)
        mean = sums / 3
    everyone = dist.group.WORLD
    assert everyone is not None
    rebuilt = sync.rebuild(everyone, optimizer=[optimizer, scheduler])
    assert (rebuilt.joined, rebuilt.late, rebuilt.lost) == ([3], [], 0)
    assert rebuilt.scale == pytest.approx(4 / 3)
    assert sync.step == rebuilt.step == 6
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.001)
    assert scheduler.last_epoch == 6
    if newcomer:
        assert not owed(sync).any()
    after = rank_order_sum(owed(sync).double()) / rank.ranks
    if not newcomer:
        assert torch.allclose(after, mean, rtol=1e-5, atol=1e-9)
    train(11)
    return digest(flat(model, lambda p: p.detach())), sync.stats()["delivered"]


@pytest.mark.parametrize("kind", ["ddp", "module"])
def test_a_rank_joins(kind: str) -> None:
    results = group(4).run(join, kind)
    assert len(set(results)) == 1


def differ(rank: Rank) -> list[str]:
    """Rank 2 would join with something else than ranks 0 and 1 have."""
    heard = []
    for other in ({"verify_every": 3}, {"scaler": torch.amp.GradScaler("cpu")}, {"density": 0.1}):
        mine = [dist.new_group([0, 1]), dist.new_group([2])][rank.rank // 2]
        run = Run(rank, process_group=mine)
        changes: dict[str, Any] = other if rank.rank == 2 else {}
        sync = attach_at_once(run.ddp, **{**USUAL, "verify_every": 2, **changes})
        run.train(range(2))
        before = owed(sync)
        world = dist.group.WORLD
        assert world is not None
        with pytest.raises(ValueError, match="rank 2: ") as raised:
            sync.rebuild(world, optimizer=run.optimizer)
        heard.append(str(raised.value))
        assert torch.equal(owed(sync), before)
        if rank.rank < 2:  # they go on without it
            assert sync.rebuild(mine, optimizer=run.optimizer).step == 2
            run.train(range(2, 4))
        dist.barrier()
    return heard


def test_a_rank_that_differs_may_not_join() -> None:
    for every, scaler, density in group(3).run(differ):
        assert "rank 1: no scaler, verify_every=2; rank 2: no scaler, verify_every=3" in every
        assert "rank 2: a scaler" in scaler
        assert "rank 2: density = 0.1" in density


# ---- the same ranks ----------------------------------------------------------------------------


def pause(rank: Rank, settings: dict[str, Any]) -> None:
    """A connection breaks in an exchange; nobody dies."""
    run, undisturbed = (Run(rank, bucket_cap_mb=0.03) for _ in range(2))
    sync, twin = (attach_at_once(each.ddp, **settings) for each in (run, undisturbed))
    run.train(range(3))
    undisturbed.train(range(8))
    if rank.rank == 1:
        sync._comm.fail_at(1, "pulled the plug")
    with pytest.raises(CommError, match="rebuild"):
        run.backward(3)
    world = dist.group.WORLD
    assert world is not None
    rebuilt = sync.rebuild(world, optimizer=run.optimizer)
    assert (rebuilt.lost, rebuilt.late, rebuilt.joined, rebuilt.repaired) == (0, [], [], [])
    run.train(range(3, 6))
    sync.rebuild(world, optimizer=run.optimizer)  # between steps, for no reason
    run.train(range(6, 8))
    assert run.digest() == undisturbed.digest()
    ours = sync.state_dict()
    for key, value in twin.state_dict().items():
        assert (
            ours[key] == value
            if isinstance(value, str)
            else (torch.equal(torch.as_tensor(ours[key]), torch.as_tensor(value)))
        )


@pytest.mark.parametrize(
    "settings", [USUAL, {**USUAL, "method": "ok_topk"}, {**USUAL, "feedback": "ef21"}]
)
def test_the_same_ranks_go_on_as_if_nothing_had_happened(settings: dict[str, Any]) -> None:
    group(3).run(pause, settings)


def repair(rank: Rank) -> None:
    run = Run(rank, bucket_cap_mb=0.03)
    sync = attach_at_once(run.ddp, **USUAL, verify_every=2)
    run.train(range(3))
    if rank.rank == 0:
        with torch.no_grad():
            run.ddp.module.head.weight[0] += 1
    run.train(range(3, 4))
    with pytest.raises(DriftError, match="rank 0 has other parameters than ranks 1, 2"):
        run.backward(4)
    world = dist.group.WORLD
    assert world is not None
    assert sync.rebuild(world, optimizer=run.optimizer).repaired == [0]
    run.train(range(4, 7))
    with pytest.raises(ValueError, match="holds a int"):
        sync.rebuild(world, optimizer=[3])


def test_a_rank_that_drifted_is_repaired() -> None:
    group(3).run(repair)


# ---- steps that a caller must allow, and ranks without a process group ------------------------


def forbid(rank: Rank, forbidden: list[int]) -> Any:
    """In step 3 these ranks may not commit; all others do."""
    store = dist.PrefixStore(f"forbid {forbidden}", _get_default_store())
    model, asked = GPT(), []

    def allows() -> bool:
        asked.append(sync.step)
        return not (sync.step == 3 and rank.rank in forbidden and asked.count(3) == 1)

    sync = attach_at_once(
        model,  # type: ignore[arg-type]
        **USUAL,
        group=Ranks(store, rank.rank, rank.ranks),
        verify_every=1,
        commit_if=allows,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def train(step: int) -> None:
        optimizer.zero_grad()
        model(text(rank.rank, step)).backward()
        optimizer.step()

    for step in range(3):
        train(step)
    before = owed(sync)
    if rank.rank in forbidden:
        with pytest.raises(CommError, match=r"step 3 was not committed.*commit_if said no"):
            train(3)
        assert torch.equal(owed(sync), before)
    else:
        train(3)
        with pytest.raises(CommError, match="commit_if said no"):
            train(4)
    again = dist.PrefixStore(f"forbid {forbidden} again", _get_default_store())
    rebuilt = sync.rebuild(Ranks(again, rank.rank, rank.ranks), optimizer=optimizer)
    for step in range(rebuilt.step, 7):
        train(step)
    weights = flat(model, lambda p: p.detach())
    return rebuilt.late, rebuilt.step, asked, digest(weights), digest(owed(sync))


def test_what_is_not_allowed_is_not_committed() -> None:
    some = group(3).run(forbid, [1])
    nobody = group(3).run(forbid, [0, 1, 2])
    for late, step, *_ in some:
        assert (late, step) == ([1], 4)
    for late, step, *_ in nobody:
        assert (late, step) == ([], 3)
    assert [asked for *_, asked, _, _ in some][1] == [0, 1, 2, 3, 4, 5, 6]
    assert [asked for *_, asked, _, _ in nobody] == [[0, 1, 2, 3, 3, 4, 5, 6]] * 3
    # Whoever committed late, and whoever made the step again, ends with the same bits.
    for one, other in zip(some, nobody, strict=True):
        assert one[3:] == other[3:]


def refuse(rank: Rank) -> None:
    mesh = mesh_of(2, 2)
    shards = attach_shards(build(Case(), mesh["shard"]), mesh, "topk", density=0.1)
    world = dist.group.WORLD
    assert world is not None
    with pytest.raises(ValueError, match=r"start such a run anew, and load\(\)"):
        shards.rebuild(world, optimizer=())
    run = Run(rank)
    gone = attach_at_once(run.ddp, **USUAL)
    with pytest.raises(ValueError, match="needs a process group"):
        gone.rebuild(Ranks.alone(), optimizer=())
    gone.detach()
    with pytest.raises(ValueError, match="detached"):
        gone.rebuild(world, optimizer=())


def test_where_it_cannot_be_it_is_refused() -> None:
    group(4).run(refuse)


def test_the_package_says_so() -> None:
    assert topreduce.torch.Rebuilt(3, 2).late == []


def test_a_refusal_is_told_without_a_default_group() -> None:
    store = dist.HashStore()

    def attach_on(rank: int) -> ValueError:
        with pytest.raises(ValueError, match="verify_every") as caught:
            attach_at_once(
                torch.nn.Linear(4, 4),  # type: ignore[arg-type]
                **USUAL,
                group=Ranks(store, rank, 2),
                verify_every=-3 * rank,
            )
        return caught.value

    assert not dist.is_initialized()
    with ThreadPoolExecutor(2) as ranks:
        waits, refuses = ranks.map(attach_on, range(2))
    assert str(waits) == (
        f"nothing was changed, on any rank: rank 1 refused: ValueError: {refuses}. Correct that, "
        "then make the call again, on all ranks"
    )
