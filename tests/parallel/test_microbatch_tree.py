"""parallelize(invariant_blocks=): the same bits for every number of data ranks, times tensor parallelism."""

import pytest
import torch

import tp_ext
from tests.helpers.invariant_model import SIZES, Model
from tests.helpers.meshes import mesh_of
from tests.helpers.ranks import run, run_fresh

pytestmark = pytest.mark.core
BLOCKS = 4  # microbatches of the global batch


class Logits(Model):
    def forward(self, ids):
        return self.head(self.hidden(ids), ids.numel())


def _run(mesh, microbatches, **options):
    group = mesh["tp"].get_group()
    with tp_ext.tp_invariant(8):
        model = Logits(group, layers=1, **options.pop("model", {}))

    def loss(logits, target):
        with tp_ext.tp_invariant(8):
            return tp_ext.vocab_parallel_cross_entropy(logits, target.flatten(), group, vocab_size=SIZES["vocab"])

    return tp_ext.parallelize(model, mesh, loss=loss, microbatches=microbatches, **options)


def _trained(rank, mesh, dtype=torch.float32, recompute=None, zero=0):
    torch.set_default_dtype(dtype)
    torch.manual_seed(0)
    dp = mesh["dp"]
    run = _run(mesh, BLOCKS // dp.size(), invariant_blocks=BLOCKS, recompute=recompute, zero=zero)
    optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2)
    generator, numbers = torch.Generator().manual_seed(1), []
    for step in range(3):
        ids, target = (torch.randint(SIZES["vocab"], (BLOCKS * 2, 7), generator=generator) for _ in range(2))
        target[0] = -100  # microbatches with different numbers of tokens
        loss = run.step(*(t.chunk(dp.size())[dp.get_local_rank()] for t in (ids, target)))
        numbers.append(loss.item().hex())
        if step == 1:
            continue  # the gradients of two steps add up
        numbers.append(run.clip_grad_norm_(0.5).item().hex())
        optimizer.step()
        optimizer.zero_grad()
    torch.set_default_dtype(torch.float32)
    return numbers, tp_ext.debug.sha256(run.state, optimizer, mesh=mesh)


def _same_bits(options, again):
    def on(dp, tp, **more):
        results = tp_ext.debug.simulate(lambda rank, mesh: _trained(rank, mesh, **options | more), {"dp": dp, "tp": tp})
        assert all(result == results[0] for result in results)
        return results[0]

    expected = on(1, 1)
    for dp, tp in ((2, 1), (1, 2), (2, 2), (4, 2)):
        assert on(dp, tp) == expected, (dp, tp)
    assert on(4, 1, **again) == expected


@pytest.mark.parametrize(
    "options, again",
    [({}, {"recompute": "full"}), pytest.param({"dtype": torch.float64}, {"zero": 1}, marks=pytest.mark.exhaustive)],
    ids=["fp32", "fp64"],
)
def test_the_same_bits_for_every_number_of_data_ranks(options, again):
    run_fresh(_same_bits, options, again)


def _on_processes(group, dp, tp, **options):
    return _trained(group.rank(), mesh_of(dp, tp, names=("dp", "tp")), **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_gradients_that_fsdp_shards(dtype):
    """On processes: fully_shard of torch 2.11 cannot run on simulated ranks, which are threads."""
    (expected,) = run(_on_processes, 1, 1, 1, dtype=dtype)
    for dp, tp, zero in ((1, 1, 2), (2, 2, 2), (4, 1, 3)):
        results = run(_on_processes, dp * tp, dp, tp, dtype=dtype, zero=zero)
        assert results == [expected] * dp * tp, (dp, tp, zero)


def _values():
    """The gradients of a step, in fp64, are those of DDP."""

    def gradients(rank, mesh, **options):
        torch.set_default_dtype(torch.float64)
        torch.manual_seed(0)
        run = _run(mesh, 2, model={"dropout": 0.0}, **options)
        ids, target = torch.randint(SIZES["vocab"], (2, 4, 7), generator=torch.Generator().manual_seed(rank))
        loss = run.step(ids, target)
        torch.set_default_dtype(torch.float32)
        return [loss, *(param.grad for param in run.parameters())]

    for ours, theirs in zip(
        *(
            tp_ext.debug.simulate(lambda rank, mesh, o=o: gradients(rank, mesh, **o), {"dp": 2, "tp": 1})
            for o in ({"invariant_blocks": 4}, {})
        ),
        strict=True,
    ):
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_gradients_are_those_of_data_parallelism():
    run_fresh(_values)


def _refused():
    def refused(message, microbatches=2, **options):
        def build(rank, mesh):
            with pytest.raises(ValueError, match=message):
                _run(mesh, microbatches, **options)

        tp_ext.debug.simulate(build, {"dp": 2, "tp": 1})

    refused(r"invariant_blocks: 8 must be the ranks of dp, 2, times microbatches = 2", invariant_blocks=8)
    refused(r"invariant_blocks: 0 must be an integer", invariant_blocks=0)
    refused(r"invariant_blocks: 4 must not be given with compile", invariant_blocks=4, compile=True)
    refused(r"invariant_blocks: 4 must not be given with a mixture", invariant_blocks=4, model={"moe": {}})

    def ordinary(rank, mesh):
        model = tp_ext.ParallelMLP(8, 8, group=mesh["tp"])
        with pytest.raises(ValueError, match=r"model: .* must have been built in tp_invariant"):
            tp_ext.parallelize(model, mesh, loss=torch.dist, microbatches=2, invariant_blocks=4)
        with tp_ext.tp_invariant():
            built = tp_ext.ParallelMLP(8, 8, group=mesh["tp"])
        run = tp_ext.parallelize(built, mesh, loss=torch.dist, microbatches=2, invariant_blocks=4)
        with pytest.raises(ValueError, match="fused: True"):
            run.optimizer(torch.optim.AdamW, fused=True)

    tp_ext.debug.simulate(ordinary, {"dp": 2, "tp": 1})


def test_refused():
    run_fresh(_refused)
