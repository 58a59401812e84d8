"""attach: a DDP step through us, relative to one with torch's noop_hook (no averaging at all).

4 processes over loopback, one thread each, a 10.7 M-parameter GPT. Variants take turns, block by
block, in one process group, so that the noise of the machine hits all of them alike; noop stands
twice in the list, and the ratio of the two shows that noise.

Then memory: the most that fresh processes with one variant each ever held, above plain DDP, in fp32
copies of the model. The budget is 1.2: what is owed, and a fifth for all else.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel

import topreduce.torch
from topreduce.lab.experiments.launch import launch
from topreduce.lab.tasks.gpt import GPT, preset
from topreduce.lab.tasks.models import Workload, backends, check_device, next_id_loss
from topreduce.lab.tasks.text import load_text

STEADY = {"density": 0.01, "warmup_steps": 0, "ramp_steps": 0}
VARIANTS = {
    "noop_hook": None,
    "noop_hook (A/A)": None,
    "plain DDP": None,
    "topk 1 %, bucket": {**STEADY, "method": "topk", "granularity": "bucket"},
    "topk 1 %, model": {**STEADY, "method": "topk", "granularity": "model"},
}


@dataclass(frozen=True)
class Options:
    blocks: int
    steps: int
    batch: int
    context: int
    device: str


def variant(name: str, options: Options) -> tuple[DistributedDataParallel, object]:
    """A model of its own for each variant, all from the same seed."""
    model = GPT(preset("gpt:10m", context=options.context), seed=0).to(options.device)
    ddp = DistributedDataParallel(model)
    if name.startswith("noop"):
        ddp.register_comm_hook(None, noop_hook)
    arguments = VARIANTS[name]
    return ddp, topreduce.torch.attach(ddp, **arguments) if arguments else None


def begin(rank: int, options: Options) -> None:
    torch.set_num_threads(1)
    if options.device != "cpu":
        torch.accelerator.set_device_index(rank % torch.accelerator.device_count())


def measure(
    rank: int, world_size: int, options: Options, report: Callable[[str], None]
) -> dict[str, tuple[list[float], dict[str, object]]]:
    """Seconds of every step by variant, and the last statistics of those that have any."""
    begin(rank, options)
    text = load_text()
    models = {name: variant(name, options) for name in VARIANTS}
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for block in range(options.blocks + 1):  # the first block warms up
        for name, (ddp, _) in models.items():
            for step in range(options.steps):
                inputs, targets = text.training_batch(
                    options.batch, options.context, seed=0, rank=rank, step=step
                )
                inputs, targets = inputs.to(options.device), targets.to(options.device)
                dist.barrier()
                started = time.perf_counter()
                ddp.zero_grad()
                next_id_loss(ddp, inputs, targets).backward()
                if options.device != "cpu":
                    torch.accelerator.synchronize()
                if block and step:
                    seconds[name].append(time.perf_counter() - started)
        report(f"block {block} of {options.blocks}")
    stats = {name: sync.stats() if sync else {} for name, (_, sync) in models.items()}
    return {name: (seconds[name], stats[name]) for name in VARIANTS}


def measure_memory(
    rank: int, world_size: int, arguments: tuple[str, Options], report: Callable[[str], None]
) -> tuple[int, int]:
    """The most bytes that this process ever held, and those of an fp32 copy of the model."""
    name, options = arguments
    begin(rank, options)
    text = load_text()
    ddp, sync = variant(name, options)
    for step in range(6):
        inputs, targets = text.training_batch(
            options.batch, options.context, seed=0, rank=rank, step=step
        )
        ddp.zero_grad()
        next_id_loss(ddp, inputs.to(options.device), targets.to(options.device)).backward()
    del sync
    copy = 4 * sum(parameter.numel() for parameter in ddp.parameters())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, copy


def show_memory(ranks: int, options: Options, backend: str) -> None:
    names = ["plain DDP", "plain DDP (A/A)", *(name for name in VARIANTS if VARIANTS[name])]
    print(f"\n{'memory at its peak':24} {'MB':>8} {'copies above plain':>18}")
    plain = 0.0
    for name in names:
        results = launch(
            measure_memory, ranks, (name.removesuffix(" (A/A)"), options), backend=backend
        )
        held = statistics.median(held for held, _ in results)
        plain = plain or held
        print(f"{name:24} {held / 1e6:8.0f} {(held - plain) / results[0][1]:18.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--device", default="cpu", help="where the models lie, e.g. cuda")
    parser.add_argument("--backend", default="gloo", help="of the device's group, e.g. nccl")
    arguments = parser.parse_args()
    try:
        check_device(arguments.device, arguments.backend, arguments.ranks)
    except ValueError as error:
        parser.error(str(error))
    options = Options(
        arguments.blocks, arguments.steps, arguments.batch, arguments.context, arguments.device
    )
    backend = backends(Workload(device=arguments.device, backend=arguments.backend))
    results = launch(measure, arguments.ranks, options, print, backend=backend)
    medians = {
        name: statistics.median(second for result in results for second in result[name][0])
        for name in VARIANTS
    }
    baseline = medians["noop_hook"]
    print(f"{'forward + backward':24} {'ms':>8} {'times noop':>10} {'kB sent':>8} {'waited ms':>9}")
    for name, median in medians.items():
        stats = results[0][name][1]
        sent = f"{stats['bytes_sent'] / 1e3:8.0f}" if stats else " " * 8
        waited = f"{stats['seconds_waited'] * 1e3:9.1f}" if stats else ""
        print(f"{name:24} {median * 1e3:8.1f} {median / baseline:10.3f} {sent} {waited}")
    show_memory(arguments.ranks, options, backend)


if __name__ == "__main__":
    main()
