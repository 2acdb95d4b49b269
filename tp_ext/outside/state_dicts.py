"""State dicts of torch over shards: ``module.state_dict()`` and ``optimizer.state_dict()`` hold ordinary local tensors
that can be asked where they belong, and their ``load_state_dict`` refuses the shards of another rank and dense tensors.

These four methods are wrapped (:mod:`tp_ext.outside.wrapped`). Values of other modules pass through; a live entry
(``keep_vars=True``) is untouched. A shard of a parameter of FSDP2 is given as the local tensor, not as the DTensor
whose shape is that of a shard.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from tp_ext.group import ALONE
from tp_ext.model.census import census, declares_shardings_alone
from tp_ext.model.layouts import layouts_of, mirror_layouts
from tp_ext.outside.live_shards import layouts_by_id
from tp_ext.outside.places import (
    TensorPlace,
    found_place,
    held_by,
    is_placed,
    local_of,
    place_of,
    put_place,
)
from tp_ext.sharding import Layout

Original = Callable[..., Any]
_METADATA = "tp_ext"  # key in the metadata of a module, which torch.save keeps
_CHECKPOINTED = "_checkpoint_wrapped_module."  # torch's CheckpointWrapper takes it out of the keys, not of the names
# By id of a parameter, while a function that has the model knows more than the parameters carry
layouts_in_use: dict[int, Layout] = {}


def _placed_value(value: Tensor, live: Tensor, layout: Layout) -> Tensor:
    """Returns the values of a state dict's entry as a new tensor over the same storage, with the place of ``live``."""
    placed = local_of(value)
    put_place(placed, place_of(live, layout))
    return placed


def module_state_dict(original: Original, self: nn.Module, *args: Any, **options: Any) -> Any:
    state = original(self, *args, **options)
    if options.get("keep_vars", args[2] if len(args) > 2 else False):
        return state
    prefix = options.get("prefix", args[1] if len(args) > 1 else "")
    for name, live, layout in held_by(self):
        _place(state, prefix + name, prefix[:-1], name, live, layout)
    if options.get("destination", args[0] if args else None) is None and _lacks_group(self):
        # Of tp_shardings the group is that of the other layers, which this outermost call sees
        for entry in _entries(self):
            _place(state, prefix + entry.key, (prefix + entry.module).rstrip("."), entry.name, entry.live, entry.layout)
    return state


def _place(state: Any, key: str, module: str, name: str, live: Tensor, layout: Layout) -> None:
    """Puts the place of a tensor on the value of a state dict, and in the metadata of its module."""
    value = state.get(key)
    if isinstance(value, Tensor) and value is not live and is_placed(live, layout):
        state[key] = placed = _placed_value(value, live, layout)
        metadata = getattr(state, "_metadata", {}).get(module)
        if metadata is not None:
            metadata.setdefault(_METADATA, {})[name] = (tuple(placed.shape), *(found_place(placed) or ()))


def module_load_state_dict(original: Original, self: nn.Module, state_dict: Any, *args: Any, **options: Any) -> Any:
    if isinstance(state_dict, Mapping):
        state_dict = _to_be_loaded(self, state_dict)
    result = original(self, state_dict, *args, **options)
    for module in self.modules():
        if layouts_of(module):
            mirror_layouts(module)  # with assign=True the parameters are new ones
    return result


def _lacks_group(root: nn.Module) -> bool:
    return any(map(declares_shardings_alone, root.modules()))


class _LiveEntry(NamedTuple):
    key: str
    module: str
    name: str
    live: Tensor
    layout: Layout


def _entries(root: nn.Module) -> Iterator[_LiveEntry]:
    group = census(root).default if _lacks_group(root) else ALONE
    for path, module in root.named_modules(remove_duplicate=False):
        prefix = f"{path}.".replace(_CHECKPOINTED, "") if path else ""
        for name, live, layout in held_by(module, group):
            yield _LiveEntry(prefix + name, path, name, live, layout)


def _to_be_loaded(root: nn.Module, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the state as torch can load it: a local tensor as the DTensor that FSDP2 makes of it. Before anything is
    loaded, raises RuntimeError if an entry is not this rank's shard."""
    metadata, changed = getattr(state, "_metadata", None) or {}, {}
    for key, module, name, live, layout in _entries(root):
        value = state.get(key)
        if not isinstance(value, Tensor):
            continue
        shape, *saved = metadata.get(module, {}).get(_METADATA, {}).get(name, (None,))
        # What has another shape than was saved has been put into the state dict since
        place = found_place(value) or (TensorPlace(*saved) if value.shape == shape else None)
        if place is None:
            loaded = _of_dense(key, value, live, layout, "tp_ext.load_full_state_dict")
            if loaded is not value:
                changed[key] = loaded
        elif (loaded := _checked(key, value, place, live, layout)) is not value:
            changed[key] = loaded
    if not changed:
        return state
    # A new dict: the caller's must not change, and torch reads versions of modules in its metadata
    result = OrderedDict(state)
    result.update(changed)
    result._metadata = metadata  # type: ignore[attr-defined]
    return result


def _of_dense(key: str, value: Tensor, live: Tensor, layout: Layout, instead: str) -> Tensor:
    """Returns an entry for this rank; raises RuntimeError if it can only be the unsharded model's.

    The rank whose shard is the whole cannot see whether it is. So all ranks load it, if there is such a rank."""
    full = layout.full_shape(live.shape)
    if value.shape == live.shape or value.shape != full:
        return value
    on_one_rank = all(sharding.size in sharding.local_sizes(group.size) for sharding, group in layout)
    if on_one_rank and not isinstance(live, DTensor):
        return layout.shard(value)
    raise RuntimeError(
        f"state_dict: {key!r} has shape {tuple(full)}, that of the unsharded model, and must have that of this rank's "
        f"shard, {tuple(live.shape)}: take {instead}"
    )


def _checked(key: str, value: Tensor, saved: TensorPlace, live: Tensor, layout: Layout) -> Tensor:
    """Returns the value of an entry in the form of the live tensor; raises RuntimeError if it is the shard of another
    rank."""
    live_place = place_of(live, layout)
    if saved.chunks != live_place.chunks:
        raise RuntimeError(
            f"state_dict: {key!r} was saved by {saved.held_by or 'an unsharded model'} and is loaded by "
            f"{live_place.held_by or 'an unsharded model'}, which holds other elements: take tp_ext.load_checkpoint, "
            "or tp_ext.load_full_state_dict of a tp_ext.full_state_dict, for which any number of ranks may have saved"
        )
    if isinstance(live, DTensor) and not isinstance(value, DTensor):
        return DTensor.from_local(
            value.detach(), live.device_mesh, live.placements, run_check=False, shape=live.shape, stride=live.stride()
        )
    return value


def _layouts_of_params(optimizer: Optimizer) -> dict[int, Layout]:
    params = (param for group in optimizer.param_groups for param in group["params"])
    return layouts_by_id(params, padded=True) | layouts_in_use


def has_place(value: Any, param: Tensor) -> bool:
    """Returns whether an entry of an optimizer's state has the shape of its parameter, and so its layout."""
    return isinstance(value, Tensor) and value.shape == param.shape


def optimizer_state_dict(original: Original, self: Optimizer) -> Any:
    state = original(self)
    layouts = _layouts_of_params(self)
    groups = zip(state["param_groups"], self.param_groups, strict=True)
    params = chain.from_iterable(zip(saved["params"], live["params"], strict=True) for saved, live in groups)
    for number, param in params:
        layout = layouts.get(id(param), Layout())
        if number in state["state"] and is_placed(param, layout):
            state["state"][number] = {  # not in place: the dict is the optimizer's own
                key: _placed_value(value, value, layout) if has_place(value, param) else value
                for key, value in state["state"][number].items()
            }
    return state


def optimizer_load_state_dict(original: Original, self: Optimizer, state_dict: Any, *args: Any, **options: Any) -> Any:
    if isinstance(state_dict, dict) and state_dict.keys() >= {"state", "param_groups"}:
        layouts, states = _layouts_of_params(self), dict(state_dict["state"])
        groups = zip(state_dict["param_groups"], self.param_groups, strict=False)  # torch compares the lengths
        params = chain.from_iterable(zip(saved["params"], live["params"], strict=False) for saved, live in groups)
        for number, param in params:
            if isinstance(entry := states.get(number), dict):
                layout = layouts.get(id(param), Layout())
                states[number] = {
                    key: _own_state(f"state.{number}.{key}", value, param, layout) for key, value in entry.items()
                }
        state_dict = {**state_dict, "state": states}
    return original(self, state_dict, *args, **options)


def _own_state(key: str, value: Any, param: Tensor, layout: Layout) -> Any:
    place = found_place(value)
    if place is None:
        is_tensor = isinstance(value, Tensor) and value.dim() > 0
        return _of_dense(key, value, param, layout, "tp_ext.load_full_optimizer_state_dict") if is_tensor else value
    loaded = _checked(key, value, place, param.detach(), layout)
    return loaded if isinstance(loaded, DTensor) else loaded.detach()  # the optimizer's own tensors carry no place
