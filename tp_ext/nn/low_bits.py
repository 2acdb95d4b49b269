"""Frozen weights of linears in 8 or 4 bits, and products with them.

::

    int8   scale[o]    = amax of row o / 127,                       1 where that is 0     W[o, i] = q[o, i] scale[o]
    int4   scale[o, b] = amax of block b of the inputs of row o / 7, 1 where that is 0     W[o, i] = q[o, i] scale[o, b]
    q = round(W / scale), half to even, clamped to [-127, 127] or [-7, 7]

int4 packs input 2j into the low and 2j + 1 into the high four bits of a byte, each as q + 8. The scale of a row of int8
is that of all its inputs, which several ranks may hold; the blocks of int4 lie within shards. So no value depends on
the number of ranks.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tp_ext import _ops
from tp_ext.group import ALONE, ParallelGroup
from tp_ext.nn.forms import Form, FormedLinear
from tp_ext.sharding import Layout, Sharding

_CHUNK = {"cpu": 1 << 22}  # elements of a weight that are dequantised at once: 8 MiB in bf16, of one product mostly
_LARGE_CHUNK = 1 << 24  # of other devices, whose products want more rows: some tens of MiB
_FEW = 32  # tokens for which a product reads the bits alone; more share a weight in fp32
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


# [Note: products with frozen weights dequantise rows]
@dataclass(frozen=True)
class LowBits(Form):
    """The form of a frozen weight ``[out, in]`` in few bits.

    Attributes:
        bits: 8 or 4.
        block: of int4, the consecutive inputs that share a scale; of int8 None: all inputs of an output do.
        layout: the layout of the weight.
    """

    bits: int
    block: int | None
    layout: Layout

    weight_name: ClassVar[str] = "weight_scale"

    @property
    def most(self) -> int:
        """The largest q."""
        return 2 ** (self.bits - 1) - 1

    def layouts(self) -> dict[str, Layout]:
        """Returns the layouts of ``weight_packed`` and ``weight_scale``.

        Raises:
            ValueError: a block would be on two ranks.
        """
        if self.bits == 8:
            rows = Layout(*(entry for entry in self.layout if entry[0].dim % 2 == 0))
            return {"weight_packed": self.layout, "weight_scale": rows}
        assert self.block is not None
        return {"weight_packed": self._divided(2), "weight_scale": self._divided(self.block)}

    def _divided(self, by: int) -> Layout:
        entries = []
        for sharding, group in self.layout:
            if sharding.dim % 2 == 1:
                parts = [
                    replace(part, size=part.size // by, unit=max(1, part.unit // by), padding=part.padding // by)
                    for part in sharding.parts
                ]
                for part, divided in zip(sharding.parts, parts, strict=True):
                    sizes = Sharding(1, [part]).local_sizes(group.size)
                    if [size * by for size in Sharding(1, [divided]).local_sizes(group.size)] != sizes:
                        raise ValueError(
                            f"block: {self.block} must divide the numbers of inputs that the ranks hold, {sizes}: give "
                            "the layer a unit that is a multiple of it"
                        )
                sharding = Sharding(sharding.dim, parts)
            entries.append((sharding, group))
        return Layout(*entries)

    def largest(self, weight: Tensor) -> Tensor:
        """Returns the largest absolute value of each block of a shard, ``[out, in / block]``, of int8 ``[out, 1]``."""
        blocks = self._blocks(weight).abs()
        return blocks.amax(-1) if blocks.numel() else blocks.new_zeros(blocks.shape[:-1])

    def pack(self, weight: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
        """Returns ``weight_packed`` and ``weight_scale`` of a shard, whose blocks have these largest values: of int8
        over all ranks of :meth:`groups`."""
        scale = (largest / self.most).to(weight.dtype)
        # Of zeros, or of a number so small that the dtype rounds its scale to 0
        scale = scale.masked_fill(scale == 0, 1)
        q = (self._blocks(weight) / scale.float()[..., None]).round_().clamp_(-self.most, self.most).view(weight.shape)
        if self.bits == 8:
            return q.to(torch.int8), scale.squeeze(-1)
        low, high = (q + 8).to(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)
        return low | high << 4, scale

    def groups(self) -> list[ParallelGroup]:
        """Returns the groups over which a scale is that of all ranks: of int8 those that share the inputs."""
        shared = [group for sharding, group in self.layout if sharding.dim % 2 == 1 and group.size > 1]
        return shared if self.bits == 8 else []

    def _blocks(self, weight: Tensor) -> Tensor:
        wide = weight.detach().float()
        return wide.unsqueeze(-2) if self.block is None else wide.unflatten(-1, (-1, self.block))

    def dequantized(self, packed: Tensor, scale: Tensor) -> Tensor:
        """Returns rows of the weight in fp32."""
        return _ops.dequantize_low_bits(packed, scale, self.block)

    def product(self, layer: FormedLinear, x: Tensor, weight: Tensor | None) -> Tensor:
        if weight is not None:
            raise ValueError("weight: must not be given to a layer whose own weight was quantised")
        if x.dim() == 0 or x.shape[-1] != layer._weight_shape[1]:
            raise ValueError(f"x: shape {tuple(x.shape)} must end in {layer._weight_shape[1]} features")
        return self.multiply_packed(x, layer.weight_packed, layer.weight_scale)

    def weight_layout(self, layer: FormedLinear) -> Layout:
        return self.layout

    def multiply_packed(self, x: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
        """Returns x W^T ``[.., out]`` in the dtype of x, or of autocast, with a gradient of x alone."""
        device = x.device.type
        if torch.is_autocast_enabled(device) and x.is_floating_point():
            x = x.to(torch.get_autocast_dtype(device))
        y: Tensor = _Product.apply(x, packed, scale, self)
        return y

    def rows(self, packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
        """Yields the weight in ``dtype`` by consecutive rows, which take bounded memory."""
        inputs = packed.shape[1] * (2 if self.bits == 4 else 1)
        step = max(1, _CHUNK.get(packed.device.type, _LARGE_CHUNK) // max(1, inputs))
        for first in range(0, packed.shape[0], step):
            rows = slice(first, first + step)
            yield rows, _ops.dequantize_low_bits(packed[rows], scale[rows], self.block, dtype)


class _Product(torch.autograd.Function):
    """y = x W^T, dx = dy W, with sums in fp32, of fp64 in fp64. Products of half dtypes have W in that dtype where the
    device has such products; elsewhere, and of few tokens, W has all its digits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, scale: Tensor, low_bits: LowBits) -> Tensor:
        ctx.save_for_backward(packed, scale)
        ctx.low_bits = low_bits
        flat = _as_rows(x)
        if _has_torch_kernel(flat, packed, scale):
            return torch._weight_int8pack_mm(flat.contiguous(), packed, scale).view(*x.shape[:-1], packed.shape[0])
        dtype = _product_dtype(x)
        few = _FEW if dtype == torch.float32 else _FEW // 4  # products in bf16 are that much faster
        if _hint(flat.shape[0]) <= few and x.dtype in _DTYPES:
            y = _ops.low_bits_product(flat, packed, scale, low_bits.block)
            return y.view(*x.shape[:-1], packed.shape[0])
        flat = flat.to(dtype)
        parts = [_multiplied(flat, weight).to(x.dtype) for _, weight in low_bits.rows(packed, scale, dtype)]
        y = parts[0] if len(parts) == 1 else torch.cat([x.new_empty(flat.shape[0], 0), *parts], 1)
        return y.view(*x.shape[:-1], packed.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        packed, scale = ctx.saved_tensors
        flat = _as_rows(dy).to(_product_dtype(dy))
        inputs = packed.shape[1] * (2 if ctx.low_bits.bits == 4 else 1)
        wide = torch.promote_types(flat.dtype, torch.float32)  # so that the chunks' sums do not round
        dx = flat.new_zeros(flat.shape[0], inputs, dtype=wide)
        for rows, weight in ctx.low_bits.rows(packed, scale, flat.dtype):
            dx += _multiplied(flat[:, rows], weight.t())
        return dx.to(dy.dtype).view(*dy.shape[:-1], inputs), None, None, None


def _multiplied(x: Tensor, weight: Tensor) -> Tensor:
    """Returns x W^T by the product that linears have."""
    return _ops.column_parallel_linear(x, weight, None, ALONE.name)


def _as_rows(x: Tensor) -> Tensor:
    """Returns x ``[tokens, features]``, also without tokens or features."""
    return x.unsqueeze(0) if x.dim() == 1 else x.flatten(0, -2)


def _hint(length: int) -> int:
    """Returns a length, of an export's open one that of its example: both products are right for any number of rows."""
    if torch.compiler.is_exporting() and isinstance(length, torch.SymInt):
        return int(length.node.hint)
    return length


def _product_dtype(x: Tensor) -> torch.dtype:
    """Returns the dtype in which x is multiplied with many rows of a weight. Without instructions for bf16, or fp16, a
    CPU is several times faster in fp32."""
    if x.dtype == torch.float64:
        return x.dtype
    if x.device.type != "cpu":
        return x.dtype if x.dtype in _DTYPES else torch.float32
    has_bf16 = x.dtype == torch.bfloat16 and (
        torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    )
    return torch.bfloat16 if has_bf16 else torch.float32


def _has_torch_kernel(x: Tensor, packed: Tensor, scale: Tensor) -> bool:
    """Returns whether to use torch's product with int8. It reads past the end of a weight whose number of inputs is not
    a multiple of 16."""
    return (
        x.device.type == "cpu"
        and 0 < _hint(x.shape[0]) <= _FEW
        and x.dtype == scale.dtype == torch.bfloat16
        and packed.dtype == torch.int8
        and packed.shape[1] % 16 == 0
        and packed.numel() > 0
    )


class QuantizedLinear(nn.Linear):
    """An ``nn.Linear`` whose weight :func:`tp_ext.low_precision.quantize_` has quantised: y = x W^T + b.

    Shapes: as ``nn.Linear``. Communicates nothing.
    """

    form: LowBits
    weight_packed: Tensor
    weight_scale: Tensor
    # What an adapter asks its base for: a column linear of one rank
    tp_group, sequence_parallel, skip_bias_add = ALONE, False, False

    def forward(self, x: Tensor, total_tokens: int | None = None, *, weight: Tensor | None = None) -> Tensor:
        """Computes y. ``total_tokens`` and ``weight`` are those of a column linear, and must be None."""
        if total_tokens is not None or weight is not None:
            raise ValueError("total_tokens, weight: must be None for an nn.Linear that was quantised")
        y = self.form.multiply_packed(x, self.weight_packed, self.weight_scale)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    @property
    def weight_layout(self) -> Layout:
        return Layout((Sharding(0, [self.out_features]), ALONE))

    @property
    def weight_options(self) -> dict[str, Any]:
        return {"device": self.weight_scale.device, "dtype": self.weight_scale.dtype}
