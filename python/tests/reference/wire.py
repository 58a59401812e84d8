"""Values as peers read them."""

from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from operator import add

import numpy as np

from reference.basics import Floats, Places, starts


def as_bf16(values: Floats) -> Floats:
    """The upper 16 bits, rounded to nearest, ties to even."""
    bits = values.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return rounded.astype(np.uint32).view(np.float32)


def as_fp16(values: Floats) -> Floats:
    """What is too large becomes the largest."""
    return np.clip(values, -65504, 65504).astype(np.float16).astype(np.float32)


BITS = {"int8": 8, "int4": 4, "int2": 2, "sign": 1}  # of a code; 64 values share a scale
LARGEST_SCALE = {
    "int8": float.fromhex("0x1.fep120"),
    "int4": float.fromhex("0x1.fep124"),
    "int2": float.fromhex("0x1.fep126"),
    "sign": float.fromhex("0x1.fep127"),
}


def block_mean(magnitudes: Floats) -> np.float32:
    """Sums over every eighth of 64, then halves onto halves; a 64th each."""
    padded = np.zeros(64, np.float32)
    padded[: magnitudes.size] = magnitudes
    sums = reduce(add, (padded * np.float32(2**-6)).reshape(8, 8), np.zeros(8, np.float32))
    while sums.size > 1:
        sums = sums[: sums.size // 2] + sums[sums.size // 2 :]
    return np.float32(sums[0] * (np.float32(64) / np.float32(magnitudes.size)))


def rounded_block(values: str, block: Floats) -> Floats:
    """Up to 64 values as whole multiples of a scale with 8 significant bits."""
    magnitudes = np.abs(block)
    largest = magnitudes.max()

    def scale_of(wanted: np.float32) -> np.float32:
        return as_bf16(np.array([min(wanted, np.float32(LARGEST_SCALE[values]))]))[0]

    def nearest(scale: np.float32, most: int) -> Floats:
        if scale == 0:
            return np.zeros_like(block)
        return np.rint(np.minimum(magnitudes / scale, np.float32(most)))

    if values in ("int8", "int4"):
        most = 2 ** (BITS[values] - 1) - 1
        scale = scale_of(largest / np.float32(most))
        codes = nearest(scale, most)
    else:
        mean = min(block_mean(magnitudes), largest)
        scale = scale_of(mean if values == "sign" else np.float32(0.875) * mean)
        codes = np.ones_like(block)
        if values == "int2" and scale > 0 and magnitudes.min() >= scale / 2:
            codes = np.where(magnitudes > np.float32(1.5) * scale, np.float32(2), np.float32(1))
        elif values == "int2":
            scale = scale_of(np.float32(1.5) * min(mean, np.float32(2.0**126)))
            codes = nearest(scale, 1)
    return np.where(np.signbit(block), -1, 1).astype(np.float32) * codes * scale + np.float32(0)


def rounded_run(values: str, run: Floats) -> Floats:
    """The values of one piece."""
    if values in ROUNDED:
        return ROUNDED[values](run)
    blocks = [rounded_block(values, run[at : at + 64]) for at in range(0, run.size, 64)]
    return np.concatenate([*blocks, np.empty(0, np.float32)])


def run_bytes(values: str, count: int) -> int:
    if values in ROUNDED:
        return count * (4 if values == "fp32" else 2)
    full, rest = divmod(count, 64)
    return full * (2 + 8 * BITS[values]) + (2 + -(-BITS[values] * rest // 8) if rest else 0)


ROUNDED: dict[str, Callable[[Floats], Floats]] = {
    "fp32": lambda values: values,
    "bf16": as_bf16,
    "fp16": as_fp16,
}
VALUES = {*ROUNDED, *BITS}


def without_scales(values: str) -> str:
    """For what no parameter places, or nobody remembers the rounding of."""
    return values if values in ROUNDED else "bf16"


Pieces = Sequence[tuple[int, int]]


def parameters(sizes: Sequence[int]) -> Pieces:
    return [(start, start + size) for start, size in zip(starts(sizes), sizes, strict=True)]


def union(places: Iterable[Places]) -> Places:
    return np.unique(np.concatenate([np.empty(0, np.int64), *places]))


def between(places: Places, begin: int, end: int) -> Places:
    """Of places in rising order."""
    first, last = places.searchsorted((begin, end))
    return places[first:last]


def journey(values: str, vector: Floats, places: Places, pieces: Pieces) -> tuple[Floats, Places]:
    """Entries of a vector as receivers read them: zero everywhere else; and where they are.

    A piece is filled up with zeros if that is smaller; then zeros do not arrive.
    """
    read = np.zeros_like(vector)
    there = []
    for begin, end in pieces:
        size, mine = end - begin, between(places, begin, end)
        listed = 8 * run_bytes(values, mine.size) + size + mine.size // 32
        filled = 8 * run_bytes(values, size) <= listed and values != "sign"
        if filled and mine.size < size:
            spread_out = np.zeros_like(vector)
            spread_out[mine] = vector[mine]
            read[begin:end] = rounded_run(values, spread_out[begin:end])
            mine = mine[read[mine] != 0]
        else:
            read[mine] = rounded_run(values, vector[mine])
        there.append(mine)
    return read, union(there)


def known_places(values: str, vector: Floats, places: Places, pieces: Pieces) -> Floats:
    """The same where both sides know the places."""
    read = np.zeros_like(vector)
    if values in ROUNDED:  # each entry by itself, whichever piece it is in
        read[places] = rounded_run(values, vector[places])
        return read
    for begin, end in pieces:
        mine = between(places, begin, end)
        read[mine] = rounded_run(values, vector[mine])
    return read
