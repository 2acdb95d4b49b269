"""The products of a chunk of tokens with the rows of a vocabulary, in fp32 by kernels for few rows, against fp64; the
sum of a weight's gradient of half types."""

import pytest
import torch

from tp_ext import _ops

# Products that the kernels compute, at the ends of their blocks: 16, 48 and 64 rows of the weight, 6, 16 and 96 tokens,
# 1024 and, of each of two threads, 2048 columns; and products left to torch, by tokens, hidden size or vocabulary
KERNELS = [(96, 64, 192), (93, 128, 391), (32, 192, 64), (37, 64, 1000), (45, 4224, 130)]
SHAPES = [*KERNELS, (97, 64, 192), (31, 64, 192), (40, 65, 192)]


def operands(tokens, hidden, vocab, dtype=torch.float32, device="cpu"):
    """x, weight, and logits whose rows are further apart than they are long."""
    x, weight = torch.randn(tokens, hidden, device=device), torch.randn(vocab, hidden, device=device)
    logits = torch.randn(tokens, vocab + 5, device=device)[:, :vocab]
    return x.to(dtype), weight.to(dtype), logits.to(dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_products(shape, bias, dtype, device):
    x, weight, dy = operands(*shape, dtype, device)
    bias = torch.randn(shape[2], dtype=dtype, device=device) if bias else None
    memory = torch.full((shape[0], shape[2] + 5), 7.0, dtype=dtype, device=device)
    logits = memory[:, : shape[2]]
    _ops.vocab_chunk_logits_(logits, x, weight, bias)
    bounds = {"rtol": 1e-12, "atol": 1e-11} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 2e-4}
    want = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(logits.double(), want, **bounds)
    assert torch.all(memory[:, shape[2] :] == 7)  # what lies between the rows
    dx = _ops.vocab_chunk_input_grad(dy, weight)
    assert dx.shape == x.shape and dx.is_contiguous()
    torch.testing.assert_close(dx.double(), dy.double() @ weight.double(), **bounds)
    for add in (False, True):
        before = torch.full_like(weight, float("nan")) if not add else torch.randn_like(weight)
        dw = before.clone()
        _ops.vocab_chunk_weight_grad_(dw, dy, x, add)
        want = dy.double().t() @ x.double() + (before.double() if add else 0)
        torch.testing.assert_close(dw.double(), want, **bounds)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_weight_gradient_of_half_types_in_fp32(dtype):
    """Blocks of 1024 rows of the weight: each product is rounded once, to the half type; sums are exact fp32."""
    x, weight, dy = operands(40, 33, 2100, dtype)
    products = torch.cat([torch.mm(block.t(), x) for block in dy.split(1024, 1)]).float()
    before = torch.randn(weight.shape)
    for add, want in ((False, products), (True, before + products)):
        dw = before.clone() if add else torch.full_like(before, float("nan"))
        _ops.vocab_chunk_weight_grad_(dw, dy, x, add)
        assert torch.equal(dw, want)
    with pytest.raises(ValueError, match="dw: must be contiguous"):
        _ops.vocab_chunk_weight_grad_(before.t().contiguous().t(), dy, x, True)


def test_any_strides_and_threads(device):
    """x as a slice of columns; two threads, each with blocks of its own."""
    x, weight, dy = operands(60, 128, 700, device=device)
    x = torch.cat([x, x], 1)[:, 3:131]
    results = []
    for threads in (1, 2):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        logits, dw = torch.empty_like(dy), torch.empty_like(weight)
        _ops.vocab_chunk_logits_(logits, x, weight, None)
        _ops.vocab_chunk_weight_grad_(dw, dy, x, False)
        results.append((logits, dw, _ops.vocab_chunk_input_grad(dy, weight)))
        torch.set_num_threads(before)
    for one, other, want in zip(*results, (x @ weight.t(), dy.t() @ x, dy @ weight), strict=True):
        torch.testing.assert_close(one, other)
        torch.testing.assert_close(one, want, rtol=1e-5, atol=2e-4)


def test_opcheck(device):
    x, weight, dy = operands(40, 64, 128, device=device)
    torch.library.opcheck(_ops.vocab_chunk_logits_, (dy.contiguous(), x, weight, weight[:, 0].contiguous()))
    torch.library.opcheck(_ops.vocab_chunk_input_grad, (dy, weight))
    torch.library.opcheck(_ops.vocab_chunk_weight_grad_, (torch.zeros_like(weight), dy.contiguous(), x, True))


def test_refuses_shapes_that_do_not_fit():
    x, weight, dy = operands(40, 64, 128)
    with pytest.raises(ValueError, match=r"logits: shape \[40, 128\] must be \[tokens, vocab\] of x, \[39, 64\]"):
        _ops.vocab_chunk_logits_(dy, x[1:], weight, None)
    with pytest.raises(ValueError, match="logits: shape"):
        _ops.vocab_chunk_weight_grad_(weight, dy, x[:, 1:], False)
