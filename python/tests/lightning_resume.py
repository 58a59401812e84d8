"""A run of examples/lightning_callback.py that is cut in two by a checkpoint; see test_examples."""

import json
import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from lightning_callback import Classifier, Topreduce


class Digest(Topreduce):
    """Keeps the sum of what is owed when training begins and when it ends."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_fit_start(trainer, pl_module)
        self.start = self.owed()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.end = self.owed()

    def owed(self) -> float:
        assert self.sync is not None
        state = self.sync.state_dict().items()
        return sum(float(x.abs().sum()) for _, x in state if isinstance(x, torch.Tensor))


def fit(epochs: int, resume: Path | None) -> tuple[lightning.Trainer, Digest]:
    lightning.seed_everything(0)
    inputs = torch.randn(512, 64)
    data = DataLoader(TensorDataset(inputs, inputs[:, :10].argmax(1)), batch_size=32)
    callback = Digest("topk", density=0.01)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend="gloo"),
        max_epochs=epochs,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), data, ckpt_path=resume, weights_only=False)
    return trainer, callback


def main() -> None:
    folder = Path(sys.argv[1])
    trainer, first = fit(1, None)
    trainer.save_checkpoint(folder / "run.ckpt")
    trainer.strategy.barrier()
    _, second = fit(2, folder / "run.ckpt")
    seen = {"start": first.start, "saved": first.end, "resumed": second.start}
    (folder / f"rank{trainer.global_rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
