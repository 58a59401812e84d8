"""Models, data and small helpers that run inside a rank."""

import copy
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from processes import Rank
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import topreduce.torch
from topreduce.torch import Sync
from topreduce.torch.ddp import DDPAdapter
from topreduce.torch.fsdp import local_part


def attach_at_once(ddp: DistributedDataParallel, method: str = "topk", **settings: Any) -> Sync:
    """attach() for tests of cut steps: no warm-up, no ramp, and small buckets, unless they ask."""
    usual = {"warmup_steps": 0, "ramp_steps": 0, "bucket_cap_mb": 0}
    return topreduce.torch.attach(ddp, method, **{**usual, **settings})


def adapter_of(sync: Sync) -> DDPAdapter:
    """What serves DDP's hook."""
    dispatcher = sync._release.__self__  # type: ignore[attr-defined]
    adapter: DDPAdapter = dispatcher.adapter
    return adapter


place = torch.device("cpu")  # of models and data; accelerators.on_device changes it


def home() -> torch.device:
    return place


LETTERS, CONTEXT, WIDTH = 40, 12, 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.attention = nn.Linear(WIDTH, 3 * WIDTH)
        self.merge = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.attention(self.norms[0](x)).unflatten(-1, (3, 2, WIDTH // 2)).movedim(1, 3)
        query, key, value = heads.unbind(1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.merge(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class GPT(nn.Module):
    """About 28 000 parameters; the head shares its weight with the embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.tokens, self.places = nn.Embedding(LETTERS, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, LETTERS, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.1)

    def forward(self, text: Tensor) -> Tensor:
        """The loss of predicting each letter of `text` from those before it."""
        x = self.tokens(text[:, :-1]) + self.places.weight
        logits = self.head(self.blocks(x))
        return F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


def made_at_home(dtype: torch.dtype = torch.float32) -> GPT:
    model = GPT().to(place, dtype)
    model.head.weight = model.tokens.weight  # some devices of torch part them
    return model


class Dictated(nn.Module):
    """Its gradients are what it is told: forward(gradients).backward()."""

    SHAPES: Sequence[Sequence[int]] = ((40, 30), (30,), (0, 4), (), (700,), (5, 6, 7), (1,))

    def __init__(self, dtypes: Sequence[torch.dtype] = (torch.float32,)) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            torch.zeros(shape, dtype=dtypes[i % len(dtypes)]) for i, shape in enumerate(self.SHAPES)
        )

    def forward(self, gradients: Sequence[Tensor]) -> Tensor:
        terms = [(w * g).sum().double() for w, g in zip(self.weights, gradients, strict=True)]
        return torch.stack(terms).sum()


def small_integers(model: Dictated, rank: int, step: int) -> list[Tensor]:
    """Gradients whose sums are exact in every order."""
    rng = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randint(-8, 9, w.shape, generator=rng).to(w) for w in model.weights]


def text(rank: int, step: int) -> Tensor:
    """Five batches, again and again: few enough to learn in 50 steps."""
    rng = torch.Generator().manual_seed(10 * rank + step % 5)
    return (torch.randint(LETTERS, (4, 1), generator=rng) + torch.arange(CONTEXT + 1)) % LETTERS


class Run:
    """A GPT in training."""

    def __init__(self, rank: Rank, dtype: torch.dtype = torch.float32, **ddp_options: Any) -> None:
        self.rank = rank.rank
        self.place = place
        self.ddp = DistributedDataParallel(made_at_home(dtype), **ddp_options)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.1, momentum=0.9)
        self.losses: list[float] = []

    def backward(self, step: int) -> None:
        self.optimizer.zero_grad()
        loss = self.ddp(text(self.rank, step).to(self.place))
        loss.backward()
        self.losses.append(loss.item())

    def train(self, steps: range) -> None:
        for step in steps:
            self.backward(step)
            self.optimizer.step()

    def local_gradient(self, step: int) -> Tensor:
        """What this rank alone would see, flat."""
        twin = copy.deepcopy(self.ddp.module)
        twin.zero_grad()
        twin(text(self.rank, step).to(self.place)).backward()
        return flat(twin, lambda p: p.grad)

    def mean_gradient(self) -> Tensor:
        return flat(self.ddp.module, lambda p: p.grad)

    def digest(self) -> str:
        return digest(flat(self.ddp.module, lambda p: p.detach()))


def flat(model: nn.Module, part: Callable[[nn.Parameter], Tensor]) -> Tensor:
    """In main memory."""
    return torch.cat([part(parameter).flatten().cpu() for parameter in model.parameters()])


def owed(sync: Sync) -> Tensor:
    """What this rank owes, flat, as its checkpoint would say."""
    state = sync.state_dict()
    return torch.cat([local_part(state[key]).flatten() for key in state if "/owed/" in key])


def digest(values: Tensor) -> str:
    return hashlib.sha256(values.view(torch.uint8).numpy().tobytes()).hexdigest()


def rank_order_sum(values: Tensor) -> Tensor:
    """The sum over the ranks, in the order of the ranks."""
    everyone = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, values)
    total = everyone[0].clone()
    for other in everyone[1:]:
        total += other
    return total
