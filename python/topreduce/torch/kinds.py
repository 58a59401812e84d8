"""The kinds of models that attach() takes, and what it must know of each."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from topreduce import Layout
from topreduce.torch.averager import Averager
from topreduce.torch.checkpoint import Book, WholeBook
from topreduce.torch.device import GradientDevice
from topreduce.torch.meeting import Group, Ranks
from topreduce.torch.process_group import GroupCommunicator, timeout_of
from topreduce.torch.steps import Steps

Parameters = Mapping[str, torch.nn.Parameter]


class Attached(NamedTuple):
    """What the handle needs of the adapter."""

    release: Callable[[str], None]  # what `detach` does; it is told what stays unpaid
    hold: Callable[[], AbstractContextManager[None]]
    book: Book = WholeBook()
    # For `rebuild`: the module, if it is still there; and another group in place of the first. None
    # where that cannot be.
    module: Callable[[], torch.nn.Module | None] = lambda: None
    regroup: Callable[[dist.ProcessGroup | Ranks], None] | None = None


class Kind(Protocol):
    """One model of some kind."""

    advice: str  # what to do about parameters that were frozen, and are not now
    cut_into: int  # parts of the model, one on each of so many ranks
    group: dist.ProcessGroup | Ranks  # the ranks that average

    @property
    def model(self) -> torch.nn.Module:
        """As it was given."""

    @property
    def module(self) -> torch.nn.Module:
        """Whose parameters have their names."""

    def places(self) -> Sequence[Group]:
        """Where its ranks meet before they are connected."""

    def is_attached(self) -> bool: ...

    def timeout(self) -> timedelta:
        """How long its process group waits."""

    def connect(self, local_group: object, timeout: timedelta) -> GroupCommunicator:
        """Collective."""

    def check(self) -> None:
        """ValueError for what speaks against attaching, on this rank."""

    def parameters(self) -> Parameters:
        """Those to average, in registration order."""

    def frozen(self) -> Parameters: ...

    def local(self, parameter: Tensor) -> Tensor:
        """What this rank holds of it."""

    def reducer(
        self, comm: GroupCommunicator, layout: Layout, method: str, settings: dict[str, Any]
    ) -> Averager: ...

    def introduction(self, reducer: Averager) -> str:
        """A word that all ranks must have in common, beside what the reducer compares."""

    def debts(self) -> str:
        """In words, what an earlier handle left unpaid."""

    def take_over(self, comm: GroupCommunicator) -> None:
        """All ranks agree. Collective."""

    def start(
        self,
        steps: Steps,
        reducer: Averager,
        parameters: Parameters,
        device: GradientDevice | None,
    ) -> Attached:
        """Gradients are averaged from now on."""


def patience_of(group: dist.ProcessGroup | Ranks, module: torch.nn.Module) -> timedelta:
    """How long operations of this group wait for the module's tensors."""
    device = next((each.device for each in module.parameters()), torch.device("cpu"))
    return timeout_of(group, device)


def plain_name(name: str) -> str:
    """The name that a parameter has without wrappers, so that checkpoints fit both."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")
