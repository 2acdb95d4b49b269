"""Forwards of modules: those that a model's code calls by name, ``self.attention.forward(x)``, past their hooks; which
are torch's own."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import CodeType
from typing import Any

from torch import nn

from tp_ext.auto.record.boundary import Edit, EditPlace


class InstanceForward:
    """A module's ``forward`` in the instance: an object that knows the module, no bound method, so that the module can
    be copied and pickled."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.own = vars(module).get("forward")

    @property
    def _called(self) -> Any:
        """The forward that :meth:`run_own` calls."""
        return type(self.module).forward.__get__(self.module) if self.own is None else self.own

    @property
    def __signature__(self) -> inspect.Signature:
        """The arguments of the forward that it calls: exports, trainers and ``generate`` ask for them."""
        return inspect.signature(self._called)

    @property
    def __code__(self) -> CodeType:
        """The code of the forward that it calls: ``torch.export`` names its line."""
        return self._called.__code__

    def run_own(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the forward that the instance had of its own, else that of its class."""
        if self.own is None:  # without a bound method, which a traced call would have to make
            return type(self.module).forward(self.module, *args, **kwargs)
        return self.own(*args, **kwargs)


class CalledForward(InstanceForward):
    """A ``forward`` by which a direct call goes through ``module()`` and runs the hooks."""

    def __init__(self, module: nn.Module, direct: Callable[[], None] | None = None) -> None:
        super().__init__(module)
        self.direct = direct  # called at each direct call
        self.entered = False  # by module(), whose hooks have run

    def install(self) -> Edit:
        """Sets the forward; returns the edit by which it knows that the hooks have run."""
        self.module.forward = self
        return EnteredForward(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.entered:
            if self.direct is not None:
                self.direct()
            return self.module(*args, **kwargs)
        # Before forward runs: a call of itself by name inside of it must run the hooks, too
        self.entered = False
        return self.run_own(*args, **kwargs)


def _signature(forward: Callable[..., Any]) -> inspect.Signature:
    signature = _signatures.get(forward)
    if signature is None:
        signature = _signatures[forward] = inspect.signature(forward)
    return signature


# It takes longer than all else that is asked of a call. Weak: a forward may have a model in its closure
_signatures: weakref.WeakKeyDictionary[Callable[..., Any], inspect.Signature] = weakref.WeakKeyDictionary()


def named_arguments(model: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """The arguments of a call by their names, without those that are None as by default; None: they have no names."""
    forward = _signature(type(model).forward)
    try:
        bound = forward.bind(model, *args, **kwargs)
    except TypeError:  # which the call itself will raise
        return None
    named: dict[str, Any] = {}
    for name, value in list(bound.arguments.items())[1:]:
        kind = forward.parameters[name].kind
        # The arguments in *args have no names by which two calls could be compared
        if kind == inspect.Parameter.VAR_POSITIONAL:
            return None
        if kind == inspect.Parameter.VAR_KEYWORD:
            named |= value
        # A call with mask=None takes the path of a call without a mask
        elif value is not None or forward.parameters[name].default is not None:
            named[name] = value
    return named


def options_of(module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> dict[str, str]:
    """The switches of a call of a module: its truth values and text, by name."""
    named = named_arguments(module, args, kwargs)
    given = kwargs if named is None else named
    return {name: repr(value) for name, value in given.items() if isinstance(value, bool | str)}


@dataclass
class EnteredForward(Edit):
    """Notes in ``forward.entered`` that the next call of forward comes through ``module()``."""

    forward: Any
    place = EditPlace.BY_NAME

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self.forward.entered = True

    def end(self, module: nn.Module, output: Any) -> None:
        self.forward.entered = False  # a hook may have raised before forward


def looks_up(module: nn.Module) -> bool:
    """True if the forward of an embedding, or of bags of one, is torch's, or calls it by ``super()``."""
    forward = type(module).forward
    if isinstance(module, nn.EmbeddingBag):
        return forward is nn.EmbeddingBag.forward
    # A forward with a free variable __class__ calls super(). A look-up of its own would index rows of other ranks
    return isinstance(module, nn.Embedding) and (
        forward is nn.Embedding.forward or "__class__" in inspect.unwrap(forward).__code__.co_freevars
    )


def argument_names(module: nn.Module) -> list[str]:
    """Returns the names of the arguments of a module's forward, in order."""
    return list(inspect.signature(type(module).forward).parameters)[1:]
