"""ParallelLatentAttention against DeepSeek's attention of transformers, and against the formulas head by head: output
and all gradients, within 1e-12 of the largest element in fp64; its initial weights, names and checkpoints; dropout, a
mask, and under what of torch wraps modules, with FSDP2, adapters, main_grad and coalesced gradients.
"""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import tp_ext
from tests.helpers import oracle, ranks
from tests.helpers.attention_cases import assert_near, call, layer_step, whole
from tests.helpers.latent_cases import (
    CASES,
    DEEPSEEK,
    HIDDEN,
    LAYOUTS,
    SIZES,
    assert_dense,
    dense,
    known,
    make,
    reference,
)
from tests.helpers.meshes import mesh_of
from tests.helpers.on_ranks import on_ranks
from tests.helpers.oracle import gathered, local_grads

EVERY = [
    pytest.param(p, name, layout, id=f"{name}-p{p}-{layout}")
    for name in CASES
    for p in (1, 2, 3, 4)
    for layout in (LAYOUTS if name == "v3" else ("batch", "sp_packed_uneven"))
]


@pytest.mark.core
@pytest.mark.thinned
@pytest.mark.parametrize(("p", "name", "layout"), EVERY)
def test_output_and_all_gradients_are_those_of_the_formulas(p, name, layout):
    assert_dense(p, CASES[name], *LAYOUTS[layout])


# transformers


def _deepseek(version, options):
    """DeepSeek's attention of transformers in fp64, with norms in fp64, too, and a function of x ``[tokens, hidden]``
    of sequences of n tokens."""
    name = f"deepseek_{version}"
    library = pytest.importorskip(f"transformers.models.{name}.modeling_{name}")
    kind = f"DeepseekV{version[1]}"
    rope = tp_ext.RotaryEmbedding(SIZES["qk_rope_head_dim"], **options["rope"])
    config = getattr(pytest.importorskip(f"transformers.models.{name}.configuration_{name}"), f"{kind}Config")(
        hidden_size=HIDDEN if HIDDEN % options["num_heads"] == 0 else options["num_heads"],
        num_attention_heads=options["num_heads"],
        num_key_value_heads=options["num_heads"],
        q_lora_rank=options.get("q_lora_rank"),
        attention_bias=options.get("bias", False),
        rope_parameters={"rope_theta": rope.base, **options["rope"].get("scaling", {"rope_type": "default"})},
        attn_implementation="sdpa",
        **SIZES,
    )
    config.hidden_size = HIDDEN
    module = getattr(library, f"{kind}Attention")(config, 0).double()
    for norm in ("q_a_layernorm", "kv_a_layernorm"):  # theirs compute in fp32
        if getattr(module, norm, None) is not None:
            setattr(module, norm, nn.RMSNorm(getattr(module, norm).weight.shape[0], 1e-6, dtype=torch.float64))

    def call(x, n):
        cos, sin = rope.cos_sin(torch.arange(n), torch.float64)
        tables = (
            torch.complex(cos, sin)[None] if version == "v2" else tuple(torch.cat([t, t], -1)[None] for t in (cos, sin))
        )
        return module(x.unflatten(0, (-1, n)), position_embeddings=tables, attention_mask=None)[0].flatten(0, 1)

    return module, call


THEIRS = {
    "v3": ("v3", {"num_heads": 4, "q_lora_rank": 7, "rope": {"base": 10000.0, "interleaved": True}}),
    "v3_yarn": ("v3", {"num_heads": 5, "q_lora_rank": 7, "bias": True, "rope": DEEPSEEK}),
    "v2": ("v2", {"num_heads": 4, "q_lora_rank": 7, "bias": True, "rope": DEEPSEEK}),
    "v2_lite": ("v2", {"num_heads": 5, "rope": DEEPSEEK}),
}


@pytest.mark.parametrize("sp", [False, True], ids=["", "sp"])
@pytest.mark.parametrize("name", THEIRS)
def test_output_and_all_gradients_are_those_of_transformers(name, sp, monkeypatch):
    version, options = THEIRS[name]
    module, call = _deepseek(version, options)
    assert {k: v.shape for k, v in module.state_dict().items()} == {
        k: v.shape for k, v in make(options).state_dict().items()
    }
    state = oracle.random_state(module)
    module.load_state_dict(state)
    n, batch = 5, 2
    x, g = torch.randn(2, n * batch, HIDDEN, dtype=torch.float64)
    leaf = x.clone().requires_grad_()
    monkeypatch.setattr(torch.Tensor, "float", lambda t: t.double().contiguous())  # in which DeepSeek-V2 rotates
    y = call(leaf, n)
    y.backward(g)
    monkeypatch.undo()
    want = {"y": y.detach(), "dx": leaf.grad} | {name: p.grad for name, p in module.named_parameters()}
    for p in (1, 2, 3, 4):
        how = "tokens" if sp else "batch"
        assert_near(whole(ranks.run(layer_step, p, make, options, state, x, g, [n] * batch, how, sp), sp), want)


# Initial weights, and state of any number of ranks


def _made(group, path):
    torch.manual_seed(3)
    module = make(CASES["uneven_5_heads"], group)
    state = tp_ext.full_state_dict(module, group=group)
    tp_ext.debug.check(module, group=group)
    tp_ext.save_checkpoint(path / str(group.size()), module, group=group)
    return state


def _loaded(group, path):
    module = make(CASES["uneven_5_heads"], group)
    found = []
    for p in (1, 2, 3, 4):
        tp_ext.load_checkpoint(path / str(p), module, group=group)
        found.append(tp_ext.full_state_dict(module, group=group))
    return found


def test_initial_weights_have_the_same_bits_for_every_p_and_checkpoints_load_at_any(tmp_path):
    want = ranks.run(_made, 1, tmp_path)[0]
    assert all(len(t.unique()) > 1 for name, t in want.items() if "layernorm" not in name)
    for p in (2, 3, 4):
        for state in ranks.run(_made, p, tmp_path):
            assert state.keys() == want.keys() and all(torch.equal(state[name], want[name]) for name in want)
    for p in (1, 2, 3, 4):
        for state in [state for found in ranks.run(_loaded, p, tmp_path) for state in found]:
            assert state.keys() == want.keys() and all(torch.equal(state[name], want[name]) for name in want)


# Dropout, masks, wrappers of torch, adapters


pytestmark = pytest.mark.core
CASE = CASES["uneven_5_heads"]
BOTH = pytest.mark.parametrize("sp", [False, True], ids=["", "sp"])


def _state_and_data(options=CASE, tokens=10):
    return oracle.random_state(make(options)), *torch.randn(2, tokens, HIDDEN, dtype=torch.float64)


# Dropout


def _dropped(group, state, x, sp):
    module = make(CASE, group, dropout=0.5, sequence_parallel=sp)
    tp_ext.load_full_state_dict(module, state, group=group)
    results = []
    for how in ("tokens", "packed"):
        module.zero_grad()
        torch.manual_seed(5)
        y, _ = call(module, x, [5, 5], how)
        y.square().sum().backward()
        results.append((tp_ext.reduce_from_region(y.square().sum(), group if sp else None), local_grads(module)))
    return results, dict(tp_ext.shardings(module))


@BOTH
def test_exact_dropout_is_the_same_for_every_p(sp):
    state, x, _ = _state_and_data()
    want, _ = _dropped(None, state, x, False)
    plain = reference(x, state, [5, 5], **known(CASE))
    assert abs(want[0][0] - plain.square().sum()) > 1e-3
    for p in (2, 3, 4):
        got, tables = zip(*ranks.run(_dropped, p, state, x, sp), strict=True)
        for i, (total, grads) in enumerate(want):
            for one in got:
                torch.testing.assert_close(one[i][0], total, rtol=1e-12, atol=0)
            assert_near(gathered([one[i][1] for one in got], tables[0]), grads, 1e-11)


# A mask


@on_ranks(3)
def test_a_learned_mask_has_its_whole_gradient(group):
    state, x, g = _state_and_data()
    leaf = torch.randn(5, 5, 5, dtype=torch.float64).requires_grad_()
    want = reference(x, state, [5, 5], attn_mask=leaf, **known(CASE))
    want.backward(g)
    module = make(CASE, group)
    tp_ext.load_full_state_dict(module, state, group=group)
    mask = leaf.detach().clone().requires_grad_()
    y = module(x, batch_size=2, attn_mask=mask)
    y.backward(g)
    assert_near({"y": y, "mask": mask.grad}, {"y": want, "mask": leaf.grad})


@BOTH
@on_ranks(2)
def test_autocast_gives_the_low_precision(group, sp):
    module = make(CASE, group, dtype=torch.float32, sequence_parallel=sp)
    x = torch.randn(10, HIDDEN)
    own = x.tensor_split(group.size())[group.rank()] if sp else x
    want = module(own, batch_size=2)
    with torch.autocast("cpu", torch.bfloat16):
        y = module(own, batch_size=2)
        with torch.no_grad():
            cache = module.eval().new_cache(2, 5, dtype=torch.bfloat16)
            cached = module(own, batch_size=2, cache=cache)
    y.float().square().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in module.parameters())
    assert y.dtype == cached.dtype == torch.bfloat16
    for one in (y, cached):
        assert (one - want).abs().max() <= 0.05 * want.abs().max()  # a dozen units in bf16's last place


def _fsdp(group, state, x, g):
    mesh = mesh_of(2, 2, names=("dp", "tp"))
    tp = mesh["tp"].get_group()
    module = make(CASE, tp, sequence_parallel=True)
    tp_ext.load_full_state_dict(module, state, group=tp)
    fully_shard(module, mesh=mesh["dp"])
    rows = slice(5 * mesh["dp"].get_local_rank(), 5 * mesh["dp"].get_local_rank() + 5)  # a sequence each
    own, dy = (t[rows].tensor_split(2)[tp.rank()] for t in (x, g))
    module(own, batch_size=1, total_tokens=5).backward(2 * dy)  # FSDP2 averages over dp
    tp_ext.debug.check(module, group=tp)
    grads = {name: p.grad.full_tensor() for name, p in module.named_parameters() if isinstance(p, DTensor)}
    return mesh["dp"].get_local_rank(), grads, dict(tp_ext.shardings(module))


def test_fsdp2_over_a_data_axis():
    state, x, g = _state_and_data()
    found = [one for one in ranks.run(_fsdp, 4, state, x, g) if one[0] == 0]
    want = {name: grad for name, grad in dense(CASE, state, x, g, [5, 5]).items() if name not in ("y", "dx")}
    assert_near(gathered([grads for _, grads, _ in found], found[0][2]), want)


# Options of the linears inside


def _main_grad(group, state, x, g, sp, coalesced):
    module = make(CASE, group, sequence_parallel=sp, grad_accumulation_fusion=True)
    tp_ext.load_full_state_dict(module, state, group=group)
    matrices = {name: p for name, p in module.named_parameters() if p.dim() == 2}
    for weight in matrices.values():
        weight.main_grad = torch.zeros_like(weight)
    if coalesced:
        tp_ext.coalesce_gradients(module)
    own, dy = (t.tensor_split(group.size())[group.rank()] if sp else t for t in (x, g))
    for _ in range(2):
        module(own, batch_size=2, total_tokens=10 if sp else None).backward(dy)
    assert all(weight.grad is None for weight in matrices.values())
    grads = {name: getattr(p, "main_grad", p.grad) for name, p in module.named_parameters()}
    return grads, dict(tp_ext.shardings(module))


@pytest.mark.parametrize(("sp", "coalesced"), [(False, False), (True, False), (True, True)], ids=str)
def test_gradients_accumulated_in_main_grad(sp, coalesced):
    state, x, g = _state_and_data()
    want = {name: 2 * grad for name, grad in dense(CASE, state, x, g, [5, 5]).items() if name not in ("y", "dx")}
    for p in (1, 3):
        grads, tables = zip(*ranks.run(_main_grad, p, state, x, g, sp, coalesced), strict=True)
        assert_near(gathered(grads, tables[0]), want)


TARGETS = ("q_b_proj", "kv_b_proj", "o_proj")


def _adapted(group, state, x, g, sp):
    module = make(CASE, group, sequence_parallel=sp)
    tp_ext.add_lora(module, targets=TARGETS, r=2, alpha=3)
    if state is None:
        return oracle.random_state(module)
    tp_ext.load_full_state_dict(module, state, group=group)
    own, dy = (t.tensor_split(group.size())[group.rank()] if sp else t for t in (x, g))
    more = {"batch_size": 2, "total_tokens": 10 if sp else None}
    y = module(own, **more)
    y.backward(dy)
    grads = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    with torch.no_grad():  # what the adapter adds to W_kv_b is absorbed, too
        cache, sizes = module.eval().new_cache(2, 5), tp_ext.sharding.split_sizes(10, group.size())
        full = tp_ext.gather_from_region(y, group, 0, sizes) if sp else y
        for t in range(5):
            step = x.view(2, 5, -1)[:, t]
            if sp:
                got = module(step.tensor_split(group.size())[group.rank()], batch_size=2, total_tokens=2, cache=cache)
                got = tp_ext.gather_from_region(got, group, 0, tp_ext.sharding.split_sizes(2, group.size()))
            else:
                got = module(step, batch_size=2, cache=cache)
            torch.testing.assert_close(got, full.view(2, 5, -1)[:, t], rtol=1e-12, atol=1e-12)
    return y, grads, {name: cut for name, cut in tp_ext.shardings(module) if name in grads}


@BOTH
def test_adapters_on_the_sharded_linears(sp):
    state, (_, x, g) = _adapted(None, None, None, None, False), _state_and_data()
    leaves = {name: t.clone().requires_grad_("lora" in name) for name, t in state.items()}
    merged = {name.replace("base_layer.", ""): t for name, t in leaves.items() if "lora" not in name}
    for name in TARGETS:
        added = leaves[f"{name}.lora_B.weight"] @ leaves[f"{name}.lora_A.weight"]
        merged[f"{name}.weight"] = merged[f"{name}.weight"] + 3 / 2 * added
    want = reference(x, merged, [5, 5], **known(CASE))
    want.backward(g)
    want_grads = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    for p in (1, 2, 3):
        ys, grads, tables = zip(*ranks.run(_adapted, p, state, x, g, sp), strict=True)
        y = torch.cat(ys) if sp else ys[0]
        assert_near({"y": y} | gathered(grads, tables[0]), {"y": want.detach()} | want_grads)
