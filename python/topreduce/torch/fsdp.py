"""What a rank holds of an FSDP2 model (fully_shard): DTensors on a mesh of one dimension.

FSDP2 itself calls the post-accumulate hooks of the sharded parameters, once their gradients are
reduced, divided, cast and offloaded; so module.py and taker.py serve it as they are.
"""

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from topreduce.torch.eligibility import check_sparse

_LIKE_THIS = (
    "make the model with fully_shard(..., mesh=mesh['shard']), a mesh of one dimension, and attach "
    "with replicas=mesh['replicate']"
)


class FSDPShards:
    """See gradients.Shards."""

    def __init__(
        self, root: torch.nn.Module, parameters: Mapping[str, torch.nn.Parameter], replicas: int
    ) -> None:
        self._names, self._parameters = list(parameters), list(parameters.values())
        self._multiplied: dict[int, weakref.ref[Tensor]] = {}  # gradients, by FSDP's own factor
        self._replicas = float(replicas)
        groups = {id(each): group for group in _groups(root) for each in _parameters_of(group)}
        self._groups = [groups.get(id(parameter)) for parameter in parameters.values()]

    def local(self, tensor: Tensor) -> Tensor:
        return local_part(tensor)

    def gradient(self, parameter: torch.nn.Parameter, local: Tensor) -> Tensor:
        return as_gradient(parameter, local)

    def delivered(self, number: int) -> None:
        """FSDP divides by a factor of the user's, if any, instead of the number of ranks."""
        group, gradient = self._groups[number], self._parameters[number].grad
        if group is not None and group.gradient_divide_factor is not None and gradient is not None:
            local_part(gradient).mul_(self._replicas)
            self._multiplied[number] = weakref.ref(gradient)

    def objection(self) -> str:
        for number, before in self._multiplied.items():
            gradient = self._parameters[number].grad
            if gradient is None or before() is not gradient:
                continue
            if bool(local_part(gradient).any()):
                return (
                    f"{self._names[number]} has an averaged gradient already, and "
                    "set_gradient_divide_factor was called: it would be multiplied twice. Give "
                    "all micro-batches but the last to sync.hold(), or zero_grad() between them"
                )
        return ""


def local_part(tensor: Tensor) -> Tensor:
    """Of a DTensor, in the same memory."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        local: Tensor = tensor.to_local()
        return local


def as_gradient(parameter: torch.nn.Parameter, local: Tensor) -> Tensor:
    """A DTensor that is sharded like the parameter, of which this is the rank's part."""
    assert isinstance(parameter, DTensor)
    whole: Tensor = DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return whole


def reshard(root: torch.nn.Module) -> None:
    """A forward pass without gradients leaves the parameters of the root whole."""
    for module in root.modules():
        if hasattr(module, "_get_fsdp_state"):
            module.reshard()  # type: ignore[operator]


def shard_mesh(root: torch.nn.Module) -> DeviceMesh:
    """The one mesh of all parameters; ValueError if there are others, or other ways to cut them."""
    found: DeviceMesh | None = None
    for name, parameter in root.named_parameters():
        if not isinstance(parameter, DTensor):
            continue
        mesh, placements = parameter.device_mesh, parameter.placements
        if mesh.ndim > 1 and isinstance(placements[0], Replicate):
            raise ValueError(
                f"{name} is on a mesh of {mesh.ndim} dimensions, so FSDP averages over the "
                f"replicas by itself, densely: {_LIKE_THIS}"
            )
        if mesh.ndim > 1:
            raise ValueError(
                f"{name} is also cut or copied over another dimension of its mesh, as with tensor "
                "parallelism: copies that choose other entries would drift apart. Attach to models "
                "that are only sharded"
            )
        if not isinstance(placements[0], Shard):
            raise ValueError(f"{name} is not sharded but {placements[0]}: {_LIKE_THIS}")
        if found is not None and found != mesh:
            raise ValueError(
                f"{name} is sharded over other ranks than the parameters before it; one mesh for "
                "all of them is supported"
            )
        found = mesh
    if found is None:
        raise ValueError(f"no parameter is sharded: {_LIKE_THIS}")
    return found


def check_shards(root: torch.nn.Module, parameters: Mapping[str, torch.nn.Parameter]) -> None:
    """ValueError for parameters that FSDP does not reduce."""
    for name, parameter in parameters.items():
        if not isinstance(parameter, DTensor):
            raise ValueError(
                f"{name} is trained but not sharded, so nobody averages it: fully_shard the root "
                "as well, without ignored_params, or freeze it"
            )
    check_sparse(root)


def _groups(root: torch.nn.Module) -> Iterator[Any]:
    """FSDP's groups of parameters. Torch has no public name for them."""
    for module in root.modules():
        state = getattr(module, "_get_fsdp_state", lambda: None)()
        yield from getattr(state, "_fsdp_param_groups", ())


def _parameters_of(group: Any) -> list[torch.nn.Parameter]:
    return [each.sharded_param for each in group.fsdp_params]
