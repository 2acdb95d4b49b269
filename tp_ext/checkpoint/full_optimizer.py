"""Full optimizer states: those of an optimizer of the unsharded model, made from shards and loaded into shards."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tp_ext._object_collectives import broadcast_from_first
from tp_ext.checkpoint.full import StateDict, check_full
from tp_ext.checkpoint.gather import check_one_mesh, gather_full, ranks_of, scatter_full, write_full
from tp_ext.checkpoint.optimizer_state import HeldState
from tp_ext.group import NOT_GIVEN, Group
from tp_ext.nn.fqn import resolve_optimizer
from tp_ext.sharding import Layout


def full_optimizer_state_dict(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    group: Group = NOT_GIVEN,
    rank0_only: bool = False,
    cpu_offload: bool = False,
) -> StateDict:
    """Returns the optimizer's state for the unsharded model: ``state`` by parameter name, ``param_groups`` with names
    in place of parameters. State tensors of the shape of their parameter are sharded like it.

    Arguments, communication and memory as :func:`full_state_dict`. Under ``ZeroRedundancyOptimizer``, also one
    exchange of keys over its group, and one broadcast of each shard from the rank that has it.

    Raises:
        ValueError: the optimizer holds a parameter that is not the module's, or keeps its state in another optimizer.
    """
    ranks = ranks_of(module, group)
    resolved = {param: found for param, found, _ in resolve_optimizer(module, optimizer, ranks.groups.default)}
    held = HeldState(optimizer)
    states: StateDict = {}
    for (param, found), described in zip(resolved.items(), held.described(resolved), strict=True):
        entry = {}
        for key, one in described.items():
            full = value = held.fetch(param, key, one)
            if isinstance(value, Tensor):
                layout = found.layout if value.shape == param.shape else Layout()
                full = gather_full(value, layout, ranks, rank0_only=rank0_only)
                full = full.cpu() if full is not None and cpu_offload else full
            entry[key] = full
        if entry:
            states[found.name] = entry
    if rank0_only and not ranks.first:
        return {}
    groups = [{**g, "params": [resolved[param].name for param in g["params"]]} for g in optimizer.param_groups]
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
    """Loads a :func:`full_optimizer_state_dict`, at any number of ranks.

    Arguments and communication as :func:`load_full_state_dict`. Under ``ZeroRedundancyOptimizer`` each rank keeps the
    state of its own parameters.

    Raises:
        KeyError: ``state`` has no ``state`` or ``param_groups``.
        ValueError: parameter groups that hold other names, a state tensor of another shape, or an optimizer that keeps
            its state in another one; then nothing has been loaded.
    """
    ranks = ranks_of(module, group)
    resolved = {param: found for param, found, _ in resolve_optimizer(module, optimizer, ranks.groups.default)}
    order = [[resolved[param].name for param in g["params"]] for g in optimizer.param_groups]
    held = HeldState(optimizer)
    params = {found.name: param for param, found in resolved.items()}
    layouts = {found.name: found.layout for found in resolved.values()}

    def plan() -> StateDict:
        """Returns the state, with its dtype in place of every tensor that is sharded like its parameter."""
        _check(state, order, params, layouts)
        entries = {
            name: {key: v.dtype if _is_sharded(v, params[name]) else v for key, v in entry.items()}
            for name, entry in state["state"].items()
        }
        return {"state": entries, "param_groups": state["param_groups"]}

    if broadcast_from_rank0:
        check_one_mesh(module)
    planned = broadcast_from_first(plan, ranks.axes) if broadcast_from_rank0 else plan()
    states: dict[Tensor, dict[str, Any]] = {}
    for name, entry in planned["state"].items():
        param, local = params[name], dict(entry)
        if held.holds(param):
            states[param] = local
        elif not broadcast_from_rank0:
            continue
        for key, value in entry.items():
            if isinstance(value, torch.dtype):
                local[key] = made = torch.zeros_like(param.detach(), dtype=value)
                if broadcast_from_rank0:
                    full = state["state"][name][key] if ranks.first else None
                    scatter_full(full, made, layouts[name], ranks)
                else:
                    write_full(state["state"][name][key], made, layouts[name])
    held.load(states, planned["param_groups"])


def _check(
    state: Mapping[str, Any], order: list[list[str]], params: Mapping[str, Tensor], layouts: Mapping[str, Layout]
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
            if _is_sharded(value, params[name]):
                check_full(f"{name}.{key}", value, layouts[name].full_shape(params[name].shape))


def _is_sharded(value: Any, param: Tensor) -> bool:
    """Returns whether a value of a full state is a tensor sharded like the parameter. A single number (a step) is not,
    unless the parameter is one."""
    return isinstance(value, Tensor) and (value.dim() > 0 or param.dim() == 0)
