"""Functions of a whole model over its ranks: gradient norm, the sum of gradients over a context group, and the guard
against data parallelism over TP ranks."""

from tp_ext.parallel.gradient_sum import sum_gradients

__all__ = ["sum_gradients"]
