"""A step of all ranks, and which stages make a method."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reference.arc_topk import arc_rows, arc_topk
from reference.basics import (
    Delivery,
    Floats,
    Places,
    Shapes,
    Step,
    density_at,
    entries_for,
    size_of,
)
from reference.exchange import bits_sent, dense, gather, gtopk, randk, topk_dsa
from reference.feedback import EF21, EF21M, Momentum, NoMemory, Residual
from reference.ok_topk import OkTopk
from reference.select import Carried, Foresight, GaussianK, RedSync, Reused, SampledTopK, TopK
from reference.wire import without_scales

FEEDBACK: dict[str, Callable[..., NoMemory]] = {
    "none": NoMemory,
    "residual": Residual,
    "ef21": EF21,
    "ef21m": EF21M,
    "momentum": Momentum,
}
SELECT: dict[str, Callable[..., TopK | Foresight | Reused]] = {
    "topk": TopK,
    "carried": Carried,
    "reused": Reused,
    "gaussiank": GaussianK,
    "dgc": SampledTopK,
    "redsync": RedSync,
}
EXCHANGE: dict[str, Callable[[list[Floats], list[Places], Step], Delivery]] = {
    "dense": dense,
    "gather": gather,
    "randk": randk,
    "arc_topk": arc_topk,
    "topk_dsa": topk_dsa,
    "gtopk": gtopk,
    "ok_topk": OkTopk([]),  # keeps a state: `simulate` makes its own
}
TOGETHER = {"dense", "randk", "arc_topk"}  # all ranks always send the same entries
# method: feedback, select with granularity model and bucket, exchange
METHODS = {
    "auto": ("residual", {"model": "topk", "bucket": "carried"}, "gather"),
    "dense": ("none", {"model": "", "bucket": ""}, "dense"),
    "topk": ("residual", {"model": "topk", "bucket": "carried"}, "gather"),
    "randk": ("residual", {"model": "", "bucket": ""}, "randk"),
    "arc_topk": ("residual", {"model": "", "bucket": ""}, "arc_topk"),
    "arc_topk_ef21m": ("ef21m", {"model": "", "bucket": ""}, "arc_topk"),
    "topk_dsa": ("residual", {"model": "topk", "bucket": "carried"}, "topk_dsa"),
    "gtopk": ("residual", {"model": "topk", "bucket": "carried"}, "gtopk"),
    "ok_topk": ("residual", {"model": "reused", "bucket": "reused"}, "ok_topk"),
    "gaussiank": ("residual", {"model": "gaussiank", "bucket": "gaussiank"}, "gather"),
    "dgc": ("momentum", {"model": "dgc", "bucket": "dgc"}, "gather"),
    "redsync": ("residual", {"model": "redsync", "bucket": "redsync"}, "gather"),
}


@dataclass
class Outcome:
    """One step, flat over the layout."""

    mean: Floats
    owed: list[Floats]  # per rank
    density: float
    budget: int
    selected: list[int]  # per rank
    delivered: int


def is_kept_dense(name: str, patterns: str) -> bool:
    """`*` stands for any letters."""
    words = (".*".join(map(re.escape, word.split("*"))) for word in patterns.split())
    return any(re.fullmatch(word, name) for word in words)


def kept_dense(shapes: Shapes, patterns: str) -> NDArray[np.bool_]:
    """Which entries belong to parameters that are sent whole."""
    kept = [is_kept_dense(name, patterns) for name, _ in shapes]
    return np.repeat(np.array(kept, np.bool_), [size_of(shape) for _, shape in shapes])


def simulate(
    method: str,
    shapes: Shapes,
    gradients: Sequence[Sequence[Floats]],
    *,
    density: float = 0.01,
    granularity: str = "bucket",
    values: str = "fp32",
    feedback: str = "",
    select: str = "",
    keep_dense: str = "",
    warmup_steps: int = 0,
    ramp_steps: int = 0,
    seed: int = 0,
    loss_scale: float = 1.0,
    of_feedback: dict[str, Any] | None = None,
    of_exchange: dict[str, Any] | None = None,
    **of_stages: Any,
) -> list[Outcome]:
    """Every step of a run: gradients[step][rank], flat over the layout."""
    feedback = feedback or METHODS[method][0]
    select = select or METHODS[method][1][granularity]
    exchange = METHODS[method][2]
    ranks = len(gradients[0])
    kept = kept_dense(shapes, keep_dense)
    sizes = [size_of(shape) for name, shape in shapes if not is_kept_dense(name, keep_dense)]
    n = sum(sizes)
    selectors = [
        SELECT[select](sizes, **accepted(SELECT[select], of_stages)) for _ in range(ranks) if select
    ]
    ok_topk = OkTopk(sizes, **accepted(OkTopk, of_stages))
    unremembered = "fp32" if values == "auto" else without_scales(values)
    if values == "auto":
        values = "int4" if density < 1 and method != "dense" and feedback != "none" else "fp32"
    given = values
    if ranks == 1:  # nothing travels
        values = unremembered = "fp32"
    memory = FEEDBACK[feedback](ranks, n, exchange in TOGETHER, **(of_feedback or {}))
    compressed = [shape for name, shape in shapes if not is_kept_dense(name, keep_dense)]
    of_exchange = of_exchange or {}
    sketched = sum(
        rows.count * of_exchange.get("sketch", 4) for rows in arc_rows(compressed, **of_exchange)
    )

    outcomes: list[Outcome] = []
    number = 0
    for scaled_gradient in gradients:
        gradient = [np.float32(1 / loss_scale) * mine for mine in scaled_gradient]
        share = 1.0 if method == "dense" else density_at(number, density, warmup_steps, ramp_steps)
        k = entries_for(share, n)
        whole = number < warmup_steps or not memory.started
        if not whole and number < warmup_steps + ramp_steps:
            # In the ramp, everything goes if that costs no more.
            sent = bits_sent(exchange, given, k, n, ranks, sketched, ok_topk.global_ratio)
            whole = sent >= bits_sent("dense", given, n, n, ranks)
        plain = whole and memory.estimates
        whole = whole or exchange == "dense" or n == 0
        step = Step(
            number,
            seed,
            n if whole else k,
            share,
            compressed,
            of_exchange,
            memory.remembers,
            values if memory.remembers else unremembered,
            sizes,
            granularity == "model",
        )

        mean = np.full(kept.size, np.nan, np.float32)
        chosen: list[Places] = []
        delivered = 0
        compressing = [mine[~kept] for mine in scaled_gradient]
        pending = memory.pending(compressing, loss_scale, plain)
        change = memory.change(compressing, loss_scale, plain)
        finite = all(np.isfinite(mine).all() for mine in [*pending, *gradient])
        if finite:
            if selectors and not whole:
                for r, selector in enumerate(selectors):
                    alone = replace(step, drift=memory.drift(r), sent_drift=not memory.masks)
                    chosen.append(selector.choose(pending[r], change[r], alone))
            keeps_state = exchange == "ok_topk" and not whole
            run = ok_topk if keeps_state else EXCHANGE["dense" if whole else exchange]
            delivery = run(pending, chosen, step)
            rest = replace(step, sizes=[int(kept.sum())], values=unremembered)
            kept_delivery = dense([mine[kept] for mine in gradient], [], rest)
            delivered = delivery.delivered + kept_delivery.delivered
            mean[kept] = kept_delivery.total / np.float32(ranks) * np.float32(loss_scale)
            # The commit. A step that is not finite changes nothing, not even its own number.
            mean[~kept] = memory.commit(pending, delivery, plain) * np.float32(loss_scale)
            if chosen:
                for selector in selectors:
                    selector.commit()
            if keeps_state:
                ok_topk.commit()
            number += 1
        selected = [places.size + int(kept.sum()) for places in chosen] or [delivered] * ranks
        outcomes.append(
            Outcome(
                mean=mean,
                owed=[spread(debt, ~kept) for debt in memory.owed],
                density=share,
                budget=step.k + int(kept.sum()),
                selected=selected,
                delivered=delivered,
            )
        )
    return outcomes


def accepted(stage: Callable[..., object], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a stage has; period, for one, is the selector's and the exchange's."""
    return {
        name: settings[name] for name in inspect.signature(stage).parameters if name in settings
    }


def spread(values: Floats, where: NDArray[np.bool_]) -> Floats:
    flat = np.zeros(where.size, np.float32)
    flat[where] = values
    return flat
