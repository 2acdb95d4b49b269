"""RotaryEmbedding(scaling=): against formulas of the papers (helpers/oracle.py) and Hugging Face's own functions."""

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch

from tests.helpers import oracle
from tp_ext import ParallelAttention, RotaryEmbedding

CONTEXT = {"original_max_position_embeddings": 64}
SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, **CONTEXT},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **CONTEXT},
    "yarn": {"rope_type": "yarn", "factor": 4.0, **CONTEXT},
    "yarn_betas": {"rope_type": "yarn", "factor": 3.0, "beta_fast": 8, "beta_slow": 2, "truncate": False, **CONTEXT},
    "yarn_attention_factor": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.7, **CONTEXT},
    "yarn_mscale": {"rope_type": "yarn", "factor": 40.0, "mscale": 0.9, "mscale_all_dim": 0.7, **CONTEXT},
    "yarn_one_pair": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 1.0, "truncate": True, **CONTEXT},
}
NTK = {"rope_type": "ntk", "factor": 4.0}
LENGTHS = (1, 64, 65, 300)
every = pytest.mark.parametrize("scaling", [*SCALINGS.values(), NTK], ids=[*SCALINGS, "ntk"])


@every
@pytest.mark.parametrize("rotary_dim", [4, 64])
def test_tables_are_those_of_the_formulas(scaling, rotary_dim, device):
    """In fp64 to the rounding of the angle, in fp32 those rounded."""
    rope = RotaryEmbedding(64, 500.0, rotary_dim=rotary_dim, scaling=scaling)
    for length in LENGTHS:
        positions = torch.arange(length, device=device)
        frequencies, amplitude = oracle.rope_frequencies(rotary_dim, 500.0, scaling, length)
        angles = positions.cpu().double()[:, None] * frequencies
        tables = rope.cos_sin(positions, torch.float64)
        for table, want in zip(tables, (angles.cos(), angles.sin()), strict=True):
            assert ((table.cpu() - amplitude * want).abs() <= 1e-15 * (2 + 4 * angles)).all()
        for single, double in zip(rope.cos_sin(positions, torch.bfloat16), tables, strict=True):
            assert single.dtype == torch.float32 and torch.equal(single, double.float())


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_frequencies_are_those_of_transformers(scaling):
    """theirs are fp32."""
    theirs = pytest.importorskip("transformers.modeling_rope_utils").ROPE_INIT_FUNCTIONS[scaling["rope_type"]]
    for theta, head_dim, partial in ((10000.0, 64, 1.0), (500000.0, 128, 0.5)):
        parameters = scaling | {"rope_theta": theta, "partial_rotary_factor": partial}
        rope = RotaryEmbedding(head_dim, scaling=parameters)
        config = SimpleNamespace(
            rope_parameters=parameters,
            head_dim=head_dim,
            hidden_size=4 * head_dim,
            num_attention_heads=4,
            max_position_embeddings=64,
            standardize_rope_params=lambda: None,
        )
        for length in LENGTHS:
            want, amplitude = theirs(config, "cpu", seq_len=length)
            got = torch.tensor(rope.scaling.frequencies(length), dtype=torch.float64)
            torch.testing.assert_close(got, want.double(), rtol=2e-6, atol=0)
            assert abs(rope.scaling.amplitude - amplitude) < 1e-12


@every
@pytest.mark.parametrize("how", ["positions", "offset", "cu_seqlens"])
def test_rotation_and_gradient(scaling, how, device):
    options = {"base": 100.0, "interleaved": True, "rotary_dim": 6, "scaling": scaling}
    x = torch.randn(100, 3, 8, dtype=torch.float64, requires_grad=True)
    positions, call = {
        "positions": (torch.arange(100).flip(0), {"positions": torch.arange(100).flip(0).to(device)}),
        "offset": (torch.arange(30, 130), {"offset": 30}),
        "cu_seqlens": (torch.cat([torch.arange(70), torch.arange(30)]), {"cu_seqlens": [0, 70, 100]}),
    }[how]
    y = RotaryEmbedding(8, **options)(x.to(device), **call).cpu()
    want = oracle.rotate(x, positions, **options)
    torch.testing.assert_close(y, want, rtol=1e-12, atol=1e-12)
    g = torch.randn_like(x)
    pair = [torch.autograd.grad(t, x, g)[0] for t in (y, want)]
    torch.testing.assert_close(*pair, rtol=1e-12, atol=1e-12)


def test_a_printed_config_can_be_pasted():
    """Both of Hugging Face's formats, base and rotary_dim in them, keys that are None; "default" is no scaling."""
    old = {"type": "yarn", "factor": 4.0, **CONTEXT, "mscale": None, "mscale_all_dim": 0}
    new = SCALINGS["yarn"] | {"rope_theta": 500.0, "partial_rotary_factor": 0.5}
    for rope in (RotaryEmbedding(8, 500.0, rotary_dim=4, scaling=old), RotaryEmbedding(8, scaling=new)):
        assert (rope.base, rope.rotary_dim) == (500.0, 4)
        want = RotaryEmbedding(8, 500.0, rotary_dim=4, scaling=SCALINGS["yarn"])
        for copied in (rope, copy.deepcopy(rope), pickle.loads(pickle.dumps(rope))):
            tables = [r.cos_sin(torch.arange(99), torch.float32) for r in (copied, want)]
            assert all(map(torch.equal, *tables))
    assert "'factor': 4.0" in repr(rope)
    plain = RotaryEmbedding(8, scaling={"rope_type": "default", "rope_theta": 500.0})
    assert plain.scaling is None and plain.base == 500.0


def test_dynamic_scaling_compiles_and_a_cache_refuses_it():
    rope, x = RotaryEmbedding(8, scaling=SCALINGS["dynamic"]), torch.randn(100, 2, 8)
    compiled = torch.compile(rope, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), rope(x))
    attention = ParallelAttention(16, 2, rope=rope)
    with torch.no_grad(), pytest.raises(ValueError, match="cache: must not be combined with dynamic RoPE scaling"):
        attention(torch.zeros(1, 2, 16), cache=attention.new_cache(1, 4))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"scaling": 2.0}, "scaling: 2.0 must be a dict"),
        ({"scaling": {"factor": 2.0}}, "scaling: rope_type None must be one of .*'llama3', 'yarn'"),
        ({"scaling": {"rope_type": "longrope"}}, "scaling: rope_type 'longrope' must be one of"),
        ({"scaling": {"rope_type": "linear", "type": "yarn", "factor": 2}}, "rope_type 'linear' and 'yarn' must be"),
        ({"scaling": {"rope_type": "linear"}}, "scaling: factor must be given with rope_type 'linear'"),
        (
            {"scaling": {"rope_type": "dynamic", "factor": 2}},
            "original_max_position_embeddings must be given with rope_type 'dynamic'; it is the max_position_emb",
        ),
        ({"scaling": NTK | {"beta_fast": 2}}, r"scaling: beta_fast must be one of \['rope_type', 'factor'\] with"),
        ({"scaling": {"rope_type": "linear", "factor": 0.5}}, "scaling: factor 0.5 must be a number >= 1"),
        ({"scaling": {"rope_type": "linear", "factor": "2"}}, "scaling: factor '2' must be a number"),
        ({"scaling": {"rope_type": "linear", "factor": float("nan")}}, "scaling: factor nan must be"),
        ({"scaling": SCALINGS["yarn"] | {"beta_slow": 0}}, "scaling: beta_slow 0 must be a number > 0"),
        ({"scaling": SCALINGS["yarn"] | {"truncate": 1}}, "scaling: truncate 1 must be True or False"),
        ({"scaling": SCALINGS["llama3"] | {"low_freq_factor": 4}}, "low_freq_factor 4 must be less than high_freq_"),
        ({"scaling": SCALINGS["yarn"], "base": 1.0}, "base: 1.0 must be greater than 1 with rope_type 'yarn'"),
        ({"scaling": NTK | {"rope_theta": 500.0}, "base": 1e4}, "base: 10000.0 must be what scaling = .* says, 500.0"),
        ({"scaling": NTK | {"partial_rotary_factor": 0.5}, "rotary_dim": 8}, "rotary_dim: 8 must be .* says, 4"),
        ({"scaling": NTK | {"partial_rotary_factor": 2}}, r"partial_rotary_factor 2 must be a number in \(0, 1\]"),
        ({"scaling": NTK, "rotary_dim": 2}, "'ntk' must have rotary_dim = 2 of at least 4"),
    ],
)
def test_errors_name_key_value_and_rule(options, match):
    with pytest.raises(ValueError, match=match):
        RotaryEmbedding(8, **options)


def test_more_frequencies_than_a_kernel_takes_are_refused():
    with pytest.raises(ValueError, match="rotary_dim: 514 must be at most 512 with scaling"):
        RotaryEmbedding(514, scaling=NTK)
    assert RotaryEmbedding(512, scaling=NTK).cos_sin(torch.arange(2), torch.float32)[0].shape == (2, 256)
