"""Every layer of the package, once: the files of this folder are the families of layers.

A file has any of: CASES (small layers by name), ERRORS (bad input, for tests/repo/test_errors.py), SUBJECTS (by public
name, for tests/repo/test_rules.py: what is no case), SENT and SAVED (rows of bytes, of docs/reference/communication.md
and memory.md), and for the fuzzer PLAIN (the layers in plain torch), KINDS and VARIANTS (of blocks) and OFF (the values
that leave an option out).
"""

import importlib
import pkgutil
from typing import Any

from tests.helpers.registry.bytes import Saved, Sent
from tests.helpers.registry.entries import Case, Kind, Variant
from tests.helpers.registry.rules import Subject, layer

_FAMILIES = [importlib.import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__)]


def _all(name: str) -> dict[str, Any]:
    return {key: entry for family in _FAMILIES for key, entry in getattr(family, name, {}).items()}


CASES: dict[str, Case] = _all("CASES")
PLAIN: dict[str, Any] = _all("PLAIN")
KINDS: dict[str, Kind] = _all("KINDS")
VARIANTS: dict[str, Variant] = _all("VARIANTS")
OFF: dict[str, Any] = _all("OFF")
SENT: dict[str, Sent] = _all("SENT")
SAVED: dict[str, Saved] = _all("SAVED")
SUBJECTS: dict[str, Subject] = _all("SUBJECTS")
for _case in CASES.values():  # the first case of each layer, unless the layer is above
    SUBJECTS.setdefault(_case.kind, layer(_case))
ERRORS: list[tuple[str, type[Exception], str]] = [row for family in _FAMILIES for row in getattr(family, "ERRORS", [])]
