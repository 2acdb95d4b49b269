"""Copies of models whose code refers to their modules by closures, bound methods and partial functions.

``copy.deepcopy`` copies no functions: ``self.f = lambda x: mlp(x)`` of its copy would call the original's ``mlp``. And
it fails on what cannot be copied, such as scripted functions, which copies here share."""

from __future__ import annotations

import collections
import copy
import functools
import types
from typing import Any

from torch import Tensor, nn

_ATOMS = (type(None), bool, int, float, complex, str, bytes, type)
_CONTAINERS = (dict, collections.OrderedDict, collections.defaultdict)


def copied_model(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """A copy of a model.

    Args:
        memo: id of an object -> what stands for it in the copy: a tensor itself, for one that is shared.
    """
    memo = {} if memo is None else memo
    modules = list(model.modules())
    for module in modules:  # first, so that what refers to modules finds them
        memo[id(module)] = type(module).__new__(type(module))
    for module in modules:
        vars(memo[id(module)]).update({name: _copy(value, memo) for name, value in vars(module).items()})
        vars(memo[id(module)]).pop("_compiled_call_impl", None)  # of module.compile(): it would call the original
    copy_of_model: nn.Module = memo[id(model)]
    return copy_of_model


def copy_of_structure(model: nn.Module) -> nn.Module:
    """A copy of a model that has the same parameters and buffers, not copies of them."""
    tensors = [t for module in model.modules() for t in (*module._parameters.values(), *module._buffers.values())]
    return copied_model(model, {id(t): t for t in tensors if t is not None})


def copied_value(value: Any, memo: dict[int, Any]) -> Any:
    """A copy of what a module has, which refers to what ``memo`` has in place of the model's modules."""
    return _copy(value, memo)


def _copy(value: Any, memo: dict[int, Any]) -> Any:
    if isinstance(value, _ATOMS):
        return value
    if id(value) in memo:
        return memo[id(value)]
    clone: Any
    # Containers and functions are taken apart, since deepcopy would give up a whole one for a lock inside it. Dicts
    # and lists are in the memo before their parts are copied: they may contain themselves
    if isinstance(value, _CONTAINERS) and type(value) in _CONTAINERS:
        clone = value.copy()
        memo[id(value)] = clone
        clone.update({key: _copy(inner, memo) for key, inner in value.items()})
        return clone
    if type(value) is list:
        rows: list[Any] = []
        memo[id(value)] = rows
        rows.extend(_copy(inner, memo) for inner in value)
        return rows
    if type(value) in (tuple, set):
        # In the memo, too: two attributes may share a set
        memo[id(value)] = clone = type(value)(_copy(inner, memo) for inner in value)
        return clone
    if isinstance(value, types.MethodType):
        clone = _copy(value.__self__, memo)
        # What stands for a module may be of another class, with another method
        same_class = type(clone) is type(value.__self__)
        return types.MethodType(value.__func__, clone) if same_class else getattr(clone, value.__name__)
    if type(value) is functools.partial:
        arguments = [_copy(inner, memo) for inner in value.args]
        return functools.partial(
            _copy(value.func, memo), *arguments, **{key: _copy(inner, memo) for key, inner in value.keywords.items()}
        )
    if isinstance(value, types.FunctionType):
        return _function(value, memo)
    tried = dict(memo)  # an object that fails leaves halves of itself and of others behind
    try:
        clone = copy.deepcopy(value, tried)
    except Exception:  # of any kind: scripted functions, locks, process groups
        clone = value.detach().clone() if isinstance(value, Tensor) else value
    else:
        memo.update(tried)
    memo[id(value)] = clone
    return clone


def _function(function: types.FunctionType, memo: dict[int, Any]) -> types.FunctionType:
    """Copies a function: its closure and defaults refer to copies."""
    cells = function.__closure__ or ()
    # It refers to globals alone, which a model and its copy share
    if not cells and not function.__defaults__ and not function.__kwdefaults__:
        return function
    clone = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, tuple(map(_empty, cells))
    )
    # Before its closure is copied: a recursive function refers to itself
    memo[id(function)] = clone
    clone.__kwdefaults__ = _copy(function.__kwdefaults__, memo)
    clone.__defaults__ = _copy(function.__defaults__, memo)
    clone.__dict__.update(function.__dict__)
    for cell, filled in zip(clone.__closure__ or (), cells, strict=True):
        try:
            cell.cell_contents = _copy(filled.cell_contents, memo)
        except ValueError:  # a variable that has no value yet
            continue
    return clone


def _empty(_: Any) -> types.CellType:
    return types.CellType()
