"""Sparse gradient averaging for DistributedDataParallel models.

sync = topreduce.torch.attach(ddp_model, "topk", density=0.01)
"""

from topreduce import CommError, WireError
from topreduce.torch.attachment import attach
from topreduce.torch.resharding import reshard
from topreduce.torch.sync import Sync

__all__ = ["CommError", "Sync", "WireError", "attach", "reshard"]
