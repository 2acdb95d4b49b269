"""Base class of the tensor-parallel linears: parameters, sharding, and the weight of a call."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from tp_ext._checks import check_flag, check_type
from tp_ext.group import NOT_GIVEN, Group
from tp_ext.invariance import current_blocks, refuse_in_blocks
from tp_ext.model.layouts import mirror_layouts, refuse_computed
from tp_ext.model.module import ParallelModule
from tp_ext.nn.float8 import Float8, with_float8
from tp_ext.nn.forms import FormedLinear, TwoAxes, accumulated, form_of_options, main_grad_of
from tp_ext.nn.low_bits import LowBits
from tp_ext.random import Init, torch_linear_init
from tp_ext.sharding import Layout, Part, Sharding


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


class ParallelLinear(FormedLinear):
    """Base class of the column and row linear: the parameters, the weight of a call, conversion from ``nn.Linear``."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    has_blocks = True

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
        form = form_of_options(self)
        if isinstance(form, TwoAxes):
            check_one_axis_options(grad_accumulation_fusion=grad_accumulation_fusion, overlap_chunks=overlap_chunks)
        self.in_features = in_features
        self.out_features = out_features
        self.skip_bias_add = skip_bias_add
        self.grad_accumulation_fusion = grad_accumulation_fusion
        self.form = with_float8(form, float8, dtype, grad_accumulation_fusion)
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
            of_layer = weight_sharding.in_shares(self.shares)
            self._segments = of_layer.segments(self.tp_group.rank, self.tp_group.size)

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
        check_type(nn.Linear, "an nn.Linear", linear=linear)
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
        return self.form.weight_layout(self)

    @property
    def weight_options(self) -> dict[str, Any]:
        """The device and the dtype of the weight, of a quantised one its former dtype."""
        like = getattr(self, self.form.weight_name)
        return {"device": like.device, "dtype": like.dtype}

    def replace_weight(self, form: LowBits) -> None:
        """Declares the buffers of a weight that was quantised in the place of the weight."""
        self.form = form
        for table in (self.tp_layouts, self._inits, self._copied):
            table.pop("weight", None)
        self.tp_layouts.update(form.layouts())
        mirror_layouts(self)

    def _entering(self, name: str, value: Tensor) -> Tensor:
        if name != "weight":
            return value
        self.check_shape(value)
        # Where the gradient is summed over copies first, no operator can add it to main_grad
        return accumulated(value, main_grad_of(value)) if self.grad_accumulation_fusion else value

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
