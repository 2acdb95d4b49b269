"""Boundaries of one call of a sharded model that are not those of its plan's example: another call may return tensors
with a sharded dim, such as a cache, and take them back whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from tp_ext.auto.modules.hooks import GatherOutput, SliceArgument
from tp_ext.auto.record.edits import CALL, CallEdits, Conversion, edits_of
from tp_ext.group import ParallelGroup


def begin_call(model: nn.Module, edits: CallEdits | None, args: Any, kwargs: Any, group: ParallelGroup) -> Any:
    """Prepares a call; returns its arguments, or None if they stay as they are."""
    end_call(model)  # after a call whose hooks an exception has left out
    if edits is None:
        return None
    handles, both = [], (args, kwargs)
    for slice_ in edits.slices:
        hook, module = SliceArgument(slice_, group), model.get_submodule(slice_.module)
        if module is model:  # whose hooks run already
            both = hook(model, *both)
        else:
            # First: what completes gradients at the same argument takes the slice
            handles.append(module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True))
    model.__dict__[CALL] = edits, handles
    return both


def end_call(model: nn.Module) -> None:
    """Undoes :func:`begin_call`."""
    for handle in model.__dict__.pop(CALL, (None, ()))[1]:
        handle.remove()


@dataclass
class GatherOutputs:
    """A forward hook of the model: gathers its results that have a sharded dim."""

    gathers: list[Conversion]
    group: ParallelGroup

    @property
    def is_needed_in_stages(self) -> bool:
        return bool(self.gathers)

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        edits = edits_of(module)
        for gather in self.gathers if edits is None else edits.gathers:
            output = GatherOutput(gather.path, gather.sharding, self.group)(module, args, kwargs, output)
        return output


@dataclass
class RestoreBoundaries:
    """The forward hook that ends a call, also after an exception."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        end_call(module)
