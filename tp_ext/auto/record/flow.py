"""The flow of one call: the functions that a model's code calls, what each is given, and which comparisons of lengths
and numbers led there.

Two calls of a model with the same flow are the same for a plan: it decides by functions, by where their tensors come
from and by their options. Lengths, and numbers that scale or shift a tensor, have no part in it unless the code
branches on them, so they may be symbols: then the comparisons made with them say for which others the flow is the same.
"""

from __future__ import annotations

import enum
import hashlib
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils._sympy.printers import PythonPrinter

from tp_ext.auto.record.arguments import with_tensors
from tp_ext.auto.record.numbers import ReadNumbers, has_values, read_ids
from tp_ext.auto.record.operators import operator_of, row_of
from tp_ext.auto.record.record import Record, tensors
from tp_ext.auto.record.trace import Arguments, arguments, is_of_fakes, trace

# They call functions of torch to save and restore the state of generators
MACHINERY = ("torch.utils.checkpoint", "torch.random", "torch.cuda", "torch.autograd")
NUMBERS = (int, float)
SWITCHES = (bool, str, bytes, complex, enum.Enum, torch.dtype, torch.device, torch.layout, torch.memory_format)


def is_number(value: Any) -> bool:
    """True for a number; truth values are none, each has a flow of its own."""
    return isinstance(value, NUMBERS) and not isinstance(value, bool)


@dataclass
class CallFlow:
    """The flow of a call.

    Attributes:
        calls: a digest of all functions with their tensors and options. sizes: one of the integers among their options.
        holds: says for which lengths and numbers the flow is the same; None: for its own. read: the numbers that code
        has read from arguments, with which alone the flow is this.
    """

    calls: str
    sizes: str
    holds: Callable[[Sequence[Any]], bool] | None = None
    read: ReadNumbers | None = None

    @property
    def numbers(self) -> tuple[Any, ...]:
        """The numbers that code has read from arguments."""
        return () if self.read is None else self.read.numbers()


@dataclass
class Symbols:
    """Symbols in place of the lengths and numbers of a call."""

    env: ShapeEnv = field(default_factory=ShapeEnv)
    exprs: list[Any] = field(default_factory=list)  # one for each length and number
    numbers: set[Any] = field(default_factory=set)  # symbols of numbers

    def __post_init__(self) -> None:
        self.fakes = FakeTensorMode(allow_non_fake_inputs=True, shape_env=self.env)

    def of(self, value: Any) -> Any:
        """What stands for an argument."""
        source = ConstantSource(f"argument_{len(self.exprs)}")
        if isinstance(value, Tensor):
            context: Any = StatelessSymbolicContext([DimDynamic.DYNAMIC] * value.dim())
            fake = self.fakes.from_tensor(value, source=source, symbolic_context=context)
            self.exprs += [n if isinstance(n, int) else n.node.expr for n in fake.shape]
            return fake
        if not is_number(value):
            return value
        symbol = self.env.create_unspecified_symbol(value, source, DimDynamic.DYNAMIC)
        make = self.env.create_symintnode if isinstance(value, int) else self.env.create_symfloatnode
        made = make(symbol, hint=value, source=source)
        self.numbers.add(symbol)
        self.exprs.append(symbol)
        return made

    def holds(self) -> Callable[[Sequence[Any]], bool]:
        """Returns a test of lengths and numbers: with them, all comparisons that were made come out as they did."""
        first: dict[Any, int] = {}
        for i, expr in enumerate(self.exprs):
            if not isinstance(expr, int):
                first.setdefault(expr, i)
        values = "values[{}]".format
        tests = [f"{values(i)} == {values(first[e]) if e in first else e}" for i, e in enumerate(self.exprs)]
        tests += [f"{values(i)} >= 2" for e, i in first.items() if e not in self.numbers]
        names = {str(e): i for e, i in first.items()}
        bound = ", ".join(f"{name}={values(i)}" for name, i in names.items())
        guards = [PythonPrinter().doprint(guard.expr) for guard in self.env.guards]
        code = " and ".join(tests) or "True"
        if guards:
            code += f" and (lambda {', '.join(names)}: {' and '.join(f'({g})' for g in guards)})({bound})"
        test = eval(f"lambda values: len(values) == {len(self.exprs)} and {code}", {"math": math})
        return lambda given: bool(test(given))


class _FlowRecorder(TorchFunctionMode):
    """Records the calls from Python with what they are given."""

    def __init__(self, record: Record, numbers: set[Any]) -> None:
        super().__init__()
        self.record, self.numbers = record, numbers
        self.places: dict[int, str] = {}
        self.kept: list[Tensor] = []  # so that no id comes again
        self.calls: list[str] = []
        self.sizes: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        caller = sys._getframe(1)
        ignored = is_of_fakes(caller) or str(caller.f_globals.get("__name__")).startswith(MACHINERY)
        sizes = len(self.sizes)
        name = operator_of(func)
        # Of a tensor, too, a plan knows no numbers
        numeric = row_of(name).numeric or name in ("tensor", "as_tensor", "new_tensor")
        given = "" if ignored else self.text([list(args), kwargs], numeric)
        result = func(*args, **kwargs)
        results = [t for _, t in tensors(result)]
        # What returns no tensor reads a property, if it is no assignment
        if not ignored and (results or result is None):
            made = [f"{self.text(t, False)}:{t.dim()}" for t in results]
            self.calls.append(f"{self.record.modules[-1]} {getattr(func, '__name__', func)}{given} -> {made}")
        else:
            del self.sizes[sizes:]
        return result

    def text(self, value: Any, numeric: bool) -> str:
        """A value among the arguments of a function, as a text without integers, which are ``sizes``."""
        if isinstance(value, Tensor):
            return self.place(value)
        if isinstance(value, list | tuple):
            return f"[{','.join(self.text(inner, numeric) for inner in value)}]"
        if isinstance(value, dict):
            return f"{{{','.join(f'{key}:{self.text(inner, numeric)}' for key, inner in value.items())}}}"
        if isinstance(value, slice):
            return f"slice{self.text([value.start, value.stop, value.step], numeric)}"
        if isinstance(value, np.generic):
            value = value.item()
        if value is None or value is Ellipsis or isinstance(value, SWITCHES):
            return str(value)
        if isinstance(value, np.ndarray):
            return f"array {value.tolist()}"
        is_integer = isinstance(value, int | torch.SymInt)
        if not is_integer and not isinstance(value, float | torch.SymFloat):
            return getattr(value, "__qualname__", type(value).__qualname__)
        if numeric:
            return "number" if value != 0 else "0"
        # A plan may depend on the number here: it holds for this one
        if not is_integer:
            return repr(float(value))
        if isinstance(value, torch.SymInt) and not value.node.expr.free_symbols & self.numbers:
            value = value.node.hint
        self.sizes.append(str(int(value)))
        return "int"

    def place(self, tensor: Tensor) -> str:
        if not self.places:
            # By their names: the gradient of one is summed over the ranks, and that of another is not
            self.places = {id(t): f"argument {'.'.join(map(str, path[1:]))}" for path, t in self.record.inputs}
        if id(tensor) not in self.places:
            named = self.record.parameters.get(id(tensor)) or self.record.buffers.get(id(tensor))
            self.places[id(tensor)] = named[0] if named else f"t{len(self.places)}"
            self.kept.append(tensor)
        return self.places[id(tensor)]


def on_meta(example: Any, read: ReadNumbers | None = None, *, is_recorded: bool = True) -> Any:
    """A call's arguments by their shapes alone: what a transform of torch.func has wrapped must not enter a structure.

    Args:
        read: what code reads of them, which keeps its values. is_recorded: False: any may be read, and keeps them.
    """
    kept = read_ids(read, arguments(example))

    def meta(x: Tensor) -> Tensor:
        if (id(x) in kept or not is_recorded or x.layout != torch.strided) and has_values(x):
            return x
        shape = x.shape, x.stride()
        return torch.empty_strided(*shape, dtype=x.dtype, device="meta", requires_grad=x.requires_grad)

    return with_tensors(example, meta)


def _digest(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def flow_of(structure: nn.Module, example: Any, symbolic: bool = False) -> CallFlow:
    """Runs a model on fakes, with symbols in place of lengths and numbers if ``symbolic``; returns its flow."""
    record, symbols = Record(), Symbols() if symbolic else None
    if symbols is not None:
        leaves, spec = tree_flatten(arguments(example))
        example = Arguments(*tree_unflatten([symbols.of(leaf) for leaf in leaves], spec))
    mode = _FlowRecorder(record, symbols.numbers if symbols is not None else set())
    with enable_python_dispatcher() if symbolic else nullcontext():
        fakes = symbols.fakes if symbols is not None else None
        trace(structure, example, record=record, operators=False, mode=mode, fakes=fakes)
    # Code that returns another of its tensors may return a shard
    mode.calls.append(f"returns {[(path, mode.place(tensor)) for path, tensor in tensors(record.output)]}")
    holds = symbols.holds() if symbols is not None else None
    return CallFlow(_digest(mode.calls), _digest(mode.sizes), holds, record.read)
