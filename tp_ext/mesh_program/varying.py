"""Tensors whose type says along which axes of the mesh they vary.

Inside of a checked map (:func:`tp_ext.spmd`) a tensor that is the same on all ranks of an axis is plain; one that is
not is of a subclass of :class:`Varying`, one for each set of axes. An operator of tensors that vary along different
axes first makes each vary along all of them by ``copy_to_region``, whose backward sums the gradients over the axis. So
the gradient of a value that does not vary is complete, and no value is summed twice. ("Varying manual axes" in JAX.)

The axes are in the type, not in an attribute of the tensor, since ``torch.compile`` follows types.
"""

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from tp_ext import _ops

Axes = Mapping[str, str]
"""Name of an axis -> its group, as operators take it."""

_READS_NUMBERS = {"item", "tolist", "numpy", "__array__", "__contains__", "is_nonzero", "equal", "allclose"}
_READS_NUMBERS |= {"__bool__", "__int__", "__float__", "__index__", "__complex__"}
_IN_PLACE_DUNDERS = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__"}
_IN_PLACE_DUNDERS |= {"__ipow__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__"}
_CHANGES_NO_VALUE = {"requires_grad_", "share_memory_", "rename_"}


class VaryingValueError(RuntimeError):
    """An error of a program on a mesh: a value that varies along an axis stands where it must be the same."""


class Varying(Tensor):
    """A tensor that may differ between the ranks of some axes. Its subclasses name them; see :func:`varying_type`."""

    axes: ClassVar[dict[str, str]] = {}

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _DERIVATIVES:
            return _DERIVATIVES[name](func, args, kwargs)
        leaves, structure = tree_flatten((args, kwargs))
        axes: dict[str, str] = {}
        for leaf in leaves:
            if isinstance(leaf, Varying):
                axes = {**axes, **type(leaf).axes}
        if name in _READS_NUMBERS:
            raise VaryingValueError(
                f"{name}: the value varies along {_listed(axes)}, and a Python number would count as the same on all "
                "ranks; psum or all_gather it first, or use spmd(check=False)"
            )
        if _writes(name, kwargs):
            for target in (args[0] if args else None, kwargs.get("out")):
                if isinstance(target, Tensor) and (missing := [axis for axis in axes if axis not in axes_of(target)]):
                    raise VaryingValueError(
                        f"{name}: the tensor that is written does not vary along {_listed(missing)}, and the value "
                        "does; use the operator out of place, or pvary the tensor first"
                    )
        args, kwargs = tree_unflatten([as_varying(leaf, axes) for leaf in leaves], structure)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        return typed(result, axes) if isinstance(result, Tensor) else tree_map(lambda leaf: typed(leaf, axes), result)


def _writes(name: str, kwargs: Mapping[str, Any]) -> bool:
    in_place = name.endswith("_") and not name.endswith("__") and name not in _CHANGES_NO_VALUE
    return in_place or name in _IN_PLACE_DUNDERS or kwargs.get("out") is not None


def _typed_as_inputs(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
    """Gradients of ``torch.autograd.grad`` vary as the inputs."""
    inputs = args[1] if len(args) > 1 else kwargs["inputs"]
    with torch._C.DisableTorchFunctionSubclass():
        found = func(*args, **kwargs)
    each = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    return tuple(typed(grad, axes_of(one)) for grad, one in zip(found, each, strict=True))


def _without_types(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


_DERIVATIVES = {"grad": _typed_as_inputs, "backward": _without_types}

_types: dict[frozenset[tuple[str, str]], type[Tensor]] = {frozenset(): Tensor}


@torch.compiler.assume_constant_result  # torch.compile does not follow the creation of a type
def varying_type(axes: tuple[tuple[str, str], ...]) -> type[Tensor]:
    """Returns the type of tensors that vary along these axes, given with their groups."""
    key = frozenset(axes)
    if key not in _types:
        _types[key] = type("Varying_" + "_".join(sorted(dict(axes))), (Varying,), {"axes": dict(axes)})
    return _types[key]


def axes_of(value: Any) -> dict[str, str]:
    """Returns the axes along which a value varies; numbers and plain tensors vary along none."""
    return type(value).axes if isinstance(value, Varying) else {}


def plain(value: Tensor) -> Tensor:
    """Returns a view of the tensor without its axes; gradients flow through. A value from outside is viewed before it
    gets axes, since ``torch.compile`` looks its type up in the caller's variable."""
    with torch._C.DisableTorchFunctionSubclass():
        return value.view_as(value)


def typed(value: Any, axes: Axes) -> Any:
    """Returns a tensor as one that varies along these axes and no other; anything else unchanged."""
    if not isinstance(value, Tensor):
        return value
    if isinstance(value, Varying):
        value = plain(value)
    if not axes:
        return value
    found = value.as_subclass(varying_type(tuple(axes.items())))
    if not torch.compiler.is_compiling():
        found.line = _line_of_user()
    return found


def as_varying(value: Any, axes: Axes) -> Any:
    """Returns a tensor as one that varies along these axes, too: the sum of its gradients over them is its gradient."""
    if not isinstance(value, Tensor):
        return value
    known = axes_of(value)
    missing = {axis: group for axis, group in axes.items() if axis not in known}
    if not missing:
        return value
    if value.requires_grad:
        with torch._C.DisableTorchFunctionSubclass():
            for group in missing.values():
                value = _ops.copy_to_region(value, group)
    return typed(plain(value), {**known, **missing})


def _line_of_user() -> str:
    """Returns file and line of the program that is running: the innermost frame outside of torch and this package."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", "tp_ext"):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _listed(axes: Iterable[str]) -> str:
    return ", ".join(map(repr, axes))
