"""attach() as it would be with state kept by place in the buckets: what every row must notice.

`pytest --naive` runs the suite with it. The places of the first step's buckets are taken for the
parameters they held; when DDP cuts its buckets anew, debts go to the wrong parameters.
"""

import itertools
from typing import Any

import numpy as np
from torch.nn.parallel import DistributedDataParallel

import topreduce.torch
from topreduce.torch.steps import Steps

_attach = topreduce.torch.attach


def attach(ddp: DistributedDataParallel, *arguments: Any, **settings: Any) -> topreduce.torch.Sync:
    sync = _attach(ddp, *arguments, **settings)
    sync._reducer.use(None)
    steps = sync._steps
    first_order: list[int] = []

    def advance(step: Any, bucket: Any) -> None:
        """The whole model at once, in the order of the first step's buckets."""
        if not bucket.is_last:
            return
        order = [steps._number(p) for each in step.buckets for p in each.parameters]
        first_order[:] = first_order or order
        arrays = [each.gradient() for each in step.buckets]
        together = np.concatenate(arrays)
        step.density = sync._reducer.density
        Steps._begin(steps, step.loss_scale)
        sync._reducer.add(first_order, together)
        stats = sync._reducer.finish()
        ends = list(itertools.accumulate(len(array) for array in arrays))
        for array, part in zip(arrays, np.split(together, ends[:-1]), strict=True):
            array[:] = part
        for each in step.buckets:
            each.give_back()
        steps.history.append(steps.record(stats, step.density, 0.0))

    steps._advance = advance  # type: ignore[method-assign]
    return sync
