"""Attention with a sliding window, block by block of queries: that of all queries at once, and its gradients."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from tp_ext import _ops
from tp_ext.nn.attention import scaled_dot_product
from tp_ext.nn.attention.scaled_dot_product import explicit_attention, visible

pytestmark = pytest.mark.core

N = 12
MASKS = {
    "none": None,
    "bool": torch.rand(2, 1, N, N, generator=torch.Generator().manual_seed(1)) < 0.7,
    "float": torch.randn(1, 4, N, N).double(),
    "per_key": torch.randn(2, 4, 1, N).double(),
    "per_query": torch.randn(1, 1, N, 1).double(),
}


@pytest.mark.thinned
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", MASKS)
def test_blocks_are_the_whole(name, causal, softcap):
    torch.manual_seed(0)
    mask = MASKS[name]
    leaves = [torch.randn(2, heads, N, 3, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    if mask is not None and mask.is_floating_point():
        leaves.append(mask := mask.clone().requires_grad_())
    q, k, v = leaves[:3]
    if softcap is None:
        attend = partial(F.scaled_dot_product_attention, enable_gqa=True)
    else:
        attend = partial(explicit_attention, scale=None, softcap=softcap, blind=True)
    for window in (1, 2, 4, 10):
        seen = visible(torch.arange(N), torch.arange(N), causal, window)
        whole = seen if mask is None else scaled_dot_product.restricted(mask, seen)
        g, results = torch.randn(2, 4, N, 3, dtype=torch.float64), []
        blocks = [
            scaled_dot_product._by_query_groups(attend, q, k, v, mask, causal, window, least) for least in (1, 3, 512)
        ]
        for y in (attend(q, k, v, attn_mask=whole), *blocks):
            results.append((y, *torch.autograd.grad(y, leaves, g, allow_unused=True)))
        for result in results[1:]:
            torch.testing.assert_close(result, results[0], rtol=1e-12, atol=1e-13)


def test_time_and_memory_do_not_grow_with_the_square():
    """Saved for backward: q, k, v once, two masks of a block, what torch keeps of each block's result; no n^2."""
    n, window, saved = 4096, 64, {}
    q, k, v = torch.randn(3, 1, 2, n, 8, requires_grad=True).unbind(0)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.update({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()}) or t, lambda t: t
    ):
        y = scaled_dot_product.attention(q, k, v, None, scaled_dot_product.AttentionOptions(sliding_window=window))
    assert y.shape == q.shape
    tokens, masks = 2 * n * 4, 512 * (512 + 512 + window - 1) * 4  # bytes of a number per token and head; of the masks
    assert sum(saved.values()) <= 4 * 8 * tokens + tokens + masks < n * n


QUERIES = [
    (1, 2, 4, 513, 64, 64),
    (2, 1, 8, 7, 32, 48),
    (3, 2, 1, 1, 16, 16),
    (1, 1, 5, 130, 576, 512),
    (2, 3, 3, 6, 16, 32),
]


def _cached(shape, dtype):
    """Filled slots of a longer cache."""
    batch, heads, tokens, width = shape
    return torch.randn(batch, heads, tokens + 3, width, dtype=torch.float64).to(dtype)[:, :, :tokens]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", QUERIES, ids=str)
def test_few_queries(shape, dtype):
    """Against fp64, within the rounding of the result and of scores whose terms are added in any order; the same bits
    for any number of threads."""
    torch.manual_seed(0)
    batch, heads, rows, keys, width, v_width = shape
    q = torch.randn(batch, heads, rows, width, dtype=torch.float64).to(dtype)
    k, v = (_cached((batch, heads, keys, n), dtype) for n in (width, v_width))
    got = _ops.attention(q, k, v, 0.2)
    q64, k64, v64 = (t.double() for t in (q, k, v))
    exact = F.scaled_dot_product_attention(q64, k64, v64, scale=0.2)
    assert got.dtype == dtype and got.shape == exact.shape
    summed = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    terms = 0.2 * (q64.abs() @ k64.abs().mT).max()
    bound = torch.finfo(dtype).eps * exact.abs().max() + 4 * summed * terms * v64.abs().max()
    assert (got - exact).abs().max() <= bound
    assert torch.equal(_ops.attention(q, k, v, 0.2), got)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    assert torch.equal(_ops.attention(q, k, v, 0.2), got)
    torch.set_num_threads(threads)


def test_other_queries_are_torchs():
    """Exactly: many rows, odd widths, gradients, autocast, compiled code."""
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 2, 9, 16), torch.randn(1, 2, 20, 16), torch.randn(1, 2, 20, 16)
    few = q[:, :, :3]
    narrow = few[..., :15], k[..., :15], v
    for args in ((q, k, v), narrow):
        assert torch.equal(_ops.attention(*args), F.scaled_dot_product_attention(*args))
    leaves = [t.clone().requires_grad_() for t in (few, k, v)]
    grads = [
        torch.autograd.grad(f(*leaves).square().sum(), leaves) for f in (_ops.attention, F.scaled_dot_product_attention)
    ]
    assert all(map(torch.equal, *grads))
    with torch.autocast("cpu", torch.bfloat16):
        assert _ops.attention(few, k, v).dtype == torch.bfloat16
    compiled = torch.compile(_ops.attention, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(few, k, v), _ops.attention(few, k, v))
    mapped = torch.vmap(_ops.attention)(few[None], k[None], v[None])[0]
    torch.testing.assert_close(mapped, _ops.attention(few, k, v))
    one = few, k[:, :1], v[:, :1]  # keys and values of one head
    torch.testing.assert_close(_ops.attention(*one), F.scaled_dot_product_attention(*one))
    with pytest.raises(ValueError, match="four dims"):
        _ops.attention(few[0], k[0], v[0])


@torch.backends.mkldnn.flags(enabled=False)  # kernels/test_products.py tests attention by oneDNN's products
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("keys", "within", "causal", "kv_heads"),
    [(512, torch.float32, True, 2), (512, torch.float32, False, 4), (513, None, True, 4)],
)
def test_half_types_on_the_cpu(keys, within, causal, kv_heads, dtype):
    """Exactly torch's kernels of fp32 up to 512 keys, result and gradients rounded once; beyond them its own."""
    torch.manual_seed(0)
    q, g = (torch.randn(1, 4, keys, 16, dtype=dtype) for _ in range(2))
    leaves = [t.requires_grad_() for t in (q, *torch.randn(2, 1, kv_heads, keys, 16, dtype=dtype))]
    got = _ops.attention(*leaves, 0.2, causal)
    grads = torch.autograd.grad(got, leaves, g)
    wide = [t.detach().to(within or dtype).repeat_interleave(4 // t.shape[1], 1) for t in leaves]
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*wide, 0.0, causal, scale=0.2)
    assert torch.equal(got, out.to(dtype))
    out, g = (t.to(dtype).to(within or dtype) for t in (out, g))
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    for ours, each in zip(grads, backward(g, *wide, out, lse, 0.0, causal, scale=0.2), strict=True):
        assert torch.equal(ours, each.unflatten(1, (ours.shape[1], -1)).sum(2).to(dtype))
