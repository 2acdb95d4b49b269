"""Conformance case 52: ranks that differ, under TORCH_DISTRIBUTED_DEBUG=DETAIL, end in an error that names them; ranks
that do not are not disturbed by it (docs/reference/correctness.md). The level is read when a process group is made."""

import contextlib
import datetime
import time

import pytest
import torch
from torch import distributed as dist

import tp_ext
from tests.helpers import ranks
from tests.helpers.on_ranks import on_ranks
from tests.helpers.region_maps import cases
from tests.helpers.small_gpt import batches, make
from tp_ext import (
    ColumnParallelLinear,
    LayerNorm,
    ParallelAttention,
    ParallelMLP,
    RMSNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelLMHead,
    vocab_parallel_cross_entropy,
)

pytestmark = pytest.mark.core

SP = pytest.mark.parametrize("sp", [False, True], ids=["", "sp"])
SECONDS = 60  # nothing waits for so long; machines that do other things at the same time come near


@contextlib.contextmanager
def _checked(seconds=SECONDS):
    """A group of all ranks as DETAIL makes it."""
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        yield dist.new_group(timeout=datetime.timedelta(seconds=seconds))
    finally:
        dist.set_debug_level(level)


# What differs. Each: a function of the group, rows and dtype, which are other ones on the last rank


def _sum(y):
    y.sum().backward()


def _region(name, **options):
    return lambda group, x: _sum(getattr(tp_ext, name)(x, group, **options))


def _linear(kind, **options):
    def call(group, x):
        width = 4 * group.size() if kind is RowParallelLinear else 4
        _sum(kind(width, 4, group=group, dtype=x.dtype, **options)(x))

    return call


def _norm(kind):
    return lambda group, x: _sum(kind(len(x), group=group, sequence_parallel=True, dtype=x.dtype)(x.mT))


def _embedding(**options):
    return lambda group, x: VocabParallelEmbedding(60, 4, group=group, dtype=x.dtype, **options)(torch.arange(len(x)))


def _loss(group, x):
    _sum(vocab_parallel_cross_entropy(x, torch.zeros(len(x), dtype=torch.int64), group))


def _attention(group, x):
    _sum(ParallelAttention(4, 4, group=group, head_dim=2, dtype=x.dtype)(x[None]))


def _mlp(group, x):
    _sum(ParallelMLP(4, 8, group=group, dtype=x.dtype)(x))


def _state(group, x):
    tp_ext.full_state_dict(
        VocabParallelLMHead(4, len(x), group=group, pad_to_multiple_of=1, dtype=x.dtype), group=group
    )


CALLS = {
    "copy": _region("copy_to_region"),
    "reduce": _region("reduce_from_region"),
    "scatter": _region("scatter_to_region", dim=0),
    "gather": _region("gather_from_region"),
    "all_gather": _region("all_gather_region"),
    "reduce_scatter": _region("reduce_scatter_region"),
    "column": _linear(ColumnParallelLinear),
    "column_sp": _linear(ColumnParallelLinear, sequence_parallel=True),
    "column_gathered": _linear(ColumnParallelLinear, gather_output=True),
    "row": _linear(RowParallelLinear),
    "row_sp": _linear(RowParallelLinear, sequence_parallel=True),
    "rms_norm_sp": _norm(RMSNorm),
    "layer_norm_sp": _norm(LayerNorm),
    "embedding": _embedding(),
    "embedding_sp": _embedding(sequence_parallel=True),
    "cross_entropy": _loss,
    "attention": _attention,
    "mlp": _mlp,
}


@pytest.mark.thinned(1)
@on_ranks(2, 3, 4, backend="gloo", timeout=2 * SECONDS)
@pytest.mark.parametrize("how", ["shape", "dtype"])
@pytest.mark.parametrize("name", CALLS)
def test_case_52_ranks_that_differ_are_named(group, name, how):
    odd, p = group.rank() == group.size() - 1, group.size()
    rows, dtype = 2 * p + p * (odd and how == "shape"), [torch.float32, torch.float64][odd and how == "dtype"]
    x, before = torch.ones(rows, 4, dtype=dtype, requires_grad=True), time.monotonic()
    with _checked() as checked, pytest.raises(RuntimeError) as raised:
        CALLS[name](checked, x)
    assert time.monotonic() - before < SECONDS
    assert "Detected mismatch between collectives on ranks" in str(raised.value)
    assert f"Rank {p - 1} is running collective" in str(raised.value)


@on_ranks(2, 3, 4, backend="gloo", timeout=2 * SECONDS)
@pytest.mark.parametrize("how", ["shape", "dtype"])
def test_case_52_full_states_of_models_that_differ_are_refused(group, how):
    odd, p = group.rank() == group.size() - 1, group.size()
    rows, dtype = 2 * p + p * (odd and how == "shape"), [torch.float32, torch.float64][odd and how == "dtype"]
    with _checked() as checked, pytest.raises(ValueError) as raised:
        _state(checked, torch.ones(rows, 4, dtype=dtype))
    message = str(raised.value)
    assert "must be the same on all ranks that hold the model" in message and f"on rank {p - 1}" in message


def _exchange(group):
    with _checked() as checked:
        tp_ext.all_to_all_region(torch.ones(4 + 2 * group.rank(), 4), checked, 1, 0)


def test_case_52_an_all_to_all_of_other_shapes_is_ended_by_gloo():
    """Torch does not compare the shapes of an all-to-all, whose ranks may differ. Gloo finds out, and aborts."""
    with pytest.raises(ranks.RankError) as raised:
        ranks.run(_exchange, 2, timeout=2 * SECONDS)
    assert raised.value.type_name in ("WorkerDied", "RuntimeError")


def _one_stays_away(group):
    with _checked(seconds=5) as checked:  # also to make the group, on a slow machine
        if group.rank() == group.size() - 1:
            return ""
        with pytest.raises(RuntimeError) as raised:
            tp_ext.reduce_from_region(torch.ones(3), checked)
        return str(raised.value)


@pytest.mark.parametrize("p", [pytest.param(2, marks=pytest.mark.exhaustive), 3])
def test_case_52_a_rank_that_stays_away_is_named(p):
    first, *_ = ranks.run(_one_stays_away, p)
    assert f"Ranks {p - 1} failed to pass monitoredBarrier" in first


# What does not differ


@pytest.mark.parametrize("p", [3, *(pytest.param(p, marks=pytest.mark.exhaustive) for p in (2, 4))])
@on_ranks(backend="gloo", timeout=2 * SECONDS)
def test_case_52_regions_are_not_disturbed(group):
    with _checked() as checked:
        for case in cases(group.size()):
            x = case.inputs(group.size())[group.rank()].requires_grad_()
            results = []
            for g in (checked, group):
                y = case(x, g)
                results.append((y, *torch.autograd.grad(y.sin().sum(), x)))
            assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), str(case)


def _step(group, sp):
    """A training step of a whole model, with gradient clipping, states and checks; everything it computes."""
    model = make(group, sequence_parallel=sp)
    optimizer = torch.optim.AdamW(model.parameters())
    loss = model.loss(*batches(1)[0])
    loss.backward()
    grads = [param.grad.clone() for param in model.parameters()]
    norm = tp_ext.clip_grad_norm_(model, 0.1, group=group)
    optimizer.step()
    state = tp_ext.full_state_dict(model, group=group)
    slots = tp_ext.full_optimizer_state_dict(model, optimizer, group=group)
    tp_ext.load_full_state_dict(model, state, group=group)
    tp_ext.load_full_optimizer_state_dict(model, optimizer, slots, group=group)
    tp_ext.debug.check(model, group=group)
    tp_ext.debug.assert_replicated(loss.detach(), group=group)
    return [loss, norm, *grads, *model.parameters(), *state.values()]


def _layers(group, sp):
    """What the model has not: biases, other layouts, main_grad, attention's own dropout and norms, double backward."""
    torch.manual_seed(5)
    options = {"group": group, "sequence_parallel": sp}
    x = torch.randn(7, 8).tensor_split(group.size())[group.rank()] if sp else torch.randn(7, 8)
    x.requires_grad_()
    attention = ParallelAttention(8, 4, num_kv_heads=1, head_dim=2, qk_norm=True, dropout=0.1, **options)
    column = ColumnParallelLinear(8, 9, gather_output=True, grad_accumulation_fusion=True, **options)
    column.weight.main_grad = torch.zeros_like(column.weight)
    y = attention(LayerNorm(8, **options)(x), batch_size=1, total_tokens=7)
    y = ParallelMLP(8, 9, activation="geglu", **options)(y, 7)
    y = column(y, 7)
    y = RowParallelLinear(9, 3, input_is_parallel=False, group=group)(y)
    loss = VocabParallelLMHead(3, 6, bias=True, pad_to_multiple_of=4, group=group)(y).square().sum()
    (dx,) = torch.autograd.grad(loss, x, retain_graph=True)
    loss.backward()
    up = ColumnParallelLinear(8, 6, **options)
    down = RowParallelLinear(6, 8, **options)
    first = torch.autograd.grad(down(up(x, 7).sin(), 7).sin().sum(), x, create_graph=True)[0]
    second = torch.autograd.grad(first.sin().sum(), [x, *up.parameters(), *down.parameters()], allow_unused=True)
    return [y, loss, dx, x.grad, column.weight.main_grad, first, *(g for g in second if g is not None)]


@pytest.mark.thinned(1)
@pytest.mark.parametrize("p", [2, 3, 4])
@SP
@pytest.mark.parametrize("work", [_step, _layers])
@on_ranks(backend="gloo", timeout=2 * SECONDS)
def test_case_52_layers_states_and_checks_are_not_disturbed(group, work, sp):
    with _checked() as checked:
        for got, want in zip(work(checked, sp), work(group, sp), strict=True):
            assert torch.equal(got, want)
