"""One number for all of a model's state, which two runs compare."""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed import DeviceMesh
from torch.optim import Optimizer

from tp_ext._checksum import bits_of
from tp_ext._object_collectives import broadcast_from_first
from tp_ext.checkpoint.full import full_state_dict
from tp_ext.checkpoint.full_optimizer import full_optimizer_state_dict
from tp_ext.checkpoint.gather import ranks_of
from tp_ext.checkpoint.optimizer_state import check_optimizer
from tp_ext.group import NOT_GIVEN
from tp_ext.mesh import mesh_axes
from tp_ext.model.census import census
from tp_ext.model.stages import Stages


def sha256(model: Stages, optimizer: Optimizer | None = None, *, mesh: DeviceMesh | None = None) -> str:
    """Returns the SHA-256 of the bits of the unsharded model and of its optimizer's state, equal on all ranks.

    It depends on no layout: a model has one digest for every number of ranks and every mesh, and another one if a bit
    of a parameter, a buffer or a state differs (so NaNs agree, 0.0 and -0.0 differ), or a name, a dtype or a shape.

    Args:
        model: as for :func:`tp_ext.full_state_dict`, all entries of which count.
        optimizer: the ``"state"`` of its :func:`tp_ext.full_optimizer_state_dict` counts, too; options of parameter
            groups, such as a learning rate, do not. An optimizer without state counts as none.
        mesh: for models over a pipeline or over data axes without a wrapper, as for :func:`tp_ext.full_state_dict`.

    Communicates: as these two with ``rank0_only`` and ``cpu_offload``: the first rank holds the full state in the
        memory of its host. Then one broadcast of 64 characters.

    Raises:
        TypeError: another optimizer than torch's. ValueError: as :func:`tp_ext.full_state_dict`; an entry that is
            neither a tensor nor a plain value (None, a number, a string, or lists, tuples and dicts of them).
    """
    check_optimizer(optimizer)
    entries: dict[str, Any] = dict(full_state_dict(model, mesh=mesh, rank0_only=True, cpu_offload=True))
    if optimizer is not None:
        state = full_optimizer_state_dict(model, optimizer, mesh=mesh, rank0_only=True, cpu_offload=True)
        for name, of_parameter in state.get("state", {}).items():
            entries |= {f"optimizer.{name}.{key}": value for key, value in of_parameter.items()}
    axes = ranks_of(census(model, mesh_axes(NOT_GIVEN, mesh))).axes
    return broadcast_from_first(lambda: _digest(entries), axes)


def _digest(entries: Mapping[str, Any]) -> str:
    digest = hashlib.sha256()
    # By name: no layout may decide the order
    for name in sorted(entries):
        value = entries[name]
        described = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else _plain(name, value)
        # Lengths, lest the end of one entry be taken for the begin of the next
        for part in (name.encode(), described.encode(), _bytes(value)):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    return digest.hexdigest()


def _bytes(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return b""
    return bits_of(torch.view_as_real(value) if value.is_complex() else value).cpu().numpy().view("uint8")


def _plain(name: str, value: Any) -> str:
    def is_plain(item: Any) -> bool:
        if isinstance(item, dict):
            return all(map(is_plain, (*item.keys(), *item.values())))
        return (
            all(map(is_plain, item)) if isinstance(item, list | tuple) else isinstance(item, int | float | str | None)
        )

    if not is_plain(value):
        raise ValueError(f"model: entry {name!r}, {type(value).__name__}, must be a tensor or a plain value")
    return repr(value)
