"""attach(model, "auto"): all ranks send the same, as much as hides, and it can be repeated."""

import time
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from models import Run, owed, text
from processes import Rank, group
from sharded import Case, build, mesh_of, usual_step
from transport import alone

import topreduce
import topreduce.torch
from topreduce.torch import Sync
from topreduce.torch import steps as steps_module
from topreduce.torch.steps import Step, Steps

STEPS = 40
FREE_BYTES = 4000  # that hide behind a step; more are waited for
COMPUTED = 1000.0  # seconds of a step: beside them what exchanges really take is nothing


class Told:
    """In place of the clock: a network as slow as the test wants."""

    def __init__(self, free_bytes: float = FREE_BYTES) -> None:
        self.free_bytes = free_bytes

    def __call__(self, steps: Steps, step: Step) -> None:
        steps._clock.end()
        sent = steps._reducer.stats.bytes_sent
        step.computed, step.waited = COMPUTED, 10 + max(0.0, sent - self.free_bytes) / 2
        steps._reducer.timed(step.computed, step.waited)


def told(free_bytes: float = FREE_BYTES) -> Any:
    network = Told(free_bytes)
    return mock.patch.object(Steps, "_time", lambda steps, step: network(steps, step))


def levels(sync: Sync) -> list[str]:
    return [step["level"] for step in sync.history()]


def expect_same_everywhere(words: list[str]) -> None:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, words)
    assert all(each == words for each in everyone), everyone


def at_once(model: torch.nn.Module, **settings: Any) -> Sync:
    return topreduce.torch.attach(
        model, "auto", **{"warmup_steps": 0, "ramp_steps": 0, "bucket_cap_mb": 0, **settings}
    )


def find_and_repeat(rank: Rank, folder: str) -> None:
    run = Run(rank)
    sync = at_once(run.ddp)
    assert sync.stats() == {}
    with pytest.raises(ValueError, match="after the third"):
        sync.advise()
    steps = 0
    with told():
        while steps < STEPS or (not sync._reducer.reason.startswith("settled: ") and steps < 100):
            run.train(range(steps, steps + 1))
            steps += 1
    assert sync.stats()["method"] == "auto"
    found = levels(sync)
    expect_same_everywhere(found)
    assert float(found[-1]) < 0.2, found
    assert len(set(found)) > 1, found
    assert f"auto, density {float(found[-1]):.3g} (settled: waits " in repr(sync)
    stats = sync.stats()
    assert stats["density"] == float(found[-1])
    assert stats["reason"].endswith("% of a step, 5 % allowed")
    assert stats["seconds_computed"] == COMPUTED
    advice = sync.advise()
    assert (advice.site.ranks, advice.site.computed) == (rank.ranks, COMPUTED)
    assert advice.rows[0].method == "auto"

    # The same choices, whatever is measured: the same bits.
    file = Path(folder) / f"choices-{rank.rank}"
    file.write_text("\n".join(sync.choices()))
    for density in (sync.choices(), file):
        again = Run(rank)
        other = at_once(again.ddp, density=density)
        again.train(range(steps))
        assert levels(other) == found
        assert again.digest() == run.digest()
        assert torch.equal(owed(other), owed(sync))
        other.detach()

    # And on from a checkpoint.
    state = sync.state_dict()
    resumed = at_once(Run(rank).ddp)
    resumed.load_state_dict(state)
    assert resumed.choices() == sync.choices()
    assert resumed._reducer.level == found[-1]
    fixed = at_once(Run(rank).ddp, density=0.05)
    fixed.load_state_dict(state)
    assert fixed._reducer.level == "0.05"
    del state["texts/choices"], state["texts/next"]  # of a version that had none
    resumed.load_state_dict(state)

    sync.configure(density=0.02)
    assert "auto, density 0.02, rank" in repr(sync)


def test_all_ranks_find_the_same_and_it_can_be_repeated(tmp_path: Path) -> None:
    group(3).run(find_and_repeat, str(tmp_path))


def in_vain(rank: Rank) -> None:
    """Fewer bytes than it may send would not help: it says so, once."""
    run = Run(rank)
    sync = at_once(run.ddp, min_density=0.05)
    with (
        mock.patch.multiple(steps_module, _WATCHED=40, _LAST=5),
        warnings.catch_warnings(record=True) as heard,
    ):
        warnings.simplefilter("always", RuntimeWarning)
        with mock.patch.object(Steps, "_time", nothing_but_waiting):
            run.train(range(50))
    said = [str(each.message) for each in heard if "plain DDP" in str(each.message)]
    assert len(said) == 1, said
    assert "waits for topreduce for 80% of a step, even with the least density" in said[0]
    assert "this is min_density already" in repr(sync)


def nothing_but_waiting(steps: Steps, step: Step) -> None:
    step.computed, step.waited = COMPUTED, 4 * COMPUTED
    steps._reducer.timed(step.computed, step.waited)


def test_it_warns_where_no_density_is_low_enough() -> None:
    group(2).run(in_vain)


def free(rank: Rank) -> None:
    """A network that nobody waits for: plain averages, of which nothing is owed."""
    run, plain = Run(rank), Run(rank)
    sync = at_once(run.ddp)
    with told(free_bytes=1e12):
        run.train(range(STEPS))
    assert levels(sync)[-1] == "fp32"
    assert "auto, everything in fp32 (settled" in repr(sync)
    assert "there is no more to send" in repr(sync)
    assert owed(sync).count_nonzero() == 0
    for each in (run, plain):
        each.ddp.load_state_dict(run.ddp.state_dict())
        each.backward(STEPS)
    assert torch.allclose(run.mean_gradient(), plain.mean_gradient(), rtol=1e-6, atol=1e-7)


def test_what_hides_is_sent_as_it_is() -> None:
    group(2).run(free)


def fixed_parts(rank: Rank) -> None:
    """Naming a method or a density fixes that part."""
    run = Run(rank)
    for method, density, expected in (
        ("topk", None, ("topk", "auto")),
        ("auto", None, ("auto", "auto")),
        ("topk:density=0.3", None, ("topk", "0.3")),
        ("auto", 0.3, ("auto", "0.3")),
        ("dense", None, ("dense", "1")),
        ("arc_topk", None, ("arc_topk", "auto")),
    ):
        sync = topreduce.torch.attach(run.ddp, method, density=density)
        spec = sync._reducer.spec
        assert (spec["method"], spec["density"]) == expected
        assert spec["warmup_steps"] == "10"
        sync.detach()
    for method, density, limits, words in (
        ("topk", 0.01, {"budget_bytes": 100}, "^budget_bytes: for density=auto only, and d"),
        ("topk:density=0.01", None, {"overhead": 0.1, "min_density": 0.1}, "overhead and min_d"),
        ("topk:density=0.01,max_density=0.1", None, {}, "^max_density: for density=auto only"),
        ("topk:budget_bytes=100", 0.01, {}, "^budget_bytes: for density=auto only"),
        ("topk:density=0.01", 0.02, {}, "given twice: in 'topk:density=0.01', and as density=0.02"),
    ):
        with pytest.raises(ValueError, match=words):
            topreduce.torch.attach(run.ddp, method, density=density, **limits)
    with pytest.raises(ValueError, match=r"density=nonsense must be a number in \(0, 1\], auto"):
        topreduce.torch.attach(run.ddp, density="nonsense")

    sync = topreduce.torch.attach(run.ddp, min_density=0.002)
    sync.configure(density=" 0.1 ")  # the limit of before is no mistake
    assert sync._reducer.spec["density"] == "0.1"
    for changes, words in (
        ({"budget_bytes": 100}, "^budget_bytes: for density=auto only, and density=0.1 is fixed"),
        ({"density": 0.2, "min_density": 0.1}, "^min_density: .* density=0.2 is fixed"),
        ({"method": "topk:density=0.2,overhead=0.1"}, "^overhead: .* density=0.2 is fixed"),
        ({"density": "1%"}, "density=1% must be a share, not a percentage: write 0.01"),
        ({"method": 0.001}, "^method must be a name such as 'topk', not 0.001"),
    ):
        with pytest.raises((ValueError, TypeError), match=words):
            sync.configure(**changes)
    assert sync._reducer.spec["density"] == "0.1"
    sync.configure(density="auto", budget_bytes=100)
    sync.configure("topk:density=0.2")
    assert (sync._reducer.spec["method"], sync._reducer.spec["density"]) == ("topk", "0.2")


def test_what_is_named_is_fixed() -> None:
    group(2).run(fixed_parts)


def all_kinds(rank: Rank) -> None:
    """A module, shards and machines: one choice for all ranks of the model."""
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    sharded = build(Case(), mesh_of(2, 2)["shard"])
    module, ddp = Run(rank).ddp.module, Run(rank).ddp
    several = [
        (
            module,
            {"group": dist.group.WORLD},
            lambda step: module(text(rank.rank, step)).backward(),
        ),
        (sharded, {"replicas": mesh_of(2, 2)["replicate"]}, None),
        (
            ddp,
            {"local_group": pairs[rank.rank // 2]},
            lambda step: ddp(text(rank.rank, step)).backward(),
        ),
    ]
    for model, where, backward in several:
        sync = at_once(model, **where)
        with told(free_bytes=300 if model is sharded else FREE_BYTES):
            for step in range(12):
                backward(step) if backward else usual_step(model, sync, step)
        expect_same_everywhere(levels(sync))
        assert len(set(levels(sync))) > 1, levels(sync)


def test_all_kinds_of_models_choose_alike() -> None:
    group(4).run(all_kinds)


def accumulate(rank: Rank) -> None:
    """Passes that are added up are one step, from the first of them on."""
    run = Run(rank)
    sync = at_once(run.ddp)
    run.backward(0)
    with run.ddp.no_sync():
        run.ddp(text(rank.rank, 1)).backward()
        time.sleep(0.3)
    with torch.no_grad():
        run.ddp(text(rank.rank, 1))
    run.ddp(text(rank.rank, 1)).backward()
    assert sync.stats()["step"] == 1
    assert sync.stats()["seconds_computed"] >= 0.3
    run.backward(2)
    assert len(sync.history()) == 3


def test_accumulated_passes_are_one_step() -> None:
    group(2).run(accumulate)


def test_the_reducer_alone_has_it_too() -> None:
    layout = topreduce.Layout([("weight", [8, 8])])
    reducer = topreduce.Reducer(layout, "auto")
    assert reducer.reason == "the search has not begun"
    comm = alone()
    gradient = np.ones(64, np.float32)
    reducer.begin(comm)
    reducer.add([0], gradient)
    stats = reducer.finish()
    assert stats.seconds_waited > 0
    reducer.timed(2.0, 0.5)
    assert reducer.stats.seconds_computed == 2.0
    assert reducer.choices == "fp32"  # alone there is nobody to send to
    with pytest.raises(ValueError, match="positive"):
        reducer.timed(-1.0, 0.0)
