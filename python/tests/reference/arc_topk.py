"""The exchange arc_topk: rows that all ranks choose together, by a sketch."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any

import numpy as np

from reference.basics import Delivery, Floats, Places, Step, in_rank_order, size_of
from reference.exchange import everywhere
from reference.random import ROWS, SKETCH, random_below, random_bits, random_normal, random_unit
from reference.wire import ROUNDED, without_scales


@dataclass
class Rows:
    """One tensor of ARC-Top-K."""

    start: int  # in the model
    size: int
    width: int
    count: int  # none: it goes whole
    first_direction: int
    first_draw: int


def arc_rows(
    shapes: Sequence[Sequence[int]], sketch: int = 4, width: int = 0, **_: Any
) -> list[Rows]:
    """Rows along the first dimension, or of `width` entries; none where sketching gains nothing."""
    tensors: list[Rows] = []
    start = directions = draws = 0
    for shape in shapes:
        size = size_of(shape)
        wide = count = 0
        if len(shape) > 1 and size:
            wide = min(width, size) or size // shape[0]
            count = -(-size // wide)
            if count * sketch >= size:
                wide = count = 0
        tensors.append(Rows(start, size, wide, count, directions, draws))
        start, directions, draws = start + size, directions + wide * sketch, draws + count + 1
    return tensors


def arc_sketch(rows: Floats, directions: Floats) -> Floats:
    """rows @ directions.T in float32: 16 partial sums, then halves onto halves."""
    partial = np.zeros((len(rows), len(directions), 16), np.float32)
    for at in range(0, rows.shape[1], 16):
        partial += rows[:, None, at : at + 16] * directions[None, :, at : at + 16]
    while partial.shape[2] > 1:
        half = partial.shape[2] // 2
        partial = partial[:, :, :half] + partial[:, :, half:]
    return partial[:, :, 0]


def arc_topk(pending: list[Floats], chosen: list[Places], step: Step) -> Delivery:
    """Rows that are largest in the mean, seen through a shared random sketch (2510.26709)."""
    options: dict[str, Any] = {"sketch": 4, "stream": "gaussian", "ranked": "tensor", "random": 0.0}
    options.update(step.of_exchange)
    travel = ROUNDED[without_scales(step.values)]
    tensors = arc_rows(step.shapes, **step.of_exchange)
    groups: list[tuple[int, list[tuple[float, int, int]]]] = []  # first draw; score, start, size
    places = []
    for tensor in tensors:
        whole = np.arange(tensor.start, tensor.start + tensor.size)
        if tensor.count == 0:
            places.append(whole)
            continue
        padded = -(-tensor.width // 16) * 16
        directions = np.zeros((options["sketch"], padded), np.float32)
        for i in range(options["sketch"] * tensor.width):
            directions[divmod(i, tensor.width)] = arc_direction(
                step, options["stream"], tensor.first_direction + i
            )
        sketches = []
        for values in pending:
            flat = np.zeros(tensor.count * tensor.width, np.float32)
            flat[: tensor.size] = values[whole]
            rows = np.zeros((tensor.count, padded), np.float32)
            rows[:, : tensor.width] = flat.reshape(tensor.count, tensor.width)
            sketches.append(travel(arc_sketch(rows, directions)))
        total = travel(in_rank_order(sketches)).astype(np.float64)
        scored = []
        for j, row in enumerate(total):
            at = j * tensor.width
            size = min(tensor.width, tensor.size - at)
            scored.append((reduce(add, row * row, 0.0) / size, tensor.start + at, size))
        groups.append((tensor.first_draw, scored))
    if options["ranked"] == "model":
        groups = [(0, [row for _, scored in groups for row in scored])]
    for first_draw, scored in groups:
        for start, size in arc_choice(scored, first_draw, options["random"], step):
            places.append(np.arange(start, start + size))
    return everywhere(pending, np.sort(np.concatenate([np.empty(0, np.int64), *places])), step)


def arc_direction(step: Step, stream: str, i: int) -> float:
    if stream == "gaussian":
        return random_normal(step.seed, step.number, SKETCH, i)
    bits = random_bits(step.seed, step.number, SKETCH, i // 64)
    return 1.0 if bits >> i % 64 & 1 else -1.0


def arc_choice(
    rows: list[tuple[float, int, int]], first_draw: int, random: float, step: Step
) -> list[tuple[int, int]]:
    """Best rows until they hold the density; then some of them exchanged for random ones."""
    order = [row[1:] for row in sorted(rows, key=lambda row: (-row[0], row[1]))]
    wanted = step.density * sum(size for _, size in order) * (1 - 1e-12)
    count = 0
    while count < len(order) and sum(size for _, size in order[:count]) < wanted:
        count += 1
    if random > 0 and order:
        count -= int(random * count + random_unit(step.seed, step.number, ROWS, first_draw))
        while count < len(order) and sum(size for _, size in order[:count]) < wanted:
            left, i = len(order) - count, first_draw + 1 + count
            other = count + random_below(left, step.seed, step.number, ROWS, i)
            order[count], order[other] = order[other], order[count]
            count += 1
    return order[:count]
