"""Latent attention."""

import functools
import math

import torch
from torch import nn

import tp_ext
from tests.helpers.oracle import rotate
from tests.helpers.registry.attention import Attended, Attention, cached, lengths_of, rope_options
from tests.helpers.registry.bytes import AG, AR, BATCH, RS, SEQ, SP, E, H, N, S, Saved, Sent
from tests.helpers.registry.entries import HIDDEN, SEQUENCES, Case, Variant
from tests.helpers.registry.rules import Subject

WIDTHS = {"kv_lora_rank": 6, "qk_nope_head_dim": 3, "qk_rope_head_dim": 2, "v_head_dim": 3}
CASES = {
    "latent": Case(
        "ParallelLatentAttention",
        (HIDDEN,),
        {"num_heads": 4, "q_lora_rank": 5, "bias": True, **WIDTHS},
        call=SEQUENCES,
        collectives=(4, 11),
        # Both a shard of tokens of the key that all heads share and the keys of this rank's heads are V
        unseen=(7,),
        full_types=False,
    ),
}


ERRORS = [
    (
        "ParallelLatentAttention(8, 0, kv_lora_rank=6, qk_nope_head_dim=2, qk_rope_head_dim=2, v_head_dim=2, group=g)",
        ValueError,
        "num_heads: 0 must be",
    ),
    ("LatentKVCache(2, 0, 6, 2)", ValueError, "max_seq: 0 must be"),
    ("latent(g, num_heads=1)", ValueError, "num_heads: .*num_heads = 1, num_kv_heads = 1, p = 2"),
    ("latent(g, kv_lora_rank=0)", ValueError, "kv_lora_rank: 0 must be an integer of at least 1"),
    ("latent(g, q_lora_rank=0)", ValueError, "q_lora_rank: 0 must be"),
    ("latent(g, qk_rope_head_dim=3)", ValueError, "rotary_dim: 3 must be even"),
    ("latent(g, v_head_dim=2.0)", ValueError, "v_head_dim: 2.0 must be"),
    ("latent(g, rope=RotaryEmbedding(4))", ValueError, "rope: RotaryEmbedding.* must be a base or .* of 2, or None"),
    ("latent(g, dropout=1.0)", ValueError, "dropout: 1.0 must be a probability"),
    ("latent(g, scale=-1)", ValueError, "scale: -1 must be a finite number above 0, or None"),
    ("latent(g, bias=3)", TypeError, "bias: 3 must be True or False"),
    ("latent(g, norm_eps='small')", TypeError, "eps: 'small' must be a number"),
    ("latent(g).kv_a_proj_with_mqa(ones(()))", ValueError, r"x: shape \(\) must end in in_features = 8"),
    ("latent(g)(ones(1, 4, 7))", ValueError, r"x: shape \(1, 4, 7\) must end in in_features = 8"),
    ("latent(g, q_lora_rank=3)(ones(1, 4, 8).double())", TypeError, "x: dtype torch.float64 must be that of weight"),
    ("latent(g)(ones(4, 8))", ValueError, r"x: shape \(4, 8\).*exactly one of batch_size = None"),
    ("latent(g, **sp)(ones(1, 2, 8))", ValueError, r"x: shape \(1, 2, 8\) must be \[tokens_local, hidden\]"),
    ("latent(g)(ones(4, 8), batch_size=3)", ValueError, "batch_size: 3 must divide the number of tokens, 4"),
    ("latent(g)(ones(4, 8), cu_seqlens=[0, 3])", ValueError, r"cu_seqlens: \[0, 3\] must .* tokens, 4"),
    ("latent(g)(ones(1, 4, 8), attn_mask=ones(2, 4, 4))", ValueError, r"attn_mask: shape \(2, 4, 4\) must be"),
    ("latent(g, rope=None)(ones(1, 4, 8), cos_sin=(ones(4, 1),) * 2)", ValueError, "cos_sin: must not be given to a"),
]


SUBJECTS = {"LatentKVCache": Subject(cached("LatentKVCache", HIDDEN - 2, 2), (4, 1, HIDDEN))}


# Widths of rows of bytes; heads: 2 or more on each rank, of one the padded result is no copy
Q, C, NOPE, ROPE, V_HEAD, HEADS = 7, 6, 8, 4, 6, 12


def _of_bytes(**options):
    widths = {"kv_lora_rank": C, "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE, "v_head_dim": V_HEAD}
    return tp_ext.ParallelLatentAttention(H, HEADS, **widths, **options)


def _call(layer, x, **options):
    return layer(x, batch_size=BATCH, **options)


def _sent(forward, backward, **options):
    def make(g):
        layer = _of_bytes(group=g, **options)
        x = torch.randn(N // g.size() if "sequence_parallel" in options else N, H, requires_grad=True)
        return lambda: _call(layer, x)

    return Sent("ParallelLatentAttention", make, forward, backward)


def _decode(g):
    """One token more of each sequence."""
    layer, x = _of_bytes(group=g), torch.randn(BATCH, H)
    cache = layer.new_cache(BATCH, 8)
    return torch.no_grad()(lambda: _call(layer, x, cache=cache))


_LOW = {name: N * width * E for name, width in {"q": Q, "c": C, "rope": ROPE}.items()}
SENT = {
    "latent attention": _sent([(AR, S)], [(AR, _LOW["q"]), (AR, _LOW["c"]), (AR, _LOW["rope"])], q_lora_rank=Q),
    "latent attention without q_lora_rank": _sent([(AR, S)], [(AR, S), (AR, _LOW["c"]), (AR, _LOW["rope"])]),
    "latent attention sp": _sent(
        [(RS, S), (AG, _LOW["q"]), (AG, _LOW["c"]), (AG, _LOW["rope"])],
        [
            *[(AG, S), (RS, _LOW["q"]), (RS, _LOW["c"]), (RS, _LOW["rope"])],
            *[(AG, _LOW["q"]), (AG, _LOW["c"])],  # of the inputs again, for the gradients of the weights
            *[(AR, H * Q * E), (AR, H * (C + ROPE) * E), (AR, Q * E), (AR, C * E)],
        ],
        q_lora_rank=Q,
        **SP,
    ),
    "decode latent": Sent("LatentKVCache", _decode, [(AR, BATCH * H * E)]),
}


def _saved(**options):
    def count(z):
        a, q, wide = HEADS // z.p, options.get("q_lora_rank", 0), NOPE + ROPE
        total = z.n_sp * (z.h + 2 * q + 2 * C + ROPE) * z.e  # x; before and after their norms the latents, with k_rope
        total += 4 * z.n_sp * (2 if q else 1)  # a number per row of each norm
        total += z.n * a * (2 * wide + 2 * V_HEAD) * z.e  # q, k, v; the input of o_proj
        if options.get("dropout"):
            total += 2 * z.n * a * SEQ * z.e + SEQ * SEQ + 8
        else:
            total += 4 * z.n * a  # log-sum-exp, fp32
            total += z.n * a * (2 * wide - V_HEAD) * z.e  # on a CPU: v and the result as wide as the keys
        return total + (0 if "rope" in options else 4 * SEQ * ROPE)  # cos and sin, fp32

    return Saved("ParallelLatentAttention", lambda **o: _of_bytes(**options, **o), count, call=_call)


SAVED = {
    "latent attention": _saved(rope=None),
    "latent attention q_lora_rank": _saved(q_lora_rank=Q),
    "latent attention exact_dropout": _saved(q_lora_rank=Q, dropout=0.1),
}


class ParallelLatentAttention(Attended):
    def __init__(
        self,
        hidden,
        num_heads,
        *,
        kv_lora_rank,
        q_lora_rank=None,
        qk_nope_head_dim,
        qk_rope_head_dim,
        v_head_dim,
        bias=False,
        norm_eps=1e-6,
        causal=True,
        rope=10000.0,
        scale=None,
        dropout=0.0,
        dtype=None,
        device=None,
        **_cut,
    ):
        super().__init__()
        assert not dropout
        heads = self.heads = num_heads
        self.causal, self.rope = causal, rope_options(rope)
        self.sizes = qk_nope_head_dim, qk_rope_head_dim, v_head_dim
        self.rank, key, options = kv_lora_rank, qk_nope_head_dim + qk_rope_head_dim, {"dtype": dtype, "device": device}
        o = rope.scaling.options if getattr(rope, "scaling", None) else {}
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
        lengths, rows, (nope, rope, v_dim) = lengths_of(x, batch_size, cu_seqlens), x.flatten(0, -2), self.sizes
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


PLAIN = {"ParallelLatentAttention": ParallelLatentAttention}


def _latent(r, layout, embedding):
    """The sizes and positions of latent attention, in place of the other one's; None: the other one."""
    if r.random() < 0.7:
        return None
    rope = {"base": 10.0, "interleaved": r.random() < 0.7} if r.random() < 0.8 else None
    if rope and r.random() < 0.4:
        yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "beta_fast": 4.0}
        rope["scaling"] = yarn | {"beta_slow": 0.1, "truncate": False, "mscale": 0.7, "mscale_all_dim": 1.2}
    sizes = {"kv_lora_rank": r.randint(1, 6), "qk_nope_head_dim": r.randint(1, 4), "v_head_dim": r.randint(1, 7)}
    q_rank = r.randint(1, 6) if r.random() < 0.6 else None
    return {**sizes, "q_lora_rank": q_rank, "qk_rope_head_dim": r.choice((2, 2, 4)), "rope": rope}


def _make(o, config, place):
    sizes, kit = dict(o["latent"]), place.kit
    rope = sizes.pop("rope")
    return kit.ParallelLatentAttention(
        config["hidden"],
        o["heads"],
        **sizes,
        bias=o["out_bias"],
        norm_eps=1e-2,  # as _norm of config.py
        rope=rope and kit.RotaryEmbedding(sizes["qk_rope_head_dim"], **rope),
        dropout=o["attention_dropout"],
        **{name: o[name] for name in ("causal", "scale")},
        **place.linear,
    )


def _valid(options, p, config):
    tp_ext.RotaryEmbedding(options["qk_rope_head_dim"], **(options["rope"] or {}))
    return True


VARIANTS = {"latent": Variant("attention", _latent, functools.partial(Attention, make=_make), _valid)}
OFF = {"latent": None, "q_lora_rank": None}
