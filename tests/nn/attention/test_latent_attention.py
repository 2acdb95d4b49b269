"""ParallelLatentAttention against DeepSeek's attention of transformers, and against the formulas head by head: output
and all gradients, within 1e-12 of the largest element in fp64; its initial weights, names and checkpoints.
"""

import pytest
import torch
from torch import nn

import tp_ext
from tests.helpers import oracle, ranks
from tests.helpers.latent_cases import (
    CASES,
    DEEPSEEK,
    HIDDEN,
    LAYOUTS,
    SIZES,
    assert_dense,
    assert_near,
    make,
    on_ranks,
    whole,
)

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
        assert_near(whole(ranks.run(on_ranks, p, options, state, x, g, [n] * batch, how, sp), sp), want)


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
