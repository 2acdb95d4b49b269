"""State of optimizers that keep it elsewhere: ZeRO-1, saved on a (2, 2) mesh, goes on at other layouts and in a plain
optimizer as an uninterrupted training of one process does.
"""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import tp_ext
from tests.helpers import ranks
from tests.helpers.meshes import mesh_of
from tests.helpers.models import RichModel, train

pytestmark = pytest.mark.core
CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def made(shape, seed=7):
    """A model on a mesh of (dp, tp), or on one process, with ZeRO-1 if dp > 1: two groups of parameters."""
    mesh = mesh_of(*shape, names=("dp", "tp")) if shape else None
    tp = mesh and mesh["tp"].get_group()
    torch.manual_seed(seed)
    model = RichModel(tp)
    groups = [
        {"params": [q for q in model.parameters() if q.dim() > 1], "weight_decay": 0.1},
        {"params": [q for q in model.parameters() if q.dim() == 1], "lr": 0.02},
    ]
    options = {"lr": 0.01, "eps": 1e-4}
    if mesh is None or shape[0] == 1:
        return model, torch.optim.AdamW(groups, **options), tp
    dp = mesh["dp"].get_group()
    optimizer = ZeroRedundancyOptimizer(groups, torch.optim.AdamW, process_group=dp, **options)
    return DistributedDataParallel(model, process_group=dp), optimizer, tp


def _saved(shape, path):
    """Two steps with a schedule; then a save, and one more step."""
    model, optimizer, tp = made(shape)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for _ in range(2):
        train(model, optimizer, tp, 1)
        schedule.step()
    full = tp_ext.full_optimizer_state_dict(model, optimizer)
    if path is not None:
        tp_ext.save_checkpoint(path / "saved", model, optimizer)
        first = [tp_ext.full_state_dict(model, rank0_only=True)]
        first.append(tp_ext.full_optimizer_state_dict(model, optimizer, rank0_only=True))
        if dist.get_rank() == 0:
            torch.save(first, path / "full.pt")
        else:
            assert first == [{}, {}]
    return full, train(model, optimizer, tp, 2)


def _save(group, path):
    return _saved((2, 2), path)


WAYS = ("checkpoint", "full", "broadcast")


def _resumed(shape, path, ways=WAYS):
    found = []
    for how in ways:
        model, optimizer, tp = made(shape, seed=8)
        if how == "checkpoint":
            tp_ext.load_checkpoint(path / "saved", model, optimizer)
        else:
            on_first = how == "broadcast" and dist.is_initialized()
            state, states = torch.load(path / "full.pt") if not (on_first and dist.get_rank()) else ({}, {})
            tp_ext.load_full_state_dict(model, state, broadcast_from_rank0=on_first)
            tp_ext.load_full_optimizer_state_dict(model, optimizer, states, broadcast_from_rank0=on_first)
        found.append((tp_ext.full_optimizer_state_dict(model, optimizer), train(model, optimizer, tp, 2)))
    return found


def _resume(group, shape, path, ways):
    return _resumed(shape, path, ways)


def test_zero1_goes_on_anywhere(tmp_path):
    want, losses = _saved(None, None)
    assert want["param_groups"][1]["lr"] == 0.005 and want["state"]["mlp.up.weight"]["step"] == 2
    results = ranks.run(_save, 4, tmp_path)
    for full, after in results:
        assert full["param_groups"] == want["param_groups"]
        torch.testing.assert_close((full["state"], after), (want["state"], losses), **CLOSE)
    saved = results[0][0]
    layouts = ((4, (2, 2), WAYS[:1]), (3, (3, 1), WAYS), (2, (1, 2), WAYS))
    resumed = [ranks.run(_resume, p, shape, tmp_path, ways) for p, shape, ways in layouts]
    for found in [_resumed(None, tmp_path), *(one for ranks_ in resumed for one in ranks_)]:
        for full, after in found:
            assert full["param_groups"] == saved["param_groups"]
            torch.testing.assert_close(full["state"], saved["state"], rtol=0, atol=0)
            torch.testing.assert_close(after, losses, **CLOSE)


def test_zero1_that_overlaps_with_ddp_is_refused():
    ranks.run_raises(_overlapping, 2, ValueError, "optimizer: ZeroRedundancyOptimizer must have overlap_with_ddp=False")


def _overlapping(group):
    layer = tp_ext.ColumnParallelLinear(4, 6, group=None)
    optimizer = ZeroRedundancyOptimizer(
        layer.parameters(), torch.optim.AdamW, process_group=group, overlap_with_ddp=True, lr=0.1
    )
    tp_ext.full_optimizer_state_dict(layer, optimizer)
