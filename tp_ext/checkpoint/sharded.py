"""The state of a sharded model and its optimizer for torch.distributed.checkpoint: every rank provides its chunks of
the full tensors, so any number of ranks, data-parallel or not, and the unsharded model load a save of p ranks.
"""

import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.optim import Optimizer

from tp_ext.checkpoint.chunked_tensor import ChunkedTensor
from tp_ext.checkpoint.files.entry_files import saved_option, value_key
from tp_ext.checkpoint.optimizer_state import HeldState
from tp_ext.checkpoint.save_plan import PLAIN_TENSORS, EntrySource, HeldChunks, Options, Payload, RankPlan, plan_of_rank
from tp_ext.chunks import LocalChunk
from tp_ext.group import NOT_GIVEN, Group
from tp_ext.mesh import mesh_axes
from tp_ext.model.census import Census, OptimizedParameter, census
from tp_ext.model.fqn import StateDict
from tp_ext.model.model_groups import ModelGroups
from tp_ext.model.stages import Stages
from tp_ext.sharding import Layout


def sharded_state_dict(
    module: Stages,
    optimizer: Optimizer | None = None,
    *,
    group: Group = NOT_GIVEN,
    mesh: DeviceMesh | None = None,
) -> StateDict:
    """Returns this rank's share of the state, for ``torch.distributed.checkpoint.save`` and ``async_save``.

    ``{"model": {name: tensor}, "optimizer": {"state.<name>.<key>": tensor, "param_groups.<name>.<key>": value}}``, with
    the names, shapes and layouts of the unsharded model, which loads it by
    ``state = {"model": model.state_dict()}; dcp.load(state, checkpoint_id=path)``. The optimizer's entries have the
    form of torch's ``StateDictOptions(flatten_optimizer_state_dict=True)``. The tensors are views of the live ones:
    ``save`` writes their values at the time of saving, ``async_save`` those at the time of its call.

    Args:
        module: a module with sharded parameters; it may be wrapped by FSDP2 or DistributedDataParallel over data axes,
            and be one stage of a pipeline whose stages use different names, or a list of the stages of this rank.
        optimizer: an optimizer of parameters of this module. Under ``ZeroRedundancyOptimizer`` each rank gives the
            state of its own parameters.
        group, mesh: as for :func:`full_state_dict`; not needed.

    Communicates nothing.

    Raises:
        ValueError: a parameter has another shape than its layout gives or is on the meta device, the optimizer holds
            a parameter that is not the module's or state of a sharded parameter that has another shape than it, or
            keeps its state in another optimizer; ``group`` is not one of the module's. TypeError: an entry is sparse,
            nested or quantized per channel.
    """
    return sharded_state(census(module, mesh_axes(group, mesh)), optimizer)[0]


@torch.no_grad()
def sharded_state(model: Census, optimizer: Optimizer | None, *, for_plan: bool = False) -> tuple[StateDict, list[str]]:
    """Returns :func:`sharded_state_dict`, and the names of the model's entries that no other stage may use.

    Args:
        for_plan: give what ``plan_of_rank`` takes, in a third of the time: ``HeldChunks`` in place of
            :class:`ChunkedTensor`, and :class:`Options` where they can be, under ``param_groups.<name>.``.
    """
    state: StateDict = {"model": {}}
    names = []
    chunks = LocalChunks(model.groups, for_plan=for_plan)
    for name, entry in model.state().items():
        value = entry.value
        if entry.copy_of != name:
            names.append(name)
        if not entry.extra:
            _check_form(name, value)
            # A copy without a name of its own is written by the stage of the original
            value = chunks.entry(value, entry.layout, owned=entry.copy_of != name)
        state["model"][name] = value
    if optimizer is not None:
        optimizer_state = HeldState(optimizer)
        state["optimizer"] = saved = {}
        params = model.optimized(optimizer)
        originals = {param.name for param in params if not param.copy}
        options: dict[int, Options] = {}  # by the id of the group
        for param in params:
            if param.copy and param.name in originals:  # both are on this rank
                continue
            if (shared := options.get(id(param.options))) is None:
                shared = options[id(param.options)] = Options(options_of(param.options))
                shared.group = param.options
            if for_plan and shared.are_plain:
                saved[f"param_groups.{param.name}."] = shared
            else:
                saved.update((f"param_groups.{param.name}.{key}", value) for key, value in shared.items())
            for key, value in optimizer_state.of(param.param).items():
                saved[f"state.{param.name}.{key}"] = shard_optimizer_state(key, value, param, chunks)
    return state, names


def _check_form(name: str, value: Tensor) -> None:
    per_channel = value.is_quantized and value.qscheme() != torch.per_tensor_affine
    if value.layout is not torch.strided or value.is_nested or per_channel:
        form = "quantized" if per_channel else "nested" if value.is_nested else value.layout
        raise TypeError(f"module: {name!r} is a {form} tensor and must be a dense one, of which ranks can hold slices")


_StoredChunk = tuple[
    tuple[int, ...], torch.Size, int, bool
]  # offsets, sizes, begin in the local tensor's storage, owned


_NESTED = (dict, list, tuple)


class LocalChunks:
    """Caches where chunks lie: tensors of equal layout, shape and strides are chunked alike.

    Args:
        for_plan: see :func:`sharded_state`.
    """

    def __init__(self, groups: ModelGroups, *, for_plan: bool = False) -> None:
        self._groups, self._for_plan = groups, for_plan
        self._known: dict[Any, tuple[torch.Size, list[_StoredChunk]]] = {}
        # Numbers of equal layouts, by the layout and, since its hash takes as long as all else, by its id; layouts are
        # the model's, which lives longer
        self._numbers: dict[Layout, int] = {}
        self._number_of: dict[int, int] = {}

    def _places(self, value: Tensor, layout: Layout) -> tuple[torch.Size, list[_StoredChunk]]:
        number = self._number_of.get(id(layout))
        if number is None:
            number = self._number_of[id(layout)] = self._numbers.setdefault(layout, len(self._numbers))
        key = number, value.shape, value.stride()
        known = self._known.get(key)
        if known is None:
            begin = int(value.storage_offset())
            shape, local_chunks = self._groups.local_chunks(value.detach(), layout)
            places = [
                (c.offsets, c.tensor.shape, int(c.tensor.storage_offset()) - begin, c.owned) for c in local_chunks
            ]
            known = self._known[key] = shape, places
        return known

    def of(self, value: Tensor, layout: Layout) -> tuple[torch.Size, list[LocalChunk]]:
        """Returns :meth:`ModelGroups.local_chunks`."""
        # DTensors and other subclasses are cut in ways that shape and strides do not determine
        if type(value) not in PLAIN_TENSORS:
            return self._groups.local_chunks(value, layout)
        shape, places = self._places(value, layout)
        value = value.detach()
        # Most tensors without parallelism: no new view
        if len(places) == 1 and places[0][1] == value.shape:
            return shape, [LocalChunk(places[0][0], value, places[0][3])]
        begin, strides = int(value.storage_offset()), value.stride()
        return shape, [
            LocalChunk(offsets, value.as_strided(sizes, strides, begin + start), owned)
            for offsets, sizes, start, owned in places
        ]

    def entry(self, value: Tensor, layout: Layout, *, owned: bool) -> Any:
        """Returns the entry of a tensor; a single number, and a tensor without elements, as a tensor."""
        if not value.dim():  # stagers do not treat a single number as a tensor
            return value if self._for_plan else value.detach()
        if self._for_plan and owned and type(value) in PLAIN_TENSORS:
            shape, places = self._places(value, layout)
            # Most of them: all that the rank has is one chunk, of which it need not make a view
            if len(places) == 1 and places[0][1] == value.shape and places[0][3]:
                return HeldChunks(shape, [LocalChunk(places[0][0], value, True)], value)
        shape, local_chunks = self.of(value, layout)
        if not shape.numel():  # no rank could hold a chunk of it
            return torch.empty(shape, dtype=value.dtype, device="cpu")
        if not owned:
            local_chunks = [chunk._replace(owned=False) for chunk in local_chunks]
        if self._for_plan:
            return HeldChunks(shape, local_chunks, value)
        return ChunkedTensor(shape, local_chunks, dtype=value.dtype, device=value.device)


def shard_optimizer_state(key: str, value: Any, of: OptimizedParameter, chunks: LocalChunks) -> Any:
    """Returns state of the parameter's shape sharded like the parameter; a single number, and state of a replicated
    parameter, unchanged."""
    # Keys are split at dots at load, and flattening would add others
    if isinstance(value, _NESTED) or "." in key:
        raise ValueError(f"optimizer: state {key!r} of {of.name!r}, a {type(value).__name__}, must be a tensor")
    if not isinstance(value, Tensor) or (value.dim() == 0 and of.param.dim() > 0):
        return value
    if value.shape != of.param.shape and (of.layout or type(value) is not type(of.param.data)):
        raise ValueError(
            f"optimizer: state {key!r} of {of.name!r} has shape {tuple(value.shape)} and must have that of the "
            f"parameter, {tuple(of.param.shape)}, from which its layout is known"
        )
    return chunks.entry(value, of.layout, owned=not of.copy)


# The plan of the last save of each model. The next save takes it, and lists no entry, where only values have changed:
# to list many small tensors takes several times as long as to copy them


class _LiveModel(NamedTuple):
    """A model and its optimizer at a save.

    Attributes:
        form: all that the plan depends on. Objects are in it by their ids: the same ids at the same places are the same
            relations between the objects, whether or not these are the objects of the last save.
        tensors: those of the state dict and of the optimizer's state.
        groups: the parameter groups.
    """

    form: list[object]
    tensors: list[Tensor]
    groups: list[dict[str, Any]]


class _KnownPlan(NamedTuple):
    form: list[object]
    plan: RankPlan
    origins: list[EntrySource]  # their sources are indices of the tensors and, after these, of the groups


_plans: "weakref.WeakKeyDictionary[nn.Module, _KnownPlan]" = weakref.WeakKeyDictionary()


# [Note: the plan of the last save]
@torch.no_grad()
def plan_of_model(model: Census, optimizer: Optimizer | None, *, stages_differ: bool) -> tuple[RankPlan, Payload]:
    """Returns the plan of this rank and the contents of its entries.

    Args:
        stages_differ: whether the stages of a pipeline must have different names.

    Raises:
        ValueError, TypeError: see :func:`sharded_state_dict`.
    """
    root = model.modules[0][1]
    live, known = _live(model, optimizer, stages_differ), _plans.pop(root, None)
    if live is not None and known is not None and known.form == live.form:
        _plans[root] = known
        return known.plan, _contents(known.origins, [*live.tensors, *map(_saved_options, live.groups)])
    state, names = sharded_state(model, optimizer, for_plan=True)
    plan, payload, origins = plan_of_rank(state, names if stages_differ else [], model.axes.pp.rank)
    if live is not None:
        sources = {id(source): index for index, source in enumerate([*live.tensors, *live.groups])}
        # Tensors that a save makes, such as one without elements, are none of them
        if all(origin.source in sources for origin in origins):
            placed = [EntrySource(sources[source], view) for source, view in origins]
            _plans[root] = _KnownPlan(live.form, plan, placed)
    return plan, payload


def _contents(origins: list[EntrySource], sources: list[Any]) -> Payload:
    payload: Payload = []
    for index, view in origins:
        source = sources[index]
        if view is not None:
            sizes, strides, begin = view
            source = source.as_strided(sizes, strides, source.storage_offset() + begin)
        payload.append(source)
    return payload


def _live(model: Census, optimizer: Optimizer | None, stages_differ: bool) -> _LiveModel | None:
    """Returns the live objects; None if a value is no plain tensor, or an option of the optimizer a nested one."""
    form: list[object] = [stages_differ, model.axes[:-1], model.copies, [*model.state_dict]]
    for path, module in model.modules:
        attributes = module.__dict__
        if "tp_shardings" in attributes:  # their group depends on all others
            return None
        form.append((path, type(module), [*attributes.get("tp_layouts", {}).items()]))
    # A group of the same name may be another one, of other ranks
    form.extend((group, group.ranks) for group in dict.fromkeys(model.groups_in_use()) if group.size > 1)
    tensors, groups = [*model.state_dict.values()], list[dict[str, Any]]()
    if optimizer is not None:
        held, groups = HeldState(optimizer), optimizer.param_groups
        for group in groups:
            options = options_of(group)
            if None in map(value_key, options.values()):
                return None
            form.append(([*options], [*map(id, group["params"])]))
            states = [held.of(param) for param in group["params"]]
            form += map(tuple, states)
            tensors += [value for state in states for value in state.values()]
    if not {type(t) for t in tensors}.issubset(PLAIN_TENSORS) or {t.layout for t in tensors} - {torch.strided}:
        return None
    if {t.is_nested or t.is_quantized for t in tensors} - {False}:
        return None
    # A list of each attribute: a tuple for each tensor takes twice as long
    form += [[*map(id, tensors)], [t.shape for t in tensors], [t.stride() for t in tensors]]
    form += [[t.dtype for t in tensors], [t.device for t in tensors]]
    return _LiveModel(form, tensors, groups)


def _saved_options(group: Mapping[str, Any]) -> tuple[bytes, ...]:
    return tuple(saved_option(value_key(value), value) for value in options_of(group).values())


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a parameter group that are saved."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
