"""A rank's state as a flat dictionary of tensors, numbers and words.

    format, ranks, settings/<name>      the same on every rank
    texts/<name>                        the same, what the run chose; may be missing
    rank<r>/<number>                    one number
    rank<r>/<quantity>/<parameter>      one number, or one tensor in the parameter's shape

The rank stands in the key because torch.distributed.checkpoint keeps one value per key. With
several ranks per machine it is the number of the machine: its delegate saves what is owed, the
others only the numbers that all ranks of the machine share.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch

from topreduce.torch.averager import Averager
from topreduce.torch.process_group import GroupCommunicator
from topreduce.torch.state_files import Place
from topreduce.torch.two_levels import Member

FORMAT = 1


class Book(Protocol):
    """How the state of a kind of model is kept."""

    def place(self, comm: GroupCommunicator) -> Place:
        """Whose state it is, among the files of a run."""

    def pack(self, reducer: Averager, comm: GroupCommunicator) -> dict[str, Any]: ...

    def unpack(self, saved: Mapping[str, Any], reducer: Averager, comm: GroupCommunicator) -> None:
        """ValueError, with what differs, and then nothing has changed."""


class WholeBook:
    """Of models that are not sharded."""

    def place(self, comm: GroupCommunicator) -> Place:
        return Place(comm.ledger, comm.ledgers)

    def pack(self, reducer: Averager, comm: GroupCommunicator) -> dict[str, Any]:
        return pack(reducer, comm.ledger, comm.ledgers)

    def unpack(self, saved: Mapping[str, Any], reducer: Averager, comm: GroupCommunicator) -> None:
        unpack(saved, reducer, comm.ledger, comm.ledgers)


def empty(state: Mapping[str, Any], rank: int, ranks: int) -> dict[str, Any]:
    """Like the state of `rank`, for each of `ranks` ranks, to be loaded into."""
    prefix = f"rank{rank}/"
    empty: dict[str, Any] = {}
    for key, value in state.items():
        for each in range(ranks) if key.startswith(prefix) else [rank]:
            place = f"rank{each}/{key.removeprefix(prefix)}" if key.startswith(prefix) else key
            empty[place] = value.clone() if isinstance(value, torch.Tensor) else value
    return {**empty, "ranks": ranks}


def pack(reducer: Averager, rank: int, ranks: int) -> dict[str, Any]:
    """The reducer's state under this rank's keys."""
    settings = {name: value for name, value in reducer.spec.items() if name != "threads"}
    state = reducer.state()
    return {
        "format": FORMAT,
        "ranks": ranks,
        **{f"settings/{name}": value for name, value in settings.items()},
        **{f"texts/{name}": text for name, text in state.get("texts", {}).items()},
        **{f"rank{rank}/{key}": value for key, value in _flatten(reducer, state).items()},
    }


def unpack(saved: Mapping[str, Any], reducer: Averager, rank: int, ranks: int) -> None:
    """Loads what `pack` made. ValueError, with what differs, and then nothing has changed."""
    format_ = saved.get("format") if isinstance(saved, Mapping) else None
    if format_ != FORMAT:
        raise ValueError(f"not a state_dict() of topreduce, format {FORMAT}: format is {format_}")
    if saved.get("ranks") != ranks:
        raise ValueError(
            f"saved by {saved.get('ranks')} ranks, but this run has {ranks}: give the states of "
            "all of them to topreduce.torch.reshard"
        )
    differs = other_settings(saved, reducer)
    if saved.get("settings/feedback") != reducer.spec["feedback"]:
        raise ValueError(differs)
    prefix = f"rank{rank}/"
    own = {
        key.removeprefix(prefix): _at_home(saved[key]) for key in saved if key.startswith(prefix)
    }
    if not own:
        others = {key.split("/")[0] for key in saved if key.startswith("rank") and "/" in key}
        raise ValueError(
            f"holds nothing of rank {rank}; it is of {few(others)}: every rank loads what it saved"
        )
    state = reducer.state()
    here = _flatten(reducer, state)
    if isinstance(reducer, Member):  # it may be given the state of its delegate
        own = {key: value for key, value in own.items() if key in here}
    _compare(own, here, differs)

    for quantity, arrays in state["entries"].items():
        state["entries"][quantity] = {
            parameter: own[f"{quantity}/{parameter}"].contiguous().numpy() for parameter in arrays
        }
    for quantity, values in state["parameters"].items():
        state["parameters"][quantity] = {each: own[f"{quantity}/{each}"] for each in values}
    state["numbers"] = {name: own[name] for name in state["numbers"]}
    state["texts"] = {name: str(saved.get(f"texts/{name}", "")) for name in state.get("texts", {})}
    reducer.load_state(state)
    if own["bypassed"]:
        reducer.bypass()
    else:
        reducer.compress()


def other_settings(saved: Mapping[str, Any], reducer: Averager) -> str:
    """How those differ on which it depends what a state holds, and what to do; empty if alike."""
    was, now = [], []
    for name in ("method", "feedback", "select", "exchange", "keep_dense"):
        before, here = saved.get(f"settings/{name}"), reducer.spec[name]
        if name in ("select", "exchange"):  # their settings are not kept in a state
            before, here = (str(each).partition(":")[0] for each in (before, here))
        if before != here:
            was.append(f"{name}={before!r}")
            now.append(f"{name}={here!r}")
    if not was:
        return ""
    return (
        f"saved with {', '.join(was)}, but this run has {', '.join(now)}: attach as it was saved, "
        "and load; configure() then changes all but feedback and keep_dense"
    )


def few(words: Iterable[str]) -> str:
    """At most five of them, in order."""
    words = sorted(words)
    more = f" and {len(words) - 5} more" if len(words) > 5 else ""
    return ", ".join(words[:5]) + more or "none"


def _flatten(reducer: Averager, state: dict[str, dict[str, Any]]) -> dict[str, Any]:
    flat: dict[str, Any] = {**state["numbers"], "bypassed": int(reducer.bypassed)}
    for quantity, values in state["parameters"].items():
        flat.update({f"{quantity}/{each}": value for each, value in values.items()})
    for quantity, arrays in state["entries"].items():
        flat.update({f"{quantity}/{each}": torch.from_numpy(a) for each, a in arrays.items()})
    return flat


def _compare(saved: Mapping[str, Any], here: Mapping[str, Any], differs: str) -> None:
    """ValueError unless both have the same keys, and values of the same kind and shape. `differs`:
    what `other_settings` said.
    """
    missing, unknown = (
        {key.partition("/")[2] or key for key in keys}
        for keys in (here.keys() - saved.keys(), saved.keys() - here.keys())
    )
    if missing or unknown:
        parts = [f"missing {few(missing)}"] if missing else []
        parts += [f"not known here: {few(unknown)}"] if unknown else []
        raise ValueError(differs or f"saved for another model, or damaged: {'; '.join(parts)}")
    kinds = {key: (_kind(saved[key]), _kind(here[key])) for key in here}
    others = [f"{key} is {was}, here {now}" for key, (was, now) in kinds.items() if was != now]
    if others:
        raise ValueError(f"saved for another model, or damaged: {few(others)}")
    damaged = [key for key in saved if not _is_finite(saved[key])]
    if damaged:
        raise ValueError(f"damaged: infinity or NaN in {few(damaged)}")
    if saved["step"] < 0 or saved["step"] % 1:
        raise ValueError(f"damaged: step is {saved['step']}")


def _at_home(value: Any) -> Any:
    """A checkpoint may have been loaded onto an accelerator."""
    return value.cpu() if isinstance(value, torch.Tensor) else value


def _is_finite(value: Any) -> bool:
    return bool(torch.isfinite(torch.as_tensor(value, device="cpu")).all())


def _kind(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)}".removeprefix("torch.")
    return "a number" if isinstance(value, (int, float)) else type(value).__name__
