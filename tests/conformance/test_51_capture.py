"""Conformance case 51: training steps that torch.compile, CUDA graphs and traces record whole.

The table: docs/reference/correctness.md.

Recorded from one batch, run on another, with another seed: what a recording had baked in would show.
"""

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import config as inductor
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

from tests.helpers import ranks
from tests.helpers.on_ranks import on_ranks
from tests.helpers.small_gpt import batches, make
from tp_ext import Dropout

# Where heads and features are uneven, p = 3, tests/training/test_compile.py::test_blocks compiles a block by default
EVERY = pytest.mark.parametrize("p", [1, 2, *(pytest.param(p, marks=pytest.mark.exhaustive) for p in (3, 4))])
SP = pytest.mark.parametrize("sp", [False, True], ids=["", "sp"])
CLOSE = {"rtol": 1e-12, "atol": 1e-12}  # fp64


def _block(group, sp):
    """A whole block, RMSNorm, attention, dropout, RMSNorm, SwiGLU, dropout, and own rows of two batches."""
    block = make(group, sequence_parallel=sp).blocks[0].double()
    xs = torch.randn(2, 21, 24, dtype=torch.float64)
    return block, [x.tensor_split(group.size())[group.rank()] if sp else x for x in xs]


def _results(call, block, x):
    torch.manual_seed(3)
    x = x.clone().requires_grad_()
    y = call(x, None, 21, 3)  # no tables of angles: the block makes its own
    return y, *torch.autograd.grad(y.sin().sum(), [x, *block.parameters()])


def _compiled(group, sp, backend):
    torch._dynamo.reset()
    counters.clear()
    block, xs = _block(group, sp)
    compiled = torch.compile(block, fullgraph=True, backend=backend)
    for x in xs:
        torch.testing.assert_close(_results(compiled, block, x), _results(block, block, x), **CLOSE)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    assert counters["aot_autograd"]["total"] == counters["aot_autograd"]["ok"] == 1


@pytest.mark.thinned(1)
@pytest.mark.core
@EVERY
@SP
def test_case_51_block_compiles_to_one_graph(sp, p):
    ranks.run(_compiled, p, sp, "aot_eager", timeout=120)


@pytest.mark.exhaustive  # tests/training/test_compile.py::test_inductor compiles a like block
@on_ranks(2, backend="gloo", timeout=300)
def test_case_51_block_compiles_with_inductor(group):
    with inductor.patch(fallback_random=True):  # seeds as eager draws them
        _compiled(group, True, "inductor")


def _inductor_masks(group):
    torch._dynamo.reset()
    layers = [Dropout(0.375, group=group, sequence_parallel=sp) for sp in (True, False)]
    x = torch.ones(7, 64)
    x_local = x.tensor_split(group.size())[group.rank()]
    compiled = torch.compile(lambda a, b: (layers[0](a, total_tokens=7), layers[1](b)), fullgraph=True)
    torch.manual_seed(3)
    return compiled(x_local, x)


def test_case_51_masks_of_inductor_are_the_same_for_every_p():
    """By default inductor draws seeds its own way: not eager's masks, but one mask all the same."""
    ((tokens, whole),) = ranks.run(_inductor_masks, 1, timeout=300)
    assert not torch.equal(tokens, whole) and len(tokens.unique()) == 2
    results = ranks.run(_inductor_masks, 2, timeout=300)
    assert torch.equal(torch.cat([local for local, _ in results]), tokens)
    assert all(torch.equal(replicated, whole) for _, replicated in results)


@pytest.mark.thinned(1)
@pytest.mark.core
@EVERY
@SP
@on_ranks(backend="gloo", timeout=120)
def test_case_51_model_and_loss_have_no_graph_break(group, sp):
    torch._dynamo.reset()
    model = _Loss(make(group, num_layers=1, sequence_parallel=sp))
    explained = torch._dynamo.explain(model)(*batches(1)[0])
    assert explained.graph_break_count == 0 and explained.graph_count == 1, explained.break_reasons


# Recorded steps


class _Loss(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids, target):
        return self.model.loss(ids, target)


@pytest.mark.thinned(1)
@pytest.mark.core
@EVERY
@SP
@on_ranks(backend="gloo", timeout=120)
def test_case_51_a_recorded_step_runs_on_other_data(group, sp):
    """Forward, loss and backward as a list of operators: the counterpart of the CUDA graph on a machine without GPU.
    A value read on the host would have been recorded as a constant."""
    model = _Loss(make(group, num_layers=1, sequence_parallel=sp)).double()
    params = dict(model.named_parameters())

    def step(ids, target, *values):
        loss = functional_call(model, dict(zip(params, values, strict=True)), (ids, target))
        return loss, *torch.autograd.grad(loss, values)

    first, second = batches(2)
    recorded = make_fx(step)(*first, *params.values())
    for seed in (3, 4):
        results = []
        for run in (recorded, step):
            torch.manual_seed(seed)
            results.append(run(*second, *params.values()))
        torch.testing.assert_close(*results, **CLOSE)


@pytest.mark.cuda
def test_case_51_cuda_graph():
    """Forward, loss and backward, dropout included. fp32; every kernel of ours is deterministic, GEMMs are cuBLAS's."""
    model = make(None).cuda()
    (ids, target), *others = ([t.cuda() for t in batch] for batch in batches(3))

    def step():
        loss = model.loss(ids, target)
        loss.backward()
        return loss.detach()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            model.zero_grad()
            step()
    torch.cuda.current_stream().wait_stream(side)
    model.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static = step()
    grads = [param.grad for param in model.parameters()]
    for other in others:
        for to, value in zip((ids, target), other, strict=True):
            to.copy_(value)
        torch.manual_seed(3)
        graph.replay()
        got = [static.clone(), *(grad.clone() for grad in grads)]
        model.zero_grad()
        torch.manual_seed(3)
        want = [step(), *(param.grad for param in model.parameters())]
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
