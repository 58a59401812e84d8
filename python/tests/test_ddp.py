"""DDP as people use it: at density 1 the same as plain DDP, below it the laws."""

from typing import Any

import pytest
import torch
from models import attach_at_once, owed, rank_order_sum
from processes import Rank, group
from scenarios import SCENARIOS, Actor, data, equal_plain_ddp, keep_the_laws
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SETTINGS: list[dict[str, Any]] = [
    {"method": "topk", "density": 0.01},
    {"method": "ok_topk", "density": 0.01, "granularity": "model"},
    {"method": "randk", "density": 0.1},
]
every_scenario = pytest.mark.parametrize("name", SCENARIOS)


@every_scenario
def test_density_one_is_plain_ddp(name: str) -> None:
    group(2).run(equal_plain_ddp, name)


def keep_all_laws(rank: Rank, name: str) -> None:
    for settings in SETTINGS[: 1 if SCENARIOS[name].slow_to_start else None]:
        keep_the_laws(rank, name, settings)


@every_scenario
def test_laws(name: str) -> None:
    group(3).run(keep_all_laws, name)


# ---- what nobody used --------------------------------------------------------------------------


def leave_right_alone(rank: Rank, settings: dict[str, Any]) -> None:
    actor = Actor(rank, SCENARIOS["unused parameters"])
    sync = attach_at_once(actor.ddp, **settings)
    key = f"rank{rank.rank}/owed/right.weight"
    actor.backward(0)
    debt = sync.state_dict()[key]
    assert debt.count_nonzero() > 0
    actor.backward(1)  # nobody uses it
    assert actor.ddp.module.right.weight.grad is None
    assert torch.equal(sync.state_dict()[key], debt)
    actor.backward(2)
    assert not torch.equal(sync.state_dict()[key], debt)


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: s["method"])
def test_what_nobody_used_stays_owed(settings: dict[str, Any]) -> None:
    group(2).run(leave_right_alone, settings)


# ---- join --------------------------------------------------------------------------------------


def run_out_of_data(rank: Rank, by_all: bool, settings: dict[str, Any]) -> None:
    plain, actor = Actor(rank, SCENARIOS["plain"]), Actor(rank, SCENARIOS["plain"])
    steps = 3 + 2 * rank.rank
    for each in (plain, actor):
        sync = attach_at_once(each.ddp, "topk", density=1.0) if each is actor else None
        with each.ddp.join(divide_by_initial_world_size=by_all):
            for step in range(steps):
                each.backward(step)
                each.update()
    torch.testing.assert_close(actor.weights(), plain.weights())

    # The laws: what was owed when a rank ran out of data still finds its way.
    actor = Actor(rank, SCENARIOS["plain"])
    sync = attach_at_once(actor.ddp, **settings)
    came, means = torch.zeros_like(owed(sync), dtype=torch.double), []
    with actor.ddp.join(divide_by_initial_world_size=by_all):
        for step in range(steps):
            came += actor.alone(step).double()
            actor.backward(step)
            means.append(actor.mean().double())
            actor.update()
    longest = 3 + 2 * (rank.ranks - 1)
    assert len(sync.history()) == longest
    present = [sum(3 + 2 * r > step for r in range(rank.ranks)) for step in range(longest)]
    if rank.rank == rank.ranks - 1:  # it saw every mean
        divisors = [rank.ranks if by_all else count for count in present]
        applied = sum(mean * by for mean, by in zip(means, divisors, strict=True))
    else:
        applied = torch.zeros_like(came)
    total = rank_order_sum(came - owed(sync).double())
    torch.testing.assert_close(total, rank_order_sum(applied), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("by_all", [True, False], ids=["by all ranks", "by those present"])
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: s["method"])
def test_ranks_that_run_out_of_data(by_all: bool, settings: dict[str, Any]) -> None:
    group(3).run(run_out_of_data, by_all, settings)


def join_differently(rank: Rank) -> None:
    actor = Actor(rank, SCENARIOS["plain"])
    attach_at_once(actor.ddp, "topk", density=0.05)

    def train() -> None:
        with actor.ddp.join(divide_by_initial_world_size=rank.rank == 0):
            for step in range(2 + rank.rank):
                actor.backward(step)

    with pytest.raises(ValueError, match="1 of 2 want the number of ranks that are present"):
        train()


def test_ranks_that_divide_differently_are_told() -> None:
    group(2).run(join_differently)


# ---- several models ----------------------------------------------------------------------------


def train_two_models(rank: Rank) -> None:
    """Backward through both at once, then through each by itself; the ranks take turns."""
    actors = [Actor(rank, SCENARIOS["plain"]) for _ in range(2)]
    syncs = [
        attach_at_once(actor.ddp, method, density=0.05)
        for actor, method in zip(actors, ("topk", "ok_topk"), strict=True)
    ]
    for step in range(6):
        alone = [actor.alone(step) for actor in actors]
        before = [owed(sync) for sync in syncs]
        for actor in actors:
            actor.optimizer.zero_grad()
        if step % 2 == 0:
            order = actors if rank.rank else actors[::-1]
            sum(actor.ddp(data(rank.rank, step)) for actor in order).backward()  # type: ignore[union-attr]
        else:
            for actor in actors:
                actor.backward(step)
        for actor, sync, local, debt in zip(actors, syncs, alone, before, strict=True):
            settled = debt.double() + local.double() - owed(sync).double()
            applied = actor.mean().double() * rank.ranks
            torch.testing.assert_close(rank_order_sum(settled), applied, rtol=1e-4, atol=1e-6)
            actor.update()


def test_several_models() -> None:
    group(2).run(train_two_models)


# ---- parameters that were frozen ---------------------------------------------------------------


def thaw(rank: Rank) -> None:
    actor = Actor(rank, SCENARIOS["frozen parameters"])
    sync = attach_at_once(actor.ddp, "topk", density=0.05)
    actor.backward(0)
    weight = actor.ddp.module.trunk[0].weight
    weight.requires_grad_(True)
    with pytest.warns(RuntimeWarning, match=r"trunk\.0\.weight was frozen .* wrap the model in a"):
        actor.backward(1)
    actor.backward(2)
    assert len(sync.history()) == 3


def test_a_parameter_that_is_unfrozen_later_is_reported_once() -> None:
    group(2).run(thaw)


# ---- attach at any time ------------------------------------------------------------------------


def attach_late(rank: Rank, name: str) -> None:
    actor, plain = Actor(rank, SCENARIOS[name]), Actor(rank, SCENARIOS[name])
    for step in range(2):
        for each in (actor, plain):
            each.backward(step)
            each.update()
    sync = attach_at_once(actor.ddp, "topk", density=1.0)
    for each in (actor, plain):
        each.backward(2)
    torch.testing.assert_close(actor.mean(), plain.mean())
    sync.configure(density=0.05)
    alone, before = actor.alone(3), owed(sync)
    actor.backward(3)
    settled = before.double() + alone.double() - owed(sync).double()
    applied = actor.mean().double() * rank.ranks
    torch.testing.assert_close(rank_order_sum(settled), applied, rtol=1e-4, atol=1e-6)
    assert applied.count_nonzero() > 0


@pytest.mark.parametrize("name", ["plain", "static graph", "unused parameters"])
def test_attach_after_the_first_backward(name: str) -> None:
    group(2).run(attach_late, name)


def change_method(rank: Rank) -> None:
    """From one method to another, in the same step on all ranks; what is owed goes along."""
    actor = Actor(rank, SCENARIOS["plain"])
    sync = attach_at_once(actor.ddp, "topk", density=0.05)
    for step, changes in enumerate(
        [{}, {"method": "randk"}, {"method": "ok_topk", "density": 0.02}, {"granularity": "model"}]
    ):
        if changes:
            sync.configure(**changes)
        alone, before = actor.alone(step), owed(sync)
        actor.backward(step)
        settled = before.double() + alone.double() - owed(sync).double()
        applied = actor.mean().double() * rank.ranks
        torch.testing.assert_close(rank_order_sum(settled), applied, rtol=1e-4, atol=1e-6)
        assert applied.count_nonzero() > 0
        actor.update()
    assert [step["method"] for step in sync.history()] == ["topk", "randk", "ok_topk", "ok_topk"]
    with pytest.raises(ValueError, match=r"rank 0: configure\(method=topk\).*rank 1: .*randk"):
        sync.configure(method="randk" if rank.rank else "topk")
    actor.backward(4)
    assert sync.stats()["method"] == "ok_topk"


def test_another_method_at_run_time() -> None:
    group(2).run(change_method)


class Tied(nn.Module):
    """Two names for one parameter, one buffer that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.second(self.first(x)).sum()


def share_a_parameter(rank: Rank) -> None:
    ddp = DistributedDataParallel(Tied())
    sync = attach_at_once(ddp, "topk", density=0.2)
    for step in range(3):
        ddp(torch.randn(3, 8) + step).backward()
    assert sync.stats()["entries"] == 64 + 8 + 8
    assert ddp.module.calls == 3


def test_tied_parameters_and_buffers() -> None:
    group(2).run(share_a_parameter)
