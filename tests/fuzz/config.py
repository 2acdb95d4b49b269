"""The fuzzer's configurations: plain dicts, drawn from a seed; and which of all dicts the library promises to take."""

import random

from tests.helpers import registry
from tests.helpers.registry.attention import draw_scores
from tests.helpers.registry.norms import draw_norm
from tests.helpers.registry.vocabulary import draw_loss, draw_vocabulary
from tp_ext.nn.embedding import vocab_sharding


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
    table = draw_vocabulary(r, p) if embedding else None
    for i, block in enumerate(blocks):
        if block["kind"] == "attention":
            block |= draw_scores(random.Random(f"scores {seed} {i}"), layout, block["rope"])
        variants = {name: v for name, v in registry.VARIANTS.items() if v.of == block["kind"]}
        block |= {name: v.draw(random.Random(f"{name} {seed} {i}"), layout, table) for name, v in variants.items()}
    head = draw_vocabulary(r, p) | {"bias": r.random() < 0.5, "tied": False} if r.random() < 0.6 else None
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
        "norm": draw_norm(r),
        "head": head,
        "loss": draw_loss(r, head, p, random.Random(f"loss {seed}")) if head else None,
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


def _block(r, kind, p, hidden, dropout):
    options = registry.KINDS[kind].draw(r, p, dropout)
    common = {"norm": draw_norm(r), "dropout": dropout * (r.random() < 0.7), "residual": r.random() < 0.7}
    return {"kind": kind, **common, **options}


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
    return all(_valid_block(block, p, config) for block in config["blocks"])


def _valid_block(block, p, config):
    if config["plain"] and block["dropout"]:
        return False
    try:
        variants = (v.valid(block[name], p, config) for name, v in registry.VARIANTS.items() if block.get(name))
        return registry.KINDS[block["kind"]].valid(block, p, config) and all(variants)
    except ValueError:
        return False
