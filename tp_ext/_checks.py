"""Checks of arguments: each rule has one function and one wording; and warnings at the line of the caller.

They take arguments by name and raise for the first that breaks the rule. A group in the place of another argument,
passed by position as in Megatron-LM, is named as such.
"""

import math
import os
import sys
import warnings
from collections.abc import Iterable

from torch import Tensor
from torch.distributed import DeviceMesh, ProcessGroup

_LIMIT = 1 << 63  # of the integers that torch and C++ hold


def check_bool(**values: object) -> None:
    """Raises a TypeError unless the values are True or False."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name}: {value!r} must be True or False")


def check_flag(**values: object) -> None:
    """Raises a TypeError unless the values are True or False, or 1 or 0."""
    for name, value in values.items():
        if not isinstance(value, int) or value not in (0, 1):  # a bool is an int
            refuse_group(**{name: value})
            raise TypeError(f"{name}: {value!r} must be True or False")


def check_int(*, least: int | None = None, or_none: bool = False, **values: object) -> None:
    """Raises a TypeError unless the values are integers; with ``least`` a ValueError, also for those that are less."""
    for name, value in values.items():
        if or_none and value is None:
            continue
        other = ", or None" if or_none else ""
        if isinstance(value, int) and not isinstance(value, bool):
            if least is None or least <= value < _LIMIT:
                continue
            if value >= _LIMIT:
                raise ValueError(f"{name}: a number of {value.bit_length()} bits must be an integer below 2^63{other}")
        refuse_group(**{name: value})
        if least is None:
            raise TypeError(f"{name}: {value!r} must be an integer{other}")
        raise ValueError(f"{name}: {value!r} must be an integer of at least {least}{other}")


def check_number(
    *, least: float | None = None, above: float | None = None, or_none: bool = False, **values: object
) -> None:
    """Raises a TypeError for values that are no numbers, a ValueError for those that are not finite; with a bound a
    ValueError for both, and for those outside of it."""
    bound = f" of at least {least}" if least is not None else f" above {above}" if above is not None else ""
    other = ", or None" if or_none else ""
    for name, value in values.items():
        if or_none and value is None:
            continue
        if not isinstance(value, int | float) or isinstance(value, bool):
            refuse_group(**{name: value})
            if not bound:
                raise TypeError(f"{name}: {value!r} must be a number{other}")
        elif is_finite(value) and (least is None or value >= least) and (above is None or value > above):
            continue
        raise ValueError(f"{name}: {value!r:.100} must be " + (f"a finite number{bound}{other}" if bound else "finite"))


def is_finite(value: float) -> bool:
    """Returns whether a number is no NaN and within the range of floats."""
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer of hundreds of digits
        return False


def check_probability(**values: object) -> None:
    """Raises a ValueError unless the values are probabilities of dropping an element, below 1."""
    for name, value in values.items():
        if not isinstance(value, int | float) or not 0 <= value < 1:
            refuse_group(**{name: value})
            raise ValueError(f"{name}: {value!r} must be a probability, in [0, 1)")


def check_choice(choices: Iterable[object], /, **values: object) -> None:
    """Raises a ValueError unless the values are among the choices."""
    known = list(choices)
    for name, value in values.items():
        # True and 1.0 equal the number 1, and mean something else
        numbers = {type(choice) for choice in known} if isinstance(value, int | float) else set()
        if value not in known or (numbers and type(value) not in numbers):
            raise ValueError(f"{name}: {value!r} must be one of {', '.join(map(str, known))}")


def check_type(kind: type, what: str, /, **values: object) -> None:
    """Raises a TypeError, with ``what`` in it, unless the values are of a class."""
    for name, value in values.items():
        if not isinstance(value, kind):
            raise TypeError(f"{name}: {type(value).__name__} must be {what}")


def check_tensor(**values: object) -> None:
    """Raises a TypeError unless the values are tensors."""
    check_type(Tensor, "a tensor", **values)


def check_path(what: str = "a path", /, **values: object) -> None:
    """Raises a TypeError, with ``what`` in it, unless the values are paths."""
    for name, value in values.items():
        if not isinstance(value, str | os.PathLike):
            raise TypeError(f"{name}: {value!r} must be {what}")


def refuse_group(**values: object) -> None:
    """Raises a TypeError if a value is a group."""
    for name, value in values.items():
        if isinstance(value, ProcessGroup | DeviceMesh):
            raise TypeError(f"{name}: a {type(value).__name__} must not stand here; pass group= by keyword")


def warn_caller(text: str, category: type[Warning]) -> None:
    """Warns at the line outside of this package that led to the call."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None:
        module = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] != "tp_ext" and module != "torch.utils._contextlib":  # of @torch.no_grad()
            break
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)
