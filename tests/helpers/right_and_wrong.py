"""The comparison in a test of a published bug: on every rank ours is the result of one process; the published way of
computing it is not, on one rank at least."""

import torch
from torch import distributed as dist
from torch.utils._pytree import tree_leaves


def differs(found, want):
    """Returns whether one of the tensors is not that of one process."""
    for one, other in zip(tree_leaves(found), tree_leaves(want), strict=True):
        if one is None or one.shape != other.shape or not torch.allclose(one, other, rtol=1e-6):
            return True
    return False


def check(results, want, rtol=1e-10, atol=1e-12):
    """Compares (ours, published) of each rank with the result of one process."""
    for ours, _ in results:
        torch.testing.assert_close(ours, want, rtol=rtol, atol=atol)
    assert any(differs(published, want) for _, published in results), "the published way is right here"


def check_on_rank(group, result, want, rtol=1e-10, atol=1e-12):
    """Compares (ours, published) of this rank; all ranks of ``group`` call it."""
    ours, published = result
    torch.testing.assert_close(ours, want, rtol=rtol, atol=atol)
    wrong = torch.tensor(int(differs(published, want)))
    dist.all_reduce(wrong, group=group)
    assert wrong, "the published way is right here"
