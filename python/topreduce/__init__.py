"""Averages gradients over slow networks by sending only the entries that matter.

``topreduce.torch.attach(ddp_model)`` is the line that PyTorch users add; it
is imported explicitly, so that this package does not need torch.
"""

from topreduce._core import (
    CommError,
    Communicator,
    DriftError,
    Layout,
    Reducer,
    StepStats,
    WireError,
    __version__,
    run_ranks,
)
from topreduce.catalog import methods

__all__ = [
    "CommError",
    "Communicator",
    "DriftError",
    "Layout",
    "Reducer",
    "StepStats",
    "WireError",
    "__version__",
    "methods",
    "run_ranks",
]
