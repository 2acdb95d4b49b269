"""Optimizers of sharded parameters that look beyond an element; others, such as AdamW, are torch's own."""

from tp_ext.optim.muon import Muon
from tp_ext.optim.parameters import split_parameters
from tp_ext.outside.optimizers import accept

__all__ = ["Muon", "accept", "split_parameters"]
