"""`state_dict()` of shards: ordinary tensors that know their place; `load_state_dict` refuses those of another
place."""

import copy
import io
import re

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import tp_ext
from tests.helpers import ranks
from tests.helpers.data_parallel import mesh, wrap
from tests.helpers.on_ranks import on_ranks
from tp_ext.outside.places import found_place


def _net(group, seed=1):
    tp_ext.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(4, 4),
        tp_ext.ColumnParallelLinear(4, 8, group=group),
        tp_ext.RowParallelLinear(8, 4, group=group),
    )
    tp_ext.reset_parameters(model)
    return model


def _saved(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _read(data):
    return torch.load(io.BytesIO(data), weights_only=True)


def _ordinary(group):
    model = _net(group)
    state, params = model.state_dict(), dict(model.named_parameters())
    for name, value in state.items():
        assert type(value) is torch.Tensor and value.shape == params[name].shape and not value.requires_grad
        assert value.data_ptr() == params[name].data_ptr() and torch.equal(value * 2, params[name].detach() * 2)
    assert not any(found_place(param) or vars(param).keys() & {"global_shape"} for param in params.values())
    assert all(value is params[name] for name, value in model.state_dict(keep_vars=True).items())
    assert found_place(state["1.weight"]).local_sizes == ((4, 4),) and found_place(state["0.weight"]) is None
    for again in (_read(_saved(state)), copy.deepcopy(state), {name: value.clone() for name, value in state.items()}):
        other = _net(group, seed=2)
        assert str(other.load_state_dict(again)) == "<All keys matched successfully>"
        assert all(torch.equal(value, state[name]) for name, value in other.state_dict().items())
    other = _net(group, seed=2)
    other.load_state_dict(_read(_saved(state)), assign=True)
    assert all(torch.equal(value, state[name]) for name, value in other.state_dict().items())
    assert all(hasattr(param, "tp_layout") for name, param in other.named_parameters() if name[0] != "0")
    assert found_place(other[1].weight) is None
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    of_optimizer = optimizer.state_dict()
    again = torch.optim.Adam(_net(group).parameters())
    again.load_state_dict(_read(_saved(of_optimizer)))
    for number, states in again.state_dict()["state"].items():
        assert all(torch.equal(value, of_optimizer["state"][number][key]) for key, value in states.items())
    live = [value for states in (*optimizer.state.values(), *again.state.values()) for value in states.values()]
    assert not any(found_place(value) for value in live) and found_place(of_optimizer["state"][2]["exp_avg"])
    return _saved(state), _saved(of_optimizer)


def _dropped(data):
    """The state as after ``state[name] = state[name].to(device)``: values without attributes, torch's metadata."""
    state = _read(data)
    for name, value in state.items():
        state[name] = value.clone()
    return _saved(state)


def _refused(group, data, strict):
    model = _net(group, seed=2)
    before = copy.deepcopy(model.state_dict())
    try:
        model.load_state_dict(_read(data), strict=strict)
    except RuntimeError:
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        raise


def _refused_optimizer(group, data):
    optimizer = torch.optim.Adam(_net(group).parameters())
    try:
        optimizer.load_state_dict(_read(data))
    except RuntimeError:
        assert not optimizer.state
        raise


def _refused_in_turn(group, fn, data, held_by, *args):
    """On the ranks that do not hold the shard; where it fits it is loaded."""
    if held_by is not None and group.rank() == held_by and group.size() == 2:
        return fn(group, data, *args)
    with pytest.raises(RuntimeError) as caught:
        fn(group, data, *args)
    return str(caught.value)


def test_shards_of_another_rank_are_refused():
    """Whether the shapes fit or not, and without a change."""
    saved = ranks.run(_ordinary, 2)
    for rank, (data, of_optimizer) in enumerate(saved):
        for given in (data, _dropped(data)):
            for strict in (True, False):
                found = ranks.run(_refused_in_turn, 2, _refused, given, rank, strict)
                loads = f"rank {1 - rank} of 2"
                text = (
                    f"state_dict: '1.weight' was saved by rank {rank} of 2 and is loaded by {loads}, which holds other"
                )
                assert (
                    found[rank] is None
                    and found[1 - rank].startswith(text)
                    and "tp_ext.load_checkpoint" in found[1 - rank]
                )
        found = ranks.run(_refused_in_turn, 2, _refused_optimizer, of_optimizer, rank)
        assert found[rank] is None and "'state.2.exp_avg' was saved by rank" in found[1 - rank]
    for p in (1, 4):
        for rank, text in enumerate(ranks.run(_refused_in_turn, p, _refused, saved[0][0], None, False)):
            loads = f"rank {rank} of 4" if p == 4 else "an unsharded model"
            assert text.startswith(f"state_dict: '1.weight' was saved by rank 0 of 2 and is loaded by {loads}")


def test_dense_states_are_refused():
    data = _saved(_net(None).state_dict())
    match = r"'1.weight' has shape \(8, 4\), that of the unsharded model, .*: take tp_ext.load_full_state_dict"
    for strict in (True, False):
        ranks.run_raises(_refused, 2, RuntimeError, match, data, strict)
    assert ranks.run(_refused, 1, data, True) == [None]


def _dense_in_place_of_shards(group):
    """A state dict of shards whose values were replaced by full tensors is a dense one at any number of ranks."""
    model = _net(group)
    state = model.state_dict()
    for name, value in tp_ext.full_state_dict(model).items():
        state[name] = value
    dense = _net(None, seed=2)
    dense.load_state_dict(state)
    return tp_ext.full_state_dict(dense), tp_ext.full_state_dict(model)


def test_a_state_with_full_tensors_is_dense():
    for got, want in ranks.run(_dense_in_place_of_shards, 2):
        assert all(torch.equal(value, want[name]) for name, value in got.items())


def _fsdp2(group):
    axes = mesh(2, 2)
    model = _net(axes["tp"].get_group())
    wrapped = fully_shard(model, mesh=axes["dp"])
    state = wrapped.state_dict()
    assert type(state["1.weight"]) is torch.Tensor and state["1.weight"].shape == (2, 4)
    assert isinstance(state["0.weight"], DTensor)  # of torch, as torch gives it
    assert found_place(state["1.weight"]).held_by == f"rank {group.rank() % 2} of 2 x rank {group.rank() // 2} of 2"
    shards = {name: value for name, value in state.items() if found_place(value)}
    want = tp_ext.full_state_dict(wrapped)
    with torch.no_grad():
        for name, value in _read(_saved(shards)).items():
            state[name] = value
        for param in wrapped.parameters():
            param.zero_()
    wrapped.load_state_dict({**state, "0.weight": wrapped[0].weight, "0.bias": wrapped[0].bias})
    got = tp_ext.full_state_dict(wrapped)
    assert all(torch.equal(want[name], got[name]) for name in shards)
    return _saved(shards)


def _fsdp2_refused(group, data, rank):
    axes = mesh(2, 2)
    model = fully_shard(_net(axes["tp"].get_group()), mesh=axes["dp"])
    if group.rank() == rank:
        return model.load_state_dict(_read(data), strict=False)
    with pytest.raises(RuntimeError, match=r"state_dict: '1.weight' was saved by rank"):
        model.load_state_dict(_read(data), strict=False)


def test_shards_of_fsdp2_are_local_tensors():
    saved = ranks.run(_fsdp2, 4)
    for rank in (0, 3):
        ranks.run(_fsdp2_refused, 4, saved[rank], rank)


def _permuted(dp, tp):
    """A mesh of all ranks in descending order."""
    return DeviceMesh("cpu", torch.arange(dp * tp).flip(0).view(dp, tp), mesh_dim_names=("dp", "tp"))


def _permuted_save(group, dp, tp, folder):
    axes = _permuted(dp, tp)
    model = fully_shard(_net(axes["tp"].get_group()), mesh=axes["dp"])
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.arange(4.0)).square().sum().backward()
    optimizer.step()
    m, o = get_state_dict(model, optimizer)
    dcp.save({"m": m, "o": o}, checkpoint_id=f"{folder}/torch")
    tp_ext.save_checkpoint(f"{folder}/ours", model, optimizer)
    tensors = {name: param.full_tensor() for name, param in model.named_parameters()}  # over the data axis, by torch
    want = tp_ext.full_state_dict(model)
    for name, layout in tp_ext.layouts(model):
        assert torch.equal(tensors[name], layout.shard(want[name])), name
    other = fully_shard(_net(axes["tp"].get_group(), seed=2), mesh=axes["dp"])
    its = torch.optim.Adam(other.parameters())
    m, o = get_state_dict(other, its)
    dcp.load({"m": m, "o": o}, checkpoint_id=f"{folder}/torch")
    set_state_dict(other, its, model_state_dict=m, optim_state_dict=o)
    again = tp_ext.full_state_dict(other)
    assert all(torch.equal(value, again[name]) for name, value in want.items())
    tp_ext.load_full_state_dict(other, _net(None, seed=5).state_dict())
    assert torch.equal(tp_ext.full_state_dict(other)["0.weight"], _net(None, seed=5)[0].weight)
    return want, tp_ext.full_optimizer_state_dict(model, optimizer)["state"]


@pytest.mark.parametrize(("dp", "tp"), [(2, 1), (2, 2), (3, 1)])
def test_meshes_whose_ranks_do_not_ascend(tmp_path, dp, tp):
    """Saved with FSDP2 on such a mesh, by torch and by us, and read in one process; uneven rows at three ranks."""
    want, moments = ranks.run(_permuted_save, dp * tp, dp, tp, str(tmp_path), timeout=120)[0]
    for folder, keys in (("torch", ("m", "o")), ("ours", ("model", "optimizer"))):
        dense = _net(None, seed=3)
        m, o = get_state_dict(dense, optimizer := torch.optim.Adam(dense.parameters()))
        state = {keys[0]: m}
        if folder == "torch":
            state[keys[1]] = o
        dcp.load(state, checkpoint_id=tmp_path / folder, no_dist=True)
        set_state_dict(dense, optimizer, model_state_dict=m, optim_state_dict=o)
        for name, param in dense.named_parameters():
            assert torch.equal(param, want[name]), (folder, name)
            if folder == "torch":
                assert torch.equal(optimizer.state[param]["exp_avg"], moments[name]["exp_avg"]), name


class Declared(nn.Module):
    """A module of one's own with a sharded parameter and a sharded buffer."""

    def __init__(self, group):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(6 // group.size()))
        self.register_buffer("seen", torch.zeros(6 // group.size()))
        layout = tp_ext.Layout((tp_ext.Sharding(0, [6]), group))
        tp_ext.declare_layouts(self, {"weight": layout, "seen": layout})


def _declared(group, folder):
    module = Declared(group)
    module.weight.data.copy_(torch.arange(3.0) + 3 * group.rank())
    module.seen.copy_(-torch.arange(3.0) - 3 * group.rank())
    dcp.save(module.state_dict(), checkpoint_id=folder)


def test_declared_layouts(tmp_path):
    ranks.run(_declared, 2, str(tmp_path / "a"))
    state = {"weight": torch.zeros(6), "seen": torch.zeros(6)}
    dcp.load(state, checkpoint_id=tmp_path / "a", no_dist=True)
    assert torch.equal(state["weight"], torch.arange(6.0)) and torch.equal(state["seen"], -torch.arange(6.0))


def _stage(group, folder, load):
    """Two stages of one layer each, under the names of the whole model."""
    axes = tp_ext.init_mesh("cpu", pp=2, dp=1, tp=2)
    stage = _net(axes["tp"], seed=2 if load else 1)
    own = axes["pp"].get_local_rank()
    for name in ("0", "1") if own else ("2",):
        del stage._modules[name]
    state = {"model": stage.state_dict()}
    (dcp.load if load else dcp.save)(state, checkpoint_id=folder)
    return tp_ext.full_state_dict(stage, mesh=axes)


def test_stages_of_a_pipeline(tmp_path):
    saved = ranks.run(_stage, 4, str(tmp_path / "a"), False)[0]
    got = ranks.run(_stage, 4, str(tmp_path / "a"), True)[3]
    dense = _net(None, seed=3)
    state = {"model": dense.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path / "a", no_dist=True)
    want = _net(None).state_dict()
    for name, value in want.items():
        assert (
            torch.equal(value, saved[name])
            and torch.equal(value, got[name])
            and torch.equal(value, state["model"][name])
        )


def _to_old_torch(rank, group, folder, kind):
    """Saves and loads by torch before 2.15, which does not know places; both raise, and nothing is written."""
    model = _net(group)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}[kind]
    errors = []
    for call in (dcp.save, dcp.load):
        try:
            call({kind: state, "number": 1}, checkpoint_id=folder, no_dist=True)
        except dcp.api.CheckpointException as error:
            errors += (str(failure) for failure, _ in error.failures.values())
    return errors


@pytest.mark.parametrize(("kind", "name"), [("model", "model.1.weight"), ("optimizer", "optimizer.state.2.exp_avg")])
def test_torch_without_places_is_refused(tmp_path, monkeypatch, kind, name):
    """Its planner would take a shard for the whole. In one process it saves and loads as ever."""
    monkeypatch.delattr(dcp, "CheckpointableTensor", raising=False)
    folder = str(tmp_path / "a")
    assert tp_ext.debug.simulate(_to_old_torch, 1, folder, kind) == [[]]
    for rank, (save, load) in enumerate(tp_ext.debug.simulate(_to_old_torch, 2, folder, kind)):
        for text, call in ((save, "save"), (load, "load")):
            assert text.startswith(f"state_dict: '{name}' is the shard of rank {rank} of 2, which dcp.{call} of torch")
            assert text.endswith(f": take tp_ext.{call}_checkpoint, or torch 2.15")


class Sharded(nn.Module):
    """Declares shardings, and no group."""

    def __init__(self, group, rows=6):
        super().__init__()
        cut = tp_ext.Sharding(0, [rows])
        self.weight = nn.Parameter(cut.shard(torch.arange(float(rows)), group.rank(), group.size()))
        self.register_buffer("seen", -self.weight.detach().clone())
        self.tp_shardings = {"weight": cut, "seen": cut}


def _shardings_alone(group, folder):
    """Next to a layer of ours, whose group it is, and by itself."""
    model = nn.Sequential(tp_ext.ColumnParallelLinear(4, 8, group=group), Sharded(group))
    state, moments = get_state_dict(model, torch.optim.Adam(model.parameters()))
    dcp.save({"m": state, "o": moments}, checkpoint_id=folder)
    other = nn.Sequential(tp_ext.ColumnParallelLinear(4, 8, group=group), Sharded(group))
    other[1].weight.data.zero_()
    other.load_state_dict(_read(_saved(state)))
    assert torch.equal(other[1].weight, model[1].weight)
    for call, name in ((dcp.save, "save"), (dcp.load, "load")):
        with pytest.raises(dcp.api.CheckpointException) as caught:
            call({"m": model[1].state_dict()}, checkpoint_id=folder)
        text = (
            rf"'m.weight' is a shard of a tensor of shape \(6,\) by tp_shardings, which name no group, and dcp.{name} "
        )
        for error, _ in caught.value.failures.values():
            assert re.search(text + "cannot know its place: declare it by tp_ext.declare_layouts", str(error))
    assert len(caught.value.failures) == 2


def test_modules_with_shardings_alone(tmp_path):
    ranks.run(_shardings_alone, 2, str(tmp_path / "a"))
    state = {
        "m": {"1.weight": torch.zeros(6), "1.seen": torch.zeros(6)},
        "o": {"state.1.weight.exp_avg": torch.ones(6)},
    }
    dcp.load(state, checkpoint_id=tmp_path / "a", no_dist=True)
    assert torch.equal(state["m"]["1.weight"], torch.arange(6.0))
    assert torch.equal(state["m"]["1.seen"], -torch.arange(6.0))


def _padded(group):
    """At one tensor-parallel rank a row is padding, which the unsharded table does not have."""
    axes = mesh(2, 1)
    table = tp_ext.VocabParallelEmbedding(5, 4, pad_to_multiple_of=8, group=axes["tp"])
    fully_shard(table, mesh=axes["dp"])
    optimizer = torch.optim.Adam(table.parameters())
    table(torch.arange(5)).sum().backward()
    optimizer.step()
    return found_place(optimizer.state_dict()["state"][0]["exp_avg"])


def test_padding_under_fsdp2():
    """The state dict of an optimizer alone, without the model."""
    first, second = ranks.run(_padded, 2)
    assert first.chunks[:2] == ((5, 4), ((0, 0),)) and first.local_sizes == ((4, 4),)
    assert second.chunks[:2] == ((5, 4), ((4, 0),)) and second.local_sizes == ((1, 4),)


@on_ranks(4)
def test_replicas_may_load_one_file(group):
    axes = mesh(2, 2)
    model = wrap(nn.ModuleDict({"embedding": _net(axes["tp"].get_group())}), "ddp", axes["dp"])
    state = model.state_dict()
    assert found_place(state["module.embedding.1.weight"]) and state._metadata["module.embedding.1"]["tp_ext"]
    model.load_state_dict(_read(_saved(state)))
    data = [_saved(state)]
    dist.broadcast_object_list(data, 0)
    if group.rank() % 2 == 0:
        model.load_state_dict(_read(data[0]))  # of a replica
    else:
        with pytest.raises(
            RuntimeError, match=r"'module.embedding.1.weight' was saved by rank 0 of 2 and is loaded by rank 1"
        ):
            model.load_state_dict(_read(data[0]))
