"""Forms of a linear: what it does with its operands. A layer has one, ``layer.form``, which its options choose.

::

    Dense       the weight itself, by the fused operators        TwoAxes    a weight sharded over two groups, gathered
    Float8      8-bit operands (float8.py)                       Blocks     built in tp_invariant
    LowBits     a frozen weight in few bits (low_bits.py)

A new numeric format overrides ``multiply``, the product of two local tensors. Column and row linears, experts, the
layers of ``tp_ext.auto`` and the base of an adapter then have it, with the regions around the product that the fused
operators have inside. [Note: a form is one object]
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from tp_ext import _ops
from tp_ext.invariance import blocks_of_ranks, refuse_compiled
from tp_ext.model.module import ParallelModule
from tp_ext.nn.gather_ahead import find_forward
from tp_ext.sharding import Layout

WithBias = tuple[Tensor, Tensor | None]


class FormedLinear(ParallelModule):
    """What a form reads of a column or row linear."""

    form: "Form"
    in_features: int
    out_features: int
    skip_bias_add: bool
    grad_accumulation_fusion: bool
    weight: Tensor
    bias: Tensor | None
    weight_packed: Tensor
    weight_scale: Tensor
    operator_sums_bias: ClassVar[bool] = False  # whether the operator sums db over the ranks under SP
    _weight_shape: torch.Size
    _segments: list[int]

    def check_shape(self, weight: Tensor) -> None:
        """Raises a ValueError unless the weight, the caller's or a replacement of the layer's own, is a shard's."""
        if weight.shape != self._weight_shape:
            raise ValueError(
                f"weight: shape {tuple(weight.shape)} must be {tuple(self._weight_shape)}, this rank's shard"
            )


class Stacked(NamedTuple):
    """The weights of experts in one product of their rows.

    Attributes:
        weight: one matrix for each expert.
        counts: the numbers of consecutive rows of the experts.
        main_grad: the tensor to which backward adds the gradient of the weight; None: it is returned.
        scale: of that gradient.
        group, shards_inputs: the group over which the matrices are sharded, and whether on their inputs.
    """

    weight: Tensor
    counts: Sequence[int]
    main_grad: Tensor | None
    scale: float
    group: str
    shards_inputs: bool


class FormedExperts(Protocol):
    """What a form calls of experts."""

    def of_rows(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """Computes y, partial sums over the group."""

    def in_blocks(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """Computes y, complete, as built in tp_invariant."""


class Form:
    """A form whose product stands alone; regions around it communicate.

    Attributes:
        uses_weight: layers multiply with ``weight`` itself, so that others may call an operator of their own with it.
        has_matrix: y is linear in x, so that the layer's result for the identity is its matrix.
        sums_products: y of a row linear is the sum of :meth:`product` over the ranks.
        option: the options that choose the form, if a float8 recipe must not be given with them.
        without_adapter: why a layer of this form gets no adapter.
        weight_name: the tensor that has the device and the dtype of the weight.
    """

    uses_weight: ClassVar[bool] = False
    has_matrix: ClassVar[bool] = True
    sums_products: ClassVar[bool] = True
    option: ClassVar[str] = ""
    without_adapter: ClassVar[str] = ""
    weight_name: ClassVar[str] = "weight"

    @property
    def recipe(self) -> object:
        """The recipe of a form of 8-bit floating point, which ``layer.float8`` returns; else None."""
        return None

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        """Returns x W^T of local tensors. Communicates nothing."""
        raise NotImplementedError

    def product(self, layer: FormedLinear, x: Tensor, weight: Tensor | None) -> Tensor:
        """Returns x W_local^T, with the caller's weight or the layer's own. Communicates nothing."""
        weight, _, main_grad = operands(layer, layer.__dict__, weight, layer._copied or layer._coalesced)
        return self.multiply(x, accumulated(weight, main_grad))

    def column(self, layer: FormedLinear, x: Tensor, weight: Tensor | None, total_tokens: int | None) -> WithBias:
        """Returns y of a column linear, without its bias if ``skip_bias_add``, and that bias as it enters the sharded
        work: reading it once more would cost a third of a microsecond."""
        name, sizes = layer.tp_group.name, layer.token_sizes(total_tokens, x)
        if layer.sequence_parallel:
            x = _ops.all_gather_region(x, name, 0, sizes)
        else:
            x = _ops.copy_to_region(x, name)
        y, bias = self.product(layer, x, weight), layer.parameter("bias")
        return _with_bias(layer, y, bias), bias

    def row(self, layer: FormedLinear, x: Tensor, weight: Tensor | None, total_tokens: int | None) -> Tensor:
        """Returns y of a row linear, without its bias if ``skip_bias_add``."""
        name, sizes = layer.tp_group.name, layer.token_sizes(total_tokens, whole=x)
        y = self.product(layer, x, weight)
        if layer.sequence_parallel:
            y = _ops.reduce_scatter_region(y, name, 0, sizes)
        else:
            y = _ops.reduce_from_region(y, name)
        return y if layer.skip_bias_add else _with_bias(layer, y, layer.parameter("bias"))

    def entered_column(self, layer: FormedLinear, x: Tensor, weight: Tensor | None) -> Tensor:
        """Returns y of a column linear that leaves the gradient of x a partial sum. Communicates nothing, unless the
        ranks share scales."""
        return _with_bias(layer, self.product(layer, x, weight), layer.parameter("bias"))

    def row_of_tokens(
        self, layer: FormedLinear, x: Tensor, weight: Tensor | None, dim: int, sizes: list[int]
    ) -> Tensor:
        """Returns y of a row linear, this rank's slice of ``dim``."""
        return scattered_sum(self.product(layer, x, weight), layer.parameter("bias"), layer.tp_group.name, dim, sizes)

    def experts(self, layer: FormedExperts, x: Tensor, counts: Sequence[int]) -> Tensor:
        """Returns y of experts for the rows of x."""
        return layer.of_rows(x, counts)

    def grouped(self, x: Tensor, experts: Stacked) -> Tensor:
        """Returns the product of each row of x with the matrix of its expert."""
        weight = accumulated(experts.weight, experts.main_grad)
        if experts.scale != 1:
            weight = ScaledGradient.apply(weight, experts.scale)
        rows = x.split(list(experts.counts))
        # unbind, whose backward is one stack: that of an index makes a tensor of all experts for each
        return torch.cat([self.multiply(*pair) for pair in zip(rows, weight.unbind(0), strict=True)])

    def weight_layout(self, layer: FormedLinear) -> Layout:
        """Returns the layout of the weight."""
        return layer.tp_layouts["weight"]


@dataclass(frozen=True)
class Dense(Form):
    """The products of the weight in its dtype, by operators that communicate under them."""

    uses_weight: ClassVar[bool] = True

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        return local_linear(x, weight)

    def column(self, layer: FormedLinear, x: Tensor, weight: Tensor | None, total_tokens: int | None) -> WithBias:
        attributes = layer.__dict__  # faster, see operands()
        weight, bias, main_grad = operands(layer, attributes, weight, attributes["_copied"])
        y = _ops.column_parallel_linear(
            x,
            weight,
            None if attributes["skip_bias_add"] else bias,
            attributes["tp_group"].name,
            attributes["sequence_parallel"],
            None if total_tokens is None else layer.token_sizes(total_tokens, x),
            main_grad,
            attributes["overlap_chunks"],
        )
        return y, bias

    def row(self, layer: FormedLinear, x: Tensor, weight: Tensor | None, total_tokens: int | None) -> Tensor:
        attributes = layer.__dict__
        coalesced = attributes["_coalesced"]
        weight, bias, main_grad = operands(layer, attributes, weight, coalesced)
        # With skip_bias_add the caller adds the bias, in the pass of a later kernel
        return _ops.row_parallel_linear(
            x,
            weight,
            None if attributes["skip_bias_add"] else bias,
            attributes["tp_group"].name,
            attributes["sequence_parallel"],
            None if total_tokens is None else layer.token_sizes(total_tokens, whole=x),
            main_grad,
            attributes["overlap_chunks"],
            not coalesced,
        )

    def entered_column(self, layer: FormedLinear, x: Tensor, weight: Tensor | None) -> Tensor:
        weight, bias, _ = operands(layer, layer.__dict__, weight, layer._copied)
        # A full bias in the place of the shard: F.linear would fail without the name of the parameter
        if bias is not None and bias.size(0) != weight.size(0):
            raise ValueError(f"bias: shape {tuple(bias.shape)} must be [{weight.size(0)}], this rank's shard")
        return local_linear(x, weight, bias)

    def grouped(self, x: Tensor, experts: Stacked) -> Tensor:
        return _ops.grouped_linear(x, experts.weight, experts.counts, experts.main_grad, experts.scale)


@dataclass(frozen=True)
class DenseOfShares(Dense):
    """Those products where tokens are cut by :func:`tp_ext.shares`: without ``total_tokens`` the operators would take
    the ranks' tokens for equally many."""

    def column(self, layer: FormedLinear, x: Tensor, weight: Tensor | None, total_tokens: int | None) -> WithBias:
        if total_tokens is None:
            layer.token_sizes(None, x)  # raises under sequence parallelism
        return super().column(layer, x, weight, total_tokens)

    def row(self, layer: FormedLinear, x: Tensor, weight: Tensor | None, total_tokens: int | None) -> Tensor:
        if total_tokens is None and x.dim():
            total_tokens = x.shape[0]
        return super().row(layer, x, weight, total_tokens)


@dataclass(frozen=True)
class TwoAxes(Form):
    """The products of a weight that is sharded over ``weight_group`` once more, and gathered for use, or of x sharded
    on its features (``activations="hidden"``)."""

    uses_weight: ClassVar[bool] = True
    sums_products: ClassVar[bool] = False
    option: ClassVar[str] = "weight_group or activations='hidden'"
    without_adapter: ClassVar[str] = f"must not have a {option}"

    def column(self, layer: FormedLinear, x: Tensor, weight: Tensor | None, total_tokens: int | None) -> WithBias:
        y = self._linear(layer, x, weight, layer.in_features, False, layer.token_sizes(total_tokens, x))
        bias = None if "bias" in layer.operator_gathers else layer.parameter("bias")
        return _with_bias(layer, y, bias), bias

    def row(self, layer: FormedLinear, x: Tensor, weight: Tensor | None, total_tokens: int | None) -> Tensor:
        return self._linear(layer, x, weight, layer.out_features, True, layer.token_sizes(total_tokens, whole=x))

    @staticmethod
    def _linear(
        layer: FormedLinear, x: Tensor, weight: Tensor | None, full_size: int, row: bool, sizes: list[int] | None
    ) -> Tensor:
        """Returns y, without the bias if ``layer.operator_gathers`` has none; ``full_size`` is the length of the
        weight's dim that is sharded over ``weight_group``."""
        weight = layer.parameter("weight", weight)
        layer.check_shape(weight)
        # Only weights of a second axis are gathered
        if layer.weight_group.size > 1:
            find_forward(layer)
        return _ops.linear_2d(
            x,
            weight,
            layer.parameter("bias") if "bias" in layer.operator_gathers else None,
            layer.tp_group.name,
            layer.weight_group.name,
            full_size,
            row,
            "tokens" if layer.sequence_parallel else layer.activations,
            sizes,
            layer.reshard_after_forward,
        )


@dataclass(frozen=True)
class Blocks(Form):
    """The products by blocks of features and trees of sums, which have the same bits for every number of ranks."""

    uses_weight: ClassVar[bool] = True
    sums_products: ClassVar[bool] = False
    option: ClassVar[str] = "tp_invariant"
    without_adapter: ClassVar[str] = (
        "a layer built in tp_invariant must not get an adapter, whose sums depend on the number of ranks"
    )

    def column(self, layer: FormedLinear, x: Tensor, weight: Tensor | None, total_tokens: int | None) -> WithBias:
        weight, bias, blocks = self._operands(layer, weight)
        where = layer.tp_group.name, layer.sequence_parallel, layer.token_sizes(total_tokens, x)
        y = _ops.block_column_linear(x, weight, bias, *where, blocks, layer._segments)
        return y, layer.parameter("bias") if layer.skip_bias_add else None

    def row(self, layer: FormedLinear, x: Tensor, weight: Tensor | None, total_tokens: int | None) -> Tensor:
        weight, bias, blocks = self._operands(layer, weight)
        layer.token_sizes(total_tokens, whole=x)  # raises before the collective
        where = layer.tp_group.name, layer.sequence_parallel, blocks, layer._segments
        # The bias' gradient is a tree over blocks of tokens of the whole batch, with sequence parallelism or without
        y = _ops.block_row_linear(x.flatten(0, -2) if x.dim() > 2 else x, weight, bias, *where)
        return y.unflatten(0, x.shape[:-1]) if x.dim() > 2 else y

    @staticmethod
    def _operands(layer: FormedLinear, weight: Tensor | None) -> tuple[Tensor, Tensor | None, list[int]]:
        refuse_compiled()
        weight = layer.parameter("weight", weight)
        layer.check_shape(weight)
        assert layer.invariant_blocks is not None
        bias = None if layer.skip_bias_add else layer.parameter("bias", operator_sums=True)
        return weight, bias, blocks_of_ranks(layer.invariant_blocks, layer.tp_group.size)

    def experts(self, layer: FormedExperts, x: Tensor, counts: Sequence[int]) -> Tensor:
        return layer.in_blocks(x, counts)


def form_of_options(layer: ParallelModule) -> Form:
    """Returns the form that the group options of a layer and the context in which it is built choose."""
    if layer.weight_group.size > 1 or layer.activations == "hidden":
        return TwoAxes()
    if layer.invariant_blocks is not None:
        return Blocks()
    return Dense() if layer.token_shares is None else DenseOfShares()


def operands(
    layer: FormedLinear, attributes: dict[str, Any], chosen: Tensor | None, summed: dict[str, Any]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Returns weight, bias and ``main_grad`` of a call of the layer, as its operator takes them.

    Weight and bias are those of :meth:`ParallelModule.parameter`. In the usual case they are read here without it: a
    linear is called more often than any other layer, and each attribute of an ``nn.Module``, a method too, costs some
    1000 of the 51 000 instructions of a forward, an entry of its ``__dict__`` 60. This is the only such place.

    Args:
        attributes: the ``__dict__`` of the layer.
        chosen: the caller's weight, of this rank's shape; None: the layer's own.
        summed: the parameters that leave a region which sums their gradients: ``_copied`` of a column layer, which
            replicates nothing, ``_coalesced`` of a row layer, which has no copies.

    Raises:
        ValueError: the weight has another shape; ``grad_accumulation_fusion`` and it has no ``main_grad``.
    """
    if chosen is None and not (summed or attributes["grad_accumulation_fusion"]):
        parameters = attributes["_parameters"]
        try:
            weight, bias = parameters["weight"], parameters["bias"]
        except KeyError:  # computed by a parametrization
            weight, bias = layer.weight, layer.bias
        # Else the slow path names what is wrong
        if weight.shape == attributes["_weight_shape"]:
            return weight, bias, None
    weight = layer.parameter("weight", chosen)
    layer.check_shape(weight)
    # With copies main_grad gets the sum over the ranks: see _entering
    main_grad = (
        main_grad_of(weight)
        if attributes["grad_accumulation_fusion"] and "weight" not in attributes["_copied"]
        else None
    )
    return weight, layer.parameter("bias", operator_sums=layer.operator_sums_bias), main_grad


def _with_bias(layer: FormedLinear, y: Tensor, bias: Tensor | None) -> Tensor:
    return y if bias is None or layer.skip_bias_add else y + bias.to(y.dtype)


def scattered_sum(y: Tensor, bias: Tensor | None, group: str, dim: int, sizes: list[int]) -> Tensor:
    """Returns this rank's slice of the sum of y over the ranks, plus the bias."""
    y = _ops.reduce_scatter_region(y, group, dim, sizes)
    # After the sum, where it counts once. Each rank adds it to its tokens, so that its gradient is partial
    return y if bias is None else y + _ops.copy_to_region(bias, group)


def local_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns ``F.linear`` of local tensors, with the kernels for few rows of the parallel linears.

    [Note: decoding has kernels for few rows]
    """
    return _ops.column_parallel_linear(x, weight, bias, "")


def main_grad_of(weight: Tensor) -> Tensor | None:
    """Returns ``weight.main_grad``, to which backward adds the gradient; None if there will be no backward.

    Raises:
        ValueError: the weight has no ``main_grad``.
    """
    if not (torch.is_grad_enabled() and weight.requires_grad):
        return None
    main_grad: Tensor | None = getattr(weight, "main_grad", None)
    if main_grad is None:
        raise ValueError(
            "weight.main_grad: None must be a tensor of weight's shape, fp32 as a rule, with "
            "grad_accumulation_fusion=True; set it on each weight before the first forward"
        )
    return main_grad


def accumulated(weight: Tensor, main_grad: Tensor | None) -> Tensor:
    """Returns the weight, with a backward that adds its gradient to ``main_grad``. It stands before the region that
    sums over KV copies, so ``main_grad`` gets the sum."""
    return weight if main_grad is None else _ops.accumulate_grad_into(weight, main_grad)


class ScaledGradient(torch.autograd.Function):
    """The identity, whose gradient is multiplied by a number."""

    @staticmethod
    def forward(x: Tensor, scale: float) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.scale = inputs[1]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy * ctx.scale, None
