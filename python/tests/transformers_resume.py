"""A run of examples/transformers_trainer.py that resumes from a checkpoint; see test_examples."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import BertForSequenceClassification, Trainer, TrainingArguments

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from transformers_trainer import CONFIG, FirstToken

from topreduce.torch.huggingface import TopreduceCallback


class Watched(TopreduceCallback):
    """Keeps the sum of what is owed when training begins and when a checkpoint is written."""

    seen: dict[str, float]

    def owed(self) -> float:
        assert self.sync is not None
        state = self.sync.state_dict().values()
        return sum(float(x.abs().sum()) for x in state if isinstance(x, torch.Tensor))

    def on_train_begin(self, *arguments: object, **kwargs: object) -> None:
        super().on_train_begin(*arguments, **kwargs)  # type: ignore[arg-type]
        self.seen = {"begin": self.owed()}

    def on_save(self, *arguments: object, **kwargs: object) -> None:
        super().on_save(*arguments, **kwargs)  # type: ignore[arg-type]
        self.seen["saved"] = self.owed()


def train(folder: Path, steps: int, *, resume: bool) -> tuple[Trainer, dict[str, float]]:
    torch.manual_seed(0)
    trainer = Trainer(
        model=BertForSequenceClassification(CONFIG),
        args=TrainingArguments(
            output_dir=str(folder),
            use_cpu=True,
            ddp_backend="gloo",
            max_steps=steps,
            save_steps=4,
            per_device_train_batch_size=8,
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=FirstToken(),
    )
    callback = Watched(trainer, "topk", density=0.01, warmup_steps=0, ramp_steps=0)
    trainer.add_callback(callback)
    trainer.train(resume_from_checkpoint=resume)
    return trainer, callback.seen


def main() -> None:
    folder = Path(sys.argv[1])
    _, first = train(folder, 4, resume=False)
    trainer, second = train(folder, 8, resume=True)
    seen = {"start": first["begin"], "saved": first["saved"], "resumed": second["begin"]}
    (folder / f"rank{trainer.args.process_index}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()  # Gloo may hold tensors of the Trainer's last collective


if __name__ == "__main__":
    main()
