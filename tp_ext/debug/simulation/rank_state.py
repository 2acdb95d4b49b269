"""The state of a process that each rank has its own of: random generators, default dtype, and that of this package."""

import random
import sys
from typing import Any

import torch

from tp_ext import random_scope
from tp_ext.random import _WeightDraws


def _cuda_generators() -> tuple[torch.Generator, ...]:
    return torch.cuda.default_generators if torch.cuda.is_initialized() else ()


class RankState:
    """A copy of the state."""

    @classmethod
    def current(cls) -> "RankState":
        """Returns a copy of the state as it is now."""
        state = cls()
        state._torch = torch.default_generator.get_state()
        state._cuda = [generator.get_state() for generator in _cuda_generators()]
        state._python = random.getstate()
        numpy = sys.modules.get("numpy")
        state._numpy = None if numpy is None else numpy.random.get_state()
        state._dtype = torch.get_default_dtype()
        state._base = dict(vars(random_scope.base))
        state._scopes = dict(random_scope._scopes), list(random_scope._recent)
        state._weights = _WeightDraws.seeds, dict(_WeightDraws.states)
        return state

    _torch: torch.Tensor
    _cuda: list[torch.Tensor]
    _python: Any
    _numpy: Any
    _dtype: torch.dtype
    _base: dict[str, Any]
    _scopes: Any
    _weights: Any

    def restore(self) -> None:
        """Makes it the state of the process."""
        torch.default_generator.set_state(self._torch)
        for generator, cuda in zip(_cuda_generators(), self._cuda, strict=False):
            generator.set_state(cuda)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        torch.set_default_dtype(self._dtype)
        vars(random_scope.base).clear()
        vars(random_scope.base).update(self._base)
        scopes, recent = self._scopes
        random_scope._scopes.clear()
        random_scope._scopes.update(scopes)
        random_scope._recent[:] = recent
        _WeightDraws.seeds, states = self._weights
        _WeightDraws.states.clear()
        _WeightDraws.states.update(states)


class ThreadModes:
    """A context in which a new thread has the modes of the one that made it: gradients, inference, autocast. Its
    backward runs in the thread itself, on CUDA too, where torch would use one thread for all ranks."""

    def __init__(self) -> None:
        self._grad, self._inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self._autocast = [
            torch.autocast(device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
            for device in ("cpu", "cuda")
        ]

    def __enter__(self) -> None:
        import contextlib

        stack = contextlib.ExitStack()
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(torch.inference_mode(self._inference))
        stack.enter_context(torch.set_grad_enabled(self._grad))
        torch.set_grad_enabled(self._grad)

    def __exit__(self, *error: Any) -> None:
        pass
