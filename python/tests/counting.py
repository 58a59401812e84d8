"""What a step asks of an accelerator: counted on the device for tests, with one rank."""

import fakegpu
import torch

from topreduce import Communicator, Layout, Reducer, run_ranks
from topreduce.torch.summing_device import SummingDevice


class _Alone:
    """All ranks, if there is one."""

    def all_reduce(self, values: torch.Tensor) -> None:
        pass


def count_step(layout: Layout, spec: str, cap_mb: float, steps: int) -> tuple[dict[str, int], int]:
    """What the last of so many steps asked for, and in how many exchanges."""

    def body(comm: Communicator) -> tuple[dict[str, int], int]:
        reducer = Reducer(layout, spec, bucket_cap_mb=cap_mb)
        device = SummingDevice(torch.device(fakegpu.NAME))
        device.adder = _Alone
        reducer.use(device)
        rng = torch.Generator().manual_seed(1)
        for _ in range(steps):
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
