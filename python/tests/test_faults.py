"""A rank is killed or stopped in each phase of a step, in real processes over our sockets."""

import contextlib
import os
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Run, owed
from models import attach_at_once as attach
from processes import Processes, Rank, group

from topreduce.torch import CommError

BUCKET = {"granularity": "bucket", "density": 0.05}
PHASES = {
    "agreement": r"step 2, the agreement",
    "exchange": r"step 2, (bucket of parameter \d+|the order of buckets)",
    "vote": r"step 2, the vote",
}
VICTIM = 1
TIMEOUT = 2.0  # seconds
LONG = 60.0  # on a busy machine a killed process takes its time to go


def lose_a_rank(
    rank: Rank, phase: str, how: str, patience: float = TIMEOUT
) -> tuple[str, float] | None:
    """What the survivors hear, and after how many seconds. `patience`: that of rank 2."""
    run = Run(rank, bucket_cap_mb=0.02)
    timeout = LONG if how == "kill" else patience if rank.rank == 2 else TIMEOUT
    sync = attach(run.ddp, **BUCKET, timeout=timedelta(seconds=timeout))
    run.train(range(2))
    if phase == "agreement":
        sync.load_state_dict(sync.state_dict())  # the ranks compare settings anew
    debt = owed(sync)
    processes: list[Any] = [None] * rank.ranks
    dist.all_gather_object(processes, os.getpid())
    survivors = dist.new_group([each for each in range(rank.ranks) if each != VICTIM])
    if rank.rank == VICTIM:
        sync._comm.fail_at(0, "", phase, how)
    started = time.monotonic()
    if rank.rank == VICTIM:
        # It has what came while it was stopped, and may get further: in the vote that is all.
        with contextlib.nullcontext() if phase == "vote" else pytest.raises(CommError):
            run.backward(2)
        assert torch.equal(owed(sync), debt) == (phase != "vote")
        dist.barrier()
        sync.detach()
        return None
    with pytest.raises(CommError, match=rf"rank {rank.rank} of 3, .*{PHASES[phase]}") as failure:
        run.backward(2)
    seconds = time.monotonic() - started
    assert torch.equal(owed(sync), debt)
    assert run.mean_gradient().count_nonzero() == 0
    if how == "stop":
        dist.barrier(survivors)  # or what it still sends lets one of them get further
        if rank.rank == 0:
            os.kill(processes[VICTIM], signal.SIGCONT)  # it finds that the others have gone
        dist.barrier()
    sync.detach()
    return str(failure.value), seconds


def test_a_rank_is_stopped_in_each_phase() -> None:
    for phase in PHASES:
        answers = group(3).run(lose_a_rank, phase, "stop")
        for each in (0, 2):
            text, seconds = answers[each]
            assert "Timed out" in text, text
            assert f"rank {VICTIM}" in text, text
            print(f"stopped in the {phase}: rank {each} knew after {seconds:.2f} s")


def test_whoever_hears_of_a_time_out_waits_for_no_other() -> None:
    answers = group(3).run(lose_a_rank, "exchange", "stop", 3 * TIMEOUT)
    text, _ = answers[2]
    assert f"rank {VICTIM} is silent: rank 0 gave up: CommError: Timed out" in text


def test_a_rank_is_killed_in_each_phase() -> None:
    for phase in PHASES:
        processes = Processes(3)
        answers = processes.run(lose_a_rank, phase, "kill", dying=[VICTIM])
        assert answers[VICTIM] is None
        for each in (0, 2):
            text, seconds = answers[each]
            assert "Timed out" not in text, text
            assert f"rank {VICTIM} is gone" in text or "gave up" in text, text
            print(f"killed in the {phase}: rank {each} knew after {seconds:.2f} s")
