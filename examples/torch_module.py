"""A module without DistributedDataParallel: torchrun --nproc-per-node 2 examples/torch_module.py

For loops of your own: two micro-batches are added up, then averaged.
"""

import torch
import torch.distributed as dist
from torch import nn

import topreduce.torch


def main() -> None:
    dist.init_process_group("gloo")
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    # Rank 0's parameters and buffers, on all ranks from here on.
    sync = topreduce.torch.attach(model, "topk", density=0.01, group=dist.group.WORLD)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    rng = torch.Generator().manual_seed(dist.get_rank())

    def backward() -> float:
        inputs = torch.randn(16, 64, generator=rng)
        loss = nn.functional.cross_entropy(model(inputs), inputs[:, :10].argmax(1)) / 2
        loss.backward()
        return loss.item()

    for step in range(151):
        optimizer.zero_grad()
        with sync.hold():
            loss = backward()
        loss += backward()
        optimizer.step()
        if step % 50 == 0 and dist.get_rank() == 0:
            stats = sync.stats()
            print(
                f"step {step}: loss {loss:.3f}, {stats['selected']} entries, "
                f"{stats['bytes_sent']} bytes"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
