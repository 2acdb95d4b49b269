"""The groups of a model: those of its layers and of the layouts that its modules declare, as the axes of a mesh. Whole
models (state dicts, checkpoints, norms, checks) communicate over them, and count each element on one rank.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor

from tp_ext.chunks import LocalChunk
from tp_ext.group import ParallelGroup
from tp_ext.sharding import Layout


class ModelGroups(NamedTuple):
    """The groups of a model.

    Attributes:
        axes: the groups of more than one rank, in the order in which the modules use them. Two of them share this rank
            only, like the axes of a mesh; groups within another one are left out.
        within: the name of each group of the model -> the index of its axis, and whether the group holds the axis's
            first rank.
    """

    axes: tuple[ParallelGroup, ...]
    within: dict[str, tuple[int, bool]]

    @property
    def first(self) -> bool:
        """True on the rank that is the first of all axes."""
        return all(axis.rank == 0 for axis in self.axes)

    def _place(self, group: ParallelGroup) -> tuple[int, bool]:
        """Returns the entry of ``within`` of a group of the model."""
        return self.within[group.name]

    def is_axis(self, group: ParallelGroup) -> bool:
        """Returns whether a group of the model is a whole axis."""
        return self.axes[self._place(group)[0]].size == group.size

    def spanned(self, mesh: DeviceMesh) -> list[ParallelGroup]:
        """Returns the axes that are an axis of FSDP2's ``mesh``, or lie within one, as an expert group lies within the
        data ranks of all other parameters."""
        over = [set(dist.get_process_group_ranks(axis)) for axis in mesh.get_all_groups()]
        return [axis for axis in self.axes if any(set(axis.ranks) <= members for members in over)]

    def counts(self, layout: Layout, tensor: Tensor | None = None) -> bool:
        """Returns whether this rank counts its shard: of the ranks that hold the same one, it is the first. Over axes
        that the mesh of a DTensor ``tensor`` spans, its placements say so, and every rank does here.

        Raises:
            ValueError: the layout has several groups within one axis that do not make up the axis.
        """
        # The usual case, asked for each parameter of a norm: sharded over the only axis, so no other rank holds it
        if len(self.axes) == 1 and len(layout) == 1 and layout[0][1].size == self.axes[0].size:
            return True
        spanned = self.spanned(tensor.device_mesh) if isinstance(tensor, DTensor) else []
        of_axis: dict[int, list[ParallelGroup]] = {}
        for _, group in layout:
            if group.size > 1:
                of_axis.setdefault(self._place(group)[0], []).append(group)
        for index, axis in enumerate(self.axes):
            groups = of_axis.get(index, [])
            if math.prod(group.size for group in groups) == axis.size or (not groups and axis in spanned):
                continue
            if len(groups) > 1:
                sizes = [group.size for group in groups]
                raise ValueError(
                    f"layout: its groups of {sizes} ranks must make up the {axis.size} ranks of their axis"
                )
            # Along this axis several ranks hold the same shard: the first of them counts it, or those of the first
            # group
            if not (self._place(groups[0])[1] if groups else axis.rank == 0):
                return False
        return True

    def local_chunks(self, tensor: Tensor, layout: Layout) -> tuple[torch.Size, list[LocalChunk]]:
        """Returns :meth:`Layout.local_chunks`, owned only by the first of the ranks of the model that hold them."""
        shape, chunks = layout.local_chunks(tensor)
        if not self.counts(layout, tensor):
            chunks = [chunk._replace(owned=False) for chunk in chunks]
        return shape, chunks


def axes_of_groups(groups: Iterable[ParallelGroup]) -> ModelGroups:
    """Returns the axes with these groups.

    Raises:
        ValueError: two groups share several ranks, and neither is within the other.
    """
    ranks: dict[tuple[int, ...], ParallelGroup] = {}
    names: dict[str, tuple[int, ...]] = {}
    for group in {group.name: group for group in groups}.values():
        if group.size > 1 and group.name not in names:
            names[group.name] = tuple(group.ranks)
            ranks.setdefault(names[group.name], group)
    largest = [rank for rank in ranks if not any(set(rank) < set(other) for other in ranks)]
    # Of groups that overlap otherwise no rank could know which others hold its shard
    # [Note: a layout is a tuple of shardings and groups]
    for i, members in enumerate(largest):
        for other in largest[:i]:
            if len(set(members) & set(other)) > 1:
                raise ValueError(
                    f"group: the model's groups of ranks {list(other)} and {list(members)} share several ranks, and "
                    "must be axes of one mesh, or one within the other"
                )
    within = {}
    for name, members in names.items():
        index = next(i for i, axis in enumerate(largest) if set(members) <= set(axis))
        within[name] = index, largest[index][0] in members
    axes = tuple(ranks[members] for members in largest)
    return ModelGroups(axes, within)
