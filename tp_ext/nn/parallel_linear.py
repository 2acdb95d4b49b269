"""Base class of the tensor-parallel linears: parameters, sharding, and the weight of a call."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from tp_ext import _ops
from tp_ext._checks import check_flag
from tp_ext.group import NOT_GIVEN, Group
from tp_ext.invariance import current_blocks, refuse_compiled, refuse_in_blocks
from tp_ext.model.layouts import mirror_layouts, refuse_computed
from tp_ext.model.module import ParallelModule
from tp_ext.nn.float8 import Float8, refuse_with_float8
from tp_ext.nn.gather_ahead import find_forward
from tp_ext.nn.low_bits import LowBits
from tp_ext.random import Init, torch_linear_init
from tp_ext.sharding import Layout, Part, Sharding


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


def linear_sharding(dim: int, size: int, parts: Iterable[Part | int] | None, unit: int, name: str) -> Sharding:
    """Returns the sharding of ``size`` features along ``dim`` of the weight, by ``parts`` or ``unit``, in the blocks of
    the context."""
    blocks = current_blocks() or 0
    if parts is None:
        return Sharding(dim, (Part(size, unit, blocks=blocks),))
    if unit != 1:
        raise ValueError(f"unit: {unit} must be given in each Part when parts are given")
    sharding = Sharding(dim, parts)
    if sharding.size != size:
        raise ValueError(f"parts: {sharding.parts} must sum to {name} = {size}")
    return Sharding(dim, [replace(part, blocks=blocks) for part in sharding.parts]) if blocks else sharding


class ParallelLinear(ParallelModule):
    """Base class of the column and row linear: the parameters, the weight of a call, conversion from ``nn.Linear``."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    weight_packed: Tensor
    weight_scale: Tensor
    has_blocks = True
    operator_sums_bias: ClassVar[bool]  # whether the operator sums the gradient of the bias under sequence parallelism

    def __init__(
        self,
        in_features: int,
        out_features: int,
        weight_sharding: Sharding,
        bias_sharding: Sharding | None,
        *,
        bias: bool,
        group: Group,
        sequence_parallel: bool,
        weight_group: Group,
        activations: str,
        skip_bias_add: bool,
        grad_accumulation_fusion: bool,
        overlap_chunks: int,
        reshard_after_forward: bool,
        float8: Float8 | None,
        init: Init | None,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        check_flag(bias=bias, skip_bias_add=skip_bias_add, grad_accumulation_fusion=grad_accumulation_fusion)
        check_flag(reshard_after_forward=reshard_after_forward)
        super().__init__(group, sequence_parallel=sequence_parallel, weight_group=weight_group, activations=activations)
        refuse_in_blocks(
            self.invariant_blocks,
            grad_accumulation_fusion=bool(grad_accumulation_fusion),
            overlap_chunks=overlap_chunks if overlap_chunks > 1 else None,
        )
        self.on_two_axes = self.weight_group.size > 1 or activations == "hidden"
        if self.on_two_axes:
            check_one_axis_options(grad_accumulation_fusion=grad_accumulation_fusion, overlap_chunks=overlap_chunks)
        self.in_features = in_features
        self.out_features = out_features
        self.low_bits: LowBits | None = None
        self.float8: Float8 | None = float8
        self.skip_bias_add = skip_bias_add
        self.grad_accumulation_fusion = grad_accumulation_fusion
        self.check_float8(float8, dtype)
        self.overlap_chunks = overlap_chunks
        self.reshard_after_forward = reshard_after_forward
        default = torch_linear_init(in_features)
        self.add_parameter(
            "weight",
            (out_features, in_features),
            default if init is None else init,
            sharding=weight_sharding,
            device=device,
            dtype=dtype,
        )
        self._weight_shape = self.local_shape("weight")
        if bias:
            self.add_parameter("bias", (out_features,), default, sharding=bias_sharding, device=device, dtype=dtype)
        else:
            self.register_parameter("bias", None)
        self.operator_gathers = gathered_by_operator(self, skip_bias_add)
        if self.invariant_blocks is not None:
            self._segments = weight_sharding.segments(self.tp_group.rank, self.tp_group.size)

    def check_float8(self, float8: Float8 | None, dtype: torch.dtype | None) -> None:
        """Raises a ValueError if the layer has an option, or a dtype, that linears in float8 lack."""
        lacking = {"weight_group or activations='hidden'": self.on_two_axes}
        lacking |= {"tp_invariant": self.invariant_blocks is not None}
        refuse_with_float8(float8, dtype, grad_accumulation_fusion=self.grad_accumulation_fusion, **lacking)

    @classmethod
    def from_linear(cls, linear: nn.Linear, *, group: Group = NOT_GIVEN, **options: Any) -> Self:
        """Returns the layer with this rank's shard of the weights of ``linear``.

        Args:
            linear: the dense layer, with the same values on all ranks; it is not changed.
            options: as in the constructor; ``device`` and ``dtype`` are those of ``linear``, and so is ``float8`` by
                default.

        Raises:
            TypeError: ``linear`` is not an ``nn.Linear``. ValueError: its weight or bias is computed or quantised, or
                has hooks on its gradient.
        """
        if not isinstance(linear, nn.Linear):
            raise TypeError(f"linear: {type(linear).__name__} must be an nn.Linear")
        refuse_computed("linear", linear, "weight", "bias")
        options = {"float8": getattr(linear, "float8", None), **options}
        make: Callable[..., Self] = cls  # column or row: their signatures begin as nn.Linear's
        layer = make(
            linear.in_features,
            linear.out_features,
            linear.bias is not None,
            group=group,
            device="meta",
            dtype=linear.weight.dtype,
            **options,
        ).to_empty(device=linear.weight.device)
        layer.copy_shards(linear)
        return layer

    @property
    def weight_layout(self) -> Layout:
        """The layout of the weight, also of one that was quantised."""
        return self.tp_layouts["weight"] if self.low_bits is None else self.low_bits.layout

    @property
    def is_full_precision(self) -> bool:
        """True if the layer multiplies with the weight itself: it is neither quantised nor in float8."""
        return self.low_bits is None and self.float8 is None

    @property
    def weight_options(self) -> dict[str, Any]:
        """The device and the dtype of the weight, of a quantised one its former dtype."""
        like = self.weight if self.low_bits is None else self.weight_scale
        return {"device": like.device, "dtype": like.dtype}

    def replace_weight(self, form: LowBits) -> None:
        """Declares the buffers of a weight that was quantised in the place of the weight."""
        self.low_bits = form
        for table in (self.tp_layouts, self._inits, self._copied):
            table.pop("weight", None)
        self.tp_layouts.update(form.layouts())
        mirror_layouts(self)

    def local_product(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """Returns x W_local^T of a layer whose weight was quantised.

        Raises:
            ValueError: the caller has given a weight.
        """
        if weight is not None:
            raise ValueError("weight: must not be given to a layer whose own weight was quantised")
        if x.dim() == 0 or x.shape[-1] != self._weight_shape[1]:
            raise ValueError(f"x: shape {tuple(x.shape)} must end in {self._weight_shape[1]} features")
        assert self.low_bits is not None
        return self.low_bits.product(x, self.weight_packed, self.weight_scale)

    def in_blocks(self, x: Tensor, weight: Tensor | None, total_tokens: int | None, row: bool) -> Tensor:
        """Computes the layer as built in :func:`tp_ext.tp_invariant`, without the bias if ``skip_bias_add``."""
        refuse_compiled()
        weight = self.parameter("weight", weight)
        self.check_shape(weight)
        bias = None if self.skip_bias_add else self.parameter("bias", operator_sums=True)
        sizes = self.token_sizes(total_tokens, None if row else x, x if row else None)
        group, blocks = self.tp_group.name, self.invariant_blocks
        assert blocks is not None
        if row:
            return _ops.block_row_linear(x, weight, bias, group, self.sequence_parallel, blocks, self._segments)
        return _ops.block_column_linear(x, weight, bias, group, self.sequence_parallel, sizes, blocks, self._segments)

    def _entering(self, name: str, value: Tensor) -> Tensor:
        if name != "weight":
            return value
        self.check_shape(value)
        # Where the gradient is summed over copies first, no operator can add it to main_grad
        return accumulated(value, main_grad_of(value)) if self.grad_accumulation_fusion else value

    def check_shape(self, weight: Tensor) -> None:
        """Raises a ValueError unless the weight, the caller's or a replacement of the layer's own, is a shard's."""
        if weight.shape != self._weight_shape:
            raise ValueError(
                f"weight: shape {tuple(weight.shape)} must be {tuple(self._weight_shape)}, this rank's shard"
            )

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"local={tuple(self._weight_shape)}, bias={self.bias is not None}, {self.parallel_repr()}"
            + ("" if self.float8 is None else f", float8={self.float8.scaling}")
        )


def check_one_axis_options(**options: object) -> None:
    """Raises a ValueError that names the first option that only layers of one axis have, if it is not the default."""
    for name, value in options.items():
        if value not in (False, 1) or value is True:
            raise ValueError(f"{name}: {value!r} must not be combined with weight_group or activations='hidden'")


def gathered_by_operator(layer: ParallelModule, skip_bias_add: bool = False) -> tuple[str, ...]:
    """Returns the parameters of a linear of two axes that its operator gathers: the bias unless another adds it, or its
    gradient is summed over copies, whose rows are those of the gathered one."""
    return ("weight",) if skip_bias_add or "bias" in layer._copied else ("weight", "bias")


def linear_2d(
    layer: ParallelModule, x: Tensor, weight: Tensor, full_size: int, row: bool, total_tokens: int | None
) -> Tensor:
    """Computes a linear of two axes; without the bias if ``layer.operator_gathers`` has none.

    Args:
        weight: this rank's shard; the caller has checked its shape.
        full_size: the length of its dim that is sharded over ``weight_group``.
    """
    fused = "bias" in layer.operator_gathers
    # Only weights of a second axis are gathered
    if layer.weight_group.size > 1:
        find_forward(layer)
    y = _ops.linear_2d(
        x,
        weight,
        layer.parameter("bias") if fused else None,
        layer.tp_group.name,
        layer.weight_group.name,
        full_size,
        row,
        "tokens" if layer.sequence_parallel else layer.activations,
        layer.token_sizes(total_tokens, None if row else x, x if row else None),
        layer.reshard_after_forward,
    )
    return y


def local_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns ``F.linear`` of local tensors, with the kernels for few rows of the parallel linears.

    [Note: decoding has kernels for few rows]
    """
    return _ops.column_parallel_linear(x, weight, bias, "")


def operands(
    layer: ParallelLinear, attributes: dict[str, Any], chosen: Tensor | None, summed: dict[str, Any]
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
