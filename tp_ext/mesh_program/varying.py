"""Tensors whose type says along which axes of the mesh they vary.

Inside of a checked map (:func:`tp_ext.spmd`) a tensor that is the same on all ranks of an axis is plain; one that is
not is of a subclass of :class:`Varying`, one for each set of axes. An operator of tensors that vary along different
axes first makes each vary along all of them by ``copy_to_region``, whose backward sums the gradients over the axis. So
the gradient of a value that does not vary is complete, and no value is summed twice. ("Varying manual axes" in JAX.)

The axes are in the type, not in an attribute of the tensor, since ``torch.compile`` follows types.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._functorch import eager_transforms, vmap
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from tp_ext.mesh_program import regions
from tp_ext.mesh_program.escapes import (
    NumbersRead,
    VaryingValueError,
    finds_lengths,
    is_number,
    listed,
    name_of,
    refuse_read,
    refuse_result,
    shown,
)

Axes = Mapping[str, str]
"""Name of an axis -> its group, as operators take it."""

_OPERATORS = (  # torch.compile does not follow those on the left, which are in Python
    (Tensor.__rsub__, torch.rsub),
    (Tensor.__rdiv__, lambda a, b: a.reciprocal() * b),
    (Tensor.__floordiv__, torch.floor_divide),
    (Tensor.__rfloordiv__, lambda a, b: torch.floor_divide(b, a)),
    (Tensor.__rmod__, lambda a, b: torch.remainder(b, a)),
    (Tensor.__pow__, torch.pow),
    (Tensor.__rpow__, lambda a, b: torch.pow(b, a)),
    (Tensor.__ipow__, Tensor.pow_),
    (Tensor.__rlshift__, lambda a, b: torch.bitwise_left_shift(b, a)),
    (Tensor.__rrshift__, lambda a, b: torch.bitwise_right_shift(b, a)),
    (Tensor.__rmatmul__, lambda a, b: torch.matmul(b, a)),
)

_WRAPPING = {eager_transforms: ("_wrap_for_grad", "_unwrap_for_grad"), vmap: ("_add_batch_dim", "_remove_batch_dim")}
_TEXT = {"__repr__", "__str__", "__format__"}
_DUNDERS = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__", "__ifloordiv__", "__imod__"}
_DUNDERS |= {"__ipow__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__", "__set__"}
_BASE = torch._C.TensorBase.__dict__["_base"].__get__
_CHANGES_NO_VALUE = {"requires_grad_", "share_memory_", "rename_"}
_STATISTICS = (  # and the place of running_mean and running_var; then 5 says whether they are updated
    (F.batch_norm, 1),
    (F.instance_norm, 1),
    (torch.batch_norm, 3),
    (torch.instance_norm, 3),
    (torch.native_batch_norm, 3),
)


class Varying(Tensor):
    """A tensor that may differ between the ranks of some axes. Its subclasses name them; see :func:`varying_type`."""

    axes: ClassVar[dict[str, str]] = {}
    line = ""  # file and line that computed it
    lengths = ""  # the operator that found its lengths from values that vary, and its line

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = name_of(func)
        if func == _BASE:
            return _without_types(func, args, kwargs)  # a typed one is a view of it, with a base again: Dynamo asks on
        # Inputs of a derivative meet in no operator, so they need no common axes
        if (derivative := _DERIVATIVES.get(getattr(func, "__name__", ""))) is not None:
            return derivative(func, args, kwargs)
        leaves, structure = tree_flatten((args, kwargs))
        axes: dict[str, str] = {}
        for leaf in leaves:
            if isinstance(leaf, Varying):
                axes = {**axes, **type(leaf).axes}
        if name in _TEXT and not (name == "__format__" and args[1]):
            return _without_types(shown, (args[0], axes), {})
        lengths = lengths_of(leaves)
        refuse_read("item" if name == "__format__" else name, args, axes, lengths)
        refuse_write(func, args, kwargs, axes)
        with torch._C.DisableTorchFunctionSubclass():
            numbers = _reader(name, leaves)
            if finds_lengths(name, args, kwargs, lambda x: isinstance(x, Varying)):
                lengths = _found_lengths(name, axes)
            # They are replaced by varying views, through which an operator could write them unseen
            less = [leaf for leaf in leaves if isinstance(leaf, Tensor) and axes_of(leaf).keys() != axes.keys()]
            unwritten = Unwritten(less) if less else None
        args, kwargs = tree_unflatten([as_varying(leaf, axes) for leaf in leaves], structure)
        with torch._C.DisableTorchFunctionSubclass():
            with numbers or contextlib.nullcontext():
                result = _followed(func)(*args, **kwargs)
            if not torch.compiler.is_compiling():
                refuse_result(name, result, axes, args, lengths)
            if unwritten is not None:
                if not unwritten.intact():
                    raise _written_unseen(name, axes)
                # through a view of it, the next operator would write a value that does not vary
                result = tree_map(lambda leaf: leaf.clone() if unwritten.seen_through(leaf) else leaf, result)
        if numbers is not None and numbers.seen:
            lengths = lengths or _found_lengths(name, axes)
        if isinstance(result, Tensor):
            return typed(result, axes, lengths)
        return tree_map(lambda leaf: typed(leaf, axes, lengths), result)

    def as_subclass(self, cls: type[Tensor]) -> Any:
        """Refuses to take the axes away; else as ``Tensor.as_subclass``."""
        if not issubclass(cls, Varying) or not cls.axes.keys() >= self.axes.keys():
            raise VaryingValueError(
                f"as_subclass: {cls.__name__} must vary along {listed(self.axes)}, as the value does"
            )
        return super().as_subclass(cls)


def _followed(func: Callable[..., Any]) -> Callable[..., Any]:
    if torch.compiler.is_compiling():
        for operator, same in _OPERATORS:
            if func is operator:
                return same
    return func


class FollowAll(TorchFunctionMode):
    """Follows values that vary through functions of torch that do not ask their types: constructors, as in
    ``torch.full(shape, a)``, numbers, as in ``alpha=a``, and setters, as in ``u.data = a``."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if torch.compiler.is_compiling() or not torch._C._is_torch_function_enabled():
            return func(*args, **(kwargs or {}))
        asked = any(issubclass(kind, Varying) for kind in types)
        if not asked and any(isinstance(leaf, Varying) for leaf in tree_leaves((args, kwargs))):
            return Varying.__torch_function__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


def refuse_write(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], axes: Axes) -> None:
    """Raises a VaryingValueError if a function writes what varies along these axes to a tensor that does not."""
    for target in written(func, args, kwargs):
        if missing := [axis for axis in axes if axis not in axes_of(target)]:
            raise _written_unseen(getattr(func, "__name__", ""), missing)


def _written_unseen(name: str, axes: Iterable[str]) -> VaryingValueError:
    return VaryingValueError(
        f"{name}: the tensor that is written does not vary along {listed(axes)}, and the value does; use the operator "
        "out of place, or pvary the tensor first"
    )


def _typed_as_inputs(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
    """Gradients of ``torch.autograd.grad`` vary as the inputs."""
    inputs = args[1] if len(args) > 1 else kwargs["inputs"]
    with torch._C.DisableTorchFunctionSubclass():
        gradients = func(*args, **kwargs)
    each = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    return tuple(typed(grad, axes_of(x)) for grad, x in zip(gradients, each, strict=True))


def _without_types(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


_DERIVATIVES = {"grad": _typed_as_inputs, "backward": _without_types}

_types: dict[frozenset[tuple[str, str]], type[Tensor]] = {frozenset(): Tensor}


@torch.compiler.assume_constant_result  # torch.compile does not follow the creation of a type
def varying_type(axes: tuple[tuple[str, str], ...]) -> type[Tensor]:
    """Returns the type of tensors that vary along these axes, given with their groups."""
    # The order in which axes came must not make two types
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


def typed(value: Any, axes: Axes, lengths: str = "") -> Any:
    """Returns a tensor as one that varies along these axes and no other; anything else unchanged. ``lengths``: see
    :func:`lengths_of`."""
    if not isinstance(value, Tensor):
        return value
    if isinstance(value, Varying):
        if type(value).axes.keys() == axes.keys():
            if lengths:
                value.lengths = lengths
            return value  # itself, as in-place operators return it
        value = plain(value)
    if not axes:
        return value
    varying = Tensor.as_subclass(value, varying_type(tuple(axes.items())))
    if not torch.compiler.is_compiling():
        varying.line = _line_of_user()
        if lengths:
            varying.lengths = lengths
    return varying


def lengths_of(values: Iterable[Any]) -> str:
    """Returns the operator, with its line, that found the lengths of one of these values from others that vary."""
    if torch.compiler.is_compiling():  # it has no such attributes; nothing has a mark there, see __torch_function__
        return ""
    return next((value.lengths for value in values if isinstance(value, Varying) and value.lengths), "")


def _found_lengths(name: str, axes: Axes) -> str:
    if torch.compiler.is_compiling():
        raise VaryingValueError(
            f"{name}: lengths that come from values that vary along {listed(axes)} are not followed under "
            "torch.compile; leave it out of what is compiled"
        )
    return f"{name} of {_line_of_user()}"


def _reader(name: str, leaves: Iterable[Any]) -> NumbersRead | None:
    """Returns what sees an operator that takes a length from a tensor, if one of the leaves may be a length."""
    if torch.compiler.is_compiling() or name == "__getitem__":
        return None
    return NumbersRead() if any(isinstance(leaf, Varying) and is_number(leaf) for leaf in leaves) else None


def as_varying(value: Any, axes: Axes) -> Any:
    """Returns a tensor as one that varies along these axes, too: the sum of its gradients over them is its gradient."""
    if not isinstance(value, Tensor):
        return value
    known, lengths = axes_of(value), lengths_of([value])
    missing = {axis: group for axis, group in axes.items() if axis not in known}
    if not missing:
        return value
    # Without a gradient the value is the same, so it needs no region and no collective
    if value.requires_grad or (not torch.compiler.is_compiling() and regions.differentiated()):
        with torch._C.DisableTorchFunctionSubclass():
            for group in missing.values():
                value = regions.copy_to(value, group)
    return typed(plain(value), {**known, **missing}, lengths)


def _line_of_user() -> str:
    """Returns file and line of the program that is running: the innermost frame outside of torch and this package."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", "tp_ext"):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


@contextlib.contextmanager
def types_in_force(check: bool) -> Iterator[None]:
    """Types go through transforms, and functions that do not ask them, in the block of a checked map.

    ``torch.vmap``, ``grad``, ``vjp`` and ``jvp`` of ``torch.func`` wrap a tensor on its way in and unwrap it on its way
    out, and each time make a plain tensor of it: a value that varies would count as the same on all ranks. So these
    functions are replaced by such that keep the type. Nothing changes for other tensors.
    """
    if not check or torch.compiler.is_compiling():
        yield
        return
    for module, names in _WRAPPING.items():
        for name in names:
            _replace(module, name, _keeping_type)
    _replace(Tensor, "set_", _refusing_source)
    for name in torch.nested.__all__:
        _replace(torch.nested, name, _refusing_varying)
    with FollowAll():
        yield


def _replace(owner: Any, name: str, wrapped: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replaces a function of torch that asks no type, once in a process: for other tensors nothing changes."""
    function = getattr(owner, name)
    if not hasattr(function, "asks_type"):
        function = functools.wraps(function)(wrapped(function))
        function.asks_type = True  # type: ignore[attr-defined]
        setattr(owner, name, function)


def _refusing_source(function: Callable[..., Any]) -> Callable[..., Any]:
    def set_(self: Tensor, source: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(source, Varying):
            axes = axes_of(source)
            refuse_write(function, (self, source), {}, axes)
        return function(self, *(() if source is None else (source,)), *args, **kwargs)

    return set_


def _refusing_varying(function: Callable[..., Any]) -> Callable[..., Any]:
    def refusing(*args: Any, **kwargs: Any) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if axes := axes_of(leaf):
                raise VaryingValueError(
                    f"{function.__name__}: a tensor that varies along {listed(axes)} must be strided, not nested; "
                    "pad it, or use spmd(check=False)"
                )
        return function(*args, **kwargs)

    return refusing


def _keeping_type(function: Callable[..., Any]) -> Callable[..., Any]:
    def keeping(x: Any, *args: Any) -> Any:
        y = function(x, *args)
        return Tensor.as_subclass(y, type(x)) if isinstance(x, Varying) else y

    return keeping


def written(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yields the tensors that a function writes, by its name, before it runs."""
    name = getattr(function, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__") and name not in _CHANGES_NO_VALUE
    targets: list[Any] = [kwargs.get("out")]
    if in_place or name in _DUNDERS:
        targets.append(args[0] if args else (kwargs.get("self"), kwargs.get("input")))
    for norm, place in _STATISTICS:
        if function is norm and (
            args[5] if len(args) > 5 else kwargs.get("training", kwargs.get("use_input_stats", norm is F.instance_norm))
        ):
            targets += [*args[place : place + 2], kwargs.get("running_mean"), kwargs.get("running_var")]
    for leaf in tree_leaves(targets):
        if isinstance(leaf, Tensor):
            yield leaf


def _has_version(x: Tensor) -> bool:
    # Inference tensors and wrappers of transforms have no version to read
    return not x.is_inference() and not is_functorch_wrapped_tensor(x)


class Unwritten:
    """Tensors that an operator must not write. Shows writes that no name says, such as ``max_norm`` of an embedding.

    Neither torch.compile nor the transforms of ``torch.func`` follow versions, so it sees none there.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        seen = [] if torch.compiler.is_compiling() else [x for x in tensors if _has_version(x)]
        self._before = [(x, x._version, x.untyped_storage()._cdata) for x in seen]

    def intact(self) -> bool:
        """Returns whether all are as they were."""
        return all(x._version == version for x, version, _ in self._before)

    def seen_through(self, result: object) -> bool:
        """Returns whether a result is a view of one of them, through which it could be written later."""
        if not self._before or not isinstance(result, Tensor) or is_functorch_wrapped_tensor(result):
            return False
        return result.untyped_storage()._cdata in [storage for _, _, storage in self._before]
