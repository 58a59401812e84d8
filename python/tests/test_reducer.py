"""The Python face of a step: in place or not at all, and every mistake has its words."""

import json
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from stepping import Floats, run_step, snapshot
from transport import alone

import topreduce
from topreduce import Communicator, Layout, Reducer, run_ranks
from topreduce._core import Handover

LAYOUT = Layout([("weight", (4, 5)), ("bias", (5,)), ("scale", ())])
SIZE = 26
EVERYTHING = [0, 1, 2]
METHODS = [method["name"] for method in topreduce.methods()]


def gradient(seed: int = 0, size: int = SIZE) -> Floats:
    return np.random.default_rng(seed).normal(size=size).astype(np.float32)


def used_reducer(**settings: Any) -> Reducer:
    """One that owes something."""
    reducer = Reducer(LAYOUT, "topk", density=0.2, **settings)
    run_step(reducer, alone(), gradient(), [EVERYTHING])
    return reducer


# ---- a step -------------------------------------------------------------------------------------


def test_the_mean_is_written_into_the_callers_array() -> None:
    def body(comm: Communicator) -> tuple[int, Floats]:
        reducer = Reducer(LAYOUT, "dense")
        mine = gradient(comm.rank)
        address = mine.ctypes.data
        reducer.begin(comm)
        reducer.add(EVERYTHING, mine)
        reducer.finish()
        return mine.ctypes.data - address, mine

    for moved, mean in run_ranks(2, body):
        assert moved == 0
        assert mean.tolist() == ((gradient(0) + gradient(1)) / np.float32(2)).tolist()


def test_average_is_a_whole_step() -> None:
    def body(comm: Communicator) -> tuple[Floats, Floats, bytes]:
        mine, same = gradient(comm.rank), gradient(comm.rank)
        reducer, other = (Reducer(LAYOUT, "topk", density=0.2) for _ in range(2))
        stats = reducer.average(comm, mine)
        same, _ = run_step(other, comm, same, [EVERYTHING])
        assert stats.step == 0 and stats.bytes_sent == other.stats.bytes_sent > 0
        assert snapshot(reducer) == snapshot(other)
        with pytest.raises(ValueError, match="average: the gradient has 25 entries"):
            Reducer(LAYOUT, "topk").average(alone(), gradient(size=25))
        return mine, same, mine.tobytes()

    results = run_ranks(3, body)
    for mine, same, _ in results:
        assert mine.tolist() == same.tolist()
    assert len({bits for *_, bits in results}) == 1


def test_the_cost_of_a_step_is_readable() -> None:
    stats = used_reducer().stats
    words = repr(stats)
    assert words.startswith("StepStats(step=0, entries=26, density=0.2, budget=5, ")
    for name, value in stats.as_dict().items():
        assert f"{name}={value!r}" in words


def test_buckets_may_be_views_of_one_buffer() -> None:
    buffer = gradient()
    whole = buffer.copy()
    reducer = Reducer(LAYOUT, "topk", density=1)
    reducer.begin(alone())
    reducer.add([1, 2], buffer[20:])
    reducer.add([0], buffer[:20])
    assert buffer.tolist() == whole.tolist(), "nothing is written before finish"
    reducer.finish()
    assert buffer.tolist() == whole.tolist(), "of one rank, at density 1"


def test_gradients_come_in_any_grouping_and_may_move() -> None:
    whole = gradient()
    expected, stats = run_step(Reducer(LAYOUT, "topk", density=0.2), alone(), whole, [EVERYTHING])
    reducer = Reducer(LAYOUT, "topk", density=0.2, bucket_cap_mb=0)
    assert reducer.buckets == [[2], [1], [0]]
    first, last = [part.copy() for part in np.split(whole, [20])]
    bias, scale, moved = last[:5], last[5:].copy(), last.copy()
    gone = weakref.ref(scale)
    reducer.begin(alone())
    reducer.add_many([(2, scale, 1e30), (0, first, 1e30)])
    reducer.add([1], bias)
    reducer.relocate([1, 2], moved)
    del scale
    assert gone() is None, "nobody looks there any more"
    assert reducer.finish().selected == stats.selected
    assert np.concatenate([first, moved]).tolist() == expected.tolist()
    assert bias.tolist() == last[:5].tolist()
    assert reducer.buckets == [[2], [1], [0]]
    reducer.begin(alone())
    assert reducer.buckets == [[2], [0], [1]], "as they came"


@pytest.mark.parametrize(
    ("gradients", "words"),
    [
        ([(0, gradient(size=20))], "triples"),
        ([(0.5, gradient(size=20), 1.0)], "triples"),
        ([(0, gradient(size=19), 1.0)], "has 19 entries, its parameters have 20"),
        ([(0, gradient(size=20).astype(np.float64), 1.0)], "must be float32"),
        ([(0, gradient(size=20), 0.0)], "most must be a positive number"),
        ([(0, gradient(size=20), 1.0)] * 2, "'weight' was added twice"),
    ],
)
def test_wrong_gradients_in_add_many(gradients: Any, words: str) -> None:
    reducer = used_reducer()
    before = snapshot(reducer)
    reducer.begin(alone())
    with pytest.raises(ValueError, match=words):
        reducer.add_many(gradients)
    with pytest.raises(ValueError, match="no step is open"):
        reducer.finish()
    assert snapshot(reducer) == before


def test_another_thread_brings_gradients() -> None:
    """While the worker attends, and afterwards; what kept their memory is let go of at the end."""

    def body(comm: Communicator) -> tuple[Floats, Floats, int]:
        whole = gradient(comm.rank)
        expected, _ = run_step(Reducer(LAYOUT, "topk", density=0.2), comm, whole, [EVERYTHING])
        reducer = Reducer(LAYOUT, "topk", density=0.2, bucket_cap_mb=0)
        first, last = [part.copy() for part in np.split(whole, [20])]
        mean = np.zeros(6, np.float32)
        handover, kept = Handover(), [Kept()]
        gone = weakref.ref(kept[0])

        def bring() -> None:
            handover.put([0], [first.ctypes.data], [20], False, kept[0])
            places = [last.ctypes.data, last[5:].ctypes.data]
            handover.put([1, 2], places, [5, 1], True, kept[0])

        reducer.begin(comm)
        reducer.take_from(handover)
        reducer.attend()
        computing = threading.Thread(target=bring)
        computing.start()
        while handover.empty:
            reducer.attend()
        computing.join()
        kept.clear()
        reducer.deliver_to([1, 2], mean)
        assert handover.empty
        reducer.finish()
        assert gone() is not None
        handover.close()
        handover.put([0], [0], [20], False, first)
        assert gone() is None and handover.empty
        return np.concatenate([first, mean]), expected, comm.rank

    for mean, expected, _ in run_ranks(2, body):
        assert mean.tolist() == expected.tolist()


class Kept:
    """Anything that can be referred to weakly."""


@pytest.mark.parametrize(
    ("parameters", "size", "words"),
    [
        ([0, 0], 20, "'weight' was added twice"),
        ([3], 20, "there is no parameter 3"),
        ([0], 19, "has 19 entries, its parameters have 20"),
    ],
)
@pytest.mark.parametrize("call", [Reducer.attend, Reducer.finish])
def test_wrong_gradients_that_are_brought(
    parameters: list[int], size: int, words: str, call: Callable[[Reducer], object]
) -> None:
    reducer = used_reducer()
    before, array = snapshot(reducer), gradient(size=20)
    handover = Handover()
    reducer.begin(alone())
    reducer.take_from(handover)
    count = len(parameters)
    handover.put(parameters, [array.ctypes.data] * count, [size] * count, False, array)
    with pytest.raises(ValueError, match=words):
        call(reducer)
    with pytest.raises(ValueError, match="no step is open"):
        reducer.finish()
    assert snapshot(reducer) == before
    with pytest.raises(ValueError, match="one address and one size for each parameter"):
        handover.put([0], [], [], False, array)


def test_wrong_moves() -> None:
    for parameters, array, words in (
        ([1], gradient(size=5), "relocate: parameter 'bias' was not added"),
        ([0], gradient(size=5), "relocate: the gradient has 5 entries, its parameters have 20"),
        ([0], np.zeros((4, 5), np.float32), "relocate: the gradient must have one dimension"),
        (None, gradient(size=20), "relocate: parameters must be a list of numbers"),
    ):
        reducer = used_reducer()
        before = snapshot(reducer)
        reducer.begin(alone())
        reducer.add([0], gradient(size=20))
        with pytest.raises(ValueError, match=words):
            reducer.relocate(parameters, array)  # type: ignore[arg-type]
        assert snapshot(reducer) == before


def test_nothing_is_held_once_a_step_is_over() -> None:
    def finish(reducer: Reducer) -> None:
        reducer.finish()

    def abandon(reducer: Reducer) -> None:
        reducer.abandon()

    def fail_in_add(reducer: Reducer) -> None:
        with pytest.raises(ValueError, match="twice"):
            reducer.add([0], gradient(size=20))

    def fail_in_finish(reducer: Reducer) -> None:
        with pytest.raises(ValueError, match="missing"):
            reducer.finish()

    for end, parameters in (
        (finish, EVERYTHING),
        (abandon, EVERYTHING),
        (fail_in_add, EVERYTHING),
        (fail_in_finish, [0]),
    ):
        reducer, comm = Reducer(LAYOUT, "topk"), alone()
        mine = gradient(size=SIZE if end is not fail_in_finish else 20)
        held = weakref.ref(mine), weakref.ref(comm)
        reducer.begin(comm)
        reducer.add(parameters, mine)
        del mine, comm
        assert all(thing() is not None for thing in held), "an open step needs them"
        end(reducer)
        assert all(thing() is None for thing in held), end.__name__


def test_owed_is_a_copy_in_the_parameters_shape() -> None:
    reducer = used_reducer()
    owed = reducer.owed("weight")
    assert (owed.shape, owed.dtype) == ((4, 5), np.dtype(np.float32))
    assert owed.any()
    before = snapshot(reducer)
    owed[:] = 7
    assert snapshot(reducer) == before
    assert reducer.owed("scale").shape == ()
    with pytest.raises(ValueError, match="no parameter is called 'wight'"):
        reducer.owed("wight")


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("granularity", ["model", "bucket"])
def test_a_step_that_is_not_finite_changes_nothing(granularity: str, bad: float) -> None:
    reducer = used_reducer(granularity=granularity)
    before = snapshot(reducer)
    spoiled = gradient(1)
    spoiled[11] = bad
    mean, stats = run_step(reducer, alone(), spoiled, [[0], [1, 2]])
    assert np.isnan(mean).all()
    assert not stats.finite
    assert snapshot(reducer) == before


def test_abandon_leaves_everything_as_it_was() -> None:
    reducer = used_reducer()
    before = snapshot(reducer)
    mine = gradient(1)
    reducer.begin(alone())
    reducer.add(EVERYTHING, mine)
    reducer.abandon()
    assert mine.tolist() == gradient(1).tolist()
    assert snapshot(reducer) == before
    run_step(reducer, alone(), mine, [EVERYTHING])


def test_bypass_and_resume() -> None:
    reducer = used_reducer()
    owed = reducer.owed("weight")
    reducer.bypass()
    assert (reducer.bypassed, reducer.density) == (True, 1)
    mean, _ = run_step(reducer, alone(), gradient(1), [EVERYTHING])
    assert mean.tolist() == gradient(1).tolist()
    assert reducer.owed("weight").tolist() == owed.tolist()
    reducer.compress()
    assert (reducer.bypassed, reducer.density) == (False, 0.2)


def test_configure_changes_settings_and_keeps_what_is_owed() -> None:
    reducer = used_reducer()
    owed = reducer.owed("weight")
    reducer.configure(density=0.5, granularity="model")
    assert reducer.density == 0.5
    assert reducer.spec["select"] == "topk"
    assert reducer.owed("weight").tolist() == owed.tolist()
    for wrong in ({"density": 2}, {"densty": 0.1}, {"feedback": "none"}, {"overhead": 0.1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            reducer.configure(**wrong)
    assert reducer.density == 0.5
    reducer.configure(method="topk_dsa:density=0.25")
    assert (reducer.spec["method"], reducer.density) == ("topk_dsa", 0.25)


# ---- mistakes -----------------------------------------------------------------------------------


def read_only(array: Floats) -> Floats:
    array.flags.writeable = False
    return array


WRONG_ARRAYS: dict[str, tuple[Callable[[Floats], Any], str]] = {
    "float64": (lambda array: array.astype(np.float64), "float32"),
    "float16": (lambda array: array.astype(np.float16), "float32"),
    "integers": (lambda array: array.astype(np.int32), "float32"),
    "foreign byte order": (lambda array: array.astype(">f4"), "float32"),
    "two dimensions": (lambda array: array.reshape(2, 13), "one dimension, not 2"),
    "no dimension": (lambda array: array[0:1].reshape(()), "one dimension, not 0"),
    "strided": (lambda array: np.repeat(array, 2)[::2], "contiguous"),
    "reversed": (lambda array: array[::-1], "contiguous"),
    "read-only": (read_only, "read-only"),
    "too short": (lambda array: array[:-1], "25 entries, its parameters have 26"),
    "too long": (lambda array: np.append(array, array[:1]), "27 entries, its parameters have 26"),
    "a list": (lambda array: array.tolist(), "NumPy array or CPU tensor"),
    "nothing": (lambda array: None, "NumPy array or CPU tensor"),
}


@pytest.mark.parametrize("granularity", ["model", "bucket"])
@pytest.mark.parametrize("kind", WRONG_ARRAYS)
def test_a_wrong_array_is_refused_not_copied(kind: str, granularity: str) -> None:
    make, words = WRONG_ARRAYS[kind]
    reducer = used_reducer(granularity=granularity)
    before = snapshot(reducer)
    wrong = make(gradient(1))
    content = np.array(wrong).tolist()
    reducer.begin(alone())
    with pytest.raises(ValueError, match=f"add: .*{words}"):
        reducer.add(EVERYTHING, wrong)
    assert np.array(wrong).tolist() == content
    dropped = rf"no step is open: step 1 was dropped \(add: .*{words}.*\); begin it again"
    with pytest.raises(ValueError, match=f"finish: {dropped}"):
        reducer.finish()
    with pytest.raises(ValueError, match=f"add: {dropped}"):
        reducer.add(EVERYTHING, gradient(1))
    with pytest.raises(ValueError, match=f"average: .*{words}"):
        reducer.average(alone(), wrong)
    assert snapshot(reducer) == before
    run_step(reducer, alone(), gradient(1), [EVERYTHING])


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ([0, 1, 1], "'bias' was added twice in step 1"),
        ([0, 1, 3], "no parameter 3; the layout has 3"),
        ([0, 1, -1], "list of numbers"),
        ([0, 1, 0.5], "list of numbers"),
        ("012", "list of numbers"),
        (None, "list of numbers"),
    ],
)
def test_wrong_parameters(parameters: Any, words: str) -> None:
    reducer = used_reducer()
    before = snapshot(reducer)
    reducer.begin(alone())
    with pytest.raises(ValueError, match=words):
        reducer.add(parameters, gradient())
    assert snapshot(reducer) == before


def test_a_bucket_twice() -> None:
    reducer = used_reducer()
    before = snapshot(reducer)
    reducer.begin(alone())
    reducer.add([1, 2], gradient(size=6))
    with pytest.raises(ValueError, match="'scale' was added twice in step 1"):
        reducer.add([0, 2], gradient(size=21))
    assert snapshot(reducer) == before


def test_a_bucket_missing() -> None:
    reducer = used_reducer()
    before = snapshot(reducer)
    mine = gradient(size=6)
    reducer.begin(alone())
    reducer.add([1, 2], mine)
    with pytest.raises(ValueError, match="missing 1 of 3 parameters: weight"):
        reducer.finish()
    assert mine.tolist() == gradient(size=6).tolist()
    assert snapshot(reducer) == before


def test_calls_in_the_wrong_order() -> None:
    reducer = used_reducer()
    with pytest.raises(ValueError, match="add: no step is open; call begin first"):
        reducer.add(EVERYTHING, gradient())
    with pytest.raises(ValueError, match="finish: no step is open; call begin first"):
        reducer.finish()
    reducer.begin(alone())
    for call in (reducer.state, reducer.configure, reducer.bypass, lambda: reducer.begin(alone())):
        with pytest.raises(ValueError, match="open"):
            call()
    reducer.add(EVERYTHING, gradient())
    assert reducer.finish().step == 1, "none of them closed the step"


@pytest.mark.parametrize("granularity", ["bucket", "model"])
def test_zeros_are_not_chosen_where_subnormals_are_flushed(granularity: str) -> None:
    """torch.set_flush_denormal(True): the smallest threshold is then equal to zero."""
    embedding = Layout([("embedding", (100, 48))])
    gradient = np.zeros(4800, np.float32)
    gradient[480:528] = 1.0
    torch.set_flush_denormal(True)
    try:
        reducer = Reducer(embedding, "topk", density=0.5, granularity=granularity)
        reducer.begin(alone())
        reducer.add([0], gradient)
        assert reducer.finish().selected == 48
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("scale", [-1.0, np.inf, np.nan])
def test_a_wrong_loss_scale(scale: float) -> None:
    with pytest.raises(ValueError, match="loss_scale must be a positive number"):
        Reducer(LAYOUT, "topk").begin(alone(), loss_scale=scale)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"densty": 0.1}, "'densty'; did you mean 'density'"),
        ({"density": 0}, r"density=0 must be a number in \(0, 1\]"),
        ({"density": 1.5}, r"density=1.5 must be a number in \(0, 1\]"),
        ({"density": "much"}, "density=much must be a number"),
        ({"density": "0.1%"}, "density=0.1% must be a share, not a percentage: write 0.001$"),
        ({"density": "150 %"}, r"density=150 % must be a number in \(0, 1\]"),
        (
            {"density": 0.1, "max_density": 0.2},
            "max_density: for density=auto only, and density=0.1",
        ),
        ({"seed": "1%"}, "seed=1% must be a whole number"),
        ({"density": np.nan}, "density=nan must be a number"),
        ({"granularity": "layer"}, "granularity=layer must be one of model"),
        ({"values": "int3"}, "values=int3 must be one of auto|fp32"),
        ({"seed": -1}, "seed=-1 must be a whole number"),
        ({"warmup_steps": 1.5}, "warmup_steps=1.5 must be a whole number"),
        ({"keep_dense": "norm*"}, "no parameter is called 'norm\\*'; write names, or patterns in"),
        ({"keep_dense": ["weight", "ias"]}, r"'ias'; did you mean '\*ias\*'\? It fits 'bias'$"),
        ({"keep_dense": r"^.*i\w+$"}, r"did you mean '\*i\*'\? It fits 'weight', 'bias'$"),
        ({"keep_dense": "module.bias"}, r"'module.bias'; did you mean 'bias'\?"),
        ({"keep_dense": ".*"}, r"'\.\*'; write names"),
        ({"select": "carryed"}, "unknown select 'carryed'; did you mean 'carried'"),
        ({"select": "carried:gain=2"}, r"gain=2 must be a number in \[0, 1\]"),
        ({"select": "carried:strength=1"}, "'strength'.* known: gain"),
        ({"select": "carried:gain"}, "name=value"),
        ({"select": "topk"}, "needs granularity=model"),
        ({"feedback": "residuum"}, "unknown feedback 'residuum'; did you mean 'residual'"),
        ({"exchange": "randk", "select": "topk"}, "decides itself what is sent"),
    ],
)
def test_wrong_settings(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Reducer(LAYOUT, "topk", **settings)


def test_wrong_methods() -> None:
    with pytest.raises(ValueError, match="unknown method 'topkk'; did you mean 'topk'"):
        Reducer(LAYOUT, "topkk")
    with pytest.raises(ValueError, match="must start with a name"):
        Reducer(LAYOUT, ":density=0.1")
    with pytest.raises(ValueError, match=r"sends everything; leave out density=0\.1"):
        Reducer(LAYOUT, "dense", density=0.1)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: Reducer(LAYOUT, "topk", 0.01),
            "Reducer: write settings by name, as in density=0.01, not 0.01$",
        ),
        (lambda: Reducer(LAYOUT, 0.01), "method must be a name such as 'topk', not 0.01$"),
        (lambda: Reducer(LAYOUT), "method must be a name such as 'topk', not None$"),
        (lambda: Reducer(LAYOUT, density=0.1), "method must be a name .* not None$"),
        (
            lambda: Reducer([("a", (2,))], "topk"),
            r"must be a topreduce.Layout, not \[\('a', \(2,\)\)\]$",
        ),
        (lambda: Reducer(None, "topk"), "Reducer: layout must be a topreduce.Layout, not None$"),
        (
            lambda: Reducer(torch.nn.Linear(9, 9), "topk"),
            "must be a topreduce.Layout, not .*Linear",
        ),
        (
            lambda: Layout(["weight"]),
            r"Layout: give .* \[\('weight', \(4, 5\)\)\], not \['weight'\]$",
        ),
        (
            lambda: Layout({"weight": (4, 5)}),
            r"Layout: give a list of names and shapes, .*, not \{",
        ),
        (lambda: Layout([("weight", 20)]), "Layout: give a list of names and shapes, "),
        (lambda: Layout(None), "Layout: give a list of names and shapes, .*, not None$"),
        (lambda: used_reducer().begin(None), "begin: comm must be a topreduce.Communicator, not N"),
        (lambda: used_reducer().average(3, gradient()), "average: comm must be .*, not 3$"),
        (lambda: used_reducer().agree("gloo"), "agree: comm must be .*, not 'gloo'$"),
        (lambda: used_reducer().configure("topk"), "configure: write settings by name, .*'topk'$"),
        (lambda: used_reducer().configure(method=3), "method must be a name .*, not 3$"),
    ],
)
def test_arguments_of_a_wrong_type(call: Callable[[], object], words: str) -> None:
    with pytest.raises(TypeError, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_a_setting_that_is_given_twice() -> None:
    twice = "density is given twice: in 'topk:density=0.1', and as density=0.2"
    with pytest.raises(ValueError, match=twice):
        Reducer(LAYOUT, "topk:density=0.1", density=0.2)
    with pytest.raises(ValueError, match=twice):
        used_reducer().configure(method="topk:density=0.1", density=0.2)


def test_reducer_and_layout_show_what_they_are() -> None:
    assert repr(LAYOUT) == "<topreduce.Layout: 3 parameters, 26 entries>"
    fresh = Reducer(LAYOUT, "topk", density=0.2, warmup_steps=1)
    words = "<topreduce.Reducer: topk, next step sends {} ({}), 26 entries, step {}>"
    assert repr(fresh) == words.format("int4", "warm-up: 0.2 from step 1", 0)
    assert repr(used_reducer()) == words.format("0.2", "as set", 1)
    ramp = Reducer(LAYOUT, "topk", density=0.2, ramp_steps=3)
    assert ramp.reason == "ramp: 0.2 from step 3"
    assert Reducer(LAYOUT, "dense", warmup_steps=3).reason == "as set"


def test_text_that_is_not_utf_8_is_refused() -> None:
    for wrong in ("\ud800", [0.1, "\ud800"]):
        with pytest.raises(ValueError, match="surrogates not allowed"):
            Reducer(LAYOUT, "topk", density=wrong)
        with pytest.raises(ValueError, match="surrogates not allowed"):
            used_reducer().configure(keep_dense=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="surrogates not allowed"):
        Reducer(LAYOUT, "\ud800")


def test_what_cannot_be_shown_is_named_by_its_type() -> None:
    class Shy:
        def __repr__(self) -> str:
            raise RuntimeError

    with pytest.raises(TypeError, match=r"must be a topreduce.Layout, not .*Shy"):
        Reducer(Shy(), "topk")  # type: ignore[arg-type]


def test_a_spec_makes_the_reducer_again() -> None:
    spec = dict(Reducer(LAYOUT, "topk", density=0.2).spec)
    del spec["threads"]  # each rank's own affair
    assert Reducer(LAYOUT, spec.pop("method"), **spec).spec["density"] == "0.2"  # type: ignore[arg-type]


def test_exchanges_go_on_between_gradients() -> None:
    def body(comm: Communicator) -> tuple[Floats, Floats]:
        mine, other = gradient(comm.rank), gradient(comm.rank)
        reducer = Reducer(LAYOUT, "topk", density=0.2, bucket_cap_mb=0)
        assert not reducer.progress()  # no step is open
        reducer.begin(comm)
        for number, part in enumerate(np.split(mine, [20, 25])):
            reducer.add([number], part)
            while reducer.progress():
                pass
        reducer.finish()
        whole, _ = run_step(Reducer(LAYOUT, "topk", density=0.2), comm, other, [EVERYTHING])
        return mine, whole

    for in_parts, whole in run_ranks(2, body):
        assert in_parts.tolist() == whole.tolist()


def test_settings_in_a_spec_and_by_name_are_the_same() -> None:
    by_name = Reducer(LAYOUT, "topk", density=0.1, select="carried:gain=0.2", seed=None)
    in_a_spec = Reducer(LAYOUT, "topk:density=0.1,select=(carried:gain=0.2)")
    assert by_name.spec == in_a_spec.spec
    assert by_name.spec["select"] == "carried:gain=0.2"
    assert by_name.spec["method"] == "topk"
    for same in (" 0.1\n", "0.1", [0.1], ["0.1"]):
        assert Reducer(LAYOUT, "topk", density=same).reason == "as set"
    patterns = (["we*", "scale"], ("we*", "scale"), "we* scale")
    assert len({Reducer(LAYOUT, "topk", keep_dense=p).spec["keep_dense"] for p in patterns}) == 1


@pytest.mark.parametrize("method", METHODS)
def test_the_catalog_names_every_setting_and_its_default(method: str) -> None:
    listed = next(item for item in topreduce.methods() if item["name"] == method)
    spec = Reducer(LAYOUT, method).spec
    common = {each["name"]: each["default"] for each in listed["settings"] if "stage" not in each}
    assert spec.keys() - {"method"} == common.keys()
    for name, value in spec.items() - {("density", "1")}:
        if common.get(name):
            assert value == common[name]


# ---- the layout ---------------------------------------------------------------------------------


def test_layout() -> None:
    assert (len(LAYOUT), LAYOUT.size) == (3, SIZE)
    assert LAYOUT.names == ["weight", "bias", "scale"]
    assert LAYOUT.sizes == [20, 5, 1]
    assert LAYOUT.shapes == [[4, 5], [5], []]
    with pytest.raises(ValueError, match="two parameters are called 'weight'"):
        Layout([("weight", (1,)), ("weight", (2,))])
    with pytest.raises(ValueError, match="'weight' is too large"):
        Layout([("weight", (2**40, 2**40))])


# ---- what a step cost ---------------------------------------------------------------------------

FIELDS: dict[str, type] = {
    "step": int,
    "entries": int,
    "density": float,
    "budget": int,
    "selected": int,
    "delivered": int,
    "bytes_sent": int,
    "bytes_received": int,
    "bytes_inside": int,
    "messages_inside": int,
    "rounds": int,
    "messages": int,
    "kept_energy": float,
    "owed_norm": float,
    "finite": bool,
    "seconds_exchanging": float,
    "seconds_exposed": float,
    "seconds_computed": float,
    "seconds_waited": float,
    "seconds": dict,
}


def test_stats_are_plain_values() -> None:
    reducer = used_reducer()
    stats = reducer.stats
    as_dict = stats.as_dict()
    assert {name: type(value) for name, value in as_dict.items()} == FIELDS
    assert all(getattr(stats, name) == value for name, value in as_dict.items())
    assert json.loads(json.dumps(as_dict)) == as_dict
    assert [*stats.seconds] == ["look", "choose", "pack", "network", "unpack", "commit"]
    with pytest.raises(AttributeError):
        stats.step = 3  # type: ignore[misc]

    run_step(reducer, alone(), gradient(1), [EVERYTHING])
    assert (stats.step, reducer.stats.step) == (0, 1), "they are of the step they came from"
    del reducer
    assert stats.as_dict() == as_dict


def test_stats_of_a_step() -> None:
    def body(comm: Communicator) -> tuple[dict[str, Any], float]:
        reducer = Reducer(LAYOUT, "topk", density=0.2, granularity="model", keep_dense="scale")
        _, stats = run_step(reducer, comm, gradient(comm.rank), [EVERYTHING])
        owed = [reducer.owed(name).ravel() for name in LAYOUT.names]
        return stats.as_dict(), float(np.linalg.norm(np.concatenate(owed)))

    for rank, (stats, owed_norm) in enumerate(run_ranks(2, body)):
        assert (stats["step"], stats["entries"], stats["budget"]) == (0, SIZE, 5 + 1)
        assert stats["selected"] == stats["budget"]
        assert stats["budget"] <= stats["delivered"] <= 2 * 5 + 1
        assert stats["bytes_sent"] > 0
        assert stats["rounds"] == 4, "one to gather, two for what is kept dense, one to vote"
        assert stats["owed_norm"] == pytest.approx(owed_norm, rel=1e-4)
        energy = float((gradient(rank) ** 2).sum())
        assert stats["kept_energy"] == pytest.approx(1 - owed_norm**2 / energy, rel=1e-4)


# ---- gradients near what numbers can hold ------------------------------------------------------


def test_large_gradients_do_not_end_a_run() -> None:
    """What is remembered of them must not come near what sums can hold: it would stay there."""

    def body(comm: Communicator) -> list[bool]:
        reducer = Reducer(Layout([("a", [64, 8])]), "dgc", density=0.05)
        finite = []
        for step in range(40):
            mine = np.random.default_rng([comm.rank, step]).normal(size=512).astype(np.float32)
            mine *= np.float32(1e29 if step < 3 else 1)
            reducer.begin(comm)
            reducer.add([0], mine)
            finite.append(reducer.finish().finite)
        return finite

    assert run_ranks(2, body)[0] == [False] * 3 + [True] * 37


def test_debts_that_fp16_cannot_hold_do_not_end_a_run() -> None:
    """Without a loss scale means are cut to 65504, and the rest stays owed."""

    def body(comm: Communicator) -> tuple[float, Any, Any]:
        reducer = Reducer(Layout([("a", [64, 64])]), "topk", density=0.01, values="fp32")
        largest, applied, brought = [], np.zeros(4096), np.zeros(4096)
        for step in range(150):
            rng = np.random.default_rng([comm.rank, step])
            mine = (2000 * rng.normal(1, 1, 4096)).astype(np.float16).astype(np.float32)
            brought += mine
            reducer.begin(comm)
            reducer.add([0], mine, 65504.0)
            assert reducer.finish().finite, step
            largest.append(float(np.abs(mine).max()))
            applied += mine
        owed = np.asarray(reducer.state()["entries"]["owed"]["a"], np.float64).ravel()
        return max(largest), brought - owed, applied

    one, other = run_ranks(2, body)
    assert one[0] == 65504.0  # it came to that
    # What both brought is applied or owed: the mean times the ranks.
    assert np.allclose(one[1] + other[1], 2 * one[2], rtol=1e-4, atol=1)
