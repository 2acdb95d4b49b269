"""Blocks with coalesce_gradients that are checkpointed, copied, pickled, compiled, sharded by FSDP2, called
otherwise."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import tp_ext
from tests.helpers import ranks
from tests.helpers.coalesce_block import SCATTERS, SMALL, number_of_sums, own_x, rich_block, sent, step
from tests.helpers.data_parallel import mesh
from tests.helpers.makers import same

pytestmark = pytest.mark.core

CALLS = {
    "checkpoint": lambda block: lambda x: checkpoint(block, x, use_reentrant=False),
    "reentrant checkpoint": lambda block: lambda x: checkpoint(block, x, use_reentrant=True),
    "a copy": lambda block: copy.deepcopy(block),
    "a pickle": lambda block: pickle.loads(pickle.dumps(block)),
    "saved": lambda block: torch.load(io.BytesIO(_saved(block)), weights_only=False),
    "around another": lambda block: (tp_ext.coalesce_gradients(block.mlp), block)[1],
}


def _saved(block):
    buffer = io.BytesIO()
    torch.save(block, buffer)
    return buffer.getvalue()


def _called(group, how):
    block, x = rich_block(group), own_x(group)
    want = step(block, x)
    call = CALLS[how](block)
    used = call if isinstance(call, nn.Module) else block
    same_results = same(step(used, x, call), want)
    left = [name for name, m in used.named_modules() if getattr(m, "_coalesced", {})]
    return same_results, number_of_sums(used, x, call), left


@pytest.mark.parametrize("how", CALLS)
def test_calls(how):
    assert ranks.run(_called, 2, how) == [(True, 1, [])] * 2


def _compiled(group, part):
    block, x = rich_block(group), own_x(group)
    block.dropout.p = block.attention.dropout = 0.0
    want = step(block, x)
    part_of_it = block.get_submodule(part)
    part_of_it.compile(fullgraph=True, backend="aot_eager")
    got = [step(block, x) for _ in range(2)]
    return [same(one, want) for one in got], sent(lambda: step(block, x))


@pytest.mark.parametrize(("part", "sums"), [("attention", 1), ("", SMALL)])
def test_compiled(part, sums):
    """A part of the block takes what was entered before; when all of it is traced, each layer sums its own."""
    assert ranks.run(_compiled, 2, part, timeout=120) == [([True] * 2, sums + SCATTERS)] * 2


def _other_ways(group):
    block, x = rich_block(group, coalesce=False), own_x(group)
    keys, plain = list(block.state_dict()), step(block, x)
    handle = tp_ext.coalesce_gradients(block)
    assert list(block.state_dict()) == keys
    direct = step(block, x, block.forward), number_of_sums(block, x, block.forward)  # no hook runs
    hook = block.mlp.down.register_forward_pre_hook(_fail)
    with pytest.raises(ArithmeticError):
        block(x)
    hook.remove()
    left = [name for name, m in block.named_modules() if getattr(m, "_coalesced", {})]
    with torch.inference_mode():
        block(x)
    handle.remove()
    removed = step(block, x), number_of_sums(block, x)
    return [same(r, plain) for r, _ in (direct, removed)], [n for _, n in (direct, removed)], left


def _fail(module, args):
    raise ArithmeticError


def test_layers_that_are_not_entered_sum_their_own():
    """A forward without hooks; hooks that were taken off; and one that failed leaves nothing behind."""
    assert ranks.run(_other_ways, 2) == [([True, True], [SMALL, SMALL], [])] * 2


def _under_fsdp(group, whole):
    data, tensor = (mesh(2, 2)[axis] for axis in ("dp", "tp"))
    results = []
    for coalesce in (False, True):
        block = rich_block(tensor.get_group(), coalesce=coalesce)
        for one in () if whole else (block.norm1, block.attention, block.mlp.down):
            fully_shard(one, mesh=data)
        fully_shard(block, mesh=data)
        x = own_x(tensor.get_group())
        torch.manual_seed(14)
        block(x).sin().sum().backward()
        results.append([p.grad.full_tensor() for p in block.parameters()] + [x.grad])
    return same(*results), sent(lambda: block(x).sum().backward())


@pytest.mark.parametrize(("whole", "sums"), [(True, 1), (False, 1 + 2 + 5 + 1)])
def test_fsdp2(whole, sums):
    """Over 2 x 2 ranks: what FSDP2 has gathered when the block begins, here norm2 and mlp.up, comes together; norm1,
    the attention and mlp.down are gathered later and sum their own."""
    fsdp = 1 if whole else 4  # its own reduce-scatters
    assert ranks.run(_under_fsdp, 4, whole) == [(True, sums + SCATTERS + fsdp)] * 4
