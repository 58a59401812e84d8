"""Sums of tensors where they lie, over the devices of some ranks.

By a process group of our own with the backend that the user's has for the device (NCCL, say), so
that it does not meet the user's collectives. Its operations are queued in the current stream.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    BroadcastOptions,
    PrefixStore,
    Store,
    _DistributedBackendOptions,
)

from topreduce import CommError
from topreduce.torch.meeting import attempt

_PIECE = 1 << 22  # entries that are added up at a time, so that buffers stay small


def backend_of(group: object, device: torch.device) -> Any:
    """What the group uses for tensors of this device; None if it has nothing, or is no group."""
    if not isinstance(group, dist.ProcessGroup):
        return None
    found, _ = attempt(lambda: group._get_backend(device))
    return getattr(found, "wrapped_pg", found)  # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it


class DeviceGroup:
    """Making one is collective."""

    def __init__(
        self, like: Any, store: Store, rank: int, size: int, timeout: timedelta, title: str
    ) -> None:
        """`like`: a backend. `title`: how errors call this rank."""
        self._rank, self._size, self._title = rank, size, title
        self._name = like.name()
        self.bytes_sent = 0  # as if each went from rank to rank
        store = PrefixStore("devices", store)
        self._backend = self._try("connecting", lambda: _make(like, store, rank, size, timeout))

    def all_reduce(self, values: Tensor) -> None:
        """Replaces `values` by their sum over the ranks, in an order of the backend's."""
        if self._size > 1 and values.numel():
            self._wait("all-reduce", lambda: self._backend.allreduce([values]))
            self.bytes_sent += 2 * _bytes(values) * (self._size - 1) // self._size

    def add_up(self, values: Tensor) -> None:
        """The first rank's `values` become the sum in rank order; those of others are spoiled."""
        if self._size > 1:
            for piece in torch.split(values, _PIECE):
                self._add_up(piece)

    def hand_out(self, values: Tensor) -> None:
        """Replaces `values` by those of the first rank."""
        if self._size > 1 and values.numel():
            options = BroadcastOptions()
            options.rootRank, options.rootTensor = 0, 0
            self._wait("broadcast", lambda: self._backend.broadcast([values], options))
            self.bytes_sent += _bytes(values) * (self._size - 1) if self._rank == 0 else 0

    def close(self) -> None:
        """What is under way ends, on this rank."""
        backend, self._backend = self._backend, None
        if backend is not None:
            attempt(backend.abort)

    def _add_up(self, values: Tensor) -> None:
        """Every rank adds up its part of the entries, and sends the sums to the first."""
        sizes = [part.numel() for part in values.tensor_split(self._size)]
        mine = sizes[self._rank]
        terms = values.new_empty(mine * self._size)
        self._trade(terms, [mine] * self._size, values, sizes)
        total, *others = terms.view(self._size, mine)
        for term in others:
            total += term
        nothing, nobody = values.new_empty(0), [0] * self._size
        if self._rank == 0:
            values[:mine] = total
            self._trade(values[mine:], [0, *sizes[1:]], nothing, nobody)
        else:
            self._trade(nothing, nobody, total, [mine, *nobody[1:]])

    def _trade(self, come: Tensor, come_sizes: list[int], go: Tensor, go_sizes: list[int]) -> None:
        """An all-to-all."""
        self._wait(
            "all-to-all", lambda: self._backend.alltoall_base(come, go, come_sizes, go_sizes)
        )
        self.bytes_sent += (sum(go_sizes) - go_sizes[self._rank]) * go.element_size()

    def _wait(self, what: str, collective: Callable[[], Any]) -> None:
        """The current stream does, for backends that have streams; else this thread."""
        if self._backend is None:
            raise CommError(f"{self._title}: {what}: the group is closed")
        self._try(what, lambda: collective().wait())

    def _try(self, what: str, action: Callable[[], Any]) -> Any:
        result, failure = attempt(action)
        if failure:
            raise CommError(f"{self._title}: {what} by {self._name} failed: {failure}")
        return result


def _make(like: Any, store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Another backend of that kind."""
    plugin = dist.Backend._plugins.get(like.name().upper())
    if plugin is None:
        try:
            return type(like)(store, rank, size, timeout)
        except TypeError:  # not all of torch's own take a time-out here
            return type(like)(store, rank, size)
    if not plugin.extended_api:
        return plugin.creator_fn(store, rank, size, timeout)
    options = _DistributedBackendOptions()
    options.store, options.group_rank, options.group_size = store, rank, size
    options.timeout, options.group_id = timeout, "topreduce"
    options.global_ranks_in_group = []
    return plugin.creator_fn(options, None)


def _bytes(values: Tensor) -> int:
    return values.numel() * values.element_size()
