"""device: what a step asks of an accelerator: launches, stops of the host, bytes over the bus.

Counted on the device that tests bring along (python/tests/fakegpu), where every operation of torch
is a launch, and everything that has the host wait for the device is a stop. One rank; the step is
the tenth, in which nothing is new. Times on that device would mean nothing, and are not shown.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "python" / "tests"))

import fakegpu

from topreduce import Communicator, Layout, Reducer, run_ranks
from topreduce.torch.device import GradientDevice, bucket_cap_mb

ROWS = [
    ("topk 1 %", "topk:density=0.01", None),
    ("topk 1 %, parts of 1 MB", "topk:density=0.01", 1.0),
    ("topk 1 %, model", "topk:density=0.01,granularity=model", None),
    ("ok_topk 1 %", "ok_topk:density=0.01", None),
    ("gaussiank 1 %", "gaussiank:density=0.01", None),
    ("dense", "dense", None),
]
STEPS = 10


def layout_of(entries: int) -> Layout:
    """Square matrices and biases, as in a transformer."""
    width = max(1, min(1024, round((entries / 60) ** 0.5)))
    layers = max(1, entries // (width * width + width))
    names = [(f"{layer}.weight", [width, width]) for layer in range(layers)]
    return Layout(names + [(f"{layer}.bias", [width]) for layer in range(layers)])


def count(layout: Layout, spec: str, cap: float | None) -> tuple[dict[str, int], int]:
    """What the last step asked for, and in how many exchanges."""

    def body(comm: Communicator) -> tuple[dict[str, int], int]:
        cap_mb = bucket_cap_mb(layout.size) if cap is None else cap
        reducer = Reducer(layout, spec, bucket_cap_mb=cap_mb)
        device = GradientDevice(torch.device(fakegpu.NAME))
        reducer.use(device)
        rng = torch.Generator().manual_seed(0)
        for _ in range(STEPS):
            gradient = torch.randn(layout.size, generator=rng).to(device.device)
            fakegpu.load().reset_counters()
            with device.lane.behind(device.lane.mark()):
                device.hold(range(len(layout)), layout.sizes, gradient)
                reducer.begin(comm)
                reducer.add_on_device(range(len(layout)))
                reducer.finish()
            counted = fakegpu.counters()
            device.release()
        return counted, len(reducer.buckets)

    return run_ranks(1, body)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--entries", type=float, default=20e6, help="of the model")
    layout = layout_of(int(parser.parse_args().entries))
    fakegpu.load()
    print(f"{layout.size / 1e6:.1f} M entries, {len(layout)} parameters, per step")
    heads = ("exchanges", "launches", "stops", "MB to host", "MB to device")
    print(f"{'':24} " + " ".join(f"{head:>12}" for head in heads))
    for name, spec, cap in ROWS:
        counted, exchanges = count(layout, spec, cap)
        megabytes = (counted.get(f"bytes_to_{end}", 0) / 1e6 for end in ("host", "device"))
        numbers = [exchanges, counted["launches"], counted["stops"]]
        cells = [f"{number:12}" for number in numbers] + [f"{each:12.2f}" for each in megabytes]
        print(f"{name:24} {' '.join(cells)}")
    assert not fakegpu.take_races()


if __name__ == "__main__":
    main()
