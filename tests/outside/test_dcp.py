"""State dicts of shards through torch's own distributed checkpoints: the values of the unsharded model at any
layout."""

import functools
import re

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.nn.utils import parametrizations

import tp_ext
from tests.helpers import ranks
from tests.helpers.data_parallel import mesh, wrap

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
LAYOUTS = {"1": (1, 1, None), "2": (1, 2, None), "3": (1, 3, None), "fsdp": (2, 2, "fsdp"), "ddp": (2, 2, "ddp")}


class Model(nn.Module):
    """Uneven shards, copied KV heads, a padded vocabulary, replicated parameters, a sharded buffer."""

    def __init__(self, group):
        super().__init__()
        self.embedding = tp_ext.VocabParallelEmbedding(13, 12, group=group, pad_to_multiple_of=4)
        self.attention = tp_ext.ParallelAttention(12, 6, num_kv_heads=1, group=group)
        self.norm = tp_ext.RMSNorm(12)
        self.mlp = tp_ext.ParallelMLP(12, 19, activation="swiglu", group=group)
        self.plain = nn.Linear(12, 13)

    def forward(self, ids):
        x = self.embedding(ids)
        return self.plain(self.mlp(self.norm(x + self.attention(x))))


def make(layout, world, seed):
    """The model and its optimizer on this rank, and its group."""
    dp, tp, how = LAYOUTS[layout]
    made = mesh(dp, tp) if tp > 1 else None
    group = None if made is None else made["tp"].get_group()
    torch.manual_seed(seed)
    tp_ext.manual_seed(seed)
    model = Model(group)
    tp_ext.reset_parameters(model)
    if how:
        model = wrap(model, how, made["dp"])
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def ids():
    return torch.arange(10).view(5, 2) % 13


def train(model, optimizer, steps=2):
    for _ in range(steps):
        optimizer.zero_grad()
        model(ids()).square().sum().backward()
        optimizer.step()


def states(model, optimizer):
    model = getattr(model, "module", model)
    return tp_ext.full_state_dict(model), tp_ext.full_optimizer_state_dict(model, optimizer)["state"]


def same(a, b):
    (model, moments), (other, theirs) = a, b
    assert model.keys() == other.keys() and moments.keys() == theirs.keys()
    for name, value in model.items():
        assert torch.equal(value, other[name]), name
    for name, of_one in moments.items():
        for key, value in of_one.items():
            assert torch.equal(value, theirs[name][key]), (name, key)
    return True


def _changed(model, optimizer):
    with torch.no_grad():
        for param in (*model.parameters(), *(v for state in optimizer.state.values() for v in state.values())):
            param.add_(1)


def _saved(world, layout, folder, how, steps):
    model, optimizer = make(layout, world, 1)
    train(model, optimizer, steps)
    want = states(model, optimizer)
    if how == "ours":
        tp_ext.save_checkpoint(folder, model, optimizer)
        return want
    m, o = get_state_dict(model, optimizer, options=FLAT if how == "flat" else None)
    state = {"model": m, "optimizer": o}
    if not steps:  # asking for the state has made one
        want = states(model, optimizer)
    if how == "async":
        saving = dcp.async_save(state, checkpoint_id=folder)
        _changed(model, optimizer)
        saving.result()
    else:
        dcp.save(state, checkpoint_id=folder)
    return want


def _loaded(world, layout, folder, how, steps):
    model, optimizer = make(layout, world, 2)
    train(model, optimizer, steps)
    if how == "ours":
        tp_ext.load_checkpoint(folder, model, optimizer)
        return states(model, optimizer)
    options = FLAT if how == "flat" else None
    m, o = get_state_dict(model, optimizer, options=options)
    state = {"model": m, "optimizer": o}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=m, optim_state_dict=o, options=options)
    return states(model, optimizer)


def size(layout):
    return LAYOUTS[layout][0] * LAYOUTS[layout][1]


def _round_trip(saver, loader, folder, saved, loaded, steps=(2, 0)):
    want = ranks.run(_saved, size(saver), saver, folder, saved, steps[0])[0]
    for got in ranks.run(_loaded, size(loader), loader, folder, loaded, steps[1]):
        assert same(got, want)


PAIRS = [
    ("2", "3"),
    ("3", "2"),
    ("2", "1"),
    ("1", "2"),
    ("fsdp", "3"),
    ("2", "fsdp"),
    ("ddp", "fsdp"),
    ("fsdp", "fsdp"),
]


@pytest.mark.parametrize(("saver", "loader"), PAIRS)
def test_another_layout(tmp_path, saver, loader):
    """The optimizer that loads has made no step; then it has made some of its own."""
    _round_trip(saver, loader, str(tmp_path / "a"), "save", "save", (2, int(loader == "3")))


@pytest.mark.parametrize(("saver", "loader"), [("2", "3"), ("fsdp", "2")])
def test_asynchronous_saves_keep_the_values_of_their_call(tmp_path, saver, loader):
    _round_trip(saver, loader, str(tmp_path / "a"), "async", "save")


@pytest.mark.parametrize(("saver", "loader"), [("2", "3"), ("fsdp", "fsdp")])
def test_before_the_first_step(tmp_path, saver, loader):
    _round_trip(saver, loader, str(tmp_path / "a"), "save", "save", (0, 2))


@pytest.mark.parametrize(("saver", "loader"), [("2", "fsdp"), ("fsdp", "3")])
@pytest.mark.parametrize(("saved", "loaded"), [("flat", "flat"), ("flat", "ours"), ("ours", "flat")])
def test_flat_states_are_those_of_save_checkpoint(tmp_path, saver, loader, saved, loaded):
    _round_trip(saver, loader, str(tmp_path / "a"), saved, loaded)


def _names(world, layout, folder):
    model, optimizer = make(layout, world, 1)
    train(model, optimizer)
    m, o = get_state_dict(model, optimizer, options=FLAT)
    dcp.save({"model": m, "optimizer": o}, checkpoint_id=f"{folder}/torch")
    tp_ext.save_checkpoint(f"{folder}/ours", model, optimizer)


@pytest.mark.parametrize("layout", ["2", "fsdp"])
def test_names_and_shapes_are_those_of_save_checkpoint(tmp_path, layout):
    ranks.run(_names, size(layout), layout, str(tmp_path))
    theirs, ours = (
        dcp.FileSystemReader(tmp_path / one).read_metadata().state_dict_metadata for one in ("torch", "ours")
    )
    assert theirs.keys() == ours.keys()
    for name, entry in ours.items():
        assert getattr(entry, "size", None) == getattr(theirs[name], "size", None), name


FULL = StateDictOptions(full_state_dict=True)
ON_RANK_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def _full(world, layout):
    model, optimizer = make(layout, world, 1)
    train(model, optimizer)
    want = states(model, optimizer)
    for options in (FULL, ON_RANK_0, StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)):
        m, o = get_model_state_dict(model, options=options), get_optimizer_state_dict(model, optimizer, options=options)
        if options is ON_RANK_0 and dist.is_initialized() and dist.get_rank():
            assert m == o == {}
            continue
        if options.flatten_optimizer_state_dict:
            o = {"state": {name: {k: o[f"state.{name}.{k}"] for k in of_one} for name, of_one in want[1].items()}}
        assert same((m, o["state"]), want)
    full = get_state_dict(model, optimizer, options=FULL)
    frozen = StateDictOptions(full_state_dict=True, ignore_frozen_params=True)
    partly = {name: value for name, value in full[0].items() if name != "norm.weight"} | {"more": torch.ones(1)}
    loosely = StateDictOptions(full_state_dict=True, strict=False)
    assert set_model_state_dict(make(layout, world, 2)[0], partly, options=loosely) == (["norm.weight"], ["more"])
    next(model.parameters()).requires_grad_(False)
    assert get_model_state_dict(model, options=frozen).keys() == want[0].keys() - {"embedding.weight"}
    for options in (FULL, FROM_RANK_0):
        other, its = make(layout, world, 2)
        first = options is FULL or not dist.is_initialized() or dist.get_rank() == 0
        m, o = full if first else ({}, {})
        set_model_state_dict(other, m, options=options)
        set_optimizer_state_dict(other, its, o, options=options)
        assert same(states(other, its), want)
    return want


@pytest.mark.parametrize("layout", ["1", "2", "fsdp", "ddp"])
def test_full_states(layout):
    want = {name: value.shape for name, value in tp_ext.full_state_dict(Model(None)).items()}
    for full, _ in ranks.run(_full, size(layout), layout):
        assert {name: value.shape for name, value in full.items()} == want


def _offloaded(world, folder):
    """``cpu_offload`` alone copies tensors of a device; here through the function that does."""
    model, optimizer = make("2", world, 1)
    options = StateDictOptions(cpu_offload=True)
    state = get_model_state_dict(model, options=options)
    copied = dist._state_dict_utils._create_cpu_state_dict({"model": state})
    dist._state_dict_utils._copy_state_dict({"model": state}, copied)
    dcp.save(copied, checkpoint_id=folder)
    return states(model, optimizer)[0]


def _read(folder):
    model = Model(None)
    reader = {"model": model.state_dict()}
    dcp.load(reader, checkpoint_id=folder, no_dist=True)
    model.load_state_dict(reader["model"])
    return tp_ext.full_state_dict(model)


def test_copies_keep_their_places(tmp_path):
    want = ranks.run(_offloaded, 2, str(tmp_path / "a"))[0]
    got = _read(str(tmp_path / "a"))
    assert all(torch.equal(value, got[name]) for name, value in want.items())


def _normed(world, layout, folder, load):
    dp, tp, _ = LAYOUTS[layout]
    group = mesh(dp, tp)["tp"].get_group() if tp > 1 else None
    tp_ext.manual_seed(3 + load)
    layer = tp_ext.ColumnParallelLinear(6, 8, group=group)
    parametrizations.weight_norm(layer)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.arange(6.0)).square().sum().backward()
    optimizer.step()
    m, o = get_state_dict(layer, optimizer)
    (dcp.load if load else dcp.save)({"m": m, "o": o}, checkpoint_id=folder)
    if load:
        set_state_dict(layer, optimizer, model_state_dict=m, optim_state_dict=o)
    return tp_ext.full_state_dict(layer), tp_ext.full_optimizer_state_dict(layer, optimizer)["state"]


def test_a_parametrized_layer(tmp_path):
    want = ranks.run(_normed, 2, "2", str(tmp_path / "a"), False)[0]
    for got in ranks.run(_normed, 3, "3", str(tmp_path / "a"), True):
        assert same(got, want)


class Factored(torch.optim.SGD):
    """Has state of another shape than its parameter."""

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["row"] = torch.zeros(len(param))


def _without_a_layout(group):
    layer = tp_ext.ColumnParallelLinear(6, 8, bias=False, group=group)
    get_optimizer_state_dict(layer, tp_ext.optim.accept(Factored(layer.parameters(), lr=0.1)))


def test_state_without_a_layout_is_refused():
    match = r"optimizers: state 'row' of 'weight' must be a tensor of the shape of the parameter, \(4, 6\)"
    ranks.run_raises(_without_a_layout, 2, ValueError, match)


def _failures(call, *args, **options):
    with pytest.raises(dcp.api.CheckpointException) as caught:
        call(*args, **options)
    return {str(error) for error, _ in caught.value.failures.values()}


LIVE = {
    "parameters": lambda model: dict(model.named_parameters()),
    "keep_vars": lambda model: model.state_dict(keep_vars=True),
    "data": lambda model: {name: param.data for name, param in model.named_parameters()},
}


def _live(world, layout, folder):
    """Live parameters carry no place: neither saved nor loaded as if they were the whole tensors."""
    model, _ = make(layout, world, 1)
    return [
        _failures(call, {"m": of(model)}, checkpoint_id=folder) for of in LIVE.values() for call in (dcp.save, dcp.load)
    ]


@pytest.mark.parametrize("layout", ["2", "fsdp"])
def test_live_parameters_are_refused(tmp_path, layout):
    dcp.save({"number": 1}, checkpoint_id=tmp_path / "a", no_dist=True)
    for messages in ranks.run(_live, size(layout), layout, str(tmp_path / "a")):
        for texts, call in zip(messages, ("save", "load") * len(LIVE), strict=True):
            for text in texts:
                assert "'m.embedding.weight' is a parameter of a layer, of which this rank has a shard" in text
                assert f"dcp.{call} would take it" in text and f"tp_ext.{call}_checkpoint" in text


def _alone(world, folder):
    """Each rank saves by itself, and reads its own; what another has saved lacks elements."""
    model, _ = make("2", world, 1)
    want, rank = tp_ext.full_state_dict(model), dist.get_rank()
    dcp.save({"m": model.state_dict()}, checkpoint_id=f"{folder}/{rank}", no_dist=True)
    other, _ = make("2", world, 2)
    dcp.load({"m": other.state_dict()}, checkpoint_id=f"{folder}/{rank}", no_dist=True)
    got = tp_ext.full_state_dict(other)
    assert all(torch.equal(value, got[name]) for name, value in want.items())
    return [
        _failures(dcp.load, {"m": model.state_dict()}, checkpoint_id=f"{folder}/{1 - rank}", no_dist=True)
        for model in (other, Model(None))
    ]


def test_what_a_rank_has_saved_alone_is_not_the_model(tmp_path):
    for rank, (sharded, dense) in enumerate(ranks.run(_alone, 2, str(tmp_path))):
        other = (5 * 12, 8 * 12)[rank]  # rows of the table
        assert f"'m.embedding.weight' has {156 - other} elements here, of which the checkpoint has 0" in str(sharded)
        assert f"'m.embedding.weight' has 156 elements here, of which the checkpoint has {other}: all ranks" in str(
            dense
        )


def _files_of_safetensors(world, folder):
    """Fused weights have several chunks on a rank, for which torch's writer has one name."""
    model, _ = make("2", world, 1)
    writer = functools.partial(dcp.HuggingFaceStorageWriter, save_distributed=True, enable_consolidation=True)
    (text,) = _failures(dcp.save, model.state_dict(), storage_writer=writer(f"{folder}/a"))
    assert re.search(r"'(attention.qkv|mlp.up).\w+' has \d chunks on a rank, .*: take tp_ext.save_safetensors", text)
    dcp.save(model.embedding.state_dict(), storage_writer=writer(f"{folder}/b"))
    return tp_ext.full_state_dict(model.embedding)


@pytest.mark.skipif(not hasattr(dcp, "CheckpointableTensor"), reason="needs torch 2.15")
def test_torchs_files_of_safetensors(tmp_path):
    want = ranks.run(_files_of_safetensors, 2, str(tmp_path))[0]
    assert not list((tmp_path / "a").rglob("*.safetensors"))
    (file,) = (tmp_path / "b").glob("*.safetensors")
    assert torch.equal(load_file(file)["weight"], want["weight"])
