"""Code of libraries that runs around any module, and changes no numbers."""

from __future__ import annotations

import types
from typing import Any

FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type)
# Their hooks and forwards do what they do around any module, and change no numbers
MACHINERY = ("torch.distributed", "torch._", "torch.utils", "torch.nn.modules.module", "tp_ext", "transformers",
             "accelerate", "peft")  # fmt: skip
# Their hooks compute a parameter from others
COMPUTING = ("torch.nn.utils.prune", "torch.nn.utils.weight_norm", "torch.nn.utils.spectral_norm")


def is_of(value: Any, names: tuple[str, ...]) -> bool:
    """Returns whether a function, class or object is of a module with one of these names in front."""
    of = value if isinstance(value, FUNCTIONS) else type(value)
    name = str(getattr(of, "__module__", ""))
    return name.startswith(tuple(f"{n}." for n in names)) or name in names
