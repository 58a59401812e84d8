"""Lightning and FSDP2, two hosts of two ranks: python examples/lightning_fsdp.py

ModelParallelStrategy leaves the sharding to `configure_model`: cut the model over the ranks of a
host there, and attach for the mean between the hosts.
"""

import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import topreduce.torch


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
        self.sync: topreduce.torch.Sync | None = None

    def configure_model(self) -> None:
        if self.sync is not None:  # Lightning calls this more than once
            return
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(self.layers, mesh=mesh["shard"])
        self.sync = topreduce.torch.attach(
            self.layers, "topk", density=0.01, replicas=mesh["replicate"]
        )

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        inputs, labels = batch
        return nn.functional.cross_entropy(self.layers(inputs), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> None:
    inputs = torch.randn(16384, 64, generator=torch.Generator().manual_seed(0))
    data = DataLoader(TensorDataset(inputs, inputs[:, :10].argmax(1)), batch_size=32)
    model = Classifier()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=4,
        strategy=ModelParallelStrategy(data_parallel_size=4, tensor_parallel_size=1),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, data)
    if trainer.is_global_zero and model.sync is not None:
        stats = model.sync.stats()
        print(
            f"step {trainer.global_step}: {stats['selected']} entries, "
            f"{stats['bytes_sent']} bytes to the other host, {stats['bytes_inside']} inside"
        )


if __name__ == "__main__":
    main()
