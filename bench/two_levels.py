"""two_levels: what leaves a machine with several ranks, with local_group= and without.

2 hosts in network namespaces with a link of 100 Mb/s each, 2 ranks on each, a 1 M-parameter GPT.
Bytes are counted at the host's network interface, beside our own count, which without local_group=
also holds what ranks of one host send each other. "2 ranks" is a run with one rank on each host:
what one exchange costs. Needs root; says so and does nothing without.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import topreduce.torch
from topreduce.lab.experiments.launch import launch
from topreduce.lab.network.cluster import INTERFACE, cluster, obstacle, parse_rates
from topreduce.lab.network.namespaces import bytes_through
from topreduce.lab.tasks.gpt import GPT, preset
from topreduce.lab.tasks.models import next_id_loss
from topreduce.lab.tasks.text import load_text

HOSTS, RANKS = 2, 4
STEADY = {"density": 0.01, "warmup_steps": 0, "ramp_steps": 0}
METHODS = {
    "topk 1 %": {**STEADY, "method": "topk"},
    "ok_topk 1 %": {**STEADY, "method": "ok_topk"},
    "dense": {"method": "dense"},
}
PAIR, FLAT, LEVELS = "2 ranks", "4 ranks, flat", "4 ranks, local_group"
WARM_UP = 2  # steps: connections stand, DDP has cut its buckets anew


@dataclass(frozen=True)
class Count:
    """Of one step, on one host."""

    interface: float  # bytes
    booked: float
    seconds: float


class Trainer:
    """One rank of one run."""

    def __init__(self, rank: int, settings: dict[str, Any], ranks: object, machine: object) -> None:
        self.rank = rank
        self.text = load_text()
        self.config = preset("gpt:1m", vocabulary=len(self.text.characters))
        self.ddp = DistributedDataParallel(GPT(self.config, seed=0), process_group=ranks)
        self.sync = topreduce.torch.attach(self.ddp, **settings, local_group=machine)

    def step(self, number: int) -> float:
        inputs, targets = self.text.training_batch(
            1, self.config.context, seed=0, rank=self.rank, step=number
        )
        started = time.perf_counter()
        self.ddp.zero_grad()
        next_id_loss(self.ddp, inputs, targets).backward()
        return time.perf_counter() - started


def count(trainer: Trainer | None, steps: int) -> Count | None:
    """None: this rank only waits for the others."""
    for step in range(WARM_UP if trainer else 0):
        trainer.step(step)
    dist.barrier()
    before = bytes_through(INTERFACE)[0]
    dist.barrier()
    seconds = [trainer.step(WARM_UP + step) for step in range(steps)] if trainer else []
    dist.barrier()
    sent = bytes_through(INTERFACE)[0] - before
    if trainer is None:
        return None
    booked = sum(step["bytes_sent"] for step in trainer.sync.history()[-steps:])
    trainer.sync.detach()
    return Count(sent / steps, booked / steps, statistics.median(seconds))


def measure(
    rank: int, world_size: int, steps: int, report: Callable[[str], None]
) -> dict[tuple[str, str], Count | None]:
    torch.set_num_threads(1)
    machine, _ = dist.new_subgroups(world_size // HOSTS)
    firsts = dist.new_group(list(range(0, world_size, world_size // HOSTS)))
    counts = {}
    for name, settings in METHODS.items():
        for arrangement, (ranks, local) in {
            FLAT: (None, None),
            LEVELS: (None, machine),
            PAIR: (firsts, None),
        }.items():
            waits = ranks is firsts and rank % (world_size // HOSTS) != 0
            trainer = None if waits else Trainer(rank, settings, ranks, local)
            counts[name, arrangement] = count(trainer, steps)
            report(f"{name}, {arrangement}")
    return counts


def show(results: list[dict[tuple[str, str], Count | None]]) -> None:
    """Means over the hosts."""
    print(f"{'':34}{'interface':>12}{'our count':>12}{'times 2 ranks':>14}{'ms/step':>9}")
    for name in METHODS:
        yardstick = None
        for arrangement in (PAIR, FLAT, LEVELS):
            hosts = [each[name, arrangement] for each in results[:: RANKS // HOSTS]]
            interface = statistics.mean(host.interface for host in hosts) / 1e3
            ranks = [each[name, arrangement] for each in results]
            booked = sum(rank.booked for rank in (ranks if arrangement == FLAT else hosts))
            yardstick = yardstick or interface
            print(
                f"{name:13}{arrangement:21}{interface:9.1f} kB{booked / HOSTS / 1e3:9.1f} kB"
                f"{interface / yardstick:14.2f}{1e3 * hosts[0].seconds:9.0f}"
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rate", default="100mbit")
    arguments = parser.parse_args()
    reason = obstacle()
    if reason is not None:
        print(f"two_levels: no network namespaces here ({reason}); skipped")
        return 0
    with cluster(parse_rates(arguments.rate, HOSTS)) as hosts:
        places = [host.place for host in hosts for _ in range(RANKS // HOSTS)]
        results = launch(measure, RANKS, arguments.steps, places=places)
    print(f"{HOSTS} hosts at {arguments.rate}, kB per host and step\n")
    show(results)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
