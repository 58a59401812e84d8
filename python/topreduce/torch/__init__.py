"""Sparse gradient averaging for PyTorch models: DistributedDataParallel, FSDP2, plain modules.

sync = topreduce.torch.attach(ddp_model)
"""

from importlib.util import find_spec

if find_spec("torch") is None:
    raise ModuleNotFoundError("topreduce.torch needs PyTorch: pip install torch", name="torch")

from torch.distributed import DistError

from topreduce import CommError, DriftError, WireError
from topreduce.torch.attachment import attach
from topreduce.torch.meeting import Ranks
from topreduce.torch.rebuilding import Rebuilt
from topreduce.torch.resharding import reshard
from topreduce.torch.sync import Sync

# One class with and without torch: programs that catch errors of torch.distributed catch these too.
CommError.__bases__ = (DistError,)

__all__ = ["CommError", "DriftError", "Ranks", "Rebuilt", "Sync", "WireError", "attach", "reshard"]
