"""One run of a model on fake tensors: its operators with the dims of their tensors, calls of modules, calls from
Python.

The model is not touched and may be on meta: parameters and buffers are replaced by fakes. A dispatch mode sees
operators; a function mode sees the calls of the model's own code, and keeps attention, cross entropy and dropout
whole."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tp_ext.auto.record import torch_rules as torch_rules  # registers the rules
from tp_ext.auto.record.arguments import with_tensors
from tp_ext.auto.record.boundary import install
from tp_ext.auto.record.dims import Reason, pin
from tp_ext.auto.record.edits import LeafPath
from tp_ext.auto.record.forwards import CalledForward, options_of
from tp_ext.auto.record.gradients import of_call, pin_hooked, take_backward_hooks, watched_gradients
from tp_ext.auto.record.keywords import by_place
from tp_ext.auto.record.known_results import device_of
from tp_ext.auto.record.multi_head import plain_paths
from tp_ext.auto.record.numbers import READ, Change, Numbers
from tp_ext.auto.record.record import PLAIN, ModuleCall, Record, source_line, tensors
from tp_ext.auto.record.rules import OperatorCall, Rule, draws_random_numbers, no_rule, rule_of
from tp_ext.auto.record.unchanged import reachable_from, unchanged
from tp_ext.auto.record.whole_calls import SHOWN, WHOLE_CALLS
from tp_ext.mesh_program.partition_spec import P

constrained_run: ContextVar[Record | None] = ContextVar("constrained_run", default=None)  # it collects constraints

CPU = torch.device("cpu")
FAKES = (
    "torch._subclasses", "torch._prims", "torch._refs", "torch._meta", "torch._decomp", "torch.utils._python", __name__,
    "tp_ext.auto.record.rules", "tp_ext.auto.record.numbers", "tp_ext.auto.record.known_results",
)  # fmt: skip


HANDED_ON = ("torch._ops", "tp_ext.auto.search.sizes", "tp_ext.auto.record.flow")  # by them, from the caller


class _OperatorRules(TorchDispatchMode):
    """Applies the rule of every operator."""

    def __init__(self, record: Record, rules: Mapping[str, Rule]) -> None:
        super().__init__()
        self.record, self.rules = record, rules

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (device := device_of(func, args)) is not None:
            return device
        kwargs = kwargs or {}
        record = self.record
        # Such as squeeze_, which changes the shape of its argument: the rule reads the shape before it
        before = args[0].detach() if torch.Tag.inplace_view in func.tags else None
        result = func(*args, **kwargs)
        # Without a rule: its result is a number, and an operator without a tensor as its result is no step
        if func._schema.name == READ and not record.paused:
            self.read(args[0])
        elif not record.paused:
            inputs = [t for _, t in tensors([list(args), kwargs])]
            outputs = [t for _, t in tensors(result)]
            if outputs and not inputs:  # a factory: its dims are new ones
                record.factories.update((id(t), func._schema.name.rpartition("::")[2]) for t in outputs)
                record.kept += outputs
            if draws_random_numbers(func):
                record.draw_whole()
            # A draw such as torch.rand(shape) has no inputs. It is pinned: all ranks would draw the same numbers
            if outputs and (inputs or draws_random_numbers(func)):
                namespace, name = func._schema.name.split("::")
                reason = record.reason(name if namespace in ("aten", "prims") else func._schema.name)
                called, schema = record.function, func._schema
                op = OperatorCall(name, args, kwargs, inputs, outputs, record, reason, called, schema)
                if before is not None:
                    record.move(args[0], before)
                    op.name, op.inputs = name.removesuffix("_"), [before, *inputs[1:]]
                self.apply_rule(func, op)
                # A sum over a sharded atom in a backward has no boundary of a module at which it is completed
                if record.is_examined:
                    pin(op.contracted, reason)
                    for tensor in outputs:
                        record.dims_of(tensor)
                    record.kept += [*inputs, *outputs]
                elif inputs:
                    record.add(op)
        return result

    def apply_rule(self, func: Any, op: OperatorCall) -> None:
        """Applies the rule of an operator. What a rule of this package does not fit is pinned: the arguments are none
        that it knows; a rule of the user's that does not fit is an error."""
        try:
            rule_of(func, self.rules)(op)
        except Exception:
            if func._schema.name in self.rules:
                raise
            no_rule(op)

    def read(self, tensor: Tensor) -> None:
        """Records that code reads a tensor of one element as a number, which must be no term of a sum over ranks."""
        record = self.record
        record.add(
            OperatorCall("item", (tensor,), {}, [tensor], [torch.empty_like(tensor)], record, record.reason("item"))
        )


def is_of_fakes(caller: Any) -> bool:
    """True for a call that torch makes to compute with fakes; code that enters an operator past Python, as
    TorchScript's does, leaves the function mode active there."""
    frame = caller
    while frame.f_globals.get("__name__") in HANDED_ON:
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
        # torch makes such calls to compute with fakes: the code of the model has not made them
        if is_of_fakes(sys._getframe(1)):
            return func(*args, **kwargs)
        whole = WHOLE_CALLS.get(func)
        if (
            not record.paused
            and not record.is_examined
            and (answer := of_call(record, func, by_place(func, args, kwargs)[0])) is not None
        ):
            return answer
        record.function = func
        if record.paused or record.is_examined or whole is None:
            result = func(*args, **kwargs)
            record.function = None
            if not record.paused and not record.is_examined:
                self.log(func, result)
            return result
        # The rule of the call stands for its operators, which must not be steps as well
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
        results = [t for _, t in tensors(result)]
        # Calls without a tensor as their result, such as size(), have no shape to compare
        if results:
            self.record.python_calls.append((self.record.modules[-1], getattr(func, "__name__", str(func)), results))
            self.record.lines.append(source_line() if self.operators else "")
            self.record.kept += results


def _fake(fakes: FakeTensorMode, value: Tensor, shape: Sequence[int] | None, has_symbols: bool) -> Tensor:
    # Past the dispatcher where it is not needed: for all parameters it takes as long as half of the operators
    with fakes if has_symbols else contextlib.nullcontext():
        options: dict[str, Any] = {"dtype": value.dtype, "device": "cpu" if has_symbols else "meta"}
        # With its strides: code asks whether it is contiguous; a local shape has no strides to copy
        if shape is None or tuple(shape) == tuple(value.shape):
            tensor = torch.empty_strided(value.shape, value.stride(), **options)
        else:
            tensor = torch.empty(tuple(shape), **options)
    return tensor if has_symbols else FakeTensor(fakes, tensor, CPU)


def _watch(model: nn.Module, record: Record, operators: bool) -> None:
    """Records calls of modules, by hooks and forwards that :func:`unchanged` removes again."""
    running = record.running

    def watch(name: str, module: nn.Module) -> None:
        hooked = take_backward_hooks(record, name, module)

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            call = ModuleCall(name, list(tensors((args, kwargs))), len(record.steps))
            call.first, call.order = len(record.python_calls), len(record.calls)
            call.training, call.caller = module.training, running[-1] if running else None
            call.options = options_of(module, args, kwargs) if operators else {}
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
            install(module, [CalledForward(module, functools.partial(called, name)).install()])


class Arguments(NamedTuple):
    """An example with arguments by position and by name, of a forward that takes any number by position."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and the keyword arguments that an example means.

    Raises:
        TypeError: it is neither a dict nor a tuple.
    """
    if isinstance(example, Mapping):
        return (), dict(example)
    if isinstance(example, Arguments):
        return example.args, example.kwargs
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
    mode: TorchFunctionMode | None = None,
    change: Change | None = None,
    fakes: FakeTensorMode | None = None,
    shares_inputs: bool = False,
    puts_back: bool = True,
) -> Record:
    """Runs a model once on fakes and returns the record.

    Args:
        shapes: local shapes of parameters and buffers by name, in place of their own.
        record: written to, so that the caller has what an exception leaves of it.
        operators: False: only calls from Python and of modules are recorded, faster.
        mode: sees the calls from Python before they are recorded, and may change them.
        change: of the numbers that code reads of parameters and buffers.
        fakes: the mode of the tensors of the example, where their lengths are symbols.
        shares_inputs: floating-point inputs may be sliced, as a cache is that a sharded model has returned whole.
        puts_back: False: the caller is inside of :func:`unchanged`.
    """
    record = Record() if record is None else record
    record.reachable = reachable_from(model)
    # Code may hold tensors that are no parameters or buffers, such as a table in a closure
    has_symbols, fakes = fakes is not None, fakes or FakeTensorMode(allow_non_fake_inputs=True)
    fakes_by_id: dict[int, tuple[Tensor, Tensor]] = {}  # with the original, so that its id stays its own

    def fake(value: Tensor, shape: Sequence[int] | None = None) -> Tensor:
        if value.layout != torch.strided:  # which has no fake
            return value
        if id(value) not in fakes_by_id:
            fakes_by_id[id(value)] = _fake(fakes, value, shape, has_symbols), value
        return fakes_by_id[id(value)][0]

    # A module under two names once, and no ties added: functional_call would leave fakes in it
    named = [
        (f"{name}.{attribute}" if name else attribute, tensor)
        for name, module in model.named_modules()
        for attribute, tensor in [*module._parameters.items(), *module._buffers.items()]
        if tensor is not None
    ]
    state = {name: fake(tensor, (shapes or {}).get(name)) for name, tensor in named}
    args, kwargs = with_tensors(arguments(example), fake)
    for name, parameter in named:
        if not isinstance(parameter, nn.Parameter):
            continue
        # A tied parameter is one, under its first name
        record.parameters.setdefault(id(state[name]), (name, state[name]))
        pin_hooked(record, name, parameter, state[name])
        # A frozen parameter has no gradient that would have to be complete
        if parameter.requires_grad:
            record.differentiable.add(id(state[name]))
    record.buffers = {id(state[name]): (name, state[name]) for name, _ in model.named_buffers() if name in state}
    record.inputs = list(tensors((args, kwargs)))
    # They may require no gradient in the example, and do so where the model is a part of a larger model
    record.from_inputs = {id(t) for _, t in record.inputs if t.is_floating_point() or t.is_complex()}
    record.differentiable |= {
        id(fakes_by_id[id(t)][0])
        for _, t in tensors(arguments(example))
        if t.requires_grad and t.layout == torch.strided
    }
    # Every rank gets the whole inputs
    record.shares_inputs = shares_inputs
    for path, tensor in record.inputs:
        for dim in record.dims_of(tensor) if not shares_inputs or id(tensor) not in record.from_inputs else ():
            pin(dim, Reason(f"a dim of the input {'.'.join(map(str, path[1:]))}"))
    given: dict[int, tuple[Tensor, list[LeafPath]]] = {}
    for path, tensor in tensors(arguments(example)):
        given.setdefault(id(tensor), (tensor, []))[1].append(path)
    numbers = Numbers(
        record,
        [(state[name], tensor) for name, tensor in named],
        [(fake(tensor), tensor, tuple(paths)) for tensor, paths in given.values()],
        change,
        None if has_symbols else fakes,
    )
    # Of either kind the mode entered last sees a call first: `mode` before _Calls, _OperatorRules before the fakes
    modes: list[Any] = [
        torch.enable_grad(),  # as in training: code may ask
        watched_gradients(record, tensors),
        fakes,
        numbers,
        _Calls(record, operators),
    ]
    if operators:
        modes.append(_OperatorRules(record, rules or {}))
    if mode is not None:
        modes.append(mode)
    with unchanged(model) if puts_back else contextlib.nullcontext(), _quiet_fakes(), contextlib.ExitStack() as stack:
        _watch(model, record, operators)
        stack.enter_context(plain_paths())
        for entered in modes:
            stack.enter_context(entered)
        # Only a run with operators has dims that a constraint can pin
        if operators:
            stack.callback(constrained_run.reset, constrained_run.set(record))
        record.output = torch.func.functional_call(model, state, args, kwargs, tie_weights=False)
        # Inside of `unchanged`, after which no module has what its forward has stored
        for name, module in model.named_modules():
            for key, value in vars(module).items():
                if type(value) not in PLAIN and key not in ("_parameters", "_buffers", "_modules"):
                    record.stored.update((id(t), name) for _, t in tensors(value))
    record.read = numbers.numbers()
    if operators:
        pin_unused(record)
    return record


@contextlib.contextmanager
def _quiet_fakes() -> Iterator[None]:
    """Keeps torch from logging the exceptions of fakes: sizes are tried, and what fails for good is reported."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def pin_unused(record: Record) -> None:
    """Keeps parameters whole that the example does not use: nothing is known of what another call does with them."""
    used = {id(t) for step in record.steps for t in step.inputs}
    for id_, (_, parameter) in record.parameters.items():
        for dim in record.dims_of(parameter) if id_ not in used else ():
            pin(dim, Reason("the example, which does not use it: plan with one that does"))


def constraint(x: Tensor, spec: P) -> Tensor:
    """Returns x; inside of :func:`tp_ext.auto.plan` its dims must be sharded as ``spec`` says.

    It is JAX's ``with_sharding_constraint``. After ``h = tp_ext.auto.constraint(h, P("tp", None))`` dim 0 must be
    sharded, dim 1 and those left out must be whole. Outside of a plan it is the identity, also in the sharded model.

    Args:
        x: any tensor of the model's forward.
        spec: for each dim an axis, any name, or None. One axis at most.

    Raises:
        TypeError: ``spec`` is no ``P``. ValueError: it has more dims than x, or several axes; inside of a plan: what it
            asks for conflicts with an operator of the model.
    """
    if not isinstance(spec, P):
        raise TypeError(f"spec: {spec!r} must be a P")
    if not isinstance(x, Tensor):
        raise TypeError(f"x: {type(x).__name__} must be a tensor")
    if len(spec.dims) > x.dim():
        raise ValueError(f"spec: {spec} must have at most the {x.dim()} dims of x, of shape {tuple(x.shape)}")
    if len(spec.axes) > 1:
        raise ValueError(f"spec: {spec} must name one axis at most: a plan has one")
    record = constrained_run.get()
    if record is not None:
        record.constrain(x, spec)
    return x
