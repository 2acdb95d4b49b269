"""Imports that are delayed, so that importing tp_ext costs little."""

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

import torch
from torch.utils._python_dispatch import _disable_current_modes

_waiting: dict[str, list[Callable[[], object]]] = {}
_looked_for: set[str] = set()


def after_import(name: str, function: Callable[[], object]) -> None:
    """Calls a function once the module ``name`` has been imported: at once if it has, else after its import."""
    if name in sys.modules:
        function()
        return
    if _MetaPathFinder not in sys.meta_path:
        sys.meta_path.insert(0, _MetaPathFinder)
    _waiting.setdefault(name, []).append(function)


def import_now(name: str) -> ModuleType:
    """Imports a module, outside of all modes of torch: a tensor that an import makes, as one of torch's pipelines does,
    must not be that of a mode, such as a device or a fake one, under which a name of tp_ext is first used."""
    if name in sys.modules:
        return sys.modules[name]
    with torch.inference_mode(False), torch._C.DisableTorchFunction(), _disable_current_modes():
        return importlib.import_module(name)


class _MetaPathFinder:
    """Lets the other finders find a module, and the spec's loader call what waits for it."""

    @classmethod
    def find_spec(cls, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in _waiting or name in _looked_for:
            return None
        _looked_for.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            _looked_for.discard(name)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = functools.partial(_execute, spec.loader.exec_module)  # type: ignore[method-assign]
        return spec


def _execute(execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    execute(module)
    for function in _waiting.pop(module.__name__, ()):
        function()
