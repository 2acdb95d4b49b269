"""Full optimizer states: those of an optimizer of the unsharded model, made from shards and loaded into shards."""

from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor
from torch.distributed import DeviceMesh
from torch.optim import Optimizer

from tp_ext._object_collectives import broadcast_from_first
from tp_ext.checkpoint.full import check_full
from tp_ext.checkpoint.gather import Ranks, check_one_mesh, gather_full, ranks_of, scatter_full, write_full
from tp_ext.checkpoint.optimizer_state import HeldState, HeldTensor, check_class, copy_of_state
from tp_ext.checkpoint.pipeline import WholeTensor, check_same, from_stage, over_stages, to_stages
from tp_ext.group import NOT_GIVEN, Group
from tp_ext.mesh import mesh_axes
from tp_ext.model.carriers import is_sharded
from tp_ext.model.census import Census, census
from tp_ext.model.fqn import StateDict
from tp_ext.model.stages import Stages
from tp_ext.sharding import Layout


def full_optimizer_state_dict(
    module: Stages,
    optimizer: Optimizer,
    *,
    group: Group = NOT_GIVEN,
    mesh: DeviceMesh | None = None,
    rank0_only: bool = False,
    cpu_offload: bool = False,
) -> StateDict:
    """Returns the optimizer's state for the unsharded model: ``state`` by parameter name, ``param_groups`` with names
    in place of parameters. State tensors of the shape of their parameter are sharded like it.

    Arguments, communication and memory as :func:`full_state_dict`. Under ``ZeroRedundancyOptimizer``, also one
    exchange of keys over its group, and one broadcast of each shard from the rank that has it. The optimizers of the
    stages of a pipeline have the same number of parameter groups with the same options; each group of the result has
    the names of all stages.

    Raises:
        ValueError: the optimizer holds a parameter that is not the module's, or keeps its state in another optimizer;
            the parameter groups of the stages, or the states of the ranks, differ. Others as :func:`full_state_dict`.
    """
    model = census(module, mesh_axes(group, mesh))
    ranks = ranks_of(model)
    own = _agreed(model, optimizer, ranks)
    # The same keys on all ranks, also under ZeRO-1, where others hold the state: each key is a collective below
    described = dict(zip(own.params, own.held.described(own.params.values()), strict=True))
    states_of_rank = _whole_states(described, own, ranks)
    check_same("optimizer", lambda: own.descriptions(states_of_rank), ranks)
    stages = over_stages((own.groups(), states_of_rank), ranks)
    groups = _merged_groups([groups for groups, _ in stages])
    states: StateDict = {}
    for of_stage in (states for _, states in stages):
        for name, entry in of_stage.items():
            if name in states:  # of a copy on another stage
                continue
            state = {}
            for key, value in entry.items():
                state[key] = value
                if isinstance(value, WholeTensor):
                    full = None
                    # Only the ranks of one stage gather; all stages meet in the broadcast along the pipeline
                    if value.stages[0] == ranks.stage:
                        full = own.gather(name, key, described[name][key], rank0_only)
                    full = from_stage(full, value, ranks, rank0_only=rank0_only)
                    state[key] = full.cpu() if full is not None and cpu_offload else full
            if state:
                states[name] = state
    if rank0_only and not ranks.first:
        return {}
    return {"state": states, "param_groups": groups}


@torch.no_grad()
def load_full_optimizer_state_dict(
    module: Stages,
    optimizer: Optimizer,
    state: Mapping[str, Any],
    *,
    group: Group = NOT_GIVEN,
    mesh: DeviceMesh | None = None,
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
    model = census(module, mesh_axes(group, mesh))
    ranks = ranks_of(model)
    own = (_agreed if broadcast_from_rank0 else _Own)(model, optimizer, ranks)
    # The state is that of the whole model: a stage knows the names and shapes of the others by this exchange alone
    whole = {name for name, layout in own.layouts.items() if not is_sharded(layout)}
    stages = over_stages((own.order, {name: own.full_shape(name) for name in own.params}, whole), ranks)
    order = _merged_names([names for names, _, _ in stages])
    shapes = {name: shape for _, of_stage, _ in stages for name, shape in of_stage.items()}
    holders = {name: tuple(i for i, (_, of_stage, _) in enumerate(stages) if name in of_stage) for name in shapes}
    whole = {name for _, _, of_stage in stages for name in of_stage}

    def plan() -> StateDict:
        """Returns the state, with its dtype in place of every tensor that is sharded like its parameter."""
        _check(state, order, shapes, whole)
        for index, (live, group) in enumerate(zip(optimizer.param_groups, state["param_groups"], strict=True)):
            check_class(own.held, live, group, f"param_groups[{index}]")
        entries = {
            name: {key: v.dtype if _is_sharded(v, shapes[name], name in whole) else v for key, v in entry.items()}
            for name, entry in state["state"].items()
        }
        return {"state": entries, "param_groups": state["param_groups"]}

    if broadcast_from_rank0 and mesh is None:  # by mesh= it is known which rank is the first
        check_one_mesh(model)
    # The first rank checks for all, so that they raise together; who has the state itself raises before it sends
    planned = broadcast_from_first(plan, ranks.axes) if broadcast_from_rank0 else plan()
    states: dict[Tensor, dict[str, Any]] = {}
    for name, entry in planned["state"].items():
        param, local = own.params.get(name), copy_of_state(entry)  # its steps would be counted in the given state
        if param is not None and own.held.holds(param):  # under ZeRO-1 each rank keeps a part
            states[param] = local
        elif not broadcast_from_rank0:  # with a broadcast it takes part all the same, and passes shards on
            continue
        for key, value in entry.items():
            if not isinstance(value, torch.dtype):  # a step or a factor: came with the plan
                continue
            source: Any = state["state"][name][key] if ranks.first or not broadcast_from_rank0 else None
            if broadcast_from_rank0:
                source = to_stages(source, WholeTensor(holders[name], shapes[name], value, ranks.device.type), ranks)
            if param is not None:
                # Of the dtype that was saved, not the parameter's: fp32 states of bf16 parameters
                local[key] = target = torch.zeros_like(param.detach(), dtype=value)
                if broadcast_from_rank0:
                    scatter_full(source, target, own.layouts[name], ranks)
                else:
                    write_full(source, target, own.layouts[name])
    for param, name in own.copies:  # a tied weight's copy has a state of its own in this optimizer
        states[param] = copy_of_state(states.get(own.params[name], {}))
    own.held.load(states, planned["param_groups"])


def with_names(saved: Any, names: list[list[str]], where: str) -> StateDict:
    """Returns a state of ``torch.optim``, as a file has it, with names in place of the numbers of parameters, which
    follow one another in its parameter groups.

    Args:
        names: of the parameters of each group. where: the beginning of each message, with the file.

    Raises:
        ValueError: it is no such state, or has other numbers of parameters.
    """
    groups = saved.get("param_groups") if isinstance(saved, dict) else None
    # The file may be anybody's: each part is checked before it is read
    if not (
        isinstance(groups, list)
        and all(isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups)
        and isinstance(saved.get("state"), dict)
        and all(isinstance(entry, dict) for entry in saved["state"].values())
    ):
        raise ValueError(f"{where} must have the state of an optimizer, with the dicts 'state' and 'param_groups'")
    lengths = [len(group) for group in names], [len(group["params"]) for group in groups]
    if lengths[0] != lengths[1]:
        raise ValueError(f"{where} is of another optimizer: sizes of parameter groups {lengths[1]}, here {lengths[0]}")
    numbers = [number for group in groups for number in group["params"]]
    # A number that occurs twice would give one state to two parameters
    if not all(isinstance(number, int) for number in numbers) or len(set(numbers)) < len(numbers):
        raise ValueError(f"{where} must have each parameter of its optimizer once, as a number")
    name_of = dict(zip(numbers, [name for group in names for name in group], strict=True))
    if unknown := [number for number in saved["state"] if number not in name_of]:
        raise ValueError(f"{where} has a state of the parameter {unknown[0]!r:.200}, which no parameter group has")
    named = [{**group, "params": parameters} for group, parameters in zip(groups, names, strict=True)]
    return {"state": {name_of[number]: entry for number, entry in saved["state"].items()}, "param_groups": named}


class _Own:
    """The parameters of this rank's optimizer, by their names in the unsharded model, and those that are copies of
    another one of them."""

    def __init__(self, model: Census, optimizer: Optimizer, ranks: Ranks) -> None:
        self.ranks, self.held = ranks, HeldState(optimizer)
        self.params: dict[str, Tensor] = {}
        self.layouts: dict[str, Layout] = {}
        self.order: list[list[str]] = []  # names, by group
        self.copies: list[tuple[Tensor, str]] = []
        names: dict[Tensor, str] = {}
        params = model.optimized(optimizer)
        originals = {param.name for param in params if not param.copy}
        for name, param, layout, _, copy in params:
            names[param] = name
            # Both on this rank, as in one process: one state in the file is that of both
            if copy and name in originals:
                self.copies.append((param, name))
            else:
                self.params[name], self.layouts[name] = param, layout
        groups = [[names[param] for param in group["params"]] for group in optimizer.param_groups]
        self.order = [list(dict.fromkeys(group)) for group in groups]

    def full_shape(self, name: str) -> torch.Size:
        return self.layouts[name].full_shape(self.params[name].shape)

    def descriptions(self, states: Mapping[str, StateDict]) -> dict[str, str]:
        """Returns what :func:`check_same` compares: of the parameters, and of the tensors of their states."""
        described = {name: f"of shape {tuple(self.full_shape(name))}" for name in self.params}
        for name, entry in states.items():
            for key, value in entry.items():
                if isinstance(value, WholeTensor):
                    described[f"{name}.{key}"] = f"of shape {tuple(value.shape)}, {value.dtype}"
        return described

    def layout_of(self, name: str, value: Tensor | HeldTensor) -> Layout:
        """Returns the layout of a state tensor: the parameter's, if it has its shape."""
        # State of another shape, such as Adafactor's rows and columns, is no shard of a known layout
        return self.layouts[name] if value.shape == self.params[name].shape else Layout()

    def groups(self) -> list[StateDict]:
        """Returns the options of the parameter groups, with names in place of parameters."""
        groups = self.held.outer.param_groups
        return [{**group, "params": names} for group, names in zip(groups, self.order, strict=True)]

    def gather(self, name: str, key: str, value: Any, rank0_only: bool) -> Tensor | None:
        """Returns the full tensor of an entry of the state."""
        local = self.held.fetch(self.params[name], key, value)
        return gather_full(local, self.layout_of(name, local), self.ranks, rank0_only=rank0_only)


def _agreed(model: Census, optimizer: Optimizer, ranks: Ranks) -> _Own:
    """Returns the parameters of the optimizer, which are the same on all ranks of a stage. Communicates and raises as
    :func:`check_same`."""
    made: list[_Own] = []

    def describe() -> dict[str, str]:
        made.append(_Own(model, optimizer, ranks))
        return made[0].descriptions({})

    check_same("optimizer", describe, ranks)
    return made[0]


def _whole_states(described: Mapping[str, Mapping[str, Any]], own: _Own, ranks: Ranks) -> dict[str, StateDict]:
    """Returns the state of each parameter with a :class:`WholeTensor` in place of each tensor."""

    def whole(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor | HeldTensor):
            return value
        device = value.device if isinstance(value, Tensor) else own.params[name].device
        shape = own.layout_of(name, value).full_shape(value.shape)
        return WholeTensor((ranks.stage,), shape, value.dtype, device.type)

    return {name: {key: whole(name, value) for key, value in entry.items()} for name, entry in described.items()}


def _merged_groups(stages: Sequence[Sequence[StateDict]]) -> list[StateDict]:
    """Returns the parameter groups of the whole model from each stage's groups."""
    # Without a pipeline options may be anything that the optimizer takes
    if len(stages) == 1:
        return list(stages[0])
    merged = _merged_names([[group["params"] for group in groups] for groups in stages])
    for stage, groups in enumerate(stages):
        for index, (first, group) in enumerate(zip(stages[0], groups, strict=True)):
            for key in (first.keys() | group.keys()) - {"params", "param_names"}:
                a, b = first.get(key), group.get(key)
                if not isinstance(a, Tensor) and a != b:
                    raise ValueError(
                        f"optimizer: option {key!r} of its parameter group {index} must be the same in all stages, and "
                        f"is {a!r} in the first, {b!r} in stage {stage} of the pipeline"
                    )
    options = [{key: value for key, value in group.items() if key != "param_names"} for group in stages[0]]
    return [{**group, "params": names} for group, names in zip(options, merged, strict=True)]


def _merged_names(stages: Sequence[Sequence[Sequence[str]]]) -> list[list[str]]:
    """Returns the names in each parameter group of the whole model, from each stage's names."""
    counts = [len(groups) for groups in stages]
    if len(set(counts)) > 1:
        raise ValueError(f"optimizer: the stages must have the same number of parameter groups, and have {counts}")
    return [list(dict.fromkeys(name for names in group for name in names)) for group in zip(*stages, strict=True)]


def _check(state: Mapping[str, Any], order: list[list[str]], shapes: Mapping[str, torch.Size], whole: Set[str]) -> None:
    if missing := {"state", "param_groups"} - state.keys():
        raise KeyError(f"state: missing keys {sorted(missing)}, it must be what full_optimizer_state_dict returns")
    saved = [list(g["params"]) for g in state["param_groups"]]
    if [sorted(names) for names in order] != [sorted(names) for names in saved]:
        raise ValueError(f"state: parameter groups {saved} must be the optimizer's, {order}")
    for name, entry in state["state"].items():
        if name not in shapes:
            raise ValueError(f"state: {name!r} must be a parameter of the optimizer, {list(shapes)}")
        for key, value in entry.items():
            if _is_sharded(value, shapes[name], name in whole):
                check_full(f"{name}.{key}", value, shapes[name])


def _is_sharded(value: Any, shape: torch.Size, whole: bool) -> bool:
    """Returns whether a value of a full state is a tensor sharded like the parameter. A single number (a step) is not,
    unless the parameter is one, nor is one of rows or columns of a ``whole`` parameter (Adafactor's)."""
    if not isinstance(value, Tensor) or (value.dim() == 0 and len(shape) > 0):
        return False
    factor = len(shape) == value.dim() and all(size in (1, full) for size, full in zip(value.shape, shape, strict=True))
    return value.shape == shape or not (whole and factor)
