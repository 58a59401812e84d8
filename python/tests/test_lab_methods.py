"""What a race compares: reading the list of methods, and the clock that a race lends."""

import contextlib
import dataclasses
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from processes import Rank, group
from torch.nn.parallel import distributed

from topreduce.lab.experiments import methods
from topreduce.lab.experiments.clock import as_found, on_the_clock_of
from topreduce.lab.experiments.diloco import DiLoCo
from topreduce.lab.experiments.methods import parse_methods
from topreduce.lab.experiments.race import RaceRow, with_again
from topreduce.lab.experiments.train import Evaluation, TrainRun


def specs(words: str) -> list[str]:
    return [method.spec for method in parse_methods(words)]


def test_settings_stay_with_their_method() -> None:
    words = "noop, dense,powersgd:4,ok_topk:density=0.01,values=bf16,topk,topreduce.dense"
    assert specs(words) == [
        "noop",
        "dense",
        "powersgd:4",
        "ok_topk:density=0.01,values=bf16",
        "topk",
        "topreduce.dense",
    ]
    nested = "topk:density=0.02,select=(carried:gain=0.2),values=bf16"
    assert specs(f"{nested},noop") == [nested, "noop"]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("", "no method"),
        ("noop,tpok", "tpok.*of others: noop"),
        ("topk:density=2", r"density=2 must be [^;]*$"),
        ("noop:3", "takes no settings"),
        ("powersgd:none", "powersgd:4"),
        ("diloco:0", "diloco:4"),
        ("noop,noop", "twice"),
    ],
)
def test_what_no_rank_could_run_is_refused(wrong: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_methods(wrong)


def test_only_stock_methods_are_not_ours() -> None:
    ours = {method.spec: method.is_ours for method in parse_methods("dense,topk,topreduce.dense")}
    assert ours == {"dense": False, "topk": True, "topreduce.dense": True}


def test_a_race_measures_the_steady_step() -> None:
    words = "topk:density=0.02,warmup_steps=5,select=(carried:gain=0.2),ramp_steps=9,seed=1"
    (method,) = parse_methods(words)
    at_once = "warmup_steps=0,ramp_steps=0"
    assert method.steady().spec == f"topk:density=0.02,select=(carried:gain=0.2),{at_once}"
    assert parse_methods("topk:ramp_steps=9")[0].steady().spec == f"topk:{at_once}"
    assert parse_methods("powersgd:2")[0].steady().spec == "powersgd:2"


def test_the_first_method_runs_again() -> None:
    methods = with_again(parse_methods("noop,topk"))
    assert [method.label for method in methods] == ["noop", "noop (A/A)", "topk"]
    assert [method.spec for method in methods] == ["noop", "noop", "topk"]


def make_weights(rank: Rank, seed: int) -> tuple[bool, list[float]]:
    """Whether DDP broadcast weights, and which it has."""
    torch.manual_seed(seed + rank.rank if seed else 0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    ddp = distributed.DistributedDataParallel
    with mock.patch.object(methods, "DistributedDataParallel", wraps=ddp) as wrapped:
        (method,) = parse_methods("noop")
        method.attach(model, 0)
    return wrapped.call_args.kwargs["init_sync"], model[0].weight.flatten().tolist()


def test_weights_that_ranks_have_already_are_not_sent() -> None:
    alike = group(2).run(make_weights, 0)
    unlike = group(2).run(make_weights, 1)
    assert [sent for sent, _ in alike] == [False, False]
    assert [sent for sent, _ in unlike] == [True, True]
    assert alike[0] == alike[1] and unlike[0] == unlike[1]


# ---- DiLoCo -----------------------------------------------------------------------------------


def test_diloco_is_the_papers() -> None:
    """Two rounds of the outer optimizer, by torch's own SGD with Nesterov's momentum."""
    weights = [torch.nn.Parameter(torch.tensor([1.0, -2.0])), torch.nn.Parameter(torch.ones(1))]
    outer = [torch.nn.Parameter(each.detach().clone()) for each in weights]
    theirs = torch.optim.SGD(outer, lr=0.7, momentum=0.9, nesterov=True)
    with one_rank_group():
        diloco = DiLoCo(weights, period=2)
        for move in (0.5, 0.25, -0.125, 1.0):
            before = [each.detach().clone() for each in weights]
            with torch.no_grad():
                for each in weights:
                    each -= move
            diloco.average_parameters(weights)
            if move in (0.5, -0.125):  # between the meetings nothing is changed
                assert all(
                    torch.equal(each, old - move) for each, old in zip(weights, before, strict=True)
                )
                continue
            for start, here in zip(outer, before, strict=True):
                start.grad = start.detach() - (here - move)
            theirs.step()
            for start, each in zip(outer, weights, strict=True):
                torch.testing.assert_close(start.detach(), each.detach())


@contextlib.contextmanager
def one_rank_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


# ---- the clock of a race ----------------------------------------------------------------------


def row(spec: str, seconds: float, sent: float) -> RaceRow:
    return RaceRow(
        label=spec,
        spec=spec,
        parameters=10,
        seconds=[seconds],
        bytes_sent=[sent],
        losses=[1.0],
        stages={},
        stats={},
    )


def run(spec: str, sent: list[float]) -> TrainRun:
    return TrainRun(
        label=spec,
        spec=spec,
        seed=0,
        parameters=10,
        seconds=[9.0] * len(sent),
        bytes_sent=sent,
        losses=[1.0] * len(sent),
        density=[],
        kept_energy=[],
        owed_norm=[],
        evaluations=[Evaluation(0, 0.0, 0.0, 2.0), Evaluation(2, 18.0, sum(sent[:2]), 1.0)],
    )


def test_the_clock_of_a_race_goes_by_bytes() -> None:
    rows = [row("noop", 1.0, 0.0), row("dense", 11.0, 100.0), row("topk", 2.0, 10.0)]
    trained = [run("topk", [10.0, 55.0, 100.0, 5.0]), run("post_local_sgd:2", [0.0, 100.0])]
    sparse, local = on_the_clock_of(rows, trained)
    assert sparse.seconds == pytest.approx([2.0, 6.5, 11.0, 2.0])
    assert [each.seconds for each in sparse.evaluations] == pytest.approx([0.0, 8.5])
    assert local.seconds == pytest.approx([1.0, 11.0]), "not in the race: between noop and dense"
    assert sparse.reached(1.5) == sparse.evaluations[1]
    assert sparse.reached(0.5) is None


def test_who_finds_a_density() -> None:
    words = "auto,topk,topk:density=auto,values=bf16,topk:min_density=0.1,topk:density=0.01,dense"
    words += ",topreduce.dense,noop,powersgd:1"
    searching = [method.spec for method in parse_methods(words) if method.searches]
    named = ["topk", "topk:density=auto,values=bf16", "topk:min_density=0.1"]
    assert searching == ["auto", *named]


def test_a_training_sends_what_the_race_found() -> None:
    methods = parse_methods("dense,auto:overhead=0.1,ramp_overhead=0.5")
    found = dataclasses.replace(
        raced(methods[1].label, 1.0, 1e6),
        levels=["int4", "int4", "0.0484", "0.0484"],
        first_seconds=[3.0, 2.0],
    )
    rows = [found, raced("dense", 9.0, 65e6), raced("noop", 0.9, 0.0)]
    assert [each.replay for each in as_found(methods, rows)] == ["", "int4 int4 0.0484 0.0484"]
    clocked = on_the_clock_of(rows, [trained(methods[1].label, [4e6] * 2 + [1e6] * 2)])
    assert clocked[0].seconds == [3.0, 2.0, 1.0, 1.0]


def raced(label: str, seconds: float, sent: float) -> RaceRow:
    return RaceRow(
        label=label,
        spec=label,
        parameters=7,
        seconds=[seconds],
        bytes_sent=[sent],
        losses=[0.0],
        stages={},
        stats={},
    )


def trained(label: str, sent: list[float]) -> TrainRun:
    return TrainRun(
        label=label,
        spec=label,
        seed=0,
        parameters=7,
        seconds=[0.0] * len(sent),
        bytes_sent=sent,
        losses=[0.0] * len(sent),
        density=[],
        kept_energy=[],
        owed_norm=[],
        evaluations=[],
    )
