"""Models that attach() refuses, on all ranks or on one of them: all ranks are told at once."""

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Dictated, small_integers
from models import attach_at_once as attach
from processes import Rank, group
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

# ---- tensor parallelism ------------------------------------------------------------------------


def feed_forward() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))


def tensor_parallel(rank: Rank) -> None:
    """Two ranks hold each half of the model's linear layers; the norm is on both of them."""
    mesh = init_device_mesh("cpu", (rank.ranks // 2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"1": ColwiseParallel(), "3": RowwiseParallel()}
    model = parallelize_module(feed_forward(), mesh["tp"], plan)
    assert isinstance(model[1].weight, DTensor)
    ddp = DistributedDataParallel(model, device_mesh=mesh["dp"])
    with pytest.raises(ValueError, match=r"tensor parallel.*\b1\.weight\b.*drift apart"):
        attach(ddp)
    ddp(torch.ones(4, 8)).sum().backward()  # and DDP is as it was
    by_group = parallelize_module(feed_forward(), mesh["tp"], plan)
    _pre_dp_module_transform(by_group)  # what device_mesh= does
    ddp = DistributedDataParallel(by_group, process_group=mesh.get_group("dp"))
    with pytest.raises(ValueError, match=r"tensor parallel.*\b1\.weight\b.*drift apart"):
        attach(ddp)

    # The same group without a mesh: nothing is cut, so nothing is wrong with it.
    whole = DistributedDataParallel(feed_forward(), process_group=mesh.get_group("dp"))
    sync = attach(whole, density=0.5)
    whole(torch.ones(4, 8)).sum().backward()
    assert sync.stats()["step"] == 0

    # Other dimensions of the mesh may share parameters, though no DTensor shows it.
    plain = DistributedDataParallel(feed_forward(), device_mesh=mesh["dp"])
    with pytest.raises(ValueError, match=r"one dimension of a mesh with others.*process_group="):
        attach(plain)

    # Where DDP has all ranks of the mesh there are none that could.
    flat = init_device_mesh("cpu", (rank.ranks,), mesh_dim_names=("dp",))
    single = init_device_mesh("cpu", (rank.ranks, 1), mesh_dim_names=("dp", "tp"))
    for everyone in (flat, mesh["dp", "tp"]._flatten("all"), single["dp"]):
        attach(DistributedDataParallel(feed_forward(), device_mesh=everyone))


def test_tensor_parallelism_is_refused() -> None:
    group(4).run(tensor_parallel)


# ---- ways of DDP that leave no room for a hook -------------------------------------------------


def other_ways(rank: Rank) -> None:
    precision = _MixedPrecision(param_dtype=torch.bfloat16)
    mixed = DistributedDataParallel(feed_forward(), mixed_precision=precision)
    with pytest.raises(
        ValueError, match=r"mixed_precision=.*without it; torch\.autocast.*bfloat16"
    ):
        attach(mixed)

    model = feed_forward()
    delayed = DistributedDataParallel(
        model,
        delay_all_reduce_named_params=[("3.weight", model[3].weight)],
        param_to_hook_all_reduce=model[0].weight,
    )
    with pytest.raises(ValueError, match=r"delay_all_reduce_named_params=.*without it"):
        attach(delayed)

    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        parameter_by_parameter = DistributedDataParallel(feed_forward())
    with pytest.raises(ValueError, match=r"optimize_ddp = 'python_reducer'.*leave optimize_ddp"):
        attach(parameter_by_parameter)

    # Switched on after DDP was made it changes nothing, also not with compiled autograd.
    models = [DistributedDataParallel(feed_forward()) for _ in range(2)]
    sync = attach(models[0], density=1.0)
    batch = torch.full((4, 8), 1.0 + rank.rank)
    models[1](batch).square().mean().backward()
    with torch._dynamo.config.patch(optimize_ddp="python_reducer", compiled_autograd=True):
        torch.compile(models[0], backend="aot_eager")(batch).square().mean().backward()
    assert sync.stats()["step"] == 0
    for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_ways_of_ddp_that_have_no_place_for_a_hook() -> None:
    group(2).run(other_ways)


# ---- a refusal on one rank ---------------------------------------------------------------------


def refuse_alone(rank: Rank) -> None:
    """Rank 1 alone makes a mistake before it is connected; the others hear of it, and why."""
    ddp = DistributedDataParallel(Dictated())
    attached = DistributedDataParallel(Dictated())
    sync = attach(attached)
    if rank.rank != 1:
        sync.detach()
    odd = type("Odd\x1b[31m", (nn.Module,), {})()
    wrong: list[tuple[Any, dict[str, Any], str, str]] = [
        (nn.Linear(2, 2), {}, "TypeError", r"not Linear: wrap it first"),
        (attached, {}, "ValueError", r"attached already: detach\(\) its handle first"),
        (odd, {}, "TypeError", r"not Odd(\x1b|\\x1b)\[31m: wrap"),
        (
            ddp,
            {"method": None},
            "TypeError",
            r'method must be a name such as "topk", not None(\. Correct|$)',
        ),
        (
            ddp,
            {"method": 0.01},
            "TypeError",
            r'as "topk", not 0.01: write density=0.01(\. Correct|$)',
        ),
    ]
    for model, arguments, kind, message in wrong:
        with pytest.raises(
            TypeError if kind == "TypeError" and rank.rank == 1 else ValueError
        ) as e:
            attach(model, **arguments) if rank.rank == 1 else attach(ddp)
        text = str(e.value)
        assert re.search(message, text), text
        if rank.rank != 1:
            assert text.startswith(f"nothing was changed, on any rank: rank 1 refused: {kind}: ")
            assert text.isprintable()
    sync.detach()
    dist.barrier()

    # All are still in step, also if all make the same mistake.
    with pytest.raises(TypeError, match="wrap it first"):
        attach(ddp.module)
    sync = attach(ddp, density=0.1)
    ddp(small_integers(ddp.module, rank.rank, 0)).backward()
    assert sync.stats()["step"] == 0


def refuse_alone_in_a_part_of_the_world(rank: Rank) -> None:
    pair = dist.new_group([0, 2])
    if rank.rank == 1:
        return
    ddp = DistributedDataParallel(Dictated(), process_group=pair)
    sync = attach(ddp)
    if rank.rank == 0:
        sync.detach()
    with pytest.raises(ValueError, match="attached already"):
        attach(ddp)


def refuse_without_a_group(rank: Rank) -> None:
    """Rank 0 has no DDP model, so it speaks to the default group: rank 2 hears it in theirs."""
    pair = dist.new_group([0, 2])
    for _ in range(2):
        if rank.rank == 0:
            with pytest.raises(TypeError, match="not Linear: wrap it first"):
                attach(nn.Linear(2, 2))
        elif rank.rank == 2:
            ddp = DistributedDataParallel(nn.Linear(2, 2), process_group=pair, init_sync=False)
            with pytest.raises(ValueError, match=r"any rank: rank 0 refused: TypeError: .*wrap it"):
                attach(ddp)
    # Nothing of it is left in the meetings of the default group, or of theirs.
    dist.barrier()
    everyone = DistributedDataParallel(Dictated())
    sync = attach(everyone, density=0.1)
    everyone(small_integers(everyone.module, rank.rank, 0)).backward()
    sync.detach()
    if rank.rank != 1:
        attach(DistributedDataParallel(Dictated(), process_group=pair)).detach()


def test_a_refusal_on_one_rank_is_heard_by_all() -> None:
    group(3).run(refuse_alone)
    group(3).run(refuse_alone_in_a_part_of_the_world)
    group(3).run(refuse_without_a_group)
