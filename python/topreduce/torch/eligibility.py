"""Which models can be attached: everything that speaks against one, in words that help."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from topreduce.torch.taker import Taker, TakerHook

HOOKED = (
    "has a post-accumulate hook: it would see this rank's gradient before it is averaged, and an "
    "optimizer in it would let the ranks drift apart. Do that after backward(); to change the "
    "gradients of this rank, use Tensor.register_hook"
)
REMEDY = "wrap the model in a new DistributedDataParallel and attach to that"


def check_type(model: object, group: object, replicas: object) -> None:
    """TypeError or ValueError unless its kind is one that attach() knows, and fits its group."""
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group must be a process group, not {type(group).__name__}")
    if isinstance(model, DistributedDataParallel):
        if group is not None or replicas is not None:
            raise ValueError(
                "DistributedDataParallel has its own process group: attach without group= and "
                "replicas="
            )
        return
    kinds = {each.__name__ for each in type(model).__mro__}
    inner = next(
        (
            name
            for name in ("module", "_orig_mod", "_forward_module")
            if isinstance(getattr(model, name, None), DistributedDataParallel)
        ),
        None,
    )
    if "FSDPModule" in kinds:
        return _check_fsdp2(group, replicas)
    compiled = getattr(model, "_orig_mod", None)
    if replicas is not None and hasattr(type(compiled), "set_requires_gradient_sync"):
        raise ValueError(
            "torch.compile has wrapped the root of FSDP2: attach to that, "
            "attach(model._orig_mod, ...), and go on with the compiled one"
        )
    if replicas is not None and isinstance(model, torch.nn.Module):
        raise ValueError(
            f"replicas= is for FSDP2, and {type(model).__name__} is no root of it: call "
            "fully_shard(model, mesh=mesh['shard']) on the root as well"
        )
    others = kinds & {"FullyShardedDataParallel", "DeepSpeedEngine"}
    if isinstance(model, torch.nn.Module) and group is not None and not others and inner is None:
        return
    if inner is not None:
        advice = f"attach to the DistributedDataParallel inside it: attach(model.{inner}, ...)"
    elif others:
        advice = (
            "it shards its gradients in a way that is not supported; use FSDP2 (fully_shard) with "
            "replicas=, or DistributedDataParallel"
        )
    elif isinstance(model, torch.nn.Module) and any(each.is_meta for each in model.parameters()):
        advice = (
            "it is on the meta device; give it memory (to_empty) and values, then wrap it: "
            "attach(DistributedDataParallel(model), ...)"
        )
    elif isinstance(model, torch.nn.Module):
        advice = (
            "wrap it first: attach(DistributedDataParallel(model), ...), or have it averaged "
            "without: attach(model, ..., group=torch.distributed.group.WORLD)"
        )
    else:
        advice = "pass the model that DistributedDataParallel returned"
    raise TypeError(
        f"attach needs a DistributedDataParallel model, not {type(model).__name__}: {advice}"
    )


def _check_fsdp2(group: object, replicas: object) -> None:
    if group is not None:
        raise ValueError("group= is for modules that are not sharded: attach with replicas=")
    if replicas is None:
        raise ValueError(
            "FSDP adds up gradients within a replica, where entries cannot be left out: attach is "
            "for the mean between replicas. Make the model with fully_shard(..., "
            "mesh=mesh['shard']) and attach with replicas=mesh['replicate']; with one replica "
            "leave it to FSDP"
        )


def check_ddp(ddp: DistributedDataParallel) -> None:
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
    check_sparse(ddp.module)


def check_module(module: torch.nn.Module) -> None:
    """ValueError if something else averages parts of this module, or cuts them."""
    for name, part in module.named_modules():
        kinds = {each.__name__ for each in type(part).__mro__}
        others = kinds & {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}
        if others:
            raise ValueError(
                f"{name or 'the module'} is a {others.pop()}, which averages by itself: attach to "
                "that, or to a module without it"
            )
    cut = [name for name, each in module.named_parameters() if type(each).__name__ == "DTensor"]
    if cut:
        raise ValueError(
            f"{cut[0]} is a DTensor, a part of a tensor: parts that choose other entries would "
            "drift apart; attach to models that are not tensor parallel"
        )
    check_sparse(module)


def check_hooks(parameters: Mapping[str, torch.nn.Parameter], own: Taker | None) -> None:
    """ValueError for parameters whose gradients others want to see before they are averaged.

    `own`: what took the gradients of this module before, and will no longer.
    """
    for name, parameter in parameters.items():
        hooks = (parameter._post_accumulate_grad_hooks or {}).values()
        if is_stepped(parameter) or any(type(hook) is not TakerHook for hook in hooks):
            raise ValueError(f"{name} {HOOKED}")
        takers = {hook.taker() for hook in hooks} - {None, own}
        if takers:
            raise ValueError(
                f"{name} is averaged already, by an earlier attach() to another module that holds "
                "it: attach once, to a module that holds all parameters"
            )


def is_stepped(parameter: torch.nn.Parameter) -> bool:
    """By an optimizer in the backward pass, torch's own way, which has hooks of another kind."""
    return hasattr(parameter, "_in_backward_optimizers")


def check_sparse(module: torch.nn.Module) -> None:
    for name, part in module.named_modules():
        if isinstance(part, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and part.sparse:
            raise ValueError(f"{name} has sparse gradients; build it with sparse=False")


def check_parameter(name: str, parameter: torch.nn.Parameter) -> None:
    if parameter.is_complex():
        raise ValueError(f"{name} is complex; only real parameters can be compressed")
    if parameter.is_meta:
        raise ValueError(
            f"{name} is on the meta device: give it memory (to_empty) and values before attach()"
        )


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
