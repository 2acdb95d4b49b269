"""The state of the process and of a thread that every rank has for itself."""

import contextlib
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

from tp_ext import random_scope
from tp_ext.mesh_program import scope
from tp_ext.random import _WeightDraws
from tp_ext.simulation.place import RankPlace, here

_FLAGS: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
)
"""What torch's context managers set for the process: a block that is left after a collective restores its own."""

_ATTRIBUTES = (
    (warnings, "filters"),
    (warnings, "showwarning"),
    (warnings, "_showwarnmsg_impl"),
    (_WeightDraws, "seeds"),
)
_TABLES: tuple[dict[Any, Any], ...] = (
    vars(random_scope.base),
    random_scope._scopes,
    _WeightDraws.states,
    scope._runs,
)


_notes: list[Callable[[], Callable[[], None]]] = []  # each notes a state, and returns what puts it back


@contextlib.contextmanager
def owned_by_ranks(note: Callable[[], Callable[[], None]]) -> Iterator[None]:
    """Gives every rank of simulations in the block a state of its own, in place of one that all share.

    Args:
        note: notes the state as it is, and returns a function that puts it back.
    """
    _notes.append(note)
    try:
        yield
    finally:
        _notes.remove(note)


def _generators() -> list[torch.Generator]:
    return [torch.default_generator, *(torch.cuda.default_generators if torch.cuda.is_initialized() else ())]


class RankState:
    """The state of the process that ranks do not share, as it is now: torch's generators, flags of context managers,
    and what this package keeps. ``random`` and ``numpy.random`` are left to :func:`own_generators`, since copies of
    their states take longer than a collective."""

    def __init__(self) -> None:
        self._generators = [generator.get_state() for generator in _generators()]
        self._flags = [get() for get, _ in _FLAGS]
        self._attributes = [getattr(owner, name) for owner, name in _ATTRIBUTES]
        self._tables = [dict(table) for table in _TABLES]
        self._recent = list(random_scope._recent)
        self._put_back = [note() for note in _notes]

    def restore(self) -> None:
        """Makes it the state of the process."""
        for generator, state in zip(_generators(), self._generators, strict=False):  # CUDA may be new
            generator.set_state(state)
        for (get, set_), value in zip(_FLAGS, self._flags, strict=True):
            if get() != value:
                set_(value)
        for (owner, name), value in zip(_ATTRIBUTES, self._attributes, strict=True):
            setattr(owner, name, value)
        for table, contents in zip(_TABLES, self._tables, strict=True):
            if table or contents:
                table.clear()
                table.update(contents)
        random_scope._recent[:] = self._recent
        for put_back in self._put_back:
            put_back()


class ThreadModes:
    """The modes of this thread that new threads take over: gradients, inference, autocast, CUDA device and stream."""

    def __init__(self) -> None:
        self._grad, self._inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self._autocast = [
            (device, torch.get_autocast_dtype(device))
            for device in ("cpu", "cuda")
            if torch.is_autocast_enabled(device)
        ]
        self._stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    @contextlib.contextmanager
    def apply(self) -> Iterator[None]:
        """Sets the modes in the block. Backward runs in the thread that calls it, on CUDA, too: torch's thread of the
        device would be blocked by the rank that runs first."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            stack.enter_context(torch.inference_mode(self._inference))
            stack.enter_context(torch.set_grad_enabled(self._grad))
            for device, dtype in self._autocast:
                stack.enter_context(torch.autocast(device, dtype))
            if self._stream is not None:
                stack.enter_context(torch.cuda.device(self._stream.device))
                stack.enter_context(torch.cuda.stream(self._stream))
            yield


def _hidden_generators() -> Iterator[tuple[ModuleType, Any]]:
    yield random, random._inst
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        yield numpy, numpy.mtrand._rand


def _of_rank(place: RankPlace | None, module: str, hidden: Any) -> Any:
    """Returns the generator of a rank. At first use it is a copy of the caller's, who waits meanwhile."""
    if place is None or place.world is None:
        return hidden
    if module not in place.generators:
        outside = _of_rank(place.outer, module, hidden)
        copy = type(outside)()
        if hasattr(outside, "getstate"):
            copy.setstate(outside.getstate())
        else:
            copy.set_state(outside.get_state(legacy=False))
        place.generators[module] = copy
    return place.generators[module]


@contextlib.contextmanager
def own_generators() -> Iterator[None]:
    """Lets functions of ``random`` and ``numpy.random`` draw from generators of the rank that calls them."""
    replaced: list[tuple[ModuleType, str, Any]] = []
    for module, hidden in _hidden_generators():
        for name, function in list(vars(module).items()):
            if getattr(function, "__self__", None) is hidden or (name == "seed" and callable(function)):
                replaced.append((module, name, function))
                setattr(module, name, _draw_from_rank(module.__name__, hidden, name))
    try:
        yield
    finally:
        for module, name, function in replaced:
            setattr(module, name, function)


def _draw_from_rank(module: str, hidden: Any, name: str) -> Callable[..., Any]:
    def draw(*args: Any, **kwargs: Any) -> Any:
        return getattr(_of_rank(here(), module, hidden), name)(*args, **kwargs)

    return draw
