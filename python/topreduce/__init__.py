"""Averages gradients over slow networks by sending only the entries that matter.

``topreduce.torch.attach(ddp_model)`` is the line that PyTorch users add.
``topreduce.torch`` and ``topreduce.mpi`` are imported when they are first used, so this package
needs neither torch nor mpi4py.
"""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from topreduce import mpi as mpi
    from topreduce import torch as torch

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


def __getattr__(name: str) -> ModuleType:
    if name in ("mpi", "torch"):
        return import_module(f"topreduce.{name}")
    hint = "; it is in topreduce.torch" if name == "attach" else ""
    raise AttributeError(f"module 'topreduce' has no attribute {name!r}{hint}")
