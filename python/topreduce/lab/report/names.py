"""Methods by names that need no explaining."""

from __future__ import annotations

import re

from topreduce.lab.experiments.methods import AGAIN, Method

OURS, THE_LAB = "topreduce", "the lab"

_STOCK = {
    "dense": "dense (DDP)",
    "fp16": "dense in fp16",
    "bf16": "dense in bf16",
    "powersgd": "PowerSGD, rank {}",
    "post_local_sgd": "local SGD, {} steps",
    "diloco": "DiLoCo, {} steps",
}
_MAKERS = {"noop": "-", "diloco": THE_LAB}
_DENSITY = re.compile(r":density=([\d.e-]+)(?=,|$),?")


def in_words(label: str) -> str:
    """A method's label for people: "topk 1 %", "PowerSGD, rank 4"."""
    spec = label.removesuffix(AGAIN)
    name, _, argument = spec.partition(":")
    if name in _STOCK:
        words = _STOCK[name].format(argument)
    else:
        words = _DENSITY.sub(lambda found: f" {100 * float(found[1]):.3g} % ", spec).strip()
    return words + label[len(spec) :]


def is_ours(spec: str) -> bool:
    return Method(spec, spec).is_ours


def maker(spec: str) -> str:
    """Who made the method: "topreduce", "PyTorch", "the lab"; "-" for noop, which is none."""
    stock = _MAKERS.get(spec.partition(":")[0], "PyTorch")
    return OURS if is_ours(spec) else stock
