"""Direct calls: of a sharded model's modules by other code than its forward, with whole tensors.

[Note: direct calls cost little inside of forward] A forward hook costs microseconds in each call of its module, and
most modules of a sharded model would have two. So a module without other hooks gets a subclass of its class with
another ``forward``, which costs a tenth of that; one with hooks pays already, and conversions must come outside of
them. A ``forward`` in the instance would do, but Dynamo compiles again for each object that it finds there.

The name of the outermost call is set around forward alone, in a ``finally``: hooks do not run after an interruption."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tp_ext.auto.modules.boundary_edits import Converted, CopiedArguments
from tp_ext.auto.modules.leaves import empty_of
from tp_ext.auto.record.boundary import Edit, EditPlace, EditsOfModules, edits_at
from tp_ext.auto.record.edits import Conversion, DirectCall, leaf_name
from tp_ext.auto.record.forwards import EnteredForward, options_of
from tp_ext.auto.record.kept import while_used
from tp_ext.auto.record.record import tensors
from tp_ext.auto.search.direct_calls import with_parents
from tp_ext.auto.search.localize import replaced, replaced_argument
from tp_ext.auto.search.plans import Plan
from tp_ext.conversions import I, R, S
from tp_ext.group import ParallelGroup

RETURNED = {"return_dict", "output_attentions", "output_hidden_states", "output_router_logits", "use_cache"}
"""Names of transformers' options that decide what is returned, which is compared."""


class Outermost:
    """The outermost call of a module of the model that runs now, by its name; "": none. All others are inside of it."""

    name = ""

    def __getstate__(self) -> dict[str, Any]:
        return {}


class Conversions:
    """The conversions of a direct call of a module.

    Attributes:
        takes_any: it is a layer that takes any number of dims before its last ones. in_hooks: hooks of the module
            convert, outside of its others. entered: they have run before the forward that comes next. converting: and
            this is a direct call.
    """

    def __init__(
        self, outermost: Outermost, direct: DirectCall, group: ParallelGroup, takes_any: bool, tokens: bool
    ) -> None:
        self.outermost, self.direct, self.group, self.takes_any = outermost, direct, group, takes_any
        # With sharded tokens, any module can: a recomputation must know whether its forward had them sharded
        self.checks_backward = direct.converts or tokens

        self.slices = [edit for edit in direct.values if edit.types == (I, S)]
        self.results = [edit for edit in direct.values if edit.after is I]
        # The gradient of a slice is that of this rank's elements: summed with those of the others
        copies = (*(edit for edit in direct.gradients if edit.types == (I, R)), *self.slices)
        self.copies = CopiedArguments(list(dict.fromkeys(edit.path for edit in copies)), group)
        self.partial = [edit for edit in direct.gradients if edit.types == (R, I)]
        self.in_hooks = self.entered = self.converting = False

    def is_direct(self) -> bool:
        """Returns whether other code than forward makes the call that begins now: what backward recomputes ran inside
        of forward.

        One that converts nothing may count as direct then, too: modules inside of it are inside of a call either way.

        Raises:
            RuntimeError: it is one inside of a checkpoint, whose recomputation would look like one of forward's.
        """
        if self.outermost.name:
            return False
        if self.checks_backward:
            in_backward, in_checkpoint = _place()
            if in_checkpoint and not in_backward:
                self.refuse("it is inside of torch.utils.checkpoint")
            return not in_backward
        return True

    def refuse(self, why: str) -> None:
        raise RuntimeError(
            f"{self.direct.module}: cannot be called so by other code than the forward of the model that tp_ext.auto "
            f"has sharded: {why}. Let forward call it, by an argument of its own: calls with new arguments are proven"
        )

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments of a direct call as those of a call in forward."""
        direct = self.direct
        if direct.refused or (direct.refused_gradients and torch.is_grad_enabled()):
            self.refuse(direct.refused or direct.refused_gradients)
        parameters = inspect.signature(type(module).forward).parameters
        for name, value in options_of(module, args, kwargs).items():
            default = repr(parameters[name].default) if name in parameters else None
            if value not in (*direct.options.get(name, ()), default) and name not in RETURNED:
                self.refuse(f"forward does not call it with {name}={value}")
        args, kwargs = self.copies.before(module, args, kwargs)
        for edit, dims in zip(self.slices, direct.dims, strict=True):

            def sliced(x: Tensor, edit: Conversion = edit, dims: int = dims) -> Tensor:
                return self.converted(edit, dims, x)

            args, kwargs = replaced_argument(module, args, kwargs, edit.path, sliced)
        return args, kwargs

    def leave(self, module: nn.Module, output: Any) -> Any:
        """The results of a direct call, whole."""
        returned = dict(tensors(output))  # by path: a call with other arguments may not return all
        for edit in self.results:
            if edit.path in returned:
                lengths = next(of[leaf_name(edit.path)] for of in self.direct.results if leaf_name(edit.path) in of)
                output = replaced(output, edit.path, functools.partial(self.converted, edit, len(lengths)))
        self.compare({leaf_name(path): tensor.shape for path, tensor in tensors(output)})
        for edit in self.partial:
            if edit.path in returned:
                output = replaced(output, edit.path, Converted(edit, self.group))
        return output

    def converted(self, edit: Conversion, dims: int, x: Tensor) -> Tensor:
        """A tensor of a call that has ``dims`` dims in forward, converted."""
        dim = self.moved(edit.dim, dims, x) if S in edit.types else edit.dim
        return Converted(dataclasses.replace(edit, dim=dim), self.group)(x)

    def moved(self, dim: int, dims: int, x: Tensor) -> int:
        """The place of a dim in a tensor with another number of dims before the last ones."""
        if x.dim() == dims:
            return dim
        if not self.takes_any or dim - dims + x.dim() < 0:
            self.refuse(f"it takes or returns a tensor of {x.dim()} dims, in forward of {dims}")
        return dim - dims + x.dim()

    def compare(self, shapes: dict[str, torch.Size]) -> None:
        """Refuses results that no call in forward has: another path through the code returned them, maybe shards."""

        def fits(results: dict[str, list[int]]) -> bool:
            return all(name in results and self.fits(shape, results[name]) for name, shape in shapes.items())

        if not any(map(fits, self.direct.results)):
            self.refuse(f"it returned {', '.join(f'{name} {tuple(shape)}' for name, shape in shapes.items())}")

    def fits(self, shape: torch.Size, lengths: list[int]) -> bool:
        if not self.takes_any and len(shape) != len(lengths):
            return False
        # From the last dim on: those that both have
        return all(wanted in (0, n) for n, wanted in zip(reversed(shape), reversed(lengths), strict=False))


@dataclass
class CallOfModule:
    """The state of direct calls that the forward of a module reads; ``conversions`` is None for the model itself.

    Attributes:
        has_hooks: a call of the model's ``forward`` by name goes through them. entered: they have run before this one.
    """

    name: str
    outermost: Outermost
    conversions: Conversions | None
    has_hooks: bool = False
    entered: bool = False


class DirectlyCalled(nn.Module):
    """A module whose forward converts in a direct call.

    It becomes a base of an existing module's class, before what that is. One constructed anew, as ``type(layer)(...)``,
    converts nothing."""

    tp_call: CallOfModule | None = None

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class is made while the program runs: pickle would not find it by its name
        return _empty, empty_of(type(self).__bases__[1]), self.__getstate__()


@while_used
def with_direct_calls(cls: type[nn.Module]) -> type[nn.Module]:
    """The subclass of a module's class with a forward that converts; one for each class."""

    @functools.wraps(cls.forward)
    def forward(self: DirectlyCalled, *args: Any, **kwargs: Any) -> Any:
        return _forward(self, cls.forward, args, kwargs)

    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (DirectlyCalled, cls), {**names, "forward": forward})


def _empty(make: Callable[[Any], nn.Module], cls: type[nn.Module]) -> nn.Module:
    module = make(cls)
    module.__class__ = with_direct_calls(type(module))
    return module


def _forward(module: DirectlyCalled, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Calls the forward of a module's own class, with conversions if it is the outermost call."""
    call = module.tp_call
    if call is None:
        return forward(module, *args, **kwargs)
    conversions, outermost = call.conversions, call.outermost
    if call.has_hooks:
        # A copy without hooks, such as a pipeline makes, has none to go through
        if not call.entered and any(edits_at(module, EnteredForward)):
            return module(*args, **kwargs)
        call.entered = False
    in_hooks = conversions is not None and conversions.in_hooks
    if conversions is None:
        is_outermost = not outermost.name
    elif in_hooks:
        # Called by name, past its hooks; in backward by a checkpoint around this forward, which hooks surrounded
        if not conversions.entered and not _place()[0] and any(edits_at(module, ConvertedCall)):
            return module(*args, **kwargs)
        is_outermost = conversions.entered and not outermost.name and conversions.converting
        conversions.entered = False
    else:
        is_outermost = conversions.is_direct()
    if not is_outermost:
        return forward(module, *args, **kwargs)
    if conversions is not None and not in_hooks:
        args, kwargs = conversions.enter(module, args, kwargs)
    outermost.name = call.name
    try:
        output = forward(module, *args, **kwargs)
    finally:
        outermost.name = ""
    return output if conversions is None or in_hooks else conversions.leave(module, output)


@dataclass
class ConvertedCall(Edit):
    """The conversions of direct calls of a module that has other hooks."""

    conversions: Conversions
    place = EditPlace.CALL

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        conversions = self.conversions
        conversions.entered = True
        if conversions.outermost.name:
            return None
        conversions.converting = conversions.is_direct()
        return conversions.enter(module, args, kwargs) if conversions.converting else None

    def after(self, module: nn.Module, output: Any) -> Any:
        conversions = self.conversions
        if conversions.outermost.name or not conversions.converting:
            return output
        conversions.converting = False
        return conversions.leave(module, output)


@torch.compiler.disable  # a break of the graph: Dynamo would not compile again in backward
def _place() -> tuple[bool, bool]:
    """Returns whether a backward runs, and whether ``torch.utils.checkpoint`` is among the callers."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != "torch.utils.checkpoint":
        frame = frame.f_back
    return torch._C._current_graph_task_id() >= 0, frame is not None


def convert_direct_calls(
    model: nn.Module, plan: Plan, group: ParallelGroup, edits: EditsOfModules, is_guarded: bool
) -> None:
    """Lets all modules convert that need it, or have one inside that does; ``model.forward(..)`` by name runs the hooks
    of a guarded model, which look at arguments and complete results. After all other edits and forwards."""
    outermost = Outermost()
    needed = {name for direct in plan.direct_calls if direct.converts for name in with_parents(direct.module)}
    tokens = any(edit.of_tokens for edit in plan.conversions)
    for direct in plan.direct_calls:
        if direct.module in needed:
            module = model.get_submodule(direct.module)
            takes_any = plan.roles.get(direct.module) in ("column", "row", "vocab")
            conversions = Conversions(outermost, direct, group, takes_any, tokens)
            hooked = module in edits or module._forward_pre_hooks or module._forward_hooks
            # A forward in the instance changes sizes of calls, which those of conversions must not be among
            if hooked or "forward" in vars(module):
                conversions.in_hooks = True
                edits.setdefault(module, []).append(ConvertedCall(conversions))
            _convert(module, CallOfModule(direct.module, outermost, conversions))
    if needed or is_guarded:
        call = CallOfModule("the model", outermost, None, has_hooks=is_guarded)
        _convert(model, call)
        if is_guarded:
            edits.setdefault(model, []).append(EnteredForward(call))


def _convert(module: nn.Module, call: CallOfModule) -> None:
    module.__class__ = with_direct_calls(type(module))
    module.tp_call = call  # type: ignore[assignment]
