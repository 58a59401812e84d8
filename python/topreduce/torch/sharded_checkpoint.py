"""The state of a sharded model, so that torch.distributed.checkpoint can cut it anew.

    format, ranks, settings/<name>      as in checkpoint.py; ranks are replicas
    shards                              of each replica, when it was saved
    rank<r>/step, rank<r>/bypassed      of replica r
    rank<r>/<quantity>/<parameter>      of replica r, a DTensor that is sharded like the parameter
    rank<r>/learnt/<row>                what a shard has learnt; row i of shard i modulo shards

What a shard has learnt, such as its threshold, fits that shard alone: with another number of shards
it is learnt anew, which takes a step or two. There are as many rows for any number of shards, since
torch.distributed.checkpoint loads only what was saved.
"""

import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from topreduce.torch import checkpoint
from topreduce.torch.averager import Averager
from topreduce.torch.fsdp import as_gradient, local_part
from topreduce.torch.process_group import GroupCommunicator
from topreduce.torch.state_files import Place

_ROWS = 256  # the largest number of shards whose learnt values are kept
_SHARED = ("step", "bypassed")  # by the shards of a replica


class ShardedBook:
    """See checkpoint.Book."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], mesh: DeviceMesh) -> None:
        self._parameters, self._mesh = dict(parameters), mesh

    def place(self, comm: GroupCommunicator) -> Place:
        return Place(comm.ledger, comm.ledgers, self._mesh.get_local_rank(), self._mesh.size())

    def pack(self, reducer: Averager, comm: GroupCommunicator) -> dict[str, Any]:
        prefix = f"rank{comm.ledger}/"
        whole = checkpoint.pack(reducer, comm.ledger, comm.ledgers)
        state = {key: value for key, value in whole.items() if not key.startswith(prefix)}
        state["shards"] = self._mesh.size()
        own = _own(whole, prefix)
        for key, value in own.items():
            if isinstance(value, torch.Tensor):
                parameter = self._parameters[key.partition("/")[2]]
                state[prefix + key] = as_gradient(parameter, value)
            elif key in _SHARED:
                state[prefix + key] = value
        learnt = _learnt(own)
        row = torch.tensor(list(learnt.values()), dtype=torch.float64)
        for number in self._rows():
            state[f"{prefix}learnt/{number}"] = row
        state[f"{prefix}learnt_names"] = _fingerprint(learnt)
        return state

    def unpack(self, saved: Mapping[str, Any], reducer: Averager, comm: GroupCommunicator) -> None:
        if not isinstance(saved, Mapping) or "shards" not in saved:
            raise ValueError("not a state_dict() of a sharded model")
        prefix = f"rank{comm.ledger}/"
        here = _own(checkpoint.pack(reducer, comm.ledger, comm.ledgers), prefix)
        state = {key: value for key, value in saved.items() if not key.startswith(prefix)}
        own = _own(saved, prefix)
        names, learnt = own.pop("learnt_names", None), _learnt(here)
        rows = [own.pop(f"learnt/{number}", None) for number in self._rows()]
        own = {key: value for key, value in own.items() if not key.startswith("learnt/")}
        damaged = bool(rows) and not isinstance(rows[0], torch.Tensor)
        if own and (names != _fingerprint(learnt) or damaged):
            damage = "damaged: what its stages learnt does not fit"
            raise ValueError(checkpoint.other_settings(saved, reducer) or damage)
        shards, here_are = saved["shards"], self._mesh.size()
        if own:
            if shards == here_are and rows:
                learnt = dict(zip(learnt, rows[0].tolist(), strict=True))
            own.update(learnt)
        for key, value in own.items():
            state[prefix + key] = local_part(value) if isinstance(value, torch.Tensor) else value
        shapes = {key: getattr(value, "shape", ()) for key, value in here.items()}
        uncut = any(getattr(state.get(prefix + key), "shape", ()) != shapes[key] for key in shapes)
        if own and shards != here_are and uncut:
            raise ValueError(
                f"saved with {shards} shards, and this run has {here_are}: load it by "
                "torch.distributed.checkpoint, which cuts it anew"
            )
        checkpoint.unpack(state, reducer, comm.ledger, comm.ledgers)

    def _rows(self) -> range:
        """Those of this shard."""
        return range(self._mesh.get_local_rank(), _ROWS, self._mesh.size())


def _own(state: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {key.removeprefix(prefix): state[key] for key in state if key.startswith(prefix)}


def _learnt(own: Mapping[str, Any]) -> dict[str, float]:
    """What belongs to one shard, in one order."""
    return {
        key: float(own[key])
        for key in sorted(own)
        if key not in _SHARED and not isinstance(own[key], torch.Tensor)
    }


def _fingerprint(learnt: Mapping[str, float]) -> int:
    return zlib.crc32("\n".join(learnt).encode())
