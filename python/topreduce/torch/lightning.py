"""Lightning: a strategy attaches, saves and restores.

Trainer(strategy=TopreduceStrategy("topk", {"density": 0.01}))

Lightning's argument `ddp_comm_hook` is ignored without CUDA; a strategy works everywhere. What the
ranks owe is never gathered: each writes a file of its own to a folder beside Lightning's
checkpoint, `last.ckpt.topreduce`. Lightning's is written when all of them are there, and says which
step they are of.
"""

import os
import shutil
from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import DDPStrategy
from torch.nn.parallel import DistributedDataParallel

from topreduce.torch.attachment import attach
from topreduce.torch.sync import Sync

_KEY = "topreduce"  # in Lightning's checkpoints


class TopreduceStrategy(DDPStrategy):
    """DDP that averages gradients with topreduce. What each rank owes is saved and loaded with
    Lightning's checkpoints, also with another number of ranks.
    """

    def __init__(self, method: str, settings: dict[str, Any], **ddp: Any) -> None:
        """`settings`: as for topreduce.torch.attach; `ddp`: as for DDPStrategy."""
        super().__init__(**ddp)
        self.method = method
        self.settings = settings
        self.sync: Sync | None = None
        self._resumed: tuple[Path, int | None] | None = None  # a folder, and a step in it

    def configure_ddp(self) -> None:
        super().configure_ddp()
        assert isinstance(self.model, DistributedDataParallel)
        scaler = getattr(self.precision_plugin, "scaler", None)  # with precision="16-mixed"
        self.sync = attach(self.model, self.method, scaler=scaler, **self.settings)
        if self._resumed is not None:
            folder, step = self._resumed
            self.sync.load(folder, step)
            self._resumed = None

    def teardown(self) -> None:
        if self.sync is not None:
            self.sync.detach()  # what is owed can still be saved
        super().teardown()

    # Lightning calls these on all ranks, and lets rank 0 write and remove its own file.

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        if self.sync is not None:
            self.sync.save(folder_beside(filepath))
            checkpoint = {**checkpoint, _KEY: {"step": self.sync.step}}
            self.barrier(_KEY)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only)
        folder, step = folder_beside(checkpoint_path), checkpoint.get(_KEY, {}).get("step")
        saved = step is not None or folder.exists()  # else without this strategy
        self._resumed = (folder, step) if saved else None
        return checkpoint

    def remove_checkpoint(self, filepath: str | Path) -> None:
        shutil.rmtree(folder_beside(filepath), ignore_errors=True)
        super().remove_checkpoint(filepath)


def folder_beside(checkpoint: str | Path) -> Path:
    """Where ranks keep what they owe; `checkpoint` may be a link, such as last.ckpt."""
    return Path(f"{os.path.realpath(checkpoint)}.topreduce")
