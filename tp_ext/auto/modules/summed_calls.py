"""Means, sums and norms over a sharded dim in unchanged code: the call itself sums its statistics over the ranks.

One function mode replaces these calls, in the forwards of the modules that a plan lists: by the number of the call
among those of the same function."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tp_ext import _ops
from tp_ext.auto.modules.random_draws import SharedMode, is_in_checkpoint
from tp_ext.auto.record.boundary import Edit, EditPlace
from tp_ext.auto.record.edits import Conversion
from tp_ext.auto.record.keywords import by_place
from tp_ext.auto.record.operators import SUMMED_CALLS
from tp_ext.conversions import R
from tp_ext.group import ParallelGroup


@dataclass
class _Sum:
    """The sum over the ranks that a conversion of a call makes."""

    edit: Conversion
    group: ParallelGroup

    def __call__(self, term: Tensor) -> Tensor:
        # The sum last: code may write into it
        entered = _ops.copy_to_region(term, self.group.name) if self.edit.after is R else term
        return _ops.reduce_from_region(entered, self.group.name)

    @property
    def share(self) -> float:
        """The fraction of the elements that this rank holds; ranks may hold different numbers."""
        factor = self.edit.factor
        assert factor is not None
        return factor.local_size(self.group.rank, self.group.size) / factor.size

    def mean(self, x: Tensor) -> Tensor:
        return self(x.mean(self.edit.dim, keepdim=True) * self.share)

    def check(self, x: Any) -> None:
        """Raises a RuntimeError unless a tensor has this rank's shard."""
        factor, dim = self.edit.factor, self.edit.dim
        assert factor is not None
        local = factor.local_size(self.group.rank, self.group.size)
        if x.dim() < -dim or x.shape[dim] != local:
            raise RuntimeError(
                f"{self.edit.module or 'the model'}: forward calls {self.edit.path[0]} of a tensor {tuple(x.shape)} "
                f"where its plan has one with {local} of {factor.size} elements in dim {dim}; plan with an example "
                "with which forward makes the same calls"
            )


def _mean(total: _Sum, func: Callable[..., Tensor], input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return total(func(input, *args, **kwargs) * total.share)


def _sum(total: _Sum, func: Callable[..., Tensor], input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return total(func(input, *args, **kwargs))


def _wide(func: Callable[..., Tensor], x: Tensor) -> tuple[Tensor, torch.dtype]:
    """The type in which a norm computes, and that of its result, which autocast may change."""
    dtype = x.dtype
    if torch.is_autocast_enabled(x.device.type):
        dtype = func(x.new_empty(0, 1), (1,)).dtype
    return x.float() if x.element_size() < 4 else x, dtype


def _layer_norm(
    total: _Sum,
    func: Callable[..., Tensor],
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> Tensor:
    x, dtype = _wide(func, input)
    x = x - total.mean(x)
    y = x * torch.rsqrt(total.mean(x.square()) + eps)
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias).to(dtype)


def _rms_norm(
    total: _Sum,
    func: Callable[..., Tensor],
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    x, dtype = _wide(func, input)
    y = x * torch.rsqrt(total.mean(x.square()) + (torch.finfo(x.dtype).eps if eps is None else eps))
    return (y if weight is None else y * weight).to(dtype)


_REPLACING: tuple[Any, ...] = (_mean, _sum, _layer_norm, _rms_norm)
_FUNCTIONS = {function.__name__[1:]: function for function in _REPLACING}


@dataclass
class _CallWithSums:
    """A call of a module that runs now; ``sums``: (function, number of its call) -> the sum."""

    module: nn.Module
    sums: dict[tuple[str, int], _Sum]

    def __post_init__(self) -> None:
        self.counts = dict.fromkeys((name for name, _ in self.sums), 0)

    def next(self, name: str) -> _Sum | None:
        number = self.counts.get(name, 0)
        self.counts[name] = number + 1
        return self.sums.get((name, number))

    def check(self) -> None:
        """Raises a RuntimeError if forward has made other calls than in the plan."""
        for (name, _), total in self.sums.items():
            made, planned = self.counts[name], total.edit.path[2]
            if made != planned:
                raise RuntimeError(
                    f"{total.edit.module or 'the model'}: forward calls {name} {made} times where its plan has "
                    f"{planned}; plan with an example with which forward makes the same calls"
                )


class SummedCalls(SharedMode):
    """Completes the sums of the calls of modules."""

    running: list[_CallWithSums]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, running = SUMMED_CALLS.get(func), self.running[-1]
        total = None if name is None else running.next(name)
        if name is None or total is None:
            return func(*args, **(kwargs or {}))
        if is_in_checkpoint(running.module):
            raise RuntimeError(
                f"torch.utils.checkpoint inside of the forward of {type(running.module).__name__}, which sums over a "
                "sharded dim, cannot be followed; checkpoint modules, not functions inside of their forward"
            )
        args, kwargs = by_place(func, args, kwargs or {})
        total.check(args[0])
        return _FUNCTIONS[name](total, func, *args, **kwargs)


@dataclass
class SumsOfCalls(Edit):
    """Calls complete their sums while the module's forward runs. A module inside of another has no ``sums`` of that."""

    mode: SummedCalls
    sums: dict[tuple[str, int], _Sum]
    place = EditPlace.SUMS_OF_CALLS

    def __post_init__(self) -> None:
        self.is_needed_in_stages = bool(self.sums)

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self.mode.begin(_CallWithSums(module, self.sums))

    def end(self, module: nn.Module, output: Any) -> None:
        # After an exception of an earlier hook no call has begun
        if self.mode.running and (running := self.mode.running[-1]).module is module:
            self.mode.end()
            running.check() if output is not None else None


def summed_call_edits(
    model: nn.Module, calls: Sequence[Conversion], group: ParallelGroup
) -> Iterator[tuple[nn.Module, Edit]]:
    """The edits of the modules whose calls sum over a sharded dim, and of those inside of them."""
    mode, of_modules = SummedCalls(), dict[str, dict[tuple[str, int], _Sum]]()
    for edit in calls:
        name, number, _ = edit.path
        of_modules.setdefault(edit.module, {})[str(name), int(number)] = _Sum(edit, group)
    edited = {model.get_submodule(name): sums for name, sums in of_modules.items()}
    for module in dict.fromkeys(inner for outer in edited for inner in outer.modules()):
        yield module, SumsOfCalls(mode, edited.get(module, {}))
