"""torch.compile of every module, of blocks, of the model and its loss: one graph without a break, the numbers of eager,
and few compilations whatever the batch sizes."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from tests.helpers import ranks, registry
from tests.helpers.makers import HIDDEN, SEQ, TOKENS, VOCAB, Block, build, caller, config, gpt, outcome
from tests.helpers.on_ranks import on_ranks
from tests.helpers.oracle import full_gradients, gradients
from tests.helpers.small_gpt import checkpointed

BOTH = pytest.mark.parametrize("sp", [False, True], ids=["", "sp"])
# Without SP there are fewer collectives, and test_blocks compiles that, too
MOSTLY_SP = pytest.mark.parametrize("sp", [pytest.param(False, marks=pytest.mark.exhaustive), True], ids=["", "sp"])


def _compiled(fn, backend="aot_eager", **options):
    """fn compiled into one graph (fullgraph raises at a break), and the counter of compilations."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    return torch.compile(fn, fullgraph=True, backend=counter, **options), counter


def _close(got, want, bound=1e-12):
    torch.testing.assert_close(got, want, rtol=bound, atol=bound)


@pytest.mark.core
@MOSTLY_SP
@pytest.mark.parametrize("name", registry.CASES)
@on_ranks(2, backend="gloo", timeout=120)
def test_every_module(group, name, sp):
    module = build(name, group, sp)
    call, counter = _compiled(caller(name, module))
    _close(outcome(name, module, group, sp, call), outcome(name, module, group, sp))
    assert counter.frame_count == 1


@pytest.mark.thinned(1)
@pytest.mark.core
@BOTH
@pytest.mark.parametrize(
    ("name", "p"), [pytest.param("block", 2, marks=pytest.mark.exhaustive), ("rich_block", 2), ("rich_block", 3)]
)
@on_ranks(backend="gloo", timeout=240)
def test_blocks(group, name, sp):
    """With dropout, whose seeds are drawn in the graph. p = 3: uneven heads and features."""
    module = build(name, group, sp)
    call, counter = _compiled(caller(name, module))
    _close(outcome(name, module, group, sp, call), outcome(name, module, group, sp))
    _close(outcome(name, module, group, sp, call, seed=1), outcome(name, module, group, sp, seed=1))
    assert counter.frame_count == 1


def _ids(batch):
    generator = torch.Generator().manual_seed(batch)
    return (torch.randint(VOCAB, (batch, SEQ), generator=generator) for _ in range(2))


def _step(model, loss, ids, target):
    model.zero_grad()
    torch.manual_seed(9)
    value = loss(ids, target)
    value.backward()
    return [value.detach(), *(q.grad for q in model.parameters())]


def _dynamic(group, sp, batches, mark, backend):
    model = gpt(group, sp, num_layers=1).double()
    loss, counter = _compiled(model.loss, backend)
    for batch in batches:
        ids, target = _ids(batch)
        want = _step(model, model.loss, ids, target)
        for t in (ids, target) if mark else ():
            torch._dynamo.mark_dynamic(t, 0)
        _close(_step(model, loss, ids, target), want)
    return counter.frame_count


@pytest.mark.parametrize(
    ("sp", "batches"),
    [pytest.param(False, (2, 3, 5), marks=pytest.mark.exhaustive), (True, (2, 4, 6))],
    ids=["", "sp"],
)
def test_model_and_loss_with_a_dynamic_batch_compile_once(sp, batches):
    assert ranks.run(_dynamic, 2, sp, batches, True, "aot_eager", timeout=240) == [1, 1]


def test_compilations_stay_few():
    """Not marked: once for the first size, then for any; under SP whether p divides the tokens is one more question.
    It is dynamo that asks, whatever the backend."""
    counts = ranks.run(_dynamic, 2, True, (2, 3, 4, 5, 6), False, "eager", timeout=240)
    assert counts[0] == counts[1] <= 3


# What else is on while compiling


@MOSTLY_SP
@on_ranks(2, backend="gloo", timeout=240)
def test_with_autocast_checkpointing_and_module_compile(group, sp):
    """Autocast, activation checkpointing and one compilation per block (nn.Module.compile) in one training step."""
    torch._dynamo.reset()
    model = checkpointed(gpt(group, sp, num_layers=1))
    ids, target = _ids(2)

    def loss(ids, target):
        with torch.autocast("cpu", torch.bfloat16):
            return model.loss(ids, target)

    want = _step(model, loss, ids, target)
    whole, counter = _compiled(loss)
    got = _step(model, whole, ids, target)
    assert counter.frame_count == 1
    torch._dynamo.reset()
    for block in model.blocks:
        block.compile(fullgraph=True, backend="aot_eager")
    for result in (got, _step(model, loss, ids, target)):
        assert [t.dtype for t in result] == [t.dtype for t in want]
        _close(result, want, 2**-8)  # the same operators in bf16, perhaps fused casts


def _inductor(group, sp, eager_random, compiling=True):
    """Returns the results of the compiled function, if ``compiling``, and of eager mode."""
    model = Block(config(sequence_parallel=sp), group).double()
    x = torch.randn(TOKENS, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x = (x.tensor_split(group.size())[group.rank()] if sp else x).clone().requires_grad_()
    with torch._inductor.config.patch(fallback_random=eager_random):

        def eager(x):
            return model(x, None, TOKENS, 2)

        compiled, counter = _compiled(eager, "inductor")
        results = []
        for call in (compiled if compiling else eager, eager):
            model.zero_grad()
            x.grad = None
            torch.manual_seed(2)
            y = call(x)
            y.sin().sum().backward()
            results.append((y.detach(), x.grad, gradients(model)))
    assert counter.frame_count == compiling
    return results


# Own seeds: tests/conformance/test_51_capture.py compiles Dropout with them
@pytest.mark.slow
@pytest.mark.parametrize("eager_random", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_inductor(eager_random):
    """It draws seeds of its own, as it does for torch's dropout, unless fallback_random says otherwise: the same ones
    on all ranks and for every p. With those of eager mode, eager mode on one rank is what the others are held to."""
    one = ranks.run(_inductor, 1, False, eager_random, not eager_random, timeout=280)
    two = ranks.run(_inductor, 2, True, eager_random, timeout=280)
    for i in range(2):  # compiled, eager
        _close(torch.cat([r[i][0] for r in two]), one[0][i][0], 1e-10)
        _close(torch.cat([r[i][1] for r in two]), one[0][i][1], 1e-10)
        _close(full_gradients([r[i][2] for r in two]), full_gradients([one[0][i][2]]), 1e-10)
    equal = torch.allclose(two[0][0][0], two[0][1][0], rtol=1e-10, atol=1e-10)
    assert equal == eager_random
