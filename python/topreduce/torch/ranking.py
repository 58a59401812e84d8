"""The choice of rows by the sum of their sketches, on the device where it lies, without a stop."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Taken(NamedTuple):
    """Where rows and whole parts start, and where all their entries are; in ascending order."""

    starts: Tensor
    places: Tensor


def best_rows(
    sums: Tensor,
    parts: NDArray[np.int64],
    picks: NDArray[np.uint32],
    to_device: Callable[[NDArray[Any]], Tensor],
) -> Taken:
    """What Device::add_up_best (topreduce/device.h) takes of x. `parts`: a line for each."""
    starts, rows, widths, counts = parts.T
    ranked = rows > 0
    firsts = (np.cumsum(rows) - rows)[ranked]  # of the rows of all parts
    at = picks.astype(np.int64) + np.repeat(firsts, counts[ranked])
    total = int((widths * np.where(ranked, counts, 1)).sum())

    told = [firsts, rows[ranked], widths[ranked], starts[ranked], at]
    told += [starts[~ranked], widths[~ranked]]
    sent = torch.split(to_device(np.concatenate(told)), [each.size for each in told])
    first, count, width, start, place, whole, whole_size = sent

    part = torch.repeat_interleave(count, output_size=int(rows.sum()))  # of each row
    order = _by_energy(sums, part, width)
    row = order[place]
    part = part[row]
    begins = torch.cat([start[part] + (row - first[part]) * width[part], whole])
    lengths = torch.cat([width[part], whole_size])
    begins, ascending = begins.sort()
    lengths = lengths[ascending]
    shifts = begins - (lengths.cumsum(0) - lengths)
    entries = torch.repeat_interleave(shifts, lengths, output_size=total)
    return Taken(begins, entries.add_(torch.arange(total, device=sums.device)))


def _by_energy(sums: Tensor, part: Tensor, width: Tensor) -> Tensor:
    """All rows: part by part, and in each those of more energy first, ties to the lower one."""
    kind = torch.float32 if sums.device.type == "mps" else torch.float64
    squares = sums.view(part.numel(), -1).to(kind).square()
    energy = squares[:, 0].clone()
    for column in squares.t()[1:]:  # one after the other, as in main memory
        energy += column
    energy /= width[part]
    energy.nan_to_num_(nan=torch.inf, posinf=torch.inf)
    order = energy.sort(descending=True, stable=True).indices
    return order[part[order].sort(stable=True).indices]


def digits_of(numbers: Tensor) -> Tensor:
    """A fingerprint, in floats whose sums over the ranks are exact: 1, digits and their squares.

    Ranks have the same if each sum is as many times what one of them has as that of the ones: the
    mean of squares is the square of the mean for equal numbers alone.
    """
    mixed = numbers * 0x5851F42D4C957F2D
    mixed = (mixed ^ (mixed >> 29)) * 0x14057B7EF767814F
    total = mixed.sum() >> 16
    shifts = torch.arange(0, 32, 4, device=numbers.device)
    digits = (total >> shifts).bitwise_and_(15).float()
    return torch.cat([digits.new_ones(1), digits, digits.square()])
