"""Rewrites the sizes that forward code passes to views, such as ``view(b, 12, 64)``, to a rank's sizes.

Where code takes sizes from a replicated input, ``B, T, C = x.shape``, or writes them as numbers, no integer of a module
can be set. The calls of a module that have sizes as arguments are then planned one by one, in their order: which of the
sizes are changed, and from what to what."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tp_ext.auto.record.boundary import Edit, EditPlace
from tp_ext.auto.record.edits import SizeCall
from tp_ext.auto.record.forwards import InstanceForward
from tp_ext.auto.record.keywords import by_place
from tp_ext.auto.record.operators import row_of


@dataclass
class SizeArguments:
    """The sizes among the arguments of a call."""

    values: list[int]
    rebuilt: Callable[[Sequence[int]], tuple[tuple[Any, ...], dict[str, Any]]]  # the arguments with other sizes

    def changed(self, changes: Mapping[int, int]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return self.rebuilt([changes.get(i, value) for i, value in enumerate(self.values)])


def _gives_shape(name: str) -> bool:
    """True if the sizes of a call are the shape of its result."""
    return row_of(name).view and not row_of(name).splits


def _is_size(value: Any) -> bool:
    """Returns whether an argument is a size, which in an export with open lengths has no value."""
    return type(value) in (int, torch.SymInt)


def sizes_of(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SizeArguments | None:
    """The sizes that a function is called with, by their place; None: it is another function, or they are no
    integers."""
    place = row_of(name).sizes
    # Another function may have one of these names, without a tensor as its first argument
    if not place or len(args) <= place or not isinstance(args[0], Tensor):
        return None
    value, end = args[place], place + 1
    # Only these take their sizes as separate arguments, as in view(b, 12, 64)
    if _gives_shape(name) and _is_size(value):
        value, end = tuple(args[place:]), len(args)
    values = [value] if _is_size(value) else list(value) if isinstance(value, list | tuple) else []
    if not values or not all(map(_is_size, values)):  # view(dtype) has none
        return None

    def rebuilt(new: Sequence[int]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        sizes = new[0] if _is_size(value) else list(new)
        return (*args[:place], sizes, *args[end:]), kwargs

    return SizeArguments(values, rebuilt)


class Called(Protocol):
    """A call of a module."""

    module: str


class RunRecord(Protocol):
    """The record of a run: the modules whose forward runs now, and all calls so far."""

    modules: list[str]

    @property
    def calls(self) -> Sequence[Called]: ...


class Observer(TorchFunctionMode):
    """Runs the local model with the sizes of the plan, and notes which sizes of the code they replace.

    Args:
        wanted: module -> its calls with sizes in the unsharded model, each with the local shapes of its results.
        ignored: modules whose calls stay as they are.
    """

    def __init__(
        self,
        wanted: Mapping[str, Sequence[tuple[str, Sequence[tuple[int, ...]]]]],
        ignored: Mapping[str, str],
    ) -> None:
        super().__init__()
        self.wanted, self.ignored = wanted, ignored
        self.record: RunRecord | None = None  # of the run
        self.next: dict[str, int] = {}
        self.counted, self.begun = 0, dict[str, int]()  # the calls of modules that have been counted, by module
        self.calls: dict[str, dict[int, list[SizeCall]]] = {}  # module -> its call -> calls with sizes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        # Others of these arguments by name, too: the sizes of a split are those of its dim
        args, kwargs = by_place(func, args, kwargs or {}) if row_of(name).sizes else (args, kwargs or {})
        sizes = sizes_of(name, args, kwargs)
        module = self.record.modules[-1] if self.record is not None else ""
        if sizes is None or module in self.ignored:
            return func(*args, **kwargs)
        changes: dict[int, int] = {}
        shapes = self.matching(module, name, args, sizes)
        # A call that is right with its own sizes, by -1 or a local integer, needs no change
        # Of a shape, what gives it is equal to it
        if shapes is not None and not (row_of(name).splits and _gives(func, args, kwargs, shapes)):
            wanted = _wanted(name, args, kwargs, sizes, shapes)
            pairs = enumerate(zip(sizes.values, wanted, strict=True))
            changes = {i: new for i, (old, new) in pairs if old not in (new, -1)}
        call = SizeCall(name, tuple((i, sizes.values[i], new) for i, new in changes.items()))
        self.calls.setdefault(module, {}).setdefault(self.number_of_calls(module), []).append(call)
        if changes:
            args, kwargs = sizes.changed(changes)
        return func(*args, **kwargs)

    def number_of_calls(self, module: str) -> int:
        """Returns how many calls of a module have begun."""
        calls = self.record.calls if self.record is not None else ()
        for call in calls[self.counted :]:
            self.begun[call.module] = self.begun.get(call.module, 0) + 1
        self.counted = len(calls)
        return self.begun.get(module, 0)

    def matching(
        self, module: str, name: str, args: tuple[Any, ...], sizes: SizeArguments
    ) -> Sequence[tuple[int, ...]] | None:
        """Returns the wanted results of a call: of the next wanted call of the module that fits; branches skip some."""
        wanted = self.wanted.get(module, ())
        for i in range(self.next.get(module, 0), len(wanted)):
            other, shapes = wanted[i]
            # A view has the elements of its input. Only expand repeats them
            elements = sum(torch.Size(shape).numel() for shape in shapes)
            if name == other and (name == "expand" or elements == args[0].numel()):
                fits = len(sizes.values) == len(shapes[0]) if _gives_shape(name) else True
                if fits and (name != "split_with_sizes" or len(shapes) == len(sizes.values)):
                    self.next[module] = i + 1
                    return shapes
        return None

    def planned(self) -> dict[str, list[SizeCall]]:
        """The calls of each module in which sizes were changed; without modules whose calls differ in them."""
        by_module = {name: list(calls.values()) for name, calls in self.calls.items()}
        return {
            n: c[0] for n, c in by_module.items() if any(call.changes for call in c[0]) and all(c[0] == x for x in c)
        }

    def wrong(self) -> dict[str, int]:
        """The number of sizes that were changed, by module."""
        by_module = {n: sum(len(call.changes) for c in calls.values() for call in c) for n, calls in self.calls.items()}
        return {name: number for name, number in by_module.items() if number}


def _gives(func: Any, args: Any, kwargs: Any, shapes: Sequence[tuple[int, ...]]) -> bool:
    """Returns whether a call without changes has results of these shapes."""
    with torch._C.DisableTorchFunction():
        try:
            result = func(*args, **kwargs)
        except Exception:
            return False
    return [tuple(tensor.shape) for tensor in ([result] if isinstance(result, Tensor) else result)] == list(shapes)


def _wanted(name: str, args: Any, kwargs: Any, sizes: SizeArguments, shapes: Sequence[tuple[int, ...]]) -> list[int]:
    """The sizes with which a call has results of these shapes; those given, if there are none."""
    number = len(sizes.values)
    if row_of(name).splits:
        dim = args[2] if len(args) > 2 else 0
        lengths = [shape[dim] for shape in shapes]
        # One size is that of all parts but the last. Another number of sections belongs to another call
        return lengths[:number] if number in (1, len(lengths)) else sizes.values
    if row_of(name).completed:  # a norm, of the last dims
        return list(shapes[0][-number:])
    if name == "unflatten":
        dim = args[1] % args[0].dim()
        return list(shapes[0][dim : dim + number])
    return list(shapes[0])


class _Rewriting(TorchFunctionMode):
    """Changes the sizes of one forward as planned."""

    def __init__(self, name: str, calls: Sequence[SizeCall]) -> None:
        super().__init__()
        self.name, self.calls = name, calls
        self.next = self.paused = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        # Sizes by name go to their place. Other arguments stay as they are: a compiler cannot read schemas
        is_moved = 0 < row_of(name).sizes >= len(args)
        args, kwargs = by_place(func, args, kwargs or {}) if is_moved else (args, kwargs or {})
        sizes = None if self.paused else sizes_of(name, args, kwargs)
        if sizes is None:
            return func(*args, **kwargs)
        call = self.calls[self.next] if self.next < len(self.calls) else None
        if call is None or call.name != name:
            self.refuse(name, "no such call" if call is None else call.name)
        self.next += 1
        changes: dict[int, int] = {}
        for place, planned, local in call.changes:  # type: ignore[union-attr]
            size = sizes.values[place] if place < len(sizes.values) else -1
            # A size with the batch in it, batch * heads, is another one in each run
            if size <= 0 or size * local % planned:
                self.refuse(f"{name} with the size {size}", f"a multiple of {planned}")
            changes[place] = size * local // planned
        if changes:
            args, kwargs = sizes.changed(changes)
        return func(*args, **kwargs)

    def refuse(self, call: str, planned: str) -> None:
        raise RuntimeError(
            f"{self.name or 'the model'}: forward calls {call} where its plan has {planned}; sizes are changed in the "
            f"branches that the example takes: plan with arguments, and in a mode, that take this one"
        )


class SizedForward(InstanceForward):
    """A ``forward`` in which sizes are changed as planned; other modules are left alone."""

    def __init__(self, module: nn.Module, name: str, calls: Sequence[SizeCall]) -> None:
        super().__init__(module)
        self.name, self.calls = name, calls
        self.running: list[_Rewriting] = []

    def install(self) -> Iterator[tuple[nn.Module, Edit]]:
        """Sets the forward; returns the edits that leave other modules alone."""
        self.module.forward = self
        # The mode sees all calls that run below it, and those of inner modules are no part of this plan
        return ((inner, OtherSizes(self)) for inner in self.module.modules() if inner is not self.module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        mode = _Rewriting(self.name, self.calls)
        self.running.append(mode)
        try:
            with mode:
                result = self.run_own(*args, **kwargs)
        finally:
            self.running.pop()
        # A forward that makes fewer calls has taken a branch that the example does not show
        if mode.next != len(self.calls):
            mode.refuse("nothing", self.calls[mode.next].name)
        return result


@dataclass
class OtherSizes(Edit):
    """Pauses changed sizes in a module inside of the one that has them; its own sizes stay."""

    forward: SizedForward
    place = EditPlace.SIZES

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self.forward.running:
            self.forward.running[-1].paused += 1

    def end(self, module: nn.Module, output: Any) -> None:
        if self.forward.running:
            self.forward.running[-1].paused -= 1
