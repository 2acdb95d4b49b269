"""Full state dicts: what the unsharded model would have, from shards and back. Keys, shapes and layouts depend neither
on the number of ranks nor on what wraps the model, so what one run saved any other loads.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tp_ext.checkpoint.gather import check_one_mesh, deal_full, from_first, gather_full, ranks_of, write_full
from tp_ext.group import NOT_GIVEN, Group
from tp_ext.nn.module import locate
from tp_ext.sharding import Sharding

StateDict = dict[str, Any]


class Entry(NamedTuple):
    """An entry of a state dict: ``value`` is live, a tensor or the extra state of ``owner``."""

    value: Any
    owner: nn.Module
    sharding: Sharding | None
    extra: bool

    @property
    def shape(self) -> torch.Size:
        """That of the full tensor."""
        return full_shape(self.value, self.sharding)


def full_shape(local: Tensor, sharding: Sharding | None) -> torch.Size:
    """The shape of the full tensor."""
    shape = list(local.shape)
    if sharding is not None:
        shape[sharding.dim] = sharding.size
    return torch.Size(shape)


def entries_of(module: nn.Module) -> dict[str, Entry]:
    """The module's state dict, its keys those of the unwrapped, unsharded model. Tied entries are the same object.

    Raises:
        ValueError: an entry is on the meta device; its sharding cannot be told (:func:`locate`).
    """
    entries = {}
    for key, value in module.state_dict(keep_vars=True).items():
        place = locate(module, key)
        if isinstance(value, Tensor) and value.is_meta:
            raise ValueError(f"module: {place.name!r} is on the meta device and must have values; see to_empty")
        entries[place.name] = Entry(value, place.owner, place.sharding, place.local == "_extra_state")
    return entries


def full_state_dict(
    module: nn.Module, *, group: Group = NOT_GIVEN, rank0_only: bool = False, cpu_offload: bool = False
) -> StateDict:
    """The state dict of the unsharded model. Tied entries are one tensor there, too.

    Args:
        module: with sharded parameters. Under FSDP2, DDP, ``torch.compile`` or checkpoint wrappers it
            gives what it gives without, without their prefixes.
        group: the tensor-parallel group; default: that of the module's layers.
        rank0_only: the other ranks take part and return an empty dict. Rank 0 is that of ``group``, on the first rank
            of every data axis. Of DDP only its wrapper knows the data axis: without it, every replica's rank 0.
        cpu_offload: tensors are moved to the CPU as they come, else they stay on the module's device.

    Communicates: under FSDP2, an all-gather of every shard over the data axis. Then one all-gather per sharded tensor;
        with ``rank0_only``, one gather to rank 0. One full tensor at a time is made: with ``rank0_only`` the other
        ranks never hold one; with ``cpu_offload`` no device holds more than one and the pieces it is made of.

    Raises:
        ValueError: an entry is on the meta device; its sharding is not known; ``group`` is not that of the module's
            layers.
    """
    entries = entries_of(module)
    ranks = ranks_of(module, group)
    state: StateDict = {}
    made: dict[int, Tensor | None] = {}
    for name, entry in entries.items():
        value = entry.value
        if not entry.extra:
            if id(entry.value) not in made:
                full = gather_full(entry.value, entry.sharding, ranks, rank0_only=rank0_only)
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
    """Keeps this rank's pieces of each entry of an unsharded model's state dict.

    Args:
        module, group: as in :func:`full_state_dict`.
        state: given on every rank, on any device.
        strict: missing or unexpected keys are an error; else they are passed over.
        broadcast_from_rank0: ``state`` is given on rank 0 (as ``rank0_only`` means it) alone, passed over elsewhere.

    Communicates nothing; with ``broadcast_from_rank0``, what was found wrong, and then every rank's shards, one tensor
        at a time.

    Raises:
        KeyError: under ``strict``, naming the missing and the unexpected keys.
        ValueError, TypeError: an entry has another shape than the unsharded parameter, or is no tensor; names the key
            and both shapes. Under ``strict``, tied entries with different values. An entry of the module is on the meta
            device. Nothing has been loaded then, on any rank.
    """
    entries = entries_of(module)
    ranks = ranks_of(module, group)
    if not broadcast_from_rank0:
        for name in checked(state, entries, strict):
            entry = entries[name]
            if entry.extra:
                entry.owner.set_extra_state(state[name])
            else:
                write_full(state[name].detach(), entry.value, entry.sharding, ranks.tp)
        return
    check_one_mesh(module)

    def plan() -> StateDict:
        return {name: state[name] if entries[name].extra else None for name in checked(state, entries, strict)}

    for name, extra in from_first(plan, ranks).items():
        entry = entries[name]
        if entry.extra:
            entry.owner.set_extra_state(extra)
        else:
            deal_full(state[name].detach() if ranks.first else None, entry.value, entry.sharding, ranks)


def checked(state: Mapping[str, Any], entries: Mapping[str, Entry], strict: bool) -> list[str]:
    """The keys of ``state`` to be loaded, in the order of ``entries``."""
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
