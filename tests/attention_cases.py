"""The attentions that are tested, and how their input comes."""

import torch

from tp_ext import ParallelAttention, RotaryEmbedding

HIDDEN, HEAD = 10, 4
HALF, INTERLEAVED, PARTIAL = {}, {"interleaved": True, "base": 100.0}, {"rotary_dim": 2}
CASES = {
    "mha": {"num_heads": 4},
    "gqa": {"num_heads": 8, "num_kv_heads": 4},
    "gqa_2_kv": {"num_heads": 8, "num_kv_heads": 2},
    "gqa_6_heads_2_kv": {"num_heads": 6, "num_kv_heads": 2},
    "mqa": {"num_heads": 4, "num_kv_heads": 1},
    "mqa_5_heads": {"num_heads": 5, "num_kv_heads": 1},
    "uneven_5_heads": {"num_heads": 5},
    "rope": {"num_heads": 4, "rope": HALF},
    "rope_interleaved": {"num_heads": 4, "num_kv_heads": 2, "rope": INTERLEAVED},
    "rope_partial": {"num_heads": 4, "num_kv_heads": 1, "rope": PARTIAL},
    "qk_norm": {"num_heads": 6, "num_kv_heads": 2, "qk_norm": True},
    "no_bias": {"num_heads": 4, "num_kv_heads": 2, "bias": False},
    "qkv_bias": {"num_heads": 6, "num_kv_heads": 2, "bias": False, "qkv_bias": True},
    "out_bias": {"num_heads": 4, "out_bias": True, "bias": False},
    "not_causal": {"num_heads": 4, "causal": False},
    "all": {"num_heads": 6, "num_kv_heads": 2, "qk_norm": True, "rope": INTERLEAVED},
}
PACKED = [5, 0, 3, 1, 2]
LAYOUTS = {  # the lengths of the sequences, how they come, sequence parallelism
    "batch": ([5, 5], "batch", False),
    "tokens": ([5, 5], "tokens", False),
    "packed": (PACKED, "packed", False),
    "packed_tensor": (PACKED, "packed_tensor", False),
    "sp_tokens": ([4, 4, 4], "tokens", True),  # 2, 3 and 4 divide the tokens
    "sp_tokens_uneven": ([5, 5], "tokens", True),
    "sp_packed_uneven": (PACKED, "packed", True),
}


def fits(case, p):
    kv = case.get("num_kv_heads", case["num_heads"])
    return case["num_heads"] >= p and (kv >= p or p % kv == 0)


def make(options, group=None, **more):
    options = {"head_dim": HEAD, "dtype": torch.float64} | options | more
    if isinstance(options.get("rope"), dict):
        options["rope"] = RotaryEmbedding(options["head_dim"], **options["rope"])
    return ParallelAttention(options.pop("hidden_size", HIDDEN), **options, group=group)


def call(module, x_full, lengths, how):
    """The module's output of its share of x_full [tokens, hidden], and that share."""
    _, p, rank = module.tp_group
    x = x_full.clone()
    if module.sequence_parallel:
        x = x.tensor_split(p)[rank].clone()
    if how == "batch":
        x = x.unflatten(0, (len(lengths), -1))
    x.requires_grad_()
    ends = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    options = {
        "batch": {},
        "tokens": {"batch_size": len(lengths)},
        "packed": {"cu_seqlens": ends},
        "packed_tensor": {"cu_seqlens": torch.tensor(ends, dtype=torch.int32)},
    }[how]
    if module.sequence_parallel and len(x_full) % p:
        options["total_tokens"] = len(x_full)
    return module(x, **options), x
