"""The one interceptor of an edited module: what a plan does around its forward, in the order of :class:`EditPlace`.

See [Note: edits of a module have one order]. Edits are objects of classes, no closures, so that a sharded model can be
copied and pickled."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn


class EditPlace(enum.IntEnum):
    """The order of edits around a forward, from outside to inside: they begin in this order and end in the reverse.

    All run inside of hooks that are registered later. Forward hooks that a user has registered before run inside of all
    edits, and pre-hooks inside of those in front of USERS.
    """

    BY_NAME = enum.auto()  # whether forward was called through the hooks
    CALL = enum.auto()  # whole tensors of other code
    SIZES = enum.auto()  # those of the code around are left alone
    FUNCTIONS = enum.auto()  # outside of draws: attention with dropout is made of products and a softmax
    SUMS_OF_CALLS = enum.auto()
    DRAWS = enum.auto()
    ADAPTERS = enum.auto()
    GATHERS = enum.auto()  # the last of a call of the model: others ask what it does otherwise
    TOKENS = enum.auto()  # whether the model shards them
    FULL_LOGITS = enum.auto()
    LOGITS = enum.auto()
    USERS = enum.auto()
    TOKENS_OF_OUTPUT = enum.auto()
    GRADIENT_OF_OUTPUT = enum.auto()
    SUM = enum.auto()
    LENGTHS = enum.auto()  # of tokens, by arguments as they come
    TOKENS_OF_ARGUMENT = enum.auto()
    PARAMETERS = enum.auto()
    GRADIENTS_OF_ARGUMENTS = enum.auto()
    SHARD_OF_ARGUMENT = enum.auto()  # the gradient of a slice is partial: the sum is that of the whole tensor
    OTHER_DRAWS = enum.auto()


class Edit:
    """An action of a plan around the forward of a module. A subclass has the methods that it needs.

    Attributes:
        is_needed_in_stages: it changes what the module computes: a pipeline must not leave the module out.
        is_of_input: an adapter of the module would get its input without this.
    """

    place: EditPlace
    is_needed_in_stages = False
    is_of_input = False

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Returns the arguments of forward as ``(args, kwargs)``, or None: they stay as they are."""

    def after(self, module: nn.Module, output: Any) -> Any:
        """Returns the result of forward."""
        return output

    def end(self, module: nn.Module, output: Any) -> None:
        """Undoes what :meth:`before` has done, if it has run; also after an exception, with None as the output."""


EditsOfModules = dict[nn.Module, list[Edit]]


@dataclass
class _HookOfEdits:
    edits: list[Edit]

    def __post_init__(self) -> None:
        self.is_needed_in_stages = any(edit.is_needed_in_stages for edit in self.edits)
        self.is_of_input = any(edit.is_of_input for edit in self.edits)


class BeforeForward(_HookOfEdits):
    """The forward pre-hook of edits."""

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        for edit in self.edits:
            args, kwargs = edit.before(module, args, kwargs) or (args, kwargs)
        return args, kwargs


class AfterForward(_HookOfEdits):
    """The forward hook of edits."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        for edit in self.edits:
            output = edit.after(module, output)
        return output


class EndOfForward(_HookOfEdits):
    """The forward hook that ends edits, also after an exception."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        for edit in self.edits:
            edit.end(module, output)


def install(module: nn.Module, edits: Iterable[Edit]) -> None:
    """Registers the hooks of a module for its edits. Those of one place run in the order in which they are given."""
    inwards = sorted(edits, key=lambda edit: edit.place)
    outwards = sorted(inwards, key=lambda edit: -edit.place)
    begun = _with(inwards, "before")
    if outer := [edit for edit in begun if edit.place < EditPlace.USERS]:
        module.register_forward_pre_hook(BeforeForward(outer), prepend=True, with_kwargs=True)
    if inner := [edit for edit in begun if edit.place > EditPlace.USERS]:
        module.register_forward_pre_hook(BeforeForward(inner), with_kwargs=True)
    if changing := _with(outwards, "after"):
        module.register_forward_hook(AfterForward(changing))
    if ending := _with(outwards, "end"):
        module.register_forward_hook(EndOfForward(ending), always_call=True)


def _with(edits: Iterable[Edit], method: str) -> list[Edit]:
    return [edit for edit in edits if getattr(type(edit), method) is not getattr(Edit, method)]


def edits_at(module: nn.Module, kind: type[Edit]) -> Iterator[Any]:
    """The edits of a class that begin before the forward of a module."""
    for hook in module._forward_pre_hooks.values():
        yield from (edit for edit in hook.edits if isinstance(edit, kind)) if isinstance(hook, BeforeForward) else ()
