"""Ways in which people use DDP: what a rank does in one step, with and without DDP around it."""

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import models
import torch
from models import attach_at_once, flat, owed, rank_order_sum
from processes import Rank
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import topreduce
import topreduce.torch

WIDTH = 12
Step = Callable[[nn.Module, int, int], None]


class Branches(nn.Module):
    """A trunk that is always used, branches that are used when asked for, an empty parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.trunk = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor, branches: str = "left right") -> Tensor:
        y = self.norm(self.trunk(x)) + self.nothing.sum()
        for branch in branches.split():
            y = y + getattr(self, branch)(x)
        return y.square().mean()


def data(rank: int, step: int, part: int = 0) -> Tensor:
    rng = torch.Generator().manual_seed(100 * step + 10 * part + rank)
    return torch.randn(5, WIDTH, generator=rng).to(models.place)


def everything(model: nn.Module, rank: int, step: int) -> None:
    model(data(rank, step)).backward()


def some_branches(model: nn.Module, rank: int, step: int) -> None:
    """`left` by rank 0 alone in odd steps, `right` by nobody in every third."""
    branches = "left " * (step % 2 == 0 or rank == 0) + "right" * (step % 3 != 1)
    model(data(rank, step), branches).backward()


def never_right(model: nn.Module, rank: int, step: int) -> None:
    model(data(rank, step), "left").backward()


def accumulate(model: nn.Module, rank: int, step: int) -> None:
    silence = getattr(model, "no_sync", contextlib.nullcontext)
    with silence():
        for part in (1, 2):
            model(data(rank, step, part)).backward()
    model(data(rank, step)).backward()


def accumulate_branches(model: nn.Module, rank: int, step: int) -> None:
    """`left` is used only where nothing is averaged, `right` by nobody in odd steps."""
    silence = getattr(model, "no_sync", contextlib.nullcontext)
    with silence():
        model(data(rank, step, 1), "left").backward()
    model(data(rank, step), "right" * (step % 2 == 0)).backward()


@dataclass(frozen=True)
class Scenario:
    step: Step = everything
    options: Mapping[str, Any] = field(default_factory=dict)  # of DDP
    change: Callable[[nn.Module], nn.Module] = lambda model: model  # before DDP wraps it
    set_to_none: bool = True
    slow_to_start: bool = False  # then few methods are tried


def freeze_trunk(model: nn.Module) -> nn.Module:
    for parameter in model.trunk.parameters():
        parameter.requires_grad_(False)
    return model


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="aot_eager")


SCENARIOS = {
    "plain": Scenario(),
    "static graph": Scenario(never_right, {"static_graph": True}),
    "unused parameters": Scenario(some_branches, {"find_unused_parameters": True}),
    "no_sync": Scenario(accumulate),
    "no_sync and unused": Scenario(accumulate_branches, {"find_unused_parameters": True}),
    "gradients are views": Scenario(options={"gradient_as_bucket_view": True}),
    "gradients are views, kept": Scenario(
        options={"gradient_as_bucket_view": True}, set_to_none=False
    ),
    "gradients are kept": Scenario(set_to_none=False),
    "frozen parameters": Scenario(change=freeze_trunk),
    "no buffers": Scenario(options={"broadcast_buffers": False}),
    "compiled": Scenario(options={"bucket_cap_mb": 25}, change=compiled, slow_to_start=True),
}


class Actor:
    """One model in a scenario, with parameter groups and clipping as people have them."""

    def __init__(self, rank: Rank, scenario: Scenario) -> None:
        self.rank = rank.rank
        self.scenario = scenario
        # Many buckets, so that DDP cuts them anew after the first step.
        options = {"bucket_cap_mb": 0.0007, **scenario.options}
        self.ddp = DistributedDataParallel(scenario.change(Branches().to(models.place)), **options)
        self.trained = [p for p in self.ddp.parameters() if p.requires_grad]
        weights = [p for p in self.trained if p.dim() > 1]
        others = [p for p in self.trained if p.dim() <= 1]
        groups = [{"params": weights, "lr": 0.05}, {"params": others, "lr": 0.01}]
        self.optimizer = torch.optim.SGD(groups, momentum=0.9)

    def backward(self, step: int) -> None:
        self.optimizer.zero_grad(self.scenario.set_to_none)
        self.scenario.step(self.ddp, self.rank, step)

    def update(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.trained, 0.5)
        self.optimizer.step()

    def alone(self, step: int) -> Tensor:
        """What this rank would see without the others, flat."""
        twin = copy.deepcopy(getattr(self.ddp.module, "_orig_mod", self.ddp.module))
        twin.zero_grad()
        self.scenario.step(twin, self.rank, step)
        return flat(twin, gradient)[self.moving()]

    def mean(self) -> Tensor:
        return flat(self.ddp.module, gradient)[self.moving()]

    def moving(self) -> Tensor:
        """Which entries are trained."""
        return flat(self.ddp.module, lambda p: torch.full(p.shape, p.requires_grad))

    def weights(self) -> Tensor:
        return flat(self.ddp.module, lambda p: p.detach())


def gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def equal_plain_ddp(rank: Rank, name: str) -> None:
    """At density 1 every method of the catalog is plain DDP."""
    plain = Actor(rank, SCENARIOS[name])
    methods = {method["name"]: method["feedback"] for method in topreduce.methods()}
    if SCENARIOS[name].slow_to_start:
        methods = {"topk": "residual"}
    actors = {method: Actor(rank, SCENARIOS[name]) for method in methods}
    for method, actor in actors.items():
        memory = "none" if methods[method] == "none" else "residual"  # no momentum of our own
        density = None if method == "dense" else 1.0
        attach_at_once(actor.ddp, method, density=density, feedback=memory)
    for step in range(4):
        for actor in (plain, *actors.values()):
            actor.backward(step)
        for method, actor in actors.items():
            for ours, theirs in zip(actor.trained, plain.trained, strict=True):
                assert (ours.grad is None) == (theirs.grad is None), (method, step)
            torch.testing.assert_close(actor.mean(), plain.mean(), msg=f"{method}, step {step}")
            actor.update()
        plain.update()


def keep_the_laws(rank: Rank, name: str, settings: dict[str, Any]) -> None:
    """What leaves the ranks' books is what everyone applies; what DDP drops, nobody settles."""
    actor = Actor(rank, SCENARIOS[name])
    sync = attach_at_once(actor.ddp, **settings)
    eventful = 0
    for step, settled in enumerate(settlements(actor, sync, range(6))):
        applied = actor.mean().double() * rank.ranks
        torch.testing.assert_close(
            rank_order_sum(settled), applied, rtol=1e-4, atol=1e-6, msg=f"step {step}"
        )
        eventful += int(applied.count_nonzero() > 0)
        actor.update()
    assert eventful >= 4  # the strongest may all lie in what DDP drops
    assert [step["step"] for step in sync.history()] == list(range(6))


def settlements(actor: Actor, sync: topreduce.torch.Sync, steps: range) -> Iterator[Tensor]:
    """Does the steps; after each, what this rank settled by it."""
    for step in steps:
        alone, before = actor.alone(step), owed(sync)
        actor.backward(step)
        yield before.double() + alone.double() - owed(sync).double()
