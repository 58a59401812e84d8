"""Handwritten digits, 8 x 8 points in 17 shades, that come with the package.

The 1797 pictures are those that scikit-learn calls "digits": the test part of E. Alpaydin and
C. Kaynak, *Optical Recognition of Handwritten Digits*, UCI Machine Learning Repository, 1998,
doi 10.24432/C50P49, CC BY 4.0.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from importlib import resources

import numpy as np
import torch
from torch import Tensor

from topreduce.lab.tasks.text import mix_keys

VALIDATION_SHARE = 0.2
SHADES = 16


@dataclass(frozen=True)
class Digits:
    """Pictures of shape 1 x 8 x 8 with values from 0 to 1, and which digit each of them is."""

    training_pictures: Tensor
    training_names: Tensor
    validation_pictures: Tensor
    validation_names: Tensor

    def training_batch(
        self, batch: int, *, seed: int, rank: int, step: int
    ) -> tuple[Tensor, Tensor]:
        """Draw pictures and names; the same three keys draw the same batch."""
        generator = torch.Generator().manual_seed(mix_keys(seed, rank, step))
        chosen = torch.randint(len(self.training_names), (batch,), generator=generator)
        return self.training_pictures[chosen], self.training_names[chosen]


@functools.cache
def load_digits() -> Digits:
    """Load the pictures; the last fifth is kept back."""
    with (resources.files("topreduce.lab.tasks") / "data" / "digits.npz").open("rb") as file:
        stored = np.load(file)
        pictures = torch.from_numpy(stored["pictures"].astype(np.float32) / SHADES)
        names = torch.from_numpy(stored["names"].astype(np.int64))
    pictures = pictures.view(-1, 1, 8, 8)
    cut = int(len(names) * (1 - VALIDATION_SHARE))
    return Digits(pictures[:cut], names[:cut], pictures[cut:], names[cut:])
