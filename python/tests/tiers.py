"""Tests with the mark `long` run only where TOPREDUCE_LONG_TESTS is set: `./run test --long`."""

import itertools

import pytest

import topreduce

LONG_TESTS = "TOPREDUCE_LONG_TESTS"
METHODS = [method["name"] for method in topreduce.methods()]

# By turns in buckets and as a whole; the other way round where tests may take long.
_FIRST = list(zip(METHODS, itertools.cycle(["bucket", "model"])))
_SECOND = list(zip(METHODS, itertools.cycle(["model", "bucket"])))
each_method_in_one_granularity = pytest.mark.parametrize(
    ("method", "granularity"),
    [*_FIRST, *(pytest.param(*each, marks=pytest.mark.long) for each in _SECOND)],
)
