"""The census of a model is what its parts say, through wrappers; ``group=``, which it needs not, is deprecated."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint import FileSystemReader
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize

import tp_ext
from tests.helpers import ranks
from tp_ext.debug import simulate
from tp_ext.model.census import census
from tp_ext.model.fqn import resolve_fqn


def _model(group):
    model = nn.ModuleDict({"embedding": nn.Embedding(6, 4)})
    model["up"] = tp_ext.ColumnParallelLinear(4, 6, group=group)
    model["block"] = tp_ext.ParallelMLP(4, 8, group=group)
    model["head"] = nn.Linear(4, 6, bias=False)
    model["head"].weight = model["embedding"].weight
    return model


class _Twice(nn.Module):
    def forward(self, x):
        return 2 * x


def _of_wrapped(rank, group):
    plain = _model(group)
    want = census(plain)
    wrapped = copy.deepcopy(plain)
    wrapped["block"] = checkpoint_wrapper(checkpoint_wrapper(torch.compile(wrapped["block"])))
    got = census(wrapped)
    for key, entry in got.parameters.items():
        assert got.resolve(key.replace("_checkpoint_wrapped_module.", "")).owner is entry.owner, key
    assert got.state().keys() == want.state().keys() == plain.state_dict().keys()
    assert got.state()["head.weight"].value is got.parameters["embedding.weight"].value
    return [
        [(entry.name, entry.local, entry.layout, type(entry.owner)) for entry in each.parameters.values()]
        for each in (want, got)
    ]


def test_names_owners_and_layouts_are_those_without_wrappers():
    for want, got in simulate(_of_wrapped, 2):
        assert got == want
        assert {name: len(layout) for name, _, layout, _ in want} == {
            **dict.fromkeys(["embedding.weight", "block.down.bias"], 0),
            **dict.fromkeys(["up.weight", "up.bias", "block.up.weight", "block.up.bias", "block.down.weight"], 1),
        }


def _of_parts(rank, mesh):
    layer = tp_ext.ParallelMoE(4, 6, 4, 2, group=mesh["tp"], expert_group=mesh["ep"])
    model = nn.Sequential(_model(mesh["tp"]), layer)
    parametrize.register_parametrization(model[0]["up"], "weight", _Twice())
    tp_ext.declare_tied(model[0], {"block.down.bias": "other.bias"})
    got = census(model)
    places = got.resolve("0.up.parametrizations.weight.original"), resolve_fqn(model, "1.experts.up_weight")
    return (
        {path: module is got.model.get_submodule(path) for path, module in got.experts.items()},
        [*got.routing_layers],
        got.copies == {id(model[0]["block"].down.bias): "other.bias"},
        [entry.copy_of for name, entry in got.parameters.items() if name.endswith("down.bias")],
        [len(entry.layout) for entry in places],
        sorted(axis.size for axis in got.groups.axes),
        got.sharded_over.keys() == {tuple(map(int, mesh[name].mesh)) for name in ("ep", "tp")},
        len(got.tensors),
    )


def test_experts_copies_parametrizations_and_groups():
    for parts in simulate(_of_parts, {"ep": 2, "tp": 2}):
        tensors = len(list(census(nn.Sequential(_model(None), tp_ext.ParallelMoE(4, 6, 4, 2, group=None))).tensors))
        assert parts == ({"1.experts": True}, ["1"], True, ["other.bias"], [1, 2], [2, 2], True, tensors)


def _under_ddp(group):
    got = census(DistributedDataParallel(nn.Linear(2, 2)))
    return [*got.wrappers], [entry.name for entry in got.parameters.values()], [*got.parameters]


def test_ddp():
    assert ranks.run(_under_ddp, 2)[0] == ([""], ["weight", "bias"], ["module.weight", "module.bias"])


def _calls(folder, model, optimizer):
    """Functions of a model, each with the arguments that it needs."""
    loaded = tp_ext.full_state_dict(model), tp_ext.full_optimizer_state_dict(model, optimizer)
    path, file = f"{folder}/checkpoint", f"{folder}/model.safetensors"
    reader = FileSystemReader(path)
    return {
        "layouts": lambda **o: dict(tp_ext.layouts(model, **o)),
        "grad_norm": lambda **o: tp_ext.grad_norm(model, **o),
        "clip_grad_norm_": lambda **o: tp_ext.clip_grad_norm_(model, 1e9, **o),
        "bare": lambda **o: tp_ext.grad_norm(model.parameters(), **o),
        "full_state_dict": lambda **o: tp_ext.full_state_dict(model, **o),
        "load_full_state_dict": lambda **o: tp_ext.load_full_state_dict(model, loaded[0], **o),
        "full_optimizer_state_dict": lambda **o: tp_ext.full_optimizer_state_dict(model, optimizer, **o),
        "load_full_optimizer": lambda **o: tp_ext.load_full_optimizer_state_dict(model, optimizer, loaded[1], **o),
        "sharded_state_dict": lambda **o: len(tp_ext.sharded_state_dict(model, optimizer, **o)["optimizer"]),
        "save_checkpoint": lambda **o: tp_ext.save_checkpoint(path, model, optimizer, **o),
        "load_checkpoint": lambda **o: tp_ext.load_checkpoint(path, model, optimizer, **o),
        "load_sharded_state_dict": lambda **o: tp_ext.load_sharded_state_dict(model, storage_reader=reader, **o),
        "save_safetensors": lambda **o: tp_ext.save_safetensors(file, model, **o),
        "load_safetensors": lambda **o: tp_ext.load_safetensors(file, model, **o),
        "Muon": lambda **o: len(tp_ext.optim.Muon([model[0].weight], model=model, **o).param_groups),
        "Muon of bare ones": lambda **o: len(tp_ext.optim.Muon([model[0].weight], **o).param_groups),
    }


def _warned(group, folder):
    model = nn.Sequential(tp_ext.ColumnParallelLinear(4, 6, group=group), tp_ext.RMSNorm(6, group=group))
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.5)
    optimizer.step()
    messages = {}
    for name, call in _calls(folder, model, optimizer).items():
        results = []
        for options in ({}, {"group": group}):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                results.append(call(**options))
            deprecations = [warning for warning in caught if issubclass(warning.category, DeprecationWarning)]
            texts = [str(warning.message)[:32] for warning in deprecations if warning.filename == __file__]
            messages[name, len(options)] = texts
        assert str(results[1]) == str(results[0]), name
    return messages


def test_group_is_deprecated_where_it_is_not_needed(tmp_path):
    for of_rank in ranks.run(_warned, 2, str(tmp_path)):
        for (name, given), messages in of_rank.items():
            assert messages == ["group: deprecated and not needed"] * given, name


class _Alone(nn.Module):
    """Declares shardings, and no group."""

    def __init__(self, group):
        super().__init__()
        cut = tp_ext.Sharding(0, [4])
        self.weight = nn.Parameter(cut.shard(torch.arange(4.0), group.rank(), group.size()))
        self.tp_shardings = {"weight": cut}


def _needed(rank, group):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        full = tp_ext.full_state_dict(_Alone(group), group=group)["weight"]
        both = nn.Sequential(_Alone(group), tp_ext.ColumnParallelLinear(2, 2, group=group))
        same = tp_ext.full_state_dict(both)["0.weight"]
    return full.tolist(), same.tolist(), [str(one.message)[:24] for one in caught]


def test_a_group_that_is_needed_gives_tp_shardings_theirs():
    for full, same, messages in simulate(_needed, 2):
        assert full == same == [0, 1, 2, 3]
        assert messages == ["tp_shardings: deprecated"] * 2


def test_the_view_of_shardings_is_deprecated():
    layer = tp_ext.RMSNorm(4, group=None)
    with pytest.warns(DeprecationWarning, match="tp_shardings: deprecated, take tp_layouts"):
        assert layer.tp_shardings["weight"] is None
