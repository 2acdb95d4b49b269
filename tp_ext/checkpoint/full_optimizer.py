"""Full optimizer states: what an optimizer of the unsharded model would have, from shards and back."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tp_ext.checkpoint.full import StateDict, check_full, full_shape
from tp_ext.checkpoint.gather import check_one_mesh, deal_full, from_first, gather_full, ranks_of, write_full
from tp_ext.group import NOT_GIVEN, Group
from tp_ext.nn.module import Place, locate


def full_optimizer_state_dict(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    group: Group = NOT_GIVEN,
    rank0_only: bool = False,
    cpu_offload: bool = False,
) -> StateDict:
    """The optimizer's state for the unsharded model: ``state`` by parameter name, ``param_groups`` with names for
    parameters. State tensors of a parameter's own shape are sharded as it is.

    Arguments, communication and memory as :func:`full_state_dict`.

    Raises:
        ValueError: the optimizer holds a parameter that is not the module's.
    """
    places = _places(module, optimizer)
    ranks = ranks_of(module, group)
    states: StateDict = {}
    for param, place in places.items():
        entry = {}
        for key, value in optimizer.state.get(param, {}).items():
            full = value
            if isinstance(value, Tensor):
                sharding = place.sharding if _like(value, param) else None
                full = gather_full(value, sharding, ranks, rank0_only=rank0_only)
                full = full.cpu() if full is not None and cpu_offload else full
            entry[key] = full
        if entry:
            states[place.name] = entry
    if rank0_only and not ranks.first:
        return {}
    groups = [{**g, "params": [places[param].name for param in g["params"]]} for g in optimizer.param_groups]
    return {"state": states, "param_groups": groups}


@torch.no_grad()
def load_full_optimizer_state_dict(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any],
    *,
    group: Group = NOT_GIVEN,
    broadcast_from_rank0: bool = False,
) -> None:
    """The inverse of :func:`full_optimizer_state_dict`, at any number of ranks.

    Arguments and communication as :func:`load_full_state_dict`.

    Raises:
        KeyError: ``state`` has no ``state`` or ``param_groups``.
        ValueError: parameter groups that hold other names, or a state tensor of another shape. Nothing has been loaded
            then.
    """
    places = _places(module, optimizer)
    ranks = ranks_of(module, group)
    order = [[places[param].name for param in g["params"]] for g in optimizer.param_groups]
    params = {place.name: param for param, place in places.items()}
    shardings = {place.name: place.sharding for place in places.values()}

    def plan() -> StateDict:
        """The state with, for every tensor that is cut as its parameter is, its dtype."""
        _check(state, order, params, shardings)
        entries = {
            name: {key: v.dtype if _cut(v, params[name]) else v for key, v in entry.items()}
            for name, entry in state["state"].items()
        }
        return {"state": entries, "param_groups": state["param_groups"]}

    if broadcast_from_rank0:
        check_one_mesh(module)
    planned = from_first(plan, ranks) if broadcast_from_rank0 else plan()
    numbers = {name: i for i, name in enumerate(name for names in order for name in names)}
    states: dict[int, dict[str, Any]] = {}
    for name, entry in planned["state"].items():
        states[numbers[name]] = local = dict(entry)
        for key, value in entry.items():
            if isinstance(value, torch.dtype):
                local[key] = made = torch.zeros_like(params[name].detach(), dtype=value)
                if broadcast_from_rank0:
                    full = state["state"][name][key] if ranks.first else None
                    deal_full(full, made, shardings[name], ranks)
                else:
                    write_full(state["state"][name][key], made, shardings[name], ranks.tp)
    groups = [{**g, "params": [numbers[name] for name in g["params"]]} for g in planned["param_groups"]]
    optimizer.load_state_dict({"state": states, "param_groups": groups})


def _check(
    state: Mapping[str, Any], order: list[list[str]], params: Mapping[str, Tensor], shardings: Mapping[str, Any]
) -> None:
    if missing := {"state", "param_groups"} - state.keys():
        raise KeyError(f"state: missing keys {sorted(missing)}, it must be what full_optimizer_state_dict returns")
    saved = [list(g["params"]) for g in state["param_groups"]]
    if order != saved:
        raise ValueError(f"state: parameter groups {saved} must be the optimizer's, {order}")
    for name, entry in state["state"].items():
        if name not in params:
            raise ValueError(f"state: {name!r} must be a parameter of the optimizer, {list(params)}")
        for key, value in entry.items():
            if _cut(value, params[name]):
                check_full(f"{name}.{key}", value, full_shape(params[name], shardings[name]))


def _places(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[Tensor, Place]:
    """The optimizer's parameters, in its order."""
    names = {param: name for name, param in module.named_parameters()}
    places: dict[Tensor, Place] = {}
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        if param not in names:
            raise ValueError(f"optimizer: a parameter of shape {tuple(param.shape)} must be one of the module's")
        places[param] = locate(module, names[param])
    return places


def _like(value: Tensor, param: Tensor) -> bool:
    return value.shape == param.shape


def _cut(value: Any, param: Tensor) -> bool:
    """Whether a full state's value is a tensor like the parameter; one number (a step) is not, unless that is one."""
    return isinstance(value, Tensor) and (value.dim() > 0 or param.dim() == 0)
