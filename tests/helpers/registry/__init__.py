"""Every layer of the package, once: the files of this folder are the families of layers.

A file has any of: CASES (small layers by name), ERRORS (bad input, for tests/repo/test_errors.py), and for the fuzzer
PLAIN (the layers in plain torch), KINDS and VARIANTS (of blocks) and OFF (the values that leave an option out).
"""

import importlib
import pkgutil
from typing import Any

from tests.helpers.registry.entries import Case, Kind, Variant

_FAMILIES = [importlib.import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__)]


def _all(name: str) -> dict[str, Any]:
    return {key: entry for family in _FAMILIES for key, entry in getattr(family, name, {}).items()}


CASES: dict[str, Case] = _all("CASES")
PLAIN: dict[str, Any] = _all("PLAIN")
KINDS: dict[str, Kind] = _all("KINDS")
VARIANTS: dict[str, Variant] = _all("VARIANTS")
OFF: dict[str, Any] = _all("OFF")
ERRORS: list[tuple[str, type[Exception], str]] = [row for family in _FAMILIES for row in getattr(family, "ERRORS", [])]
