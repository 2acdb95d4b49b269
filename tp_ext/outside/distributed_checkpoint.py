"""``torch.distributed.checkpoint`` and its ``state_dict`` functions over shards.

With torch 2.15 its planner asks tensors for their place (``CheckpointableTensor``). Before, it would take each shard
for the whole, so its saves and loads of such tensors are refused. Full states
(``StateDictOptions(full_state_dict=True)``) are those of :func:`tp_ext.full_state_dict` and its companions. The
functions are wrapped where torch looks them up (:mod:`tp_ext.outside.wrapped`).
"""

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as states
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _IncompatibleKeys
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from tp_ext._object_collectives import all_gather_objects
from tp_ext.checkpoint.full import full_state_dict, load_full_state_dict
from tp_ext.checkpoint.full_optimizer import full_optimizer_state_dict, load_full_optimizer_state_dict
from tp_ext.checkpoint.gather import ranks_of
from tp_ext.checkpoint.optimizer_state import HeldState
from tp_ext.model.census import census
from tp_ext.outside.live_shards import live_shards, memory_of
from tp_ext.outside.places import UNKNOWN, found_place, held_by, is_placed, local_of, put_place
from tp_ext.outside.state_dicts import has_place, layouts_in_use

Original = Callable[..., Any]


def has_shards(model: nn.Module) -> bool:
    """Returns whether values of the model's state dict are given a place."""
    return any(is_placed(value.tensor, value.layout) for module in model.modules() for value in held_by(module))


def _other_rank() -> bool:
    return dist.is_initialized() and dist.get_rank() > 0


def copied(original: Original, value: Any, *args: Any, **options: Any) -> Any:
    copy = original(value, *args, **options)
    place = found_place(value)
    # Copies that torch makes, on the CPU for example, have no attributes
    if place is not None and isinstance(copy, Tensor) and copy is not value:
        put_place(copy, place)
    return copy


def get_model(original: Original, model: nn.Module, info: Any) -> Any:
    if not (info.handle_model and info.full_state_dict and has_shards(model)):
        return original(model, info)
    if info.submodule_prefixes:
        raise ValueError(
            "submodules: must not be given for a full state of a sharded model: take tp_ext.full_state_dict"
        )
    # As torch: with cpu_offload rank 0 alone gets the full state
    state = full_state_dict(model, rank0_only=info.cpu_offload, cpu_offload=info.cpu_offload)
    if info.cpu_offload and _other_rank():
        return {}
    if info.ignore_frozen_params:
        keys = [key for key, param in model.named_parameters() if not param.requires_grad]
        frozen = {name for key in keys for name in states._get_fqns(model, key)}
        state = {name: value for name, value in state.items() if name not in frozen}
    return state


def load_model(original: Original, model: nn.Module, state_dict: Any, info: Any) -> Any:
    # Where rank 0 broadcasts, an empty state of another rank is no empty state
    has_state = state_dict or info.broadcast_from_rank0
    if not (info.handle_model and info.full_state_dict and has_state and has_shards(model)):
        return original(model, state_dict, info)
    if info.broadcast_from_rank0:
        state_dict = _on_first_ranks(model, state_dict)
    load_full_state_dict(model, state_dict, strict=info.strict, broadcast_from_rank0=info.broadcast_from_rank0)
    names = census(model).state().keys()
    keys = dict(state_dict).keys() or names  # those of rank 0 are not known on the others
    return _IncompatibleKeys([name for name in names if name not in keys], [key for key in keys if key not in names])


def _on_first_ranks(model: nn.Module, state: Any) -> Any:
    """Returns rank 0's state on the first rank of each replica of the model: torch broadcasts over all ranks of the
    job, and of replicas that no wrapper or mesh shows our functions know nothing.

    Communicates, if the model is on fewer ranks than the job has: an all-gather of objects over all ranks, which make a
    group of the first ranks; over it a broadcast of each tensor.
    """
    ranks = ranks_of(census(model))
    if not dist.is_initialized() or math.prod(axis.size() for axis in ranks.axes) == dist.get_world_size():
        return state
    flags = all_gather_objects(ranks.first, dist.group.WORLD)
    group: Any = dist.new_group([rank for rank, first in enumerate(flags) if first])
    if not ranks.first:
        return {}
    own = dist.get_rank() == 0
    tree = [tree_map_only(Tensor, lambda x: torch.empty_like(x, device="meta"), dict(state)) if own else None]
    dist.broadcast_object_list(tree, group=group, group_src=0)
    values: Iterator[Any] = iter(tree_leaves(dict(state)) if own else ())

    def receive(x: Any) -> Any:
        value: Any = next(values, None)
        if not isinstance(x, Tensor):
            return x
        sent = value.detach().to(ranks.device).contiguous() if own else torch.empty_like(x, device=ranks.device)
        dist.broadcast(sent, group=group, group_src=0)
        return value if own else sent.cpu()  # one tensor at a time is on the device

    received = tree_map(receive, tree[0])
    dist.destroy_process_group(group)
    return received


@contextlib.contextmanager
def _layouts_known(model: nn.Module, optimizers: tuple[Optimizer, ...]) -> Iterator[None]:
    """Within it, optimizers' states have the layouts that the model gives their parameters. Raises ValueError if a
    state has none."""
    known = census(model)
    try:
        for optimizer in optimizers:
            state = HeldState(optimizer)
            if state.group is not None:
                raise ValueError(
                    f"optimizers: {type(optimizer).__name__} must not be given, whose state is on several ranks: take "
                    "tp_ext.save_checkpoint and tp_ext.load_checkpoint"
                )
            for name, param, layout, _, _ in known.optimized(optimizer):
                layouts_in_use[id(param)] = layout
                if is_placed(param, layout):
                    _check_state(name, param, state.of(param))
        yield
    finally:
        layouts_in_use.clear()


def _check_state(name: str, param: Tensor, state: Mapping[str, Any]) -> None:
    for key, value in state.items():
        single = not value.dim() if isinstance(value, Tensor) else not isinstance(value, Mapping | list | tuple)
        if not single and not has_place(value, param):
            raise ValueError(
                f"optimizers: state {key!r} of {name!r} must be a tensor of the shape of the parameter, "
                f"{tuple(param.shape)}, from which its layout is known"
            )


def get_optimizers(original: Original, model: nn.Module, optimizers: tuple[Optimizer, ...], info: Any) -> Any:
    if not (info.handle_optim and has_shards(model)):
        return original(model, optimizers, info)
    for optimizer in optimizers:
        # torch does it later; the states whose places are checked here must exist
        states._init_optim_state(optimizer)
    with _layouts_known(model, optimizers):
        if not info.full_state_dict:
            return original(model, optimizers, info)
    whole: dict[str, Any] = {"state": {}, "param_groups": []}
    for optimizer in optimizers:
        state = full_optimizer_state_dict(model, optimizer, rank0_only=info.cpu_offload, cpu_offload=info.cpu_offload)
        whole["state"].update(state.get("state", {}))
        whole["param_groups"].extend(state.get("param_groups", ()))
    if info.cpu_offload and _other_rank():
        return {}
    return states._flatten_optim_state_dict(whole) if info.flatten_optimizer_state_dict else whole


def load_optimizers(
    original: Original, model: nn.Module, optimizers: tuple[Optimizer, ...], state_dict: Any, info: Any
) -> Any:
    if not (info.handle_optim and has_shards(model)):
        return original(model, optimizers, state_dict, info)
    for optimizer in optimizers:
        states._init_optim_state(optimizer)
    with _layouts_known(model, optimizers):
        if not info.full_state_dict:
            return original(model, optimizers, state_dict, info)
    if info.broadcast_from_rank0:
        state_dict = _on_first_ranks(model, state_dict)
    for optimizer in optimizers:
        # One state dict may be that of several optimizers: each is given its own parameters
        state = state_dict
        if state_dict:
            of_one = states._split_optim_state_dict if "state" in state_dict else None
            state = of_one(model, optimizer, state_dict, info) if of_one else None
            state = state or states._unflatten_optim_state_dict(optimizer, state_dict, info)
        load_full_optimizer_state_dict(model, optimizer, state, broadcast_from_rank0=info.broadcast_from_rank0)
    return None


def save_plan(original: Original, state_dict: Mapping[str, Any], *args: Any) -> Any:
    """Returns the plan of ``dcp.save``. Raises RuntimeError if it would save a shard as the whole tensor."""
    _check_places(state_dict, "dcp.save", "tp_ext.save_checkpoint")
    return original(state_dict, *args)


def load_plan(original: Original, state_dict: Mapping[str, Any], metadata: Any, *args: Any, **options: Any) -> Any:
    """Returns the plan of ``dcp.load``. Raises RuntimeError as :func:`save_plan`, and if the checkpoint lacks elements,
    which would stay as they are: a rank has saved it alone, by ``no_dist=True``."""
    _check_places(state_dict, "dcp.load", "tp_ext.load_checkpoint")
    for key, value in state_dict.items():
        saved = metadata.state_dict_metadata.get(key)
        if isinstance(saved, TensorStorageMetadata) and isinstance(value, Tensor) and not isinstance(value, DTensor):
            _check_elements(key, value, saved)
    return original(state_dict, metadata, *args, **options)


def _check_elements(key: str, value: Tensor, saved: TensorStorageMetadata) -> None:
    place = found_place(value)
    shape = tuple(value.shape) if place is None else place.global_shape
    if shape != tuple(saved.size):
        return  # which torch refuses
    chunks = (
        [((0,) * len(shape), shape)] if place is None else [*zip(place.global_offsets, place.local_sizes, strict=True)]
    )
    wanted = sum(math.prod(sizes) for _, sizes in chunks)
    available = sum(_common(*chunk, other.offsets, other.sizes) for chunk in chunks for other in saved.chunks)
    if available < wanted:
        raise RuntimeError(
            f"state_dict: {key!r} has {wanted} elements here, of which the checkpoint has {available}: all ranks of "
            "the model that was saved must call dcp.save, without no_dist"
        )


def _common(offsets: Sequence[int], sizes: Sequence[int], others: Sequence[int], other_sizes: Sequence[int]) -> int:
    """Returns the number of elements that two chunks have in common."""
    lengths = (
        min(start + size, other + other_size) - max(start, other)
        for start, size, other, other_size in zip(offsets, sizes, others, other_sizes, strict=True)
    )
    return math.prod(max(length, 0) for length in lengths)


def plan_of_safetensors(original: Original, writer: Any, plans: list[Any]) -> Any:
    """Returns the plan of torch's ``HuggingFaceStorageWriter``, whose files have one chunk of a tensor under a name.
    Raises RuntimeError if a rank holds several, of which only the last would be written."""
    for plan in plans:
        name, count = max(
            Counter(item.index.fqn for item in plan.items).items(), key=lambda pair: pair[1], default=("", 0)
        )
        if count > 1:
            raise RuntimeError(
                f"HuggingFaceStorageWriter: {name!r} has {count} chunks on a rank, of which it would write one: take "
                "tp_ext.save_safetensors"
            )
    return original(writer, plans)


def _check_places(state_dict: Mapping[str, Any], name: str, instead: str) -> None:
    live = {memory_of(param) for param, _ in live_shards()}
    for key, value in state_dict.items():
        place = found_place(value)
        # A live parameter, as of named_parameters(): it was in no state dict, which would have given it a place
        # Of one without elements other ranks know; DCP raises on all what one of them does
        if place is None and isinstance(value, Tensor) and local_of(value).numel() and memory_of(value) in live:
            raise RuntimeError(
                f"state_dict: {key!r} is a parameter of a layer, of which this rank has a shard, and {name} would take "
                f"it for the whole tensor: take the values of model.state_dict(), or {instead}"
            )
        if place is not None and place.held_by == UNKNOWN:
            raise RuntimeError(
                f"state_dict: {key!r} is a shard of a tensor of shape {place.global_shape} by tp_shardings, which name "
                f"no group, and {name} cannot know its place: declare it by tp_ext.declare_layouts"
            )
        if place is not None and not hasattr(dcp, "CheckpointableTensor"):  # torch before 2.15
            raise RuntimeError(
                f"state_dict: {key!r} is the shard of {place.held_by}, which {name} of torch {torch.__version__} "
                f"would take for the whole tensor: take {instead}, or torch 2.15"
            )
