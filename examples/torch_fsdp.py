"""FSDP2 on two hosts of two ranks: torchrun --nproc-per-node 4 examples/torch_fsdp.py

On real machines: torchrun --nnodes 2 --nproc-per-node 2 ..., with a shard for each rank of a host.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import topreduce.torch


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh["shard"])  # not mesh: between replicas we average
    fully_shard(model, mesh=mesh["shard"])
    sync = topreduce.torch.attach(model, "topk", density=0.01, replicas=mesh["replicate"])
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
                f"{stats['bytes_sent']} bytes to the other host, {stats['bytes_inside']} inside"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
