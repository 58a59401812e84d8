"""`topreduce advise`: what would be chosen where."""

import json
import re

import pytest

from topreduce import advice
from topreduce.__main__ import main

SLOW = ["advise", "--entries", "10m", "--rate", "100mbit", "--compute", "300ms"]


def test_it_says_what_auto_would_send(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(SLOW) == 0
    shown = capsys.readouterr().out
    first = shown.splitlines()[1].split()
    assert first[0] == "auto"
    assert 0.001 <= float(first[1]) < 0.3
    assert "DDP, dense" in shown
    assert "times quicker than DDP" in shown
    assert main([*SLOW, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    rows = {row["method"]: row for row in told["rows"]}
    assert rows["auto"]["level"] == first[1]
    assert rows["auto"]["waited"] <= 0.05 * rows["auto"]["seconds"]
    assert rows["DDP, dense"]["bytes"] == 60e6
    assert rows["topk:density=0.03"]["bytes"] > 2 * rows["topk:density=0.01"]["bytes"]


def words_of(rate: float | None, **others: float) -> str:
    site = advice.Site(entries=10e6, ranks=4, computed=0.3, rate=rate, **others)
    return " ".join(advice.advise(site).words)


def test_it_says_where_others_are_better() -> None:
    assert "nothing to gain" in words_of(None)
    assert "16 bits" in words_of(8e9)
    assert "local updates" in words_of(1e6)
    assert "local updates" in words_of(1e9, delay=0.2)
    assert "local updates" not in words_of(1e8)
    assert "nothing to gain" not in words_of(1e8)
    far = advice.advise(advice.Site(entries=10e6, ranks=16, computed=0.12, rate=1e9, delay=2e-3))
    assert "sends more here in no more time than auto" in str(far)
    assert "sends more here" not in words_of(1e8)


@pytest.mark.parametrize("rate", [1e6, 1e7, 1e8, 1e9, 8e9, 25e9, 100e9, None])
@pytest.mark.parametrize("entries", [1e6, 100e6])
def test_there_is_one_verdict(rate: float | None, entries: float) -> None:
    words = advice.advise(advice.Site(entries=entries, ranks=4, computed=0.3, rate=rate)).words
    first, *rest = words
    assert re.search("nothing to gain|quick enough here|Hardly worth it|quicker than DDP", first)
    assert all(each.startswith("Even so") for each in rest)


def test_bytes_are_not_saved_for_nothing() -> None:
    """Where a pass over the model at the end of a step is what is waited for."""
    site = advice.Site(entries=100e6, ranks=4, computed=0.3, rate=10e9)
    auto = advice.advise(site).rows[0]
    assert auto.waited > 0.05 * auto.seconds
    assert float(auto.level) > 0.01


def test_a_model_of_the_lab(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "--model", "gpt:1m", "--compute", "100ms", "--ranks", "16"]) == 0
    assert capsys.readouterr().out.startswith("method")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--entries", "many"], "350k"),
        (["--entries", "10m", "--rate", "fast"], "100mbit"),
        (["--entries", "10m", "--compute", "3"], "50ms"),
        (["--entries", "10m", "--ranks", "0"], "--ranks"),
        (["--entries", "10m", "--overhead", "2"], "--overhead"),
        (["--model", "gpt:9z"], "gpt:10m"),
    ],
)
def test_mistakes(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "--compute", "300ms", *arguments]) == 2
    assert words in capsys.readouterr().err
