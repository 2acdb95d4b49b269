"""Unsharded references in plain torch, written from the formulas, and what module tests share: gradients put together
from those of the ranks, and what a stretch of code communicated.
"""

import torch


def rotate(x, positions, base=10000.0, interleaved=False, rotary_dim=None):
    """RoPE by complex numbers: pair i of x ``[tokens, heads, head_dim]`` times exp(1j position base^(-2i / dim))."""
    dim = x.shape[-1] if rotary_dim is None else rotary_dim
    rotated, rest = x[..., :dim], x[..., dim:]
    pairs = rotated.unflatten(-1, (-1, 2)) if interleaved else rotated.unflatten(-1, (2, -1)).transpose(-1, -2)
    angles = positions.double()[:, None] * base ** (-torch.arange(0, dim, 2).double() / dim)
    turned = torch.view_as_complex(pairs.double().contiguous()) * torch.polar(torch.ones_like(angles), angles)[:, None]
    pairs = torch.view_as_real(turned)
    rotated = pairs.flatten(-2) if interleaved else pairs.transpose(-1, -2).flatten(-2)
    return torch.cat([rotated.to(x.dtype), rest], -1)


def attention(x, weights, lengths, *, num_heads, num_kv_heads=None, causal=True, rope=None):
    """Self-attention of the sequences of ``lengths`` in x ``[tokens, hidden]``, one after the other.

    weights: ``qkv.weight`` (rows q | k | v), ``out.weight``, and, if there are any, ``qkv.bias``, ``out.bias``,
    ``q_norm.weight``, ``k_norm.weight``. rope: arguments of :func:`rotate`.
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
    for q1, k1, v1 in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
        n = q1.shape[0]
        per_head = []
        for head in range(num_heads):
            shared = head // (num_heads // num_kv_heads)
            scores = q1[:, head] @ k1[:, shared].T / q1.shape[-1] ** 0.5
            if causal:
                scores = scores.masked_fill(torch.arange(n) > torch.arange(n)[:, None], float("-inf"))
            per_head.append(scores.softmax(-1) @ v1[:, shared])
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
        pieces = [one[name] for one in locals_]
        full[name] = pieces[0] if sharding is None else sharding.unshard(pieces)
        for rank, piece in enumerate(pieces):
            want = full[name] if sharding is None else sharding.shard(full[name], rank, p)
            assert torch.equal(piece, want), f"{name} on rank {rank}: copies that differ, or padding that is not 0"
    return full


def talk(counts):
    """What CommDebugMode counted, as {"all_reduce": 1, ..}."""
    heard = {}
    for op, times in counts.get_comm_counts().items():
        plain = str(op).replace("_", "")
        for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
            if kind.replace("_", "") in plain:
                heard[kind] = heard.get(kind, 0) + times
    assert sum(heard.values()) == counts.get_total_counts()
    return heard
