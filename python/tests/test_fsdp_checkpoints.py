"""Checkpoints of sharded models: bit-exact, cut anew, and for another number of replicas."""

import tempfile
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from processes import Rank, group
from sharded import Case, attach, build, local_weights, mesh_of, usual_step
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import topreduce.torch
from topreduce.torch import Sync
from topreduce.torch.sharded_checkpoint import ShardedBook

SETTINGS: list[dict[str, Any]] = [
    {"method": "topk", "density": 0.1},
    {"method": "ok_topk", "density": 0.1, "feedback": "momentum"},
]


class Run:
    def __init__(self, replicas: int, shards: int, settings: dict[str, Any]) -> None:
        self.mesh = mesh_of(replicas, shards)
        self.model: FSDPModule = build(Case(), self.mesh["shard"])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.sync: Sync = attach(self.model, self.mesh, **settings)

    def train(self, steps: range) -> None:
        for step in steps:
            self.optimizer.zero_grad()
            usual_step(self.model, self.sync, step)
            self.optimizer.step()

    def parts(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "sync": self.sync}

    def load(self, folder: str) -> None:
        parts = self.parts()
        dcp.load(parts, checkpoint_id=folder)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=parts["model"],
            optim_state_dict=parts["optimizer"],
        )

    def owed(self) -> dict[str, Tensor]:
        """By this replica, whole; and whatever else is kept by entry."""
        return {
            key.split("/", 1)[1]: value.full_tensor()
            for key, value in self.sync.state_dict().items()
            if isinstance(value, DTensor) and key.count("/") > 1
        }


def same_cut(rank: Rank, settings: dict[str, Any], folder: str) -> None:
    whole, first = Run(2, 2, settings), Run(2, 2, settings)
    whole.train(range(9))
    first.train(range(5))
    dcp.save(first.parts(), checkpoint_id=folder)
    second = Run(2, 2, settings)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        second.load(folder)
        second.train(range(5, 9))
    assert torch.equal(local_weights(second.model), local_weights(whole.model))
    ours, theirs = second.owed(), whole.owed()
    assert ours.keys() == theirs.keys() and len(ours) >= len(list(whole.model.parameters()))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert any(each.any() for each in ours.values())
    states = [each.sync.state_dict() for each in (second, whole)]
    for key, value in states[0].items():
        if "/learnt/" in key:
            assert torch.equal(value, states[1][key])


@pytest.mark.parametrize(
    "settings",
    [pytest.param(SETTINGS[0], marks=pytest.mark.long), SETTINGS[1]],
    ids=lambda s: s["method"],
)
def test_resumes_bit_exact(settings: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        group(4).run(same_cut, settings, folder)


def other_cuts(rank: Rank, settings: dict[str, Any], folder: str) -> None:
    """2 replicas of 2 shards become 1 of 4, 4 of 1, and then 2 of 2 again."""
    run = Run(2, 2, settings)
    run.train(range(4))
    old = run.owed()
    for each in old.values():
        dist.all_reduce(each, group=run.mesh.get_group("replicate"))
        each /= 2
    before = 2
    for replicas, shards in ((1, 4), (4, 1), (2, 2)):
        at = f"{folder}/{replicas}"
        dcp.save(run.parts(), checkpoint_id=at)
        run = Run(replicas, shards, settings)
        state = run.sync.empty_state(before)
        dcp.load({"sync": state}, checkpoint_id=at)
        mine = run.mesh.get_local_rank("replicate")
        run.sync.load_state_dict(topreduce.torch.reshard(state, replicas)[mine])
        parts = run.parts()
        del parts["sync"]
        dcp.load(parts, checkpoint_id=at)
        set_state_dict(
            run.model,
            run.optimizer,
            model_state_dict=parts["model"],
            optim_state_dict=parts["optimizer"],
        )
        now = run.owed()
        for name, each in now.items():
            dist.all_reduce(each, group=run.mesh.get_group("replicate"))
            torch.testing.assert_close(each / replicas, old[name], msg=f"{replicas}, {name}")
        assert run.sync._reducer.step == 4
        before = replicas
    run.train(range(4, 6))
    assert run.sync.stats()["step"] == 5


@pytest.mark.long
def test_another_number_of_shards_and_replicas() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for settings in SETTINGS:
            group(4).run(other_cuts, settings, f"{folder}/{settings['method']}")


def more_shards(rank: Rank, folder: str) -> None:
    """Replicas stay, shards double: through the checkpoint alone, and the debts to the bit."""
    if rank.ranks == 4:
        run = Run(2, 2, SETTINGS[0])
        run.train(range(4))
        dcp.save(run.parts(), checkpoint_id=folder)
        torch.save(run.owed(), f"{folder}/owed{rank.rank // 2}.pt")
        return
    run = Run(2, 4, SETTINGS[0])
    run.load(folder)
    expected = torch.load(f"{folder}/owed{rank.rank // 4}.pt")
    found = run.owed()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    run.train(range(4, 6))
    assert run.sync.stats()["step"] == 5


def test_saved_with_2_shards_loaded_with_4() -> None:
    with tempfile.TemporaryDirectory() as folder:
        group(4).run(more_shards, folder)
        group(8).run(more_shards, folder)


@pytest.mark.parametrize("shards", [1, 3, 40, 48, 100, 256])
def test_every_shard_keeps_what_it_has_learnt(shards: int) -> None:
    """Also where a DTensor of so many rows would leave ranks without any."""
    rows: list[int] = []
    for place in range(shards):
        mesh: Any = SimpleNamespace(size=lambda: shards, get_local_rank=lambda at=place: at)
        own = ShardedBook({}, mesh)._rows()
        assert own
        rows += own
    assert sorted(rows) == list(range(256))


def wrong_states(rank: Rank) -> None:
    run = Run(2, 2, SETTINGS[0])
    run.train(range(2))
    good = run.sync.state_dict()
    mine = f"rank{rank.rank // 2}"
    for bad, words in (
        ({**good, "ranks": 3}, "saved by 3 ranks.*reshard"),
        ({k: v for k, v in good.items() if k != "shards"}, "not a state_dict.. of a sharded model"),
        ({**good, f"{mine}/learnt_names": 1}, "damaged: what its stages learnt"),
        ({k: v for k, v in good.items() if "/learnt/" not in k}, "damaged"),
        (
            {k: v for k, v in good.items() if not k.startswith(mine)},
            f"holds nothing of {mine[:4]} ",
        ),
        ({k: v for k, v in good.items() if "tokens" not in k}, "missing tokens.weight"),
    ):
        with pytest.raises(ValueError, match=words):
            run.sync.load_state_dict(bad)
    run.sync.load_state_dict(good)
    other = Run(1, 4, SETTINGS[0])
    uncut = {k.replace(mine, "rank0"): v for k, v in good.items()} | {"ranks": 1}
    uncut |= {f"rank0/learnt/{row}": torch.zeros(0) for row in range(256)}
    with pytest.raises(ValueError, match=r"with 2 shards, and this run has 4: load it by torch"):
        other.sync.load_state_dict(uncut)
    with pytest.raises(ValueError, match="at least 1"):
        run.sync.empty_state(0)


def test_states_that_do_not_fit() -> None:
    group(4).run(wrong_states)
