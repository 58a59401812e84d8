"""What a handle shows of its steps: a line, curves, and a hint."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

_SMALL = 1 << 20  # bytes; a smaller model is exchanged in no time, however it is cut
_LARGE_SHARE = 0.5  # of the model in the last bucket
_GOOD_CUT = 8  # buckets


class Writer(Protocol):
    """A torch.utils.tensorboard.SummaryWriter, or what looks like one."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object: ...


def write(stats: Mapping[str, Any], writer: Writer, step: int | None) -> None:
    """Every number of a step as one point of a curve."""
    number = stats["step"] if step is None else step
    for name, value in scalars(stats):
        writer.add_scalar(f"topreduce/{name}", value, number)


def scalars(stats: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Names and numbers; those of a stage as "seconds/look"."""
    for name, value in stats.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}/{part}", float(each)) for part, each in value.items())
        elif name != "step" and isinstance(value, (int, float)):
            yield name, float(value)


def hint(bucket_bytes: Sequence[int]) -> str | None:
    """What to change if DDP's buckets, in the order they came, leave little to overlap."""
    total = sum(bucket_bytes)
    if total < _SMALL or bucket_bytes[-1] <= _LARGE_SHARE * total:
        return None
    cap = max(1, round(total / _GOOD_CUT / 2**20))
    return (
        f"{bucket_bytes[-1] / total:.0%} of the model comes in DDP's last bucket, when no "
        "computing is left that its exchange could overlap: try "
        f"DistributedDataParallel(..., bucket_cap_mb={cap})"
    )


def cost(stats: Mapping[str, Any], ranks: int) -> str:
    """What the last step sent and waited, beside what a dense one sends (fp32, there and back)."""
    if ranks == 1:
        inside = stats.get("bytes_inside")
        sent = f"last step sent {inside} bytes inside the machine" if inside else "nothing to send"
        return f"{sent}, waited {stats['seconds_waited']:.4f} s"
    dense, sent = 8 * stats["entries"] * (ranks - 1) // ranks, stats["bytes_sent"]
    saved = f"{1 - sent / dense:.1%} saved" if dense and stats["rounds"] else "none yet"
    return (
        f"last step sent {sent} bytes, dense {dense} ({saved}), "
        f"waited {stats['seconds_waited']:.4f} s"
    )
