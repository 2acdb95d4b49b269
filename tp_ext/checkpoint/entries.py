"""The entries of a module's state dict under the names of the unsharded model, each with its layout."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tp_ext.group import ParallelGroup
from tp_ext.model.fqn import resolve_fqn
from tp_ext.model.tied import copies_in
from tp_ext.sharding import Layout

StateDict = dict[str, Any]


class StateEntry(NamedTuple):
    """An entry of a state dict: ``value`` is the live tensor, or the extra state of ``owner``; ``copy_of`` is the name
    of the parameter of another stage that it is a declared copy of."""

    value: Any
    owner: nn.Module
    layout: Layout
    extra: bool
    copy_of: str = ""

    @property
    def shape(self) -> torch.Size:
        """Shape of the full tensor."""
        return self.layout.full_shape(self.value.shape)


def state_entries(module: nn.Module, group: ParallelGroup) -> dict[str, StateEntry]:
    """Returns the module's state dict with the keys of the unwrapped, unsharded model. Tied entries are one object.

    ``group`` is that of modules that declare ``tp_shardings`` and have no group of their own.

    Raises:
        ValueError: an entry is on the meta device; its layout cannot be resolved (:func:`resolve_fqn`).
    """
    entries, copies = {}, copies_in(module)
    for key, value in module.state_dict(keep_vars=True).items():
        found = resolve_fqn(module, key, group)
        if isinstance(value, Tensor) and value.is_meta:
            raise ValueError(f"module: {found.name!r} is on the meta device and must have values; see to_empty")
        extra, copy_of = found.local == "_extra_state", copies.get(id(value), "")
        entries[found.name] = StateEntry(value, found.owner, found.layout, extra, copy_of)
    return entries
