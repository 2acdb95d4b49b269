"""tp_ext's names in plain torch: what the fuzzer's models are built of when no line of the library must take part.

Same constructors, calls and state-dict keys; the weights are whole, and what only cuts (``group``, ``parts``, ..) is
taken and passed over. No dropout: its masks are the library's own.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers.dense_moe import DenseMoE
from tests.helpers.oracle import rotate
from tp_ext import Part, RotaryEmbedding, RouterConfig  # values, without computation

__all__ = ["Part", "RotaryEmbedding", "RouterConfig"]

ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "swiglu": lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
    "geglu": lambda x: F.gelu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
}


class ColumnParallelLinear(nn.Linear):
    def __init__(self, n, m, bias=True, *, skip_bias_add=False, dtype=None, device=None, **_cut):
        super().__init__(n, m, bias, dtype=dtype, device=device)
        self.skip_bias_add = skip_bias_add

    def forward(self, x, total_tokens=None, weight=None):
        weight = self.weight if weight is None else weight
        return (F.linear(x, weight), self.bias) if self.skip_bias_add else F.linear(x, weight, self.bias)


RowParallelLinear = ColumnParallelLinear


class ParallelMLP(nn.Module):
    def __init__(self, hidden, ffn, *, activation="gelu", bias=True, dtype=None, device=None, **_cut):
        super().__init__()
        self.activation = activation
        width = ffn * (2 if activation in ("swiglu", "geglu") else 1)
        self.up = nn.Linear(hidden, width, bias, dtype=dtype, device=device)
        self.down = nn.Linear(ffn, hidden, bias, dtype=dtype, device=device)

    def forward(self, x, total_tokens=None):
        return self.down(ACTIVATIONS[self.activation](self.up(x)))


class ParallelMoE(DenseMoE):
    def __init__(
        self,
        hidden,
        ffn,
        experts,
        top_k,
        *,
        activation,
        bias,
        router,
        capacity,
        drop_order,
        shared_experts,
        dtype=None,
        device=None,
        **_cut,
    ):
        width, options = ffn * (2 if activation in ("swiglu", "geglu") else 1), {"dtype": dtype, "device": device}
        state = {
            "router.weight": (experts, hidden),
            "experts.up_weight": (experts, width, hidden),
            "experts.down_weight": (experts, hidden, ffn),
        }
        if bias:
            state |= {"experts.up_bias": (experts, width), "experts.down_bias": (experts, hidden)}
        state = {name: torch.empty(shape, **options) for name, shape in state.items()}
        if shared_experts:
            shared = ParallelMLP(hidden, shared_experts * ffn, activation=activation, bias=bias, **options)
            state |= {f"shared.{name}": value for name, value in shared.state_dict().items()}
        chosen = {"config": router, "capacity": capacity, "drop_order": drop_order}
        super().__init__(state, top_k=top_k, activation=activation, **chosen)
        self.losses = []

    def forward(self, x, batch_size, total_tokens=None):
        y, loss, _ = super().forward(x.flatten(0, -2), batch_size)
        if self.training:
            self.losses.append(loss)
        return y.view(x.shape)


def router_loss(model):
    """The losses of the last forward of each layer, with the gradient of those of all forwards since the last call."""
    total = 0.0
    for layer in model.modules():
        if isinstance(layer, ParallelMoE) and layer.losses:
            total = total + layer.losses[-1].detach() + sum(loss - loss.detach() for loss in layer.losses)
            layer.losses = []
    return total


def _lengths(x, batch_size, cu_seqlens):
    if x.dim() == 3:
        return [x.shape[1]] * x.shape[0]
    if batch_size is not None:
        return [x.shape[0] // batch_size] * batch_size
    return torch.as_tensor(cu_seqlens).diff().tolist()


def _rope_options(rope):
    """The arguments of ``rotate``, of a RotaryEmbedding or its base."""
    if rope is None or isinstance(rope, float):
        return rope and {"base": rope}
    options = {name: getattr(rope, name) for name in ("base", "interleaved", "rotary_dim")}
    if rope.scaling is not None:
        options["scaling"] = {"rope_type": rope.scaling.kind, **rope.scaling.options}
    return options


class _Attended(nn.Module):
    """Attention of q, k, v, by causal, scale, window and softcap."""

    causal, scale, window, softcap = True, 1.0, None, None

    def attended(self, q, k, v, lengths, mask):
        sequences = zip(*(t.transpose(0, 1).split(lengths, 1) for t in (q, k, v)), strict=True)
        y = [self._sequence(*one, mask) for one in sequences]
        return torch.cat(y, 1).transpose(0, 1).flatten(1)

    def _sequence(self, q, k, v, mask):
        scores = self.scale * q @ k.mT
        if self.softcap is not None:
            scores = (scores / self.softcap).tanh() * self.softcap
        back = torch.arange(q.shape[1])[:, None] - torch.arange(q.shape[1])
        seen = (back >= 0) | (not self.causal)
        if self.window is not None:
            seen = seen & (back.abs() < self.window)
        if mask is not None and mask.dtype == torch.bool:
            seen = seen & mask
        elif mask is not None:
            scores = scores + mask
        weights = scores.exp().where(seen, 0)  # scores are small
        return weights @ v / weights.sum(-1, keepdim=True).clamp(min=1e-300)


class ParallelAttention(_Attended):
    def __init__(
        self,
        hidden,
        heads,
        *,
        num_kv_heads,
        head_dim,
        qkv_bias,
        out_bias,
        causal,
        rope,
        qk_norm,
        scale,
        sliding_window,
        softcap,
        dropout,
        dtype,
        device=None,
        **_cut,
    ):
        super().__init__()
        assert not dropout
        self.heads, self.kv_heads, self.head_dim, self.causal = heads, num_kv_heads, head_dim, causal
        self.scale, self.window, self.softcap = scale or head_dim**-0.5, sliding_window, softcap
        self.rope = _rope_options(rope)
        self.qkv = nn.Linear(hidden, (heads + 2 * num_kv_heads) * head_dim, qkv_bias, dtype=dtype, device=device)
        self.out = nn.Linear(heads * head_dim, hidden, out_bias, dtype=dtype, device=device)
        self.q_norm, self.k_norm = (
            nn.RMSNorm(head_dim, 1e-6, dtype=dtype, device=device) if qk_norm else nn.Identity() for _ in "qk"
        )

    def forward(self, x, *, batch_size=None, cu_seqlens=None, total_tokens=None, attn_mask=None):
        lengths = _lengths(x, batch_size, cu_seqlens)
        heads = self.qkv(x.flatten(0, -2)).unflatten(-1, (-1, self.head_dim))
        q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads], 1)
        q, k = self.q_norm(q), self.k_norm(k)
        if self.rope is not None and q.numel():
            positions = torch.cat([torch.arange(n) for n in lengths])
            q, k = rotate(q, positions, **self.rope), rotate(k, positions, **self.rope)
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, 1) for t in (k, v))
        return self.out(self.attended(q, k, v, lengths, attn_mask)).view(x.shape)


class ParallelLatentAttention(_Attended):
    def __init__(
        self,
        hidden,
        heads,
        *,
        kv_lora_rank,
        q_lora_rank,
        qk_nope_head_dim,
        qk_rope_head_dim,
        v_head_dim,
        bias,
        norm_eps,
        causal,
        rope,
        scale,
        dropout,
        dtype,
        device=None,
        **_cut,
    ):
        super().__init__()
        assert not dropout
        self.heads, self.causal, self.rope = heads, causal, _rope_options(rope)
        self.sizes = qk_nope_head_dim, qk_rope_head_dim, v_head_dim
        self.rank, key, options = kv_lora_rank, qk_nope_head_dim + qk_rope_head_dim, {"dtype": dtype, "device": device}
        o = {} if rope is None or rope.scaling is None else rope.scaling.options
        grown = 0.1 * o.get("mscale_all_dim", 0) * math.log(o.get("factor", 1)) + 1
        self.scale = scale or key**-0.5 * grown**2
        if q_lora_rank is None:
            self.q_proj = nn.Linear(hidden, heads * key, False, **options)
        else:
            self.q_a_proj = nn.Linear(hidden, q_lora_rank, bias, **options)
            self.q_a_layernorm = nn.RMSNorm(q_lora_rank, norm_eps, **options)
            self.q_b_proj = nn.Linear(q_lora_rank, heads * key, False, **options)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, kv_lora_rank + qk_rope_head_dim, bias, **options)
        self.kv_a_layernorm = nn.RMSNorm(kv_lora_rank, norm_eps, **options)
        self.kv_b_proj = nn.Linear(kv_lora_rank, heads * (qk_nope_head_dim + v_head_dim), False, **options)
        self.o_proj = nn.Linear(heads * v_head_dim, hidden, bias, **options)

    def forward(self, x, *, batch_size=None, cu_seqlens=None, total_tokens=None, attn_mask=None):
        lengths, rows, (nope, rope, v_dim) = _lengths(x, batch_size, cu_seqlens), x.flatten(0, -2), self.sizes
        if hasattr(self, "q_proj"):
            q = self.q_proj(rows)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(rows)))
        q_nope, q_rope = q.unflatten(-1, (self.heads, nope + rope)).split([nope, rope], -1)
        latent, k_rope = self.kv_a_proj_with_mqa(rows).split([self.rank, rope], -1)
        up = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (self.heads, nope + v_dim))
        k_nope, v = up.split([nope, v_dim], -1)
        k_rope = k_rope[:, None]
        if self.rope is not None and rows.shape[0]:
            positions = torch.cat([torch.arange(n) for n in lengths])
            q_rope, k_rope = rotate(q_rope, positions, **self.rope), rotate(k_rope, positions, **self.rope)
        q, k = torch.cat([q_nope, q_rope], -1), torch.cat([k_nope, k_rope.expand_as(q_rope)], -1)
        return self.o_proj(self.attended(q, k, v, lengths, attn_mask)).view(x.shape)


class RMSNorm(nn.RMSNorm):
    def __init__(self, n, eps=None, elementwise_affine=True, *, dtype=None, device=None, **_cut):
        super().__init__(n, eps, elementwise_affine, dtype=dtype, device=device)


class LayerNorm(nn.LayerNorm):
    def __init__(self, n, eps=1e-5, elementwise_affine=True, bias=True, *, dtype=None, device=None, **_cut):
        super().__init__(n, eps, elementwise_affine, bias, dtype=dtype, device=device)


class VocabParallelEmbedding(nn.Embedding):
    def __init__(self, vocab, hidden, *, sequence_parallel=False, dtype=None, device=None, **_cut):
        super().__init__(vocab, hidden, dtype=dtype, device=device)
        self.flat = sequence_parallel

    def forward(self, ids):
        return super().forward(ids.flatten() if self.flat else ids)


class VocabParallelLMHead(nn.Linear):
    def __init__(self, hidden, vocab, *, bias=False, dtype=None, device=None, **_cut):
        super().__init__(hidden, vocab, bias, dtype=dtype, device=device)

    def forward(self, x, total_tokens=None):
        return super().forward(x)

    def loss(self, x, target, total_tokens=None, chunk_tokens=None, **options):
        return vocab_parallel_cross_entropy(self(x), target, None, vocab_size=None, inplace_backward=False, **options)


class Dropout(nn.Module):
    def __init__(self, p, **_cut):
        super().__init__()
        assert not p

    def forward(self, x, residual=None, total_tokens=None):
        return x if residual is None else x + residual


def dropout(x, p, training=True, *, bias=None, residual=None, **_cut):
    assert not p
    x = x if bias is None else x + bias
    return x if residual is None else x + residual


def vocab_parallel_cross_entropy(
    logits, target, group, *, vocab_size, ignore_index, label_smoothing, z_loss, reduction, inplace_backward
):
    rows, ids = logits.flatten(0, -2), target.flatten()
    options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "reduction": "none"}
    kept = ids != ignore_index
    losses = F.cross_entropy(rows, ids, **options) + z_loss * rows.logsumexp(-1).square() * kept
    if reduction == "none":
        return losses.view(target.shape)
    return losses.sum() / (kept.sum().clamp(min=1) if reduction == "mean" else 1)


def scatter_to_region(x, group, dim=-1, sizes=None):
    return x


gather_from_region = scatter_to_region


def all_to_all_region(x, group, split_dim, concat_dim, split_sizes=None, concat_sizes=None):
    return x


def clip_grad_norm_(module_or_parameters, max_norm, norm_type, *, group, foreach):
    params = module_or_parameters.parameters() if isinstance(module_or_parameters, nn.Module) else module_or_parameters
    return nn.utils.clip_grad_norm_(params, max_norm, norm_type)


def coalesce_gradients(module):
    pass
