"""A small character GPT in plain torch, the model that the demo and the lab train."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT; `context` is the longest input it can read."""

    layers: int
    width: int
    heads: int
    context: int
    vocabulary: int = 65


PRESETS = {
    "gpt:0.6m": GPTConfig(layers=4, width=112, heads=4, context=64),
    "gpt:1m": GPTConfig(layers=4, width=144, heads=4, context=64),
    "gpt:10m": GPTConfig(layers=6, width=384, heads=6, context=256),
}


def preset(name: str, *, context: int | None = None, vocabulary: int = 65) -> GPTConfig:
    """Return the shape with this name, with another context where one is given."""
    if name not in PRESETS:
        raise ValueError(f"unknown model {name!r}; known are {', '.join(PRESETS)}")
    config = PRESETS[name]
    return replace(config, context=context or config.context, vocabulary=vocabulary)


class Block(nn.Module):
    """Attention, then a GELU MLP; each reads a normed copy and adds to the stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, stream: Tensor) -> Tensor:
        stream = stream + self.attend(self.attention_norm(stream))
        hidden = F.gelu(self.mlp_in(self.mlp_norm(stream)))
        added: Tensor = self.mlp_out(hidden)
        return stream + added

    def attend(self, normed: Tensor) -> Tensor:
        batch, length, width = normed.shape
        split = (batch, length, 3, self.heads, width // self.heads)
        query, key, value = self.attention_in(normed).view(split).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        joined: Tensor = self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))
        return joined


class GPT(nn.Module):
    """Pre-norm transformer with learned positions; ids in, logits of the next id out."""

    def __init__(self, config: GPTConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self._initialise(seed)

    def _initialise(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                nn.init.constant_(parameter, 1.0 if name.endswith("norm.weight") else 0.0)
                continue
            # Every block adds twice to the stream: smaller outputs keep its variance level.
            depth = 2 * self.config.layers if name.endswith("_out.weight") else 1
            deviation = 0.6 / math.sqrt(self.config.width * depth)
            nn.init.normal_(parameter, std=deviation, generator=generator)

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        stream = self.tokens(ids) + self.positions(positions)
        for block in self.blocks:
            stream = block(stream)
        logits: Tensor = self.head(self.norm(stream))
        return logits

    @torch.no_grad()
    def generate(self, n: int, seed: int, temperature: float = 0.8, *, start: int = 0) -> Tensor:
        """Draw `n` ids that follow the id `start`, the same for the same seed."""
        generator = torch.Generator().manual_seed(seed)
        ids = torch.full((1, n + 1), start)
        for end in range(1, n + 1):
            seen = ids[:, max(0, end - self.config.context) : end]
            chances = F.softmax(self(seen)[0, -1] / temperature, dim=-1)
            ids[0, end] = torch.multinomial(chances, 1, generator=generator)
        return ids[0, 1:]
