"""Methods by names that need no explaining."""

from __future__ import annotations

import re

from topreduce.lab.experiments.methods import AGAIN

_STOCK = {
    "dense": "dense (DDP)",
    "fp16": "dense in fp16",
    "bf16": "dense in bf16",
    "powersgd": "PowerSGD, rank {}",
    "post_local_sgd": "local SGD, {} steps",
    "diloco": "DiLoCo, {} steps",
}
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
