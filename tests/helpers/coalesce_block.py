"""What the tests of coalesce_gradients share: a block with every small sum there is, its step, what it sent."""

import torch

import tp_ext
from tests.helpers.makers import HIDDEN, TOKENS
from tests.helpers.models import RichBlock
from tests.helpers.oracle import own_tokens

# By backward of RichBlock under SP: 4 of the norms, 2 row biases, q_norm, k_norm, weight and bias of qkv's copied head
SMALL = 10
SCATTERS = 4  # of activations, by forward and backward


def rich_block(group, sp=True, coalesce=True, cls=RichBlock, **options):
    torch.manual_seed(11)
    block = cls(group=group, sequence_parallel=sp, **options).double()
    with torch.no_grad():
        for param in block.parameters():  # norms start at 1 and 0
            param.mul_(1.5).add_(0.1)
    if coalesce:
        tp_ext.coalesce_gradients(block)
    return block


def own_x(group, sp=True):
    x = torch.randn(TOKENS, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(12))
    return (own_tokens(x, group) if sp and group is not None else x.clone()).requires_grad_()


def step(block, x, call=None):
    """y, dx and all gradients of a step."""
    block.zero_grad()
    x.grad = None
    torch.manual_seed(14)
    y = (call or block)(x)
    y.sin().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in block.parameters())]


def number_of_sums(block, x, call=None):
    """All-reduces of a forward and a backward."""
    with tp_ext.debug.count_collectives() as counts:  # CommDebugMode of torch 2.11 loses its way in nested hooks
        step(block, x, call)
    return counts.by_kind().get("all_reduce", 0)


def sent(run):
    """All-reduces, where there must be no dispatch mode: as the profiler sees them, and gloo's reduce-scatters, which
    are all-reduces, with them."""
    with torch.profiler.profile() as profile:
        run()
    return [event.name for event in profile.events()].count("gloo:all_reduce")
