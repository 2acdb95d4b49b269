"""Numbers that a model's code reads from tensors: ``self.scale.item()``, ``if not mask.any()``, ``h[mask]``.

Fakes have no values. So what is computed from parameters and buffers alone, or from arguments alone, is noted as
instructions, and where code reads a number, or a length such as that of ``nonzero``, these run on the true tensors.

Numbers of parameters and buffers: the true one where the model has it. A forward that gives the same record with other
numbers does not branch on them; what a plan proves then holds for any. Truth values, which nothing but a branch reads,
stay an error. Numbers of arguments: a plan holds for those that its example has, and a call is compared with it by
running the instructions on its own arguments (:class:`ReadNumbers`). Values of activations stay an error."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from tp_ext.auto.record.edits import LeafPath
from tp_ext.auto.record.known_results import KnownResults, device_of
from tp_ext.auto.record.record import Record, source_line, tensors
from tp_ext.auto.record.rules import draws_random_numbers

Change = Callable[[float], float]

CHANGES: tuple[Change, ...] = (lambda x: 2 * x + math.copysign(1, x), lambda x: -x - 1)  # the second: to another sign
READ = "aten::_local_scalar_dense"
LITERALS = ("aten::lift_fresh", "aten::lift_fresh_copy")  # by them the data of torch.tensor(..) enters


@dataclass(frozen=True)
class Ref:
    """A tensor among those of instructions."""

    place: int


@dataclass(frozen=True)
class Root:
    """A tensor that instructions begin with: a parameter or buffer, or an argument, by its paths."""

    tensor: Tensor
    paths: tuple[LeafPath, ...] = ()


@dataclass
class Instruction:
    """An operator on constants.

    Attributes:
        args, kwargs: a :class:`Ref` in place of each tensor. results: places of the tensors among its results. answer:
            what code has read by it: a number, or the shapes of the results; None: nothing.
    """

    function: Any
    args: Any
    kwargs: Any
    results: tuple[int | None, ...] = ()
    answer: Any = None

    def places(self) -> list[int]:
        """The places of its operands."""
        return [x.place for x in tree_leaves((self.args, self.kwargs)) if isinstance(x, Ref)]

    def run(self, values: dict[int, Tensor], device: torch.device) -> tuple[Any, Any]:
        """Runs on true tensors, and adds its results to them; returns the result, and what it answers."""

        def true(x: Any) -> Any:
            if isinstance(x, Ref):
                return values[x.place]
            return x.to(device, copy=True) if isinstance(x, Tensor) else x

        # Tensors that code makes in addition to its arguments are made where these are: fakes are on the CPU
        kwargs = {**self.kwargs, "device": device} if self.kwargs.get("device") else self.kwargs
        result = self.function(*tree_map(true, self.args), **tree_map(true, kwargs))
        leaves = tree_leaves(result)
        values.update({p: t for p, t in zip(self.results, leaves, strict=False) if p is not None})
        shapes = tuple(tuple(t.shape) for t in leaves if isinstance(t, Tensor))
        return result, shapes or result


@contextlib.contextmanager
def _on_true_tensors() -> Iterator[None]:
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        yield


def has_values(tensor: Tensor) -> bool:
    """True for a tensor whose numbers can be read: on no meta device, no fake, and wrapped by no transform."""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return not (tensor.is_meta or isinstance(tensor, FakeTensor) or wrapped)


def _started(instructions: Sequence[Instruction], roots: Mapping[int, Tensor]) -> tuple[dict[int, Tensor], Any]:
    """The values that instructions begin with, and their device."""
    writes = any(instruction.function._schema.is_mutable for instruction in instructions)
    values = {place: t.detach().clone() if writes else t.detach() for place, t in roots.items()}
    return values, next((t.device for t in values.values()), torch.device("cpu"))


@dataclass
class ReadNumbers:
    """The numbers that a run of a model has read from arguments.

    Attributes:
        inputs: place -> the paths of that argument in ``(args, kwargs)``. instructions: those that lead to a number.
        lines: of the code that reads.
    """

    inputs: dict[int, tuple[LeafPath, ...]] = field(default_factory=dict)
    instructions: list[Instruction] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    def hold(self, call: Any, tolerance: float = 0.0) -> bool:
        """True if a call ``(args, kwargs)`` gives the same numbers, within a relative tolerance, and lengths.

        The first numbers decide which code runs up to the next read, so that equal ones are all that it reads."""
        by_path = dict(tensors(call))
        roots: dict[int, Tensor] = {}
        for place, paths in self.inputs.items():
            tensor = by_path.get(paths[0])
            if tensor is None or not has_values(tensor):
                return False
            # One tensor in two arguments, into one of which code may write, is another call than two tensors
            if [path for path, t in by_path.items() if t is tensor] != [*paths]:
                return False
            roots[place] = tensor
        with _on_true_tensors():
            values, device = _started(self.instructions, roots)
            for instruction in self.instructions:
                try:
                    _, answer = instruction.run(values, device)
                except Exception:  # of any type: such as an index out of the range of these arguments
                    return False
                if instruction.answer is not None and not _is_same(instruction.answer, answer, tolerance):
                    return False
        return True

    def names(self) -> str:
        """The arguments that are read, as a message names them."""
        return ", ".join(dict.fromkeys(_name(paths[0]) for paths in self.inputs.values())) or "none"

    def numbers(self) -> tuple[Any, ...]:
        """The numbers without the lengths: as on lengths of arguments no plan depends on these unless code branches."""
        return tuple(i.answer for i in self.instructions if i.answer is not None and not isinstance(i.answer, tuple))


def _is_same(answer: Any, other: Any, tolerance: float) -> bool:
    if isinstance(answer, float) and isinstance(other, float):
        return math.isclose(answer, other, rel_tol=tolerance) or (math.isnan(answer) and math.isnan(other))
    return bool(answer == other)


def read_ids(read: ReadNumbers | None, call: Any) -> set[int]:
    """The ids of those tensors of a call ``(args, kwargs)`` from which numbers are read."""
    paths = set() if read is None else {path for paths in read.inputs.values() for path in paths}
    return {id(tensor) for path, tensor in tensors(call) if path in paths}


class Numbers(TorchDispatchMode):
    """Answers reads of numbers while a model runs on fakes.

    Args:
        state: id of the fake of a parameter or buffer -> that tensor. inputs: the fakes of the arguments, each with its
            argument and the paths of that.
        change: makes another number of each that is read of ``state``. fakes: those of the run; None: with symbols.
    """

    def __init__(
        self,
        record: Record,
        state: Sequence[tuple[Tensor, Tensor]],
        inputs: Sequence[tuple[Tensor, Tensor, tuple[LeafPath, ...]]],
        change: Change | None,
        fakes: FakeTensorMode | None,
    ) -> None:
        super().__init__()
        self.record, self.change = record, change
        self.call = _called if fakes is None else KnownResults(fakes)
        self.places: dict[int, int] = {}  # id of a constant -> its place
        self.kept: list[Tensor] = []  # so that no id comes again, by their places
        self.roots: dict[int, Root] = {}
        self.roots_of: dict[int, frozenset[int]] = {}  # memory of constants -> the roots that it is computed from
        self.instructions: list[Instruction] = []
        self.lines: list[str] = []  # of code that reads arguments
        for fake, tensor in state:
            self.begin(fake, Root(tensor))
        for fake, tensor, paths in inputs:
            if id(fake) not in self.places and not tensor.is_complex():
                self.begin(fake, Root(tensor, paths))

    def begin(self, fake: Tensor, root: Root) -> None:
        if fake.layout == torch.strided and id(fake) not in self.places:
            place = self.place(fake)
            self.roots[place] = root
            self.roots_of[_memory(fake)] = frozenset((place,))

    def place(self, tensor: Tensor) -> int:
        if id(tensor) not in self.places:
            self.places[id(tensor)] = len(self.kept)
            self.kept.append(tensor)
        return self.places[id(tensor)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (device := device_of(func, args)) is not None:
            return device
        kwargs = kwargs or {}
        operands = [t for _, t in tensors((args, kwargs))]
        instruction = self.instruction(func, args, kwargs, operands)
        if instruction is not None and func._schema.name == READ and args[0].dtype != torch.bool:
            roots = self.roots_of[_memory(args[0])]
            if roots and not any(self.roots[place].paths for place in roots):
                return self.number(args[0], instruction)
        try:
            result = self.call(func, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            if (chosen := self.selected(func, args, kwargs)) is not None:
                return chosen
            if instruction is None or not self.is_readable(operands):
                raise
            result = self.read(instruction)
        if instruction is not None:
            self.add(instruction, operands, result)
        else:
            for tensor in _written(func, args, kwargs):
                self.roots_of.pop(_memory(tensor), None)
        return result

    def is_constant(self, tensor: Tensor) -> bool:
        return id(tensor) in self.places and _memory(tensor) in self.roots_of

    def instruction(self, func: Any, args: Any, kwargs: Any, operands: Sequence[Tensor]) -> Instruction | None:
        """An operator as an instruction; None: it is none of constants alone, or draws random numbers."""
        literal = func._schema.name in LITERALS and not isinstance(args[0], FakeTensor)
        known = literal or all(map(self.is_constant, operands))
        if not known or func.namespace == "prim" or draws_random_numbers(func):
            return None
        # What follows from arguments and parameters, as all activations do, is never read
        roots = [] if literal else [root for t in operands for root in self.roots_of[_memory(t)]]
        if len({bool(self.roots[place].paths) for place in roots}) > 1:
            return None

        def ref(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            return x.detach().clone() if literal else Ref(self.places[id(x)])

        return Instruction(func, *tree_map(ref, (tuple(args), dict(kwargs))))

    def add(self, instruction: Instruction, operands: Sequence[Tensor], result: Any) -> None:
        """Adds an instruction whose results are these fakes."""
        leaves = tree_leaves(result)
        if any(isinstance(t, Tensor) and t.layout != torch.strided for t in leaves):
            return
        roots = frozenset().union(*(self.roots_of.get(_memory(t), frozenset()) for t in operands))
        instruction.results = tuple(self.place(t) if isinstance(t, Tensor) else None for t in leaves)
        for tensor in (t for t in leaves if isinstance(t, Tensor)):
            self.roots_of[_memory(tensor)] = self.roots_of.get(_memory(tensor), frozenset()) | roots
        self.instructions.append(instruction)

    def leading_to(self, instructions: Sequence[Instruction], wanted: Sequence[Instruction]) -> list[Instruction]:
        """Those of the instructions that the wanted ones among them follow from."""
        needed, memory, kept = set[int](), set[int](), list[Instruction]()
        wanted_ids = {id(instruction) for instruction in wanted}
        for instruction in reversed(instructions):
            operands = instruction.places()
            is_write = instruction.function._schema.is_mutable
            writes = is_write and any(_memory(self.kept[place]) in memory for place in operands)
            if id(instruction) in wanted_ids or writes or needed.intersection(instruction.results):
                kept.append(instruction)
                needed.update(operands)
                memory.update(_memory(self.kept[place]) for place in operands)
        return kept[::-1]

    def roots_for(self, instructions: Sequence[Instruction]) -> dict[int, Root]:
        places = {place for instruction in instructions for place in instruction.places()}
        return {place: root for place, root in self.roots.items() if place in places}

    def run(self, instruction: Instruction) -> tuple[Any, Any]:
        """The result of an instruction on true tensors, and what it answers."""
        *before, last = self.leading_to([*self.instructions, instruction], [instruction])
        with _on_true_tensors():
            values, device = _started(before, {p: root.tensor for p, root in self.roots_for([*before, last]).items()})
            for each in before:
                each.run(values, device)
            return last.run(values, device)

    def number(self, tensor: Tensor, instruction: Instruction) -> complex:
        """A number of parameters and buffers alone; 1 if one of them is on meta."""
        self.record.numbers.append(source_line())
        has = all(has_values(self.roots[place].tensor) for place in self.roots_of[_memory(tensor)])
        number: complex = self.run(instruction)[0] if has else 1
        if self.change is not None and not isinstance(number, complex):
            number = self.change(number)
        return number if tensor.is_floating_point() or tensor.is_complex() else int(number.real)

    def is_readable(self, operands: Sequence[Tensor]) -> bool:
        """True for what follows from arguments alone, if these have values."""
        roots = [self.roots[place] for t in operands for place in self.roots_of[_memory(t)]]
        if not all(root.paths for root in roots):
            return False
        missing = [_name(root.paths[0]) for root in roots if not has_values(root.tensor)]
        self.record.without_values += missing
        return not missing

    def read(self, instruction: Instruction) -> Any:
        """Answers a read of arguments: by a number, or by tensors of the lengths that follow from the values."""
        result, instruction.answer = self.run(instruction)
        self.lines.append(source_line())
        return tree_map(lambda x: torch.empty(x.shape, dtype=x.dtype) if isinstance(x, Tensor) else x, result)

    def selected(self, func: Any, args: Any, kwargs: Any) -> Tensor | None:
        """The elements of a tensor that a mask selects which follows from arguments alone, so that the mask alone is
        read; None: it is no such call."""
        if func._schema.name == "aten::index":
            masks = [x is not None and x.dtype == torch.bool for x in args[1]]
            places = [self.nonzero(x) if is_mask else [x] for x, is_mask in zip(args[1], masks, strict=True)]
            if any(masks) and None not in places:
                with self:
                    return cast("Tensor", func(args[0], [x for indices in places if indices for x in indices]))
        if func._schema.name == "aten::masked_select":
            shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
            if (indices := self.nonzero(args[1], shape)) is not None:
                return args[0].new_empty(indices[0].shape)
        return None

    def nonzero(self, mask: Tensor, shape: Sequence[int] | None = None) -> list[Tensor] | None:
        """The indices of the true elements of a mask, expanded to a shape, along each dim; None: it does not follow
        from arguments."""
        if not self.is_constant(mask) or not self.is_readable([mask]):
            return None
        with self:
            return [*mask.expand(mask.shape if shape is None else shape).nonzero().unbind(1)]

    def numbers(self) -> ReadNumbers | None:
        """What was read of arguments; None: nothing."""
        read = [instruction for instruction in self.instructions if instruction.answer is not None]
        if not read:
            return None
        instructions = self.leading_to(self.instructions, read)
        inputs = {place: root.paths for place, root in self.roots_for(instructions).items()}
        return ReadNumbers(inputs, instructions, [*dict.fromkeys(self.lines)])


def _name(path: LeafPath) -> str:
    """An argument as a message names it, of its path in ``(args, kwargs)``."""
    return f"argument {path[1]}" if isinstance(path[1], int) else str(path[1])


def _called(func: Any, args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs)


def _memory(tensor: Tensor) -> int:
    """What tensors that share memory have in common."""
    memory: int = tensor.untyped_storage()._cdata
    return memory


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that an operator writes to."""
    if not func._schema.is_mutable:
        return []
    given = {**dict(zip((a.name for a in func._schema.arguments), args, strict=False)), **kwargs}
    written = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    leaves = tree_leaves([given.get(name) for name in written])
    return [t for t in leaves if isinstance(t, Tensor) and t.layout == torch.strided]
