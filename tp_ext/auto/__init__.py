"""Tensor parallelism of unchanged models: a plan derived from one run on fake tensors, and its execution."""

from tp_ext.auto.apply_plan import apply
from tp_ext.auto.planner import plan
from tp_ext.auto.record.edits import Collective, Conversion, Draw, Output
from tp_ext.auto.record.trace import constraint
from tp_ext.auto.search.plans import Plan

__all__ = ["Collective", "Conversion", "Draw", "Output", "Plan", "apply", "constraint", "plan"]
