"""Megatron-core's own classes and ours, from the same weights, in the same process group: equal outputs and gradients.
Where theirs are known to be wrong: test_megatron_differences.py.

fp64 within 1e-12, as both sum the same short rows in some order; cross-entropy in fp32, which is all that theirs has.
"""

import pytest
import torch
from torch import nn

import tp_ext
from tests.helpers.megatron_on_cpu import MISSING, fill, layer_config, megatron, run
from tests.helpers.oracle import own_tokens
from tp_ext import ColumnParallelLinear, RowParallelLinear, Sharding

pytestmark = pytest.mark.skipif(MISSING, reason="needs megatron-core")

# The first use of Megatron takes each rank seconds: test_megatron_blocks.py is on four
EVERY = pytest.mark.parametrize("p", [2, *(pytest.param(p, marks=pytest.mark.exhaustive) for p in (1, 4))])
SEQ, BATCH = 4, 2


def close(got, want, bound=1e-12):
    torch.testing.assert_close(got, want, rtol=bound, atol=bound)


def _simple(*shape):
    """Normal numbers that fp32 holds, too."""
    return torch.randn(shape).double()


# Regions


def _regions(m, group):
    """Name -> theirs, ours."""
    return {
        "copy": (m.copy_to_tensor_model_parallel_region, lambda x: tp_ext.copy_to_region(x, group)),
        "reduce": (m.reduce_from_tensor_model_parallel_region, lambda x: tp_ext.reduce_from_region(x, group)),
        "scatter last": (m.scatter_to_tensor_model_parallel_region, lambda x: tp_ext.scatter_to_region(x, group)),
        "gather last": (m.gather_from_tensor_model_parallel_region, lambda x: tp_ext.gather_from_region(x, group)),
        "scatter first": (
            m.scatter_to_sequence_parallel_region,
            lambda x: tp_ext.scatter_to_region(x, group, dim=0),
        ),
        "gather first, sharded work": (
            m.gather_from_sequence_parallel_region,
            lambda x: tp_ext.all_gather_region(x, group),
        ),
        "gather first, replicated work": (
            lambda x: m.gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=False),
            lambda x: tp_ext.gather_from_region(x, group, dim=0),
        ),
        "reduce-scatter first": (
            m.reduce_scatter_to_sequence_parallel_region,
            lambda x: tp_ext.reduce_scatter_region(x, group),
        ),
        "all-gather last": (
            m.all_gather_last_dim_from_tensor_parallel_region,
            lambda x: tp_ext.all_gather_region(x, group, dim=-1),
        ),
        "reduce-scatter last": (
            m.reduce_scatter_last_dim_to_tensor_parallel_region,
            lambda x: tp_ext.reduce_scatter_region(x, group, dim=-1),
        ),
        "tokens to features": (m.mappings.all_to_all_sp2hp, lambda x: tp_ext.all_to_all_region(x, group, 1, 0)),
        "features to tokens": (m.mappings.all_to_all_hp2sp, lambda x: tp_ext.all_to_all_region(x, group, 0, 1)),
    }


def _every_region(group):
    results = {}
    with megatron(group) as theirs:
        for name, pair in _regions(theirs, group).items():
            for region in pair:
                x = torch.randint(-8, 9, (8, 8), generator=torch.Generator().manual_seed(group.rank())).double()
                x.requires_grad_()
                y = region(x.clone())  # a clone: theirs may write to it
                y.backward(torch.arange(y.numel()).view(y.shape).double() % 7 + group.rank())
                results.setdefault(name, []).append((y, x.grad))
    return results


@EVERY
def test_regions_are_the_same_to_the_last_bit(p):
    """Whole numbers, so that the order of sums does not matter."""
    for results in run(_every_region, p):
        assert len(results) == 12
        for name, (theirs, ours) in results.items():
            assert all(torch.equal(a, b) for a, b in zip(theirs, ours, strict=True)), name


# Linears

LINEARS = {
    "column": (ColumnParallelLinear, {}, {}),
    "column sp": (ColumnParallelLinear, {"sequence_parallel": True}, {}),
    "column gathers": (ColumnParallelLinear, {"gather_output": True}, {"gather_output": True}),
    "column leaves its bias": (ColumnParallelLinear, {"skip_bias_add": True}, {"skip_bias_add": True}),
    "column frozen": (ColumnParallelLinear, {}, {"bias": False}),
    "row": (RowParallelLinear, {}, {}),
    "row cuts": (RowParallelLinear, {"input_is_parallel": False}, {"input_is_parallel": False}),
    "row sp leaves its bias": (
        RowParallelLinear,
        {"sequence_parallel": True, "skip_bias_add": True},
        {"skip_bias_add": True},
    ),
    "row frozen": (RowParallelLinear, {}, {}),
}


def _linear(group, name, dense, x, dy):
    """Output and gradients of theirs and ours; x and dy are those of the unsharded layer."""
    p, rank = group.size(), group.rank()
    kind, options, their_options = LINEARS[name]
    column, sp = kind is ColumnParallelLinear, options.get("sequence_parallel", False)
    dense.weight.requires_grad_("frozen" not in name)
    if name == "column frozen":  # theirs has no gradient for a bias then
        dense.bias = None
    ours = kind.from_linear(dense, group=group, **options)
    with megatron(group) as tensor_parallel:
        more = {"config": layer_config(group, sp), "init_method": fill(dense.weight.detach()), "bias": True}
        if not column:
            more |= {"input_is_parallel": True, "skip_bias_add": False}
        theirs = getattr(tensor_parallel, kind.__name__)(x.shape[-1], dy.shape[-1], **(more | their_options))
        theirs.weight.requires_grad_(dense.weight.requires_grad)
        if ours.bias is not None:
            theirs.bias.data.copy_(ours.bias)
        assert torch.equal(theirs.weight, ours.weight), "they cut the weight as we do"
        if column:
            x = own_tokens(x, group) if sp else x
            dy = dy if options.get("gather_output") else dy.chunk(p, -1)[rank]
        else:
            x = x if name == "row cuts" else x.chunk(p, -1)[rank]
            dy = own_tokens(dy, group) if sp else dy
        results = []
        for layer in (theirs, ours):
            one = x.clone().requires_grad_()
            y = layer(one)
            y, bias = y if isinstance(y, tuple) else (y, None)
            y.backward(dy.contiguous())
            results.append([y, bias, one.grad, *(p.grad for p in layer.parameters())])
    return results


@EVERY
@pytest.mark.parametrize("name", LINEARS)
def test_linears(name, p):
    dense = nn.Linear(8, 12).double()
    x, dy = _simple(SEQ, BATCH, 8), _simple(SEQ, BATCH, 12)
    for theirs, ours in run(_linear, p, name, dense, x, dy):
        for a, b in zip(theirs, ours, strict=True):  # y, bias, dx, dw, db
            assert (a is None) == (b is None)
            if a is not None:
                close(a, b)


# The vocabulary


def _embedding(group, table, ids, dy, sp):
    dy = own_tokens(dy, group) if sp else dy
    with megatron(group) as tensor_parallel:
        options = {"config": layer_config(group), "init_method": fill(table)}
        theirs = tensor_parallel.VocabParallelEmbedding(*table.shape, reduce_scatter_embeddings=sp, **options)
        ours = tp_ext.VocabParallelEmbedding(
            *table.shape, group=group, sequence_parallel=sp, init=fill(table), dtype=torch.float64
        )
        y = theirs(ids)  # under sequence parallelism [seq, batch, hidden], sharded on seq, from ids [batch, seq]
        y.backward(dy)
        z = ours(ids.t() if sp else ids)
        z.backward(dy.view(z.shape))
    return (y.flatten(0, 1), theirs.weight.grad), (z.view(-1, table.shape[1]), ours.weight.grad)


@EVERY
@pytest.mark.parametrize("sp", [False, True])
def test_vocab_parallel_embedding(sp, p):
    table, ids = _simple(12, 3), torch.randint(12, (BATCH, SEQ))
    for theirs, ours in run(_embedding, p, table, ids, _simple(*((SEQ, BATCH) if sp else (BATCH, SEQ)), 3), sp):
        assert torch.equal(theirs[0], ours[0])  # a sum of one row and zeros
        close(theirs[1], ours[1])


def _cross_entropy(group, logits, target, smoothing):
    results = []
    with megatron(group) as tensor_parallel:
        for i in range(2):
            x = logits.chunk(group.size(), -1)[group.rank()].clone().requires_grad_()
            if i:
                loss = tp_ext.vocab_parallel_cross_entropy(
                    x, target, group, label_smoothing=smoothing, vocab_size=logits.shape[-1], reduction="none"
                )
            else:  # a clone: theirs writes to it. Its smoothing is spread over the other classes, not over all
                theirs = smoothing * (1 - 1 / logits.shape[-1])
                loss = tensor_parallel.vocab_parallel_cross_entropy(x.clone(), target, theirs)
            loss.mean().backward()
            results.append((loss, x.grad))
    return results


@pytest.mark.parametrize(
    ("p", "smoothing"), [(1, 0.1), (2, 0.0), *(pytest.param(p, 0.0, marks=pytest.mark.exhaustive) for p in (1, 4))]
)
def test_vocab_parallel_cross_entropy(p, smoothing):
    logits, target = 5 * torch.randn(SEQ, BATCH, 12), torch.randint(12, (SEQ, BATCH))
    for theirs, ours in run(_cross_entropy, p, logits, target, smoothing):
        close(theirs, ours, 2e-6)


# Half a model is theirs, half ours: in one process group, in any order


def _mixed(group, up, down, x, sp):
    own = (own_tokens(x, group) if sp else x.clone()).requires_grad_()
    results = []
    with megatron(group) as m:
        config = layer_config(group, sp)
        weights = {"init_method": fill(up.weight.detach()), "config": config}
        their_up = m.ColumnParallelLinear(up.in_features, up.out_features, bias=False, **weights)
        weights["init_method"] = fill(down.weight.detach())
        options = {"bias": False, "input_is_parallel": True, "skip_bias_add": False}
        their_down = m.RowParallelLinear(down.in_features, down.out_features, **options, **weights)
        our_up = ColumnParallelLinear.from_linear(up, group=group, sequence_parallel=sp)
        our_down = RowParallelLinear.from_linear(down, group=group, sequence_parallel=sp)
        for first, second in ((our_up, their_down), (their_up, our_down)):
            own.grad = None
            h = first(own)
            y = second(torch.tanh(h[0] if isinstance(h, tuple) else h))
            y = y[0] if isinstance(y, tuple) else y
            (y**2).sum().backward()
            results.append([y, own.grad, first.weight.grad, second.weight.grad])
    return results


@EVERY
@pytest.mark.parametrize("sp", [False, True])
def test_their_layers_and_ours_in_one_block(sp, p):
    up, down = nn.Linear(4, 8, bias=False).double(), nn.Linear(8, 4, bias=False).double()
    x = _simple(SEQ, BATCH, 4).requires_grad_()
    y = down(torch.tanh(up(x)))
    (y**2).sum().backward()
    for rank, both in enumerate(run(_mixed, p, up, down, x.detach(), sp)):
        for got in both:
            want = [t.chunk(p)[rank] if sp else t for t in (y.detach(), x.grad)]
            close(got, [*want, up.weight.grad.chunk(p)[rank], down.weight.grad.chunk(p, 1)[rank]])


def _over_theirs(group, up, down, x):
    with megatron(group) as m:
        options = {"config": layer_config(group), "init_method": fill(up.weight.detach()), "bias": True}
        theirs = m.ColumnParallelLinear(up.in_features, up.out_features, **options)
        columns = Sharding(0, (up.out_features,))
        theirs.bias.data.copy_(columns.shard(up.bias.detach(), group.rank(), group.size()))
        model = nn.Sequential(theirs, RowParallelLinear.from_linear(down, group=group))
        model[1](torch.tanh(theirs(x)[0])).square().sum().backward()
        unaware = tp_ext.full_state_dict(model)["0.weight"]
        tp_ext.declare_layouts(theirs, dict.fromkeys(("weight", "bias"), tp_ext.Layout((columns, group))))
        state = tp_ext.full_state_dict(model)
        norm = tp_ext.clip_grad_norm_(model, 1.0)
        return unaware.shape, state, norm, theirs.weight.grad


@pytest.mark.parametrize("p", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_our_functions_over_their_layers(p):
    """Once the layer says how its parameters are cut."""
    dense = nn.Sequential(nn.Linear(4, 8).float().double(), nn.Linear(8, 4).double())
    x = _simple(SEQ, 4)
    dense[1](torch.tanh(dense[0](x))).square().sum().backward()
    want = nn.utils.clip_grad_norm_(dense.parameters(), 1.0)
    for rank, (unaware, state, norm, grad) in enumerate(run(_over_theirs, p, *dense, x)):
        assert unaware == (8 // p, 4), "which is why it has to say it"
        assert {name: tuple(value.shape) for name, value in state.items() if value is not None} == {
            name: tuple(value.shape) for name, value in dense.state_dict().items()
        }
        for name, value in dense.state_dict().items():
            assert torch.equal(state[name], value)
        close(norm, want)
        close(grad, dense[0].weight.grad.chunk(p)[rank])
