"""Boundaries of one call of a sharded model that are not those of its plan's example: another call may return tensors
with a sharded dim, such as a cache, and take them back whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from tp_ext.auto.modules.boundary_edits import Converted, ConvertedArgument
from tp_ext.auto.record.boundary import BeforeForward, Edit, EditPlace
from tp_ext.auto.record.edits import CALL, CallEdits, Conversion, edits_of
from tp_ext.auto.search.localize import replaced
from tp_ext.group import ParallelGroup


def begin_call(model: nn.Module, edits: CallEdits | None, args: Any, kwargs: Any, group: ParallelGroup) -> Any:
    """Prepares a call; returns its arguments, or None if they stay as they are."""
    end_call(model)  # after a call whose hooks an exception has left out
    if edits is None:
        return None
    handles, both = [], (args, kwargs)
    for slice_ in edits.slices:
        edit, module = ConvertedArgument(Converted(slice_, group)), model.get_submodule(slice_.module)
        if module is model:  # whose hooks run already
            both = edit.before(model, *both)
        else:
            # First: what completes gradients at the same argument takes the slice
            hook = BeforeForward([edit])
            handles.append(module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True))
    model.__dict__[CALL] = edits, handles
    return both


def end_call(model: nn.Module) -> None:
    """Undoes :func:`begin_call`."""
    for handle in model.__dict__.pop(CALL, (None, ()))[1]:
        handle.remove()


@dataclass
class GatheredResults(Edit):
    """Gathers results of the model that have a sharded dim in this call."""

    gathers: list[Conversion]
    group: ParallelGroup
    place = EditPlace.GATHERS

    def __post_init__(self) -> None:
        self.is_needed_in_stages = bool(self.gathers)

    def after(self, module: nn.Module, output: Any) -> Any:
        edits = edits_of(module)
        for gather in self.gathers if edits is None else edits.gathers:
            output = replaced(output, gather.path, Converted(gather, self.group))
        return output

    def end(self, module: nn.Module, output: Any) -> None:
        end_call(module)
