"""The state of one rank from the files of a run, which may have had another number of ranks.

A rank opens its own file, or those of the ranks that lie under it (resharding.py), and reads them
tensor by tensor: it never holds more than its own state and one tensor.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from topreduce.torch.checkpoint import few
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
    wanted = "no step" if step is None else f"not step {step}"
    told = "; ".join(f"rank {rank}: {_few(steps)}" for rank, steps in enumerate(by_rank))
    raise ValueError(
        f"load: {folder} holds {wanted} of which each rank finds its file, or those of all ranks "
        f"that saved. Steps found by {told}"
    )


def read(folder: Path, place: Place, step: int, *, tensors: bool) -> dict[str, Any]:
    """What `place` has to load. Without `tensors`: for a rank that owes nothing itself."""
    files = find(folder)[step]
    if place in files:
        whole = StateFile(files[place])
        return {key: whole[key] for key in whole if tensors or whole.shape(key) is None}
    files = complete_sets(folder)[step]
    saved = next(iter(files))
    if saved.shards != place.shards:
        raise ValueError(
            f"load: {folder} holds {saved.shards} shards of each replica, and this run has "
            f"{place.shards}: use torch.distributed.checkpoint, which cuts state_dict() anew"
        )
    parts: list[tuple[float, Mapping[str, Any]]] = []
    common: dict[str, Any] = {}
    for rank, share in shares(saved.ranks, place.rank, place.ranks):
        state = StateFile(files[Place(rank, saved.ranks, place.shard, place.shards)])
        part = _Part(state, f"rank{rank}/", tensors=tensors)
        shared = {key: state[key] for key in state if key not in part.keys_in_file}
        common = common or shared
        first = parts[0][1] if parts else part
        if shared != common or set(part) != set(first) or part["step"] != first["step"]:
            raise ValueError(f"load: {folder} holds files of different runs for step {step}")
        parts.append((share, part))
    own = {f"rank{place.rank}/{key}": value for key, value in blend(parts).items()}
    return {**common, **own, "ranks": place.ranks}


class _Part(Mapping[str, Any]):
    """What a file holds of its rank alone."""

    def __init__(self, state: StateFile, prefix: str, *, tensors: bool) -> None:
        self._state, self._prefix = state, prefix
        self.keys_in_file = {key for key in state if key.startswith(prefix)}
        self._keys = [
            key.removeprefix(prefix)
            for key in state
            if key in self.keys_in_file and (tensors or state.shape(key) is None)
        ]

    def __getitem__(self, key: str) -> Any:
        return self._state[self._prefix + key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


def _few(steps: set[int]) -> str:
    return few(str(step) for step in steps)
