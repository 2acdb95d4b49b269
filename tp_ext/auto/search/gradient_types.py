"""Types of gradients, and the sums of gradients that are better placed further up."""

from __future__ import annotations

import sys
from typing import Any

from tp_ext.auto.record.edits import Conversion

COMPLETE, PARTIAL = "complete", "partial"  # types of gradients
SHARDS = "of shards"  # partial while tokens are sharded, else complete
Types = frozenset[str]
NOTHING: Types = frozenset()
COMPLETED: Types = frozenset({COMPLETE})
SUMMED = (frozenset({PARTIAL}), frozenset({SHARDS}))  # one of these may be summed: all of it, or none


def movable_sums(finder: Any, id_: int, at: int) -> set[Conversion]:
    """Returns the sums without which all uses of a tensor, or all in a module that takes it as an argument, have
    partial gradients, as the use ``at`` has: one sum serves them all.

    Args:
        finder: the ``Finder`` of :mod:`tp_ext.auto.search.flow`, which completes gradients as early as it can.
    """
    # An adapter of low rank uses x and its dropout. A sum at the dropout's output would complete some uses alone
    calls = [call for call, _ in finder.calls_with.get(id_, ()) if call.start <= at < call.stop]
    # All uses first: one sum communicates less than a sum in each module that takes the tensor
    for start, stop in [(0, sys.maxsize), *((call.start, call.stop) for call in calls)]:
        complete = [place for place, types in finder.used[id_] if COMPLETE in types and start <= place < stop]
        if copies := _completing(finder, complete):
            return copies
    return set()


def _completing(finder: Any, places: list[int]) -> set[Conversion]:
    """Returns the sums at outputs of modules that complete the gradients that operators give their inputs; none if one
    is complete without a sum."""
    copies: set[Conversion] = set()
    seen: set[int] = set()
    while places:
        step = finder.record.steps[places.pop()]
        results = {id(tensor) for tensor in step.outputs}
        # Its gradient is complete without any sum, so that a ban of sums would not make it partial
        if step.is_loss or results & finder.outputs:
            return set()
        for id_ in (results & finder.used.keys()) - seen:
            seen.add(id_)
            summed = [copy for copy in finder.summed.get((id_, 0, sys.maxsize), ()) if copy.at == "output"]
            # No sum at an output has given this gradient its type, so that a ban of sums would not change it
            if not summed and finder.type_now(finder.by_id[id_]) != COMPLETED:
                return set()
            copies.update(summed)
            places += [] if summed else [place for place, _ in finder.used[id_]]
    return copies
