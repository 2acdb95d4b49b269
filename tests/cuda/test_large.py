"""Tensors of more than 2^31 elements, where a 32-bit index would run over: 2.7e9 of bf16, 5.4 GB each.

The rows at both ends and around 2^31 must be those that the kernel computes from these rows alone, the gradients of
parameters those of the chunks together. On the CPU the same bodies run on few rows.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tp_ext import _ops

pytestmark = pytest.mark.core

DTYPE, EPS = torch.bfloat16, 1e-5
N = 4096
ROWS = {"cuda": 5 << 17, "cpu": 67}  # a quarter of the rows lies beyond 2^31 elements
Rows = Callable[[Tensor, int], Tensor]  # rows of x, and the number of the first -> rows of y


def normal(*shape: int, device: torch.device) -> Tensor:
    return torch.randn(shape, dtype=DTYPE, device=device)


def bias_act(rows: int, device: torch.device) -> tuple[Rows, list[Tensor], int]:
    bias = normal(N, device=device).requires_grad_()
    return lambda x, start: _ops.bias_act(x, bias, "relu"), [bias], N


def gated_act(rows: int, device: torch.device) -> tuple[Rows, list[Tensor], int]:
    bias = normal(N, device=device).requires_grad_()
    return lambda x, start: _ops.gated_act(x, bias, "swiglu"), [bias], N


def rms_norm(rows: int, device: torch.device) -> tuple[Rows, list[Tensor], int]:
    weight = normal(N, device=device).requires_grad_()
    return lambda x, start: _ops.rms_norm(x, weight, EPS), [weight], N


def layer_norm(rows: int, device: torch.device) -> tuple[Rows, list[Tensor], int]:
    weight, bias = (normal(N, device=device).requires_grad_() for _ in range(2))
    return lambda x, start: _ops.layer_norm(x, weight, bias, EPS), [weight, bias], N


def rope(rows: int, device: torch.device) -> tuple[Rows, list[Tensor], int]:
    angles = torch.randn(rows, 32, device=device)
    cos, sin = angles.cos(), angles.sin()

    def call(x: Tensor, start: int) -> Tensor:
        own = slice(start, start + len(x))
        return _ops.rope(x.unflatten(-1, (-1, 64)), cos[own], sin[own], False, None)

    return call, [], N


def dropout(rows: int, device: torch.device) -> tuple[Rows, list[Tensor], int]:
    seed, bias = torch.tensor(5, device=device), normal(N, device=device).requires_grad_()

    def call(x: Tensor, start: int) -> Tensor:
        return _ops.bias_dropout_residual(x, bias, x, seed, 0.25, x.numel(), rows * N, start * N)

    return call, [bias], N


def cross_entropy(rows: int, device: torch.device) -> tuple[Rows, list[Tensor], int]:
    vocab = 64 * N if device.type == "cuda" else N
    target = torch.randint(vocab, (rows,), device=device)

    def call(x: Tensor, start: int) -> Tensor:
        cut = ("", 0, vocab, vocab, -100, 0.1, 0.01, "none", False)
        return _ops.vocab_parallel_cross_entropy(x, target[start : start + len(x)], *cut)

    return call, [], vocab


FAMILIES = [bias_act, gated_act, rms_norm, layer_norm, rope, dropout, cross_entropy]


def enough(device: torch.device, tensors: int) -> None:
    """Skips the test, with the reason, if the large tensors do not fit."""
    need = tensors * ROWS["cuda"] * N * DTYPE.itemsize
    if device.type == "cuda" and (free := torch.cuda.mem_get_info()[0]) < need:
        pytest.skip(f"{free >> 30} GiB of GPU memory are free, {need >> 30} are needed")


@pytest.fixture(autouse=True)
def _leave_the_memory_to_others(device):
    yield
    if device.type == "cuda":
        torch.cuda.empty_cache()


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.__name__)
def test_rows_beyond_32_bits(family, device):
    enough(device, 6)
    width = 64 * N if family is cross_entropy and device.type == "cuda" else N
    rows = ROWS[device.type] * N // width
    call, params, n = family(rows, device)
    assert n == width
    x = normal(rows, n, device=device).requires_grad_()
    y = call(x, 0)
    dy = torch.randn(y.shape, dtype=y.dtype, device=device)
    dx, *dparams = torch.autograd.grad(y, [x, *params], dy)
    assert device.type == "cpu" or x.numel() > 2**31

    # Sums over a row may be in another order for few rows: an ulp of bf16 or two. A wrong row is another number.
    close = {"rtol": 2**-6, "atol": 2**-6}
    for start in (0, rows // 2 - 1, rows * 4 // 5 - 2, rows - 3):
        own = slice(start, start + 3)
        few = x[own].detach().requires_grad_()
        chunk = call(few, start)
        torch.testing.assert_close(y[own], chunk, **close)
        torch.testing.assert_close(dx[own], torch.autograd.grad(chunk, few, dy[own])[0], **close)

    want = [torch.zeros(p.shape, dtype=torch.double, device=device) for p in params]
    step = -(-rows // 20)
    for start in range(0, rows if params else 0, step):
        own = slice(start, start + step)
        for total, part in zip(want, torch.autograd.grad(call(x[own], start), params, dy[own]), strict=True):
            total += part
    for got, total in zip(dparams, want, strict=True):
        # Roundings of bf16, of the sum and of its 20 parts, some rows^(1/2) large; a lost quarter is half of that
        assert ((got - total).abs() <= 2**-6 * (total.abs() + rows**0.5)).all()


def test_embedding_beyond_32_bits(device):
    enough(device, 3)
    rows = ROWS[device.type]
    ids, weight = torch.randint(64, (rows,), device=device), normal(48, N, device=device).requires_grad_()
    y = _ops.vocab_parallel_embedding(ids, weight, "", 0, 48, 64, False, None)
    table = torch.cat([weight.detach(), weight.new_zeros(16, N)])
    step = -(-rows // 20)
    dy = normal(rows, N, device=device)
    (got,) = torch.autograd.grad(y, weight, dy)
    want = torch.zeros(64, N, dtype=torch.double, device=device)
    for start in range(0, rows, step):
        own = slice(start, start + step)
        assert torch.equal(y[own], table[ids[own]])
        want.index_add_(0, ids[own], dy[own].double())
    assert ((got - want[:48]).abs() <= 2**-8 * want[:48].abs() + 1e-3).all()  # fp32 sums, rounded once


@pytest.mark.parametrize("fill", [_ops.philox_uniform_, _ops.philox_normal_], ids=["uniform", "normal"])
def test_random_fills_beyond_32_bits(fill, device):
    enough(device, 2)
    rows, seed = ROWS[device.type], torch.tensor(7, device=device)
    x = torch.empty(rows, N, dtype=DTYPE, device=device)
    fill(x, seed, 0.0, 1.0, x.numel(), x.numel(), 0)
    for start in (0, rows // 2 - 1, rows * 4 // 5 - 2, rows - 3):
        few = torch.empty(3, N, dtype=DTYPE, device=device)
        fill(few, seed, 0.0, 1.0, few.numel(), x.numel(), start * N)
        assert torch.equal(x[start : start + 3], few)


def test_packed_shards_beyond_32_bits(device):
    """Bits that no arithmetic could give by chance come back, through blocks of two lengths along either dim."""
    enough(device, 4)
    x = torch.empty(ROWS[device.type], N, dtype=torch.int16, device=device).random_()
    for dim, n in enumerate(x.shape):
        sizes = [n // 2, n - n // 2]
        for padded in (True, False):
            blocks = _ops.pack_shards(x, dim, sizes, padded)
            assert torch.equal(_ops.unpack_shards(blocks, dim, sizes, None if padded else x.shape), x)
            first = blocks[0, ..., : sizes[0]] if padded else blocks[: x.numel() * sizes[0] // n].view(-1, sizes[0])
            assert dim == 0 or torch.equal(first[-3:], x[-3:, : sizes[0]])
            del blocks, first


def test_norms_and_scaling_beyond_32_bits(device):
    """Sums of squares of 1 and of 1/2 are exact in fp64: each element counts once, and is scaled once."""
    enough(device, 2)
    x = torch.ones(ROWS[device.type], N, dtype=DTYPE, device=device)
    small = torch.ones(5, dtype=torch.float32, device=device)
    assert _ops.multi_tensor_squared_norm([small, x]).item() == x.numel() + 5
    _ops.multi_tensor_scale_([small, x], torch.tensor(0.5, device=device))
    assert _ops.multi_tensor_squared_norm([x]).item() == x.numel() / 4
    assert (x[-1] == 0.5).all() and (x[0] == 0.5).all() and (small == 0.5).all()
