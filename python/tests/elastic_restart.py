"""A run that torchrun starts again from what was saved; see test_examples.

TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --max-restarts 1 --nproc-per-node 2 \\
    python/tests/elastic_restart.py FOLDER
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import topreduce.torch

STEPS, EVERY, DIES_AT = 18, 5, 12


def main() -> None:
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    sync = topreduce.torch.attach(model, "topk", density=0.05, warmup_steps=2, ramp_steps=4)
    checkpoint = folder / "model.pt"
    started = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        started = sync.load(folder, step=saved["step"])
    while sync.step < STEPS:
        rng = torch.Generator().manual_seed(100 * sync.step + rank)
        inputs = torch.randn(8, 64, generator=rng)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), inputs[:, :10].argmax(1)).backward()
        optimizer.step()
        if sync.step % EVERY == 0:
            sync.save(folder)
            if rank == 0:
                parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**parts, "step": sync.step}, folder / "new.pt")
                (folder / "new.pt").replace(checkpoint)
        first_try = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
        if sync.step == DIES_AT and rank == 1 and first_try:
            os.kill(os.getpid(), signal.SIGKILL)
    norm = sum(float(each.detach().double().norm()) for each in model.parameters())
    seen = {"started": started, "ended": sync.step, "norm": norm}
    (folder / f"rank{rank}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
