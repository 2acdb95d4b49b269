"""Embedding with a cut vocabulary. p ranks are emulated in one process: each primitive runs on the row slices, and
the sum of the results stands for the all-reduce."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tp_ext import _ops

pytestmark = pytest.mark.core

DTYPES = [torch.double, torch.float32, torch.bfloat16, torch.float16]


def problem(
    vocab: int, hidden: int, shape: tuple[int, ...], device: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Weight, ids (with repeats), upstream gradient."""
    torch.manual_seed(0)
    weight = torch.randn(vocab, hidden).to(device, dtype)
    ids = torch.randint(vocab, shape).to(device)
    return weight, ids, torch.randn(*shape, hidden).to(device, dtype)


def weight_grad(weight: Tensor, ids: Tensor, grad: Tensor) -> Tensor:
    exact = weight.detach().double().clone().requires_grad_()
    F.embedding(ids, exact).backward(grad.double())
    assert exact.grad is not None
    return exact.grad


@pytest.mark.thinned
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [1, 7, 8, 33, 1030])
@pytest.mark.parametrize("widths", [[48], [24, 24], [17, 0, 31]])
def test_ranks_add_up_to_the_full_embedding(widths: list[int], hidden: int, dtype: torch.dtype, device: str) -> None:
    """Forward exactly; backward sums in fp32 (fp64) and rounds once, so half an ulp of the exact gradient."""
    weight, ids, grad = problem(48, hidden, (17, 23), device, dtype)
    total = torch.zeros_like(grad)
    grads, start = [], 0
    for width in widths:
        local = F.pad(weight[start : start + width], (0, 0, 0, 2), value=1e4)  # two rows of padding
        y = _ops.vocab_embedding_fwd(local, ids, start, width, 48)
        outside = (ids < start) | (ids >= start + width)
        assert not y[outside].any()
        total += y
        dw = _ops.vocab_embedding_bwd(grad, ids.int(), width + 2, start, width)
        assert dw.shape == local.shape and dw.dtype == dtype and not dw[width:].any()
        grads.append(dw[:width])
        start += width
    assert torch.equal(total, F.embedding(ids, weight))
    exact = weight_grad(weight, ids, grad)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(torch.cat(grads).double(), exact, rtol=eps, atol=max(1e-14, 8e-6 * (dtype != DTYPES[0])))


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0, 2), (2, 3, 4)])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_public_operator(shape: tuple[int, ...], sequence_parallel: bool, device: str) -> None:
    weight, ids, grad = problem(11, 5, shape, device, torch.double)
    weight.requires_grad_()
    y = _ops.vocab_parallel_embedding(ids, weight, "", 0, 11, 11, sequence_parallel, None)
    expected = F.embedding(ids, weight)
    assert torch.equal(y, expected.view(-1, 5) if sequence_parallel else expected)
    y.backward(grad.view_as(y), retain_graph=True)
    first, weight.grad = weight.grad, None
    y.backward(grad.view_as(y))
    assert torch.equal(weight.grad, first)
    torch.testing.assert_close(weight.grad, weight_grad(weight.detach(), ids, grad))
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.autograd.grad(y, weight, grad.view_as(y).requires_grad_(), create_graph=True)


def test_gradcheck_and_strides(device: str) -> None:
    weight, ids, grad = problem(11, 6, (4, 3), device, torch.double)
    w = weight.T.contiguous().T.requires_grad_()
    assert torch.autograd.gradcheck(lambda w: _ops.vocab_parallel_embedding(ids.T, w, "", 0, 11, 11, False, None), w)
    assert torch.equal(_ops.vocab_embedding_fwd(w.detach(), ids.T, 0, 11, 11), F.embedding(ids.T, weight))
    strided = _ops.vocab_embedding_bwd(grad.transpose(0, 1), ids.T, 11, 0, 11)
    torch.testing.assert_close(strided, weight_grad(weight, ids, grad))
    expanded = grad[:1, :1].expand(4, 3, 6)
    torch.testing.assert_close(_ops.vocab_embedding_bwd(expanded, ids, 11, 0, 11), weight_grad(weight, ids, expanded))


def test_a_frequent_id_is_summed_in_fp32_the_same_on_every_run(device: str) -> None:
    grad = torch.randn(5000, 40, device=device).bfloat16()
    ids = torch.zeros(5000, dtype=torch.long, device=device)
    ids[::7] = 2
    first = _ops.vocab_embedding_bwd(grad, ids, 3, 0, 3)
    exact = weight_grad(torch.zeros(3, 40, device=device), ids, grad)
    torch.testing.assert_close(first.double(), exact, rtol=2.0**-8, atol=1e-3)
    assert all(torch.equal(first, _ops.vocab_embedding_bwd(grad, ids, 3, 0, 3)) for _ in range(3))


def test_errors_name_value_and_rule() -> None:
    weight, ids, grad = problem(11, 5, (4,), "cpu", torch.float32)
    for bad in (-1, 11):
        with pytest.raises(IndexError, match=rf"ids: {bad} must be in \[0, vocab_size\), \[0, 11\)"):
            _ops.vocab_parallel_embedding(torch.tensor([1, bad]), weight, "", 0, 11, 11, False, None)
    with pytest.raises(TypeError, match="ids: dtype Float must be int64 or int32"):
        _ops.vocab_embedding_fwd(weight, ids.float(), 0, 11, 11)
    with pytest.raises(ValueError, match="vocab_local: 12 must be at most the 11 rows"):
        _ops.vocab_embedding_fwd(weight, ids, 0, 12, 12)
    with pytest.raises(ValueError, match=r"\[8, 19\) must lie in \[0, vocab_size\)"):
        _ops.vocab_embedding_fwd(weight, ids, 8, 11, 11)
    with pytest.raises(ValueError, match="grad: shape"):
        _ops.vocab_embedding_bwd(grad, ids[:2], 11, 0, 11)


def test_opcheck_and_compile(device: str) -> None:
    weight, ids, grad = problem(11, 5, (4, 3), device, torch.float32)
    torch.library.opcheck(_ops.vocab_embedding_fwd, (weight, ids, 3, 8, 11))
    torch.library.opcheck(_ops.vocab_embedding_bwd, (grad, ids, 11, 3, 8))
    weight.requires_grad_()
    arguments = ("", 0, 11, 11, True, None)
    torch.library.opcheck(torch.ops.tp_ext.vocab_parallel_embedding, (ids, weight, *arguments))
    compiled = torch.compile(
        lambda w: _ops.vocab_parallel_embedding(ids, w, *arguments).sin(), fullgraph=True, backend="aot_eager"
    )
    compiled(weight).backward(grad.view(-1, 5))
    expected = weight.detach().clone().requires_grad_()
    F.embedding(ids, expected).sin().backward(grad)
    torch.testing.assert_close(weight.grad, expected.grad)
