"""The lab: text, model, launcher and training."""

import importlib
import io
import math
import os
import signal
import sys
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from rich.console import Console

from topreduce import lab
from topreduce.lab.experiments.launch import RankError, launch
from topreduce.lab.experiments.progress import progress
from topreduce.lab.tasks.gpt import GPT, PRESETS, GPTConfig, preset
from topreduce.lab.tasks.models import MODELS, Workload, make_task
from topreduce.lab.tasks.text import load_text

torch.set_num_threads(1)  # more of them fight over the cores with what else runs

TINY = GPTConfig(layers=2, width=16, heads=2, context=8)


def test_the_lab_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    with pytest.raises(ImportError, match=r"needs rich: pip install 'topreduce\[lab\]'"):
        importlib.reload(lab)


# ---- text -----------------------------------------------------------------------------------


def test_text_survives_the_round_trip() -> None:
    text = load_text()
    written = "First Citizen:\nSpeak, speak; 'tis 3 o'clock!"
    assert text.decode(text.encode(written)) == written
    assert text.decode(torch.arange(65)) == text.characters


def test_unknown_characters_are_named() -> None:
    with pytest.raises(ValueError, match="€"):
        load_text().encode("5 €")


def test_a_tenth_of_the_text_is_kept_back() -> None:
    text = load_text()
    whole = len(text.training) + len(text.validation)
    assert whole == 1115394
    assert len(text.validation) / whole == pytest.approx(0.1, abs=1e-4)


def test_batches_depend_on_seed_rank_and_step_alone() -> None:
    text = load_text()

    def draw(seed: int, rank: int, step: int) -> bytes:
        inputs, targets = text.training_batch(4, 16, seed=seed, rank=rank, step=step)
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        return bytes(inputs.numpy())

    before = torch.get_rng_state()
    keys = [(seed, rank, step) for seed in (0, 1) for rank in (0, 1) for step in (0, 1)]
    drawn = [draw(*key) for key in keys]
    assert len(set(drawn)) == len(keys)
    assert [draw(*key) for key in keys] == drawn
    assert torch.equal(torch.get_rng_state(), before)


def test_validation_batches_cover_the_whole_part() -> None:
    text = load_text()
    batches = list(text.validation_batches(3, 5, 16))
    assert [inputs.shape for inputs, _ in batches] == [(5, 16)] * 3
    assert torch.equal(batches[0][0][0], text.validation[:16])
    assert torch.equal(batches[-1][1][-1], text.validation[-16:])


# ---- model ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "parameters"), [("gpt:0.6m", 0.6e6), ("gpt:1m", 1e6), ("gpt:10m", 10.7e6)]
)
def test_presets_have_the_size_they_name(name: str, parameters: float) -> None:
    assert name in PRESETS
    model = GPT(preset(name))
    assert sum(each.numel() for each in model.parameters()) == pytest.approx(parameters, rel=0.1)


def test_an_unknown_preset_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"gpt:2m.*gpt:0\.6m"):
        preset("gpt:2m")


def test_the_model_does_not_see_what_follows() -> None:
    model = GPT(TINY)
    ids = torch.arange(8)[None]
    changed = ids.clone()
    changed[0, 5:] = 60
    before, after = model(ids), model(changed)
    assert torch.allclose(before[:, :5], after[:, :5], atol=1e-6)
    assert not torch.allclose(before[:, 5:], after[:, 5:], atol=1e-6)


def test_weights_follow_the_seed() -> None:
    same, again, other = (GPT(TINY, seed=seed).head.weight for seed in (3, 3, 4))
    assert torch.equal(same, again)
    assert not torch.equal(same, other)


def test_generated_text_has_the_length_asked_for() -> None:
    text, model = load_text(), GPT(TINY)
    written = [text.decode(model.generate(30, seed)) for seed in (1, 1, 2)]
    assert [len(each) for each in written] == [30, 30, 30]
    assert written[0] == written[1] != written[2]


# ---- tasks ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_every_model_learns(name: str) -> None:
    task = make_task(Workload(model=name, batch=2, context=16))
    optimizer = torch.optim.SGD(task.model.parameters(), lr=0.01)
    losses = []
    for _ in range(4):  # the same batch again and again
        optimizer.zero_grad()
        loss = task.loss(task.model, rank=0, step=0)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all(math.isfinite(task.validation_loss(part, 3)) for part in range(3))
    assert bool(task.sample(20)) == name.startswith("gpt")


@pytest.mark.parametrize("name", ["gpt:0.6m", "lstm", "resnet"])
def test_weights_and_batches_follow_seed_rank_and_step(name: str) -> None:
    def first_loss(seed: int, rank: int, step: int) -> float:
        task = make_task(Workload(model=name, batch=1, context=8, seed=seed))
        return task.loss(task.model, rank, step).item()

    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
    losses = [first_loss(*key) for key in keys]
    assert len(set(losses)) == len(keys)
    assert [first_loss(*key) for key in keys] == losses


def test_a_wait_gives_gradients_of_noise() -> None:
    task = make_task(Workload(model="gpt:0.6m", compute=1e-6))

    def gradients(rank: int, step: int) -> list[torch.Tensor]:
        task.model.zero_grad()
        task.loss(task.model, rank, step).backward()
        return [each.grad.clone() for each in task.model.parameters() if each.grad is not None]

    real = GPT(preset("gpt:0.6m", context=64))
    shapes = [each.shape for each in real.parameters()]
    first, again, other = gradients(0, 3), gradients(0, 3), gradients(1, 3)
    assert [each.shape for each in first] == shapes
    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])


def test_a_wait_gives_gradients_whose_large_entries_last() -> None:
    """So that a threshold of one step fits the next, as in a training."""
    task = make_task(Workload(model="gpt:0.6m", compute=1e-6))

    def large(rank: int, step: int) -> torch.Tensor:
        task.model.zero_grad()
        task.loss(task.model, rank, step).backward()
        every = torch.cat([each.grad.flatten() for each in task.model.parameters()])  # type: ignore[union-attr]
        return every.abs() > every.abs().quantile(0.99)

    first, later, elsewhere = large(0, 0), large(0, 1), large(1, 0)
    for other in (later, elsewhere):
        assert 0.2 < (first & other).sum() / first.sum() < 0.9


# ---- launcher -------------------------------------------------------------------------------


def end_early(rank: int, world_size: int, how: str, report: Callable[[int], None]) -> None:
    report(os.getpid())
    dist.barrier()
    if rank == 1 and how == "raise":
        raise ValueError("no such luck")
    if rank == 1 and how == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(300 if how == "sleep" else 0)
    dist.barrier()


def assert_gone(pids: list[int]) -> None:
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize(("how", "words"), [("raise", "no such luck"), ("die", "SIGKILL")])
def test_a_failing_rank_is_shown_and_ends_the_others(how: str, words: str) -> None:
    pids: list[int] = []
    with pytest.raises(RankError, match=words) as caught:
        launch(end_early, 2, how, pids.append)
    assert caught.value.rank == 1
    assert ("in end_early" in str(caught.value)) == (how == "raise")
    assert_gone(pids)


def test_an_interrupt_ends_the_ranks() -> None:
    pids: list[int] = []

    def interrupt_at_the_second(pid: int) -> None:
        pids.append(pid)
        if len(pids) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launch(end_early, 2, "sleep", interrupt_at_the_second)
    assert_gone(pids)


def test_a_launch_needs_a_rank() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        launch(end_early, 0, "raise")


# ---- progress -------------------------------------------------------------------------------


def test_progress_off_a_terminal_is_plain_lines() -> None:
    written = io.StringIO()
    with progress(Console(file=written), ["topk 1%"], 1000, "steps") as advance:
        for step in range(1, 1001):
            advance("topk 1%", step, "loss 2.00")
    assert written.getvalue() == "topk 1%: 1000 of 1000 steps, loss 2.00\n"
