"""The attentions that are tested, how their input comes, and the comparison with attention written out head by head."""

import torch

import tp_ext
from tests.helpers import oracle, ranks
from tests.helpers.oracle import gathered, local_grads
from tp_ext import ParallelAttention, RotaryEmbedding

HIDDEN, HEAD = 10, 4
HALF, INTERLEAVED, PARTIAL = {}, {"interleaved": True, "base": 100.0}, {"rotary_dim": 2}
YARN = {"base": 100.0, "scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}}
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
    "window": {"num_heads": 5, "sliding_window": 2, "scale": 0.7, "rope": YARN},
    "window_not_causal": {"num_heads": 4, "num_kv_heads": 2, "causal": False, "sliding_window": 2},
    "softcap": {"num_heads": 6, "num_kv_heads": 2, "softcap": 1.5, "sliding_window": 3, "scale": 0.7},
    "all": {"num_heads": 6, "num_kv_heads": 2, "qk_norm": True, "rope": INTERLEAVED},
}
KNOWN = ("num_heads", "num_kv_heads", "causal", "rope", "scale", "sliding_window", "softcap")  # to the reference
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


def layer_step(group, make, options, state, x, g, lengths, how, sp):
    """On one rank: output and gradients of the layer that ``make`` builds with the weights of ``state``."""
    module = make(options, group, sequence_parallel=sp)
    tp_ext.load_full_state_dict(module, state, group=group)
    y, x = call(module, x, lengths, how)
    own = g.tensor_split(group.size())[group.rank()] if sp else g
    y.backward(own.view(y.shape))
    return y.flatten(0, -2), x.grad.flatten(0, -2), local_grads(module), dict(tp_ext.shardings(module))


def whole(results, sp):
    """From what `layer_step` returned on each rank: {"y", "dx", names of parameters: gradients}, full."""
    ys, dxs, grads, tables = zip(*results, strict=True)
    if not sp:
        assert all(torch.equal(y, ys[0]) and torch.equal(dx, dxs[0]) for y, dx in zip(ys, dxs, strict=True))
    y, dx = (torch.cat(ts) if sp else ts[0] for ts in (ys, dxs))
    return {"y": y, "dx": dx} | gathered(grads, tables[0])


def dense(reference, known, state, x, g, lengths):
    """Output and gradients of the reference in fp64, as :func:`whole` names them."""
    leaf = x.double().clone().requires_grad_()
    state = {name: t.double().clone().requires_grad_() for name, t in state.items()}
    y = reference(leaf, state, lengths, **known)
    y.backward(g.double())
    return {"y": y.detach(), "dx": leaf.grad} | {name: t.grad for name, t in state.items()}


def assert_near(got, want, relative=1e-12, dtype=torch.float64):
    """Each tensor of ``dtype`` and within ``relative`` of the largest element."""
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert got[name].dtype == dtype and got[name].shape == value.shape
        error, scale = (got[name].double() - value).abs().max(), value.abs().max()
        assert error <= relative * scale, f"{name}: {error:.3g} of {scale:.3g}"


def assert_dense(p, options, lengths, how, sp, relative=1e-10, dtype=torch.float64):
    """On p ranks output and all gradients are the reference's, within `relative` of the largest element of each."""
    options = options | {"dtype": dtype}
    state = oracle.random_state(make(options))
    x, g = (torch.randn(sum(lengths), options.get("hidden_size", HIDDEN), dtype=dtype) for _ in range(2))
    got = whole(ranks.run(layer_step, p, make, options, state, x, g, lengths, how, sp), sp)
    known = {k: v for k, v in options.items() if k in KNOWN}
    assert_near(got, dense(oracle.attention, known, state, x, g, lengths), relative, dtype)
