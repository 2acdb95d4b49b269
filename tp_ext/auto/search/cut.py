"""The minimum cut between nodes that are I and nodes that are R."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass

from torch import Tensor

from tp_ext.auto.record.edits import Conversion
from tp_ext.auto.record.record import ModuleCall

END = sys.maxsize


@dataclass(eq=False)
class CutBoundary:
    """A place at which a tensor that is I outside may be R inside.

    Attributes:
        outer, inner: nodes. cost: bytes of the sum of its gradient, and less than one of preference. tensor: what is
        summed, for its uses from operator ``start`` on and before ``stop``.
        edits: the conversions; none: an input is refused, or a call sums.
        call: the one of the module; None: of a parameter. known: operators before which a sum that is only for sharded
            tokens must know their length; None: it cannot.
    """

    outer: int
    inner: int
    cost: int
    tensor: Tensor
    start: int = 0
    stop: int = END
    edits: tuple[Conversion, ...] = ()
    call: ModuleCall | None = None
    known: tuple[int, ...] | None = ()
    flow: int = 0


class TypeGraph:
    """Nodes that are joined, and boundaries between nodes."""

    def __init__(self) -> None:
        self.joined: list[list[int]] = [[]]
        self.around: list[list[CutBoundary]] = [[]]  # the boundaries of each node

    def node(self) -> int:
        self.joined.append([])
        self.around.append([])
        return len(self.joined) - 1

    def join(self, one: int, other: int) -> None:
        self.joined[one].append(other)
        self.joined[other].append(one)

    def add(self, boundary: CutBoundary) -> None:
        self.around[boundary.outer].append(boundary)
        self.around[boundary.inner].append(boundary)

    def whole(self, sources: Iterable[int], is_open: Callable[[CutBoundary], bool]) -> dict[int, int]:
        """The nodes that are I in any cut, each with the one that makes it so: what is joined to an I, or outside."""
        reasons = {node: node for node in sources}
        queue = deque(reasons)
        while queue:
            node = queue.popleft()
            outside = (
                b.outer if b.inner == node else b.inner for b in self.around[node] if b.inner == node or not is_open(b)
            )
            for other in (*self.joined[node], *outside):
                if other not in reasons:
                    reasons[other] = node
                    queue.append(other)
        return reasons

    def inside(self, whole: Container[int], sinks: Iterable[int], is_open: Callable[[CutBoundary], bool]) -> set[int]:
        """The nodes that are R by a minimum cut, of several the one that makes the fewest so.

        The flow to a sink is increased until no path is left; what still leads to it then is behind the cut."""
        inside: set[int] = set()
        for sink in sinks:
            while sink not in inside:
                # From the sink on backward, as far as boundaries let more flow through
                after: dict[int, tuple[int, CutBoundary | None]] = {sink: (sink, None)}
                queue, start = deque([sink]), -1
                while queue and start < 0:
                    node = queue.popleft()
                    if node in whole:
                        start = node
                    before: list[tuple[int, CutBoundary | None]] = [(other, None) for other in self.joined[node]]
                    before += [
                        (b.inner if b.outer == node else b.outer, b)
                        for b in self.around[node]
                        if b.outer == node or not is_open(b) or b.flow < b.cost
                    ]
                    for other, boundary in before:
                        if other not in after:
                            after[other] = node, boundary
                            queue.append(other)
                if start < 0:
                    inside.update(after)
                    break
                path = []
                while start != sink:
                    following, boundary = after[start]
                    if boundary is not None and is_open(boundary):
                        path.append((boundary, 1 if boundary.outer == start else -1))
                    start = following
                most = min(b.cost - b.flow for b, sign in path if sign > 0)
                for boundary, sign in path:
                    boundary.flow += sign * most
        return inside
