"""Rates, times and sizes in words."""

import re

_RATES = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9}


def parse_rate(word: str) -> float | None:
    """Bits per second; None for "none", which is no limit."""
    if word == "none":
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", word)
    if match is None or float(match[1]) == 0:
        raise ValueError(f"rate {word!r}: write it as 500kbit, 100mbit, 1gbit or none")
    return float(match[1]) * _RATES[match[2]]


def parse_seconds(word: str) -> float:
    """A time with its unit."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(us|ms|s|min)", word)
    if match is None:
        raise ValueError(f"write it as 500us, 50ms, 2s or 1min, not {word!r}")
    return float(match[1]) * _TIMES[match[2]]


def parse_count(word: str) -> float:
    """A number, or one of thousands, millions or billions."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmb]?)", word.lower())
    if match is None or float(match[1]) == 0:
        raise ValueError(f"write it as 350000, 350k, 10m or 1.3b, not {word!r}")
    return float(match[1]) * _COUNTS[match[2]]
