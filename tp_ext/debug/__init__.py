"""Debugging aids: checks of a model over its ranks, type checking of a program, order and counts of collectives,
shards that are taken for the whole, names in profiles, timelines of steps, comparison of batches, all ranks in one
process.

``tp_ext.debug.check(model)`` after wrapping and after the first step finds mistakes that otherwise show only as a
slightly wrong loss: see docs/guide/debugging.md.
"""

from tp_ext.debug.collective_counts import CollectiveCount, CollectiveCounts, count_collectives
from tp_ext.debug.collective_order import compare_collectives
from tp_ext.debug.digest import sha256
from tp_ext.debug.model_check import check, findings
from tp_ext.debug.profiling import annotate
from tp_ext.debug.replication import assert_replicated
from tp_ext.debug.shard_check import check_shards
from tp_ext.debug.timeline import Span, Timeline, record_timeline
from tp_ext.debug.type_check import typecheck
from tp_ext.model.same_input import compare_inputs, enable
from tp_ext.simulation import simulate

__all__ = [
    "CollectiveCount",
    "CollectiveCounts",
    "Span",
    "Timeline",
    "annotate",
    "assert_replicated",
    "check",
    "check_shards",
    "compare_collectives",
    "compare_inputs",
    "count_collectives",
    "enable",
    "findings",
    "record_timeline",
    "sha256",
    "simulate",
    "typecheck",
]
