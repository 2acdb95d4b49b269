"""Attention with a sliding window, block by block of queries: that of all queries at once, and its gradients."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

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
