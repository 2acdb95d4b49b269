"""Graphs that AOTInductor compiled, as csrc/api/compiled_graph.cpp runs them."""

from typing import Protocol

import torch
from torch import Tensor


class CompiledGraph(Protocol):
    """A compiled graph of lists of tensors."""

    def weight_names(self) -> list[str]:
        """Returns the names of the weights that it needs."""

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        """Gives it all weights; it reads them where they are."""

    def run(self, inputs: list[Tensor]) -> list[Tensor]:
        """Returns the outputs."""


def compiled_graph(library: str) -> CompiledGraph:
    """Loads the graph in a shared library, whose operators are in a file next to it."""
    graph: CompiledGraph = torch.classes.tp_ext.CompiledGraph(library)
    return graph
