"""What a handle shows of its steps: a line, and curves."""

from collections.abc import Mapping
from typing import Any, Protocol


class Writer(Protocol):
    """A torch.utils.tensorboard.SummaryWriter, or what looks like one."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object: ...


def write(numbers: Mapping[str, float], writer: Writer, step: int) -> None:
    """Each as one point of a curve."""
    for name, value in numbers.items():
        writer.add_scalar(name, value, step)


def scalars(stats: Mapping[str, Any]) -> dict[str, float]:
    """Names and numbers; those of a stage as "topreduce/seconds/look"."""
    numbers: dict[str, float] = {}
    for name, value in stats.items():
        if isinstance(value, Mapping):
            numbers |= {f"topreduce/{name}/{part}": float(each) for part, each in value.items()}
        elif name != "step" and isinstance(value, (int, float)):
            numbers[f"topreduce/{name}"] = float(value)
    return numbers


def cost(stats: Mapping[str, Any], ranks: int) -> str:
    """What the last step sent and waited, beside what a dense one sends (fp32, there and back)."""
    if not stats:
        return "no step yet"
    if ranks == 1:
        inside = stats.get("bytes_inside")
        sent = f"last step sent {inside} bytes inside the machine" if inside else "nothing to send"
        return f"{sent}, waited {stats['seconds_waited']:.4f} s"
    dense, sent = 8 * stats["entries"] * (ranks - 1) // ranks, stats["bytes_sent"]
    saved = f", dense {dense} ({1 - sent / dense:.1%} saved)" if dense else ""
    return f"last step sent {sent} bytes{saved}, waited {stats['seconds_waited']:.4f} s"
