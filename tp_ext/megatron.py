"""Conversion of weights between Megatron-core's layouts and the unsharded model's, which are ours. It takes and
returns full tensors: concatenate Megatron's shards first (``torch.cat`` along dim 0 for columns, 1 for rows), and pass
the result to :func:`tp_ext.load_full_state_dict`. Biases and optimizer states of a weight convert like the weight.

======================  =====================================================  =====================================
weight                  Megatron-core                                          here
======================  =====================================================  =====================================
``linear_qkv``          per KV group: its query heads, its key, its value      all queries | all keys | all values
``linear_fc1``, gated   per rank: its gate, its up                             gate | up
the vocabulary          padded rows are part of the full tensor                remove them: ``weight[:vocab_size]``
======================  =====================================================  =====================================

Everything else (``linear_proj``, ``linear_fc2``, ``linear_fc1`` without gate, norms) is the same in both.
"""

import torch
from torch import Tensor

from tp_ext.sharding import Sharding


# [Note: Megatron's weight layouts have a module]
def from_megatron_qkv(weight: Tensor, num_heads: int, num_kv_heads: int, head_dim: int) -> Tensor:
    """Returns q | k | v from Megatron's ``linear_qkv``; its rows are, per KV group: query heads, key head, value head.

    Args:
        weight: ``[(num_heads + 2 num_kv_heads) head_dim, ..]``, or the bias, of the full model.
        num_heads, num_kv_heads, head_dim: Megatron's ``num_attention_heads``, ``num_query_groups``, ``kv_channels``.

    Raises:
        ValueError: ``num_kv_heads`` does not divide ``num_heads``, or the number of rows does not match the heads.
    """
    group = _group(weight, num_heads, num_kv_heads, head_dim)
    heads = weight.unflatten(0, (num_kv_heads, group + 2, head_dim))
    return torch.cat([part.flatten(0, 2) for part in heads.split([group, 1, 1], 1)])


def to_megatron_qkv(weight: Tensor, num_heads: int, num_kv_heads: int, head_dim: int) -> Tensor:
    """Returns the inverse of :func:`from_megatron_qkv`: the tensor that Megatron splits into ``p`` equal shards."""
    group = _group(weight, num_heads, num_kv_heads, head_dim)
    parts = weight.split([n * head_dim for n in (num_heads, num_kv_heads, num_kv_heads)])
    sizes = (group, 1, 1)
    heads = [part.unflatten(0, (num_kv_heads, n, head_dim)) for part, n in zip(parts, sizes, strict=True)]
    return torch.cat(heads, 1).flatten(0, 2)


def from_megatron_gated(weight: Tensor, p: int) -> Tensor:
    """Returns gate | up from the ``linear_fc1`` shards of ``p`` ranks, concatenated along dim 0: gate and up of rank 0,
    of rank 1, and so on. For p = 1 the two are the same.

    Args:
        weight: ``[2 ffn, ..]``, or the bias.
        p: the number of shards.

    Raises:
        ValueError: the rows do not make a gate and an up of equal length for p ranks.
    """
    return _gated(weight, p).unshard(weight.chunk(p))


def to_megatron_gated(weight: Tensor, p: int) -> Tensor:
    """Returns the inverse of :func:`from_megatron_gated`: the tensor whose ``p`` equal chunks are the shards."""
    sharding = _gated(weight, p)
    return torch.cat([sharding.shard(weight, rank, p) for rank in range(p)])


def _group(weight: Tensor, num_heads: int, num_kv_heads: int, head_dim: int) -> int:
    """Returns the number of query heads per KV head."""
    numbers = f"num_heads = {num_heads}, num_kv_heads = {num_kv_heads}, head_dim = {head_dim}"
    if min(num_heads, num_kv_heads, head_dim) < 1 or num_heads % num_kv_heads:
        raise ValueError(f"num_kv_heads: must divide num_heads, and all be at least 1; {numbers}")
    rows = (num_heads + 2 * num_kv_heads) * head_dim
    if weight.dim() < 1 or weight.shape[0] != rows:
        raise ValueError(f"weight: shape {tuple(weight.shape)} must have {rows} rows; {numbers}")
    return num_heads // num_kv_heads


def _gated(weight: Tensor, p: int) -> Sharding:
    if p < 1 or weight.dim() < 1 or weight.shape[0] % (2 * p):
        raise ValueError(f"weight: shape {tuple(weight.shape)} must have a multiple of 2 p rows; p = {p}")
    return Sharding(0, (weight.shape[0] // 2,) * 2)
