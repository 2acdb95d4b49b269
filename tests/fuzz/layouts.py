"""The fuzzer's layouts of whole trainings: plain dicts, drawn from a seed; which of all dicts the library promises to
take; and a table of layouts of one training.

A dict has the ``model``, the ``batch`` that all ranks together see in a step, which one process can train with as well,
and the ``layout``: the mesh, the schedule and what else must not change a number.
"""

import itertools
import math
import random

from tp_ext.parallel.schedules import SCHEDULES, check_microbatches, number_of_stages_per_rank
from tp_ext.sharding import head_parts

AXES = ("pp", "dp", "ep", "cp", "tp")
NUMBERS = (2, 4, 8, 3, 2, 4, 6, 1)  # of ranks, in turn
PLAIN = {  # the simplest value of the options of a layout, but for mesh and schedule
    "zero": 0,
    "offload": False,
    "recompute": None,
    "sp": False,
    "context": "ring",
    "how": "tokens",
    "layout": True,
    "reduction": "sum",
    "meta": True,
}
DENSE = {"experts": 0, "top_k": 1, "shared_experts": 0, "balance_loss": 0.0, "z_loss": 0.0, "capacity": None}
"""The options of experts of a model without them."""


def draw(seed):
    """The configuration of a seed."""
    r = random.Random(f"layout {seed}")
    while not valid(config := _draw(r, seed, NUMBERS[seed % len(NUMBERS)])):
        pass
    with_experts = _with_experts(random.Random(f"experts {seed}"), config)
    return with_experts if valid(with_experts) else config


def _with_experts(r, config):
    """Replaces the MLPs by experts in half of the configurations; in some of these over an axis ep."""
    if r.random() < 0.5:
        return config
    model, batch, layout = (dict(config[name]) for name in ("model", "batch", "layout"))
    model["experts"], model["top_k"] = (experts := r.randint(1, 6)), r.randint(1, min(experts, 3))
    model["shared_experts"] = r.choice((0, 0, 1))
    whole_rows = not batch["packed"] and layout["cp"] == 1
    model["balance_loss"] = r.choice((0.0, 0.5)) if not batch["packed"] else 0.0
    model["z_loss"] = r.choice((0.0, 0.1))
    model["capacity"] = r.choice((None, 0.7, 1.3)) if whole_rows and layout["pp"] == 1 else None
    if model["capacity"] is not None:
        layout["microbatches"] = 1
    ep = r.choice([n for n in range(2, layout["dp"] + 1) if layout["dp"] % n == 0] or [1])
    layout["dp"], layout["ep"] = layout["dp"] // ep, ep
    if ep > 1 and layout["zero"] == 1:
        layout["zero"] = r.choice((0, 2, 3))
    return config | {"model": model, "layout": layout}


def _draw(r, seed, ranks):
    sizes = r.choice([s for s in itertools.product(range(1, ranks + 1), repeat=4) if math.prod(s) == ranks])
    pp, dp, cp, tp = sizes
    zero, packed, rows = r.choice((0, 1, 2, 3)), r.random() < 0.4, r.choice((1, 1, 2, 3))
    schedule = r.choice((None, *SCHEDULES)) if pp > 1 else None
    microbatches = r.choice((1, 2, 2, 3, 4, 6))
    sp = r.random() < 0.5
    kv_heads = r.choice((1, 1, 2, 3))
    stages = pp * (number_of_stages_per_rank(SCHEDULES[schedule or "1F1B"], None) if pp > 1 else 1)
    rows = 1 if packed else rows
    return {
        "seed": seed,
        "steps": 5,
        "model": {
            "hidden": r.randint(5, 12),
            "heads": kv_heads * r.choice((1, 2, 3, 4, 8)),
            "kv_heads": kv_heads,
            "head_dim": r.choice((2, 4)),
            "ffn": r.randint(1, 12),
            "vocab": r.randint(8, 19),
            "blocks": stages + r.choice((0, 0, 1, 2)),
            "activation": r.choice(("gelu", "gelu_tanh", "silu", "swiglu")),
            "norm": r.choice(("RMSNorm", "LayerNorm")),
            "rope": r.random() < 0.7,
            "qk_norm": r.random() < 0.3,
            "bias": r.random() < 0.5,
            "causal": r.random() < 0.8,
            "sliding_window": r.choice((None, None, 3)),
            "tied": r.random() < 0.6,
            "dropout": r.choice((0.0, 0.2, 0.2)),
            "attention_dropout": r.choice((0.0, 0.2, 0.2)),
            "frozen": r.random() < 0.2,
            **DENSE,
        },
        "batch": {
            "rows": dp * microbatches * rows,
            "seq": r.randint(2, 12),
            "packed": packed,
            "ignored": r.choice(("few", "many")),
        },
        "clip": r.choice((0.05, 1.0, 100.0)),
        "accumulate": random.Random(-1 - seed).choice((1, 1, 2)),  # steps of an update; leaves the other draws
        "layout": {
            **dict(zip(AXES, (pp, dp, 1, cp, tp), strict=True)),
            "schedule": schedule,
            "microbatches": microbatches,
            "zero": zero,
            "offload": zero > 1 and r.random() < 0.4,
            "recompute": r.choice((None, "full", "selective")),
            "sp": sp,
            "context": r.choice(("ring", "all_gather", "ulysses")),
            "how": r.choice(("flat", "tokens", "wide")),
            "layout": packed or r.random() < 0.6,
            "reduction": r.choice(("mean", "sum")),
            "meta": r.random() < 0.7,
        },
    }


def valid(config):
    """Returns whether the library supports the configuration; the fuzzer does not try others."""
    model, batch, layout = config["model"], config["batch"], config["layout"]
    pp, dp, ep, cp, tp = (layout[axis] for axis in AXES)
    each, rest = divmod(batch["rows"], dp * ep * layout["microbatches"])
    if rest or each < 1 or (batch["packed"] and each != 1):
        return False
    if not _heads(model, layout) or model["vocab"] < tp:
        return False
    if batch["seq"] < cp:
        return False  # a rank without tokens
    if layout["offload"] and layout["zero"] < 2:
        return False
    if layout["zero"] > 1 and model["ffn"] < tp:
        return False  # an empty shard
    if ep > max(model["experts"], 1) or (ep > 1 and layout["zero"] == 1):
        return False
    if ep > 1 and layout["zero"] > 1 and layout["recompute"] == "selective":
        return False
    if model["balance_loss"] and batch["packed"]:
        return False  # sequences are rows
    if model["capacity"] is not None and (batch["packed"] or cp > 1 or layout["microbatches"] > 1):
        return False  # a batch is that of a microbatch, and its order that of rows
    # A mean over no token is none; at most one token of a row is ignored where few are
    if layout["reduction"] == "mean" and (batch["ignored"] != "few" or batch["seq"] // cp < 2):
        return False
    if (batch["packed"] or cp > 1 or layout["how"] == "flat") and not layout["layout"]:
        return False  # dim 0 of the input alone does not say where a token is in the batch
    if layout["how"] == "wide" and layout["sp"]:
        return False
    if pp == 1:
        return layout["schedule"] is None
    schedule = SCHEDULES[layout["schedule"] or "1F1B"]
    stages = pp * number_of_stages_per_rank(schedule, None)
    if model["blocks"] < stages or (schedule.splits and layout["recompute"]):
        return False
    return _takes(check_microbatches, schedule, layout["microbatches"], pp, stages)


def _heads(model, layout):
    """Returns whether the heads can be sharded over ``tp`` and, with Ulysses, the heads of each rank over ``cp``."""
    heads, kv_heads, tp, cp = model["heads"], model["kv_heads"], layout["tp"], layout["cp"]
    if not _takes(head_parts, heads, kv_heads, 1, tp):
        return False
    if layout["context"] != "ulysses" or cp == 1:
        return True
    spans = ([part.span(rank, tp) for part in head_parts(heads, kv_heads, 1, tp)] for rank in range(tp))
    return all(_takes(head_parts, *(last - first for first, last in parts), 1, cp) for parts in spans)


def _takes(check, *args):
    try:
        check(*args)
    except ValueError:
        return False
    return True


def _listed(sizes, microbatches, packed=False, ep=1, experts=None, **layout):
    """One of the table: the same training, of 8 rows, cut in another way."""
    return {
        "seed": 0,
        "steps": 20,
        "model": {
            "hidden": 11,
            "heads": 4,
            "kv_heads": 1,
            "head_dim": 4,
            "ffn": 10,
            "vocab": 13,
            "blocks": 4,
            "activation": "swiglu",
            "norm": "RMSNorm",
            "rope": True,
            "qk_norm": False,
            "bias": True,
            "causal": True,
            "sliding_window": None,
            "tied": True,
            "dropout": 0.2,
            "attention_dropout": 0.2,
            "frozen": False,
            **DENSE,
            **(experts or {}),
        },
        "batch": {"rows": 8, "seq": 11, "packed": packed, "ignored": "many"},
        "clip": 0.3,
        "accumulate": 1,
        "layout": {
            **dict(zip(AXES, (*sizes[:2], ep, *sizes[2:]), strict=True)),
            "schedule": None,
            "microbatches": microbatches,
            **PLAIN,
            **layout,
        },
    }


MIXTURE = {"experts": 5, "top_k": 2, "shared_experts": 1, "balance_loss": 0.3, "z_loss": 0.1}
LISTED = {
    "tp2": _listed((1, 1, 1, 2), 4, sp=True, recompute="full"),
    "dp2": _listed((1, 2, 1, 1), 2, layout=False),
    "dp2 offload": _listed((1, 2, 1, 1), 2, zero=3, offload=True, recompute="full"),
    "dp4 packed": _listed((1, 4, 1, 1), 2, packed=True, zero=1),
    "dp8": _listed((1, 8, 1, 1), 1, zero=3),
    "dp2 tp2": _listed((1, 2, 1, 2), 2, zero=1, sp=True, recompute="selective"),
    "dp2 tp2 packed": _listed((1, 2, 1, 2), 4, packed=True, zero=2, sp=True),
    "dp2 tp4": _listed((1, 2, 1, 4), 4, packed=True, zero=2, sp=True, recompute="full"),
    "dp4 tp2": _listed((1, 4, 1, 2), 1, zero=1, sp=True),
    "cp2 packed": _listed((1, 1, 2, 1), 8, packed=True, zero=3),
    "cp2 tp2": _listed((1, 1, 2, 2), 4, sp=True, context="ulysses"),
    "cp2 tp4": _listed((1, 1, 2, 4), 2, sp=True),
    "dp2 cp2": _listed((1, 2, 2, 1), 4, zero=2, offload=True, context="all_gather"),
    "dp2 cp2 tp2": _listed((1, 2, 2, 2), 4, packed=True, zero=3, sp=True, context="all_gather", recompute="selective"),
    "pp2": _listed((2, 1, 1, 1), 4, recompute="full"),
    "pp4": _listed((4, 1, 1, 1), 4, schedule="1F1B", recompute="selective"),
    "pp2 tp2": _listed((2, 1, 1, 2), 8, packed=True, schedule="GPipe", sp=True),
    "pp2 tp2 halves": _listed((2, 1, 1, 2), 4, schedule="ZBVZeroBubble", sp=True),
    "pp2 tp4": _listed((2, 1, 1, 4), 8, packed=True, schedule="DualPipeV", sp=True),
    "pp4 tp2": _listed((4, 1, 1, 2), 4, schedule="GPipe", sp=True, recompute="full"),
    "pp2 dp2": _listed((2, 2, 1, 1), 4, schedule="DualPipeV", zero=2, offload=True),
    "pp2 dp2 tp2": _listed((2, 2, 1, 2), 4, packed=True, zero=2, offload=True, sp=True, recompute="full"),
    "pp2 dp2 tp2 halves": _listed((2, 2, 1, 2), 2, schedule="InterleavedZeroBubble", zero=3, sp=True),
    "pp2 cp2": _listed((2, 1, 2, 1), 8, packed=True, schedule="LoopedBFS", zero=2),
    "pp2 cp2 tp2": _listed((2, 1, 2, 2), 4, schedule="ZBVZeroBubble", zero=3, sp=True, context="ulysses"),
    "ep2": _listed((1, 1, 1, 1), 2, ep=2, experts=MIXTURE, zero=3),
    "dp2 ep2": _listed((1, 2, 1, 1), 2, ep=2, experts=MIXTURE),
    "ep2 cp2": _listed((1, 1, 2, 1), 2, ep=2, experts=MIXTURE, zero=2),
    "ep2 tp2": _listed((1, 1, 1, 2), 4, ep=2, experts=MIXTURE, sp=True, recompute="full"),
    "ep4 tp2": _listed((1, 1, 1, 2), 2, ep=4, experts=MIXTURE, zero=2),
    "pp2 ep2": _listed((2, 1, 1, 1), 4, ep=2, experts=MIXTURE, schedule="ZBVZeroBubble"),
    "pp2 dp2 ep2": _listed((2, 2, 1, 1), 2, ep=2, experts=MIXTURE, zero=2),
    "pp2 dp2 cp2": _listed((2, 2, 2, 1), 4, packed=True, schedule="Interleaved1F1B", zero=1, recompute="full"),
}
