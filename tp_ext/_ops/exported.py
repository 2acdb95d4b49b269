"""Graphs that AOTInductor compiled, as csrc/api/compiled_graph.cpp runs them, and the operators they call whole."""

from typing import Any, Protocol

import torch
from torch import Tensor

from tp_ext._ops.binding import overload_of


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


_all = [name.split("::") for name in torch._C._dispatch_get_all_op_names()]
_names = [name for library, name in _all if library == "tp_ext_whole"]
# Of a traced graph -> as an exported one calls it: [Note: exported graphs call whole operators]
whole_operators: dict[Any, Any] = {overload_of(name): getattr(torch.ops.tp_ext_whole, name).default for name in _names}
for _composite, _whole in whole_operators.items():
    torch.library.register_fake(_whole)(_composite)
