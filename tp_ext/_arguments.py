"""Checks of arguments that functions of several folders take."""

import math

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
