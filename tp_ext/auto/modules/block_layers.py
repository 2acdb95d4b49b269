"""Layers of models applied with ``invariant_blocks``, which have the same bits for every number of ranks."""

from __future__ import annotations

from torch import Tensor, nn

from tp_ext import _ops
from tp_ext.group import ParallelGroup
from tp_ext.invariance import blocks_of_ranks
from tp_ext.model.layouts import declare_layouts
from tp_ext.nn.norm import LayerNorm
from tp_ext.sharding import Layout, Sharding


class BlockConv1D(nn.Module):
    """The ``Conv1D`` of transformers with sharded output or input features: y = x W + b, computed block by block.

    Shapes: weight ``[in_local, out]`` or ``[in, out_local]``. Communicates as :class:`tp_ext.ColumnParallelLinear` and
    :class:`tp_ext.RowParallelLinear` built in :func:`tp_ext.tp_invariant`.

    Args:
        dense: the module, whose parameters are this rank's shards already.
        sharding: of the weight.
    """

    def __init__(self, dense: nn.Module, sharding: Sharding, group: ParallelGroup, blocks: int) -> None:
        super().__init__()
        self._parameters.update(dense._parameters)
        self.nf = self._parameters["weight"].shape[1]  # type: ignore[union-attr]
        self.is_row, self.tp_group, self.invariant_blocks = sharding.dim == 0, group, blocks
        self.blocks = blocks_of_ranks(blocks, group.size)
        self.segments = sharding.segments(group.rank, group.size)
        declare_layouts(self, {"weight": Layout((sharding, group))})
        if not self.is_row and self._parameters.get("bias") is not None:
            declare_layouts(self, {"bias": Layout((Sharding(0, sharding.parts), group))})

    def forward(self, x: Tensor) -> Tensor:
        """Computes y."""
        parameter, bias, name = self._parameters["weight"], self._parameters["bias"], self.tp_group.name
        assert parameter is not None
        weight = parameter.t().contiguous()
        if self.is_row:
            return _ops.block_row_linear(x, weight, bias, name, False, self.blocks, self.segments)
        return _ops.block_column_linear(x, weight, bias, name, False, None, self.blocks, self.segments)


def layer_norm(module: nn.Module) -> LayerNorm | None:
    """The layer norm of this package in the place of one of torch, whose gradients depend on the number of threads;
    built in the blocks of the context. None: the module is another one."""
    if type(module) is not nn.LayerNorm or len(module.normalized_shape) != 1 or module.weight is None:
        return None
    norm = LayerNorm(
        module.normalized_shape[0], eps=module.eps, bias=module.bias is not None, group=None, device="meta"
    )
    norm._parameters.update(module._parameters)
    return norm
