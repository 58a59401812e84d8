"""Lightning: a strategy attaches, and saves and restores with Lightning's checkpoints.

python examples/lightning_strategy.py
"""

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from topreduce.torch.lightning import TopreduceStrategy


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        inputs, labels = batch
        return nn.functional.cross_entropy(self.layers(inputs), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> None:
    lightning.seed_everything(0)
    inputs = torch.randn(8192, 64)
    data = DataLoader(TensorDataset(inputs, inputs[:, :10].argmax(1)), batch_size=32)
    strategy = TopreduceStrategy("topk", {"density": 0.01}, process_group_backend="gloo")
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), data)
    if trainer.is_global_zero and strategy.sync is not None:
        stats = strategy.sync.stats()
        print(
            f"step {trainer.global_step}: {stats['selected']} entries, {stats['bytes_sent']} bytes"
        )


if __name__ == "__main__":
    main()
