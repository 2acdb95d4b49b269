"""The groups of a model: those of its layers and of the layouts that its modules declare, as the axes of a mesh. Whole
models (state dicts, checkpoints, norms, checks) communicate over them, and count each element on one rank.
"""

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor

from tp_ext.chunks import LocalChunk
from tp_ext.group import ALONE, NOT_GIVEN, ParallelGroup, global_ranks, parallel_group
from tp_ext.mesh import MeshAxes
from tp_ext.model.layouts import layouts_of
from tp_ext.model.module import ParallelModule
from tp_ext.sharding import Layout


class ModelGroups(NamedTuple):
    """The groups of a model.

    Attributes:
        axes: the groups of more than one rank, in the order in which the modules use them. Two of them share this rank
            only, like the axes of a mesh; groups within another one are left out.
        within: the name of each group of the model -> the index of its axis, and whether the group holds the axis's
            first rank.
        default: the group of modules that declare ``tp_shardings`` and have no group of their own: the one that is
            given, or the model's only one.
    """

    axes: tuple[ParallelGroup, ...]
    within: dict[str, tuple[int, bool]]
    default: ParallelGroup

    @property
    def first(self) -> bool:
        """True on the rank that is the first of all axes."""
        return all(axis.rank == 0 for axis in self.axes)

    def _place(self, group: ParallelGroup) -> tuple[int, bool]:
        """Returns the entry of ``within`` of a group of the model."""
        return self.within[group.plain().name]

    def is_axis(self, group: ParallelGroup) -> bool:
        """Returns whether a group of the model is a whole axis."""
        return self.axes[self._place(group)[0]].size == group.size

    def spanned(self, mesh: DeviceMesh) -> list[ParallelGroup]:
        """Returns the axes that are an axis of FSDP2's ``mesh``, or lie within one, as an expert group lies within the
        data ranks of all other parameters."""
        over = [set(dist.get_process_group_ranks(axis)) for axis in mesh.get_all_groups()]
        return [axis for axis in self.axes if any(set(global_ranks(axis.name)) <= members for members in over)]

    def counts(self, layout: Layout, tensor: Tensor | None = None) -> bool:
        """Returns whether this rank counts its shard: of the ranks that hold the same one, it is the first. Over axes
        that the mesh of a DTensor ``tensor`` spans, its placements say so, and every rank does here.

        Raises:
            ValueError: the layout has several groups within one axis that do not make up the axis.
        """
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
    """Returns the axes of which these are the groups.

    Raises:
        ValueError: two groups share several ranks, and neither is within the other.
    """
    ranks: dict[tuple[int, ...], ParallelGroup] = {}
    names: dict[str, tuple[int, ...]] = {}
    for group in {group.name: group for group in groups}.values():
        plain = group.plain()
        if plain.size > 1 and plain.name not in names:
            names[plain.name] = tuple(global_ranks(plain.name))
            ranks.setdefault(names[plain.name], plain)
    largest = [rank for rank in ranks if not any(set(rank) < set(other) for other in ranks)]
    for i, one in enumerate(largest):
        for other in largest[:i]:
            if len(set(one) & set(other)) > 1:
                raise ValueError(
                    f"group: the model's groups of ranks {list(other)} and {list(one)} share several ranks, and must "
                    "be axes of one mesh, or one within the other"
                )
    within = {}
    for name, members in names.items():
        index = next(i for i, axis in enumerate(largest) if set(members) <= set(axis))
        within[name] = index, largest[index][0] in members
    axes = tuple(ranks[one] for one in largest)
    return ModelGroups(axes, within, axes[0] if len(axes) == 1 else ALONE)


def model_groups(model: nn.Module, given: MeshAxes | None = None) -> ModelGroups:
    """Returns the groups of the model's modules; the tensor-parallel one of ``given``, if there is one, must be one of
    them. A model without any, whose modules may declare ``tp_shardings``, has that one.

    Raises:
        ValueError: the group of ``given`` has other ranks than each of the model's groups, but those of experts; two
            groups overlap and are no axes of one mesh.
        TypeError: the group is none of the accepted kinds.
    """
    layers = [module for module in model.modules() if isinstance(module, ParallelModule)]
    found = axes_of_groups(groups_in_use(model))
    if given is None or given.group is NOT_GIVEN:
        return found
    group, named = parallel_group(given.group).plain(), given.named
    ranks = tuple(global_ranks(group.name))
    theirs = {tuple(global_ranks(name)) for name in found.within} - {tuple(global_ranks(given.ep.name))}
    if theirs and ranks not in theirs:
        names = " or ".join(_shown(members) for members in sorted(theirs))
        raise ValueError(
            f"{named}: {_shown(ranks)} must be that of the model's layers, {names}; without {named.split('[')[0]}= it "
            "is taken from them"
        )
    if not theirs and len(ranks) > 1 and any(any(layer.tp_layouts.values()) for layer in layers):
        raise ValueError(f"{named}: {_shown(ranks)} must be that of the model's layers, which were made without one")
    return (found if theirs else axes_of_groups([group, *groups_in_use(model)]))._replace(default=group)


def groups_in_use(model: nn.Module) -> Iterator[ParallelGroup]:
    """Yields the group of each layer and those of all layouts, in the order of the modules, some of them repeatedly."""
    for module in model.modules():
        if isinstance(module, ParallelModule):
            yield module.tp_group
        for layout in layouts_of(module).values():
            yield from (group for _, group in layout)


def _shown(ranks: tuple[int, ...]) -> str:
    if not ranks:
        return "None"
    return f"the group of ranks {list(ranks)}" if len(ranks) <= 16 else f"a group of {len(ranks)} ranks"
