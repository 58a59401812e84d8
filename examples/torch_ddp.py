"""Plain PyTorch: torchrun --nproc-per-node 2 examples/torch_ddp.py"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import topreduce.torch


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    )
    sync = topreduce.torch.attach(model, "topk", density=0.01)  # the added line
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    rng = torch.Generator().manual_seed(dist.get_rank())
    for step in range(151):
        inputs = torch.randn(32, 64, generator=rng)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), inputs[:, :10].argmax(1))
        loss.backward()
        optimizer.step()
        if step % 50 == 0 and dist.get_rank() == 0:
            stats = sync.stats()
            print(
                f"step {step}: loss {loss.item():.3f}, {stats['selected']} entries, "
                f"{stats['bytes_sent']} bytes"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
