"""Checks of arguments that functions of several folders take, and warnings about them."""

import math
import sys
import warnings

from torch import Tensor


def check_bools(**values: object) -> None:
    """Raises a TypeError that names the first of ``values`` that is not True or False."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name}: {value!r} must be True or False")


def check_tensor(**values: object) -> None:
    """Raises a TypeError that names the first of ``values`` that is no tensor."""
    for name, value in values.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name}: {type(value).__name__} must be a tensor")


def check_numbers(**values: object) -> None:
    """Raises a TypeError that names the first of ``values`` that is no number, a ValueError for one that is not
    finite."""
    for name, value in values.items():
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise TypeError(f"{name}: {value!r} must be a number")
        if not math.isfinite(value):
            raise ValueError(f"{name}: {value!r} must be finite")


def warn_caller(text: str, category: type[Warning]) -> None:
    """Warns at the line outside of this package that led to the call."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and _is_ours(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] == "tp_ext" or module == "torch.utils._contextlib"  # of @torch.no_grad()
