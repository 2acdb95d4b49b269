"""Meshes over all ranks of a test, each made once for their life: new process groups take time, and ranks that have
many of them are replaced, with all that DTensor and FSDP2 had computed once.
"""

import functools

from torch.distributed import init_device_mesh

import tp_ext

AXES = ("pp", "dp", "cp", "tp")


@functools.cache
def mesh_of(*sizes, names=AXES):
    """The mesh of these sizes; of the axes of ``tp_ext.init_mesh`` as it makes them."""
    if names == AXES:
        return tp_ext.init_mesh("cpu", **dict(zip(AXES, sizes, strict=True)))
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)
