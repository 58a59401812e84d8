"""The state of one rank from the files of a run, which may have had another number of ranks.

A rank opens its own file, or those of the ranks that lie under it (resharding.py), and of shards
that hold a part of its own; it reads them tensor by tensor, and never holds more than its own state
and one tensor.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from topreduce.torch.checkpoint import few
from topreduce.torch.fsdp import Cut
from topreduce.torch.resharding import blend, shares
from topreduce.torch.state_files import Place, StateFile, complete_sets, find


def loadable(folder: Path, place: Place) -> list[int]:
    """Steps that a rank can load: from its own file, or from all files of other ranks."""
    steps = {step for step, files in find(folder).items() if place in files}
    return sorted(steps | complete_sets(folder).keys())


def choose(words: list[str], folder: Path, step: int | None) -> int:
    """The last step that all ranks can load, of what they said; ValueError if there is none."""
    by_rank: list[set[int]] = [set(json.loads(word)) for word in words]
    common = set.intersection(*by_rank)
    if step is None and common:
        return max(common)
    if step is not None and step in common:
        return step
    absent = "" if folder.exists() else " (this rank has no such folder)"
    wanted = "no complete step" if step is None else f"no complete step {step}"
    told = "; ".join(f"rank {rank}: {_few(steps)}" for rank, steps in enumerate(by_rank))
    raise ValueError(
        f"load: {folder}{absent} holds {wanted}: each rank must find its own file of it, or those "
        f"of all ranks that saved. Steps found by {told}"
    )


def read(
    folder: Path,
    place: Place,
    step: int,
    *,
    tensors: bool,
    cuts: Callable[[], Mapping[str, Cut]] = dict,
) -> tuple[dict[str, Any], list[list[str]]]:
    """What `place` has to load, and of which files: shard, run and name of each. Without `tensors`:
    for a rank that owes nothing itself. `cuts`: the parts of whole tensors that it holds, by key,
    if it is a shard.
    """
    files = complete_sets(folder).get(step) or find(folder).get(step, {})
    if place in files:
        whole = StateFile(files[place])
        state = {key: whole[key] for key in whole if tensors or whole.shape(key) is None}
        return state, [[f"{place.shard} of {place.shards}", whole.run, files[place].name]]
    if not files:
        raise ValueError(f"load: {folder} no longer holds step {step}")
    saved = next(iter(files))
    held = range(saved.shards)  # whose files hold parts of what is wanted
    wanted: Mapping[str, Cut] = {}
    if saved.shards == place.shards:
        held = range(place.shard, place.shard + 1)
    else:
        wanted = cuts()
    parts: list[tuple[float, Mapping[str, Any]]] = []
    common: dict[str, Any] = {}
    runs: list[list[str]] = []
    for rank, share in shares(saved.ranks, place.rank, place.ranks):
        states = []
        for shard in held:
            file = files[Place(rank, saved.ranks, shard, saved.shards)]
            states.append(StateFile(file))
            runs.append([f"{shard} of {saved.shards}", states[-1].run, file.name])
        part = _Part(states, f"rank{rank}/", wanted, tensors=tensors)
        common = common or part.common
        first = parts[0][1] if parts else part
        if part.common != common or set(part) != set(first) or part["step"] != first["step"]:
            raise ValueError(f"load: {folder} holds files of different runs for step {step}")
        parts.append((share, part))
    own = {f"rank{place.rank}/{key}": value for key, value in blend(parts).items()}
    return {**common, **own, "ranks": place.ranks}, runs


def expect_one_run(words: list[str], step: int) -> None:
    """ValueError unless what all ranks have read, as `read` tells, was saved together. The shards
    of a model have a word each.
    """
    files: dict[str, dict[str, str]] = {}  # by shard and run, the first
    for word in words:
        for shard, run, name in json.loads(word):
            files.setdefault(shard, {}).setdefault(run, name)
    for by_run in files.values():
        if len(by_run) > 1:
            raise ValueError(
                f"load: {' and '.join(sorted(by_run.values()))} were not saved together, but by "
                f"different runs, or before and after one went back: load a set of another step "
                f"than {step}"
            )


class _Part(Mapping[str, Any]):
    """What the files of a rank, one or several shards, hold of it alone."""

    def __init__(
        self,
        states: Sequence[StateFile],
        prefix: str,
        wanted: Mapping[str, Cut],
        *,
        tensors: bool,
    ) -> None:
        self._states, self._prefix, self._wanted = states, prefix, wanted
        first = states[0]
        own = {key for key in first if key.startswith(prefix)}
        self.common = {key: first[key] for key in first if key not in own}
        keys = [key for key in first if key in own and (tensors or first.shape(key) is None)]
        self._keys = [key.removeprefix(prefix) for key in keys]

    def __getitem__(self, key: str) -> Any:
        name = self._prefix + key
        if key not in self._wanted or name not in self._states[0].cuts:
            return self._states[0][name]
        dimension, start, shape = self._wanted[key]
        part = torch.zeros(shape)
        for state in self._states:
            _, begin = state.cuts[name]
            length = (state.shape(name) or ())[dimension]
            first, last = max(start, begin), min(start + shape[dimension], begin + length)
            if first < last:
                piece = state[name].narrow(dimension, first - begin, last - first)
                part.narrow(dimension, first - start, last - first).copy_(piece)
        return part

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


def _few(steps: set[int]) -> str:
    return few(str(step) for step in steps)
