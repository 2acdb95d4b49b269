"""Low-rank adapters of weights: for weights that no linear of ours multiplies with (Conv1D, embeddings, stacks of
experts), and for DoRA, which needs the norm of the sum.

The weight that its module reads is computed anew in each forward, W + s B A, so backward makes its whole gradient:
more memory than :class:`tp_ext.LoRALinear`, whose products are r wide.

Liu et al., "DoRA: Weight-decomposed low-rank adaptation" (arXiv:2402.09353).
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from tp_ext import _ops
from tp_ext.mesh import sum_of_constants
from tp_ext.model.layouts import declare_layouts
from tp_ext.sharding import Layout, Sharding


class LoRAWeight(nn.Module):
    """A parametrization (``torch.nn.utils.parametrize``) of a sharded weight: W + s B A, with DoRA
    m (W + s B A) / norm(W + s B A), the norm of each output without a gradient.

    Shapes: W ``[out, in]``, or ``[in, out]`` if ``transposed``; or a stack of experts ``[E, ..]`` of these. As in files
    of PEFT A is ``[r E, in]``, B ``[out, r E]``, m ``[out]``; each sharded like W in the dims that they share.

    Communicates: backward, an all-reduce of the gradient of each factor that is not sharded; with DoRA of a weight that
    is sharded on its inputs, forward, one of its norms.

    Raises:
        ValueError: a weight that is sharded over two groups, over the experts, or with padding.
    """

    def __init__(self, weight: Tensor, layout: Layout, r: int, scaling: float, *, transposed: bool, dora: bool) -> None:
        super().__init__()
        if len(layout) > 1 or layout.has_padding or (weight.dim() == 3 and layout and layout[0][0].dim % 3 == 0):
            raise ValueError("is sharded over two groups, over experts or with padding")
        self.r, self.scaling, self.transposed, self.disabled = r, scaling, transposed, False
        self.dropout = 0.0
        self.experts = weight.shape[0] if weight.dim() == 3 else 1
        out_dim, in_dim = (-1, -2) if transposed else (-2, -1)
        self.group = layout[0][1] if layout else None
        self.of_outputs = bool(layout) and (layout[0][0].dim - weight.dim()) % weight.dim() == out_dim % weight.dim()
        outputs, inputs, width = weight.shape[out_dim], weight.shape[in_dim], r * self.experts
        options: Any = {"device": weight.device, "dtype": weight.dtype}
        self.lora_A = nn.Parameter(torch.zeros(width, inputs, **options))
        self.lora_B = nn.Parameter(torch.zeros(outputs, width, **options))
        self.lora_magnitude = nn.Parameter(torch.ones(outputs, **options)) if dora else None
        layouts = dict.fromkeys(("lora_A", "lora_B", *(["lora_magnitude"] if dora else [])), Layout())
        if layout:
            parts, group = layout[0][0].parts, layout[0][1]
            along = [("lora_B", 0), ("lora_magnitude", 0)] if self.of_outputs else [("lora_A", 1)]
            layouts |= {name: Layout((Sharding(dim, parts), group)) for name, dim in along if name in layouts}
        declare_layouts(self, layouts)

    def forward(self, weight: Tensor) -> Tensor:
        """Returns the weight with the adapter, or without it while it is disabled."""
        if self.disabled:
            return weight
        if self.dropout and self.training:
            raise ValueError(
                f"lora_dropout: {self.dropout} acts on inputs, which an adapter of Conv1D or of DoRA does not see; "
                "train with lora_dropout 0 in adapter_config.json, or call eval()"
            )
        return self.adapted(weight, *(self._entering(name) for name in ("lora_A", "lora_B", "lora_magnitude")))

    def adapted(self, weight: Tensor, a: Tensor | None, b: Tensor | None, magnitude: Tensor | None) -> Tensor:
        """Returns the weight with the adapter of these factors."""
        assert a is not None and b is not None
        a, b = a.unflatten(0, (self.experts, -1)), b.unflatten(1, (-1, self.experts))
        product = torch.einsum("ore,eri->eio" if self.transposed else "ore,eri->eoi", b, a)
        added = weight + self.scaling * product.view_as(weight)
        if magnitude is None:
            return added
        inputs = -2 if self.transposed else -1
        squares = added.detach().square().sum(inputs)
        if self.group is not None and not self.of_outputs:
            squares = sum_of_constants(squares, self.group)
        return added * (magnitude / squares.sqrt()).unsqueeze(inputs)

    def _entering(self, name: str) -> Tensor | None:
        """Returns a factor, whose gradient is that of all ranks."""
        value: Tensor | None = getattr(self, name)
        is_sharded = (name != "lora_A") == self.of_outputs
        if value is None or self.group is None or self.group.size == 1 or is_sharded:
            return value
        return _ops.copy_to_region(value, self.group.name)

    def extra_repr(self) -> str:
        return f"r={self.r}, scaling={self.scaling}, dora={self.lora_magnitude is not None}"


def add_lora_weight(module: nn.Module, name: str, adapter: LoRAWeight) -> None:
    """Makes a weight of a module that with the adapter; the parameter itself stays, and is frozen."""
    module._parameters[name].requires_grad_(False)  # type: ignore[union-attr]
    # unsafe: without a call of the adapter, which may communicate
    parametrize.register_parametrization(module, name, adapter, unsafe=True)
