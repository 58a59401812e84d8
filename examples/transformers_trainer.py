"""Hugging Face Trainer: a callback attaches, and saves and restores with the Trainer's checkpoints.

torchrun --nproc-per-node 2 examples/transformers_trainer.py
"""

import tempfile

import torch
import torch.distributed as dist
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from topreduce.torch.huggingface import TopreduceCallback

CONFIG = BertConfig(
    vocab_size=10,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
    num_labels=10,
)


class FirstToken(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Tell the first token from the others: enough to learn something."""

    def __init__(self) -> None:
        self.tokens = torch.randint(10, (512, 8), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[i], "labels": self.tokens[i, 0]}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=BertForSequenceClassification(CONFIG),
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
        callback = TopreduceCallback(trainer, "topk", density=0.01)
        trainer.add_callback(callback)
        trainer.train()
    if trainer.is_world_process_zero() and callback.sync is not None:
        stats = callback.sync.stats()
        print(
            f"step {trainer.state.global_step}: {stats['selected']} entries, "
            f"{stats['bytes_sent']} bytes"
        )
    if dist.is_initialized():
        dist.destroy_process_group()  # else one of its threads may outlive Python


if __name__ == "__main__":
    main()
