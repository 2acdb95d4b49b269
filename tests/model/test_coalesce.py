"""coalesce_gradients: the gradients of a block with it are those without, in one all-reduce per dtype; also of blocks
that are checkpointed, copied, pickled, compiled, sharded by FSDP2, called otherwise.
"""

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
from tests.helpers.makers import HIDDEN, TOKENS, same
from tests.helpers.on_ranks import on_ranks
from tests.helpers.oracle import full_gradients, gradients

pytestmark = pytest.mark.core


def _both(group, sp):
    return [(step(b, own_x(group, sp)), gradients(b)) for b in (rich_block(group, sp, c) for c in (False, True))]


@pytest.mark.parametrize("sp", [False, True], ids=["", "sp"])
@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_gradients_are_those_without(p, sp):
    """To the last bit for two ranks, since a + b = b + a; for more, within the rounding of another order of 4 terms.
    And those of the unsharded block, within 1e-12."""
    per_rank = ranks.run(_both, p, sp)
    for (plain, _), (coalesced, _) in per_rank:
        if p <= 2:
            assert same(coalesced, plain)
        for a, b in zip(coalesced, plain, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-14, atol=1e-14)
    dense = rich_block(None, sp)
    step(dense, own_x(None))
    full = full_gradients([there for _, (_, there) in per_rank])  # asserts that copies are the same bits on all ranks
    for name, param in dense.named_parameters():
        torch.testing.assert_close(full[name], param.grad, rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


def _numbers(group):
    large = {sp: number_of_sums(rich_block(group, sp, False), own_x(group, sp)) for sp in (False, True)}
    return [large, {sp: number_of_sums(rich_block(group, sp), own_x(group, sp)) for sp in (False, True)}]


def test_one_all_reduce():
    """Without SP two more forward and two backward, of the activations; then only q_norm, k_norm and qkv are summed."""
    for p in (2, 3, 4):
        assert ranks.run(_numbers, p) == [[{True: SMALL, False: 4 + 4}, {True: 1, False: 4 + 1}]] * p
    assert ranks.run(_numbers, 1) == [[{True: 0, False: 0}] * 2]


class Rows(nn.Module):
    """Parameters of two dtypes and of no layer, one of them unused, and what has a second derivative."""

    def __init__(self, group, sequence_parallel):
        super().__init__()
        options = {"group": group, "sequence_parallel": sequence_parallel}
        self.row1 = tp_ext.RowParallelLinear(HIDDEN, HIDDEN, **options)
        self.row2 = tp_ext.RowParallelLinear(HIDDEN, HIDDEN, skip_bias_add=True, **options)
        self.norm = tp_ext.RMSNorm(HIDDEN, **options)
        self.unused = tp_ext.LayerNorm(HIDDEN, **options)
        self.normed = True

    def forward(self, x):
        y = self.row1(_features(x, self.row1)).tanh()
        y2, bias = self.row2(_features(x, self.row2))
        y = y * (y2 + bias)
        return y + self.norm(y.float()).double() if self.normed else y


def _features(x, row):
    """This rank's features of all tokens."""
    _, p, rank = row.tp_group
    sizes = [len(part) for part in torch.empty(TOKENS).tensor_split(p)]
    return tp_ext.all_gather_region(x, row.tp_group.name, 0, sizes).tensor_split(p, -1)[rank]


def _rows(group, coalesce):
    rows = rich_block(group, True, coalesce, Rows)
    rows.norm.float(), rows.unused.float()
    return rows


@on_ranks(2)
def test_dtypes_frozen_and_unused_parameters(group):
    """Two biases in fp64, a norm in fp32; then without one bias; then with nothing trained."""
    results = []
    for coalesce in (False, True):
        rows = _rows(group, coalesce)
        steps = [step(rows, own_x(group))]
        unused = [name for name, p in rows.named_parameters() if p.grad is None]
        sums = [number_of_sums(rows, own_x(group))]
        rows.row1.bias.requires_grad_(False)
        steps.append(step(rows, own_x(group)))
        sums.append(number_of_sums(rows, own_x(group)))
        rows.requires_grad_(False)
        sums.append(number_of_sums(rows, own_x(group)))
        results.append((steps, unused, sums))
    (a, unused_a, sums_a), (b, unused_b, sums_b) = results
    assert all(same(x, y) for x, y in zip(a, b, strict=True))
    assert unused_a == unused_b == ["unused.weight", "unused.bias"]
    assert sums_a == [3, 2, 0]
    assert sums_b == [2, 2, 0]


@on_ranks(2)
def test_second_derivatives(group):
    results = []
    for coalesce in (False, True):
        rows, x = _rows(group, coalesce), own_x(group)
        rows.normed = False  # a fused kernel
        inputs = [x, rows.row1.weight, rows.row1.bias, rows.row2.bias]
        first = torch.autograd.grad(rows(x).sin().sum(), inputs, create_graph=True)
        second = torch.autograd.grad(sum(g.sin().sum() for g in first), inputs)
        results.append([*first, *second])
    assert same(*results)


@on_ranks(2)
def test_some_gradients_only_and_a_graph_that_is_kept(group):
    results = []
    for coalesce in (False, True):
        block, x = rich_block(group, coalesce=coalesce), own_x(group)
        torch.manual_seed(14)
        loss = block(x).sin().sum()
        some = [block.norm1.bias, block.mlp.down.bias]
        got = [*torch.autograd.grad(loss, some, retain_graph=True)]
        loss.backward(retain_graph=True)
        loss.backward()
        results.append(got + [p.grad for p in block.parameters()])
    assert same(*results)


@on_ranks(2)
def test_gradients_of_copies_are_summed_before_main_grad_gets_them(group):
    results = []
    for coalesce in (False, True):
        torch.manual_seed(5)
        attention = tp_ext.ParallelAttention(
            HIDDEN, 4, num_kv_heads=1, group=group, sequence_parallel=True, grad_accumulation_fusion=True
        )
        if coalesce:
            tp_ext.coalesce_gradients(attention)
        for layer in (attention.qkv, attention.out):
            layer.weight.main_grad = torch.ones_like(layer.weight, dtype=torch.float64)
        x = own_x(group).detach().float().requires_grad_()
        attention(x, batch_size=2, total_tokens=TOKENS).sin().sum().backward()
        assert attention.qkv.weight.grad is None
        results.append([attention.qkv.weight.main_grad, attention.qkv.bias.grad, attention.out.bias.grad, x.grad])
    assert same(*results)


def test_arguments_that_are_no_module_are_refused():
    with pytest.raises(TypeError, match=r"module: int must be an nn.Module"):
        tp_ext.coalesce_gradients(3)


# Under what of torch wraps blocks


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


@pytest.mark.parametrize("how", CALLS)
@on_ranks(2)
def test_calls(group, how):
    block, x = rich_block(group), own_x(group)
    want = step(block, x)
    call = CALLS[how](block)
    used = call if isinstance(call, nn.Module) else block
    assert same(step(used, x, call), want)
    left = [name for name, m in used.named_modules() if getattr(m, "_coalesced", {})]
    assert left == []
    assert number_of_sums(used, x, call) == 1


@pytest.mark.parametrize(("part", "sums"), [("attention", 1), ("", SMALL)])
@on_ranks(2, backend="gloo", timeout=120)
def test_compiled(group, part, sums):
    """A part of the block takes what was entered before; when all of it is traced, each layer sums its own."""
    block, x = rich_block(group), own_x(group)
    block.dropout.p = block.attention.dropout = 0.0
    want = step(block, x)
    part_of_it = block.get_submodule(part)
    part_of_it.compile(fullgraph=True, backend="aot_eager")
    got = [step(block, x) for _ in range(2)]
    assert [same(one, want) for one in got] == [True] * 2
    assert sent(lambda: step(block, x)) == sums + SCATTERS


def _fail(module, args):
    raise ArithmeticError


@on_ranks(2, backend="gloo")
def test_layers_that_are_not_entered_sum_their_own(group):
    """A forward without hooks; hooks that were taken off; and one that failed leaves nothing behind."""
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
    assert [same(r, plain) for r, _ in (direct, removed)] == [True, True]
    assert [n for _, n in (direct, removed)] == [SMALL, SMALL]
    assert left == []


@pytest.mark.parametrize(("whole", "sums"), [(True, 1), (False, 1 + 2 + 5 + 1)])
@on_ranks(4, backend="gloo")
def test_fsdp2(group, whole, sums):
    """Over 2 x 2 ranks: what FSDP2 has gathered when the block begins, here norm2 and mlp.up, comes together; norm1,
    the attention and mlp.down are gathered later and sum their own."""
    fsdp = 1 if whole else 4  # its own reduce-scatters
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
    assert same(*results)
    assert sent(lambda: block(x).sum().backward()) == sums + SCATTERS + fsdp
