"""The bundled text as characters with numbers, and batches that can be drawn again."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources

import torch
from torch import Tensor

VALIDATION_SHARE = 0.1


@dataclass(frozen=True)
class Text:
    """A text cut into a training part and a validation part; ids count the sorted characters."""

    characters: str
    training: Tensor
    validation: Tensor

    def encode(self, written: str) -> Tensor:
        """Return the id of every character; a character that the text lacks is a ValueError."""
        ids = {character: i for i, character in enumerate(self.characters)}
        unknown = sorted(set(written) - set(ids))
        if unknown:
            raise ValueError(f"text: characters {unknown} are not in the vocabulary")
        return torch.tensor([ids[character] for character in written], dtype=torch.long)

    def decode(self, ids: Tensor) -> str:
        """Return the characters of these ids."""
        return "".join(self.characters[i] for i in ids.tolist())

    def training_batch(
        self, batch: int, context: int, *, seed: int, rank: int, step: int
    ) -> tuple[Tensor, Tensor]:
        """Draw inputs and targets, one character apart; the same three keys draw the same batch."""
        generator = torch.Generator().manual_seed(mix_keys(seed, rank, step))
        last = len(self.training) - context - 1
        starts = torch.randint(last + 1, (batch,), generator=generator)
        return _windows(self.training, starts, context)

    def validation_batches(
        self, batches: int, batch: int, context: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield windows spread evenly over the validation part, the same for everyone."""
        last = len(self.validation) - context - 1
        starts = torch.linspace(0, last, batches * batch).long()
        for some in torch.split(starts, batch):
            yield _windows(self.validation, some, context)


@functools.cache
def load_text(name: str = "tinyshakespeare") -> Text:
    """Load a text that comes with the package."""
    file = resources.files("topreduce.lab.tasks") / "data" / f"{name}.txt"
    written = file.read_text(encoding="utf-8")
    empty = torch.empty(0, dtype=torch.long)
    whole = Text("".join(sorted(set(written))), empty, empty)
    ids = whole.encode(written)
    cut = int(len(ids) * (1 - VALIDATION_SHARE))
    return Text(whole.characters, ids[:cut], ids[cut:])


def _windows(ids: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    windows = ids[starts[:, None] + torch.arange(context + 1)]
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def mix_keys(*keys: int) -> int:
    """A seed; neighbouring keys give unrelated ones, which torch generators need."""
    digest = hashlib.blake2b(repr(keys).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
