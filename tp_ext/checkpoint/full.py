"""Full state dicts: those of the unsharded model, made from shards and loaded into shards. Keys, shapes and layouts
depend neither on the number of ranks nor on the model's wrappers, so any run loads what any other saved.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed import DeviceMesh

from tp_ext._object_collectives import broadcast_from_first
from tp_ext.checkpoint.files.saved_dtypes import check_saved_dtype, refuse_quantised
from tp_ext.checkpoint.gather import check_one_mesh, ranks_of, scatter_full, write_full
from tp_ext.checkpoint.pipeline import WholeEntry, agreed_entries, gather_whole, to_stages, whole_entries
from tp_ext.group import NOT_GIVEN, Group
from tp_ext.mesh import mesh_axes
from tp_ext.model.census import census
from tp_ext.model.fqn import StateDict
from tp_ext.model.stages import Stages


def full_state_dict(
    module: Stages,
    *,
    group: Group = NOT_GIVEN,
    mesh: DeviceMesh | None = None,
    rank0_only: bool = False,
    cpu_offload: bool = False,
) -> StateDict:
    """Returns the state dict of the unsharded model. Tied entries are one tensor in it, too.

    Args:
        module: a module with sharded parameters. FSDP2, DDP, ``torch.compile`` and checkpoint wrappers change neither
            keys nor values: their prefixes are removed. Or a list of the stages of a pipeline that this rank holds,
            with the names of the whole model.
        group: deprecated: the groups of the module's layers, and of the layouts that modules declare, are known. If
            given, it must be one of them. Of a module without any, it is the group of the ``tp_shardings`` that it
            declares.
        mesh: in place of ``group``: a mesh with axes as of :func:`tp_ext.init_mesh`. The state is that of the stages of
            all ranks of ``pp``. Along ``dp``, ``ep`` and ``cp`` parameters are equal copies, unless FSDP2 or their
            layouts shard them.
        rank0_only: the other ranks take part and return an empty dict. Rank 0 is the first rank of each of the groups
            and of every data axis, with ``mesh`` the first of the mesh. Without it the data axis of DDP is known only
            from its wrapper: given the bare module, rank 0 of every replica counts.
        cpu_offload: tensors are moved to the CPU one by one; else they stay on the module's device.

    Communicates: one all-reduce of two numbers over each group and data axis, which shows that all have the same
        entries. Under FSDP2, an all-gather of every shard over the data axis. Then one all-gather per sharded tensor
        and group of its layout; with ``rank0_only``, one gather to rank 0. One full tensor at a time is made: with
        ``rank0_only`` the other ranks never hold one; with ``cpu_offload`` no device holds more than one and the shards
        it is made of. With a pipeline, one exchange of names and shapes over ``pp``, and one broadcast along it per
        tensor; with ``rank0_only`` only between the first ranks of the stages, which hold one full tensor at a time.

    Raises:
        ValueError: an entry is on the meta device; its layout is not known; ``group`` is not one of the module's; two
            of its groups overlap and are no axes of one mesh; ``mesh`` has other axes; two stages have one name;
            on all ranks, the ranks' models have other entries.
        TypeError: ``group`` and ``mesh`` are both given.
    """
    model = census(module, mesh_axes(group, mesh))
    ranks = ranks_of(model)
    entries = agreed_entries(model, ranks)
    state: StateDict = {}
    gathered: dict[str, Tensor | None] = {}
    for name, entry in whole_entries(entries, ranks, with_extra=True, unique=True).items():
        value = entry.value
        # All ranks in the order of the whole entries, whose collectives so match
        if not entry.extra and entry.tensor is not None:
            if entry.tied not in gathered:
                full = gather_whole(entry.tensor, entries.get(name), ranks, rank0_only=rank0_only)
                gathered[entry.tied] = full.cpu() if full is not None and cpu_offload else full
            value = gathered[entry.tied]
        if ranks.first or not rank0_only:
            state[name] = value
    return state


def load_full_state_dict(
    module: Stages,
    state: Mapping[str, Any],
    *,
    group: Group = NOT_GIVEN,
    mesh: DeviceMesh | None = None,
    strict: bool = True,
    broadcast_from_rank0: bool = False,
) -> None:
    """Loads this rank's shard of each entry of an unsharded model's state dict.

    Args:
        module, group, mesh: as in :func:`full_state_dict`.
        state: given on every rank, on any device.
        strict: missing or unexpected keys are an error; else they are ignored. With ``mesh`` they are those of the
            stages of all ranks: a key is missing if a stage misses it, unexpected if no stage takes it.
        broadcast_from_rank0: ``state`` is given on rank 0 (in the sense of ``rank0_only``) alone and ignored elsewhere.

    Communicates nothing; with ``broadcast_from_rank0``, the two numbers of :func:`full_state_dict`, the errors found,
        then every rank's shards, one tensor at a time. With a pipeline, one exchange of names and shapes over
        ``pp``, and with ``broadcast_from_rank0`` one broadcast per tensor of another stage than the first, between the
        first ranks of the stages.

    Raises:
        KeyError: under ``strict``, naming the missing and the unexpected keys.
        ValueError, TypeError: an entry has another shape than the unsharded parameter, or is no tensor; names the key
            and both shapes. A dtype of another kind: integers or floats of 8 bits in place of floats, a quantised
            weight's scales. Under ``strict``, tied entries with different values. An entry of the module is on the meta
            device. In all these cases nothing has been loaded, on any rank.
    """
    model = census(module, mesh_axes(group, mesh))
    ranks = ranks_of(model)
    entries = agreed_entries(model, ranks) if broadcast_from_rank0 else model.state()
    whole = whole_entries(entries, ranks)
    # Everything is checked before the first write; then no rank needs another
    if not broadcast_from_rank0:
        for name in check_state(state, whole, strict):
            if (entry := entries.get(name)) is None:
                continue
            if entry.extra:
                entry.owner.set_extra_state(state[name])
            else:
                write_full(state[name].detach(), entry.value, entry.layout)
        return
    # mesh= says which rank is the first
    if mesh is None:
        check_one_mesh(model)

    def plan() -> StateDict:
        known = check_state(state, whole, strict)
        # Values of extra state travel with the plan; of tensors the dtype alone, their shapes are known
        return {name: state[name] if whole[name].extra else state[name].dtype for name in known}

    for name, planned in broadcast_from_first(plan, ranks.axes).items():
        entry, tensor = entries.get(name), whole[name].tensor
        if whole[name].extra or tensor is None:
            if entry is not None:
                entry.owner.set_extra_state(planned)
            continue
        full = to_stages(state[name].detach() if ranks.first else None, tensor._replace(dtype=planned), ranks)
        if entry is not None:
            scatter_full(full, entry.value, entry.layout, ranks)


def check_state(state: Mapping[str, Any], entries: Mapping[str, WholeEntry], strict: bool) -> list[str]:
    """Checks ``state`` against the model's entries; returns the keys to be loaded, in the order of ``entries``."""
    # By text: a file of others may have keys of several types
    missing, unexpected = (sorted(a.keys() - b.keys(), key=str) for a, b in ((entries, state), (state, entries)))
    refuse_quantised([name for name in state if isinstance(name, str)], entries, "state")
    if strict and (missing or unexpected):
        raise KeyError(f"state: missing keys {missing}, unexpected keys {unexpected}")
    known = [name for name in entries if name in state]
    tied: dict[str, str] = {}
    for name in known:
        entry = entries[name]
        if entry.extra or entry.tensor is None:
            continue
        check_full(name, state[name], entry.tensor.shape)
        check_saved_dtype(name, state[name].dtype, entry.tensor.dtype, "state")
        first = tied.setdefault(entry.tied, name)
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
