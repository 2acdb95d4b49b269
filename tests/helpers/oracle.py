"""Unsharded reference layers in plain torch, written from the formulas, and the comparison of sharded layers with them:
activations and gradients sharded as the layers do it, and gathered from the ranks.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode

from tp_ext import ColumnParallelLinear, RowParallelLinear, Sharding, shardings

ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_tanh": lambda h: F.gelu(h, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "swiglu": lambda h: F.silu(h.chunk(2, -1)[0]) * h.chunk(2, -1)[1],
    "geglu": lambda h: F.gelu(h.chunk(2, -1)[0]) * h.chunk(2, -1)[1],
}
GATED = ("swiglu", "geglu")  # activations of two linears
Gradients = dict[str, tuple[Tensor | None, Sharding | None]]


def rope_frequencies(dim, base, scaling, length):
    """The frequency of each pair, in fp64, and the factor of cosine and sine; ``length``: tokens of the longest text.

    Linear: Chen et al., arXiv:2306.15595. NTK: base^(-2i / dim) with a base such that the last pair is slower by the
    factor. YaRN: Peng et al., arXiv:2309.00071, section 3.2 and 3.4. Llama 3.1: Meta's reference code.
    """
    pair = torch.arange(0, dim, 2).double()
    plain = base ** (-pair / dim)
    if scaling is None:
        return plain, 1.0
    o = dict(scaling)
    kind, factor, context = o["rope_type"], o.get("factor"), o.get("original_max_position_embeddings")
    turns = context * plain / (2 * torch.pi) if context else None  # of each pair over the original context
    if kind == "linear":
        return plain / factor, 1.0
    if kind in ("ntk", "dynamic"):
        if kind == "dynamic":
            factor = factor * max(length, context) / context - (factor - 1)
        return (base * factor ** (dim / (dim - 2))) ** (-pair / dim), 1.0
    if kind == "llama3":
        low, high = o["low_freq_factor"], o["high_freq_factor"]
        kept = ((turns - low) / (high - low)).clamp(0, 1)
    else:
        fast, slow = (
            dim * math.log(context / (2 * torch.pi * n)) / (2 * math.log(base))  # the pair that makes n turns
            for n in (o.get("beta_fast", 32), o.get("beta_slow", 1))
        )
        if o.get("truncate", True):
            fast, slow = math.floor(fast), math.ceil(slow)
        fast, slow = max(fast, 0), min(slow, dim - 1)
        slow += 0.001 * (fast == slow)
        kept = 1 - ((torch.arange(dim // 2).double() - fast) / (slow - fast)).clamp(0, 1)
    amplitude = 1.0
    if kind == "yarn":

        def grown(scale):
            return 0.1 * scale * math.log(factor) + 1

        both = o.get("mscale") and o.get("mscale_all_dim")
        amplitude = o.get("attention_factor") or (grown(o["mscale"]) / grown(o["mscale_all_dim"]) if both else grown(1))
    return plain * kept + plain / factor * (1 - kept), amplitude


def rotate(x, positions, base=10000.0, interleaved=False, rotary_dim=None, scaling=None, length=None):
    """RoPE by complex numbers: pair i of x ``[tokens, heads, head_dim]`` times exp(1j position frequency_i)."""
    dim = x.shape[-1] if rotary_dim is None else rotary_dim
    rotated, rest = x[..., :dim], x[..., dim:]
    pairs = rotated.unflatten(-1, (-1, 2)) if interleaved else rotated.unflatten(-1, (2, -1)).transpose(-1, -2)
    length = int(positions.max()) + 1 if length is None and positions.numel() else length
    frequencies, amplitude = rope_frequencies(dim, base, scaling, length)
    angles = positions.double()[:, None] * frequencies
    unit = torch.polar(torch.full_like(angles, amplitude), angles)[:, None]
    pairs = torch.view_as_real(
        torch.view_as_complex(pairs.double().clone(memory_format=torch.contiguous_format)) * unit
    )
    rotated = pairs.flatten(-2) if interleaved else pairs.transpose(-1, -2).flatten(-2)
    return torch.cat([rotated.to(x.dtype), rest], -1)


def attention(
    x,
    weights,
    lengths,
    *,
    num_heads,
    num_kv_heads=None,
    causal=True,
    rope=None,
    scale=None,
    sliding_window=None,
    softcap=None,
    attn_mask=None,
):
    """Self-attention of the sequences of ``lengths`` in x ``[tokens, hidden]``, one after the other.

    weights: ``qkv.weight`` (rows q | k | v), ``out.weight``, and, if there are any, ``qkv.bias``, ``out.bias``,
    ``q_norm.weight``, ``k_norm.weight``. rope: arguments of :func:`rotate`. attn_mask: bool or added to the scores,
    broadcastable to ``[len(lengths), num_heads, n, n]``.
    """
    num_kv_heads = num_kv_heads or num_heads
    qkv = x @ weights["qkv.weight"].T + weights.get("qkv.bias", 0)
    heads = qkv.unflatten(-1, (num_heads + 2 * num_kv_heads, -1))
    q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], 1)
    if "q_norm.weight" in weights:
        q, k = (
            t / (t.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weights[name]
            for t, name in ((q, "q_norm.weight"), (k, "k_norm.weight"))
        )
    if rope is not None:
        positions = torch.cat([torch.arange(n) for n in lengths])
        q, k = rotate(q, positions, **rope), rotate(k, positions, **rope)
    outputs = []
    for sequence, (q1, k1, v1) in enumerate(zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)):
        n = q1.shape[0]
        distance = torch.arange(n)[:, None] - torch.arange(n)  # i - j
        per_head = []
        for head in range(num_heads):
            shared = head // (num_heads // num_kv_heads)
            scores = q1[:, head] @ k1[:, shared].T * (q1.shape[-1] ** -0.5 if scale is None else scale)
            if softcap is not None:
                scores = softcap * (scores / softcap).tanh()
            if attn_mask is not None:
                mask = attn_mask.expand(len(lengths), num_heads, n, n)[sequence, head]
                scores = scores.where(mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
            if causal:
                scores = scores.masked_fill(distance < 0, float("-inf"))
            if sliding_window is not None:
                scores = scores.masked_fill(distance.abs() >= sliding_window, float("-inf"))
            blind = (scores == float("-inf")).all(-1, keepdim=True)  # may attend to nothing
            per_head.append(scores.masked_fill(blind, 0).softmax(-1).masked_fill(blind, 0) @ v1[:, shared])
        outputs.append(torch.cat(per_head, -1))
    return torch.cat(outputs) @ weights["out.weight"].T + weights.get("out.bias", 0)


def random_state(module):
    """Random values for everything in the state dict of an unsharded module, large enough to matter everywhere."""
    return {name: torch.randn_like(value) / value.shape[-1] ** 0.5 for name, value in module.state_dict().items()}


def local_grads(module):
    return {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}


def gathered(locals_, shardings):
    """Full tensors, by name, from those of ranks 0, 1, .. Asserts that whatever several ranks hold is the same to the
    last bit on all of them, and that padding is zero."""
    p, full = len(locals_), {}
    for name, sharding in shardings.items():
        shards = [one[name] for one in locals_]
        full[name] = shards[0] if sharding is None else sharding.unshard(shards)
        for rank, shard in enumerate(shards):
            want = full[name] if sharding is None else sharding.shard(full[name], rank, p)
            assert torch.equal(shard, want), f"{name} on rank {rank}: copies that differ, or padding that is not 0"
    return full


def counts_by_kind(counts):
    """The counts of CommDebugMode, as {"all_reduce": 1, ..}."""
    by_kind = {}
    for op, times in counts.get_comm_counts().items():
        plain = str(op).replace("_", "")
        for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
            if kind.replace("_", "") in plain:
                by_kind[kind] = by_kind.get(kind, 0) + times
    assert sum(by_kind.values()) == counts.get_total_counts()
    return by_kind


def own_tokens(x: Tensor, group) -> Tensor:
    """This rank's rows of x, as sequence parallelism cuts them."""
    return x.tensor_split(group.size())[group.rank()].contiguous()


def partial_slice(full: Tensor, sharding: Sharding, rank: int, p: int) -> Tensor:
    """The rank's slice of the last dim; copies on several ranks are weighted, differently, so that their sum is
    whole."""
    weights = []
    for part in sharding.parts:
        copy, total = rank % part.copies + 1, part.copies * (part.copies + 1) / 2
        weights.append(torch.full((part.size,), copy / total, dtype=full.dtype))
    return Sharding(-1, sharding.parts).shard(full * torch.cat(weights), rank, p)


def own_input(x: Tensor, layer: nn.Module, group) -> Tensor:
    """This rank's input of a linear layer, from the input x of the unsharded layer."""
    if isinstance(layer, RowParallelLinear):
        return partial_slice(x, layer.tp_shardings["weight"], group.rank(), group.size())
    return own_tokens(x, group) if layer.sequence_parallel else x


def own_output(y: Tensor, layer: nn.Module, group) -> Tensor:
    """This rank's share of y, a tensor of the shape of the unsharded layer's output."""
    if isinstance(layer, ColumnParallelLinear):
        return partial_slice(y, layer.tp_shardings["weight"], group.rank(), group.size())
    return own_tokens(y, group) if layer.sequence_parallel else y


def small_linear(dtype=torch.float64, features=(6, 8)) -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(*features, dtype=dtype)


def small_layer(group, kind, sp, dtype=torch.float64, **options) -> nn.Module:
    """The same linear, parallel."""
    return kind.from_linear(small_linear(dtype), group=group, sequence_parallel=sp, **options)


def small_input(layer: nn.Module, group, dtype=torch.float64) -> Tensor:
    torch.manual_seed(2)
    return own_input(torch.randn(4, 6, dtype=dtype), layer, group).contiguous().requires_grad_()


def results(layer: nn.Module, x: Tensor, call=None) -> list[Tensor]:
    """y = layer(x), or call(x), and the gradients of its sines: of x and of the parameters."""
    layer.zero_grad()
    x.grad = None
    y = (layer if call is None else call)(x)
    y.sin().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters())]


def gradients(module: nn.Module) -> Gradients:
    """Each parameter's gradient with its sharding, to be sent to the parent."""
    params = dict(module.named_parameters())
    return {name: (params[name].grad, sharding) for name, sharding in shardings(module)}


def full_gradients(per_rank: list[Gradients]) -> dict[str, Tensor | None]:
    """The gradients of the unsharded module. Replicated ones and copies must be the same bits on every rank, padding
    zero; what one rank has no gradient for, none has."""
    missing = {name for name, (grad, _) in per_rank[0].items() if grad is None}
    for one in per_rank:
        assert {name for name, (grad, _) in one.items() if grad is None} == missing
    table = {name: sharding for name, (_, sharding) in per_rank[0].items() if name not in missing}
    full = gathered([{name: one[name][0] for name in table} for one in per_rank], table)
    return {name: full.get(name) for name in per_rank[0]}


def count_collectives_of(run) -> dict[str, int]:
    """The collectives that run() sends, by kind."""
    with CommDebugMode() as counts:
        run()
    return counts_by_kind(counts)
