"""The entries of a whole model over the stages of a pipeline: which stage has which, and how a full tensor goes from
one stage to the others. Without a pipeline the module is the only stage, and nothing is communicated.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from tp_ext._object_collectives import (
    all_gather_along,
    all_gather_objects,
    differs_between_ranks,
    raise_first,
    true_on_any_rank,
)
from tp_ext.checkpoint.gather import Ranks, as_bytes, gather_full
from tp_ext.model.census import Census
from tp_ext.model.fqn import Entry

T = TypeVar("T")


class WholeTensor(NamedTuple):
    """A full tensor of the whole model: the stages that have it, and what the others must know to receive it."""

    stages: tuple[int, ...]
    shape: torch.Size
    dtype: torch.dtype
    device: str


class WholeEntry(NamedTuple):
    """An entry of the state dict of the whole model.

    Attributes:
        stages: the stages that have it, as ranks of the pipeline.
        tensor: the full tensor; None if it is extra state of another kind.
        tied: the name of the first entry that is the same tensor; its own, if it is the first.
        copy_of: the name of the entry of another stage that it is a declared copy of.
        extra: whether it is extra state.
        value: the extra state, where this was asked for.
    """

    stages: tuple[int, ...]
    tensor: WholeTensor | None
    tied: str
    copy_of: str
    extra: bool
    value: Any


def over_stages(value: T, ranks: Ranks) -> list[T]:
    """Returns the value of each stage. Communicates: one exchange over the pipeline."""
    return [value] if ranks.pipeline is None else all_gather_objects(value, ranks.pipeline)


def whole_entries(
    entries: Mapping[str, Entry], ranks: Ranks, *, with_extra: bool = False, unique: bool = False
) -> dict[str, WholeEntry]:
    """Returns the entries of the whole model from each stage's entries, the stages one after the other.

    Communicates: one exchange over the pipeline, of names and shapes, and of extra state if ``with_extra``.

    Raises:
        ValueError: under ``unique``, two stages have an entry of one name; a declared copy of an entry that no stage
            has, or that has another shape.
    """
    first: dict[int, str] = {}
    of_this_stage: dict[str, WholeEntry] = {}
    for name, entry in entries.items():
        tensor = None
        if isinstance(entry.value, Tensor):
            tensor = WholeTensor((ranks.stage,), entry.shape, entry.value.dtype, entry.value.device.type)
        # Entries of one tensor are tied: the first name is that of all
        tied = first.setdefault(id(entry.value), name)
        value = entry.value if entry.extra and with_extra else None
        of_this_stage[name] = WholeEntry((ranks.stage,), tensor, tied, entry.copy_of, entry.extra, value)
    merged: dict[str, WholeEntry] = {}
    for of_stage in over_stages(of_this_stage, ranks):
        for name, whole in of_stage.items():
            if name not in merged:
                merged[name] = whole
                continue
            other = merged[name]
            check_unique(name, (*other.stages, *whole.stages), unique and name not in (whole.copy_of, other.copy_of))
            # The original comes first, whose rank sends the tensor
            merged[name] = _merged(whole, other) if other.copy_of == name else _merged(other, whole)
    for name, whole in merged.items():
        original = merged.get(whole.copy_of)
        # Without a pipeline the other stages are not known: a copy has its own name
        if not whole.copy_of or original is whole or (original is None and ranks.pipeline is None):
            continue
        if original is None or not whole.tensor or not original.tensor or original.tensor.shape != whole.tensor.shape:
            raise ValueError(
                f"module: {name!r} is a copy of {whole.copy_of!r}, which must be in a stage and have the same shape; "
                "see declare_tied"
            )
        merged[name] = whole._replace(tied=original.tied)
    return merged


def _description(name: str, entry: Entry, tied: str) -> str:
    if not isinstance(entry.value, Tensor):
        return "no tensor"
    words = [f"of shape {tuple(entry.shape)}", str(entry.value.dtype)]
    words += [f"sharded in dim {part.dim} over {group.size} ranks" for part, group in entry.layout if group.size > 1]
    return ", ".join(words if tied == name else [*words, f"tied to {tied!r}"])


def agreed_entries(model: Census, ranks: Ranks, read: Callable[[], dict[str, Entry]] | None = None) -> dict[str, Entry]:
    """Returns the entries of a stage, those of its state dict or what ``read`` returns, which are the same on all its
    ranks. Communicates and raises as :func:`check_same`; also for an entry that is an error on one rank alone, such as
    one on the meta device."""
    entries: dict[str, Entry] = {}

    def describe() -> dict[str, str]:
        entries.update((read or model.state)())
        first: dict[int, str] = {}
        tied = {name: first.setdefault(id(entry.value), name) for name, entry in entries.items()}
        return {name: _description(name, entry, tied[name]) for name, entry in entries.items()}

    check_same("module", describe, ranks)
    return entries


def check_same(name: str, describe: Callable[[], Mapping[str, str]], ranks: Ranks) -> None:
    """Checks that all ranks of a stage have the same entries, in this order. Otherwise a rank could wait for the others
    in a collective, or get the shards of another entry. ``describe`` returns descriptions by name.

    Communicates: one all-reduce of two numbers along every axis; before an error, one exchange of the entries.

    Raises:
        ValueError: on all ranks of all stages. What ``describe`` raises, on one rank or several: on all, too.
    """
    failure: Exception | None = None
    entries: Mapping[str, str] = {}
    try:
        entries = describe()
    except Exception as error:  # of any kind: the other ranks must not wait for this one
        failure = error
    differ = differs_between_ranks((repr(failure), [*entries.items()]), ranks.stage_axes, ranks.device)
    # The ranks of a stage may fail alike, of which other stages do not know
    if ranks.pipeline is not None:
        differ = true_on_any_rank(differ or failure is not None, [ranks.pipeline], ranks.device)
    if not differ:
        if failure is not None:
            raise failure
        return
    raise_first(failure, ranks.axes)
    gathered = all_gather_along([(ranks.stage, dist.get_rank(), entries)], ranks.axes)
    first: dict[int, tuple[int, Mapping[str, str]]] = {}
    # In the order of ranks, so that all raise the same error
    for stage, rank, descriptions in sorted(gathered, key=lambda described: described[:2]):
        other_rank, others = first.setdefault(stage, (rank, descriptions))
        for key in (*others, *descriptions):
            if others.get(key) != descriptions.get(key):
                here, there = (f"is {rows[key]}" if key in rows else "is missing" for rows in (others, descriptions))
                raise ValueError(
                    f"{name}: {key!r} must be the same on all ranks that hold the model, and {here} on rank "
                    f"{other_rank}, {there} on rank {rank}"
                )
        # Collectives follow the order of the entries: shards of two entries would be joined
        if list(others) != list(descriptions):
            key = next(a for a, b in zip(others, descriptions, strict=True) if a != b)
            raise ValueError(
                f"{name}: ranks {other_rank} and {rank} must have the entries in the same order, and differ from "
                f"{key!r} on"
            )


def check_unique(name: str, stages: tuple[int, ...], unique: bool = True) -> None:
    """Raises ValueError if a name that must be in one stage is in several."""
    if unique and len(stages) > 1:
        raise ValueError(
            f"module: {name!r} is in the stages {list(stages)} of the pipeline, and must be in one: stages keep the "
            "names of the whole model"
        )


def _merged(entry: WholeEntry, other: WholeEntry) -> WholeEntry:
    stages = entry.stages + other.stages
    return entry._replace(stages=stages, tensor=entry.tensor and entry.tensor._replace(stages=stages))


def gather_whole(tensor: WholeTensor, entry: Entry | None, ranks: Ranks, *, rank0_only: bool = False) -> Tensor | None:
    """Gathers a full tensor as :func:`gather_full`, for the ranks of all stages or for rank 0 of the first one;
    ``entry`` is this rank's.

    Communicates: as :func:`gather_full` in the stage that has it, then one broadcast along the pipeline; with
    ``rank0_only`` that of the first ranks of each stage, and none for a tensor of the first stage.
    """
    full = None
    if entry is not None and tensor.stages[0] == ranks.stage:
        full = gather_full(entry.value, entry.layout, ranks, rank0_only=rank0_only)
    return from_stage(full, tensor, ranks, rank0_only=rank0_only)


def from_stage(full: Tensor | None, tensor: WholeTensor, ranks: Ranks, *, rank0_only: bool) -> Tensor | None:
    """Returns the full tensor of the first of ``tensor.stages``: on all stages, or on rank 0 of the first one."""
    source = tensor.stages[0]
    # The first stage has it, or this rank is no first one, between which alone the broadcast is
    if ranks.pipeline is None or (rank0_only and (source == 0 or not ranks.stage_first)):
        return full
    moved = _along_pipeline(full, tensor, source, ranks)
    return moved if ranks.first or not rank0_only else None


def to_stages(full: Tensor | None, tensor: WholeTensor, ranks: Ranks) -> Tensor | None:
    """Returns, on the first ranks of the stages that have it, the full tensor that rank 0 of the first stage has.

    Communicates: one broadcast along the pipeline, between the first ranks of each stage; none for a tensor that only
    the first stage has.
    """
    # Only the first ranks of stages have a part in it: they scatter it to the others of their stage
    if ranks.pipeline is None or tensor.stages == (0,) or not ranks.stage_first:
        return full
    moved = _along_pipeline(full, tensor, 0, ranks)
    return moved if ranks.stage in tensor.stages else None


def _along_pipeline(full: Tensor | None, tensor: WholeTensor, source: int, ranks: Ranks) -> Tensor:
    """Broadcasts the full tensor of one stage."""
    if full is None or ranks.stage != source:
        # Stages that do not have it receive it, too: a broadcast is a collective of the whole pipeline
        sent = torch.empty(tensor.shape, dtype=tensor.dtype, device=ranks.device)
    else:
        sent = full.detach().to(ranks.device, tensor.dtype).contiguous()
    if sent.numel():
        dist.broadcast(as_bytes(sent), group=ranks.pipeline, group_src=source)
    return full if full is not None and ranks.stage == source else sent.to(tensor.device)
