"""RotaryEmbedding against complex numbers (helpers/oracle.py). The kernel itself: kernels/test_rope.py."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from tests.helpers import oracle
from tp_ext import RotaryEmbedding, _ops

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3["original_max_position_embeddings"] = 8192
OPTIONS = [
    {},
    {"interleaved": True},
    {"rotary_dim": 4},
    {"rotary_dim": 2, "interleaved": True},
    {"base": 500000.0},
    {"base": 2, "interleaved": True},
    {"base": 500000.0, "scaling": LLAMA3},
]
POSITIONS = torch.tensor([0, 1, 2, 7, 0, 1, 131071, 3])
every = pytest.mark.parametrize("options", OPTIONS, ids=str)


@every
@pytest.mark.parametrize("heads", [1, 3])
def test_is_multiplication_by_complex_numbers(options, heads, device):
    x = torch.randn(8, heads, 8, dtype=torch.float64, requires_grad=True)
    y = RotaryEmbedding(8, **options)(x.to(device), POSITIONS.to(device)).cpu()
    want = oracle.rotate(x, POSITIONS, **options)
    torch.testing.assert_close(y, want, rtol=1e-12, atol=1e-12)
    g = torch.randn_like(x)
    (grad,) = torch.autograd.grad(y, x, g)
    (want_grad,) = torch.autograd.grad(want, x, g)
    torch.testing.assert_close(grad, want_grad, rtol=1e-12, atol=1e-12)


@every
def test_scores_depend_on_the_distance_alone(options):
    rope = RotaryEmbedding(8, **options)
    q, k = torch.randn(2, 1, 1, 8, dtype=torch.float64)

    def score(i, j):
        return (rope(q, torch.tensor([i])) * rope(k, torch.tensor([j]))).sum()

    for i, j in ((0, 0), (3, 1), (5, 100)):
        for shift in (1, 17, 4096):
            torch.testing.assert_close(score(i + shift, j + shift), score(i, j), rtol=1e-9, atol=1e-9)
    assert abs(score(3, 1) - score(2, 1)) > 1e-6


@every
def test_lengths_are_kept_and_position_zero_is_the_identity(options):
    rope, x = RotaryEmbedding(8, **options), torch.randn(8, 2, 8, dtype=torch.float64)
    y = rope(x, POSITIONS)
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(y[0], x[0])
    rotary_dim = options.get("rotary_dim", 8)
    assert torch.equal(y[..., rotary_dim:], x[..., rotary_dim:])
    assert (y[1, :, :rotary_dim] != x[1, :, :rotary_dim]).all()


def test_holds_nothing_that_a_state_dict_or_a_cast_could_touch():
    rope = RotaryEmbedding(8)
    assert not [*rope.parameters(), *rope.buffers()] and not rope.state_dict()
    before = rope.cos_sin(POSITIONS, torch.float32)
    after = nn.Sequential(rope).half()[0].cos_sin(POSITIONS, torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_rotates_by_exact_angles_and_rounds_once(dtype):
    """At position 131071 an angle in fp32 would be off by 0.008, in bf16 by 512: here one rounding of the result."""
    x = torch.randn(8, 2, 8).to(dtype)
    y = RotaryEmbedding(8).to(dtype)(x, POSITIONS)
    want = oracle.rotate(x.double(), POSITIONS)
    assert y.dtype == dtype
    bound = torch.finfo(dtype).eps / 2 * want.abs() + 1e-5  # fp32's own rounding before it, near zeros
    assert ((y.double() - want).abs() <= bound).all()


def test_tables_are_fp64_for_fp64_and_else_fp32():
    for dtype, want in ((torch.float64, torch.float64), (torch.float32, torch.float32), (torch.half, torch.float32)):
        cos, sin = RotaryEmbedding(6, rotary_dim=4).cos_sin(POSITIONS, dtype)
        assert cos.dtype == sin.dtype == want
        assert cos.shape == sin.shape == (8, 2)


def test_no_tokens():
    assert RotaryEmbedding(8)(torch.empty(0, 2, 8), torch.empty(0, dtype=torch.long)).shape == (0, 2, 8)


# Positions that the tokens' places tell

LENGTHS = [5, 0, 3, 1, 2]
ENDS = [0, 5, 5, 8, 9, 11]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def both(f, x):
    """f(x) and the gradient of a product with fixed numbers."""
    x = x.detach().requires_grad_()
    y = f(x)
    g = torch.randn(y.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(y)
    return y.detach(), torch.autograd.grad(y, x, g)[0], g


@every
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_positions_by_an_offset_or_by_packed_sequences(options, dtype, device):
    """Against complex numbers in fp64; the gradient is, to the bit, the kernel with the inverse angles."""
    rope = RotaryEmbedding(8, **options)
    x = torch.randn(11, 3, 8, dtype=torch.float64).to(dtype).to(device)
    packed = torch.cat([torch.arange(n) for n in LENGTHS])
    for positions, kwargs in (
        (torch.arange(11), {}),
        (torch.arange(4091, 4102), {"offset": 4091}),
        (packed, {"cu_seqlens": ENDS}),
        (packed + 7, {"cu_seqlens": torch.tensor(ENDS, dtype=torch.int32), "offset": 7}),
    ):
        y, dx, g = both(lambda x, kwargs=kwargs: rope(x, **kwargs), x)
        want = oracle.rotate(x.cpu().double(), positions, **options)
        eps = torch.finfo(dtype).eps
        # As in kernels/test_rope.py; angles of 4096 are off by as many ulp of 1 in fp64
        bound = {"rtol": eps, "atol": max(12 * min(eps, torch.finfo(torch.float32).eps), 1e-11)}
        torch.testing.assert_close(y.cpu().double(), want, **bound)
        assert torch.equal(y, rope(x, positions.to(device)))
        cos, sin = rope.cos_sin(positions.to(device), dtype)
        assert torch.equal(dx, _ops.rope_rotate(g, cos, sin, rope.interleaved, True))


@every
def test_an_offset_shifts_the_positions(options, device):
    rope, x = RotaryEmbedding(8, **options), torch.randn(40, 2, 8, device=device)
    for offset in (0, 1, 17, 39):
        assert torch.equal(rope(x[offset:], offset=offset), rope(x)[offset:])


@every
@pytest.mark.parametrize("offset", [0, 5])
def test_packed_and_batched_sequences_are_each_as_alone(options, offset, device):
    rope, x = RotaryEmbedding(8, **options), torch.randn(11, 2, 8, device=device)
    y = rope(x, cu_seqlens=ENDS, offset=offset)
    for start, stop in pairwise(ENDS):
        assert torch.equal(y[start:stop], rope(x[start:stop], offset=offset))
    batch = torch.randn(3, 4, 2, 8, device=device)
    y, dx, _ = both(lambda x: rope(x, offset=offset), batch)
    flat = both(lambda x: rope(x, cu_seqlens=[0, 4, 8, 12], offset=offset), batch.flatten(0, 1))
    assert torch.equal(y.flatten(0, 1), flat[0]) and torch.equal(dx.flatten(0, 1), flat[1])
    positions = (torch.arange(4) + offset).expand(3, 4).to(device)
    for where in (batch, batch.transpose(1, 2).contiguous().transpose(1, 2)):
        assert torch.equal(rope(where, positions), y)
    assert torch.equal(y[1], rope(batch[1], offset=offset))


def test_compiles_into_one_graph():
    rope, x = RotaryEmbedding(8), torch.randn(4, 2, 8)
    compiled = torch.compile(rope, fullgraph=True, backend="aot_eager")
    for kwargs in ({}, {"offset": 3}, {"cu_seqlens": [0, 1, 4]}, {"positions": torch.tensor([3, 1, 0, 0])}):
        results = [both(lambda x, f=f, kwargs=kwargs: f(x, **kwargs), x) for f in (compiled, rope)]
        assert all(map(torch.equal, *results))


@pytest.mark.parametrize(
    ("x", "options", "error", "match"),
    [
        ((4, 8), {}, ValueError, r"x: shape \(4, 8\) must be"),
        ((4, 2, 8), {"offset": -1}, ValueError, "offset: -1 must not be negative"),
        ((4, 2, 8), {"offset": 1.0}, TypeError, "offset: 1.0 must be an integer"),
        ((4, 2, 8), {"positions": torch.arange(4), "offset": 1}, ValueError, "positions: .* combined with offset = 1"),
        ((4, 2, 8), {"positions": torch.arange(4), "cu_seqlens": [0, 4]}, ValueError, "positions: .* cu_seqlens"),
        ((2, 2, 2, 8), {"positions": torch.arange(4)}, ValueError, r"positions: shape \(4,\) must be .* \(2, 2\)"),
        ((2, 2, 2, 8), {"cu_seqlens": [0, 4]}, ValueError, "cu_seqlens: .* must come with x"),
        ((4, 2, 8), {"cu_seqlens": [0, 3]}, ValueError, "cu_seqlens: .* to the number of tokens, 4"),
        ((4, 2, 8), {"cu_seqlens": [0.0, 4.0]}, TypeError, "cu_seqlens: .* must be integers"),
    ],
)
def test_errors_name_the_argument(x, options, error, match):
    with pytest.raises(error, match=match):
        RotaryEmbedding(8)(torch.zeros(x), **options)
