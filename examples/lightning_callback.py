"""Lightning: a callback attaches, and keeps what is owed in Lightning's own checkpoints.

    python examples/lightning_callback.py

Lightning's argument `ddp_comm_hook` is ignored without CUDA; a callback works everywhere.
"""

from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import topreduce.torch


class Topreduce(lightning.Callback):
    """Averages gradients with topreduce: `Trainer(callbacks=[Topreduce("topk", density=0.01)])`."""

    def __init__(self, method: str, **settings: Any) -> None:
        self.method = method
        self.settings = settings
        self.sync: topreduce.torch.Sync | None = None
        self.resumed: dict[str, Any] | None = None

    def on_fit_start(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule
    ) -> None:
        model = trainer.strategy.model
        if not isinstance(model, DistributedDataParallel):
            raise ValueError(f"Topreduce needs Trainer(strategy='ddp'), not {trainer.strategy}")
        self.sync = topreduce.torch.attach(model, self.method, **self.settings)
        if self.resumed is not None:
            self.sync.load_state_dict(self.resumed)

    def on_fit_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        if self.sync is not None:
            self.sync.detach()

    def state_dict(self) -> dict[str, Any]:
        """Of all ranks: Lightning writes what rank 0 returns. Keys hold the rank, so none clash."""
        if self.sync is None:
            return {}
        states: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(states, self.sync.state_dict())
        return {key: value for state in states for key, value in state.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.resumed = state_dict or None


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
    topreduce_callback = Topreduce("topk", density=0.01)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend="gloo"),
        max_epochs=1,
        callbacks=[topreduce_callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), data)
    if trainer.is_global_zero and topreduce_callback.sync is not None:
        stats = topreduce_callback.sync.stats()
        print(
            f"step {trainer.global_step}: {stats['selected']} entries, {stats['bytes_sent']} bytes"
        )


if __name__ == "__main__":
    main()
