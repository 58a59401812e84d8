"""Hugging Face Trainer: a callback attaches when training begins.

torchrun --nproc-per-node 2 examples/transformers_trainer.py
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

import topreduce.torch


class Topreduce(TrainerCallback):
    """Averages gradients with topreduce: `trainer.add_callback(Topreduce(trainer, "topk"))`.

    What each rank owes goes beside the Trainer's checkpoints; `resume` is the folder of one.
    """

    def __init__(
        self, trainer: Trainer, method: str, resume: str | None = None, **settings: Any
    ) -> None:
        self.trainer = trainer
        self.method = method
        self.resume = resume
        self.settings = settings
        self.sync: topreduce.torch.Sync | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        model = self.trainer.model_wrapped
        if not isinstance(model, DistributedDataParallel):
            raise ValueError("Topreduce needs several processes: start with torchrun")
        scaler = self.trainer.accelerator.scaler  # None unless TrainingArguments(fp16=True)
        self.sync = topreduce.torch.attach(model, self.method, scaler=scaler, **self.settings)
        if self.resume is not None:
            self.sync.load_state_dict(torch.load(self.file(self.resume, args)))

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.sync is not None:
            folder = Path(args.output_dir or ".") / f"checkpoint-{state.global_step}"
            torch.save(self.sync.state_dict(), self.file(folder, args))

    @staticmethod
    def file(folder: str | Path, args: TrainingArguments) -> Path:
        return Path(folder) / f"topreduce-{args.process_index}.pt"


class FirstToken(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Tell the first token from the others: enough to learn something."""

    def __init__(self) -> None:
        self.tokens = torch.randint(10, (512, 8), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[i], "labels": self.tokens[i, 0]}


def main() -> None:
    config = BertConfig(
        vocab_size=10,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        num_labels=10,
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=BertForSequenceClassification(config),
            args=TrainingArguments(
                output_dir=folder,
                use_cpu=True,
                ddp_backend="gloo",
                max_steps=120,
                per_device_train_batch_size=16,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
            ),
            train_dataset=FirstToken(),
        )
        callback = Topreduce(trainer, "topk", density=0.01)
        trainer.add_callback(callback)
        trainer.train()
    if trainer.is_world_process_zero() and callback.sync is not None:
        stats = callback.sync.stats()
        print(
            f"step {trainer.state.global_step}: {stats['selected']} entries, "
            f"{stats['bytes_sent']} bytes"
        )


if __name__ == "__main__":
    main()
