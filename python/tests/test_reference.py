"""The library equals the plain NumPy reading, bit for bit, however the model is cut into buckets.

Gradients are small integers, so that every order of summation is exact.
"""

import functools
import itertools
from typing import Any

import numpy as np
import pytest
import reference
from stepping import Floats, flat_owed, random_buckets, run_step, same_bits
from tiers import each_method_in_one_granularity

import topreduce
from topreduce import _core

SHAPES = [
    ("embed.weight", (13, 8)),
    ("norm.weight", (8,)),
    ("unused", (0, 5)),
    ("scale", ()),
    ("block.weight", (40, 16)),
    ("norm.bias", (8,)),
    ("head.weight", (31, 3)),
]
# More than 2^18 entries: the carried threshold sees a sample of them only.
LARGE = [("embed.weight", (190_000,)), ("norm.weight", (77,)), ("head.weight", (90_001,))]
STEPS = 32
RANKS = [1, 2, 3]  # on 5 in test_many_steps
SOME_RANKS = [1, 3]  # of what hardly depends on them
METHODS = [method["name"] for method in topreduce.methods()]


def integer_gradients(shapes: reference.Shapes, steps: int, ranks: int) -> list[list[Floats]]:
    """gradients[step][rank]: parameters of different scale, many ties, and days without sun."""
    rng = np.random.default_rng([steps, ranks])
    sizes = [reference.size_of(shape) for _, shape in shapes]
    scales = np.repeat(2 ** rng.integers(0, 6, len(sizes)), sizes)
    n = sum(sizes)
    gradients = []
    for step in range(steps):
        factor = 0 if step == 20 else 64 if step == 30 else 1
        drawn = rng.integers(-4, 5, (ranks, n)) * scales * factor
        gradients.append(list(drawn.astype(np.float32)))
    gradients[25 % steps][-1][:] = 0
    return gradients


def check(
    method: str,
    shapes: reference.Shapes,
    gradients: list[list[Floats]],
    loss_scale: float = 1.0,
    of_feedback: dict[str, Any] | None = None,
    of_exchange: dict[str, Any] | None = None,
    **settings: Any,
) -> list[reference.Outcome]:
    """Runs both and compares every step on every rank; values are exact unless named."""
    settings.setdefault("values", "fp32")
    expected = reference.simulate(
        method,
        shapes,
        gradients,
        loss_scale=loss_scale,
        of_feedback=of_feedback,
        of_exchange=of_exchange,
        **settings,
    )
    settings |= (of_feedback or {}) | (of_exchange or {})
    if method == "dense":
        settings.pop("density", None)

    def run(comm: topreduce.Communicator) -> None:
        rng = np.random.default_rng(7)  # the same cuts on all ranks, others in every step
        reducer = topreduce.Reducer(topreduce.Layout(shapes), method, bucket_cap_mb=0, **settings)
        for number, (mine, outcome) in enumerate(zip(gradients, expected, strict=True)):
            where = f"step {number}, rank {comm.rank}"
            buckets = random_buckets(rng, len(shapes))
            assert reducer.density == outcome.density, where
            mean, stats = run_step(reducer, comm, mine[comm.rank], buckets, loss_scale)
            assert same_bits(mean, outcome.mean), f"mean of {where}"
            assert same_bits(flat_owed(reducer), outcome.owed[comm.rank]), f"owed of {where}"
            assert stats.budget == outcome.budget, where
            assert stats.finite == bool(np.isfinite(outcome.mean).all()), where
            if stats.finite:
                assert stats.selected == outcome.selected[comm.rank], where
                assert stats.delivered == outcome.delivered, where

    topreduce.run_ranks(len(gradients[0]), run)
    return expected


@pytest.mark.parametrize("granularity", ["model", "bucket"])
@pytest.mark.parametrize("method", METHODS)
class TestEveryMethod:
    @pytest.mark.parametrize("ranks", RANKS)
    def test_plain(self, method: str, granularity: str, ranks: int) -> None:
        gradients = integer_gradients(SHAPES, STEPS, ranks)
        check(method, SHAPES, gradients, density=0.02, granularity=granularity, seed=5)

    @pytest.mark.parametrize("ranks", SOME_RANKS)
    def test_warmup_ramp_and_keep_dense(self, method: str, granularity: str, ranks: int) -> None:
        outcomes = check(
            method,
            SHAPES,
            integer_gradients(SHAPES, STEPS, ranks),
            density=0.01,
            granularity=granularity,
            warmup_steps=3,
            ramp_steps=24,
            keep_dense="norm.* scale",
            seed=2**40 + 3,
        )
        kept = reference.kept_dense(SHAPES, "norm.* scale")
        assert kept.sum() == 17
        assert not any(owed[kept].any() for outcome in outcomes for owed in outcome.owed)

    @pytest.mark.parametrize("ranks", SOME_RANKS)
    def test_a_step_that_is_not_finite(self, method: str, granularity: str, ranks: int) -> None:
        gradients = integer_gradients(SHAPES, 12, ranks)
        gradients[5][-1][100] = np.inf
        gradients[8][0][0] = np.nan
        outcomes = check(method, SHAPES, gradients, density=0.05, granularity=granularity)
        assert np.isnan(outcomes[5].mean).all()
        assert np.isfinite(outcomes[6].mean).all()


@pytest.mark.parametrize("values", ["bf16", "fp16"])
@each_method_in_one_granularity
def test_rounding_stays_owed(method: str, granularity: str, values: str) -> None:
    gradients = integer_gradients(SHAPES, STEPS, 3)
    gradients[20][1][::7] *= 2.0**12  # beyond the largest of fp16
    check(
        method,
        SHAPES,
        gradients,
        density=0.1,
        granularity=granularity,
        values=values,
        warmup_steps=2,
    )


@pytest.mark.parametrize(
    ("granularity", "values"),
    [  # auto is int4 here
        *zip(itertools.cycle(["model", "bucket"]), sorted(reference.BITS), strict=False),
        ("model", "auto"),
    ],
)
@pytest.mark.parametrize("method", METHODS)
def test_values_that_share_a_scale(method: str, granularity: str, values: str) -> None:
    gradients = integer_gradients(SHAPES, 24, 3)
    check(
        method,
        SHAPES,
        gradients,
        density=0.4,
        granularity=granularity,
        values=values,
        feedback="residual",
        warmup_steps=2,
        keep_dense="scale",
    )


@each_method_in_one_granularity
def test_loss_scale(method: str, granularity: str) -> None:
    gradients = integer_gradients(SHAPES, 12, 3)
    check(method, SHAPES, gradients, loss_scale=1024.0, density=0.05, granularity=granularity)


@each_method_in_one_granularity
def test_without_memory(method: str, granularity: str) -> None:
    gradients = integer_gradients(SHAPES, STEPS, 3)
    outcomes = check(
        method, SHAPES, gradients, density=0.05, granularity=granularity, feedback="none"
    )
    assert not any(owed.any() for outcome in outcomes for owed in outcome.owed)


# Through exact steps, new regions, an all-zero step, a jump of scale, and other buckets each time.
@each_method_in_one_granularity
def test_many_steps(method: str, granularity: str) -> None:
    gradients = integer_gradients(SHAPES, 200, 5)
    check(method, SHAPES, gradients, density=0.05, granularity=granularity, seed=3)


@pytest.mark.parametrize("granularity", ["model", "bucket"])
@pytest.mark.parametrize(
    ("select", "settings"),
    [
        ("carried", {"gain": 0.2}),
        ("reused", {"period": 7}),
        ("gaussiank", {"sides": "one", "evaluations": 5}),
        ("gaussiank", {"finish": "exact"}),
        ("dgc", {"sample": 0.2, "adaptations": 2}),
        ("redsync", {"search": "trimmed"}),
        ("redsync", {"finish": "exact"}),
    ],
    ids=str,
)
def test_many_steps_of_every_select(
    select: str, settings: dict[str, Any], granularity: str
) -> None:
    gradients = integer_gradients(SHAPES, 100, 5)
    check(
        "topk", SHAPES, gradients, density=0.05, granularity=granularity, select=select, **settings
    )


# Products with 0.9 are rounded, so this also shows that both round in the same places.
@pytest.mark.parametrize(
    "of_feedback", [{}, {"momentum": 0.5, "form": "nesterov", "masking": "off"}], ids=str
)
@pytest.mark.parametrize("method", METHODS)
def test_momentum(method: str, of_feedback: dict[str, Any]) -> None:
    gradients = integer_gradients(SHAPES, 40, 3)
    gradients[12][1][7] = np.inf
    check(
        method,
        SHAPES,
        gradients,
        loss_scale=16.0,
        of_feedback=of_feedback,
        feedback="momentum",
        density=0.05,
        warmup_steps=2,
        ramp_steps=6,
        keep_dense="scale",
    )


@pytest.mark.parametrize("values", ["fp32", "bf16"])
@pytest.mark.parametrize("granularity", ["model", "bucket"])
@pytest.mark.parametrize("global_ratio", [0.3, 1.0, 4.0])
def test_ok_topk_settings(global_ratio: float, granularity: str, values: str) -> None:
    check(
        "ok_topk",
        SHAPES,
        integer_gradients(SHAPES, STEPS, 5),
        density=0.1,
        granularity=granularity,
        values=values,
        global_ratio=global_ratio,
        period=5,
        tau=3,
        high=1.1,
        guard=1.2,
        global_low=0.9,
    )


@pytest.mark.parametrize(
    ("granularity", "of_feedback"), [("bucket", {}), ("model", {"eta": 0.75})], ids=str
)
@pytest.mark.parametrize("method", METHODS)
def test_estimates(method: str, of_feedback: dict[str, float], granularity: str) -> None:
    gradients = integer_gradients(SHAPES, 30, 3)
    gradients[12][1][7] = np.inf
    outcomes = check(
        method,
        SHAPES,
        gradients,
        loss_scale=16.0,
        of_feedback=of_feedback,
        feedback="ef21m" if of_feedback else "ef21",
        density=0.05,
        granularity=granularity,
        warmup_steps=2,
        ramp_steps=6,
        keep_dense="scale",
    )
    assert not any(owed.any() for outcome in outcomes for owed in outcome.owed)


@pytest.mark.parametrize(
    ("granularity", "of_exchange"),
    [
        ("bucket", {"sketch": 1}),
        ("bucket", {"sketch": 5, "stream": "signs", "random": 0.3}),
        ("bucket", {"width": 12, "random": 1.0}),
        ("model", {"ranked": "model"}),
        ("model", {"ranked": "model", "width": 20, "sketch": 2, "random": 0.2}),
    ],
)
@pytest.mark.parametrize("feedback", ["residual", "ef21", "ef21m"])
def test_arc_topk(feedback: str, granularity: str, of_exchange: dict[str, Any]) -> None:
    shapes = [*SHAPES, ("conv.weight", (6, 5, 3, 3))]
    steps = 100 if feedback == "residual" else 40
    check(
        "arc_topk",
        shapes,
        integer_gradients(shapes, steps, 5),
        of_exchange=of_exchange,
        feedback=feedback,
        density=0.15,
        granularity=granularity,
        seed=9,
    )


@pytest.mark.parametrize("gain", [0.0, 0.5])
def test_carried_in_one_exchange(gain: float) -> None:
    gradients = integer_gradients(SHAPES, STEPS, 2)
    check("topk", SHAPES, gradients, density=0.05, granularity="model", select="carried", gain=gain)


@functools.cache  # nobody changes them
def large_gradients(n: int) -> list[list[Floats]]:
    rng = np.random.default_rng(2)
    gradients = [list(np.rint(rng.normal(0, 500, (2, n))).astype(np.float32)) for _ in range(7)]
    gradients[5][0] *= 64
    return gradients


@each_method_in_one_granularity
def test_a_large_model(method: str, granularity: str) -> None:
    n = sum(reference.size_of(shape) for _, shape in LARGE)
    assert n > 2**18
    check(method, LARGE, large_gradients(n), density=0.003, granularity=granularity, seed=1)


# At density 0.5 the last one has a budget of 2.5 entries, which are 3.
@pytest.mark.parametrize(
    "shapes",
    [[("empty", (0,))], [("one", ())], [("a", (1,)), ("b", (1,))], [("a", (2,)), ("b", (3,))]],
)
@each_method_in_one_granularity
def test_tiny_models(method: str, granularity: str, shapes: reference.Shapes) -> None:
    gradients = integer_gradients(shapes, 30, 2)
    check(method, shapes, gradients, density=0.5, granularity=granularity)


def test_every_stage_has_a_reading() -> None:
    catalog = _core.catalog()
    assert {each["name"] for each in catalog["feedback"]} == reference.FEEDBACK.keys()
    assert {each["name"] for each in catalog["select"]} == reference.SELECT.keys()
    assert {each["name"] for each in catalog["exchange"]} == reference.EXCHANGE.keys()
    assert {each["name"] for each in catalog["methods"]} == reference.METHODS.keys()
    values = next(each for each in catalog["settings"] if each["name"] == "values")
    assert set(values["choices"].split("|")) == reference.VALUES | {"auto"}


# Known answers of Random123 (Salmon et al. 2011).
@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, [0] * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            [0xFFFFFFFF] * 4,
            [0xFFFFFFFF] * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox(counter: list[int], key: list[int], expected: tuple[int, ...]) -> None:
    assert reference.philox(counter, key) == expected


def test_topk_by_hand() -> None:
    values = np.array([3, -5, 0, 5, -3, 1, 5, 0], np.float32)
    assert reference.strongest(values, 2).tolist() == [1, 3]
    assert reference.strongest(values, 4).tolist() == [0, 1, 3, 6]
    assert reference.strongest(values, 8).tolist() == [0, 1, 3, 4, 5, 6]
    assert reference.strongest(values, 8, 3.5).tolist() == [1, 3, 6]
