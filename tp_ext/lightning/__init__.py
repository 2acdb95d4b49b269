"""Lightning's trainer for models of sharded layers. Only this package imports lightning."""

from tp_ext.lightning.strategy import TensorParallelStrategy

__all__ = ["TensorParallelStrategy"]
