"""Functions of a whole model over its ranks: stages of a pipeline, gradient norm, sums and means of gradients over
data axes, and the guard against data parallelism over TP ranks."""

from typing import Any

from tp_ext._imports import import_now
from tp_ext.parallel.average_gradients import average_gradients, expert_modules, ignore_experts
from tp_ext.parallel.gradient_sum import sum_gradients
from tp_ext.parallel.pipeline.stages import pipeline_stages
from tp_ext.parallel.pipeline.steps import PipelineShapeWarning
from tp_ext.parallel.run import ParallelRun

__all__ = [
    "ParallelRun",
    "PipelineShapeWarning",
    "average_gradients",
    "expert_modules",
    "ignore_experts",
    "pipeline_stages",
    "sum_gradients",
]


# [Note: replicas that come and go are above refit]
def __getattr__(name: str) -> Any:
    """Imports what stands on folders above this one, when it is first used."""
    if name not in ("ElasticData", "ReplicaLost"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_now("tp_ext.elastic"), name)
