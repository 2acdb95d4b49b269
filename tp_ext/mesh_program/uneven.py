"""Shapes that the ranks of a map exchange, where shards may have different lengths."""

import zlib
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from tp_ext.group import ParallelGroup, process_group
from tp_ext.mesh_program.partition_spec import P
from tp_ext.mesh_program.varying import lengths_of, plain


def lengths_by_group(
    x: Tensor, groups: Mapping[str, ParallelGroup], function: str, dim: int | None
) -> dict[str, list[int]]:
    """Returns the lengths of the blocks of ``dim`` that each group of ranks joins, by its name; {}: they are equal.

    Values whose lengths may differ between the ranks are marked; they alone are compared. Without that their
    collective would end the process, or mix elements.

    Args:
        groups: by axis, the outermost first.
        function: for errors.
        dim: None: x must have one shape on all ranks.

    Raises:
        ValueError, on all ranks: another dim has different lengths.

    Communicates: of a marked value, one all-gather of its shape over each group.
    """
    mark, groups = lengths_of([x]), {name: group for name, group in groups.items() if group.size > 1}
    # Numbers cannot be read while a graph is captured
    if not mark or not groups or not x.dim() or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        return {}
    value, axes = plain(x), tuple(groups)
    table = exchanged_tables([shape_line(value)], value.device, list(groups.values()))
    spec = P() if dim is None else P(*[None] * dim, axes)
    places = [group.rank for group in groups.values()]
    sizes = shard_lengths(table[..., 0, :], axes, places, spec, f"{function}: x, whose lengths come from {mark}")
    return {groups[name].name: lengths for name, lengths in sizes.items()}


def shape_line(value: Tensor) -> tuple[int, ...]:
    """Returns dtype, number of dims and shape."""
    # The dtype as a number that is the same in all processes, unlike hash()
    return zlib.crc32(str(value.dtype).encode()), value.dim(), *value.shape


def exchanged_tables(
    rows: Sequence[Sequence[int]], device: torch.device | str, groups: Sequence[ParallelGroup]
) -> Tensor:
    """Returns the rows of all ranks, ``[*sizes of the groups, rows, entries]``, on the host."""
    # The table is no value of the program: it has no type
    with torch._C.DisableTorchFunctionSubclass():
        table = torch.tensor(rows).to(device)
        # From the last axis on, so that the table has the axes in their order
        for group in reversed(groups):
            tables = [torch.empty_like(table) for _ in range(group.size)]
            dist.all_gather(tables, table, group=process_group(group.name))
            table = torch.stack(tables)
        # One copy: every check of it reads numbers
        return table.cpu()


def shard_lengths(table: Tensor, axes: Sequence[str], at: Sequence[int], spec: P, where: str) -> dict[str, list[int]]:
    """Returns the lengths of the blocks that each axis joins on this rank.

    Args:
        table: [*sizes of the axes, entries]: each rank's dtype as a number, number of dims, and shape.
        at: this rank's place along the axes.

    Raises:
        ValueError: shards that do not fit together.
    """
    names, shapes = list(axes), table
    shards = shapes.flatten(0, -2).tolist()
    if any(shard[:2] != shards[0][:2] for shard in shards):
        raise ValueError(
            f"{where}: the ranks' shards by {spec} must have one dtype and number of dims, and have "
            f"{sorted({shard[1] for shard in shards})} dims"
        )
    sizes: dict[str, list[int]] = {}
    for dim in range(shards[0][1]):
        lengths = shapes[..., 2 + dim]
        sharded = spec.dims[dim] if dim < len(spec.dims) else ()
        for k, name in enumerate(names):
            if name not in sharded and not bool((lengths == lengths.select(k, 0).unsqueeze(k)).all()):
                raise ValueError(
                    f"{where}: dim {dim} of the ranks' shards must have one length along axis {name!r}, by {spec}, and "
                    f"has {sorted(set(lengths.flatten().tolist()))}"
                )
        for axis in reversed(sharded):
            if axis in names:
                k = names.index(axis)
                place = [slice(None) if j == k else rank for j, rank in enumerate(at)]
                sizes[axis] = lengths[tuple(place)].tolist()
                # The next axis outwards joins blocks that this one has joined
                lengths = lengths.sum(k, keepdim=True).expand_as(lengths)
    return sizes
