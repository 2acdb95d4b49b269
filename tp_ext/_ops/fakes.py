"""Fakes of all primitive operators, in the order of csrc/library.cpp: shapes and dtypes only, for torch.compile and
FakeTensor.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tp_ext._build import load

load()  # a fake needs its schema


def _acc_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _like_or_none(x: Tensor | None, default: Tensor) -> Tensor:
    return default.new_empty(0) if x is None else _like(x)


@torch.library.register_fake("tp_ext::_pack_shards")
def _(x: Tensor, dim: int, sizes: Sequence[int], padded: bool = True) -> Tensor:
    if not padded:
        return x.new_empty(x.numel())
    shape = list(x.shape)
    shape[dim] = max(sizes)
    return x.new_empty([len(sizes), *shape])


@torch.library.register_fake("tp_ext::_unpack_shards")
def _(blocks: Tensor, dim: int, sizes: Sequence[int], shape: Sequence[int] | None = None) -> Tensor:
    if shape is None:
        shape = list(blocks.shape[1:])
        shape[dim] = sum(sizes)
    return blocks.new_empty(shape)


@torch.library.register_fake("tp_ext::_linear_gelu_fwd")
def _(x: Tensor, weight: Tensor, bias: Tensor, keep_pre: bool) -> tuple[Tensor, Tensor]:
    y = x.new_empty([*x.shape[:-1], weight.shape[0]])
    return y, torch.empty_like(y) if keep_pre else y.new_empty(0)


@torch.library.register_fake("tp_ext::_linear_dgelu_bwd")
def _(dy: Tensor, weight: Tensor, pre: Tensor) -> tuple[Tensor, Tensor]:
    return _like(pre), pre.new_empty(weight.shape[1])


@torch.library.register_fake("tp_ext::_add_weight_grad_")
def _(main_grad: Tensor, dy: Tensor, x: Tensor) -> None:
    return None


@torch.library.register_fake("tp_ext::_bias_act_fwd")
def _(x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    return _like(x)


@torch.library.register_fake("tp_ext::_gated_act_fwd")
def _(x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    return x.new_empty([*x.shape[:-1], x.shape[-1] // 2])


@torch.library.register_fake("tp_ext::_bias_act_bwd")
def _(grad: Tensor, x: Tensor, bias: Tensor | None, activation: str) -> tuple[Tensor, Tensor]:
    return _like(x), _like_or_none(bias, x)


@torch.library.register_fake("tp_ext::_gated_act_bwd")
def _(grad: Tensor, x: Tensor, bias: Tensor | None, activation: str) -> tuple[Tensor, Tensor]:
    return _like(x), _like_or_none(bias, x)


def _per_row(x: Tensor) -> Tensor:
    return x.new_empty(math.prod(x.shape[:-1]), dtype=_acc_dtype(x.dtype))


def _like_if(wanted: bool, x: Tensor | None, default: Tensor) -> Tensor:
    return _like(x) if x is not None and wanted else (default if x is None else x).new_empty(0)


@torch.library.register_fake("tp_ext::_rms_norm_fwd")
def _(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    return _like(x), _per_row(x)


@torch.library.register_fake("tp_ext::_rms_norm_residual_fwd")
def _(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    return _like(x), _like(x), _per_row(x)


@torch.library.register_fake("tp_ext::_rms_norm_bwd")
def _(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    grad_sum: Tensor | None = None,
    output_mask: Sequence[bool] = (True, True),
) -> tuple[Tensor, Tensor]:
    return _like_if(output_mask[0], x, x), _like_if(output_mask[1], weight, x)


@torch.library.register_fake("tp_ext::_layer_norm_fwd")
def _(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    return _like(x), _per_row(x), _per_row(x)


@torch.library.register_fake("tp_ext::_layer_norm_residual_fwd")
def _(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _like(x), _like(x), _per_row(x), _per_row(x)


@torch.library.register_fake("tp_ext::_layer_norm_bwd")
def _(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    grad_sum: Tensor | None = None,
    output_mask: Sequence[bool] = (True, True, True),
) -> tuple[Tensor, Tensor, Tensor]:
    return _like_if(output_mask[0], x, x), _like_if(output_mask[1], weight, x), _like_if(output_mask[2], weight, x)


@torch.library.register_fake("tp_ext::_rope_tables")
def _(
    positions: Tensor,
    rotary_dim: int,
    base: float,
    dtype: torch.dtype,
    frequencies: Sequence[float] | None = None,
    amplitude: float = 1.0,
) -> tuple[Tensor, Tensor]:
    cos = positions.new_empty([positions.shape[0], rotary_dim // 2], dtype=dtype)
    return cos, torch.empty_like(cos)


@torch.library.register_fake("tp_ext::_rope")
def _(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool, positions: Tensor | None = None) -> Tensor:
    return _like(x)


@torch.library.register_fake("tp_ext::_bias_dropout_residual_fwd")
def _(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    seed: Tensor,
    p: float,
    local_inner: int,
    full_inner: int,
    offset: int,
) -> Tensor:
    return _like(x)


@torch.library.register_fake("tp_ext::_dropout_bwd")
def _(grad: Tensor, seed: Tensor, p: float, local_inner: int, full_inner: int, offset: int) -> Tensor:
    return _like(grad)


@torch.library.register_fake("tp_ext::_bias_dropout_bwd")
def _(grad: Tensor, seed: Tensor, p: float, local_inner: int, full_inner: int, offset: int) -> tuple[Tensor, Tensor]:
    return _like(grad), grad.new_empty(grad.shape[-1:])


@torch.library.register_fake("tp_ext::_philox_uniform_")
def _(
    self: Tensor,
    seed: Tensor,
    low: float,
    high: float,
    local_inner: int,
    full_inner: int,
    offset: int,
) -> None:
    return None


@torch.library.register_fake("tp_ext::_philox_normal_")
def _(
    self: Tensor,
    seed: Tensor,
    mean: float,
    std: float,
    local_inner: int,
    full_inner: int,
    offset: int,
) -> None:
    return None


@torch.library.register_fake("tp_ext::_philox_truncated_normal_")
def _(
    self: Tensor,
    seed: Tensor,
    mean: float,
    std: float,
    low: float,
    high: float,
    local_inner: int,
    full_inner: int,
    offset: int,
) -> None:
    return None


@torch.library.register_fake("tp_ext::_vocab_embedding_fwd")
def _(weight: Tensor, ids: Tensor, vocab_start: int, vocab_local: int, vocab_size: int) -> Tensor:
    return weight.new_empty([*ids.shape, weight.shape[1]])


@torch.library.register_fake("tp_ext::_vocab_embedding_bwd")
def _(grad: Tensor, ids: Tensor, num_rows: int, vocab_start: int, vocab_local: int) -> Tensor:
    return grad.new_empty([num_rows, grad.shape[-1]])


@torch.library.register_fake("tp_ext::_vocab_ce_stats")
def _(
    logits: Tensor,
    target: Tensor,
    vocab_start: int,
    vocab_local: int,
    vocab_size: int,
    ignore_index: int,
    shard_row: bool = False,
    vocab_size_given: bool = True,
) -> Tensor:
    return logits.new_empty([target.numel() + int(shard_row), 4], dtype=_acc_dtype(logits.dtype))


@torch.library.register_fake("tp_ext::_vocab_ce_loss")
def _(
    stats: Tensor,
    target: Tensor,
    vocab_size: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> tuple[Tensor, Tensor]:
    return stats.new_empty(target.numel()), stats.new_empty([target.numel(), 2])


@torch.library.register_fake("tp_ext::_vocab_ce_bwd")
def _(
    grad: Tensor,
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    vocab_start: int,
    vocab_local: int,
    vocab_size: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> Tensor:
    return _like(logits)


@torch.library.register_fake("tp_ext::_vocab_ce_bwd_")
def _(
    grad: Tensor,
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    vocab_start: int,
    vocab_local: int,
    vocab_size: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> None:
    return None


@torch.library.register_fake("tp_ext::_multi_tensor_squared_norm")
def _(xs: Sequence[Tensor]) -> Tensor:
    return xs[0].new_empty((), dtype=torch.float64)


@torch.library.register_fake("tp_ext::_multi_tensor_scale_")
def _(xs: Sequence[Tensor], scale: Tensor) -> None:
    return None
