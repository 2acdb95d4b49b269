"""Bindings of the C++ operators: loads the library and binds every operator of csrc/library.cpp once; the primitives'
fakes are in fakes.py. No other file names ``torch.ops``.

A binding is a bare operator overload, typed by annotation. Operators that layers call often are bound to functions of
the compiled library, which avoid the overload's boxing: no Python frame lies between a layer and the dispatcher.
Formulas and shapes are given at the schemas and in the modules that use them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tp_ext._build import load
from tp_ext._ops import fakes  # noqa: F401, registers them

_library = load()

Sizes = Sequence[int] | None


def _op(name: str) -> Any:
    return getattr(torch.ops.tp_ext, name).default


def _direct(name: str) -> Any:
    """Returns the operator without boxing of arguments (csrc/python/direct_call.h); torch.compile sees the overload."""
    overload = _op(name)
    function = _library.direct_call(name, overload)

    def traced(*args: Any, **kwargs: Any) -> Any:
        return overload(*args, **kwargs)

    torch.compiler.substitute_in_graph(function, skip_signature_check=True)(traced)
    return function


# Regions
copy_to_region: Callable[[Tensor, str], Tensor] = _direct("copy_to_region")
reduce_from_region: Callable[[Tensor, str], Tensor] = _direct("reduce_from_region")
scatter_to_region: Callable[[Tensor, str, int, Sizes], Tensor] = _direct("scatter_to_region")
gather_from_region: Callable[[Tensor, str, int, Sizes], Tensor] = _direct("gather_from_region")
all_gather_region: Callable[[Tensor, str, int, Sizes], Tensor] = _direct("all_gather_region")
reduce_scatter_region: Callable[[Tensor, str, int, Sizes], Tensor] = _direct("reduce_scatter_region")
all_to_all_region: Callable[[Tensor, str, int, int, Sizes, Sizes], Tensor] = _op("all_to_all_region")
CopiedRowsRegion = Callable[[Tensor, str, Sequence[int], Sequence[int], Sequence[int], int], Tensor]
copy_pieces_to_region: CopiedRowsRegion = _op("copy_pieces_to_region")
reduce_pieces_from_region: CopiedRowsRegion = _op("reduce_pieces_from_region")
CopyCoalesced = Callable[[Sequence[Tensor], str, Sequence[int]], list[Tensor]]
copy_to_region_coalesced: CopyCoalesced = _op("copy_to_region_coalesced")
pack_shards: Callable[[Tensor, int, Sequence[int], bool], Tensor] = _op("_pack_shards")
unpack_shards: Callable[[Tensor, int, Sequence[int], Sequence[int] | None], Tensor] = _op("_unpack_shards")

# Linear layers: x, weight, bias, group, sequence_parallel, sizes, main_grad, overlap_chunks, row: sum_bias_grad
Linear = Callable[[Tensor, Tensor, Tensor | None, str, bool, Sizes, Tensor | None, int], Tensor]
RowLinear = Callable[[Tensor, Tensor, Tensor | None, str, bool, Sizes, Tensor | None, int, bool], Tensor]
column_parallel_linear: Linear = _direct("column_parallel_linear")
row_parallel_linear: RowLinear = _direct("row_parallel_linear")
# x, up_weight, up_bias, down_weight, down_bias, group, sequence_parallel, sizes, up_main_grad, down_main_grad,
# sum_bias_grad
ParallelMLP = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, str, bool, Sizes, Tensor | None, Tensor | None, bool], Tensor
]
parallel_mlp: ParallelMLP = _direct("parallel_mlp")
linear_gelu_fwd: Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]] = _op("_linear_gelu_fwd")
linear_dgelu_bwd: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] = _op("_linear_dgelu_bwd")
add_weight_grad_: Callable[[Tensor, Tensor, Tensor], None] = _op("_add_weight_grad_")
accumulate_grad_into: Callable[[Tensor, Tensor], Tensor] = _op("accumulate_grad_into")

# Activations: x, bias, activation
Activation = Callable[[Tensor, Tensor | None, str], Tensor]
ActivationGrad = Callable[[Tensor, Tensor, Tensor | None, str], tuple[Tensor, Tensor]]
bias_act: Activation = _direct("bias_act")
gated_act: Activation = _direct("gated_act")
bias_act_fwd: Activation = _op("_bias_act_fwd")
bias_act_bwd: ActivationGrad = _op("_bias_act_bwd")
gated_act_fwd: Activation = _op("_gated_act_fwd")
gated_act_bwd: ActivationGrad = _op("_gated_act_bwd")

# Norms: (grad,) x (, residual), weight, bias, eps or mean and rstd; gradients also: grad_sum, output_mask
Mask = Sequence[bool]
Pair = tuple[Tensor, Tensor]
Triple = tuple[Tensor, Tensor, Tensor]
rms_norm: Callable[[Tensor, Tensor | None, float], Tensor] = _direct("rms_norm")
rms_norm_residual: Callable[[Tensor, Tensor, Tensor | None, float], Pair] = _op("rms_norm_residual")
rms_norm_fwd: Callable[[Tensor, Tensor | None, float], Pair] = _op("_rms_norm_fwd")
rms_norm_residual_fwd: Callable[[Tensor, Tensor, Tensor | None, float], Triple] = _op("_rms_norm_residual_fwd")
rms_norm_bwd: Callable[[Tensor, Tensor, Tensor | None, Tensor, Tensor | None, Mask], Pair] = _op("_rms_norm_bwd")
layer_norm: Callable[[Tensor, Tensor | None, Tensor | None, float], Tensor] = _direct("layer_norm")
layer_norm_residual: Callable[[Tensor, Tensor, Tensor | None, Tensor | None, float], Pair] = _op("layer_norm_residual")
layer_norm_fwd: Callable[[Tensor, Tensor | None, Tensor | None, float], Triple] = _op("_layer_norm_fwd")
layer_norm_residual_fwd: Callable[
    [Tensor, Tensor, Tensor | None, Tensor | None, float], tuple[Tensor, Tensor, Tensor, Tensor]
] = _op("_layer_norm_residual_fwd")
layer_norm_bwd: Callable[[Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor | None, Mask], Triple] = _op(
    "_layer_norm_bwd"
)

# Rotary embedding: x, cos, sin, interleaved (, inverse), positions; tables: positions, rotary_dim, base, dtype (,
# frequencies, amplitude)
rope_tables: Callable[..., tuple[Tensor, Tensor]] = _op("_rope_tables")
rope: Callable[[Tensor, Tensor, Tensor, bool, Tensor | None], Tensor] = _direct("rope")
rope_rotate: Callable[[Tensor, Tensor, Tensor, bool, bool, Tensor | None], Tensor] = _op("_rope")

# Randomness by global index: ..., local_inner, full_inner, offset
bias_dropout_residual: Callable[[Tensor, Tensor | None, Tensor | None, Tensor, float, int, int, int], Tensor] = _direct(
    "bias_dropout_residual"
)
bias_dropout_residual_fwd: Callable[[Tensor, Tensor | None, Tensor | None, Tensor, float, int, int, int], Tensor] = _op(
    "_bias_dropout_residual_fwd"
)
dropout_bwd: Callable[[Tensor, Tensor, float, int, int, int], Tensor] = _op("_dropout_bwd")
bias_dropout_bwd: Callable[[Tensor, Tensor, float, int, int, int], tuple[Tensor, Tensor]] = _op("_bias_dropout_bwd")
Fill = Callable[[Tensor, Tensor, float, float, int, int, int], None]
philox_uniform_: Fill = _op("_philox_uniform_")
philox_normal_: Fill = _op("_philox_normal_")
philox_truncated_normal_: Callable[[Tensor, Tensor, float, float, float, float, int, int, int], None] = _op(
    "_philox_truncated_normal_"
)

# Vocabulary
vocab_parallel_embedding: Callable[[Tensor, Tensor, str, int, int, int, bool, Sizes], Tensor] = _direct(
    "vocab_parallel_embedding"
)
vocab_embedding_fwd: Callable[[Tensor, Tensor, int, int, int], Tensor] = _op("_vocab_embedding_fwd")
vocab_embedding_bwd: Callable[[Tensor, Tensor, int, int, int], Tensor] = _op("_vocab_embedding_bwd")
vocab_parallel_cross_entropy: Callable[
    [Tensor, Tensor, str, int, int, int, int, float, float, str, bool, bool], Tensor
] = _op("vocab_parallel_cross_entropy")
vocab_ce_stats: Callable[[Tensor, Tensor, int, int, int, int], Tensor] = _op("_vocab_ce_stats")
vocab_ce_loss: Callable[[Tensor, Tensor, int, int, float, float], tuple[Tensor, Tensor]] = _op("_vocab_ce_loss")
CrossEntropyGrad = Callable[[Tensor, Tensor, Tensor, Tensor, int, int, int, int, float, float], Any]
vocab_ce_bwd: CrossEntropyGrad = _op("_vocab_ce_bwd")
vocab_ce_bwd_: CrossEntropyGrad = _op("_vocab_ce_bwd_")

# torch's softmax that returns 0, not NaN, for rows of -inf; scaled_dot_product_attention uses it, torch.* has none
safe_softmax: Callable[..., Tensor] = torch.ops.aten._safe_softmax.default

# Of all tensors at once
multi_tensor_squared_norm: Callable[[Sequence[Tensor]], Tensor] = _op("_multi_tensor_squared_norm")
multi_tensor_scale_: Callable[[Sequence[Tensor], Tensor], None] = _op("_multi_tensor_scale_")
