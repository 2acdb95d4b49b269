"""The fuzzer's configurations: plain dicts, drawn from a seed; and which of all dicts the library promises to take."""

import random

import tp_ext
from tp_ext.nn.attention.attention import head_parts
from tp_ext.nn.embedding import vocab_sharding

ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "silu", "swiglu", "geglu")


def draw(seed, ranks=(1, 2, 3, 4)):
    """The configuration of a seed. p is each of ``ranks`` in turn; every other one has no dropout, so that its
    reference model can be plain torch."""
    r = random.Random(seed)
    while not valid(config := _draw(r, seed, ranks)):
        pass
    return config


def _draw(r, seed, ranks):
    p = ranks[seed % len(ranks)]
    plain = seed // len(ranks) % 2 == 0
    sp, attention = r.random() < 0.5, r.random() < 0.6
    embedding = r.random() < 0.5
    hidden = r.randint(3, 9)
    layout = _layout(r, sp, attention, embedding)
    if r.random() < 0.03:
        layout["lengths"] = [0 for _ in layout["lengths"]]
    kinds = ["mlp", "pair", "gathered", "exchange"] + ["attention"] * 3 * attention
    blocks = [_block(r, r.choice(kinds), p, hidden, 0.0 if plain else 0.3) for _ in range(r.choice((1, 1, 1, 2, 2, 3)))]
    table = _vocabulary(r, p) if embedding else None
    for i, block in enumerate(blocks):
        if block["kind"] == "mlp":
            block["moe"] = _moe(random.Random(f"experts {seed} {i}"), layout, table)
        if block["kind"] == "attention":
            block |= _scores(random.Random(f"scores {seed} {i}"), layout, block["rope"])
            block["latent"] = _latent(random.Random(f"latent {seed} {i}"))
    head = _vocabulary(r, p) | {"bias": r.random() < 0.5, "tied": False} if r.random() < 0.6 else None
    if head and embedding and r.random() < 0.6:
        head |= {"tied": True, **table}
    return {
        "seed": seed,
        "p": p,
        "plain": plain,
        "sp": sp,
        "hidden": hidden,
        "layout": layout,
        "tell": r.random() < 0.3,
        "embedding": table,
        "input_grad": r.random() < 0.7,
        "strided": r.random() < 0.2,
        "blocks": blocks,
        "loops": 1 + (r.random() < 0.12),
        "norm": _norm(r),
        "head": head,
        "loss": _loss(r, head, p, random.Random(f"loss {seed}")) if head else None,
        "frozen": r.choice((0, 0, 30, 70)),
        "checkpointing": r.choice((None, None, "reentrant", "not")),
        "micro": 1 + (r.random() < 0.25),
        "backwards": 1 + (r.random() < 0.15),
        "steps": 5,
        "optimizer": {
            "kind": r.choice(("AdamW", "SGD")),
            "how": r.choice((None, "foreach", "fused", "for")),
            "momentum": r.random() < 0.5,
        },
        "clip": _clip(r) if r.random() < 0.7 else None,
        "made": r.choice((None, None, None, "deepcopy", "pickle", "meta")),
        "main_grad": r.random() < 0.2,
        "reload": r.random() < 0.15,
        "full_states": r.random() < 0.2,
        "coalesce": random.Random(-1 - seed).choice((None, "blocks", "model")),  # leaves the other draws as they were
    }


def _clip(r):
    return {
        "type": r.choice((1.0, 2.0, 3.5, "inf")),
        "max": r.choice((0.1, 1.0, 100.0)),
        "foreach": r.choice((None, True, False)),
        "bare": r.random() < 0.3,
    }


def _layout(r, sp, attention, embedding):
    if not attention and not (sp and embedding) and r.random() < 0.4:
        return {"how": "wide", "lengths": [r.randint(1, 7) for _ in range(r.randint(1, 3))], "tensor": False}
    how = r.choice(("tokens", "packed") if sp else ("batch", "tokens", "packed"))
    lengths = [r.randint(1, 6)] * r.randint(1, 3)
    if how == "packed":
        lengths = [r.choice((0, 1, 2, 3, 5)) for _ in range(r.randint(1, 4))]
        lengths[r.randrange(len(lengths))] = r.randint(1, 5)
    return {"how": how, "lengths": lengths, "tensor": how == "packed" and r.random() < 0.3}


def _norm(r):
    if r.random() < 0.25:
        return None
    kind = r.choice(("RMSNorm", "LayerNorm"))
    eps = r.choice((1e-2, 0.1))  # not smaller: 1 / sqrt(eps) is what rounding grows by where a row is almost zero
    return {"kind": kind, "eps": eps, "affine": r.random() < 0.85, "bias": r.random() < 0.7}


def _block(r, kind, p, hidden, dropout):
    parts = {
        "attention": _attention,
        "mlp": _mlp,
        "pair": _pair,
        "gathered": _gathered,
        "exchange": lambda r, p, dropout: {},
    }[kind](r, p, dropout)
    common = {"norm": _norm(r), "dropout": dropout * (r.random() < 0.7), "residual": r.random() < 0.7}
    return {"kind": kind, **common, **parts}


def _mlp(r, p, dropout):
    options = {"ffn": r.randint(1, 12), "activation": r.choice(ACTIVATIONS), "bias": r.random() < 0.6}
    return {**options, "gemm_epilogue": options["activation"] == "gelu_tanh" and options["bias"]}


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


def _scores(r, layout, rope):
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


def _latent(r):
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


def _moe(r, layout, embedding):
    """Experts in place of an MLP; None: the MLP."""
    if r.random() < 0.4:
        return None
    groups = r.choice((1, 1, 1, 2, 3))
    experts = groups * r.randint(1, 16 // groups)
    top_groups = r.randint(1, groups)
    equal = layout["how"] in ("batch", "tokens")  # sequences of one length
    return {
        "experts": experts,
        "top_k": r.randint(1, min(4, experts // groups * top_groups)),
        "num_groups": groups,
        "top_groups": top_groups,
        "scores": r.choice(("softmax", "sigmoid")),
        "normalize": r.random() < 0.6,
        "weights_sum": r.choice((1.0, 2.5)),
        "balance_loss": r.choice((0.0, 0.7)),
        "z_loss": r.choice((0.0, 0.3)),
        "balance_over": r.choice(("batch", "sequence")) if equal else "batch",
        "capacity": r.choice((None, None, 0.5, 1.0, 1.3)),
        "drop_order": r.choice(("token", "weight")) if embedding is None else "token",
        "shared_experts": r.choice((0, 0, 1, 2)),
        "attach": r.random() < 0.3,
    }


def _unit_parts(r, p, copies):
    """Parts, each of whole units; with groups, copies and padding where they may be."""
    parts = []
    for _ in range(r.randint(1, 3)):
        unit, part = r.choice((1, 1, 2, 3)), {}
        if p > 1 and r.random() < 0.3:
            part["groups"] = r.choice([g for g in range(1, p + 1) if p % g == 0])
        elif copies and p > 1 and r.random() < 0.4:
            part["copies"] = r.choice([c for c in range(1, p + 1) if p % c == 0])
        whole = unit * part.get("groups", 1)
        parts.append({"size": whole * r.randint(1, 4), "unit": unit, **part})
        if copies and r.random() < 0.2:
            parts[-1]["padding"] = whole * r.randint(1, 3)
    return parts


def _linears(r, p, copies):
    parts = _unit_parts(r, p, copies) if r.random() < 0.5 else None
    unit = 1 if parts else r.choice((1, 1, 2, 3))
    inner = sum(part["size"] for part in parts) if parts else unit * r.randint(1, 6)
    flags = {"column_bias": r.random() < 0.6, "row_bias": r.random() < 0.6, "twice": r.random() < 0.2}
    return {"inner": inner, "parts": parts, "unit": unit, **flags}


def _pair(r, p, dropout):
    return _linears(r, p, copies=False) | {f"{name}_skip": r.random() < 0.4 for name in ("column", "row")}


def _gathered(r, p, dropout):
    options = _linears(r, p, copies=True)
    cut = r.randint(0, options["inner"])
    row_parts = [{"size": size} for size in (cut, options["inner"] - cut) if size] if r.random() < 0.5 else None
    if row_parts and r.random() < 0.3:
        row_parts[0]["padding"] = r.randint(1, 5)
    return options | {"row_parts": row_parts}


def _vocabulary(r, p):
    return {"vocab": r.randint(max(p, 2), 17), "pad": r.choice((None, None, 1, 2, 4))}


def _loss(r, head, p, own):
    options = {
        "tell_vocab": not (head["pad"] is None and head["vocab"] % p == 0 and r.random() < 0.5),
        "ignore_index": r.choice((-100, 1)),
        "label_smoothing": r.choice((0.0, 0.1, 0.9)),
        "z_loss": r.choice((0.0, 0.05)),
        "reduction": r.choice(("mean", "sum", "none")),
        "inplace_backward": r.random() < 0.3,
    }
    # By head.loss, which keeps no logits that backward could overwrite, and knows its vocabulary
    without_logits = own.random() < 0.5 and options["tell_vocab"] and not options["inplace_backward"]
    return options | {"by_head": {"chunk_tokens": own.choice((None, 1, 2, 5))} if without_logits else None}


def valid(config):
    """True if the library promises to take it; the fuzzer does not try what it refuses."""
    p, layout, loss = config["p"], config["layout"], config["loss"]
    kinds = {block["kind"] for block in config["blocks"]}
    if not layout["lengths"]:
        return False
    if layout["how"] != "packed" and layout["how"] != "wide" and len(set(layout["lengths"])) > 1:
        return False
    if layout["how"] == "wide" and ("attention" in kinds or (config["sp"] and config["embedding"])):
        return False
    if layout["how"] == "batch" and config["sp"]:
        return False
    if bool(config["head"]) != bool(loss) or (config["head"] and config["head"]["tied"] and not config["embedding"]):
        return False
    for o in filter(None, (config["embedding"], config["head"])):
        if o["vocab"] < p:
            return False
        sharding = vocab_sharding(o["vocab"], p, o["pad"])
        if o is config["head"] and p > 1 and o["pad"] and sharding.local_size(0, p) >= o["vocab"]:
            return False  # could be gathered logits: refused
        if o is config["head"] and not loss["tell_vocab"] and (o["pad"] or o["vocab"] % p):
            return False
    if config["head"] and config["head"]["tied"]:
        table = config["embedding"]
        if any(table[name] != config["head"][name] for name in ("vocab", "pad")):
            return False
    if loss and loss["by_head"] and (loss["inplace_backward"] or not loss["tell_vocab"]):
        return False
    if config["backwards"] > 1 and ((loss and loss["inplace_backward"]) or config["checkpointing"]):
        return False
    if config["made"] == "meta" and config["head"] and config["head"]["tied"]:
        return False  # torch's to_empty unties
    for block in config["blocks"]:
        if not _valid_block(block, p, config) or (
            config["plain"] and (block["dropout"] or block.get("attention_dropout"))
        ):
            return False
    return True


def _valid_block(block, p, config):
    try:
        if block["kind"] == "attention":
            head_parts(block["heads"], block["kv_heads"], block["head_dim"], p)
            if block["mask"] and (config["layout"]["how"] == "packed" or 0 in config["layout"]["lengths"]):
                return False  # refused; torch takes no maximum of an empty gradient
            if block["mask"] and block["mask"] != "bool" and config["clip"] and config["clip"]["bare"]:
                return False  # a bare parameter that no module of tp_ext made
            if block["latent"]:
                tp_ext.RotaryEmbedding(block["latent"]["qk_rope_head_dim"], **(block["latent"]["rope"] or {}))
            if isinstance(block["rope"], dict):
                tp_ext.RotaryEmbedding(block["head_dim"], **block["rope"])
            elif block["rope"] is not None:
                tp_ext.RotaryEmbedding(block["head_dim"])
        if (o := block.get("moe")) is not None:
            if o["experts"] % o["num_groups"] or o["top_groups"] > o["num_groups"]:
                return False
            if o["top_k"] > o["experts"] // o["num_groups"] * o["top_groups"]:
                return False
            if o["drop_order"] == "weight" and config["embedding"]:
                return False  # tokens of one id have weights that are equal but for rounding
            if o["balance_over"] == "sequence" and config["layout"]["how"] not in ("batch", "tokens"):
                return False
        if "parts" in block:
            if block["twice"] and config["main_grad"]:
                return False  # such a weight has no main_grad
            if [] in (block["parts"], block.get("row_parts")):
                return False
            more = block.get("row_parts") or [{"size": block["inner"]}]
            for parts in (block["parts"] or [{"size": block["inner"], "unit": block["unit"]}], more):
                sharding = tp_ext.Sharding(0, [tp_ext.Part(**part) for part in parts])
                if sharding.size != block["inner"] or (block["parts"] and block["unit"] != 1):
                    return False
                sharding.local_sizes(p)
    except ValueError:
        return False
    return True
