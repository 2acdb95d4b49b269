"""One run of a model on fake tensors: its operators with the dims of their tensors, calls of modules, calls from
Python.

The model is not touched and may be on meta: parameters and buffers are replaced by fakes. A dispatch mode sees
operators; a function mode sees the calls of the model's own code, and keeps attention, cross entropy and dropout
whole."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from tp_ext.auto import torch_rules as torch_rules  # registers the rules
from tp_ext.auto.channel_rules import group_norm
from tp_ext.auto.constraints import running
from tp_ext.auto.dims import Atom, Dim, Reason, pin
from tp_ext.auto.edits import Path
from tp_ext.auto.forwards import CalledForward
from tp_ext.auto.gradients import of_call, pin_hooked, take_backward_hooks, watched_gradients
from tp_ext.auto.multi_head import multi_head_attention, plain_paths
from tp_ext.auto.rules import Op, Rule, draws_random_numbers, no_rule, rule_of
from tp_ext.auto.unchanged import unchanged
from tp_ext.mesh_program.partition_spec import P

FAKES = (
    "torch._subclasses", "torch._prims", "torch._refs", "torch._meta", "torch._decomp", "torch.utils._python", __name__,
    "tp_ext.auto.rules",
)  # fmt: skip
WITHOUT_GRADIENT = {"detach", "argmax", "argmin", "argsort", "zeros_like", "ones_like", "empty_like", "full_like"}
MEMORY_VIEWS = {
    "view", "_unsafe_view", "_reshape_alias", "t", "transpose", "permute", "unsqueeze", "squeeze", "expand", "alias",
    "detach", "slice", "split", "split_with_sizes", "select", "unbind", "chunk", "unfold", "diagonal", "as_strided",
    "view_as_real", "view_as_complex",
}  # results share the memory of the first argument  # fmt: skip
WITHOUT_GRADIENT |= {"new_empty", "new_zeros", "new_full", "new_ones", "new_empty_strided", "new_tensor"}


def tensors(value: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """The tensors of a nested structure, each with the keys that lead to it."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from tensors(inner, (*path, key))
    elif isinstance(value, list | tuple):
        for i, inner in enumerate(value):
            yield from tensors(inner, (*path, i))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors(getattr(value, field.name, None), (*path, field.name))


@dataclasses.dataclass(eq=False)
class Call:
    """One call of a module: its tensors in and out, the operators from ``start`` to ``stop``, and the calls from Python
    from ``first`` to ``last``, the ends excluded."""

    module: str
    inputs: list[tuple[Path, Tensor]]
    start: int
    outputs: list[tuple[Path, Tensor]] = dataclasses.field(default_factory=list)
    stop: int = sys.maxsize
    first: int = 0
    last: int = sys.maxsize
    order: int = 0  # among all calls, and one more than that of the last call inside of it
    end: int = sys.maxsize
    training: bool = False
    caller: Call | None = None

    def around(self, other: Call) -> bool:
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

    @property
    def line(self) -> str:
        """Of the user's source."""
        return self.reason.line


@dataclasses.dataclass(eq=False)
class RandomCall:
    """A call of ``F.dropout`` or attention, which may draw a mask of the dims of ``masked``."""

    module: str
    name: str
    masked: Tensor
    place: int
    index: int  # among the calls from Python
    call: Call  # of the module
    always: bool  # it draws although the module is in eval mode


class Record:
    """Record of one run of a model. Tensors are fakes, kept alive so that their ids stay theirs."""

    def __init__(self) -> None:
        self.dims: dict[int, list[Dim]] = {}
        self.kept: list[Tensor] = []
        self.steps: list[Step] = []
        self.calls: list[Call] = []
        self.maker: dict[int, Step] = {}
        self.parameters: dict[int, tuple[str, Tensor]] = {}
        self.buffers: dict[int, tuple[str, Tensor]] = {}
        self.inputs: list[tuple[Path, Tensor]] = []
        self.differentiable: set[int] = set()
        self.from_inputs: set[int] = set()  # those that have a gradient if the inputs have
        self.python_calls: list[tuple[str, str, list[Tensor]]] = []
        self.lines: list[str] = []  # of the user's source, of each call from Python; only with operators
        self.random_calls: list[RandomCall] = []
        self.constraints: list[tuple[Dim, Reason]] = []  # dims that must be sharded
        self.factories: dict[int, str] = {}  # id of a tensor made of no other -> the operator
        self.writes: dict[int, list[Step]] = {}  # id of a tensor with memory of its own -> operators that write into it
        self.functions: dict[int, str] = {}  # id of a result of Python's autograd.Function, or one with a hook -> which
        self.stored: dict[int, str] = {}  # id of a tensor that an attribute of a module holds at the end -> the module
        self.problems: list[tuple[str, str]] = []  # modules whose code cannot be sharded, with the reason
        self.direct: list[str] = []  # modules whose forward code calls by name, past their hooks
        self.output: Any = None
        self.modules = [""]  # those whose forward runs now
        self.running: list[Call] = []  # their calls
        self.paused = False
        self.is_examined = False  # a backward runs, whose operators pin dims and are no steps

    def dims_of(self, tensor: Tensor) -> list[Dim]:
        found = self.dims.get(id(tensor))
        if found is None:
            found = [[Atom(n)] for n in tensor.shape]
            self.put(tensor, found)
        return found

    def root_of(self, tensor: Tensor) -> Tensor:
        """The tensor whose memory a view shares, as far as the record knows."""
        while id(tensor) in self.maker and self.maker[id(tensor)].name in MEMORY_VIEWS:
            tensor = self.maker[id(tensor)].inputs[0]
        return tensor

    def put(self, tensor: Tensor, dims: list[Dim]) -> None:
        self.dims[id(tensor)] = dims
        self.kept.append(tensor)

    def add(self, op: Op, is_loss: bool = False) -> None:
        """Adds an operator whose rule has been applied."""
        for tensor in op.outputs:
            self.dims_of(tensor)
        step = Step(
            len(self.steps),
            op.name,
            self.modules[-1],
            op.inputs,
            op.outputs,
            op.contracted,
            op.reason,
            op.args,
            op.kwargs,
            is_loss,
        )
        self.steps.append(step)
        for tensor in op.outputs:
            if any(tensor is t for t in op.inputs):
                self.writes.setdefault(id(self.root_of(tensor)), []).append(step)
        self.kept += op.inputs
        for reached in (self.differentiable, self.from_inputs) if op.name not in WITHOUT_GRADIENT else ():
            if any(id(t) in reached for t in op.inputs):
                reached |= {id(t) for t in op.outputs if t.is_floating_point() or t.is_complex()}
        for tensor in op.outputs:
            self.maker.setdefault(id(tensor), step)

    def draw(self, name: str, masked: Tensor, draws: bool) -> None:
        """Adds a random call of the module that runs."""
        call = self.running[-1]
        place, index = len(self.steps), len(self.python_calls) - 1
        self.random_calls.append(RandomCall(call.module, name, masked, place, index, call, draws and not call.training))

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


def source_line() -> str:
    """The line of code that runs now, outside of torch and of this package."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if "/torch/" not in name and "/tp_ext/auto/" not in name and not name.startswith("<"):
            return f"{name.rpartition('/')[2]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


class _Operators(TorchDispatchMode):
    """Applies the rule of every operator."""

    def __init__(self, record: Record, rules: Mapping[str, Rule]) -> None:
        super().__init__()
        self.record, self.rules = record, rules

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        record = self.record
        if not record.paused:
            inputs = [t for _, t in tensors([list(args), kwargs])]
            outputs = [t for _, t in tensors(result)]
            if outputs and not inputs:  # a factory: its dims are new ones
                record.factories.update((id(t), func._schema.name.rpartition("::")[2]) for t in outputs)
                record.kept += outputs
            if outputs and (inputs or draws_random_numbers(func)):
                namespace, name = func._schema.name.split("::")
                reason = record.reason(name if namespace in ("aten", "prims") else func._schema.name)
                op = Op(name, args, kwargs, inputs, outputs, record, reason)
                try:
                    rule_of(func, self.rules)(op)
                except (AttributeError, IndexError, KeyError, TypeError):  # arguments that the rule does not know
                    no_rule(op)
                if record.is_examined:
                    pin(op.contracted, reason)
                    for tensor in outputs:
                        record.dims_of(tensor)
                    record.kept += [*inputs, *outputs]
                elif inputs:
                    record.add(op)
        return result


def _is_of_fakes(caller: Any) -> bool:
    """True for a call that torch makes to compute with fakes; code that enters an operator past Python, as
    TorchScript's does, leaves the function mode active there."""
    frame = caller
    while frame.f_globals.get("__name__") in ("torch._ops", "tp_ext.auto.sizes"):  # which hand a call on
        frame = frame.f_back
    return str(frame.f_globals.get("__name__")).startswith(FAKES)


class _Calls(TorchFunctionMode):
    """Records the calls from Python, and keeps those whole whose operators would have dims in common with nothing."""

    def __init__(self, record: Record, operators: bool) -> None:
        super().__init__()
        self.record, self.operators = record, operators

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        record = self.record
        if _is_of_fakes(sys._getframe(1)):
            return func(*args, **kwargs)
        whole = WHOLE.get(func)
        if not record.paused and not record.is_examined and (answer := of_call(record, func, args)) is not None:
            return answer
        if record.paused or record.is_examined or whole is None:
            result = func(*args, **kwargs)
            if not record.paused and not record.is_examined:
                self.log(func, result)
            return result
        record.paused = True
        try:
            result = func(*args, **kwargs)
            seen = [result, *SHOWN[func](args, kwargs)] if func in SHOWN else result
        finally:
            record.paused = False
        self.log(func, seen)
        if self.operators:
            whole(record, args, kwargs, seen)
        return result

    def log(self, func: Any, result: Any) -> None:
        found = [t for _, t in tensors(result)]
        if found:
            self.record.python_calls.append((self.record.modules[-1], getattr(func, "__name__", str(func)), found))
            self.record.lines.append(source_line() if self.operators else "")
            self.record.kept += found


def _argument(args: Sequence[Any], kwargs: Mapping[str, Any], place: int, name: str, default: Any = None) -> Any:
    return args[place] if len(args) > place else kwargs.get(name, default)


def _cross_entropy(record: Record, args: Sequence[Any], kwargs: Mapping[str, Any], result: Tensor) -> None:
    """The classes may be sharded: three numbers of each row are summed over the ranks."""
    logits = _argument(args, kwargs, 0, "input")
    op = Op("cross_entropy", args, kwargs, [logits], [result], record, record.reason("cross_entropy"))
    op.contracted = op.dims()[1 if logits.dim() > 1 else 0]
    record.add(op, is_loss=True)


def _dropout(record: Record, args: Sequence[Any], kwargs: Mapping[str, Any], result: Tensor) -> None:
    x = _argument(args, kwargs, 0, "input")
    op = Op("dropout", args, kwargs, [x], [result], record, record.reason("dropout"))
    if result is not x:
        op.give(op.dims())
        record.add(op)
    record.draw(
        "dropout", x, bool(_argument(args, kwargs, 1, "p", 0.5) and _argument(args, kwargs, 2, "training", True))
    )


def _attention(record: Record, args: Sequence[Any], kwargs: Mapping[str, Any], result: Tensor) -> None:
    """Batch and heads are the same in q, k, v and mask; with fewer heads in k and v, those of q are groups of them."""
    q, k, v = (_argument(args, kwargs, i, name) for i, name in enumerate(("query", "key", "value")))
    mask = _argument(args, kwargs, 3, "attn_mask")
    inputs = [q, k, v] + ([] if mask is None else [mask])
    name = "scaled_dot_product_attention"
    op = Op(name, args, kwargs, inputs, [result], record, record.reason(name))
    of_q, of_k, of_v = op.dims(0), op.dims(1), op.dims(2)
    for i in range(q.dim() - 2):
        op.unify(of_k[i], of_v[i])
        if q.shape[i] == k.shape[i]:
            op.unify(of_q[i], of_k[i])
        elif i == q.dim() - 3:
            op.unify(of_q[i], [*of_k[i], Atom(q.shape[i] // k.shape[i])])
        else:
            op.pin(of_q[i], of_k[i])
    op.unify(of_k[-2], of_v[-2])
    op.unify(of_q[-1], of_k[-1])
    op.pin(of_k[-2], of_q[-1])
    if mask is not None:
        scores = [*of_q[:-1], of_k[-2]]
        for i, dim in enumerate(reversed(op.dims(3)), 1):
            if mask.shape[-i] != 1:
                op.unify(dim, scores[-i])
    op.give([*of_q[:-1], of_v[-1]])
    record.add(op)
    record.draw(name, result, bool(_argument(args, kwargs, 4, "dropout_p", 0.0)))


def _statistics(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """A tensor of the statistics of a group norm, as many as it has groups."""
    x = _argument(args, kwargs, 0, "input")
    return [x.new_empty(x.shape[0], _argument(args, kwargs, 1, "num_groups"))]


def _group_norm(record: Record, args: Sequence[Any], kwargs: Mapping[str, Any], result: list[Tensor]) -> None:
    inputs = [t for _, t in tensors([list(args), kwargs])]
    op = Op("native_group_norm", args, kwargs, inputs, result, record, record.reason("native_group_norm"))
    group_norm(op, result[1].shape[1])
    record.add(op)


# Tensors whose shapes show what those of the result do not: integers of a call that must be local
SHOWN: dict[Any, Callable[[Sequence[Any], Mapping[str, Any]], list[Tensor]]] = {
    F.group_norm: _statistics,
    torch.group_norm: _statistics,
}
WHOLE: dict[Any, Callable[[Record, Sequence[Any], Mapping[str, Any], Any], None]] = {
    F.scaled_dot_product_attention: _attention,
    F.cross_entropy: _cross_entropy,
    F.dropout: _dropout,
    F.multi_head_attention_forward: multi_head_attention,
    F.group_norm: _group_norm,
    torch.group_norm: _group_norm,
}


def _watch(model: nn.Module, record: Record) -> None:
    """Records calls of modules, by hooks and forwards that :func:`unchanged` removes again."""
    running = record.running

    def watch(name: str, module: nn.Module) -> None:
        hooked = take_backward_hooks(record, name, module)

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            call = Call(name, list(tensors((args, kwargs))), len(record.steps))
            call.first, call.order = len(record.python_calls), len(record.calls)
            call.training, call.caller = module.training, running[-1] if running else None
            record.calls.append(call)
            running.append(call)
            record.modules.append(name)
            record.kept += [t for _, t in call.inputs]

        def after(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
            call = running.pop()
            call.outputs, call.stop = list(tensors(result)), len(record.steps)
            call.last, call.end = len(record.python_calls), len(record.calls)
            record.modules.pop()
            record.kept += [t for _, t in call.outputs]
            if hooked:  # its results' gradients are completed where they are used
                record.functions.update((id(t), hooked) for _, t in call.outputs)

        module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
        module.register_forward_hook(after, with_kwargs=True)

    def called(name: str) -> None:
        if name not in record.direct:
            record.direct.append(name)

    for name, module in model.named_modules():
        watch(name, module)
        if name and not isinstance(module, torch.jit.ScriptModule):
            CalledForward(module, functools.partial(called, name)).install()


def arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and the keyword arguments that an example means.

    Raises:
        TypeError: it is neither a dict nor a tuple.
    """
    if isinstance(example, Mapping):
        return (), dict(example)
    if isinstance(example, tuple):
        return example, {}
    raise TypeError(f"example: {type(example).__name__} must be a dict of keyword arguments or a tuple of arguments")


def trace(
    model: nn.Module,
    example: Any,
    *,
    shapes: Mapping[str, Sequence[int]] | None = None,
    rules: Mapping[str, Rule] | None = None,
    record: Record | None = None,
    operators: bool = True,
    grad: bool = True,
    mode: TorchFunctionMode | None = None,
) -> Record:
    """Runs a model once on fakes and returns the record.

    Args:
        shapes: local shapes of parameters and buffers by name, in place of their own.
        record: written to, so that the caller has what an exception leaves of it.
        grad: run as in training: code that asks finds gradients enabled.
        operators: False: only calls from Python and of modules are recorded, faster.
        mode: sees the calls from Python before they are recorded, and may change them.
    """
    record = Record() if record is None else record
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    made: dict[int, tuple[Tensor, Tensor]] = {}  # with the original, so that its id stays its own

    def fake(value: Any, shape: Sequence[int] | None = None) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) not in made:
            if shape is None or tuple(shape) == tuple(value.shape):
                fake_tensor = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
            else:
                fake_tensor = torch.empty(tuple(shape), dtype=value.dtype)
            made[id(value)] = fake_tensor, value
        return made[id(value)][0]

    # A module under two names once, and no ties added: functional_call would leave fakes in it
    named = [
        (f"{name}.{own}" if name else own, tensor)
        for name, module in model.named_modules()
        for own, tensor in [*module._parameters.items(), *module._buffers.items()]
        if tensor is not None
    ]
    with fakes:
        state = {name: fake(tensor, (shapes or {}).get(name)) for name, tensor in named}
        args, kwargs = tree_map(fake, arguments(example))
    for name, parameter in named:
        if not isinstance(parameter, nn.Parameter):
            continue
        record.parameters.setdefault(id(state[name]), (name, state[name]))
        pin_hooked(record, name, parameter, state[name])
        if parameter.requires_grad:
            record.differentiable.add(id(state[name]))
    record.buffers = {id(state[name]): (name, state[name]) for name, _ in model.named_buffers() if name in state}
    record.inputs = list(tensors((args, kwargs)))
    record.from_inputs = {id(t) for _, t in record.inputs if t.is_floating_point() or t.is_complex()}
    record.differentiable |= {id(made[id(t)][0]) for _, t in tensors(arguments(example)) if t.requires_grad}
    for path, tensor in record.inputs:
        for dim in record.dims_of(tensor):
            pin(dim, Reason(f"a dim of the input {'.'.join(map(str, path[1:]))}"))
    modes = [
        torch.enable_grad() if grad else torch.no_grad(),
        watched_gradients(record, tensors),
        fakes,
        _Calls(record, operators),
    ]
    if operators:
        modes.append(_Operators(record, rules or {}))
    if mode is not None:
        modes.append(mode)
    with unchanged(model), contextlib.ExitStack() as stack:
        _watch(model, record)
        stack.enter_context(plain_paths())
        for mode in modes:
            stack.enter_context(mode)  # type: ignore[arg-type]
        if operators:
            stack.callback(running.reset, running.set(record))
        record.output = torch.func.functional_call(model, state, args, kwargs, tie_weights=False)
        for name, module in model.named_modules():
            kept = {
                key: value for key, value in vars(module).items() if key not in ("_parameters", "_buffers", "_modules")
            }
            record.stored.update((id(t), name) for _, t in tensors(kept))
    if operators:
        pin_unused(record)
    return record


def pin_unused(record: Record) -> None:
    """Keeps parameters whole that the example does not use: nothing is known of what another call does with them."""
    used = {id(t) for step in record.steps for t in step.inputs}
    for id_, (_, parameter) in record.parameters.items():
        for dim in record.dims_of(parameter) if id_ not in used else ():
            pin(dim, Reason("the example, which does not use it: plan with one that does"))
