"""Results of operators on fakes, by what their arguments are: in a model of equal layers nearly all operators are those
of the first one, and to ask torch for their results takes most of the time of a run."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

CPU = torch.device("cpu")
DEVICE = "prim::device"
IMPLICIT = torch._C.DispatchKey.CompositeImplicitAutograd  # it may make a view or none
MAX_KNOWN = 50_000
VALUES = frozenset(
    {type(None), bool, int, float, str, torch.dtype, torch.layout, torch.memory_format, torch.device}
)  # by which a result differs, next to the tensors
ResultForm = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, int | None]  # its offset; None: no view
_UNKNOWN = object()
_known: dict[Any, tuple[bool, list[ResultForm]]] = {}  # of all runs: whether results are a tuple, and their forms


def device_of(func: Any, args: Sequence[Any]) -> torch.device | None:
    """Returns what the most frequent operator answers, a question of torch's own code on a fake; None: another one."""
    is_question = func.namespace == "prim" and func._schema.name == DEVICE
    if not is_question or type(args[0]) is not FakeTensor or args[0].fake_mode.in_kernel_invocation:
        return None
    device: torch.device = args[0].fake_device
    return device


class KnownResults:
    """Calls operators on fakes without symbols; those that are known, without torch."""

    def __init__(self, fakes: FakeTensorMode) -> None:
        self.fakes = fakes

    def __call__(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if not _is_plain(func):
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunction():  # by which each question on a tensor would be a call of the model's code
            key = self._key((*args, *kwargs.items()))
        if key is _UNKNOWN:
            return func(*args, **kwargs)
        key = func, torch.get_default_dtype(), key
        if (known := _known.get(key)) is not None:
            is_tuple, forms = known
            with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
                results = tuple(FakeTensor(self.fakes, _made(form, args[0]), CPU) for form in forms)
            return results if is_tuple else results[0]
        result = func(*args, **kwargs)
        results = result if isinstance(result, tuple) else (result,)
        with torch._C.DisableTorchFunction():
            arguments = [args[0]] if func.is_view else tree_leaves((args, kwargs))
            memory = {_memory(x) for x in arguments if isinstance(x, Tensor)}
            if len(_known) < MAX_KNOWN and all(self._has_form(x, memory, func.is_view) for x in results):
                _known[key] = isinstance(result, tuple), [_form(x, func.is_view) for x in results]
        return result

    def _key(self, value: Any) -> Any:
        """Returns the part of an argument that decides on the results; ``_UNKNOWN``: there may be other parts."""
        kind = type(value)
        if kind in VALUES:
            return kind, value
        if kind is FakeTensor:
            return _form(value, True) if self._is_ordinary(value) else _UNKNOWN
        if kind in (list, tuple):
            keys = [self._key(inner) for inner in value]
            return _UNKNOWN if _UNKNOWN in keys else (kind, *keys)
        return _UNKNOWN

    def _is_ordinary(self, fake: FakeTensor) -> bool:
        is_ordinary: bool = (
            fake.fake_mode is self.fakes
            and fake.fake_device == CPU
            and fake.constant is None
            and Tensor.layout.__get__(fake) is torch.strided  # type: ignore[attr-defined]
            and not fake.dtype.is_complex  # conjugates are views with a mark
            and not fake.is_neg()
        )
        return is_ordinary

    def _has_form(self, result: Any, memory: Collection[int], is_view: bool) -> bool:
        """True for a tensor that its form describes: it has its own memory, or is a view of an argument."""
        return (
            type(result) is FakeTensor
            and self._is_ordinary(result)
            and (is_view or not result.storage_offset())
            and not result.requires_grad
            and (_memory(result) in memory) == is_view
        )


def _form(x: Tensor, is_view: bool) -> ResultForm:
    return tuple(x.shape), x.stride(), x.dtype, int(x.storage_offset()) if is_view else None


def _made(form: ResultForm, viewed: Any) -> Tensor:
    """A tensor on meta of a form; as torch makes those of its own cache."""
    shape, stride, dtype, offset = form
    if offset is None:
        return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    return torch.empty((), dtype=dtype, device="meta").set_(viewed.untyped_storage(), offset, shape, stride)


def _memory(x: Tensor) -> int:
    memory: int = x.untyped_storage()._cdata
    return memory


@functools.cache
def _is_plain(func: Any) -> bool:
    """True for an operator of torch that makes new tensors of the forms that those of its arguments decide."""
    schema = func._schema
    changing = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
    return (
        func.namespace == "aten"
        and not schema.is_mutable
        and bool(schema.returns)
        and all(str(value.type) == "Tensor" and (value.alias_info is None) != func.is_view for value in schema.returns)
        and not (func.is_view and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), IMPLICIT))
        and "as_strided" not in schema.name  # which reads how large the memory is
        and not changing.intersection(func.tags)
        and "lift" not in schema.name
        and any("Tensor" in str(argument.type) for argument in schema.arguments)
    )
