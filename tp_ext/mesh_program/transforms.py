"""The types of :mod:`tp_ext.mesh_program.varying` under the transforms of ``torch.func``.

``torch.vmap``, ``grad``, ``vjp`` and ``jvp`` wrap a tensor on its way in and unwrap it on its way out, and each time
make a plain tensor of it. In a map, a value that varies would count as the same on all ranks. So these functions are
replaced by such that keep the type. Nothing changes for other tensors.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._functorch import eager_transforms, vmap

from tp_ext.mesh_program.varying import RefuseSetters, Varying

_WRAPPING = {eager_transforms: ("_wrap_for_grad", "_unwrap_for_grad"), vmap: ("_add_batch_dim", "_remove_batch_dim")}


@contextlib.contextmanager
def types_in_force(check: bool) -> Iterator[None]:
    """Types go through transforms, and setters are refused, in the block of a checked map."""
    if not check or torch.compiler.is_compiling():
        yield
        return
    for module, names in _WRAPPING.items():
        for name in names:
            function = getattr(module, name)
            if not hasattr(function, "keeps_type"):
                setattr(module, name, _keeping_type(function))
    with RefuseSetters():
        yield


def _keeping_type(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def keeping(x: Any, *args: Any) -> Any:
        y = function(x, *args)
        return Tensor.as_subclass(y, type(x)) if isinstance(x, Varying) else y

    keeping.keeps_type = True  # type: ignore[attr-defined]
    return keeping
