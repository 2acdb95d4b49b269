"""parallelize: training over all axes at once is that of one process, whatever is combined."""

import functools
import weakref
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import tp_ext
from tests.helpers import ranks
from tests.helpers.dtypes import default_dtype
from tests.helpers.meshes import mesh_of
from tests.helpers.models import GPT, Block
from tests.helpers.on_ranks import on_ranks

VOCAB, HIDDEN, BATCH, SEQ, STEPS = 13, 8, 4, 6, 2
CLOSE = {"rtol": 1e-10, "atol": 1e-11}


def gpt(mesh=None, sp=False):
    tp, cp = (None, None) if mesh is None else (mesh["tp"], mesh["cp"])
    parallel = {"group": tp, "sequence_parallel": sp}
    attention = {"num_heads": 4, "num_kv_heads": 1, "rope": 100.0, "dropout": 0.2, "context_group": cp}
    block = functools.partial(Block, HIDDEN, attention, {"ffn_hidden_size": 10}, dropout=0.2, **parallel)
    return GPT(VOCAB, HIDDEN, block, **parallel)


def batch(step, replica):
    ids = torch.randint(VOCAB, (BATCH, SEQ), generator=torch.Generator().manual_seed(10 * step + replica))
    target = ids.roll(-1, 1)
    target[replica, : 2 + step] = -100  # ranks and microbatches have unequal numbers of tokens
    target[:, -1] = -100
    return ids, target


def loss_over(group):
    def loss(logits, target):
        return tp_ext.vocab_parallel_cross_entropy(logits, target.flatten(), group, vocab_size=VOCAB)

    return loss


def trained(run, optimizer, steps, layout):
    """The losses and norms of these steps."""
    found = []
    for step in steps:
        ids, target = batch(step, run.data_rank)
        keywords = {"batch_size": layout.batch}
        if layout.group.size > 1:
            ids, target, keywords = layout.shard(ids, 1), layout.shard(target, 1), {"layout": layout}
        found += [run.step(ids, target, **keywords), run.clip_grad_norm_(0.3)]
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(found)


def prepared(sizes, microbatches, sp, options):
    mesh = mesh_of(*sizes)
    with torch.device("meta"):
        model = gpt(mesh, sp)
    options = {"loss": loss_over(mesh["tp"]), "seed": 5} | options
    run = tp_ext.parallelize(model, mesh, microbatches=microbatches, **options)
    layout = tp_ext.ContextLayout(batch=BATCH // microbatches, seq=SEQ, group=mesh["cp"])
    # Fused: DTensor looks for the sharding of one operator, not of many for each shape
    fused = options.get("zero", 0) > 1
    return mesh, run, run.optimizer(torch.optim.AdamW, lr=0.01, eps=1e-4, fused=fused), layout


def one_process(data_size):
    """Losses, norms and parameters of training with the global batch."""
    tp_ext.manual_seed(5)
    model = gpt()
    tp_ext.reset_parameters(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
    found = []
    for step in range(STEPS):
        ids, target = (torch.cat(both) for both in zip(*(batch(step, k) for k in range(data_size)), strict=True))
        with tp_ext.random.at(step, batch_offset=0, seq=SEQ):
            loss = loss_over(None)(model(ids, batch_size=len(ids)), target)
        loss.backward()
        found += [loss.detach(), nn.utils.clip_grad_norm_(model.parameters(), 0.3)]
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(found), {name: value.detach() for name, value in model.state_dict().items()}


def _train(group, sizes, microbatches, sp, options, backend):
    with eager_compilation(backend), default_dtype(torch.float64):
        mesh, run, optimizer, layout = prepared(sizes, microbatches, sp, options)
        assert isinstance(optimizer, ZeroRedundancyOptimizer) == (options.get("zero") == 1)
        found = trained(run, optimizer, range(STEPS), layout)
        tp_ext.debug.check(run.state, mesh=mesh)
        _compare(run, mesh, found)


def _compare(run, mesh, found):
    want, want_state = one_process(run.data_size)
    torch.testing.assert_close(found, want, **CLOSE)
    torch.testing.assert_close(dict(tp_ext.full_state_dict(run.state, mesh=mesh)), want_state, **CLOSE)


def eager_compilation(backend):
    """torch.compile without inductor, which takes long."""
    torch._dynamo.reset()
    return mock.patch("torch.compile", functools.partial(torch.compile, backend=backend))


CASES = {
    "one process": ((1, 1, 1, 1), 2, False, {}),
    "recomputed": ((1, 1, 1, 2), 2, True, {"recompute": "full"}),
    "selective": ((1, 1, 1, 2), 2, True, {"recompute": "selective"}),
    "zero 0": ((1, 2, 1, 1), 2, False, {}),
    "zero 1": ((1, 2, 1, 1), 2, False, {"zero": 1, "recompute": "full"}),
    "zero 2": ((1, 2, 1, 2), 2, True, {"zero": 2}),
    "zero 3 and offload": ((1, 2, 1, 1), 2, False, {"zero": 3, "offload": True, "recompute": "selective"}),
    "context": ((1, 1, 2, 1), 2, False, {}),
    "data and context": ((1, 2, 2, 1), 1, False, {"zero": 3}),
    "pipeline": ((2, 1, 1, 1), 2, False, {"recompute": "full"}),
    "pipeline and zero 0": ((2, 3, 1, 1), 2, False, {}),  # three: the order of a sum matters to copies of tied weights
    "pipeline and zero 1": ((2, 1, 2, 1), 2, False, {"zero": 1, "schedule": "GPipe"}),
    "compiled": ((1, 2, 1, 1), 2, False, {"zero": 3, "compile": True}),
    "compiled and selective": ((2, 1, 1, 1), 2, False, {"compile": True, "recompute": "selective"}),
    "all of it": ((2, 1, 1, 2), 4, True, {"zero": 2, "schedule": "1F1B"}),
}


# By "compiled and selective", random layouts, "zero 1" and test_recomputation.py, "data and context"; the pipelines by
# the checkpoint that goes on (the mesh and microbatches of "all of it", ZeRO-1 over the context axis) and the packed
# rows (a pipeline with a context axis)
REPEATED = ("selective", "zero 2", "recomputed", "context", "pipeline and zero 1", "all of it")


@pytest.mark.parametrize(
    ("case", "backend"),
    [
        *(
            pytest.param(
                name,
                "eager" if name == "compiled" else "aot_eager",
                id=name,
                marks=[pytest.mark.exhaustive] * (name in REPEATED),
            )
            for name in CASES
        ),
        pytest.param("compiled", "aot_eager", id="compiled by AOTAutograd", marks=pytest.mark.exhaustive),
    ],
)
def test_training_is_that_of_one_process(case, backend):
    """AOTAutograd, which takes as long as dynamo, by default in "compiled and selective" alone."""
    sizes, microbatches, sp, options = CASES[case]
    ranks.run(_train, torch.Size(sizes).numel(), sizes, microbatches, sp, options, backend, timeout=180)


def _accumulated(group, sizes, options):
    """Norms of the gradients of one step, and of the same step once more."""
    with default_dtype(torch.float64):
        _, run, _, layout = prepared(sizes, 2, False, options)
        norms = []
        for _ in range(2):
            run.next_step = 0
            ids, target = batch(0, run.data_rank)
            run.step(ids, target, batch_size=layout.batch)
            kept = weakref.ref(ids)
            del ids
            assert kept() is None, "the inputs of a step must not outlive it"
            norms.append(run.clip_grad_norm_(1e9))
        return norms


@pytest.mark.parametrize(
    ("sizes", "zero"),
    [
        ((1, 2, 1, 1), 0),
        ((1, 2, 1, 1), 3),
        ((2, 2, 1, 1), 0),
        pytest.param((2, 2, 1, 1), 2, marks=pytest.mark.exhaustive),
    ],
)
def test_steps_accumulate(sizes, zero):
    for one, two in ranks.run(_accumulated, torch.Size(sizes).numel(), sizes, {"zero": zero}, timeout=120):
        torch.testing.assert_close(two, 2 * one, **CLOSE)


def _empty_shard(group, pp):
    mesh = mesh_of(pp, 1, 1, 2)
    model = nn.Sequential(*(tp_ext.ParallelMLP(4, 1, group=mesh["tp"]) for _ in range(2)))
    tp_ext.parallelize(model, mesh, microbatches=2, loss=loss_over(None), zero=2)


def test_fsdp_with_an_empty_shard_is_refused():
    match = r"model: '0.up.weight' must have elements on all 2 ranks that share it, and has none on \[1\]"
    ranks.run_raises(_empty_shard, 2, ValueError, match, 1, in_turns=False)


def _saves(group, path):
    with default_dtype(torch.float64):
        mesh, run, optimizer, layout = prepared((1, 1, 2, 1), 2, False, {"zero": 1})
        found = trained(run, optimizer, [0], layout)
        tp_ext.save_checkpoint(path, run.state, optimizer, mesh=mesh, step=run.next_step)
        return found


def _goes_on(group, path, found):
    with default_dtype(torch.float64):
        mesh, run, optimizer, layout = prepared((2, 1, 1, 2), 4, True, {"seed": 5})
        run.next_step = tp_ext.load_checkpoint(path, run.state, optimizer, mesh=mesh)["step"]
        found = torch.cat([found, trained(run, optimizer, range(1, STEPS), layout)])
        _compare(run, mesh, found)


def test_a_checkpoint_goes_on_at_another_mesh(tmp_path):
    found = ranks.run(_saves, 2, tmp_path / "saved", timeout=120)
    ranks.run(_goes_on, 4, tmp_path / "saved", found[0], timeout=120)


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((1, 2, 1, 1), {}),
        ((1, 2, 1, 1), {"zero": 2}),
        ((2, 1, 1, 1), {}),
        pytest.param((1, 1, 2, 1), {"zero": 3}, marks=pytest.mark.exhaustive),
    ],
)
@on_ranks(2)
def test_evaluation_is_that_of_one_process_and_changes_nothing(group, sizes, options):
    """Evaluation between two steps; its loss, and the losses with and without it."""
    with default_dtype(torch.float64):
        found = []
        for evaluated in (False, True):
            mesh, run, optimizer, layout = prepared(sizes, 2, False, options)
            losses, params = trained(run, optimizer, [0], layout), list(run.parameters())
            if evaluated:
                ids, target = (layout.shard(t, 1) for t in batch(1, run.data_rank))
                keywords = {"layout": layout} if layout.group.size > 1 else {"batch_size": layout.batch}
                model = gpt().eval()
                model.load_state_dict(tp_ext.full_state_dict(run.state, mesh=mesh))
                loss = run.evaluate(ids, target, **keywords)
                modules = run.state if isinstance(run.state, list) else [run.state]
                assert all(one.training for module in modules for one in module.modules())
                ids, target = (
                    torch.cat(both) for both in zip(*(batch(1, k) for k in range(run.data_size)), strict=True)
                )
                with torch.no_grad():
                    torch.testing.assert_close(loss, loss_over(None)(model(ids, batch_size=len(ids)), target), **CLOSE)
            with torch.no_grad():
                for param in params:
                    param.mul_(0.5)  # the next step must gather them again
            found.append(torch.cat([losses, trained(run, optimizer, [1], layout)]))
        torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


@pytest.mark.parametrize("sizes", [(1, 1, 1, 2), (2, 1, 1, 1)])
@on_ranks(2, backend="gloo", timeout=120)
def test_autocast_is_that_of_forwards_and_losses(group, sizes):
    _, run, optimizer, layout = prepared(sizes, 2, False, {"autocast": torch.bfloat16})
    kinds = set()
    module = (run.state[0] if isinstance(run.state, list) else run.state).get_submodule("blocks")
    for one in module.modules():
        if isinstance(one, tp_ext.ParallelMLP):
            one.register_forward_hook(lambda _module, _inputs, y: kinds.add(y.dtype))
    with torch.autocast("cpu", enabled=False):
        found = trained(run, optimizer, [0], layout)  # AdamW would enlarge the rounding of small gradients
    assert kinds == {torch.bfloat16} and {param.grad is None for param in run.parameters()} == {True}
    assert {param.dtype for param in run.parameters()} == {torch.float32}
    want = one_process(run.data_size)[0][:2]
    torch.testing.assert_close(found, want, rtol=0.03, atol=0.01, check_dtype=False)


def _packed(group, sizes, microbatches, options):
    """Two documents or so in each row of six tokens."""
    with default_dtype(torch.float64):
        mesh, run, _, _ = prepared(sizes, microbatches, False, options)
        rows = range(4 * run.data_rank // run.data_size, 4 * (run.data_rank + 1) // run.data_size)
        layouts = [tp_ext.ContextLayout([row, 0, SEQ - row], group=mesh["cp"]) for row in rows]
        ids, target = (torch.arange(4 * SEQ).view(4, SEQ) * factor % VOCAB for factor in (5, 3))
        inputs, target = (
            torch.stack([layout.shard(full[row]) for layout, row in zip(layouts, rows, strict=True)])
            for full in (ids, target)
        )
        losses = [run.step(inputs, target, layout=layouts), run.evaluate(inputs, target, layout=layouts)]
        return torch.stack(losses)


def test_masks_of_packed_rows_depend_on_their_place_alone():
    cases = [((1, 1, 1, 1), 4, {}), ((1, 2, 1, 1), 2, {}), ((2, 1, 2, 1), 4, {"schedule": "GPipe"})]
    values = [ranks.run(_packed, torch.Size(case[0]).numel(), *case, timeout=120) for case in cases]
    for other in values[1:]:
        for value in other:
            torch.testing.assert_close(value, values[0][0], **CLOSE)


def _refused_layouts(group, lengths):
    mesh = mesh_of(1, group.size(), 1, 1)
    run = tp_ext.parallelize(nn.Sequential(nn.Linear(2, 2)), mesh, microbatches=2, loss=loss_over(None))
    layouts = [one if isinstance(one, str) else tp_ext.ContextLayout(one, group=None) for one in lengths]
    run.step(torch.ones(4, 2), torch.ones(4), layout=layouts)


@pytest.mark.parametrize(
    ("lengths", "error", "match"),
    [
        ([[2], "two"], TypeError, "layout: 'two' in the list must be a ContextLayout"),
        ([[2]], ValueError, "layout: 1 layouts must be 2, one for each microbatch"),
        ([[2], [1, 2]], ValueError, r"layout: microbatches of \[2, 3\] tokens .* must be of equally many"),
    ],
)
def test_wrong_layouts_are_refused(lengths, error, match):
    ranks.run_raises(_refused_layouts, 2, error, match, lengths, in_turns=False)


def _layers_on_another_axis(group, axis):
    mesh = mesh_of(1, 2, 1, 1)
    with torch.device("meta"):
        model = gpt({"tp": mesh[axis], "cp": mesh["cp"]})
    tp_ext.parallelize(model, mesh, loss=loss_over(None), zero=2)


def test_layers_along_the_data_axis_are_refused():
    match = "model: the group of 'embedding' is mesh\\['dp'\\], and must be mesh\\['tp'\\]"
    ranks.run_raises(_layers_on_another_axis, 2, ValueError, match, "dp", in_turns=False)


def _refused(group, options, inputs):
    mesh = mesh_of(1, group.size(), 1, 1)
    options = {"loss": loss_over(None)} | options
    tp_ext.parallelize(nn.Sequential(nn.Linear(2, 2)), mesh, **options).step(*inputs)


@pytest.mark.parametrize(
    ("options", "inputs", "match"),
    [
        ({"zero": 4}, (), "zero: 4 must be 0, 1, 2 or 3"),
        ({"offload": True}, (), "offload: True needs zero = 2 or 3, and zero is 0"),
        ({"recompute": "half"}, (), "recompute: 'half' must be one of"),
        ({"reduction": "none"}, (), "reduction: 'none' must be 'mean' or 'sum'"),
        ({"autocast": torch.float64}, (), "autocast: torch.float64 must be one of"),
        ({"microbatches": 0}, (), "microbatches: 0 must be an integer of at least 1"),
        (
            {"microbatches": 2},
            (torch.ones(3, 2), torch.ones(4)),
            r"inputs\[0\]: shape \(3, 2\) must be a multiple of 2",
        ),
    ],
)
def test_wrong_options_are_refused(options, inputs, match):
    ranks.run_raises(_refused, 2, ValueError, match, options, inputs, in_turns=False)
