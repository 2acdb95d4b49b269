"""The record of one run of a model on fakes: its operators with the dims of their tensors, and calls of modules."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor

from tp_ext.auto.record.dims import Atom, Dim, Reason, pin
from tp_ext.auto.record.edits import LeafPath
from tp_ext.auto.record.operators import row_of
from tp_ext.auto.record.rules import OperatorCall
from tp_ext.mesh_program.partition_spec import P

PLAIN = frozenset({type(None), bool, int, float, str})
T = TypeVar("T")
MAPPINGS = (dict, Mapping)  # dict first: of an abstract class each question takes long


def tensors(value: Any, path: LeafPath = ()) -> Iterator[tuple[LeafPath, Tensor]]:
    """The tensors of a nested structure, each with the keys that lead to it."""
    if isinstance(value, Tensor):
        yield path, value
    elif type(value) in PLAIN:  # most leaves: what follows asks more of a value
        return
    elif isinstance(value, MAPPINGS):
        for key, inner in value.items():
            yield from tensors(inner, (*path, key))
    elif isinstance(value, list | tuple):
        for i, inner in enumerate(value):
            yield from tensors(inner, (*path, i))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        # After Mapping: an output of transformers is both, and its items leave out the fields that are None
        for field in dataclasses.fields(value):
            yield from tensors(getattr(value, field.name, None), (*path, field.name))


@dataclasses.dataclass(eq=False)
class ModuleCall:
    """One call of a module: its tensors in and out, the operators from ``start`` to ``stop``, and the calls from Python
    from ``first`` to ``last``, the ends excluded."""

    module: str
    inputs: list[tuple[LeafPath, Tensor]]
    start: int
    outputs: list[tuple[LeafPath, Tensor]] = dataclasses.field(default_factory=list)
    stop: int = sys.maxsize
    first: int = 0
    last: int = sys.maxsize
    order: int = 0  # among all calls, and one more than that of the last call inside of it
    end: int = sys.maxsize
    training: bool = False
    caller: ModuleCall | None = None
    options: dict[str, str] = dataclasses.field(default_factory=dict)  # switches among the arguments

    def around(self, other: ModuleCall) -> bool:
        return self.order < other.order < self.end


@dataclasses.dataclass(eq=False)
class Step:
    """An operator that ran, in the module ``module``."""

    place: int
    name: str
    module: str
    inputs: list[Tensor]
    outputs: list[Tensor]
    contracted: Dim
    reason: Reason  # with the atoms that the operator needs whole
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    is_loss: bool = False
    function: Any = None  # that code called, of which the operator is a part
    index: int = 0  # of that call among those from Python

    @property
    def line(self) -> str:
        """The line of the user's source."""
        return self.reason.line


@dataclasses.dataclass(eq=False)
class RandomCall:
    """A call of ``F.dropout`` or attention, which may draw a mask of the dims of ``masked``."""

    module: str
    name: str
    masked: Tensor
    place: int
    index: int  # among the calls from Python
    call: ModuleCall  # of the module
    draws: bool  # with these arguments
    always: bool  # it draws although the module is in eval mode


class Record:
    """Record of one run of a model. Tensors are fakes, kept alive so that their ids stay theirs."""

    def __init__(self) -> None:
        self.dims: dict[int, list[Dim]] = {}
        self.kept: list[Tensor] = []
        self.steps: list[Step] = []
        self.calls: list[ModuleCall] = []
        self.maker: dict[int, Step] = {}
        self.parameters: dict[int, tuple[str, Tensor]] = {}
        self.buffers: dict[int, tuple[str, Tensor]] = {}
        self.inputs: list[tuple[LeafPath, Tensor]] = []
        self.shares_inputs = False  # dims of those of floating-point numbers may be sharded
        self.differentiable: set[int] = set()
        self.from_inputs: set[int] = set()  # those that have a gradient if the inputs have
        self.python_calls: list[tuple[str, str, list[Tensor]]] = []
        self.lines: list[str] = []  # of the user's source, of each call from Python; only with operators
        self.random_calls: list[RandomCall] = []
        self.other_draws: dict[str, bool] = {}  # module that draws in another way: whether in eval mode, too
        self.constraints: list[tuple[Dim, Reason]] = []  # dims that must be sharded
        self.factories: dict[int, str] = {}  # id of a tensor made of no other -> the operator
        self.views: dict[int, list[int]] = {}  # id of a tensor with memory of its own -> ids of its views
        self.writes: dict[int, list[Step]] = {}  # id of a tensor with memory of its own -> operators that write into it
        self.functions: dict[int, str] = {}  # id of a result of Python's autograd.Function, or one with a hook -> which
        self.stored: dict[int, str] = {}  # id of a tensor that an attribute of a module holds at the end -> the module
        self.problems: list[tuple[str, str]] = []  # modules whose code cannot be sharded, with the reason
        self.direct: list[str] = []  # modules whose forward code calls by name, past their hooks
        self.output: Any = None
        self.modules = [""]  # those whose forward runs now
        self.running: list[ModuleCall] = []  # their calls
        self.paused = False
        self.function: Any = None  # the call from Python that runs
        self.is_examined = False  # a backward runs, whose operators pin dims and are no steps
        self.numbers: list[str] = []  # lines of code that read a parameter or buffer as a number
        self.read: Any = None  # the numbers that code reads from arguments, of numbers.py
        self.without_values: list[str] = []  # arguments of which it would read some
        self.reachable: Any = None  # from the model's code, for the runs after this one

    def dims_of(self, tensor: Tensor) -> list[Dim]:
        dims = self.dims.get(id(tensor))
        if dims is None:
            dims = [[Atom(n)] for n in tensor.shape]
            self.put(tensor, dims)
        return dims

    def root_of(self, tensor: Tensor) -> Tensor:
        """The tensor whose memory a view shares, as far as the record knows."""
        while id(tensor) in self.maker and row_of(self.maker[id(tensor)].name).shares_memory:
            tensor = self.maker[id(tensor)].inputs[0]
        return tensor

    def memory_of(self, tensor: Tensor) -> list[int]:
        """The ids of the tensors that share the memory of a tensor, its own included."""
        root = id(self.root_of(tensor))
        return [root, *self.views.get(root, ())]

    def put(self, tensor: Tensor, dims: list[Dim]) -> None:
        self.dims[id(tensor)] = dims
        self.kept.append(tensor)

    def move(self, tensor: Tensor, before: Tensor) -> None:
        """Lets ``before``, an alias of a tensor with its old shape, stand for it in what was recorded: an operator has
        given the tensor another shape in place. Calls from Python keep it, since they are compared by later shapes."""

        def moved(t: Tensor) -> Tensor:
            return before if t is tensor else t

        self.put(before, self.dims.pop(id(tensor), [[Atom(n)] for n in before.shape]))
        for step in self.steps:
            step.inputs, step.outputs = [*map(moved, step.inputs)], [*map(moved, step.outputs)]
        for pairs in (self.inputs, *(pairs for call in self.calls for pairs in (call.inputs, call.outputs))):
            pairs[:] = [(path, moved(t)) for path, t in pairs]
        tables: list[dict[int, Any]] = [self.maker, self.writes, self.factories, self.functions, self.views]
        for table in [*tables, self.parameters, self.buffers]:
            if id(tensor) in table:
                table[id(before)] = table.pop(id(tensor))
        for group in (self.differentiable, self.from_inputs):
            if id(tensor) in group:
                group.add(id(before))

    def add(self, op: OperatorCall, is_loss: bool = False) -> None:
        """Adds an operator whose rule has been applied."""
        # A rule may leave a second output without dims: it gets new ones, which nothing relates to the inputs
        for tensor in op.outputs:
            self.dims_of(tensor)
        step = Step(
            place=len(self.steps),
            name=op.name,
            module=self.modules[-1],
            inputs=op.inputs,
            outputs=op.outputs,
            contracted=op.contracted,
            reason=op.reason,
            args=op.args,
            kwargs=op.kwargs,
            is_loss=is_loss,
            function=self.function,
            index=len(self.python_calls),
        )
        self.steps.append(step)
        for tensor in op.outputs:
            if any(tensor is t for t in op.inputs):
                self.writes.setdefault(id(self.root_of(tensor)), []).append(step)
        self.kept += op.inputs
        results = [id(t) for t in op.outputs if t.is_floating_point() or t.is_complex()]
        written = [id_ for t in op.outputs if any(t is x for x in op.inputs) for id_ in self.memory_of(t)]
        for reached in (self.differentiable, self.from_inputs) if row_of(op.name).gradient else ():
            # Integers and Booleans, such as indices of a maximum, hand no gradient on
            if any(id(t) in reached for t in op.inputs):
                # What was written has a gradient where another view of its memory is read
                reached.update(results, written if results else ())
        for tensor in op.outputs:
            if row_of(op.name).shares_memory and id(tensor) not in self.maker:
                self.views.setdefault(id(self.root_of(op.inputs[0])), []).append(id(tensor))
            # A write in place does not replace the maker: by the maker a view leads back to its memory
            self.maker.setdefault(id(tensor), step)

    def draw(self, name: str, masked: Tensor, draws: bool) -> None:
        """Adds a random call of the module that runs."""
        call = self.running[-1]
        place, index = len(self.steps), len(self.python_calls) - 1
        always = draws and not call.training
        self.random_calls.append(RandomCall(call.module, name, masked, place, index, call, draws, always))

    def draw_whole(self) -> None:
        """Notes that the module that runs draws by an operator of torch, whose tensors stay whole."""
        if self.running:
            call = self.running[-1]
            self.other_draws[call.module] = self.other_draws.get(call.module, False) or not call.training

    def constrain(self, tensor: Tensor, spec: P) -> None:
        """Adds a constraint of the model's code: dims without an axis are pinned."""
        reason = self.reason(f"constraint {spec}")
        for i, dim in enumerate(self.dims_of(tensor)):
            if i < len(spec.dims) and spec.dims[i]:
                self.constraints.append((dim, reason))
            else:
                pin(dim, reason)

    def reason(self, what: str) -> Reason:
        return Reason(what, self.modules[-1], source_line())

    # ------------------------------------------------------------ of a record that is complete

    @functools.cached_property
    def calls_of(self) -> dict[str, list[ModuleCall]]:
        """The calls of each module."""
        calls: dict[str, list[ModuleCall]] = {}
        for call in self.calls:
            calls.setdefault(call.module, []).append(call)
        return calls

    @functools.cached_property
    def taken_by(self) -> dict[int, list[tuple[ModuleCall, LeafPath]]]:
        """The calls that take each tensor, by its id, with its place among their arguments."""
        return _by_tensor((t, (call, path)) for call in self.calls for path, t in call.inputs)

    @functools.cached_property
    def returned_by(self) -> dict[int, list[tuple[ModuleCall, LeafPath]]]:
        """The calls that return each tensor, by its id, with its place in their results."""
        return _by_tensor((t, (call, path)) for call in self.calls for path, t in call.outputs)

    @functools.cached_property
    def uses(self) -> dict[int, list[int]]:
        """The operators that use each tensor, by its id."""
        return _by_tensor((t, step.place) for step in self.steps for t in {id(t): t for t in step.inputs}.values())


def _by_tensor(pairs: Iterable[tuple[Tensor, T]]) -> dict[int, list[T]]:
    values: dict[int, list[T]] = {}
    for tensor, value in pairs:
        values.setdefault(id(tensor), []).append(value)
    return values


def source_line() -> str:
    """The line of code that runs now, outside of torch and of this package."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        # A name such as <string> is no file in which a user finds the line
        if "/torch/" not in name and "/tp_ext/auto/" not in name and not name.startswith("<"):
            return f"{name.rpartition('/')[2]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def span_start(step: Step, tensor: Tensor) -> tuple[int, int]:
    """The dim along which an operator splits its input, and where in it one of its results starts."""
    source = step.inputs[0]
    if step.name == "slice":
        dim = (step.args[1] if len(step.args) > 1 else 0) % source.dim()
        start = (step.args[2] or 0) if len(step.args) > 2 else 0
        return dim, start + source.shape[dim] if start < 0 else start
    dim = (step.args[2] if len(step.args) > 2 else 0) % source.dim()
    start = 0
    for result in step.outputs:
        if result is tensor:
            break
        start += result.shape[dim]
    return dim, start
