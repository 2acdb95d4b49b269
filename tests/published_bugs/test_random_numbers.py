"""Published bugs of initial weights and dropout masks that depend on the number of ranks, on how a tensor is cut, or on
recomputation; ours are those of one process."""

import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import tp_ext
from tests.helpers import ranks
from tests.helpers.on_ranks import on_ranks
from tests.helpers.oracle import own_tokens
from tests.helpers.right_and_wrong import check, differs


@on_ranks(2)
def test_initial_weights_do_not_depend_on_how_they_are_cut(group):
    """A DTensor has other random values for each number of ranks and for each dim that is cut:
    https://github.com/pytorch/pytorch/issues/168058."""
    torch.manual_seed(3)
    want = tp_ext.ColumnParallelLinear(6, 8, False, group=None).weight.detach()
    torch.manual_seed(3)
    plain = nn.init.uniform_(torch.empty(8, 6), -1, 1)
    ours = []
    for kind in (tp_ext.ColumnParallelLinear, tp_ext.RowParallelLinear):
        torch.manual_seed(3)
        layer = kind(6, 8, False, group=group)
        ours.append(tp_ext.full_state_dict(layer)["weight"])
    mesh = tp_ext.init_mesh("cpu", tp=2)["tp"]
    published = []
    for dim in (0, 1):
        torch.manual_seed(3)
        weight = distribute_tensor(torch.empty(8, 6), mesh, [Shard(dim)])
        published.append(nn.init.uniform_(weight, -1, 1).full_tensor())
    assert ours[0].equal(want) and ours[1].equal(want)
    assert differs(published[0], plain) and differs(published[1], plain) and differs(*published)


def _masks(group):
    x = own_tokens(torch.ones(8, 16), group)
    torch.manual_seed(3)
    ours = tp_ext.Dropout(0.5, group=group, sequence_parallel=True)(x)
    torch.manual_seed(3)  # the same on all ranks of the group, without a generator of the rank's own
    return [tp_ext.gather_from_region(y, group, 0) for y in (ours, nn.functional.dropout(x, 0.5))]


def test_tokens_of_different_ranks_have_different_masks():
    """Under sequence parallelism dropout did not use the generator of the rank: a ``with a and b`` entered one of the
    two contexts, and the masks of all ranks were alike: https://github.com/NVIDIA/Megatron-LM/issues/1256."""
    torch.manual_seed(3)
    want = tp_ext.Dropout(0.5, group=None)(torch.ones(8, 16))
    results = ranks.run(_masks, 2)
    check(results, want, rtol=0, atol=0)
    published = results[0][1]
    assert published[:4].equal(published[4:])


class Block(nn.Module):
    def __init__(self, group, dropout):
        super().__init__()
        self.up = tp_ext.ColumnParallelLinear(4, 8, group=group, dtype=torch.float64)
        self.down = tp_ext.RowParallelLinear(8, 4, group=group, dtype=torch.float64)
        self.dropout = dropout

    def forward(self, x):
        return self.dropout(self.down(self.up(x).tanh())).sin()


def square(output, target):
    return output.square().mean()


def _recomputed(group, x, recompute):
    mesh = tp_ext.init_mesh("cpu", tp=group.size())
    torch.manual_seed(4)
    model = nn.Sequential(Block(mesh["tp"], tp_ext.Dropout(0.5, group=mesh["tp"])))
    run = tp_ext.parallelize(model, mesh, loss=square, recompute=recompute, seed=6)
    run.step(x, torch.zeros(x.shape[:2]))
    torch.manual_seed(4)
    block, published = Block(mesh["tp"], nn.Dropout(0.5)), []
    for options in ({}, {"use_reentrant": False, "preserve_rng_state": False}):
        block.zero_grad()
        torch.manual_seed(6)
        y = checkpoint(block, x, **options) if options else block(x)
        square(y, None).backward()
        published.append(tp_ext.gather_from_region(block.up.weight.grad, group, 0))
    up = next(param for name, param in run.state.named_parameters() if name.endswith("up.weight"))
    return tp_ext.gather_from_region(up.grad, group, 0), published


def test_recomputation_draws_the_same_masks():
    """Activation checkpointing did not keep the state of the generator, and gradients were those of other dropout masks
    than the loss: https://github.com/allenai/OLMo-core/pull/828."""
    x = torch.randn(3, 2, 4, dtype=torch.float64)
    want = ranks.run(_recomputed, 1, x, None)[0][0]
    for ours, (kept, fresh) in ranks.run(_recomputed, 2, x, "full"):
        torch.testing.assert_close(ours, want, rtol=1e-12, atol=1e-13)
        assert differs(fresh, kept)
