"""The mesh of a job, and what functions of whole models make of it."""

import warnings

import pytest
import torch
from torch import nn
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import fully_shard

import tp_ext
from tests.helpers import ranks
from tests.helpers.on_ranks import on_ranks
from tp_ext.mesh import SlowMeshWarning

pytestmark = pytest.mark.core


def _axes(group):
    mesh = tp_ext.init_mesh("cpu", pp=2, tp=2)
    assert mesh.mesh_dim_names == ("pp", "dp", "cp", "tp") and tuple(mesh.shape) == (2, 1, 1, 2)
    tp_ext.manual_seed(3, mesh)
    return mesh["tp"].mesh.tolist(), mesh["pp"].mesh.tolist()


def test_tensor_parallel_ranks_are_neighbours():
    assert ranks.run(_axes, 4) == [([0, 1], [0, 2]), ([0, 1], [1, 3]), ([2, 3], [0, 2]), ([2, 3], [1, 3])]


def _sizes(group, options):
    tp_ext.init_mesh("cpu", **options)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"tp": 3}, "pp, dp, cp, tp: pp = 1, dp = -1, cp = 1, tp = 3 must multiply to the 2 ranks of the job"),
        ({"dp": 1}, "dp = 1, cp = 1, tp = 1 must multiply to the 2 ranks"),
        ({"tp": -1}, "dp, tp: only one of them may be -1"),
        ({"cp": 0}, "cp: 0 must be an integer of at least 1, or -1"),
        ({"pp": 2.0}, "pp: 2.0 must be an integer"),
    ],
    ids=str,
)
def test_numbers_of_ranks_that_do_not_fit(options, match):
    ranks.run_raises(_sizes, 2, ValueError, match, options)


@pytest.mark.parametrize("device_type", [3, torch.device("cpu")], ids=str)
def test_a_device_type_that_is_no_string(device_type):
    with pytest.raises(TypeError, match=r"device_type: .* must be a string such as 'cpu' or 'cuda'"):
        tp_ext.init_mesh(device_type)


def _hosts(group, local):
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        patch.setenv("LOCAL_WORLD_SIZE", local)
        tp_ext.init_mesh("cpu", tp=2)
    return [str(one.message) for one in seen if one.category is SlowMeshWarning]


def test_a_group_over_hosts_is_a_warning():
    assert ranks.run(_hosts, 4, "2") == [[]] * 4
    for said in ranks.run(_hosts, 4, "1"):
        assert len(said) == 1 and "tp: a group of 2 ranks spans hosts of 1 ranks each" in said[0]


def _calls(model, **options):
    """Every function of whole models that takes a mesh, with these options."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    state, states = dict(model.state_dict()), {"state": {}, "param_groups": []}
    return {
        "clip_grad_norm_": lambda: tp_ext.clip_grad_norm_(model, 1.0, **options),
        "grad_norm": lambda: tp_ext.grad_norm(model, **options),
        "full_state_dict": lambda: tp_ext.full_state_dict(model, **options),
        "load_full_state_dict": lambda: tp_ext.load_full_state_dict(model, state, **options),
        "full_optimizer_state_dict": lambda: tp_ext.full_optimizer_state_dict(model, optimizer, **options),
        "load_full_optimizer_state_dict": lambda: tp_ext.load_full_optimizer_state_dict(
            model, optimizer, states, **options
        ),
        "sharded_state_dict": lambda: tp_ext.sharded_state_dict(model, **options),
        "load_sharded_state_dict": lambda: tp_ext.load_sharded_state_dict(model, storage_reader=None, **options),
        "save_checkpoint": lambda: tp_ext.save_checkpoint("nowhere", model, **options),
        "load_checkpoint": lambda: tp_ext.load_checkpoint("nowhere", model, **options),
        "save_safetensors": lambda: tp_ext.save_safetensors("nowhere", model, **options),
        "load_safetensors": lambda: tp_ext.load_safetensors("nowhere", model, **options),
        "check": lambda: tp_ext.debug.check(model, **options),
    }


@on_ranks(2)
def test_wrong_meshes_are_refused_by_every_function(group):
    mesh = tp_ext.init_mesh("cpu", tp=2)
    other = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tp"))
    model = tp_ext.ColumnParallelLinear(4, 6, group=mesh["tp"])
    plain = nn.Linear(2, 2)
    for name in _calls(plain):
        for options, error, words in [
            ({"mesh": mesh, "group": mesh["tp"]}, TypeError, "group: must not be given together with mesh"),
            ({"mesh": group}, TypeError, "mesh: ProcessGroup.* must be a DeviceMesh"),
            (
                {"mesh": other},
                ValueError,
                r"mesh: its axes \('data', 'tp'\) must be among \('pp', 'dp', 'ep', 'cp', 'tp'\)",
            ),
        ]:
            with pytest.raises(error, match=words):
                _calls(plain, **options)[name]()
    for name in ("clip_grad_norm_", "full_state_dict", "sharded_state_dict", "check"):
        with pytest.raises(ValueError, match=r"mesh\['tp'\]: None must be that of the model's layers.* without mesh="):
            _calls(model, mesh=mesh["pp", "dp"])[name]()
    with pytest.raises(TypeError, match="extra_groups: must not be given together with mesh"):
        tp_ext.grad_norm(model, mesh=mesh, extra_groups=mesh["pp"])
    with pytest.raises(TypeError, match=r"module: \[3\] must be a module, or a list of the stages"):
        tp_ext.full_state_dict([3], mesh=mesh)


def _replicas(group, drifted):
    """Without any wrapper: the mesh alone says that ranks along dp hold copies."""
    mesh = tp_ext.init_mesh("cpu", dp=2, tp=2)
    torch.manual_seed(0)
    model = nn.Sequential(tp_ext.ColumnParallelLinear(4, 6, group=mesh["tp"]), tp_ext.RMSNorm(6, group=mesh["tp"]))
    if drifted and group.rank() == 2:
        with torch.no_grad():
            model[0].bias[1] += 1
    first = bool(tp_ext.full_state_dict(model, mesh=mesh, rank0_only=True))
    return first, tp_ext.debug.findings(model, mesh=mesh)


def test_replicas_along_dp_are_known():
    """One rank has the full state, and a replica that has drifted is found, on all ranks alike."""
    assert ranks.run(_replicas, 4, False) == [(rank == 0, []) for rank in range(4)]
    for _, found in ranks.run(_replicas, 4, True):
        assert len(found) == 1 and found[0].startswith(
            "over the ranks [0, 2]: 0.bias: must be the same on ranks [0, 1]"
        )


def _flattened(group):
    """FSDP2 over dp and cp as one axis, which the mesh's own axes lie within."""
    mesh = tp_ext.init_mesh("cpu", dp=2, cp=2)
    torch.manual_seed(0)
    model = nn.ModuleDict({"mlp": tp_ext.ParallelMLP(6, 10, group=mesh["tp"]), "norm": tp_ext.RMSNorm(6)})
    fully_shard(model["mlp"], mesh=mesh["dp", "cp"]._flatten("dp_cp"))
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    norm = tp_ext.grad_norm(model, mesh=mesh)
    want, first = tp_ext.full_state_dict(model, mesh=mesh), tp_ext.full_state_dict(model, mesh=mesh, rank0_only=True)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(9)
    tp_ext.load_full_state_dict(model, first, mesh=mesh, broadcast_from_rank0=True)
    loaded = tp_ext.full_state_dict(model, mesh=mesh)
    assert all(torch.equal(loaded[name], want[name]) for name in want)
    return norm, {*first}, sum(value.numel() for value in want.values()), tp_ext.debug.findings(model, mesh=mesh)


def test_fsdp2_over_flattened_axes():
    (norm, names, numel, found), *others = ranks.run(_flattened, 4)
    assert "mlp.up.weight" in names and found == [] and all(other[1:] == (set(), numel, []) for other in others)
    for got in (norm, *(other[0] for other in others)):
        torch.testing.assert_close(got, torch.tensor(numel**0.5))
