"""Full state dicts of wrapped models: what FSDP2, DDP, checkpoint wrappers, torch.compile and parametrizations make
of a model has the state of the plain one.
"""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import tp_ext
from tests.helpers import ranks
from tests.helpers.meshes import mesh_of
from tests.helpers.models import OPTIONS, assert_same, model_and_optimizer, train

pytestmark = pytest.mark.core

# HSDP, too, leaves one tensor-parallel rank
EACH = ["FSDP2", "HSDP", pytest.param("FSDP2 over all", marks=pytest.mark.exhaustive), "DDP", "checkpointed"]
# Full states of HSDP are by default those of test_wraps_load, which trains with them, too
LEAVING = [pytest.param(how, marks=pytest.mark.exhaustive) if how == "HSDP" else how for how in EACH]
# A load under DDP is by default that of test_optimizer_state.py
LOADING = [*EACH[:3], pytest.param("DDP", marks=pytest.mark.exhaustive)]


def wrapped(group, how, seed=7, **options):
    """(model, optimizer, tensor-parallel group) of 4 ranks, 2 x 2 unless the data axis is all of them or two."""
    shape = {"HSDP": (2, 2, 1), "FSDP2 over all": (4, 1)}.get(how, (2, 2))
    names = ("replicas", "dp", "tp") if how == "HSDP" else ("dp", "tp")
    mesh = mesh_of(*shape, names=names)
    tp = mesh["tp"]
    model, _ = model_and_optimizer(tp, seed, **options)
    if "SDP" in how:
        data = mesh["replicas", "dp"] if how == "HSDP" else mesh["dp"]
        for part in (model.mlp, model.attention, model):
            fully_shard(part, mesh=data)
    elif how == "DDP":
        model = DistributedDataParallel(model, process_group=mesh["dp"].get_group())
    elif how == "checkpointed":
        model.mlp = checkpoint_wrapper(model.mlp)
        model.attention.qkv = checkpoint_wrapper(model.attention.qkv)
        model = checkpoint_wrapper(model)
    return model, fused(model), tp


def fused(model):
    """DTensor looks for the sharding of one operator, not of many for each shape."""
    return torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


def _states(group, how, options):
    """Full states after two steps of training, everywhere and on rank 0 alone."""
    model, optimizer, tp = wrapped(group, how, **options)
    train(model, optimizer, tp, 2)
    states = []
    for only in (False, True):
        states.append(tp_ext.full_state_dict(model, rank0_only=only))
        states.append(tp_ext.full_optimizer_state_dict(model, optimizer, rank0_only=only, cpu_offload=only))
    return states


def flat(optimizer_state):
    return {f"{a}.{b}": v for a, entry in optimizer_state["state"].items() for b, v in entry.items()}


def trained(steps=2):
    model, _ = model_and_optimizer(None)
    optimizer = fused(model)
    train(model, optimizer, None, steps)
    return tp_ext.full_state_dict(model), tp_ext.full_optimizer_state_dict(model, optimizer)


@pytest.mark.parametrize("how", LEAVING)
def test_wraps_leave_no_trace(how):
    """fp64 bound 1e-12: the sums over ranks run in another order."""
    want, want_optimizer = trained()
    if how == "checkpointed":
        want["calls"] *= 2  # counted again when it is computed again
    results = ranks.run(_states, 4, how, OPTIONS[2] if "SDP" in how else {})
    for state, optimizer_state, _, _ in results:
        assert_same(state, want, exact=False)
        assert_same(flat(optimizer_state), flat(want_optimizer), exact=False)
        assert optimizer_state["param_groups"][0]["params"] == want_optimizer["param_groups"][0]["params"]
    (_, _, first, first_optimizer), *others = results
    assert_same(first, results[0][0])
    assert_same(flat(first_optimizer), flat(results[0][1]))
    # Without a wrapper that shows the data axis, every replica has a rank 0
    empty = [not state and not optimizer_state for *_, state, optimizer_state in others]
    assert empty == ([True] * 3 if "DP" in how else [True, False, True])


def _load(group, how, options, state, optimizer_state, from_first):
    model, optimizer, tp = wrapped(group, how, seed=9, **options)
    if from_first and group.rank():
        state = optimizer_state = {}
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(3e9)  # padding too
    tp_ext.load_full_state_dict(model, state, broadcast_from_rank0=from_first)
    tp_ext.load_full_optimizer_state_dict(model, optimizer, optimizer_state, broadcast_from_rank0=from_first)
    after = tp_ext.full_state_dict(model), tp_ext.full_optimizer_state_dict(model, optimizer)
    return *after, train(model, optimizer, tp, 2)


@pytest.mark.thinned(1)
@pytest.mark.parametrize("from_first", [False, True], ids=["on all ranks", "on rank 0"])
@pytest.mark.parametrize("how", LOADING)
def test_wraps_load(how, from_first):
    model, _ = model_and_optimizer(None)
    optimizer = fused(model)
    train(model, optimizer, None, 2)
    state, optimizer_state = tp_ext.full_state_dict(model), tp_ext.full_optimizer_state_dict(model, optimizer)
    want = train(model, optimizer, None, 2)
    options = OPTIONS[2] if "SDP" in how else {}
    for loaded, loaded_optimizer, losses in ranks.run(_load, 4, how, options, state, optimizer_state, from_first):
        assert_same(loaded, state)
        assert_same(flat(loaded_optimizer), flat(optimizer_state))
        torch.testing.assert_close(losses, want, rtol=1e-12, atol=1e-12)


def test_compiled_models_and_their_parts():
    model, _ = model_and_optimizer(None)
    want = tp_ext.full_state_dict(model)
    model.mlp = torch.compile(model.mlp, backend="eager")
    assert_same(tp_ext.full_state_dict(torch.compile(model, backend="eager")), want)


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x

    def right_inverse(self, x):
        return x / 2


def _parametrized(group, kind):
    torch.manual_seed(3)
    model = nn.Sequential(tp_ext.ColumnParallelLinear(3, 5, group=group), tp_ext.RowParallelLinear(5, 4, group=group))
    for layer in model:
        if kind == "weight_norm":
            nn.utils.parametrizations.weight_norm(layer)
        else:
            nn.utils.parametrize.register_parametrization(layer, "weight", Doubled())
    state = tp_ext.full_state_dict(model)
    for value in model.parameters():
        nn.init.zeros_(value)
    tp_ext.load_full_state_dict(model, state)
    return state, tp_ext.full_state_dict(model), dict(tp_ext.shardings(model))


def test_parametrizations():
    """Originals are cut as the parameter is; a norm over the sharded dim, of the row linear here, is refused."""
    want, *_ = _parametrized(None, "doubled")
    assert want["0.parametrizations.weight.original"].shape == (5, 3)
    for state, again, table in ranks.run(_parametrized, 2, "doubled"):
        assert_same(state, want)
        assert_same(again, want)
        assert table["1.parametrizations.weight.original"].dim == 1
    match = "parametrizations.weight.original0.*must have"
    ranks.run_raises(_parametrized, 2, ValueError, match, "weight_norm", in_turns=False)
