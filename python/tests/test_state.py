"""Checkpoints, and what the ranks must have in common."""

import copy
import pickle
from typing import Any

import numpy as np
import pytest
from stepping import Floats, random_buckets, run_step, snapshot
from transport import alone

import topreduce
from topreduce import Communicator, Layout, Reducer, run_ranks

LAYOUT = Layout([("weight", (40, 5)), ("bias", (5,)), ("unused", (0,)), ("scale", ())])
METHODS = [method["name"] for method in topreduce.methods()]
STEPS = 6


def gradient(rank: int, step: int) -> Floats:
    return np.random.default_rng([rank, step]).normal(size=LAYOUT.size).astype(np.float32)


def make_reducer(method: str, granularity: str) -> Reducer:
    settings: dict[str, object] = {} if method == "dense" else {"density": 0.1}
    return Reducer(
        LAYOUT, method, granularity=granularity, warmup_steps=1, ramp_steps=8, **settings
    )


def run_steps(
    reducer: Reducer, comm: Communicator, first: int, rng: np.random.Generator
) -> list[bytes]:
    means = []
    for step in range(first, first + STEPS):
        buckets = random_buckets(rng, len(LAYOUT))
        mean, _ = run_step(reducer, comm, gradient(comm.rank, step), buckets)
        means.append(mean.tobytes())
    return means


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("granularity", ["model", "bucket"])
@pytest.mark.parametrize("method", METHODS)
def test_a_resumed_run_is_the_same_run(method: str, granularity: str, ranks: int) -> None:
    def body(comm: Communicator) -> None:
        cuts = np.random.default_rng(4)  # they differ before and after: the result must not
        reducer = make_reducer(method, granularity)
        run_steps(reducer, comm, 0, cuts)
        saved = pickle.loads(pickle.dumps(reducer.state()))
        at_save = snapshot(reducer)
        expected = run_steps(reducer, comm, STEPS, cuts)

        second = make_reducer(method, granularity)
        second.load_state(saved)
        assert snapshot(second) == at_save
        assert second.step == STEPS
        assert run_steps(second, comm, STEPS, cuts) == expected
        assert snapshot(second) == snapshot(reducer)

    run_ranks(ranks, body)


def used_reducer(layout: Layout = LAYOUT, method: str = "topk", **settings: Any) -> Reducer:
    reducer = Reducer(layout, method, **settings)
    gradient = np.random.default_rng(1).normal(size=layout.size).astype(np.float32)
    run_step(reducer, alone(), gradient, [range(len(layout))])
    return reducer


def test_a_state_is_a_copy() -> None:
    reducer = used_reducer()
    before = snapshot(reducer)
    state = reducer.state()
    assert state.keys() == {"numbers", "parameters", "entries", "texts"}
    assert state["numbers"]["step"] == 1
    assert state["entries"]["owed"]["weight"].shape == (40, 5)
    for array in state["entries"]["owed"].values():
        array[...] = 7
    assert snapshot(reducer) == before
    reducer.load_state(state)
    state["entries"]["owed"]["weight"][:] = 8
    assert (reducer.owed("weight") == 7).all()


def changed(state: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    """A copy with one place replaced; a value of `...` removes it."""
    state = copy.deepcopy(state)
    *outer, last = path.split("/")
    place = state
    for key in outer:
        place = place[key]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return state


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("numbers", ..., "state has no 'numbers'"),
        ("numbers", 3, "numbers is not a dict"),
        ("entries", [], "entries is not a dict"),
        ("numbers/step", ..., "numbers has no 'step'"),
        ("numbers/step", "one", "step is not a number"),
        ("numbers/step", 0.5, "step is 0.5, expected a whole number"),
        ("numbers/step", -1, "step is -1, expected a whole number"),
        ("numbers/carried.threshold", np.nan, r"carried\.threshold is not a number"),
        ("numbers/carried.threshold", -1.0, r"carried\.threshold is -1, expected from 0"),
        ("numbers/other", 1.0, "numbers hold 'other', which this method does not keep"),
        ("parameters/carried.share", {}, r"carried\.share is of 0 parameters.* remembers 4"),
        ("parameters/carried.share/bias", None, r"carried\.share is not a number"),
        ("entries/owed", ..., "entries has no 'owed'"),
        ("entries/owed", 3, "owed is not a dict"),
        ("entries/owed/bias", ..., "owed is of 3 parameters, this model remembers 4"),
        ("entries/other", {}, "entries hold 'other', which this method does not keep"),
        ("entries/owed/bias", [0.0] * 5, "owed of 'bias' is not a contiguous float32 array"),
        ("entries/owed/bias", np.zeros(5), "owed of 'bias' is not a contiguous float32 array"),
        ("entries/owed/bias", np.zeros(6, np.float32), r"shape \(6\), the parameter \(5\)"),
        (
            "entries/owed/weight",
            np.zeros((5, 40), np.float32),
            r"shape \(5, 40\), the parameter \(40, 5\)",
        ),
        (
            "entries/owed/bias",
            np.full(5, np.nan, np.float32),
            "owed of 'bias' holds an infinity, NaN, or a magnitude above",
        ),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(path: str, value: object, words: str) -> None:
    reducer = used_reducer()
    before = snapshot(reducer)
    foreign = changed(Reducer(LAYOUT, "topk").state(), path, value)
    with pytest.raises(ValueError, match=words) as caught:
        reducer.load_state(foreign)
    assert "nothing was changed" in str(caught.value)
    assert snapshot(reducer) == before


OTHERS: dict[str, dict[str, Any]] = {
    "method randk": {"method": "randk"},
    "method dense": {"method": "dense"},
    "granularity": {"granularity": "model"},
    "feedback": {"feedback": "none"},
    "keep_dense": {"keep_dense": "bias"},
    "names": {"layout": Layout([("weight", (40, 5)), ("b", (5,)), ("unused", (0,)), ("s", ())])},
}


@pytest.mark.parametrize("difference", OTHERS)
def test_the_state_of_another_run_is_refused_both_ways(difference: str) -> None:
    reducer, other = used_reducer(), used_reducer(**OTHERS[difference])
    before = snapshot(reducer), snapshot(other)
    for mine, theirs in ((reducer, other), (other, reducer)):
        with pytest.raises(ValueError, match="nothing was changed"):
            mine.load_state(theirs.state())
        with pytest.raises(ValueError, match="load_state: state is not a dict"):
            mine.load_state(None)  # type: ignore[arg-type]
    assert (snapshot(reducer), snapshot(other)) == before


# ---- agreement ----------------------------------------------------------------------------------

SMALL = Layout([("weight", (2, 2))])


def resumed(reducer: Reducer) -> Reducer:
    fresh = Reducer(reducer.layout, reducer.spec["method"])
    fresh.load_state(reducer.state())
    return fresh


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        (lambda: Reducer(SMALL, "topk"), lambda: Reducer(SMALL, "randk"), "method randk"),
        (
            lambda: Reducer(SMALL, "topk", density=0.5),
            lambda: Reducer(SMALL, "topk", density=0.25),
            "density = 0.25",
        ),
        (
            lambda: Reducer(SMALL, "topk"),
            lambda: Reducer(Layout([("weight", (4, 1))]), "topk"),
            "parameter weight ( 4 1 )",
        ),
        (
            lambda: Reducer(SMALL, "topk"),
            lambda: Reducer(Layout([("wight", (2, 2))]), "topk"),
            "parameter wight",
        ),
        (
            lambda: Reducer(SMALL, "topk"),
            lambda: resumed(used_reducer(SMALL)),
            "the first step after settings or a state changed, step 1",
        ),
    ],
)
def test_ranks_that_differ_are_told_how(ours: Any, theirs: Any, words: str) -> None:
    def body(comm: Communicator) -> list[str]:
        messages = []
        reducer = theirs() if comm.rank == 1 else ours()
        for call in (reducer.agree, reducer.begin):
            with pytest.raises(ValueError, match=r"the ranks (do not agree|are at di)") as caught:
                call(comm)
            messages.append(str(caught.value).removeprefix(f"rank {comm.rank}: "))
        return messages

    told = run_ranks(3, body)
    assert told[0] == told[1] == told[2], "everyone hears the same"
    for message in told[0]:
        assert f"rank 1: {words}" in message
        assert f"rank 2: {words}" not in message


def test_a_change_on_one_rank_is_found_in_its_next_step() -> None:
    def body(comm: Communicator) -> None:
        reducer = Reducer(SMALL, "topk", density=0.5)
        run_step(reducer, comm, np.ones(4, np.float32), [[0]])
        reducer.configure(density=0.25 if comm.rank else 0.5)
        with pytest.raises(ValueError, match=r"density = 0\.25"):
            reducer.begin(comm)
        reducer.configure(density=0.25)
        reducer.agree(comm)
        run_step(reducer, comm, np.ones(4, np.float32), [[0]])

    run_ranks(2, body)
