"""A sharded model on 2 replicas of 2 shards, averaged by FSDP itself or by us."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import models
import torch
import torch.distributed as dist
from models import attach_at_once
from processes import kept
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.checkpoint import checkpoint

from topreduce.torch import Sync
from topreduce.torch.fsdp import local_part

WIDTH, LETTERS = 7, 11  # odd, so that shards are uneven


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(1))  # empty on all shards but the first
        self.inside = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.inside:
            return x + checkpoint(self.work, x, use_reentrant=self.inside == "reentrant")
        return x + self.work(x)

    def work(self, x: Tensor) -> Tensor:
        return self.scale * self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """The head is tied to the embedding; a block may be left out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.tokens = nn.Embedding(LETTERS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, LETTERS, bias=False)
        self.head.weight = self.tokens.weight
        self.around = ""

    def forward(self, text: Tensor, blocks: tuple[int, ...] = (0, 1, 2)) -> Tensor:
        x = self.tokens(text)
        for number in blocks:
            block = self.blocks[number]
            if self.around:
                x = checkpoint(block, x, use_reentrant=self.around == "reentrant")
            else:
                x = block(x)
        logits = self.head(x)
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), text[:, 1:].flatten())


def text(rank: int, step: int, part: int = 0) -> Tensor:
    rng = torch.Generator().manual_seed(1000 * step + 100 * part + rank)
    return torch.randint(LETTERS, (3, 6), generator=rng).to(models.place)


def mesh_of(replicas: int, shards: int) -> DeviceMesh:
    return _mesh(models.place.type, replicas, shards)


@functools.cache
def _mesh(kind: str, replicas: int, shards: int) -> DeviceMesh:
    mesh = init_device_mesh(kind, (replicas, shards), mesh_dim_names=("replicate", "shard"))
    kept.extend(mesh.get_all_groups())
    return mesh


def usual_step(model: nn.Module, sync: Sync | None, step: int) -> None:
    model(text(dist.get_rank(), step)).backward()


@dataclass(frozen=True)
class Case:
    step: Callable[[nn.Module, Sync | None, int], None] = usual_step
    change: Callable[[nn.Module], None] = lambda model: None  # before fully_shard
    options: Mapping[str, Any] = field(default_factory=dict)  # of fully_shard
    settle: Callable[[FSDPModule], None] = lambda root: None  # after it
    near: Mapping[str, float] | None = None  # None: bit for bit
    clip: float | None = None


def build(case: Case, mesh: DeviceMesh) -> FSDPModule:
    model = Model()
    case.change(model)
    model.to(models.place)
    model.head.weight = model.tokens.weight  # some devices of torch part them
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **case.options)
    root = fully_shard(model, mesh=mesh, **case.options)
    assert isinstance(root, FSDPModule)
    case.settle(root)
    return root


def attach(root: nn.Module, mesh: DeviceMesh, *arguments: Any, **settings: Any) -> Sync:
    return attach_at_once(root, *arguments, replicas=mesh["replicate"], **settings)


def local_gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {
        name: None if p.grad is None else local_part(p.grad).detach().clone()
        for name, p in model.named_parameters()
    }


def local_weights(model: nn.Module) -> Tensor:
    return torch.cat([local_part(p.detach()).flatten() for p in model.parameters()])
