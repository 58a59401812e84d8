"""Ranks that go on after others were lost, or with others that come: Sync.rebuild."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from topreduce import Reducer
from topreduce.torch.process_group import GroupCommunicator
from topreduce.torch.transfer import give, give_states


@dataclass(frozen=True)
class Rebuilt:
    """What a rebuild came to; the same on all ranks, with their numbers in the new group."""

    step: int  # that all ranks make next
    ranks: int  # in the new group
    late: list[int] = field(default_factory=list)  # missed the last commit, and have it now
    joined: list[int] = field(default_factory=list)  # owe nothing
    repaired: list[int] = field(default_factory=list)  # had other parameters than the others
    lost: int = 0  # ranks that are no longer there, and what they owed with them
    lost_norm: float = 0.0  # norm of what they owed, if it was like that of the others
    scale: float = 1.0  # what the others owe was multiplied by it


def rebuild(
    reducer: Reducer,
    comm: GroupCommunicator,
    look: Callable[[], int],
    module: torch.nn.Module,
    owners: Sequence[Any],
) -> Rebuilt:
    """Makes the ranks of `comm` go on together. `look`: a fingerprint of this rank's parameters.
    Collective; if it raises, it can be done again with the ranks that are left.
    """
    plan = reducer.plan_rebuild(comm)
    ranks = range(comm.size)
    late, joined = ([r for r in ranks if plan.roles[r] == role] for role in ("late", "joins"))
    seen = comm.ask(f"{look():x} {len(owners)}")
    if len({each.split()[1] for each in seen}) > 1:
        told = ", ".join(f"rank {r}: {each.split()[1]}" for r, each in enumerate(seen))
        raise ValueError(f"rebuild: give all ranks the same list of optimizers; they have {told}")
    on_time = [rank for rank in ranks if plan.roles[rank] == "on_time"]
    usual = Counter(seen[rank] for rank in on_time).most_common(1)[0][0]  # the first if two are
    source = next(rank for rank in on_time if seen[rank] == usual)
    repaired = [rank for rank in on_time if seen[rank] != usual]
    behind = sorted([*late, *joined, *repaired])
    if behind:
        give(comm, source, behind, module.parameters())
        give_states(comm, source, behind, owners)
    if joined:
        give(comm, source, joined, _buffers(module))
    reducer.rebuild(comm, plan)
    return Rebuilt(
        plan.step, comm.size, late, joined, repaired, plan.lost, plan.lost_norm, plan.scale
    )


def owners_of(optimizer: Any) -> list[Any]:
    """What has a state that follows the parameters: optimizers, schedulers, scalers."""
    owners = [optimizer] if hasattr(optimizer, "state_dict") else list(optimizer)
    for each in owners:
        if not callable(getattr(each, "load_state_dict", None)):
            raise ValueError(
                f"rebuild: optimizer must be an optimizer, or a list of things with state_dict() "
                f"and load_state_dict(), and holds a {type(each).__name__}"
            )
    return owners


def _buffers(module: torch.nn.Module) -> Iterable[Tensor]:
    return [each for each in module.buffers() if each.numel()]
