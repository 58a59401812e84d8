"""Hugging Face Trainer: one callback attaches, saves and restores.

trainer.add_callback(TopreduceCallback(trainer, "topk", density=0.01))
"""

import warnings
from pathlib import Path
from typing import Any

from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from topreduce.torch.attachment import attach
from topreduce.torch.state_files import find
from topreduce.torch.sync import Sync


class TopreduceCallback(TrainerCallback):
    """Averages gradients with topreduce.

    What each rank owes is saved in the Trainer's own checkpoints, and loaded if training resumes
    from one (`trainer.train(resume_from_checkpoint=True)`), also with another number of ranks.
    """

    def __init__(
        self, trainer: Trainer, method: str = "auto", resume: str | None = None, **settings: Any
    ) -> None:
        """`settings`: as for topreduce.torch.attach. `resume`: the checkpoint that training resumes
        from, if it is neither in the output folder nor named by the TrainingArguments.
        """
        self.trainer = trainer
        self.method = method
        self.resume = resume
        self.settings = settings
        self.sync: Sync | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        model = self.trainer.model_wrapped
        if not isinstance(model, DistributedDataParallel):
            raise ValueError("TopreduceCallback needs several processes: start with torchrun")
        scaler = self.trainer.accelerator.scaler  # None unless TrainingArguments(fp16=True)
        self.sync = attach(model, self.method, scaler=scaler, **self.settings)
        if state.global_step > 0:
            self._restore(self.resume or args.resume_from_checkpoint, args, state)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.sync is not None:
            self.sync.save(_folder(args, state))

    def _restore(self, named: str | None, args: TrainingArguments, state: TrainerState) -> None:
        assert self.sync is not None
        folder = Path(named) if named and Path(named).is_dir() else _folder(args, state)
        if find(folder):
            self.sync.load(folder)
        else:
            warnings.warn(
                f"training resumes at step {state.global_step}, but {folder} holds nothing of "
                "topreduce: what the ranks owed is lost. If it was saved elsewhere, say so: "
                "TopreduceCallback(..., resume=folder)",
                RuntimeWarning,
                stacklevel=2,
            )


def _folder(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(args.output_dir or ".") / f"checkpoint-{state.global_step}"
