"""FSDP2 between replicas: equal to native HSDP where nothing is cut, and the laws where it is."""

import contextlib
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerators import by_torch
from models import owed
from processes import Rank, group
from sharded import (
    Case,
    attach,
    build,
    local_gradients,
    local_weights,
    mesh_of,
    text,
    usual_step,
)
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import Shard

from topreduce.torch import CommError, Sync, WireError
from topreduce.torch.fsdp import local_part
from topreduce.torch.module_kind import _adapters
from topreduce.torch.process_group import GroupCommunicator

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
BF16_REDUCE = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)


# ---- equal to native HSDP ----------------------------------------------------------------------


def accumulate(model: nn.Module, sync: Sync | None, step: int) -> None:
    model.set_requires_gradient_sync(False)
    for part in (1, 2):
        model(text(dist.get_rank(), step, part)).backward()
    model.set_requires_gradient_sync(True)
    model(text(dist.get_rank(), step)).backward()


def hold(model: nn.Module, sync: Sync | None, step: int) -> None:
    """Reduce-scatter in every micro-batch, all-reduce in the last."""
    if sync is None:
        model.set_requires_all_reduce(False)
        model(text(dist.get_rank(), step, 1)).backward()
        model.set_requires_all_reduce(True)
    else:
        with sync.hold():
            model(text(dist.get_rank(), step, 1)).backward()
    model(text(dist.get_rank(), step)).backward()


def every_micro_batch(model: nn.Module, sync: Sync | None, step: int) -> None:
    for part in range(2):
        model(text(dist.get_rank(), step, part)).backward()


def two_in_one(model: nn.Module, sync: Sync | None, step: int) -> None:
    rank = dist.get_rank()
    (model(text(rank, step)) + model(text(rank, step, 1))).backward()


def without_a_block(model: nn.Module, sync: Sync | None, step: int) -> None:
    model(text(dist.get_rank(), step), (0, 2) if step % 2 else (0, 1, 2)).backward()


def inside(kind: str) -> Any:
    def change(model: nn.Module) -> None:
        for block in model.blocks:
            block.inside = kind

    return change


def around(kind: str) -> Any:
    def change(model: nn.Module) -> None:
        model.around = kind

    return change


def wrap_blocks(model: nn.Module) -> None:
    blocks = set(model.blocks)
    apply_activation_checkpointing(model, check_fn=lambda module: module in blocks)


def freeze(model: nn.Module) -> None:
    model.blocks[1].requires_grad_(False)
    model.blocks[2].norm.requires_grad_(False)


def compile_blocks(model: nn.Module) -> None:
    for block in model.blocks:
        block.compile(backend="aot_eager")


def divide_by(factor: float) -> Any:
    def settle(root: FSDPModule) -> None:
        for module in root.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # Gloo has no PREMUL_SUM
                module.set_gradient_divide_factor(factor)

    return settle


def wide(model: nn.Module) -> None:
    """Even in both dimensions, as Shard(1) wants it."""
    for block in model.blocks:
        block.up, block.down = nn.Linear(7, 8, bias=False), nn.Linear(8, 7, bias=False)
        for linear in (block.up, block.down):
            nn.init.normal_(linear.weight, generator=torch.Generator().manual_seed(1))


def even_second(parameter: nn.Parameter) -> Shard | None:
    return Shard(1) if parameter.dim() == 2 and parameter.shape[1] % 2 == 0 else None


CASES = {
    "fp32": Case(),
    "bf16 parameters": Case(options={"mp_policy": BF16}),
    "bf16 reduction": Case(options={"mp_policy": BF16_REDUCE}, near={"rtol": 0.03, "atol": 2e-4}),
    "offload": Case(options={"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    "accumulation": Case(accumulate),
    "hold": Case(hold, near={"rtol": 1e-5, "atol": 1e-7}),
    "sync in every micro-batch": Case(every_micro_batch, near={"rtol": 1e-5, "atol": 1e-7}),
    "two forward passes": Case(two_in_one),
    "checkpoints inside": Case(change=inside("usual")),
    "reentrant checkpoints inside": Case(change=inside("reentrant")),
    "checkpoints around": Case(change=around("usual")),
    "reentrant checkpoints around": Case(change=around("reentrant")),
    "checkpoint wrappers": Case(change=wrap_blocks),
    "compiled blocks": Case(change=compile_blocks),
    "kept unsharded": Case(options={"reshard_after_forward": False}),
    "resharded": Case(options={"reshard_after_forward": True}),
    "resharded to 2": Case(options={"reshard_after_forward": 2}),
    "frozen": Case(change=freeze),
    "unused everywhere": Case(without_a_block),
    "clipped": Case(clip=0.05),
    "divided by 1": Case(settle=divide_by(1.0)),
    "divided by 3, held": Case(hold, settle=divide_by(3.0), near={"rtol": 1e-5, "atol": 1e-7}),
    "Shard(1)": Case(change=wide, options={"shard_placement_fn": even_second}),
}


STEPS = 3  # the first is watched, the second follows the order that it showed


def equal_native(rank: Rank, names: list[str]) -> None:
    mesh = mesh_of(2, 2)
    for name in names:
        case = CASES[name]
        native, ours = build(case, mesh), build(case, mesh["shard"])
        sync = attach(ours, mesh, "topk", density=1.0, values="fp32")
        optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (native, ours)]
        for step in range(STEPS):
            for model, handle in ((native, None), (ours, sync)):
                model.zero_grad()
                case.step(model, handle, step)
            expected, found = local_gradients(native), local_gradients(ours)
            assert expected.keys() == found.keys()
            for key, theirs in expected.items():
                where, mine = f"{name}, step {step}, {key}", found[key]
                if theirs is None or mine is None:
                    assert theirs is mine is None, where
                elif case.near is None:
                    assert torch.equal(mine, theirs), where
                else:
                    torch.testing.assert_close(mine, theirs, msg=where, **case.near)
            if case.clip:
                norms = [
                    nn.utils.clip_grad_norm_(each.parameters(), case.clip)
                    for each in (native, ours)
                ]
                assert torch.equal(*(norm.full_tensor() for norm in norms))
            for optimizer in optimizers:
                optimizer.step()
            if case.near is not None:
                with torch.no_grad():
                    for mine, theirs in zip(ours.parameters(), native.parameters(), strict=True):
                        local_part(mine).copy_(local_part(theirs))
        if case.near is None:
            assert torch.equal(local_weights(native), local_weights(ours)), name
        assert len(sync.history()) == (2 if case.step is every_micro_batch else 1) * STEPS, name
        sync.detach()


# One of each kind, and the others.
SOME_CASES = [
    *("fp32", "bf16 reduction", "offload", "hold", "two forward passes"),
    *("reentrant checkpoints inside", "resharded", "frozen", "clipped", "Shard(1)"),
]
OTHER_CASES = [name for name in CASES if name not in SOME_CASES]


@pytest.mark.parametrize(
    "names",
    [
        SOME_CASES,
        pytest.param(OTHER_CASES[::2], marks=pytest.mark.long),
        pytest.param(OTHER_CASES[1::2], marks=pytest.mark.long),
    ],
    ids=["some", "others", "still others"],
)
def test_equals_native_hsdp(names: list[str]) -> None:
    group(4).run(equal_native, names)


def odd_meshes(rank: Rank) -> None:
    """Three replicas of one shard, and one replica of three, which has nobody to average with."""
    for replicas, shards in ((3, 1), (1, 3)):
        mesh = mesh_of(replicas, shards)
        native, ours = build(Case(), mesh), build(Case(), mesh["shard"])
        sync = attach(ours, mesh, "topk", density=1.0, values="fp32")
        for step in range(3):
            for model in (native, ours):
                model.zero_grad()
                usual_step(model, None, step)
            expected, found = local_gradients(native), local_gradients(ours)
            for name, theirs in expected.items():
                torch.testing.assert_close(found[name], theirs, rtol=1e-5, atol=1e-7, msg=name)
        assert sync.stats()["messages_inside"] == shards - 1
        assert (sync.stats()["bytes_sent"] > 0) == (replicas > 1)


def test_odd_meshes() -> None:
    group(3).run(odd_meshes)


# ---- the laws where entries are left out -------------------------------------------------------


def alone(model: FSDPModule, step: int) -> dict[str, Tensor]:
    """This rank's shard of what its replica alone would see."""
    with _adapters[model].hold():
        model.zero_grad()
        usual_step(model, None, step)
        found = {name: each for name, each in local_gradients(model).items() if each is not None}
        model.zero_grad()
    return found


def forget(model: FSDPModule) -> None:
    """What was only computed to compare with it was not used."""
    _adapters[model].taker.forget_use()


def keep_the_laws(rank: Rank, settings: dict[str, Any]) -> None:
    mesh = mesh_of(2, 2)
    model = build(Case(), mesh["shard"])
    sync = attach(model, mesh, **settings)
    replicas = mesh.get_group("replicate")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(12):
        own, before = alone(model, step % 3), owed(sync)
        forget(model)
        optimizer.zero_grad()
        loss = model(text(rank.rank, step % 3))
        loss.backward()
        losses.append(loss.item())
        mean = local_gradients(model)
        gradient = torch.cat([own[name].flatten() for name in own]).double()
        settled = before.double() + gradient - owed(sync).double()
        applied = torch.cat([mean[name].flatten() for name in own]).double() * 2
        dist.all_reduce(settled, group=replicas)
        torch.testing.assert_close(settled, applied, rtol=1e-4, atol=1e-6, msg=f"step {step}")
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    stats = sync.stats()
    assert stats["step"] == 11 and stats["bytes_sent"] < 0.5 * 8 * stats["entries"]
    assert stats["messages_inside"] == 1 and 20 < stats["bytes_inside"] < 100
    total = torch.tensor([losses[0] - losses[-1]])
    dist.all_reduce(total)
    assert total > 0
    both = [torch.empty_like(local_weights(model)) for _ in range(2)]
    dist.all_gather(both, local_weights(model), group=replicas)
    assert torch.equal(*both)


@pytest.mark.parametrize("method", ["topk", "ok_topk", "arc_topk"])
def test_keeps_the_laws(method: str) -> None:
    group(4).run(keep_the_laws, {"method": method, "density": 0.1})


def used_by_one_replica(rank: Rank) -> None:
    """Block 1 by replica 0 alone, then by nobody, then by replica 1."""
    mesh = mesh_of(2, 2)
    replica = rank.rank // 2
    model = build(Case(), mesh["shard"])
    sync = attach(model, mesh, "topk", density=1.0, values="fp32")
    for step in range(5):
        used_by = {0: 0, 1: None, 2: 1}[step % 3]
        blocks = (0, 1, 2) if used_by == replica else (0, 2)
        twin = build(Case(), mesh["shard"])
        with torch.no_grad():
            for theirs, mine in zip(twin.parameters(), model.parameters(), strict=True):
                local_part(theirs).copy_(local_part(mine))
        for each in (twin, model):
            each.zero_grad()
            each(text(rank.rank, step), blocks).backward()
        own, mean = local_gradients(twin), local_gradients(model)
        for name, parameter in model.named_parameters():
            mine = own[name]
            used = torch.tensor([mine is not None], dtype=torch.int32)
            dist.all_reduce(used, group=mesh.get_group("replicate"))
            if not used:
                assert mean[name] is None
                continue
            total = torch.zeros_like(local_part(parameter.detach())) if mine is None else mine
            dist.all_reduce(total, group=mesh.get_group("replicate"))
            assert torch.equal(mean[name], total / 2), (step, name)
            assert parameter.grad.placements == parameter.placements
    assert len(sync.history()) == 5


def test_parameters_that_one_replica_uses() -> None:
    group(4).run(used_by_one_replica)


# ---- the vote spans the shards -----------------------------------------------------------------


def infinite_shard(rank: Rank, culprit: int) -> None:
    """After reduce-scatter one rank's shard holds an infinity: nobody commits, all see it."""
    mesh = mesh_of(2, 2)
    model = build(Case(), mesh["shard"])
    sync = attach(model, mesh, "topk", density=0.1)
    usual_step(model, sync, 0)
    debt = owed(sync)
    model.zero_grad()
    with sync.hold():
        usual_step(model, sync, 1)
    if rank.rank == culprit:
        local_part(model.tokens.weight.grad).view(-1)[0] = torch.inf
    usual_step(model, sync, 1)
    assert not sync.stats()["finite"]
    assert torch.equal(owed(sync), debt)
    for name, gradient in local_gradients(model).items():
        assert gradient is not None and gradient.isnan().all(), name
    model.zero_grad()
    usual_step(model, sync, 2)
    assert sync.stats()["finite"] and sync.stats()["step"] == 1
    assert not torch.equal(owed(sync), debt)


def broken_shard(rank: Rank, culprit: int) -> str:
    """One rank's connection to its replicas breaks: the other shard has not committed either."""
    mesh = mesh_of(2, 2)
    model = build(Case(), mesh["shard"])
    sync = attach(model, mesh, "topk", density=0.1)
    usual_step(model, sync, 0)
    debt = owed(sync)
    if rank.rank == culprit:
        GroupCommunicator.close(sync._comm, "pulled the plug")
    with pytest.raises(CommError) as failure:
        usual_step(model, sync, 1)
    assert sync._reducer.step == 1
    assert torch.equal(owed(sync), debt)
    assert all(each is None or not each.any() for each in local_gradients(model).values())
    with pytest.raises(CommError):
        usual_step(model, sync, 1)

    # Densely, since nobody else averages over the replicas.
    sync.detach()
    native = build(Case(), mesh)
    with torch.no_grad():
        for theirs, mine in zip(native.parameters(), model.parameters(), strict=True):
            local_part(theirs).copy_(local_part(mine))
    for case in (usual_step, accumulate, without_a_block):
        for each in (native, model):
            each.zero_grad()
            case(each, None, 3)
        expected, found = local_gradients(native), local_gradients(model)
        for name, theirs in expected.items():
            assert (theirs is None) == (found[name] is None), name
            if theirs is not None:
                torch.testing.assert_close(found[name], theirs)
    sync = attach(model, mesh, "topk", density=0.1)
    with pytest.warns(RuntimeWarning, match="the model was attached before"):
        usual_step(model, sync, 4)
    assert len(sync.history()) == 1
    return str(failure.value)


@pytest.mark.parametrize("culprit", [0, 3])
def test_no_shard_commits_alone(culprit: int) -> None:
    group(4).run(infinite_shard, culprit)
    for rank, message in enumerate(group(4).run(broken_shard, culprit)):
        assert f"rank {rank} (replica {rank // 2} of 2, shard {rank % 2} of 2)" in message, message
        assert "step 1" in message, message


def one_that_waits(rank: Rank) -> str:
    """Rank 3 leaves or is elsewhere, and rank 2, held up by it in FSDP, says nothing: rank 0 waits
    for that one, but hears of it from rank 1."""
    mesh = mesh_of(2, 2)
    messages = []
    for mistake in (
        lambda sync: sync._comm.close("had enough"),
        lambda sync: sync.configure(density=0.5),
    ):
        model = build(Case(), mesh["shard"])
        sync = attach(model, mesh, "topk", density=0.1, timeout=timedelta(seconds=20))
        usual_step(model, sync, 0)
        dist.barrier()
        if rank.rank < 2:
            debt = owed(sync)
            with pytest.raises((CommError, WireError)) as failure:
                usual_step(model, sync, 1)
            assert torch.equal(owed(sync), debt)
            messages.append(str(failure.value))
        elif rank.rank == 3:
            with contextlib.suppress(CommError, WireError):
                mistake(sync)
        dist.barrier()
    assert not any("silent" in message for message in messages), messages
    return " ".join(messages)


def test_nobody_waits_for_one_that_is_held_up() -> None:
    messages = group(4).run(one_that_waits)
    assert "rank 2 is waited for no longer: rank 1 gave up" in messages[0], messages[0]
    assert "rank 3 gave up: had enough" in messages[1], messages[1]
    assert "at different places of the program" in messages[1], messages[1]


def factor_after_detach(rank: Rank) -> None:
    """Means that were multiplied by FSDP's factor are not averaged and multiplied once more."""
    mesh = mesh_of(2, 2)
    model = build(Case(settle=divide_by(4.0)), mesh["shard"])
    sync = attach(model, mesh, "topk", density=1.0, values="fp32")
    sync.detach()
    usual_step(model, sync, 0)
    with pytest.raises(ValueError, match=r"would be multiplied twice.*hold"):
        usual_step(model, sync, 1)
    model.zero_grad()
    hold(model, sync, 2)


def evaluated_before(rank: Rank) -> None:
    """A forward pass without gradients leaves the root whole; attach() cuts it again."""
    mesh = mesh_of(2, 2)
    model = build(Case(), mesh["shard"])
    with torch.no_grad():
        model(text(rank.rank, 0))
    sync = attach(model, mesh, "topk", density=0.1)
    usual_step(model, sync, 0)
    assert len(sync.history()) == 1


def test_before_attach_and_after_detach() -> None:
    group(4).run(evaluated_before)
    group(4).run(factor_after_detach)


def settings_together(rank: Rank) -> None:
    """Changes are for all ranks of all shards; one that differs is told to all."""
    mesh = mesh_of(2, 2)
    model = build(Case(), mesh["shard"])
    sync = attach(model, mesh, "topk", density=0.1)
    usual_step(model, sync, 0)
    sync.configure(density=0.2)
    with pytest.raises(ValueError, match=r"replica 0, shard 1: configure\(density=0.5\)"):
        sync.configure(density=0.5 if rank.rank == 1 else 0.2)
    sync.bypass()
    usual_step(model, sync, 1)
    assert "bypassed" in repr(sync) and f"rank {rank.rank} (replica" in repr(sync)
    sync.compress()
    usual_step(model, sync, 2)
    assert sync.stats()["step"] == 2

    # Different words at attach, on one shard only.
    other = build(Case(), mesh["shard"])
    with pytest.raises(ValueError, match=r"replica 1, shard 1: .*density=0\.3"):
        attach(other, mesh, "topk", density=0.3 if rank.rank % 2 else 0.1)


def test_settings_are_those_of_all_shards() -> None:
    group(4).run(settings_together)


def on_a_device(rank: Rank) -> None:
    """With main memory as the device, where gradients are looked at by torch: the same bits."""
    mesh = mesh_of(2, 2)
    found = []
    for there, how in ((False, contextlib.nullcontext()), (True, by_torch())):
        with how:
            model = build(Case(), mesh["shard"])
            sync = attach(model, mesh, "topk", density=0.1)
        for step in range(3):
            model.zero_grad()
            model(text(rank.rank, step), (0, 2) if rank.rank < 2 else (0, 1, 2)).backward()
        assert sync._reducer.on_device == there
        found.append([each for each in local_gradients(model).values() if each is not None])
        sync.detach()
    assert len(found[0]) == len(list(model.parameters()))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def with_a_scaler(rank: Rank) -> None:
    """Debts are kept without the scale; an overflow on one rank skips the step on all shards."""
    mesh = mesh_of(2, 2)
    models = [build(Case(), mesh["shard"]) for _ in range(2)]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    syncs = [
        attach(models[0], mesh, "topk", density=0.1),
        attach(models[1], mesh, "topk", density=0.1, scaler=scaler),
    ]
    for step in range(3):
        for model in models:
            model.zero_grad()
        usual_step(models[0], syncs[0], step)
        scaler.scale(models[1](text(rank.rank, step))).backward()
        for name, mine in local_gradients(models[1]).items():
            theirs = local_gradients(models[0])[name]
            assert mine is not None and torch.equal(mine / scaler.get_scale(), theirs), name
        assert torch.equal(owed(syncs[0]), owed(syncs[1]))
        scaler._scale = None if scaler._scale is None else scaler._scale * 2


def test_devices_and_scalers() -> None:
    group(4).run(on_a_device)
    group(4).run(with_a_scaler)
