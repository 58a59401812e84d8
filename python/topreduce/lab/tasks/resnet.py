"""A small residual network for pictures of 8 x 8 points."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

WIDTHS = (32, 64, 128)
GROUPS = 8


class ResNet(nn.Module):
    """Three stages of two blocks. Groups are normed, not batches: replicas keep no statistics."""

    def __init__(self, kinds: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, WIDTHS[0], 3, padding=1)
        blocks: list[nn.Module] = []
        before = WIDTHS[0]
        for width in WIDTHS:
            blocks += [Block(before, width), Block(width, width)]
            before = width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(before, kinds)

    def forward(self, pictures: Tensor) -> Tensor:
        seen: Tensor = self.blocks(self.stem(pictures))
        logits: Tensor = self.head(seen.mean(dim=(2, 3)))
        return logits


class Block(nn.Module):
    """Two convolutions around which the input passes; more channels halve the picture."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        stride = 1 if before == after else 2
        self.first_norm = nn.GroupNorm(GROUPS, before)
        self.first = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.second_norm = nn.GroupNorm(GROUPS, after)
        self.second = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.around = (
            nn.Identity() if before == after else nn.Conv2d(before, after, 1, stride, bias=False)
        )

    def forward(self, picture: Tensor) -> Tensor:
        hidden = self.first(F.relu(self.first_norm(picture)))
        added: Tensor = self.second(F.relu(self.second_norm(hidden)))
        passed: Tensor = self.around(picture)
        return passed + added
