"""Direct calls: of a sharded model's modules by other code than its forward, with whole tensors.

[Note: direct calls cost little inside of forward] A forward hook costs microseconds in each call of its module, and
most modules of a sharded model would have two. So a module without other hooks gets a ``forward`` in the instance,
which costs a tenth of that; one with hooks pays already, and conversions must come outside of them."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tp_ext.auto.modules.hooks import CopyArguments, GatherOutput, SliceArgument, SumOutput
from tp_ext.auto.record.edits import DirectCall, LeafPath
from tp_ext.auto.record.forwards import run_forward
from tp_ext.auto.record.record import tensors
from tp_ext.auto.search.localize import replaced
from tp_ext.group import ParallelGroup


@dataclass
class Outermost:
    """The outermost call of a module of the model that runs now: all others are inside of it.

    Attributes:
        name: of the module, the model's own is "model"; "": none runs. again: how often it runs inside of itself.
    """

    name: str = ""
    again: int = 0

    def __getstate__(self) -> dict[str, Any]:
        return {"name": "", "again": 0}


@dataclass
class PartialGradient:
    """Makes the gradient of a result partial: that of rank 0, and zeros."""

    path: LeafPath
    group: ParallelGroup

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        return replaced(output, self.path, self.converted)

    def converted(self, y: Tensor) -> Tensor:
        if self.group.rank == 0 or not (y.requires_grad and torch.is_grad_enabled()):
            return y
        # Zeros, and not none: every rank takes part in the sums of this backward
        return torch.where(torch.zeros((), dtype=torch.bool, device=y.device), y, y.detach())


class Conversions:
    """The conversions of a direct call of a module; none: those of the model itself, whose arguments are whole."""

    def __init__(self, outermost: Outermost, direct: DirectCall | None, group: ParallelGroup) -> None:
        self.outermost, self.direct = outermost, direct
        self.name = "model" if direct is None else f"model.{direct.module}"
        direct = direct or DirectCall("")
        self.converts = direct != DirectCall(direct.module)
        # The gradient of a slice is that of this rank's elements: summed with those of the others
        copies = list(dict.fromkeys((*direct.copies, *(edit.path for edit in direct.slices))))
        self.before: list[Any] = [CopyArguments(copies, group)] if copies else []
        self.before += [SliceArgument(edit, group) for edit in direct.slices]
        self.after: list[Any] = [SumOutput(path, group) for path in direct.sums]
        self.after += [GatherOutput(gather.path, gather.sharding, group) for gather in direct.gathers]
        self.after += [PartialGradient(path, group) for path in direct.partial]

    @property
    def is_direct(self) -> bool:
        """True if a call that begins now is that of other code: what backward recomputes ran inside of forward.

        One that converts nothing may count as direct then, too: modules inside of it are inside of a call either way.
        """
        return not self.outermost.name and not (self.converts and _is_in_backward())

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        direct = self.direct
        if direct is not None and (
            why := direct.refused or (direct.refused_gradients if torch.is_grad_enabled() else "")
        ):
            raise RuntimeError(
                f"{direct.module}: cannot be called by other code than the forward of the model that tp_ext.auto has "
                f"sharded: {why}. Let forward call it, by an argument of its own: calls with new arguments are proven"
            )
        for conversion in self.before:
            args, kwargs = conversion(module, args, kwargs)
        return args, kwargs

    def leave(self, module: nn.Module, output: Any) -> Any:
        for conversion in self.after:
            # A call with other arguments may return no attention weights, say
            if _has_tensor(output, conversion.path):
                output = conversion(module, (), {}, output)
        return output


class DirectForward:
    """A module's ``forward`` in the instance, which converts in a direct call.

    It is an object of a class that knows the module, no bound method, so that the module can be copied and pickled."""

    def __init__(self, module: nn.Module, conversions: Conversions) -> None:
        self.module, self.conversions, self.outermost = module, conversions, conversions.outermost
        self.own = vars(module).get("forward")

    @property
    def __signature__(self) -> inspect.Signature:
        """Callers look for the names of the arguments."""
        return inspect.signature(self.own or type(self.module).forward.__get__(self.module))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        conversions = self.conversions
        if self.outermost.name or not conversions.is_direct:
            return run_forward(self.module, self.own, *args, **kwargs)
        self.outermost.name = conversions.name
        try:
            args, kwargs = conversions.enter(self.module, args, kwargs)
            output = run_forward(self.module, self.own, *args, **kwargs)
        finally:
            self.outermost.name = ""
        return conversions.leave(self.module, output)


def _has_tensor(output: Any, path: LeafPath) -> bool:
    return any(place == path for place, _ in tensors(output))


@dataclass
class BeginCall:
    """A forward pre-hook of the model, and of modules that have other hooks."""

    conversions: Conversions

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        outermost, conversions = self.conversions.outermost, self.conversions
        if not conversions.is_direct:
            outermost.again += outermost.name == conversions.name
            return None
        outermost.name = conversions.name
        return conversions.enter(module, args, kwargs)


@dataclass
class EndCall:
    """The forward hook that ends :class:`BeginCall`, also after an exception."""

    conversions: Conversions

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        outermost = self.conversions.outermost
        if outermost.name != self.conversions.name:
            return output
        if outermost.again:
            outermost.again -= 1
            return output
        outermost.name = ""
        return output if output is None else self.conversions.leave(module, output)


@torch.compiler.disable  # a break of the graph: Dynamo would not compile again in backward
def _is_in_backward() -> bool:
    return torch._C._current_graph_task_id() >= 0


def convert_direct_calls(model: nn.Module, direct_calls: Sequence[DirectCall], group: ParallelGroup) -> None:
    """Lets all modules convert that need it, or have one inside that does. After all other hooks and forwards."""
    outermost = Outermost()
    needed = {direct.module for direct in direct_calls if direct != DirectCall(direct.module)}
    for direct in direct_calls:
        if direct.module in needed or any(name.startswith(f"{direct.module}.") for name in needed):
            module, conversions = model.get_submodule(direct.module), Conversions(outermost, direct, group)
            if module._forward_pre_hooks or module._forward_hooks:
                _register(module, conversions)
            else:
                module.forward = DirectForward(module, conversions)
    if needed:
        _register(model, Conversions(outermost, None, group))


def _register(module: nn.Module, conversions: Conversions) -> None:
    module.register_forward_pre_hook(BeginCall(conversions), prepend=True, with_kwargs=True)
    module.register_forward_hook(EndCall(conversions), with_kwargs=True, always_call=True)
