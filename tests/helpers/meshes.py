"""Meshes over all ranks of a test, each made once for their life: new process groups take time, and ranks that have
many of them are replaced, with all that DTensor and FSDP2 had computed once.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any

from torch.distributed import init_device_mesh

import tp_ext

AXES = ("pp", "dp", "cp", "tp")
_made = threading.local()  # a simulated rank is a thread


def once_per_rank(make: Callable) -> Callable:
    """``functools.cache`` for groups and meshes, which are a rank's own."""

    @functools.wraps(make)
    def get(*args: Any, **kwargs: Any) -> Any:
        key = (make, args, tuple(kwargs.items()))
        if key not in _made.__dict__:
            _made.__dict__[key] = make(*args, **kwargs)
        return _made.__dict__[key]

    return get


@once_per_rank
def mesh_of(*sizes, names=AXES):
    """The mesh of these sizes; of the axes of ``tp_ext.init_mesh`` as it makes them."""
    if names == AXES:
        return tp_ext.init_mesh("cpu", **dict(zip(AXES, sizes, strict=True)))
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def xy_mesh(x, y=1):
    return mesh_of(x, y, names=("x", "y"))
