"""Attention."""

import torch
from torch import nn

import tp_ext
from tests.helpers.oracle import rotate
from tests.helpers.registry.bytes import AR, BATCH, SEQ, E, H, S, Saved, Sent
from tests.helpers.registry.entries import HIDDEN, SEQUENCES, Case, Kind
from tests.helpers.registry.rules import HEADS, TOKENS, Subject, key, module
from tp_ext.nn.attention.attention import head_parts

_SMALL = {"sizes": (HIDDEN, 4), "call": SEQUENCES, "full_types": False}
CASES = {
    "attention": Case("ParallelAttention", options={"rope": 100.0}, collectives=(2, 3), **_SMALL),
    "attention_mqa": Case(
        "ParallelAttention", options={"rope": 100.0, "num_kv_heads": 1, "qk_norm": True}, collectives=(4, 5), **_SMALL
    ),
    "attention_dropout": Case("ParallelAttention", options={"rope": 100.0, "dropout": 0.25}, dropout=True, **_SMALL),
}


ERRORS = [
    ("Attention(8, 3, group=g)", ValueError, "hidden_size: 8 must be a multiple of num_heads = 3"),
    ("attention(g, num_kv_heads=3)", ValueError, "num_kv_heads: .*num_heads = 4, num_kv_heads = 3, p = 2"),
    ("Attention(8, 1, group=g)", ValueError, "num_heads: .*num_heads = 1, num_kv_heads = 1, p = 2"),
    ("Attention(8, 2.0, group=g)", ValueError, "num_heads: 2.0 must be an integer"),
    ("attention(g, head_dim=0)", ValueError, "head_dim: 0 must be"),
    ("attention(g, dropout=1.0)", ValueError, r"dropout: 1.0 must be a probability, in \[0, 1\)"),
    ('attention(g, dropout="half")', ValueError, "dropout: 'half' must be"),
    ("attention(g, scale=0)", ValueError, "scale: 0 must be a finite number above 0, or None"),
    ("attention(g, softcap=-1.0)", ValueError, "softcap: -1.0 must be a finite number above 0, or None"),
    ("attention(g, softcap=True)", ValueError, "softcap: True must be"),
    ("attention(g, sliding_window=0)", ValueError, "sliding_window: 0 must be"),
    ("attention(g, sliding_window=1.5)", ValueError, "sliding_window: 1.5 must be"),
    (
        "attention(g)(ones(1, 4, 8), attn_mask=ones(4, 4).long())",
        TypeError,
        "attn_mask: dtype torch.int64 must be .*bool",
    ),
    ("attention(g)(ones(1, 4, 8), attn_mask=[1])", TypeError, r"attn_mask: \[1\] must be a tensor"),
    (
        "attention(g)(ones(1, 4, 8), attn_mask=ones(2, 4, 4))",  # this rank's heads
        ValueError,
        r"attn_mask: shape \(2, 4, 4\) must be broadcastable to .* = \[1, 4, 4, 4\]",
    ),
    ("attention(g)(ones(1, 4, 8), attn_mask=ones(1, 1, 1, 1, 1))", ValueError, r"attn_mask: shape \(1, 1, 1, 1, 1\)"),
    (
        "attention(g)(ones(4, 8), cu_seqlens=[0, 4], attn_mask=ones(4, 4))",
        ValueError,
        "attn_mask: must not be combined",
    ),
    ("attention(g, rope=True)", ValueError, "rope: True must be a base or a RotaryEmbedding"),
    ("attention(g, rope=RotaryEmbedding(4))", ValueError, "rope: RotaryEmbedding.*of 2"),
    ("attention(g, rope=-1.0)", ValueError, "base: -1.0 must be a finite number above 0"),
    ("attention(g)(ones(4, 8))", ValueError, r"x: shape \(4, 8\).*exactly one of batch_size = None"),
    ("attention(g)(ones(4, 8), batch_size=2, cu_seqlens=[0, 4])", ValueError, "x: .*exactly one of batch_size = 2"),
    ("attention(g)(ones(1, 4, 8), batch_size=1)", ValueError, r"x: shape \(1, 4, 8\)"),
    ("attention(g, **sp)(ones(2, 2, 8))", ValueError, r"x: shape \(2, 2, 8\) must be \[tokens_local, hidden\]"),
    ("attention(g)(ones(4, 8), batch_size=3)", ValueError, "batch_size: 3 must divide the number of tokens, 4"),
    ("attention(g)(ones(4, 8), batch_size=0)", ValueError, "batch_size: 0 must be"),
    ("attention(g, **sp)(ones(4, 8), batch_size=3)", ValueError, "batch_size: 3 must divide the number of tokens, 8"),
    ("attention(g)(ones(4, 8), cu_seqlens=[0, 3])", ValueError, r"cu_seqlens: \[0, 3\] must .* tokens, 4"),
    ("attention(g)(ones(4, 8), cu_seqlens=[0, 3, 2, 4])", ValueError, r"cu_seqlens: \[0, 3, 2, 4\] must rise"),
    ("attention(g)(ones(4, 8), cu_seqlens=[1, 4])", ValueError, r"cu_seqlens: \[1, 4\] must rise from 0"),
    ("attention(g)(ones(4, 8), cu_seqlens=[])", ValueError, r"cu_seqlens: \[\] must rise"),
    ("attention(g)(ones(4, 8), cu_seqlens=tensor([0.0, 4.0]))", TypeError, "cu_seqlens: .*must be integers"),
    ("attention(g)(ones(4, 8), cu_seqlens=tensor([[0, 4]]))", TypeError, "cu_seqlens: .*must be integers"),
    ("attention(g)(ones(2, 4, 7))", ValueError, r"x: shape \[2, 4, 7\] must end in the 8"),
    ("RotaryEmbedding(8, rotary_dim=3)", ValueError, "rotary_dim: 3 must be even and at most head_dim = 8"),
    ("RotaryEmbedding(8, rotary_dim=10)", ValueError, "rotary_dim: 10 must be even"),
    ("RotaryEmbedding(8, base=0)", ValueError, "base: 0 must be a finite number above 0"),
    ("RotaryEmbedding(8, interleaved=None)", TypeError, "interleaved: None must be True or False"),
    ("attention(g, qk_norm='yes')", TypeError, "qk_norm: 'yes' must be True or False"),
    ("attention(g, exact_dropout='no')", TypeError, "exact_dropout: 'no' must be True or False"),
    ('RotaryEmbedding("8")', ValueError, "head_dim: '8' must be"),
    ("RotaryEmbedding(8)(ones(4, 2, 8), ids[:3])", ValueError, r"positions: shape \(3,\) must be .*\(4,\)"),
    ("RotaryEmbedding(8)(ones(4, 2, 7), ids)", ValueError, r"x: shape \(4, 2, 7\) must be .*head_dim = 8"),
]


def cached(kind, *sizes):
    """Tokens in a cache of one sequence, ``[token, heads, features]`` of each of its buffers, and back."""

    def make(group):
        cache = getattr(tp_ext, kind)(1, 2 * TOKENS, *sizes).double()

        def f(x):
            with torch.no_grad():
                cache.to(x.dtype).reset().write([x[None]] * len(cache.contents))
            return torch.stack([getattr(cache, name)[0, :, : len(x)] for name in cache.contents])

        return f

    return make


def _layout(group):
    """Makes ``unshard`` of a layout of one sequence in contiguous shards, like those of ``torch.tensor_split``."""
    return tp_ext.ContextLayout([TOKENS], group=key(group), balance=False).unshard


SUBJECTS = {
    "KVCache": Subject(cached("KVCache", HEADS, HIDDEN), (TOKENS, HEADS, HIDDEN)),
    "RotaryEmbedding": Subject(module(lambda g: tp_ext.RotaryEmbedding(HIDDEN)), (TOKENS, HEADS, HIDDEN)),
    "ContextLayout": Subject(_layout, x_dim=0),
}


# Rows of bytes: a heads, k KV heads, of d features; all local

ALL_HEADS, HEAD = 12, 4


def _of_bytes(**options):
    return tp_ext.ParallelAttention(H, ALL_HEADS, head_dim=HEAD, **options)


def _attend(layer, x):
    return layer(x, batch_size=BATCH)


def _sent(g):
    layer, x = _of_bytes(group=g), torch.randn(BATCH * SEQ, H, requires_grad=True)
    return lambda: _attend(layer, x)


def _decode(g):
    """One token more of each sequence."""
    layer = _of_bytes(group=g)
    cache = layer.new_cache(BATCH, 8)
    x = torch.randn(BATCH, 1, H)
    return torch.no_grad()(lambda: layer(x, cache=cache))


def _rotate(g):
    rope, x = tp_ext.RotaryEmbedding(HEAD), torch.randn(SEQ, ALL_HEADS, HEAD, requires_grad=True)
    return lambda: rope(x, torch.arange(SEQ))


SENT = {
    "attention": Sent("ParallelAttention", _sent, [(AR, S)], [(AR, S)]),
    "decode": Sent("KVCache", _decode, [(AR, BATCH * H * E)]),
    "rotary": Sent("RotaryEmbedding", _rotate, []),
}


def _saved(**options):
    def count(z):
        a, d = ALL_HEADS // z.p, HEAD
        k = max(options.get("num_kv_heads", ALL_HEADS) // z.p, 1)
        total = z.n_sp * z.h * z.e  # the input of qkv
        total += z.n * (a + 2 * k) * d * z.e  # q, k, v: one storage; behind RoPE, q|k and v
        total += z.n * a * d * z.e  # the input of out
        if options.get("softcap"):
            total += z.n * a * SEQ * z.e  # tanh
        if options.get("dropout"):
            total += z.n * a * SEQ * z.e + 8  # what dropout leaves of the softmax, seed
        if options.get("softcap") or options.get("dropout"):
            total += z.n * a * SEQ * z.e + SEQ * SEQ  # softmax, bool mask
        else:
            total += 4 * z.n * a  # log-sum-exp, fp32
            total += SEQ * SEQ * z.e if options.get("sliding_window") else 0  # mask, as torch adds it
        if options.get("qk_norm"):
            total += z.n * (a + k) * (d * z.e + 4)  # q and k before and after their norm; a number per row
        if options.get("rope"):
            total += 4 * SEQ * d  # cos and sin, fp32, d / 2 each, of one sequence
        return total

    return Saved("ParallelAttention", lambda **o: _of_bytes(**options, **o), count, call=_attend)


SAVED = {
    "attention": _saved(),
    "attention gqa": _saved(num_kv_heads=4),
    "attention mqa": _saved(num_kv_heads=1),
    "attention rope": _saved(rope=1e4),
    "attention gqa_rope": _saved(num_kv_heads=4, rope=1e4),
    "attention qk_norm": _saved(num_kv_heads=4, qk_norm=True),
    "attention qk_norm_rope": _saved(num_kv_heads=4, qk_norm=True, rope=1e4),
    "attention window": _saved(sliding_window=3),
    "attention window_gqa": _saved(num_kv_heads=4, sliding_window=3),
    "attention softcap": _saved(softcap=2.0),
    "attention softcap_gqa_dropout": _saved(num_kv_heads=4, softcap=2.0, dropout=0.1),
    "attention exact_dropout": _saved(dropout=0.1),
    "attention exact_dropout_gqa": _saved(num_kv_heads=4, dropout=0.1),
    "attention exact_dropout_rope": _saved(dropout=0.1, rope=1e4),
    "rotary": Saved(
        "RotaryEmbedding",
        lambda **_: tp_ext.RotaryEmbedding(HEAD),
        lambda z: 4 * SEQ * HEAD,  # cos and sin, fp32
        call=lambda rope, x: rope(x[:1].expand(SEQ, H).unflatten(-1, (-1, HEAD)), torch.arange(SEQ)),
    ),
}


def lengths_of(x, batch_size, cu_seqlens):
    if x.dim() == 3:
        return [x.shape[1]] * x.shape[0]
    if batch_size is not None:
        return [x.shape[0] // batch_size] * batch_size
    return torch.as_tensor(cu_seqlens).diff().tolist()


def rope_options(rope):
    """The arguments of ``rotate``, of a RotaryEmbedding or its base."""
    if rope is None or isinstance(rope, float):
        return rope and {"base": rope}
    options = {name: getattr(rope, name) for name in ("base", "interleaved", "rotary_dim")}
    if rope.scaling is not None:
        options["scaling"] = {"rope_type": rope.scaling.kind, **rope.scaling.options}
    return options


class Attended(nn.Module):
    """Attention of q, k, v, by causal, scale, window and softcap."""

    causal, scale, window, softcap = True, 1.0, None, None

    def attended(self, q, k, v, lengths, mask):
        sequences = zip(*(t.transpose(0, 1).split(lengths, 1) for t in (q, k, v)), strict=True)
        y = [self._sequence(*qkv, mask) for qkv in sequences]
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


class ParallelAttention(Attended):
    def __init__(
        self,
        hidden,
        heads,
        *,
        num_kv_heads=None,
        head_dim=None,
        qkv_bias=True,
        out_bias=True,
        causal=True,
        rope=None,
        qk_norm=False,
        scale=None,
        sliding_window=None,
        softcap=None,
        dropout=0.0,
        dtype=None,
        device=None,
        **_cut,
    ):
        super().__init__()
        assert not dropout
        head_dim, num_kv_heads = head_dim or hidden // heads, num_kv_heads or heads
        self.heads, self.kv_heads, self.head_dim, self.causal = heads, num_kv_heads, head_dim, causal
        self.scale, self.window, self.softcap = scale or head_dim**-0.5, sliding_window, softcap
        self.rope = rope_options(rope)
        self.qkv = nn.Linear(hidden, (heads + 2 * num_kv_heads) * head_dim, qkv_bias, dtype=dtype, device=device)
        self.out = nn.Linear(heads * head_dim, hidden, out_bias, dtype=dtype, device=device)
        self.q_norm, self.k_norm = (
            nn.RMSNorm(head_dim, 1e-6, dtype=dtype, device=device) if qk_norm else nn.Identity() for _ in "qk"
        )

    def forward(self, x, *, batch_size=None, cu_seqlens=None, total_tokens=None, attn_mask=None):
        lengths = lengths_of(x, batch_size, cu_seqlens)
        heads = self.qkv(x.flatten(0, -2)).unflatten(-1, (-1, self.head_dim))
        q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads], 1)
        q, k = self.q_norm(q), self.k_norm(k)
        if self.rope is not None and q.numel():
            positions = torch.cat([torch.arange(n) for n in lengths])
            q, k = rotate(q, positions, **self.rope), rotate(k, positions, **self.rope)
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, 1) for t in (k, v))
        return self.out(self.attended(q, k, v, lengths, attn_mask)).view(x.shape)


PLAIN = {"ParallelAttention": ParallelAttention}


def draw_scores(r, layout, rope):
    """Options of an attention between its scores and their softmax, from draws of their own."""
    context = {"original_max_position_embeddings": r.choice((2, 8))}
    kinds = {
        "linear": {},
        "ntk": {},
        "dynamic": context,
        "llama3": {**context, "low_freq_factor": 0.5, "high_freq_factor": 2.0},
        "yarn": {**context, "beta_fast": 4.0, "beta_slow": 0.1, "truncate": r.random() < 0.5},
    }
    if isinstance(rope, dict) and r.random() < 0.8:
        names = [*kinds, "ntk", "ntk", "dynamic"] if rope["rotary_dim"] > 2 else ["linear", "llama3", "yarn"]
        rope["scaling"] = {"rope_type": (name := r.choice(names)), "factor": r.choice((1.0, 4.0)), **kinds[name]}
    masks = (None, None, "bool", "learned", "learned_per_head", "learned_per_key")
    return {
        "scale": r.choice((None, None, 0.5, 2.0)),
        "sliding_window": r.choice((None, None, 1, 2, 3, 9)),
        "softcap": r.choice((None, None, None, 0.5, 20.0)),
        "mask": None if layout["how"] == "packed" else r.choice(masks),
    }


def _attention(r, p, dropout):
    allowed = [
        (kv * group, kv)
        for kv in range(1, 5)
        for group in range(1, max(5, p + 1))
        if kv * group <= max(8, p + 2) and kv * group >= p and (kv >= p or p % kv == 0)
    ]
    few = [pair for pair in allowed if pair[1] < p]
    heads, kv_heads = r.choice(few if few and r.random() < 0.5 else allowed)
    head_dim = r.choice((2, 3, 4, 6))
    rope = None
    if r.random() < 0.6:
        rope = {"base": r.choice((10000.0, 10.0)), "interleaved": r.random() < 0.5}
        rope["rotary_dim"] = 2 if head_dim % 2 or r.random() < 0.3 else head_dim
        rope = 100.0 if head_dim % 2 == 0 and r.random() < 0.2 else rope
    return {
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "rope": rope,
        "attention_dropout": dropout * (r.random() < 0.6),
        **{name: r.random() < 0.5 for name in ("qkv_bias", "out_bias", "causal", "qk_norm")},
    }


def _make(o, config, place):
    kit = place.kit
    rope = kit.RotaryEmbedding(o["head_dim"], **o["rope"]) if isinstance(o["rope"], dict) else o["rope"]
    names = ("head_dim", "qkv_bias", "out_bias", "causal", "qk_norm", "scale", "sliding_window", "softcap")
    return kit.ParallelAttention(
        config["hidden"],
        o["heads"],
        num_kv_heads=o["kv_heads"],
        rope=rope,
        dropout=o["attention_dropout"],
        **{name: o[name] for name in names},
        **place.linear,
    )


class Attention(nn.Module):
    """An attention, by ``make``, with the lengths of the configuration and a mask."""

    def __init__(self, options, config, place, make=_make):
        super().__init__()
        o = options
        self.attention = make(o, config, place)
        layout = config["layout"]
        lengths, self.call = layout["lengths"], {}
        ends = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
        if layout["how"] == "tokens":
            self.call["batch_size"] = len(lengths)
        elif layout["how"] == "packed":
            self.call["cu_seqlens"] = torch.tensor(ends, dtype=torch.int32) if layout["tensor"] else ends
        self.call |= place.tell
        self.seq, learned = lengths[0], o["mask"] and o["mask"].startswith("learned")
        self.bool_mask = o["mask"] == "bool"
        shape = (
            o["heads"] if o["mask"] == "learned_per_head" else 1,
            1 if o["mask"] == "learned_per_key" else self.seq,
        )
        parallel = {name: place.parallel[name] for name in ("dtype", "device") if name in place.parallel}
        self.mask = nn.Parameter(torch.zeros(*shape, self.seq, **parallel)) if learned else None

    def forward(self, x):
        mask = self.mask
        if self.bool_mask:  # some query of it may attend to nothing
            mask = torch.rand(self.seq, self.seq, generator=torch.Generator().manual_seed(self.seq)) < 0.6
        return self.attention(x, **self.call, **({} if mask is None else {"attn_mask": mask})), None


def _valid(options, p, config):
    head_parts(options["heads"], options["kv_heads"], options["head_dim"], p)
    if options["mask"] and (config["layout"]["how"] == "packed" or 0 in config["layout"]["lengths"]):
        return False  # refused; torch takes no maximum of an empty gradient
    if options["mask"] and options["mask"] != "bool" and config["clip"] and config["clip"]["bare"]:
        return False  # a bare parameter that no module of tp_ext made
    if options["rope"] is not None:
        tp_ext.RotaryEmbedding(options["head_dim"], **(options["rope"] if isinstance(options["rope"], dict) else {}))
    return not (config["plain"] and options["attention_dropout"])


KINDS = {"attention": Kind(_attention, Attention, _valid)}
OFF = {
    "scale": None, "sliding_window": None, "softcap": None, "mask": None, "scaling": None, "rope": None,
    "qk_norm": False, "causal": False, "qkv_bias": False, "out_bias": False, "attention_dropout": 0.0,
}  # fmt: skip
