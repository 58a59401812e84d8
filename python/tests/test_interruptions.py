"""Runs that stand still for a while: a rank that is paused, processes that end and start anew."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Run, attach_at_once, digest, owed
from processes import Processes, Rank, group

METHODS = [
    {"method": "topk", "density": 0.01},
    {"method": "ok_topk", "density": 0.01, "granularity": "model"},
]


# ---- a rank that is paused ---------------------------------------------------------------------


def is_stopped(process: int) -> bool:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def pause_rank_zero(rank: Rank) -> None:
    """Rank 1 stops rank 0, and lets it go on once it is itself waiting in an exchange."""
    run, undisturbed = Run(rank, bucket_cap_mb=0.03), Run(rank, bucket_cap_mb=0.03)
    sync, twin = (attach_at_once(each.ddp, **METHODS[0]) for each in (run, undisturbed))
    undisturbed.train(range(6))
    run.train(range(3))
    processes: list[Any] = [None] * rank.ranks
    dist.all_gather_object(processes, os.getpid())
    waited = []

    def let_go(messages: int) -> None:
        while sync._comm.messages == messages:
            time.sleep(0.01)
        time.sleep(0.3)  # so that the wait is one
        waited.append(is_stopped(processes[0]))
        os.kill(processes[0], signal.SIGCONT)

    if rank.rank == 1:
        os.kill(processes[0], signal.SIGSTOP)
        while not is_stopped(processes[0]):
            time.sleep(0.01)
        helper = threading.Thread(target=let_go, args=(sync._comm.messages,))
        helper.start()
    run.train(range(3, 6))
    if rank.rank == 1:
        helper.join()
        assert waited == [True]
    assert run.digest() == undisturbed.digest()
    assert torch.equal(owed(sync), owed(twin))


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux")
def test_a_rank_that_is_paused_is_waited_for() -> None:
    group(3).run(pause_rank_zero)


# ---- processes that end and start anew ---------------------------------------------------------


def train_and_save(rank: Rank, settings: dict[str, Any], folder: str) -> tuple[str, str]:
    """How a run of 12 steps ends; another leaves its first 5 in `folder`."""
    whole, first = Run(rank, bucket_cap_mb=0.03), Run(rank, bucket_cap_mb=0.03)
    whole_sync, first_sync = (attach_at_once(each.ddp, **settings) for each in (whole, first))
    whole.train(range(12))
    first.train(range(5))
    parts = {
        "model": first.ddp.state_dict(),
        "optimizer": first.optimizer.state_dict(),
        "sync": first_sync.state_dict(),
    }
    torch.save(parts, Path(folder) / f"run-{rank.rank}.pt")
    return whole.digest(), digest(owed(whole_sync))


def load_and_train(rank: Rank, settings: dict[str, Any], folder: str) -> tuple[str, str]:
    saved = torch.load(Path(folder) / f"run-{rank.rank}.pt", weights_only=True)
    run = Run(rank, bucket_cap_mb=0.03)
    run.ddp.load_state_dict(saved["model"])
    run.optimizer.load_state_dict(saved["optimizer"])
    sync = attach_at_once(run.ddp, **settings)
    sync.load_state_dict(saved["sync"])
    run.train(range(5, 12))
    return run.digest(), digest(owed(sync))


def test_fresh_processes_go_on_bit_for_bit(tmp_path: Path) -> None:
    fresh = Processes(3)
    for settings in METHODS:
        whole = group(3).run(train_and_save, settings, str(tmp_path))
        assert fresh.run(load_and_train, settings, str(tmp_path)) == whole
        assert len({model for model, _ in whole}) == 1
        assert len({debt for _, debt in whole}) == 3
    fresh.stop()
