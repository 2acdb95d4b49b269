"""The state of a sharded model and its optimizer for torch.distributed.checkpoint: every rank gives its boxes of the
full tensors, so what p ranks saved any other number loads, data-parallel or not, and the unsharded model too.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tp_ext.checkpoint.chunked_tensor import BoxTensor
from tp_ext.checkpoint.full import StateDict, entries_of
from tp_ext.chunks import boxes
from tp_ext.group import NOT_GIVEN, Group, parallel_group
from tp_ext.nn.module import locate, model_group
from tp_ext.sharding import Sharding


class Optimized(NamedTuple):
    """A parameter of an optimizer: its name in the unsharded model, how it is cut, and the options of its group."""

    name: str
    param: Tensor
    sharding: Sharding | None
    options: StateDict


@torch.no_grad()
def sharded_state_dict(module: nn.Module, optimizer: Optimizer | None = None, *, group: Group = NOT_GIVEN) -> StateDict:
    """This rank's part of the state, for ``torch.distributed.checkpoint.save`` and ``async_save``.

    ``{"model": {name: tensor}, "optimizer": {"state.<name>.<key>": tensor, "param_groups.<name>.<key>": value}}``, with
    the names, shapes and layouts of the unsharded model: that one loads it by
    ``state = {"model": model.state_dict()}; dcp.load(state, checkpoint_id=path)``. The optimizer's part has the form of
    torch's ``StateDictOptions(flatten_optimizer_state_dict=True)``. The tensors are views of the live ones: saved are
    the values at the moment of saving; of the call, by ``async_save``.

    Args:
        module: with sharded parameters; it may be wrapped by FSDP2 or DistributedDataParallel over data axes, and be
            one stage of a pipeline whose stages use different names.
        optimizer: of parameters of this module.
        group: the tensor-parallel group; default: that of the module's layers.

    Communicates nothing.

    Raises:
        ValueError: a parameter has another shape than its sharding says or is on the meta device, the optimizer holds a
            parameter that is not the module's, or state of a sharded parameter that has another shape than it;
            ``group`` is not that of the module's layers.
    """
    group = model_group(module, group)
    state: StateDict = {"model": {}}
    for name, entry in entries_of(module).items():
        state["model"][name] = entry.value if entry.extra else _sharded(entry.value, entry.sharding, group)
    if optimizer is not None:
        state["optimizer"] = saved = {}
        for one in optimized_params(module, optimizer):
            for key, value in one.options.items():
                saved[f"param_groups.{one.name}.{key}"] = value
            for key, value in optimizer.state.get(one.param, {}).items():
                saved[f"state.{one.name}.{key}"] = sharded_state(key, value, one, group)
    return state


def _sharded(value: Tensor, sharding: Sharding | None, group: Group) -> Tensor:
    _, p, rank = parallel_group(group)
    shape, held = boxes(value, sharding, rank, p)
    if not value.dim():  # one number: stagers take it for no tensor
        return value.detach()
    if not shape.numel():  # nothing that any rank could hold a box of
        return torch.empty(shape, dtype=value.dtype)
    return BoxTensor(shape, held, dtype=value.dtype, device=value.device)


def sharded_state(key: str, value: Any, of: Optimized, group: Group) -> Any:
    """State of the parameter's shape is sharded as the parameter; one number, and state of a replicated parameter, is
    returned as it is."""
    if isinstance(value, dict | list | tuple) or "." in key:
        raise ValueError(f"optimizer: state {key!r} of {of.name!r}, a {type(value).__name__}, must be a tensor")
    if not isinstance(value, Tensor) or (value.dim() == 0 and of.param.dim() > 0):
        return value
    if value.shape != of.param.shape and (of.sharding is not None or type(value) is not type(of.param.data)):
        raise ValueError(
            f"optimizer: state {key!r} of {of.name!r} has shape {tuple(value.shape)} and must have that of the "
            f"parameter, {tuple(of.param.shape)}, by which is known how it is cut"
        )
    return _sharded(value, of.sharding, group)


def optimized_params(module: nn.Module, optimizer: Optimizer) -> list[Optimized]:
    """The parameters of the optimizer, in order. One that is in several places has the name of the first."""
    keys = {param: key for key, param in module.named_parameters()}
    found = []
    for param_group in optimizer.param_groups:
        options = {key: value for key, value in param_group.items() if key not in ("params", "param_names")}
        for param in param_group["params"]:
            if param not in keys:
                raise ValueError(
                    f"optimizer: a parameter of shape {tuple(param.shape)} must be one of the module's; "
                    "under FSDP2 optimizers are made after fully_shard"
                )
            place = locate(module, keys[param])
            found.append(Optimized(place.name, param, place.sharding, options))
    return found
