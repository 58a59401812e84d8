"""A plain NumPy reading of every method, written from the papers and the documented rules.

It computes all ranks at once, has no buckets and no network, and is as slow as it likes. Arithmetic
is float32 where the library's is, so that results can be compared bit for bit.

A file for each stage: select, exchange (arc_topk and ok_topk apart), wire, feedback; step.py puts
them together.
"""

from reference.basics import Floats, Shapes, size_of
from reference.random import philox
from reference.select import strongest
from reference.step import EXCHANGE, FEEDBACK, METHODS, SELECT, Outcome, kept_dense, simulate
from reference.wire import BITS, VALUES

__all__ = [
    "BITS",
    "EXCHANGE",
    "FEEDBACK",
    "METHODS",
    "SELECT",
    "VALUES",
    "Floats",
    "Outcome",
    "Shapes",
    "kept_dense",
    "philox",
    "simulate",
    "size_of",
    "strongest",
]
