"""An exchange of tensors among all ranks of several axes, one all-to-all along each axis.

A tensor goes to its destinations along one axis after the other, so that no group of all ranks is needed, and goes only
once along an axis, whatever the number of destinations behind it. All ranks know who sends what to whom.

Letters of shapes: an item has any shape; a buffer is [b], the b bytes of the items that are sent or received along an
axis, in the order of the ranks there.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from tp_ext.group import process_group
from tp_ext.mesh import DataAxes

_ALIGNMENT = 8  # bytes: of the widest dtype


class ExchangedTensor(NamedTuple):
    """A tensor that one rank sends to several, itself possibly among them."""

    source: int
    targets: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Bytes on the wire, with alignment."""
        size = torch.Size(self.shape).numel() * self.dtype.itemsize
        return -(-size // _ALIGNMENT) * _ALIGNMENT


class _Hop(NamedTuple):
    """The items that this rank sends and receives along an axis, by the other rank's index in the group."""

    group: ProcessGroup
    sent: list[list[int]]
    received: list[list[int]]


class Exchange:
    """An exchange of the same items each time.

    Args:
        items: the items of all ranks, the same list on every rank.
        device: on which the ranks communicate.
    """

    def __init__(self, items: Sequence[ExchangedTensor], axes: DataAxes, device: torch.device) -> None:
        self.items, self.device = items, device
        self.rank = axes.rank
        here = axes.place(self.rank)
        places = [axes.place(rank) for rank in range(axes.size)]
        self._hops: list[_Hop] = []
        # From the last axis on: along the axes after this one a tensor has reached its destinations
        for axis, group in reversed(list(enumerate(axes.axes))):
            hop = _Hop(process_group(group.name), [[] for _ in range(group.size)], [[] for _ in range(group.size)])
            used = False
            for index, item in enumerate(items):
                start = places[item.source]
                reached = {(*start[:axis], *places[target][axis:]) for target in item.targets}
                for to in sorted(reached):
                    # The item is there already along this axis, or another group of the axis moves it
                    if to[axis] == start[axis] or not _same_row(to, here, axis):
                        continue
                    used = True
                    if here[axis] == start[axis]:
                        hop.sent[to[axis]].append(index)
                    if here[axis] == to[axis]:
                        hop.received[start[axis]].append(index)
            # The items are the same on all ranks of a row, so all leave the axis out or none does
            if used:
                self._hops.append(hop)

    def __call__(self, local: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Returns the items that reach this rank, by index; ``local`` are those that it is the source of.

        Communicates: one all-to-all along each axis along which an item goes.
        """
        # Of the items that this rank has or has received so far: it passes them on along the next axis
        tensors = dict(local)
        for group, sent, received in self._hops:
            send = torch.empty(sum(self._sizes(sent)), dtype=torch.uint8, device=self.device)
            receive = torch.empty(sum(self._sizes(received)), dtype=torch.uint8, device=self.device)
            for index, view in self._views(send, sent):
                view.copy_(tensors[index])
            # As bytes: items of several dtypes go in one collective
            dist.all_to_all_single(receive, send, self._sizes(received), self._sizes(sent), group=group)
            tensors.update(self._views(receive, received))
        return {index: tensor for index, tensor in tensors.items() if self.rank in self.items[index].targets}

    def _sizes(self, lists: list[list[int]]) -> list[int]:
        return [sum(self.items[index].bytes for index in of_one) for of_one in lists]

    def _views(self, buffer: Tensor, lists: list[list[int]]) -> list[tuple[int, Tensor]]:
        """Returns the items of a buffer, each in its shape and dtype."""
        views, start = [], 0
        for index in (index for of_one in lists for index in of_one):
            item = self.items[index]
            size = torch.Size(item.shape).numel() * item.dtype.itemsize
            views.append((index, buffer[start : start + size].view(item.dtype).view(item.shape)))
            start += item.bytes
        return views


def _same_row(place: tuple[int, ...], other: tuple[int, ...], axis: int) -> bool:
    """Returns whether two ranks are in one group along the axis."""
    return place[:axis] == other[:axis] and place[axis + 1 :] == other[axis + 1 :]
