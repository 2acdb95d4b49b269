"""Full state dicts: those of the unsharded model, made from shards and loaded into shards. Keys, shapes and layouts
depend neither on the number of ranks nor on the model's wrappers, so any run loads what any other saved.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tp_ext._object_collectives import broadcast_from_first
from tp_ext.checkpoint.gather import check_one_mesh, gather_full, ranks_of, scatter_full, write_full
from tp_ext.group import NOT_GIVEN, Group, ParallelGroup
from tp_ext.nn.fqn import resolve_fqn
from tp_ext.sharding import Layout

StateDict = dict[str, Any]


class StateEntry(NamedTuple):
    """An entry of a state dict: ``value`` is the live tensor, or the extra state of ``owner``."""

    value: Any
    owner: nn.Module
    layout: Layout
    extra: bool

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
    entries = {}
    for key, value in module.state_dict(keep_vars=True).items():
        found = resolve_fqn(module, key, group)
        if isinstance(value, Tensor) and value.is_meta:
            raise ValueError(f"module: {found.name!r} is on the meta device and must have values; see to_empty")
        entries[found.name] = StateEntry(value, found.owner, found.layout, found.local == "_extra_state")
    return entries


def full_state_dict(
    module: nn.Module, *, group: Group = NOT_GIVEN, rank0_only: bool = False, cpu_offload: bool = False
) -> StateDict:
    """Returns the state dict of the unsharded model. Tied entries are one tensor in it, too.

    Args:
        module: a module with sharded parameters. FSDP2, DDP, ``torch.compile`` and checkpoint wrappers change neither
            keys nor values: their prefixes are removed.
        group: not needed: the groups of the module's layers, and of the layouts that modules declare, are known. If
            given, it must be one of them. Of a module without any, it is the group of the ``tp_shardings`` that it
            declares.
        rank0_only: the other ranks take part and return an empty dict. Rank 0 is the first rank of each of the groups
            and of every data axis. The data axis of DDP is known only from its wrapper: given the bare module, rank 0
            of every replica counts.
        cpu_offload: tensors are moved to the CPU one by one; else they stay on the module's device.

    Communicates: under FSDP2, an all-gather of every shard over the data axis. Then one all-gather per sharded tensor
        and group of its layout; with ``rank0_only``, one gather to rank 0. One full tensor at a time is made: with
        ``rank0_only`` the other ranks never hold one; with ``cpu_offload`` no device holds more than one and the shards
        it is made of.

    Raises:
        ValueError: an entry is on the meta device; its layout is not known; ``group`` is not one of the module's; two
            of its groups overlap and are no axes of one mesh.
    """
    ranks = ranks_of(module, group)
    entries = state_entries(module, ranks.groups.default)
    state: StateDict = {}
    made: dict[int, Tensor | None] = {}
    for name, entry in entries.items():
        value = entry.value
        if not entry.extra:
            if id(entry.value) not in made:
                full = gather_full(entry.value, entry.layout, ranks, rank0_only=rank0_only)
                made[id(entry.value)] = full.cpu() if full is not None and cpu_offload else full
            value = made[id(entry.value)]
        if ranks.first or not rank0_only:
            state[name] = value
    return state


def load_full_state_dict(
    module: nn.Module,
    state: Mapping[str, Any],
    *,
    group: Group = NOT_GIVEN,
    strict: bool = True,
    broadcast_from_rank0: bool = False,
) -> None:
    """Loads this rank's shard of each entry of an unsharded model's state dict.

    Args:
        module, group: as in :func:`full_state_dict`.
        state: given on every rank, on any device.
        strict: missing or unexpected keys are an error; else they are ignored.
        broadcast_from_rank0: ``state`` is given on rank 0 (in the sense of ``rank0_only``) alone and ignored elsewhere.

    Communicates nothing; with ``broadcast_from_rank0``, the errors found, then every rank's shards, one tensor at a
        time.

    Raises:
        KeyError: under ``strict``, naming the missing and the unexpected keys.
        ValueError, TypeError: an entry has another shape than the unsharded parameter, or is no tensor; names the key
            and both shapes. Under ``strict``, tied entries with different values. An entry of the module is on the meta
            device. In all these cases nothing has been loaded, on any rank.
    """
    ranks = ranks_of(module, group)
    entries = state_entries(module, ranks.groups.default)
    if not broadcast_from_rank0:
        for name in check_state(state, entries, strict):
            entry = entries[name]
            if entry.extra:
                entry.owner.set_extra_state(state[name])
            else:
                write_full(state[name].detach(), entry.value, entry.layout)
        return
    check_one_mesh(module)

    def plan() -> StateDict:
        return {name: state[name] if entries[name].extra else None for name in check_state(state, entries, strict)}

    for name, extra in broadcast_from_first(plan, ranks.axes).items():
        entry = entries[name]
        if entry.extra:
            entry.owner.set_extra_state(extra)
        else:
            scatter_full(state[name].detach() if ranks.first else None, entry.value, entry.layout, ranks)


def check_state(state: Mapping[str, Any], entries: Mapping[str, StateEntry], strict: bool) -> list[str]:
    """Checks ``state`` against the module's entries; returns the keys to be loaded, in the order of ``entries``."""
    missing, unexpected = sorted(entries.keys() - state.keys()), sorted(state.keys() - entries.keys())
    if strict and (missing or unexpected):
        raise KeyError(f"state: missing keys {missing}, unexpected keys {unexpected}")
    known = [name for name in entries if name in state]
    tied: dict[int, str] = {}
    for name in known:
        entry = entries[name]
        if entry.extra:
            continue
        check_full(name, state[name], entry.shape)
        first = tied.setdefault(id(entry.value), name)
        if strict and first != name and state[first] is not state[name] and not torch.equal(state[first], state[name]):
            raise ValueError(f"state: {first!r} and {name!r} are one tensor in the module and must be equal")
    return known


def check_full(name: str, full: Any, expected: torch.Size) -> None:
    """Raises unless ``full`` is a tensor of the shape that the unsharded model has."""
    if not isinstance(full, Tensor):
        raise TypeError(f"state: {name!r} is {type(full).__name__} and must be a tensor")
    if full.shape != expected:
        raise ValueError(
            f"state: {name!r} has shape {tuple(full.shape)} and must have {tuple(expected)}, "
            "that of the unsharded module"
        )
