"""A run of examples/lightning_strategy.py that is cut in two by a checkpoint; see test_examples."""

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from lightning_strategy import Classifier

from topreduce.torch.lightning import TopreduceStrategy


class Digest(lightning.Callback):
    """Keeps the sum of what is owed when training begins and when it ends."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.start = self.owed(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.end = self.owed(trainer)

    def owed(self, trainer: Any) -> float:
        state = trainer.strategy.sync.state_dict().items()
        return sum(float(x.abs().sum()) for _, x in state if isinstance(x, torch.Tensor))


def fit(folder: Path, epochs: int, resume: Path | None) -> tuple[lightning.Trainer, Digest]:
    lightning.seed_everything(0)
    inputs = torch.randn(512, 64)
    data = DataLoader(TensorDataset(inputs, inputs[:, :10].argmax(1)), batch_size=32)
    digest = Digest()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=TopreduceStrategy("topk", {"density": 0.01}, process_group_backend="gloo"),
        max_epochs=epochs,
        # The newest alone, and a link to it: older ones go, with the files beside them.
        callbacks=[digest, ModelCheckpoint(folder, "{epoch}", save_last="link")],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), data, ckpt_path=resume, weights_only=False)
    return trainer, digest


def main() -> None:
    folder = Path(sys.argv[1])
    # No rank may hold what all ranks owe.
    gathered = mock.Mock(side_effect=AssertionError("states of all ranks on one"))
    with mock.patch.multiple(dist, all_gather_object=gathered, gather_object=gathered):
        _, first = fit(folder, 2, None)
        trainer, second = fit(folder, 3, folder / "last.ckpt")
    seen = {"start": first.start, "saved": first.end, "resumed": second.start}
    (folder / f"rank{trainer.global_rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
