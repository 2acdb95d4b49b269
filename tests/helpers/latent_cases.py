"""The latent attentions that are tested, a reference in plain torch, and the comparison with it."""

import math

import torch
from torch.nn import functional as F

from tests.helpers import attention_cases, oracle, ranks
from tests.helpers.attention_cases import PACKED, assert_near, layer_step, whole
from tp_ext import ParallelLatentAttention, RotaryEmbedding

HIDDEN = 10
SIZES = {"kv_lora_rank": 6, "qk_nope_head_dim": 5, "qk_rope_head_dim": 4, "v_head_dim": 3}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 0.7}
YARN |= {"mscale_all_dim": 1.3}
HALF = {"base": 100.0}
DEEPSEEK = {"base": 100.0, "interleaved": True, "scaling": YARN}
CASES = {
    "v3": {"num_heads": 4, "q_lora_rank": 7},
    "v2_lite": {"num_heads": 4},
    "uneven_5_heads": {"num_heads": 5, "q_lora_rank": 7, "bias": True},
    "yarn": {"num_heads": 4, "q_lora_rank": 7, "rope": DEEPSEEK},
    "half": {"num_heads": 6, "rope": HALF, "bias": True, "causal": False},
    "no_positions": {"num_heads": 4, "q_lora_rank": 7, "rope": None, "scale": 0.4},
    "wide_v": {"num_heads": 4, "q_lora_rank": 7, "v_head_dim": 11},
}
LAYOUTS = {  # the lengths of the sequences, how they come, sequence parallelism
    "batch": ([5, 5], "batch", False),
    "packed": (PACKED, "packed", False),
    "sp_tokens": ([4, 4, 4], "tokens", True),  # 2, 3 and 4 divide the tokens
    "sp_packed_uneven": (PACKED, "packed_tensor", True),
}


def make(options, group=None, **more):
    options = SIZES | {"dtype": torch.float64} | options | more
    if isinstance(options.get("rope"), dict):
        options["rope"] = RotaryEmbedding(options["qk_rope_head_dim"], **options["rope"])
    return ParallelLatentAttention(options.pop("hidden_size", HIDDEN), **options, group=group)


def reference(x, weights, lengths, *, num_heads, causal=True, rope="default", scale=None, attn_mask=None, **sizes):
    """Latent attention of the sequences of ``lengths`` in x ``[tokens, hidden]``, head by head, from the formulas of
    arXiv:2405.04434, section 2.1. weights: by the names of the module; rope: arguments of :func:`oracle.rotate`."""
    sizes = SIZES | sizes
    nope, rotary, v_dim = (sizes[f"{name}_head_dim"] for name in ("qk_nope", "qk_rope", "v"))
    rope = {"base": 10000.0, "interleaved": True} if rope == "default" else rope

    def norm(t, name):
        return t / (t.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weights[f"{name}.weight"]

    def linear(t, name):
        return F.linear(t, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    if "q_proj.weight" in weights:
        q = linear(x, "q_proj")
    else:
        q = linear(norm(linear(x, "q_a_proj"), "q_a_layernorm"), "q_b_proj")
    q = q.unflatten(-1, (num_heads, nope + rotary))
    latent, shared = linear(x, "kv_a_proj_with_mqa").split([sizes["kv_lora_rank"], rotary], -1)
    up = linear(norm(latent, "kv_a_layernorm"), "kv_b_proj").unflatten(-1, (num_heads, nope + v_dim))
    q_rope, k_rope = q[..., nope:], shared[:, None]
    if rope is not None:
        positions = torch.cat([torch.arange(n) for n in lengths])
        q_rope, k_rope = (oracle.rotate(t, positions, **rope) for t in (q_rope, k_rope))
    if scale is None:
        scaling = (rope or {}).get("scaling") or {}
        m = 0.1 * scaling.get("mscale_all_dim", 0) * math.log(scaling.get("factor", 1)) + 1
        scale = (nope + rotary) ** -0.5 * m * m
    outputs, first = [], 0
    for sequence, n in enumerate(lengths):
        own = slice(first, first + n)
        first += n
        heads = []
        for h in range(num_heads):
            scores = q[own, h, :nope] @ up[own, h, :nope].T + q_rope[own, h] @ k_rope[own, 0].T
            scores = scores * scale
            if attn_mask is not None:
                mask = attn_mask.expand(len(lengths), num_heads, n, n)[sequence, h]
                scores = scores.where(mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
            if causal:
                scores = scores.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), float("-inf"))
            heads.append(scores.softmax(-1) @ up[own, h, nope:])
        outputs.append(torch.cat(heads, -1))
    return linear(torch.cat(outputs), "o_proj")


def known(options):
    """The options that the reference knows."""
    names = ("num_heads", "causal", "rope", "scale", *SIZES)
    return {name: value for name, value in options.items() if name in names}


def dense(options, *call):
    """Output and gradients of the reference."""
    return attention_cases.dense(reference, known(options), *call)


def assert_dense(p, options, lengths, how, sp):
    """On p ranks output and all gradients are the reference's."""
    state = oracle.random_state(make(options))
    x, g = torch.randn(2, sum(lengths), HIDDEN, dtype=torch.float64)
    got = whole(ranks.run(layer_step, p, make, options, state, x, g, lengths, how, sp), sp)
    assert_near(got, dense(options, state, x, g, lengths))
