"""A data-parallel wrap over ranks that hold different shards: DDP is refused before it sends, FSDP2 is found."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import tp_ext
from tests.helpers import data_parallel
from tests.helpers.ranks import run, run_raises
from tp_ext import debug

pytestmark = pytest.mark.core


def _model(group):
    return nn.Sequential(
        nn.Linear(6, 6), tp_ext.RMSNorm(6, group=group), tp_ext.ParallelMLP(6, 8, group=group, bias=False)
    )


def _ddp(group, inside):
    model = _model(group)
    if inside:
        model[2] = DistributedDataParallel(model[2])
    return DistributedDataParallel(model)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("p", [2, 3])
def test_ddp_over_tensor_parallel_ranks_is_refused_before_it_sends(p, inside):
    """run_raises calls it on one rank at a time: a broadcast would hang."""
    name = "up.weight" if inside else "2.up.weight"
    match = rf"process_group: .* over ranks \[0, 1.*\] would overwrite and average {name}, .*process_group=mesh\['dp'\]"
    run_raises(_ddp, p, ValueError, match, inside)


def _ddp_over_mesh(group, axis):
    mesh = data_parallel.mesh(2, 2)
    model = _model(mesh["tp"])
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    DistributedDataParallel(model, process_group={"dp": mesh["dp"].get_group(), "world": None, "tp": group}[axis])
    assert all(torch.equal(param, before[name]) for name, param in model.named_parameters())


def test_ddp_over_the_data_axis_is_taken():
    run(_ddp_over_mesh, 4, "dp")
    for axis in ("world", "tp"):
        run_raises(_ddp_over_mesh, 4, ValueError, r"process_group: .*ranks \[0, 1, 2, 3\]", axis, in_turns=False)


def _taken(group):
    """Nothing sharded; sharded and ignored; a group that torch has made of one rank."""
    DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), tp_ext.LayerNorm(4, group=group)))
    DistributedDataParallel(tp_ext.ParallelMLP(4, 4, group=None))
    model = _model(group)
    ignored = [name for name, sharding in tp_ext.shardings(model) if sharding is not None]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    wrapped = DistributedDataParallel(model)
    debug.check(wrapped)
    wrapped(torch.randn(5, 6)).sum().backward()
    debug.check(wrapped)
    model.module = model[0]  # any other module with a child of that name


def test_ddp_that_mixes_nothing_is_taken():
    for p in (1, 2):
        run(_taken, p)


def _found(group, kind):
    mesh = data_parallel.mesh(2, 2)
    torch.manual_seed(group.rank() // 2)
    model = _model(mesh["tp"])
    if kind == "fsdp":
        fully_shard(model)
    elif kind == "hsdp":
        fully_shard(model, mesh=mesh)
    elif kind == "right":
        fully_shard(model, mesh=mesh["dp"])
    else:  # where the hook is not: the module was swapped under the wrapper
        wrapped = DistributedDataParallel(nn.Linear(6, 6))
        wrapped._modules["module"] = model
        model = nn.Sequential(wrapped)
    debug.check(model)


def test_check_finds_wraps_that_mix():
    match = r"2.up.weight: FSDP2's mesh of ranks \[0, 1, 2, 3\] holds the tensor-parallel ranks \[\d, \d\]"
    run_raises(_found, 4, RuntimeError, match, "fsdp", in_turns=False)
    run_raises(_found, 4, RuntimeError, match, "hsdp", in_turns=False)
    run_raises(_found, 4, RuntimeError, r"\n- 0: DistributedDataParallel over ranks", "ddp", in_turns=False)
    run(_found, 4, "right")


def _drift_under_fsdp(group, where):
    mesh = data_parallel.mesh(2, 2)
    model = nn.Sequential(
        tp_ext.ParallelAttention(8, 2, num_kv_heads=1, group=mesh["tp"]), tp_ext.RMSNorm(8, group=mesh["tp"])
    )
    fully_shard(model, mesh=mesh["dp"])
    if group.rank() == 1:
        with torch.no_grad():
            if where == "norm":
                model[1].weight.to_local()[2] = 5
            elif where == "copies":  # rank 1's rows are q 0-3, k 4-7, v 8-11, of which its slice is 0-5
                model[0].qkv.weight.to_local()[4, 7] = 5
            else:
                model[0].qkv.weight.to_local()[1, 7] = 5
    debug.check(model)


def test_check_finds_drift_of_parameters_sharded_by_fsdp2():
    """On data-parallel ranks 0 the norm differs; copied KV heads are put together first, so their rows are found, and
    on the ranks of both data-parallel halves. A row of q is nobody else's."""
    run(_drift_under_fsdp, 4, "q")
    with pytest.raises(Exception, match=r"1.weight: .* ranks \[1\] differ from \[0\], first at index \(2,\): 5.0"):
        run(_drift_under_fsdp, 4, "norm")
    match = r"0.qkv.weight \(part 1, .* ranks \[1\] .*, first at index \(0, 7\): 5.0"
    run_raises(_drift_under_fsdp, 4, RuntimeError, match, "copies", in_turns=False)
