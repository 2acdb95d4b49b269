"""The state of a sharded model and its optimizer for torch.distributed.checkpoint: every rank provides its chunks of
the full tensors, so any number of ranks, data-parallel or not, and the unsharded model load a save of p ranks.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.optim import Optimizer

from tp_ext.checkpoint.chunked_tensor import ChunkedTensor
from tp_ext.checkpoint.optimizer_state import HeldState
from tp_ext.checkpoint.save_plan import HeldChunks, Options
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
                shared = options[id(param.options)] = Options(param.options)
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


_PLAIN = (Tensor, nn.Parameter)
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
        if type(value) not in _PLAIN:
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
        if self._for_plan and owned and type(value) in _PLAIN:
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
