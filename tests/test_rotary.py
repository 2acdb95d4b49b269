"""RotaryEmbedding against complex numbers (reference.py). The kernel itself: kernels/test_rope.py."""

import pytest
import reference
import torch
from torch import nn

from tp_ext import RotaryEmbedding

OPTIONS = [
    {},
    {"interleaved": True},
    {"rotary_dim": 4},
    {"rotary_dim": 2, "interleaved": True},
    {"base": 500000.0},
    {"base": 2, "interleaved": True},
]
POSITIONS = torch.tensor([0, 1, 2, 7, 0, 1, 131071, 3])
every = pytest.mark.parametrize("options", OPTIONS, ids=str)


@every
@pytest.mark.parametrize("heads", [1, 3])
def test_is_multiplication_by_complex_numbers(options, heads, device):
    x = torch.randn(8, heads, 8, dtype=torch.float64, requires_grad=True)
    y = RotaryEmbedding(8, **options)(x.to(device), POSITIONS.to(device)).cpu()
    want = reference.rotate(x, POSITIONS, **options)
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
    want = reference.rotate(x.double(), POSITIONS)
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
