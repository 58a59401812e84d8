"""Which models can be attached: everything that speaks against one, in words that help."""

import torch
from torch.nn.parallel import DistributedDataParallel

REMEDY = "wrap the model in a new DistributedDataParallel and attach to that"


def check_type(ddp: object) -> None:
    """TypeError unless it is a DDP model."""
    if isinstance(ddp, DistributedDataParallel):
        return
    kinds = {each.__name__ for each in type(ddp).__mro__}
    inner = next(
        (
            name
            for name in ("module", "_orig_mod", "_forward_module")
            if isinstance(getattr(ddp, name, None), DistributedDataParallel)
        ),
        None,
    )
    if inner is not None:
        advice = f"attach to the DistributedDataParallel inside it: attach(model.{inner}, ...)"
    elif kinds & {"FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine"}:
        advice = "it shards its gradients, which is not supported; use DistributedDataParallel"
    elif isinstance(ddp, torch.nn.Module) and any(each.is_meta for each in ddp.parameters()):
        advice = (
            "it is on the meta device; give it memory (to_empty) and values, then wrap it: "
            "attach(DistributedDataParallel(model), ...)"
        )
    elif isinstance(ddp, torch.nn.Module):
        advice = "wrap it first: attach(DistributedDataParallel(model), ...)"
    else:
        advice = "pass the model that DistributedDataParallel returned"
    raise TypeError(
        f"attach needs a DistributedDataParallel model, not {type(ddp).__name__}: {advice}"
    )


def check_model(ddp: DistributedDataParallel) -> None:
    """ValueError if DDP averages this model in ways that a hook cannot replace."""
    if getattr(ddp, "_use_python_reducer", False):
        raise ValueError(
            "DDP was made with torch._dynamo.config.optimize_ddp = 'python_reducer', which "
            "averages parameter by parameter and not in buckets: leave optimize_ddp as it is and "
            f"{REMEDY}; torch.compile works with it"
        )
    if ddp.mixed_precision is not None:
        raise ValueError(
            "DDP's mixed_precision= takes the one hook that DDP has: wrap the model without it; "
            "torch.autocast(dtype=torch.bfloat16) around the forward pass, or a model in bfloat16, "
            "computes in the same precision"
        )
    if getattr(ddp, "_delay_all_reduce_params", None):
        raise ValueError(
            "DDP averages the parameters of delay_all_reduce_named_params= by itself, beside its "
            "hook, and does not wait for their mean: wrap the model without it"
        )
    _check_tensor_parallelism(ddp)
    for name, module in ddp.module.named_modules():
        if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.sparse:
            raise ValueError(f"{name} has sparse gradients; build it with sparse=False")


def check_parameter(name: str, parameter: torch.nn.Parameter) -> None:
    if parameter.is_complex():
        raise ValueError(f"{name} is complex; only real parameters can be compressed")
    if parameter.is_meta:
        raise ValueError(f"{name} is on the meta device: give it memory, then wrap the model")


def _check_tensor_parallelism(ddp: DistributedDataParallel) -> None:
    """Parameters that other groups hold as well would get another cut there."""
    cut = [
        name
        for name, parameter in ddp.module.named_parameters()
        # DDP replaces DTensors by their local part, and notes where it came from.
        if type(parameter).__name__ == "DTensor" or hasattr(parameter, "_st_info")
    ]
    if cut:
        more = f" and {len(cut) - 1} more" if len(cut) > 1 else ""
        raise ValueError(
            f"the model is tensor parallel ({cut[0]}{more}): each of its parts would choose other "
            "entries, and parameters that all parts hold would drift apart; use plain DDP, or "
            "no tensor parallelism"
        )
    mesh = getattr(ddp, "device_mesh", None)
    # Nobody is left to drift apart from where DDP has all ranks of the mesh.
    if mesh is not None and mesh._get_root_mesh().size() > ddp.process_group.size():
        names = mesh._get_root_mesh().mesh_dim_names
        raise ValueError(
            f"DDP was given one dimension of a mesh with others ({', '.join(names or ())}). Where "
            "ranks along these hold the same parameters, as with tensor parallelism, they would "
            "drift apart. If they hold none in common, as pipeline stages do, wrap the model with "
            "process_group=mesh.get_group(...) instead of device_mesh="
        )
