"""The plan of the last save of each model. The next save takes it, and lists no entry, where only values have changed:
to list many small tensors takes several times as long as to copy them.
"""

import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tp_ext.checkpoint.files.entry_files import saved_option, value_key
from tp_ext.checkpoint.optimizer_state import HeldState
from tp_ext.checkpoint.save_plan import EntrySource, Payload, RankPlan, options_of, plan_of_rank
from tp_ext.checkpoint.sharded import sharded_state
from tp_ext.model.census import Census


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


_PLAIN = frozenset((Tensor, nn.Parameter))
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
            if any(value_key(value) is None for value in options.values()):
                return None
            form.append(([*options], [*map(id, group["params"])]))
            states = [held.of(param) for param in group["params"]]
            form += map(tuple, states)
            tensors += [value for state in states for value in state.values()]
    if not _PLAIN.issuperset(map(type, tensors)) or {t.layout for t in tensors} - {torch.strided}:
        return None
    if {t.is_nested or t.is_quantized for t in tensors} - {False}:
        return None
    # A list of each attribute: a tuple for each tensor takes twice as long
    form += [[*map(id, tensors)], [t.shape for t in tensors], [t.stride() for t in tensors]]
    form += [[t.dtype for t in tensors], [t.device for t in tensors]]
    return _LiveModel(form, tensors, groups)


def _saved_options(group: Mapping[str, Any]) -> tuple[bytes, ...]:
    return tuple(saved_option(value_key(value), value) for value in options_of(group).values())
