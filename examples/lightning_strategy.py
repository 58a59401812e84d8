"""Lightning: a strategy attaches, and every rank keeps what it owes beside Lightning's checkpoint.

    python examples/lightning_strategy.py

Lightning's argument `ddp_comm_hook` is ignored without CUDA; a strategy works everywhere. What the
ranks owe is never gathered: rank 3 writes it to `last.ckpt.rank3`, as large as the model.
"""

import os
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import topreduce.torch


class TopreduceStrategy(DDPStrategy):
    """DDP that averages gradients with topreduce:

    Trainer(strategy=TopreduceStrategy("topk", {"density": 0.01}))
    """

    def __init__(self, method: str, settings: dict[str, Any], **ddp: Any) -> None:
        """`settings`: as for topreduce.torch.attach; `ddp`: as for DDPStrategy."""
        super().__init__(**ddp)
        self.method = method
        self.settings = settings
        self.sync: topreduce.torch.Sync | None = None
        self.resumed: dict[str, Any] | None = None

    def configure_ddp(self) -> None:
        super().configure_ddp()
        assert isinstance(self.model, DistributedDataParallel)
        scaler = getattr(self.precision_plugin, "scaler", None)  # with precision="16-mixed"
        self.sync = topreduce.torch.attach(self.model, self.method, scaler=scaler, **self.settings)
        if self.resumed is not None:
            self.sync.load_state_dict(self.resumed)
            self.resumed = None

    def teardown(self) -> None:
        if self.sync is not None:
            self.sync.detach()  # what is owed can still be saved
        super().teardown()

    # Lightning calls these on all ranks, and lets rank 0 write and remove its own file.

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if self.sync is not None:
            file = self.file_beside(filepath)
            file.parent.mkdir(parents=True, exist_ok=True)
            torch.save(self.sync.state_dict(), file)

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        file = self.file_beside(checkpoint_path)
        if file.exists():  # not if it was saved without this strategy
            self.resumed = torch.load(file, weights_only=True)
        return super().load_checkpoint(checkpoint_path, weights_only)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        self.file_beside(filepath).unlink(missing_ok=True)
        super().remove_checkpoint(filepath)

    def file_beside(self, checkpoint: str | Path) -> Path:
        """Where this rank keeps what it owes; `checkpoint` may be a link, such as last.ckpt."""
        return Path(f"{os.path.realpath(checkpoint)}.rank{self.global_rank}")


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
