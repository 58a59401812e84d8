"""device: what a step asks of an accelerator: launches, stops of the host, bytes over the bus.

Counted on the device that tests bring along (python/tests/fakegpu), where every operation of torch
is a launch, and everything that has the host wait for the device is a stop. One rank; the step is
the tenth, in which nothing is new. Times on that device would mean nothing, and are not shown.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "python" / "tests"))

import fakegpu
from counting import count_step

from topreduce import Layout
from topreduce.torch.device import bucket_cap_mb

ROWS = [
    ("topk 1 %", "topk:density=0.01", None),
    ("topk 1 %, parts of 1 MB", "topk:density=0.01", 1.0),
    ("topk 1 %, model", "topk:density=0.01,granularity=model", None),
    ("ok_topk 1 %", "ok_topk:density=0.01", None),
    ("ok_topk 1 %, exact", "ok_topk:density=0.01,period=1", None),
    ("gaussiank 1 %", "gaussiank:density=0.01", None),
    ("dense", "dense", None),
    ("arc_topk 20 %, native", "arc_topk:density=0.2,reduce=native", None),
    ("randk 1 %, native", "randk:density=0.01,reduce=native", None),
    ("dense, native", "dense:reduce=native", None),
]
STEPS = 10


def layout_of(entries: int) -> Layout:
    """Square matrices and biases, as in a transformer."""
    width = max(1, min(1024, round((entries / 60) ** 0.5)))
    layers = max(1, entries // (width * width + width))
    names = [(f"{layer}.weight", [width, width]) for layer in range(layers)]
    return Layout(names + [(f"{layer}.bias", [width]) for layer in range(layers)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--entries", type=float, default=20e6, help="of the model")
    layout = layout_of(int(parser.parse_args().entries))
    fakegpu.load()
    print(f"{layout.size / 1e6:.1f} M entries, {len(layout)} parameters, per step")
    heads = ("exchanges", "launches", "stops", "MB to host", "MB to device")
    print(f"{'':24} " + " ".join(f"{head:>12}" for head in heads))
    for name, spec, cap in ROWS:
        cap_mb = bucket_cap_mb(layout.size) if cap is None else cap
        counted, exchanges = count_step(layout, spec, cap_mb, STEPS)
        megabytes = (counted.get(f"bytes_to_{end}", 0) / 1e6 for end in ("host", "device"))
        numbers = [exchanges, counted["launches"], counted["stops"]]
        cells = [f"{number:12}" for number in numbers] + [f"{each:12.2f}" for each in megabytes]
        print(f"{name:24} {' '.join(cells)}")
    assert not fakegpu.take_races()


if __name__ == "__main__":
    main()
