"""sync.save and sync.load: one file per rank, whole or refused, for any number of ranks."""

import copy
import json
import os
import shutil
import tracemalloc
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from models import Run, attach_at_once, digest, owed, rank_order_sum
from processes import Rank, group
from sharded import Case, build, mesh_of, usual_step
from sharded import attach as attach_shards

import topreduce.torch
from topreduce.torch import restoring, state_files
from topreduce.torch.state_files import Place, StateFile

SETTINGS: list[dict[str, Any]] = [
    {"method": "topk", "density": 0.01},
    {"method": "ok_topk", "density": 0.01, "granularity": "model"},
    {"method": "arc_topk", "density": 0.1, "feedback": "ef21"},
]


def start(rank: Rank, settings: dict[str, Any]) -> tuple[Run, topreduce.torch.Sync]:
    run = Run(rank, bucket_cap_mb=0.03)
    return run, attach_at_once(run.ddp, **settings)


def everything(sync: topreduce.torch.Sync) -> str:
    return digest(
        torch.cat(
            [
                torch.as_tensor(value, dtype=torch.float64).flatten()
                for _, value in sorted(sync.state_dict().items())
                if not isinstance(value, str)
            ]
        )
    )


# ---- the same ranks ----------------------------------------------------------------------------


def cut_in_two(rank: Rank, folder: str) -> None:
    for number, settings in enumerate(SETTINGS):
        here = Path(folder) / str(number)
        whole, whole_sync = start(rank, settings)
        whole.train(range(12))
        first, first_sync = start(rank, settings)
        for step in range(7):
            first.train(range(step, step + 1))
            if step % 2:
                first_sync.save(here)  # before steps 2, 4, 6
        first_sync.save(here)  # and 7
        dist.barrier()
        assert sorted(state_files.find(here)) == [6, 7], "those before the last one go"
        second, second_sync = start(rank, settings)
        assert second_sync.load(here) == second_sync.step == 7
        second.ddp.load_state_dict(first.ddp.state_dict())
        second.optimizer.load_state_dict(first.optimizer.state_dict())
        second.train(range(7, 12))
        assert second.digest() == whole.digest()
        assert everything(second_sync) == everything(whole_sync)
        assert second_sync.load(here, step=6) == 6
        dist.barrier()


def test_a_run_that_is_cut_in_two_is_exact(tmp_path: Path) -> None:
    group(3).run(cut_in_two, str(tmp_path))


# ---- another number of ranks -------------------------------------------------------------------


def carry_on(rank: Rank, settings: dict[str, Any], folder: str, number: int) -> Any:
    run, sync = start(rank, settings)
    if number > 0:
        assert sync.load(folder) == 8 * number
        run.ddp.module.load_state_dict(torch.load(Path(folder) / "model.pt", weights_only=True))
    arrived = mean_state(sync)
    run.train(range(8 * number, 8 * number + 8))
    sync.save(folder)
    if rank.rank == 0:
        torch.save(run.ddp.module.state_dict(), Path(folder) / "model.pt")
    dist.barrier()
    return arrived.numpy(), mean_state(sync).numpy(), run.digest()


def mean_state(sync: topreduce.torch.Sync) -> torch.Tensor:
    tensors = [v for v in sync.state_dict().values() if isinstance(v, torch.Tensor)]
    state = torch.cat([tensor.flatten() for tensor in tensors])
    return rank_order_sum(state.double()) / dist.get_world_size()


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: s["method"])
def test_from_four_ranks_to_two_to_three(settings: dict[str, Any], tmp_path: Path) -> None:
    left = None
    for number, ranks in enumerate((4, 2, 3)):
        results = group(ranks).run(carry_on, settings, str(tmp_path), number)
        assert len({model for *_, model in results}) == 1
        if left is not None:
            assert results[0][0] == pytest.approx(left, rel=1e-5, abs=1e-7)
            assert abs(left).max() > 0
        left = results[0][1]


def test_files_give_what_reshard_gives(tmp_path: Path) -> None:
    states = group(3).run(make_states, str(tmp_path))
    for ranks in (1, 2, 5, 7):
        for rank, want in enumerate(topreduce.torch.reshard(states, ranks)):
            got, _ = restoring.read(tmp_path, Place(rank, ranks), 3, tensors=True)
            assert got.keys() == want.keys()
            for key, value in want.items():
                assert (
                    torch.equal(torch.as_tensor(got[key]), torch.as_tensor(value))
                    if not (isinstance(value, str))
                    else got[key] == value
                )


def make_states(rank: Rank, folder: str) -> dict[str, Any]:
    run, sync = start(rank, SETTINGS[0])
    run.train(range(3))
    sync.save(folder)
    return sync.state_dict()


def test_no_rank_holds_the_states_of_all(tmp_path: Path) -> None:
    entries, ranks = 1 << 18, 8
    for rank in range(ranks):
        state = {"format": 1, "ranks": ranks, f"rank{rank}/step": 5.0}
        for name in range(8):
            state[f"rank{rank}/owed/{name}"] = torch.full((entries // 8,), 1.0 + rank)
        state_files.save(tmp_path, Place(rank, ranks), 5, state)
    tracemalloc.start()
    try:
        state, _ = restoring.read(tmp_path, Place(0, 1), 5, tensors=True)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert state["rank0/owed/3"].tolist() == [4.5] * (entries // 8)
    assert peak < 2 * 4 * entries  # NumPy's, of one state; all of them have 8 times as much


# ---- files that cannot be used -----------------------------------------------------------------


def small_state(step: float = 3.0) -> dict[str, Any]:
    values = torch.arange(7, dtype=torch.float32)
    return {"format": 1, "ranks": 2, "settings/x": "y", "rank0/step": step, "rank0/owed/a": values}


def test_every_damaged_byte_is_found(tmp_path: Path) -> None:
    file = state_files.save(tmp_path, Place(0, 2), 3, small_state())
    whole = file.read_bytes()
    for place in range(len(whole)):
        torn = bytearray(whole)
        torn[place] ^= 1 << place % 8
        file.write_bytes(torn)
        with pytest.raises(ValueError, match=r"topreduce-step3-rank0-of-2.*is damaged: "):
            dict(StateFile(file))
    for length in (0, 5, 8, 40, len(whole) - 1, len(whole) + 1):
        file.write_bytes((whole + b"x")[:length])
        with pytest.raises(ValueError, match="is damaged"):
            dict(StateFile(file))
    file.write_bytes(whole)
    assert dict(StateFile(file)).keys() == small_state().keys()


def test_other_programs_can_read_it(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    file = state_files.save(tmp_path, Place(0, 2), 3, small_state())
    assert torch.equal(safetensors.load_file(file)["rank0/owed/a"], small_state()["rank0/owed/a"])


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_write_that_is_cut_short_leaves_what_was_there(call: str, tmp_path: Path) -> None:
    place = Place(0, 2)
    file = state_files.save(tmp_path, place, 3, small_state())
    broken = mock.Mock(side_effect=OSError("no space left"))
    with (
        mock.patch.object(os if call == "fsync" else Path, call, broken),
        pytest.raises(OSError, match="no space"),
    ):
        state_files.save(tmp_path, place, 3, {**small_state(), "settings/x": "z"})
    assert [each.name for each in tmp_path.iterdir()] == [file.name]
    assert StateFile(file)["settings/x"] == "y"


def leave(folder: Path, step: int, rank: int, ranks: int, run: str = "") -> None:
    """A file as `rank` saves it."""
    state = {"format": 1, "ranks": ranks, f"rank{rank}/step": float(step)}
    owed = {f"rank{rank}/owed/a": torch.full((7,), float(rank))}
    state_files.save(folder, Place(rank, ranks), step, {**state, **owed}, run=run)


def test_a_set_that_one_rank_could_not_write_is_not_relied_on(tmp_path: Path) -> None:
    for rank in range(2):
        leave(tmp_path, 2, rank, 2)
    leave(tmp_path, 4, 0, 2)  # rank 1 had no space left, and went on
    leave(tmp_path, 6, 0, 2)
    assert sorted(state_files.complete_sets(tmp_path)) == [2]
    leave(tmp_path, 6, 1, 2)
    for rank in range(2):
        leave(tmp_path, 8, rank, 2)
    assert sorted(state_files.find(tmp_path)) == [6, 8]


def test_another_rank_may_remove_what_this_one_looks_at(tmp_path: Path) -> None:
    for step in (2, 4):
        for rank in range(2):
            leave(tmp_path, step, rank, 2)
    seen = state_files.find(tmp_path)
    seen[2][Place(1, 2)].unlink()
    with mock.patch.object(state_files, "find", return_value=seen):
        assert sorted(state_files.complete_sets(tmp_path)) == [4]


def test_what_a_killed_process_left_goes(tmp_path: Path) -> None:
    names = [f"{Place(rank, 11).file(2)}.77.partial" for rank in (1, 10)]
    for name in names:
        (tmp_path / name).touch()
    leave(tmp_path, 3, 1, 11)
    assert sorted(each.name for each in tmp_path.iterdir()) == [names[1], Place(1, 11).file(3)]


def test_a_file_of_other_ranks_is_not_mixed_with_a_set(tmp_path: Path) -> None:
    leave(tmp_path, 3, 0, 3, "before")
    for rank in range(2):
        leave(tmp_path, 3, rank, 2, "after")
    words = []
    for rank in range(3):
        _, runs = restoring.read(tmp_path, Place(rank, 3), 3, tensors=True)
        assert {run for _, run, _ in runs} == {"after"}
        words.append(json.dumps(runs))
    restoring.expect_one_run(words, 3)


def refuse(rank: Rank, folder: str) -> list[str]:
    run, sync = start(rank, SETTINGS[0])
    here = Path(folder)
    refusals = []

    def expect_refusal(**step: int) -> None:
        before = everything(sync)
        with pytest.raises(ValueError, match="rank") as raised:
            sync.load(here, **step)
        refusals.append(str(raised.value))
        assert everything(sync) == before
        dist.barrier()

    expect_refusal()  # no folder
    run.train(range(2))
    sync.save(here)
    run.train(range(2, 4))
    if rank.rank < 2:
        sync.save(here)  # rank 2 died before it could
    dist.barrier()
    assert sync.load(here) == 2
    run.train(range(4, 5))
    expect_refusal(step=4)
    _, other = start(rank, {"method": "topk", "density": 0.01, "feedback": "none"})
    with pytest.raises(ValueError, match="feedback"):
        other.load(here)
    if rank.rank == 1:
        file = here / Place(1, 3).file(2)
        torn = bytearray(file.read_bytes())
        torn[-2] ^= 4
        file.write_bytes(torn)
    dist.barrier()
    expect_refusal(step=2)  # one file of it is damaged
    with pytest.raises(ValueError, match="Not a directory"):
        sync.load(here / Place(rank.rank, 3).file(2))
    # The same ranks in another run, that was cut off while it saved.
    again, twin = start(rank, SETTINGS[0])
    here = here / "mixed"
    sync.save(here)
    dist.barrier()
    if rank.rank == 0:
        twin.save(here)
        (here / Place(0, 3).file(0)).rename(here / Place(0, 3).file(sync.step))
    dist.barrier()
    expect_refusal()  # it holds another step than its name says
    again.train(range(sync.step))
    if rank.rank == 0:
        twin.save(here)
    dist.barrier()
    expect_refusal()  # two runs have made this step
    run.train(range(5, 7))  # as if nothing had been tried
    return refusals


def test_what_cannot_be_loaded_is_refused_on_all_ranks(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    for nothing, incomplete, damaged, renamed, mixed in group(3).run(refuse, str(folder)):
        assert f"{folder} (this rank has no such folder) holds no complete step: each" in nothing
        assert "no complete step 4" in incomplete
        assert "rank 2: 2" in incomplete
        assert damaged.startswith("rank 1: ")
        assert f"{Place(1, 3).file(2)} is damaged" in damaged
        assert f"{Place(0, 3).file(3)} is not what its name says" in renamed
        assert "rank 0 at step 0.0" in renamed
        files = f"{Place(0, 3).file(3)} and {Place(1, 3).file(3)}"
        assert f"load: {files} were not saved together" in mixed


# ---- several ranks per machine, and shards -----------------------------------------------------


def on_machines(rank: Rank, folder: str) -> None:
    local = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank.rank // 2]
    runs = [Run(rank, bucket_cap_mb=0.03) for _ in range(2)]
    first, second = (
        attach_at_once(run.ddp, **SETTINGS[0], local_group=local, bucket_cap_mb=0.03)
        for run in runs
    )
    runs[0].train(range(5))
    first.save(folder)
    dist.barrier()
    assert sorted(state_files.find(Path(folder))[5]) == [(0, 2, 0, 1), (1, 2, 0, 1)]
    assert second.load(folder) == 5
    assert everything(first) == everything(second)
    runs[1].ddp.load_state_dict(runs[0].ddp.state_dict())
    runs[1].optimizer.load_state_dict(copy.deepcopy(runs[0].optimizer.state_dict()))
    for run in runs:
        run.train(range(5, 8))
    assert runs[0].digest() == runs[1].digest()
    alone, sync = start(rank, SETTINGS[0])  # two machines become four ranks
    assert sync.load(folder) == 5
    alone.train(range(5, 7))


def test_one_file_for_each_machine(tmp_path: Path) -> None:
    group(4).run(on_machines, str(tmp_path))


def on_shards(rank: Rank, folder: str) -> None:
    mesh = mesh_of(2, 2)
    roots = [build(Case(), mesh["shard"]) for _ in range(2)]
    first, second = (attach_shards(root, mesh, "topk", density=0.1) for root in roots)
    for step in range(4):
        usual_step(roots[0], first, step)
    first.save(folder)
    dist.barrier()
    assert len(state_files.find(Path(folder))[4]) == 4
    assert second.load(folder) == 4
    assert torch.equal(owed(first), owed(second))
    # From two replicas of two shards to four of one, whose mean must be the same.
    four = mesh_of(4, 1)
    four_root = build(Case(), four["shard"])
    other = attach_shards(four_root, four, "topk", density=0.1)
    assert other.load(folder) == 4
    state, sharded = other.state_dict(), first.state_dict()
    for key in [key for key in sharded if "/owed/" in key]:
        name = key.partition("/")[2]
        before = sharded[key].full_tensor() / 2
        dist.all_reduce(before, group=mesh.get_group("replicate"))
        after = state[f"rank{rank.rank}/{name}"].full_tensor() / 4
        dist.all_reduce(after)
        assert torch.allclose(after, before, rtol=1e-5, atol=1e-9)
        assert name != "owed/tokens.weight" or before.any()
    usual_step(four_root, other, 4)


def test_one_file_for_each_shard(tmp_path: Path) -> None:
    group(4).run(on_shards, str(tmp_path))
    shutil.rmtree(tmp_path)
