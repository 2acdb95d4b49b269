"""The operators of csrc/library.cpp, declared with names and types, one file per family; callers use ``_ops.<name>``.

Each is declared once, next to its documentation and, if it is a primitive, as its fake (binding.py says how). Only this
folder names ``torch.ops``.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from tp_ext._ops.activation import (
    bias_act,
    bias_act_bwd,
    bias_act_fwd,
    gated_act,
    gated_act_bwd,
    gated_act_fwd,
)
from tp_ext._ops.binding import Sizes, c10d_operator
from tp_ext._ops.blocks import (
    block_attention,
    block_bmm,
    block_column_linear,
    block_copies,
    block_row_linear,
    block_softmax,
    block_sum,
    column_sums,
    tree_total,
)
from tp_ext._ops.compressed_blocks import (
    compress_blocks_,
    decompress_blocks_,
    sum_compressed_blocks_,
)
from tp_ext._ops.context import attention, context_attention
from tp_ext._ops.exported import CompiledGraph, compiled_graph, whole_operators
from tp_ext._ops.float8 import (
    finite_amax,
    float8_column_linear,
    float8_grouped_linear,
    float8_quantize,
    float8_row_linear,
)
from tp_ext._ops.linear import (
    accumulate_grad_into,
    add_weight_grad_,
    all_to_all_linear,
    column_parallel_linear,
    grouped_linear,
    linear_2d,
    row_parallel_linear,
)
from tp_ext._ops.low_bits import dequantize_low_bits, low_bits_product
from tp_ext._ops.matmul_2d import matmul_2d
from tp_ext._ops.moe import (
    moe_dot,
    moe_dot_fwd,
    moe_permute,
    moe_permute_fwd,
    moe_sort,
    moe_unpermute,
    moe_unpermute_bwd,
    moe_unpermute_fwd,
)
from tp_ext._ops.multi_tensor import (
    multi_tensor_copy_,
    multi_tensor_scale_,
    multi_tensor_squared_norm,
)
from tp_ext._ops.named_masks import (
    draw_rows_seed,
    draw_sequence_seeds,
    table_rows,
)
from tp_ext._ops.norm import (
    all_reduce_rms_norm,
    layer_norm,
    layer_norm_bwd,
    layer_norm_fwd,
    layer_norm_residual,
    layer_norm_residual_fwd,
    rms_norm,
    rms_norm_bwd,
    rms_norm_fwd,
    rms_norm_residual,
    rms_norm_residual_fwd,
    sharded_layer_norm,
    sharded_rms_norm,
)
from tp_ext._ops.random import (
    bias_dropout_bwd,
    bias_dropout_residual,
    bias_dropout_residual_fwd,
    dropout_bwd,
    philox_normal_,
    philox_truncated_normal_,
    philox_uniform_,
)
from tp_ext._ops.regions import (
    all_gather_region,
    all_to_all_region,
    copy_replicas_to_region,
    copy_to_region,
    copy_to_region_coalesced,
    gather_from_region,
    reduce_from_region,
    reduce_replicas_from_region,
    reduce_scatter_region,
    scatter_to_region,
)
from tp_ext._ops.rotary import (
    rope,
    rope_rotate,
    rope_tables,
)
from tp_ext._ops.shard_pack import (
    pack_shards,
    unpack_shards,
)
from tp_ext._ops.vocab import (
    linear_cross_entropy,
    vocab_ce_bwd,
    vocab_ce_bwd_,
    vocab_ce_loss,
    vocab_ce_stats,
    vocab_chunk_input_grad,
    vocab_chunk_logits_,
    vocab_chunk_weight_grad_,
    vocab_embedding_bwd,
    vocab_embedding_fwd,
    vocab_parallel_argmax,
    vocab_parallel_cross_entropy,
    vocab_parallel_embedding,
    vocab_parallel_sample,
)

# torch's softmax that returns 0, not NaN, for rows of -inf; scaled_dot_product_attention uses it, torch.* has none
safe_softmax: Callable[..., Tensor] = torch.ops.aten._safe_softmax.default
