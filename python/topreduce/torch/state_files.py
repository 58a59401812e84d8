"""What each rank owes, in a file of its own.

    <folder>/topreduce-step120-rank0-of-4.safetensors

Files of the safetensors format, which any tool can read: tensors by name, and numbers and words as
JSON in its metadata. Each tensor and the head have a checksum (XXH64). A file gets its name when it
is complete and on the disk, so what bears a name is whole; whatever damaged it since is found when
it is read. Tensors are read one at a time, when they are asked for. Files that were saved together
bear the same word, `run`.
"""

import contextlib
import json
import os
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch

from topreduce._core import fingerprint
from topreduce.torch.verifying import bytes_of

_LENGTH = struct.Struct("<Q")
_MOST_HEAD = 1 << 28  # bytes
_TYPES = {torch.float32: "F32", torch.float64: "F64"}
_NAME = re.compile(
    r"topreduce-step(?P<step>\d+)-rank(?P<rank>\d+)-of-(?P<ranks>\d+)"
    r"(?:-shard(?P<shard>\d+)-of-(?P<shards>\d+))?\.safetensors"
)


class Place(NamedTuple):
    """Whose state it is."""

    rank: int
    ranks: int
    shard: int = 0
    shards: int = 1

    def file(self, step: int | str) -> str:
        shard = f"-shard{self.shard}-of-{self.shards}" if self.shards > 1 else ""
        return f"topreduce-step{step}-rank{self.rank}-of-{self.ranks}{shard}.safetensors"


def find(folder: Path) -> dict[int, dict[Place, Path]]:
    """Files of this kind, by step and by whose state they are."""
    found: dict[int, dict[Place, Path]] = {}
    with contextlib.suppress(FileNotFoundError):
        for file in folder.iterdir():
            match = _NAME.fullmatch(file.name)
            if match:
                numbers = {name: int(value) for name, value in match.groupdict("").items() if value}
                step = numbers.pop("step")
                found.setdefault(step, {})[Place(**numbers)] = file
    return found


def complete_sets(folder: Path) -> dict[int, dict[Place, Path]]:
    """Those steps of which all ranks have left a file; if two runs have, the later one's."""
    sets: dict[int, dict[Place, Path]] = {}
    for step, files in find(folder).items():
        runs = []
        for ranks, shards in {(place.ranks, place.shards) for place in files}:
            wanted = [Place(r, ranks, s, shards) for r in range(ranks) for s in range(shards)]
            if all(place in files for place in wanted):
                run = {place: files[place] for place in wanted}
                with contextlib.suppress(FileNotFoundError):  # another rank removes old ones
                    runs.append((max(file.stat().st_mtime_ns for file in run.values()), run))
        if runs:
            sets[step] = max(runs, key=lambda each: each[0])[1]
    return sets


def save(
    folder: Path,
    place: Place,
    step: int,
    state: Mapping[str, Any],
    cuts: Mapping[str, Sequence[int]] = MappingProxyType({}),
    run: str = "",
) -> Path:
    """Writes a state, and removes those of before the last one. `cuts`: of tensors that are parts
    of larger ones, the dimension that is cut, and where in it they begin. `run`: the same word on
    all ranks that save together.

    When a rank saves, all others have left the step of its last save. Should one of them have
    failed to write it, the last set that is complete stays too.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(f"{place.file('*')}.*.partial"):  # by a process that was killed
        left.unlink(missing_ok=True)
    file = folder / place.file(step)
    _write(file, state, cuts, run)
    found = find(folder)
    own = max((each for each, files in found.items() if each < step and place in files), default=0)
    whole = max((each for each in complete_sets(folder) if each < step), default=own)
    for each, files in found.items():
        if each < own and each != whole:
            for old in files.values():
                old.unlink(missing_ok=True)
    return file


def _write(
    file: Path, state: Mapping[str, Any], cuts: Mapping[str, Sequence[int]], run: str
) -> None:
    tensors = {key: value.cpu() for key, value in state.items() if isinstance(value, torch.Tensor)}
    others = {key: value for key, value in state.items() if key not in tensors}
    head: dict[str, Any] = {}
    start = 0
    checksums = {}
    for key, tensor in tensors.items():
        end = start + tensor.numel() * tensor.element_size()
        head[key] = {
            "dtype": _TYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        checksums[key] = f"{fingerprint(bytes_of(tensor).numpy()):016x}"
        start = end
    head["__metadata__"] = {
        "format": "pt",
        "topreduce": json.dumps(others),
        "xxh64": json.dumps(checksums),
        "cuts": json.dumps(dict(cuts)),
        "run": run,
    }
    head["__metadata__"]["head"] = _seal(head)
    words = json.dumps(head).encode()
    words += b" " * (-len(words) % 8)
    partial = file.with_name(f"{file.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as out:
            out.write(_LENGTH.pack(len(words)))
            out.write(words)
            for tensor in tensors.values():
                out.write(bytes_of(tensor).numpy().data)
            out.flush()
            os.fsync(out.fileno())
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # not all systems can sync a folder
        _sync(file.parent)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class StateFile(Mapping[str, Any]):
    """A state that is read from a file: tensors when they are asked for, and not kept.

    ValueError, with what is wrong, if the file is damaged.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        size = file.stat().st_size
        with file.open("rb") as source:
            length = source.read(_LENGTH.size)
            words = b""
            if len(length) == _LENGTH.size:
                (expected,) = _LENGTH.unpack(length)
                words = source.read(expected) if expected <= min(size, _MOST_HEAD) else b""
            try:
                head = json.loads(words)
                seal = head["__metadata__"].pop("head")
                metadata = dict(head["__metadata__"])
            except (ValueError, LookupError, TypeError, AttributeError):
                raise self._damaged("its head cannot be read") from None
        if _seal(head) != seal:
            raise self._damaged("its head has another checksum")
        del head["__metadata__"]
        self._others: dict[str, Any] = json.loads(metadata["topreduce"])
        self._tensors: dict[str, Any] = head
        self._checksums: dict[str, str] = json.loads(metadata["xxh64"])
        self.cuts: dict[str, list[int]] = json.loads(metadata["cuts"])  # as given to `save`
        self.run: str = metadata.get("run", "")
        self._start = _LENGTH.size + len(words)
        end = max((each["data_offsets"][1] for each in head.values()), default=0)
        if size != self._start + end:
            raise self._damaged(f"{size} bytes instead of {self._start + end}")
        self._expect_what_the_name_says()

    def _expect_what_the_name_says(self) -> None:
        match = _NAME.fullmatch(self._file.name)
        if match is None:
            return
        rank, ranks, step = match["rank"], int(match["ranks"]), int(match["step"])
        found = self.get("ranks"), self.get(f"rank{rank}/step")
        if found != (ranks, step):
            raise ValueError(
                f"{self._file} is not what its name says: of {found[0]} ranks, and rank {rank} at "
                f"step {found[1]}; load a set of another step"
            )

    def __getitem__(self, key: str) -> Any:
        if key in self._others:
            return self._others[key]
        tensor = self._tensors[key]
        start, end = tensor["data_offsets"]
        kind = np.dtype("<f4" if tensor["dtype"] == "F32" else "<f8")
        with self._file.open("rb") as source:
            source.seek(self._start + start)
            array = np.fromfile(source, kind, (end - start) // kind.itemsize)
        if f"{fingerprint(array.view(np.uint8)):016x}" != self._checksums[key]:
            raise self._damaged(f"{key} has another checksum")
        return torch.from_numpy(array).reshape(tensor["shape"])

    def __iter__(self) -> Iterator[str]:
        yield from self._others
        yield from self._tensors

    def __len__(self) -> int:
        return len(self._others) + len(self._tensors)

    def shape(self, key: str) -> tuple[int, ...] | None:
        """Of a tensor, without reading it; None for what is none."""
        return tuple(self._tensors[key]["shape"]) if key in self._tensors else None

    def _damaged(self, why: str) -> ValueError:
        return ValueError(f"{self._file} is damaged: {why}; load a set of another step")


def _seal(head: Mapping[str, Any]) -> str:
    words = json.dumps(head, sort_keys=True).encode()
    return f"{fingerprint(np.frombuffer(words, np.uint8)):016x}"
