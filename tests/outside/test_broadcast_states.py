"""``broadcast_from_rank0`` of torch's state dict functions over (dp, tp): as torch's, over all ranks of the job."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn, ones
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.utils._pytree import tree_leaves

import tp_ext
from tests.helpers import ranks
from tests.helpers.on_ranks import on_ranks

FULL = StateDictOptions(full_state_dict=True)
LOADED = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def _trained(mesh, kind, seed):
    tp_ext.manual_seed(seed)
    model = nn.Sequential(tp_ext.ParallelMLP(4, 8, group=mesh["tp"]), nn.LayerNorm(4))
    torch.nn.init.normal_(model[1].weight, generator=torch.Generator().manual_seed(seed))
    wrapped = model
    if kind == "fsdp":
        fully_shard(model, mesh=mesh["dp"])
    elif kind != "bare":
        wrapped = nn.parallel.DistributedDataParallel(model, process_group=mesh["dp"].get_group())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * seed)
    wrapped(ones(3, 4)).square().sum().backward()
    optimizer.step()
    return (wrapped if kind == "wrapper" else model), optimizer


def _states(model, optimizer):
    return get_model_state_dict(model, options=FULL), get_optimizer_state_dict(model, optimizer, options=FULL)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("kind", ["bare", "inside", "wrapper", "fsdp"])
@on_ranks(4)
def test_the_state_of_rank_0_reaches_all_replicas(group, kind, together, flat):
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    source, target = _trained(mesh, kind, 1), _trained(mesh, kind, 2)
    want = _states(*source)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, flatten_optimizer_state_dict=flat)
    saving = StateDictOptions(full_state_dict=True, cpu_offload=True, flatten_optimizer_state_dict=flat)
    if together:  # torch takes an empty state of another rank for none, so each gives its own
        whole = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=flat)
        states = [get_state_dict(*some, options=whole) for some in (source, target)]
        state, optimizer_state = states[group.rank() > 0]
        set_state_dict(*target, model_state_dict=state, optim_state_dict=optimizer_state, options=options)
    else:
        state = get_model_state_dict(source[0], options=saving)
        optimizer_state = get_optimizer_state_dict(*source, options=saving)
        set_model_state_dict(target[0], state, options=options)
        set_optimizer_state_dict(*target, optimizer_state, options=options)
    for value, expected in zip(tree_leaves(_states(*target)), tree_leaves(want), strict=True):
        assert torch.equal(value, expected) if isinstance(value, torch.Tensor) else value == expected


def _wrong(group):
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, _ = _trained(mesh, "inside", 1)
    state = {"0.up.weight": ones(3, 3)} if group.rank() == 0 else {}
    before = copy.deepcopy(model.state_dict())
    try:
        set_model_state_dict(model, state, options=LOADED)
    finally:
        torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)


def test_a_state_that_does_not_fit_is_refused_on_all_ranks():
    ranks.run_raises(_wrong, 4, KeyError, "missing keys", in_turns=False)
