"""Checks of arguments that functions of several folders take."""


def check_bools(**values: object) -> None:
    """Raises a TypeError that names the first of ``values`` that is not True or False."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name}: {value!r} must be True or False")
