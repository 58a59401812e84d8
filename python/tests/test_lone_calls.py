"""Calls that only one rank makes, or makes at a wrong moment: every rank is told who does what.

Nobody waits for a time-out, which is far longer than a case may take.
"""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Run, owed
from models import attach_at_once as attach
from processes import Rank, group

from topreduce.torch import CommError, WireError

MODEL = {"granularity": "model", "density": 0.05}
BUCKET = {"granularity": "bucket", "density": 0.05}


def told(call: Callable[[], Any], *words: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        call()
    text = str(error.value)
    assert re.search(".*".join(words), text), text
    assert text.isprintable()


def call_alone(rank: Rank, settings: dict[str, Any]) -> str:
    """Rank 0 alone loads or changes; all hear of it, nothing moves, and the run can go on."""
    run, undisturbed = Run(rank, bucket_cap_mb=0.03), Run(rank, bucket_cap_mb=0.03)
    sync, twin = attach(run.ddp, **settings), attach(undisturbed.ddp, **settings)
    run.train(range(3))
    undisturbed.train(range(6))
    state, debt = sync.state_dict(), owed(sync)

    # load_state_dict is noticed by the next step.
    others = "; ".join(f"rank {r}: step 3" for r in range(1, rank.ranks))
    loaded = "rank 0: the first step after settings or a state changed, step 3"
    if rank.rank == 0:
        sync.load_state_dict(state)
    for _ in range(2):  # and again, until the others have loaded as well
        told(lambda: run.backward(3), "different places", f"{loaded}; {others}", "on all ranks")
        assert run.mean_gradient().count_nonzero() == 0
        assert torch.equal(owed(sync), debt)
    if rank.rank > 0:
        sync.load_state_dict(state)
    run.train(range(3, 4))

    # Changes are told of at once; the other ranks drop the step they are in.
    others = others.replace("step 3", "[^;]*step 4")  # or before it, to agree on an order
    calls = {
        r"configure\(\)": lambda: sync.configure(density=0.5),
        r"bypass\(\)": sync.bypass,
        r"compress\(\)": sync.compress,
    }
    debt = owed(sync)
    for name, call in calls.items():
        words = f"rank 0: {name} before step 4; {others}"
        told(call if rank.rank == 0 else lambda: run.backward(4), "different places", words)
    assert torch.equal(owed(sync), debt)
    run.train(range(4, 6))
    assert sync.stats()["density"] == 0.05
    assert run.digest() == undisturbed.digest()
    assert torch.equal(owed(sync), owed(twin))
    return run.digest()


@pytest.mark.parametrize("settings", [MODEL, BUCKET], ids=["model", "bucket"])
def test_a_lone_call_is_told_to_all_ranks(settings: dict[str, Any]) -> None:
    assert len(set(group(3).run(call_alone, settings))) == 1


def load_alone_before_the_order_is_agreed(rank: Rank) -> None:
    run = Run(rank, bucket_cap_mb=0.03)
    sync = attach(run.ddp, **BUCKET)
    run.train(range(1))
    if rank.rank == 0:
        sync.load_state_dict(sync.state_dict())
    loaded = "rank 0: the first step after settings or a state changed, step 1; rank 1: step 1"
    told(lambda: run.backward(1), "different places", loaded)


def test_a_lone_load_before_the_second_step() -> None:
    group(2).run(load_alone_before_the_order_is_agreed)


def detach_alone(rank: Rank) -> None:
    run = Run(rank)
    sync = attach(run.ddp, **BUCKET)
    run.train(range(2))
    if rank.rank == 1:
        sync.detach()
    else:
        with pytest.raises(CommError, match=r"rank 1.*detach\(\) before step 2.*on all ranks"):
            run.backward(2)
        sync.detach()
    dist.barrier()
    run.train(range(2, 4))


def call_inside_backward(rank: Rank) -> None:
    run, undisturbed = Run(rank, bucket_cap_mb=0.03), Run(rank, bucket_cap_mb=0.03)
    sync, twin = attach(run.ddp, **BUCKET), attach(undisturbed.ddp, **BUCKET)
    undisturbed.train(range(4))
    run.train(range(2))
    state = sync.state_dict()
    refused: list[str] = []

    def misbehave(_: torch.Tensor) -> None:
        for call in (
            sync.state_dict,
            lambda: sync.load_state_dict(state),
            lambda: sync.configure(density=0.5),
            sync.bypass,
            sync.detach,
        ):
            with pytest.raises(ValueError, match=r"inside backward\(\).*between steps") as e:
                call()
            refused.append(str(e.value))

    hook = run.ddp.module.places.weight.register_hook(misbehave)  # among the last
    run.train(range(2, 3))
    hook.remove()
    assert len(refused) == 5
    run.train(range(3, 4))
    assert run.digest() == undisturbed.digest()
    assert torch.equal(owed(sync), owed(twin))


def test_a_lone_detach_and_calls_inside_of_backward() -> None:
    group(2).run(detach_alone)
    group(2).run(call_inside_backward)


# ---- several ranks per machine -----------------------------------------------------------------


def call_alone_on_two_levels(rank: Rank, call: str, callers: list[int]) -> str:
    """Ranks 0 and 1, 2 and 3 share a machine. What some of them miss reaches all the same."""
    machines = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    run = Run(rank)
    sync = attach(run.ddp, **BUCKET, local_group=machines[rank.rank // 2])
    run.train(range(2))
    if call == "load_state_dict":  # on all ranks, it is no reason to stop
        sync.load_state_dict(sync.state_dict())
        run.train(range(1, 2))
        sync.configure(density=0.05)
        run.train(range(2))
    step = len(sync.history())
    mine = call if rank.rank in callers else ""
    if mine == "load_state_dict":
        sync.load_state_dict(sync.state_dict())
    changes = {"configure": lambda: sync.configure(density=0.5), "bypass": sync.bypass}
    debt = sync.state_dict()
    with pytest.raises((CommError, WireError)) as error:
        changes.get(mine, lambda: run.backward(step))()
    assert all(torch.equal(sync.state_dict()[key], debt[key]) for key in debt if "/owed/" in key)
    sync.detach()
    return str(error.value).replace(f"step {step}", "step 2")


def test_a_lone_call_with_several_ranks_per_machine() -> None:
    loaded = "the first step after settings or a state changed, step 2"
    for call, callers, words in (
        ("bypass", [1], "rank 0: step 2; rank 1: bypass() before step 2."),
        ("bypass", [2, 3], "rank 0: step 2; rank 2: bypass() before step 2."),
        ("configure", [0], "rank 0: configure() before step 2; rank 1: step 2."),
        ("configure", [2, 3], "rank 0: step 2; rank 2: configure() before step 2."),
        ("load_state_dict", [1], f"rank 0: step 2; rank 1: {loaded}."),
        ("load_state_dict", [2], f"rank 2: {loaded}; rank 3: step 2."),
        ("load_state_dict", [2, 3], f"rank 0: step 2; rank 2: {loaded}."),
    ):
        for text in group(4).run(call_alone_on_two_levels, call, callers):
            assert f"the ranks are at different places of the program: {words}" in text, text
            assert "Make the same calls on all ranks" in text, text
