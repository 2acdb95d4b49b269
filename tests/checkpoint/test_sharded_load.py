"""A checkpoint that does not fit is an error on every rank, the same one, before anything is written."""

import math
import re

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.optim import SGD, AdamW

import tp_ext
from tests.helpers import ranks
from tests.helpers.models import model_and_optimizer, train
from tests.helpers.on_ranks import on_ranks
from tp_ext._object_collectives import call_on_all_ranks

pytestmark = [
    pytest.mark.core,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


def _saved(path, change):
    """What the unsharded model and its optimizer would save, changed."""
    model, optimizer = model_and_optimizer(None)
    train(model, optimizer, None, 1)
    state = tp_ext.sharded_state_dict(model, optimizer)
    state["model"] = {k: v + 1 for k, v in model.state_dict().items()}
    change(state)
    dcp.save(state, checkpoint_id=path, no_dist=True)


def _put(part, key, value):
    return lambda state: state[part].__setitem__(key, value)


def _remove(state):
    del state["model"]["mlp.up.weight"]
    for key in [key for key in state["optimizer"] if "column.bias" in key]:
        del state["optimizer"][key]
    state["model"]["mlp.sideways.weight"] = torch.ones(1)
    state["optimizer"]["state.mlp.sideways.weight.exp_avg"] = torch.ones(1)


WRONG = {
    "shape": (_put("model", "last.weight", torch.ones(9)), ValueError, r"'model.last.weight' has .*\(9,\).*\(8,\)"),
    "sharded": (
        _put("model", "mlp.up.weight", torch.ones(24, 8)),
        ValueError,
        r"'model.mlp.up.weight' has shape \(24, 8\) and must have \(22, 8\)",
    ),
    "vocabulary": (
        _put("model", "embedding.weight", torch.ones(14, 8)),
        ValueError,
        r"'model.embedding.weight' has shape \(14, 8\).* must have \(13, 8\), that of the unsharded module",
    ),
    "keys": (
        _remove,
        KeyError,
        r"missing keys \['model.mlp.up.weight', 'optimizer.param_groups.column.bias.lr'\], unexpected keys "
        r"\['model.mlp.sideways.weight', 'optimizer.state.mlp.sideways.weight.exp_avg'\]",
    ),
    "no optimizer": (lambda state: state.pop("optimizer"), KeyError, r"missing keys \['optimizer.param_groups"),
    "kind": (_put("model", "norm1.bias", 3), TypeError, "'model.norm1.bias' is no tensor and must be one"),
    "state": (
        _put("optimizer", "state.mlp.up.weight.exp_avg", torch.ones(3, 8)),
        ValueError,
        r"exp_avg' has shape \(3, 8\).*\(22, 8\)",
    ),
    "options": (
        _put("optimizer", "param_groups.mlp.up.weight.betas", (0.1, 0.2)),
        ValueError,
        r"its group 0 must have been saved with one betas: .* is \(0.9, 0.999\), .*up.weight.betas' is \(0.1, 0.2\)",
    ),
}


def _load(group, path, options):
    model, optimizer = model_and_optimizer(group, **options)
    before = [p.detach().clone() for p in model.parameters()]
    try:
        tp_ext.load_checkpoint(path, model, optimizer)
    finally:
        same = [torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
        assert all(same) and not optimizer.state, "something was loaded"


@pytest.mark.parametrize("what", WRONG)
def test_entries_that_do_not_fit_are_named_and_nothing_is_loaded(what, tmp_path):
    change, error, message = WRONG[what]
    _saved(tmp_path / "saved", change)
    for p, options in ((1, {}), (2, {"pad": 4}), (3, {})):
        ranks.run_raises(_load, p, error, message, tmp_path / "saved", options, in_turns=False)


def _embedding_and_head(group, tied):
    options = {"group": group, "dtype": torch.bfloat16}
    model = torch.nn.ModuleDict(
        {
            "embedding": tp_ext.VocabParallelEmbedding(7, 4, pad_to_multiple_of=4, **options),
            "norm": tp_ext.RMSNorm(4, **options),
            "head": tp_ext.VocabParallelLMHead(4, 7, pad_to_multiple_of=4, **options),
        }
    )
    if tied:
        model["head"].weight = model["embedding"].weight
    return model


def _save_two(rank, group, path, value, other):
    model = _embedding_and_head(group, False)
    tp_ext.load_full_state_dict(
        model,
        {
            "embedding.weight": torch.full((7, 4), value),
            "head.weight": torch.full((7, 4), other),
            "norm.weight": torch.full((4,), 5.0),
        },
    )
    tp_ext.save_checkpoint(path, model)


def _load_tied(rank, group, path, value, message):
    model = _embedding_and_head(group, True)
    before = [param.detach().clone() for param in model.parameters()]
    if message:
        with pytest.raises(ValueError, match=message):
            tp_ext.load_checkpoint(path, model)
        assert all(map(torch.equal, before, model.parameters()))
        return
    tp_ext.load_checkpoint(path, model)
    full = tp_ext.full_state_dict(model)
    want = torch.full((7, 4), value, dtype=torch.bfloat16)
    torch.testing.assert_close(
        [full["embedding.weight"], full["head.weight"]], [want, want], rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize(("value", "other"), [(1.0, 2.0), (1.0, 1.0), (math.nan, math.nan), (math.nan, 1.0)])
def test_tied_entries_must_be_equal(value, other, tmp_path):
    """As for load_full_state_dict and load_safetensors: one of two values would be lost."""
    tp_ext.debug.simulate(_save_two, 2, tmp_path / "saved", value, other)
    equal = value == other or other != other
    message = (
        "" if equal else "checkpoint: 'embedding.weight' and 'head.weight' are one tensor in the module and must be"
    )
    for p in (1, 2, 3):
        tp_ext.debug.simulate(_load_tied, p, tmp_path / "saved", value, message)


def _load_some(group, path):
    model, _ = model_and_optimizer(group)
    tp_ext.load_checkpoint(path, model)
    return tp_ext.full_state_dict(model)


@pytest.mark.smoke
def test_the_unsharded_model_saves_by_torch_alone(tmp_path):
    """Its optimizer is not loaded; entries that others saved next to the model are ignored."""
    _saved(tmp_path / "saved", lambda state: state.update(epoch=3))
    model, optimizer = model_and_optimizer(None)
    train(model, optimizer, None, 1)
    for state in ranks.run(_load_some, 2, tmp_path / "saved"):
        for name, value in model.state_dict().items():
            assert torch.equal(state[name], value + 1), name


class _Failing(tp_ext.CheckpointReader):
    def read_data(self, plan, planner):
        raise OSError("the disk is gone")


def _one_fails(group, path, failing, where):
    model, _ = model_and_optimizer(group)
    reader = _Failing(path) if where == "data" and group.rank() == failing else tp_ext.CheckpointReader(path)
    if where == "metadata" and group.rank() == failing:
        reader = tp_ext.CheckpointReader(path / "nowhere")
    tp_ext.load_sharded_state_dict(model, storage_reader=reader)


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("where", ["metadata", "data"])
def test_a_read_error_of_one_rank_is_raised_on_all(where, failing, tmp_path):
    _saved(tmp_path / "saved", lambda state: None)
    error, message = (OSError, "disk is gone") if where == "data" else (FileNotFoundError, "nowhere")
    ranks.run_raises(_one_fails, 2, error, message, tmp_path / "saved", failing, where, in_turns=False)


def _group_of_two(group, path):
    """Options of a group that was cut otherwise: those of its first parameter, if they are the same for all."""
    model = tp_ext.ColumnParallelLinear(3, 4, group=group)
    optimizer = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias], "lr": 0.25}], lr=0.5)
    if path:
        tp_ext.save_checkpoint(path, model, optimizer)
    return model, optimizer


@on_ranks(2)
def test_options_go_by_the_names_of_parameters(group, tmp_path):
    path = tmp_path / "saved"
    _group_of_two(group, path)
    model, _ = _group_of_two(group, None)
    optimizer = torch.optim.SGD([{"params": [model.bias]}, {"params": [model.weight]}], lr=9.0)
    tp_ext.load_checkpoint(path, model, optimizer)
    assert [g["lr"] for g in optimizer.param_groups] == [0.25, 0.5]


@pytest.mark.parametrize(
    ("made", "into", "message"),
    [
        ((SGD, {"momentum": 0.9}), (AdamW, {}), r"AdamW must be .*it has no \['amsgrad', 'betas', 'eps'\]; it has \["),
        ((AdamW, {}), (SGD, {}), r"SGD must be of the class of the one that was saved.*it has \['amsgrad', 'betas'"),
        ((AdamW, {}), (torch.optim.Adamax, {}), r"Adamax must be .*others: it has \['amsgrad'\]; see .*weight"),
    ],
    ids=["sgd", "adamw", "adamax"],
)
def test_the_state_of_another_optimizer_is_refused(made, into, message, tmp_path):
    """Their options differ; only whether and how fast a step is computed may."""
    model = nn.Linear(2, 3)
    (kind, options), (other, own) = made, into
    optimizer = kind(model.parameters(), lr=0.1, **options)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    tp_ext.save_checkpoint(tmp_path / "saved", model, optimizer)
    full = tp_ext.full_optimizer_state_dict(model, optimizer)
    same = kind(model.parameters(), lr=0.3, foreach=True, **options)
    same.param_groups[0]["initial_lr"] = 0.5
    tp_ext.load_checkpoint(tmp_path / "saved", model, same)
    tp_ext.load_full_optimizer_state_dict(model, same, full)
    new = other(model.parameters(), lr=0.3, **own)
    with pytest.raises(ValueError, match=message):
        tp_ext.load_checkpoint(tmp_path / "saved", model, new)
    with pytest.raises(ValueError, match=message.partition("; see")[0]):
        tp_ext.load_full_optimizer_state_dict(model, new, full)
    assert not new.state and new.param_groups[0]["lr"] == 0.3


def test_other_modules_are_named(tmp_path):
    _saved(tmp_path / "saved", lambda state: None)
    with pytest.raises(KeyError, match=re.escape("missing keys ['model.bias', 'model.weight'], unexpected")):
        tp_ext.load_checkpoint(tmp_path / "saved", nn.Linear(2, 2))
    with pytest.raises(FileNotFoundError, match=r"path: .*nowhere' must be a checkpoint, a directory with .metadata"):
        tp_ext.load_checkpoint(tmp_path / "nowhere", nn.Linear(2, 2))


@on_ranks(3)
def test_of_the_errors_of_several_ranks_all_raise_the_first(group):
    def fail():
        raise ValueError(f"of rank {group.rank()}")

    with pytest.raises(ValueError, match="of rank 0"):
        call_on_all_ranks(group, fail)
