"""interface: the bytes that leave a host, counted by its network interface, beside our own count.

Every rank is a host of its own in the lab's emulated cluster, which ends with this process, however
that ends. Real processes train through attach over Gloo. Needs root; without, it says so and does
nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import topreduce.torch
from topreduce.lab.experiments.launch import launch
from topreduce.lab.network.cluster import INTERFACE, cluster, obstacle
from topreduce.lab.network.namespaces import bytes_through
from topreduce.lab.tasks.gpt import GPT, preset
from topreduce.lab.tasks.models import next_id_loss
from topreduce.lab.tasks.text import load_text

RANKS = 4
STEADY: dict[str, Any] = {"density": 0.01, "warmup_steps": 0, "ramp_steps": 0}
RUNS: list[tuple[str, dict[str, Any]]] = [
    ("topk", {**STEADY, "values": "bf16"}),
    ("topk", {**STEADY, "values": "int4"}),
    ("ok_topk", {**STEADY, "values": "bf16"}),
    ("ok_topk", {**STEADY, "values": "int4"}),
    ("dense", {}),
]
WARM_UP = 2  # steps: connections stand, the ranks agree, DDP has cut its buckets anew


def work(
    rank: int, world_size: int, steps: int, report: Callable[[str], None]
) -> list[tuple[int, int]]:
    """Trains with each of RUNS: what the interface and the books counted."""
    torch.set_num_threads(1)
    text = load_text()
    config = preset("gpt:0.6m", vocabulary=len(text.characters))
    counts = []
    for method, settings in RUNS:
        ddp = DistributedDataParallel(GPT(config, seed=0))
        sync = topreduce.torch.attach(ddp, method, **settings)
        before = booked = 0
        for step in range(WARM_UP + steps):
            if step == WARM_UP:
                dist.barrier()
                before = bytes_through(INTERFACE)[0]
            inputs, targets = text.training_batch(4, config.context, seed=0, rank=rank, step=step)
            ddp.zero_grad()
            next_id_loss(ddp, inputs, targets).backward()
            if step >= WARM_UP:
                booked += sync.stats()["bytes_sent"]
        dist.barrier()
        counts.append((bytes_through(INTERFACE)[0] - before, booked))
        sync.detach()
        del ddp
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    steps = parser.parse_args().steps
    reason = obstacle()
    if reason is not None:
        print(f"interface: no network namespaces here ({reason}); skipped")
        return 0
    with cluster([None] * RANKS) as hosts:
        counts = launch(work, RANKS, steps, places=[host.place for host in hosts])
    print(f"{RANKS} hosts, {steps} steps: kB per host and step, mean over the hosts\n")
    print(f"{'method':10}{'values':8}{'interface':>11}{'our count':>11}{'more':>8}")
    for i, (method, settings) in enumerate(RUNS):
        seen = sum(host[i][0] for host in counts) / RANKS / steps / 1e3
        booked = sum(host[i][1] for host in counts) / RANKS / steps / 1e3
        values = settings.get("values", "fp32")
        print(f"{method:10}{values:8}{seen:>11.1f}{booked:>11.1f}{seen / booked - 1:>8.1%}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
