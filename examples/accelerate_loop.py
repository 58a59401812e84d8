"""Accelerate: attach after prepare(), which makes the DDP model.

    torchrun --nproc-per-node 2 examples/accelerate_loop.py

The argument `comm_hook` of its DistributedDataParallelKwargs takes hooks of PyTorch only.
"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import topreduce.torch


def main() -> None:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    inputs = torch.randn(8192, 64)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = DataLoader(TensorDataset(inputs, inputs[:, :10].argmax(1)), batch_size=32)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    # The added line; the scaler is None unless mixed_precision="fp16".
    sync = topreduce.torch.attach(model, "topk", density=0.01, scaler=accelerator.scaler)

    for batch, labels in data:
        optimizer.zero_grad()
        accelerator.backward(nn.functional.cross_entropy(model(batch), labels))
        optimizer.step()
    stats = sync.stats()
    accelerator.print(
        f"step {stats['step']}: {stats['selected']} entries, {stats['bytes_sent']} bytes"
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
