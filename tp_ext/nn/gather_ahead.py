"""Finds where a forward of a model begins and ends, for weights that are gathered ahead (``weight_group=``).

While a weight is used, the next one of the same forward is gathered (csrc/autograd/weight_gather.h). Before the forward
begins, and after it ends, nothing is gathered, so weights may be written in any way. A layer finds the forward that it
is part of, that of the outermost module, on the stack, and puts two hooks on this module; they count from its next
call.
"""

import sys
from types import FrameType
from typing import Any

import torch
from torch import nn

from tp_ext._build import load

_C = load()
_CALL = nn.Module._call_impl.__code__


def find_forward(layer: nn.Module) -> None:
    """Puts hooks on the outermost module whose forward is running, unless it is the layer or has them."""
    # A module that has the hooks has begun its forward: no need to walk up the stack
    if torch.compiler.is_compiling() or _C.gathers_ahead():
        return
    root = _outermost(sys._getframe(1))
    if root is not None and root is not layer:
        _Forward.of(root)


class _Forward:
    """The hooks of a module that may be the outermost one. A copy of the module has an order of its own."""

    def __init__(self) -> None:
        self.order = _C.GatherOrder()

    @classmethod
    def of(cls, module: nn.Module) -> None:
        if not any(isinstance(getattr(hook, "__self__", None), cls) for hook in module._forward_pre_hooks.values()):
            hooks = cls()
            module.register_forward_pre_hook(hooks.begin)
            module.register_forward_hook(hooks.end, always_call=True)

    def begin(self, module: nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling():
            return
        root = _outermost(sys._getframe(1))
        # Within a larger forward the outermost module's hooks count
        if root is module:
            self.order.begin()
        elif root is not None:  # from its next call on, its forward is the one that counts
            self.of(root)

    def end(self, module: nn.Module, *_: Any) -> None:
        if not torch.compiler.is_compiling() and _outermost(sys._getframe(1)) is module:
            self.order.end()

    def __deepcopy__(self, _: Any) -> "_Forward":
        return _Forward()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return _Forward, ()


def _outermost(frame: FrameType | None) -> nn.Module | None:
    """Returns the module of the outermost call of one on the stack, from this frame up."""
    forward_frame = None
    while frame is not None:
        if frame.f_code is _CALL:
            forward_frame = frame
        frame = frame.f_back
    return forward_frame.f_locals["self"] if forward_frame is not None else None
