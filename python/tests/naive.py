"""attach() as it would be with state kept by place in the buckets: what every row must notice.

`pytest --naive` runs the suite with it. The places of the first step's buckets are taken for the
parameters they held; when DDP cuts its buckets anew, debts go to the wrong parameters.
"""

import itertools
from typing import Any

import numpy as np
from models import adapter_of
from torch.nn.parallel import DistributedDataParallel

import topreduce.torch

_attach = topreduce.torch.attach


def attach(ddp: DistributedDataParallel, *arguments: Any, **settings: Any) -> topreduce.torch.Sync:
    sync = _attach(ddp, *arguments, **settings)
    if not isinstance(ddp, DistributedDataParallel):
        return sync
    sync._reducer.use(None)
    adapter = adapter_of(sync)
    adapter._takes_early = False
    first_order: list[int] = []

    def add(current: Any, bucket: Any) -> None:
        """The whole model at once, in the order of the first step's buckets."""
        if not bucket.is_last:
            return
        order = [adapter._number(p) for each in current.buckets for p in each.parameters]
        first_order[:] = first_order or order
        arrays = [each.gradient(0, each.buffer.numel()).numpy() for each in current.buckets]
        together = np.concatenate(arrays)
        sync._reducer.add(first_order, together)
        give_back = current.give_back

        def take_apart() -> None:
            ends = list(itertools.accumulate(len(array) for array in arrays))
            for array, part in zip(arrays, np.split(together, ends[:-1]), strict=True):
                array[:] = part
            give_back()

        current.give_back = take_apart

    adapter._add = add  # type: ignore[method-assign]
    return sync
