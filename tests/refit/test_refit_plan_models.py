"""Models that train over the axes of a mesh, moved to every other layout: parameters, buffers and the states of
optimizers are those of a save and a load, and each rank receives what it lacks."""

import pytest
import torch

import tp_ext
from tests.helpers import ranks
from tests.helpers.meshes import mesh_of
from tests.helpers.models import GPT, Block

AXES = ("pp", "dp", "ep", "cp", "tp")
LAYOUTS = {
    "pp 2, tp 2": (2, 1, 1, 1, 2, 0),
    "pp 2, dp 2, zero 2": (2, 2, 1, 1, 1, 2),
    "dp 2, tp 2, zero 1": (1, 2, 1, 1, 2, 1),
    "dp 2, tp 2, zero 3": (1, 2, 1, 1, 2, 3),
    "tp 4": (1, 1, 1, 1, 4, 0),
}


def _model(mesh, experts=False, tied=True):
    tp = mesh["tp"]
    attention = {"num_heads": 6, "num_kv_heads": 2, "bias": False, "rope": 100.0, "context_group": mesh["cp"]}
    mlp = {"ffn_hidden_size": 12, "activation": "swiglu", "bias": True}
    if experts:
        mlp |= {"num_experts": 4, "top_k": 2, "bias": False, "expert_group": mesh["ep"], "data_groups": mesh["dp"]}
        mlp |= {"router": tp_ext.RouterConfig(balance_over="sequence"), "context_group": mesh["cp"]}
    return GPT(13, 12, lambda: Block(12, attention, mlp, group=tp), tied=tied, flat=False, group=tp)


def _trained(layout, steps, seed=1, **options):
    """The state of a run over the mesh of the layout, and its optimizer, after some steps."""
    *sizes, zero = layout
    mesh = mesh_of(*sizes, names=AXES)
    with torch.device("meta"):
        model = _model(mesh, **options)

    def loss(logits, target):
        return tp_ext.vocab_parallel_cross_entropy(
            logits.flatten(0, -2), target.flatten(), mesh["tp"], vocab_size=13, reduction="mean"
        )

    run = tp_ext.parallelize(model, mesh, loss=loss, zero=zero, seed=seed, microbatches=2)
    optimizer = run.optimizer(torch.optim.AdamW, lr=0.1)
    for step in range(steps):
        rows = 8 // run.data_size
        ids = torch.randint(13, (8, 9), generator=torch.Generator().manual_seed(step))
        ids = ids[run.data_rank * rows :][:rows]
        where = tp_ext.ContextLayout(batch=rows // 2, seq=8, group=mesh["cp"])

        def cut(x, where=where):
            return torch.stack([where.shard(row) for row in x])

        run.step(cut(ids[:, :-1]), cut(ids[:, 1:]), layout=where)
        optimizer.step()
        optimizer.zero_grad()
    return run.state, optimizer


def _tensors(module, optimizer):
    """The local tensors of parameters, buffers and states, by name and place."""
    state, tensors = tp_ext.sharded_state_dict(module, optimizer), {}
    for kind in ("model", "optimizer"):
        for name, value in state[kind].items():
            if isinstance(value, torch.Tensor):
                chunks = getattr(value, "local_chunks", [((), value, True)])
                tensors |= {(kind, name, offsets): tensor.clone() for offsets, tensor, _ in chunks}
    return tensors


def _numbers(module, optimizer):
    """name -> the elements that this rank holds, parameters under all tied names once, and the bytes of each."""
    numbers = {}
    for (kind, name, offsets), tensor in _tensors(module, optimizer).items():
        name = name.replace("head.weight", "embedding.weight")
        grid = [range(start, start + size) for start, size in zip(offsets, tensor.shape, strict=False)]
        index = {()} if not grid else set(torch.cartesian_prod(*map(torch.tensor, grid)).view(-1, len(grid)).unbind())
        numbers.setdefault((kind, name), (set(), tensor.element_size()))[0].update(
            tuple(i.tolist()) if grid else () for i in index
        )
    return numbers


def _moved(group, layouts, folder, options):
    """Source and target have one state of the optimizer each; a third model is loaded from the save of the first."""
    source = _trained(layouts[0], 2, **options)
    target = _trained(layouts[1], 1, seed=2, **options)
    loaded = _trained(layouts[1], 0, seed=3, **options)
    tp_ext.save_checkpoint(folder / "checkpoint", *source)
    tp_ext.load_checkpoint(folder / "checkpoint", *loaded)
    plan = tp_ext.refit.plan(source[0], target[0], optimizers=(source[1], target[1]))
    moved = plan.run(check=True)
    ours, checkpoint = _tensors(*target), _tensors(*loaded)
    assert ours.keys() == checkpoint.keys()
    for key, value in checkpoint.items():
        assert torch.equal(ours[key], value), key
    present, needed = _numbers(*source), _numbers(*target)
    least = sum(len(elements - present.get(key, (set(), 0))[0]) * size for key, (elements, size) in needed.items())
    assert moved.received == least
    return plan.bytes, moved


@pytest.mark.thinned(1)
@pytest.mark.parametrize("target", LAYOUTS)
@pytest.mark.parametrize("source", LAYOUTS)
def test_trained_models(source, target, tmp_path):
    results = ranks.run(_moved, 4, (LAYOUTS[source], LAYOUTS[target]), tmp_path, {})
    assert len({planned for planned, _ in results}) == 1
    assert results[0][0] == sum(moved.received for _, moved in results) == sum(moved.sent for _, moved in results)


EXPERTS = {"ep 2, tp 2": (1, 1, 2, 1, 2, 0), "ep 4": (1, 1, 4, 1, 1, 0), "tp 4": LAYOUTS["tp 4"]}


@pytest.mark.thinned(1)
@pytest.mark.parametrize("target", EXPERTS)
@pytest.mark.parametrize("source", EXPERTS)
def test_experts(source, target, tmp_path):
    """Their chunks are cut in two dims."""
    pair = EXPERTS[source], EXPERTS[target]
    ranks.run(_moved, 4, pair, tmp_path, {"experts": True, "tied": False})
