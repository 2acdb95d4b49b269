"""What forward hooks of a user keep of the tensors that they see: it must be the same as in the unsharded model.

A hook that returns nothing changes no result of the model, and its list of activations, norms or widths would silently
hold those of a shard."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tp_ext._containers import contents_of
from tp_ext.auto.record.machinery import COMPUTING, MACHINERY, is_of

FORWARD = ("_forward_hooks", "_forward_pre_hooks")
_LENGTHS = {"size", "numel", "nelement", "__len__", "dim_order", "stride"}
_LENGTH_PROPERTIES = {"shape", "nbytes"}


class WatchedHooks:
    """What the hooks of a model have seen in one run."""

    def __init__(self) -> None:
        self._seen: list[tuple[str, weakref.ref[Tensor]]] = []
        self._lengths: list[tuple[str, list[int]]] = []

    def kept(self) -> dict[str, Tensor]:
        """Returns the tensors that are alive after the run, whose result has gone, and the lengths that were read."""
        alive = {id(x): (name, x.detach()) for name, reference in self._seen if (x := reference()) is not None}
        tensors = {f"what {name} keeps, {k}": x for k, (name, x) in enumerate(alive.values())}
        lengths = {
            f"a length that {name} reads, {k}": torch.tensor(numbers, dtype=torch.float64)
            for k, (name, numbers) in enumerate(self._lengths)
        }
        return tensors | lengths

    def watch(self, hook: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Returns the hook, which notes what it sees."""

        def watched(module: nn.Module, *arguments: Any) -> Any:
            mode = _HookCalls()
            with mode:
                result = hook(module, *arguments)
            returned = set(map(id, contents_of(result, "").tensors.values()))
            for x in (*contents_of(arguments, "").tensors.values(), *mode.tensors):
                if id(x) not in returned:
                    self._seen.append((name, weakref.ref(x)))
            if result is None:  # what it returns is compared as the model's
                self._lengths += [(name, numbers) for numbers in mode.lengths]
            return result

        return watched


class _HookCalls(TorchFunctionMode):
    """Notes results of functions, and lengths that code reads."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []
        self.lengths: list[list[int]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in _LENGTHS or (name == "__get__" and func.__self__.__name__ in _LENGTH_PROPERTIES):
            self.lengths.append([result] if isinstance(result, int) else list(result))
        elif name != "__get__":
            self.tensors += contents_of(result, "").tensors.values()
        return result


@contextlib.contextmanager
def watched_hooks(model: nn.Module) -> Iterator[WatchedHooks]:
    """Watches the forward hooks of a user in a block."""
    watched, before = WatchedHooks(), list[tuple[dict[int, Any], int, Any]]()
    for name, module in model.named_modules():
        for kind in FORWARD:
            hooks = vars(module)[kind]
            for key, hook in hooks.items():
                if not is_of(hook, MACHINERY + COMPUTING):
                    before.append((hooks, key, hook))
                    hooks[key] = watched.watch(hook, f"a hook of {name or 'the model'}")
    try:
        yield watched
    finally:
        for hooks, key, hook in before:
            if key in hooks:  # a hook may remove itself
                hooks[key] = hook
