"""A group that was forgotten is said; functions of a model take the group from its layers. A group created again under
its name: with the same ranks everything goes on, with others every operator that was built on the old one raises,
before anything is communicated.
"""

import functools
import inspect
import os
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

import tp_ext
from tests.helpers import ranks
from tests.helpers.region_maps import simple_cases
from tp_ext import debug
from tp_ext.group import ForgottenGroupWarning

pytestmark = pytest.mark.core

MAKE = {
    "column": lambda **o: tp_ext.ColumnParallelLinear(4, 6, **o),
    "row": lambda **o: tp_ext.RowParallelLinear(4, 6, **o),
    "from_linear": lambda **o: tp_ext.RowParallelLinear.from_linear(nn.Linear(4, 6), **o),
    "mlp": lambda **o: tp_ext.ParallelMLP(4, 6, **o),
    "attention": lambda **o: tp_ext.ParallelAttention(4, 2, **o),
    "norm": lambda **o: tp_ext.RMSNorm(4, **o),
    "layer norm": lambda **o: tp_ext.LayerNorm(4, **o),
    "dropout": lambda **o: tp_ext.Dropout(0.5, **o),
    "dropout of a slice": lambda **o: tp_ext.dropout(torch.ones(4), dim=0, **o),
    "embedding": lambda **o: tp_ext.VocabParallelEmbedding(4, 6, **o),
    "head": lambda **o: tp_ext.VocabParallelLMHead(4, 6, **o),
    "loss": lambda **o: tp_ext.VocabParallelCrossEntropy(**o),
}


def _said(make):
    """The warnings of a call, and the file that each names."""
    tp_ext.group._Warned.yet = False
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        make()
    return [(type(w.message).__name__, str(w.message), os.path.basename(w.filename)) for w in seen]


def _forgotten(group):
    found = {name: _said(make) for name, make in MAKE.items()}
    assert all(_said(lambda make=make: make(group=None)) == [] for make in MAKE.values()), "None was written out"
    assert all(_said(lambda make=make: make(group=group)) == [] for make in MAKE.values())
    assert _said(lambda: tp_ext.dropout(torch.ones(4))) == [], "replicated: no group is needed"
    twice = _said(lambda: [MAKE["mlp"](), MAKE["norm"]()])
    return found, twice


def test_a_forgotten_group_is_said_once_and_one_written_out_is_not():
    for found, twice in ranks.run(_forgotten, 2):
        for name, said in found.items():
            (kind, text, file) = said[0]
            assert len(said) == 1 and kind == "ForgottenGroupWarning" and file == "test_group.py", (name, said)
            assert "group was not given in a job of 2 ranks" in text and "group=None" in text
        assert found["mlp"][0][1].startswith("ParallelMLP: ")
        assert twice == found["mlp"]
    (found, twice), *_ = ranks.run(_forgotten, 1)
    assert not any(found.values()) and not twice


def _launched(size, initialise):
    """A process of a launcher, which has not called init_process_group: dist.group.WORLD is None."""
    os.environ["WORLD_SIZE"] = size
    assert dist.group.WORLD is None
    return _said(lambda: tp_ext.RMSNorm(4, group=dist.group.WORLD)), _said(lambda: tp_ext.RMSNorm(4))


def test_init_process_group_was_forgotten():
    written, left_out = ranks.run_fresh(_launched, "4", False)
    assert len(written) == 1 and "init_process_group first" in written[0][1] and "WORLD_SIZE = 4" in written[0][1]
    assert len(left_out) == 1 and "group was not given in a job of 4 ranks" in left_out[0][1]
    for size in ("1", "", "many"):
        assert ranks.run_fresh(_launched, size, False) == ([], [])


def test_the_default_reads_as_none():
    assert issubclass(ForgottenGroupWarning, UserWarning)
    for name in ("ColumnParallelLinear", "LayerNorm", "clip_grad_norm_", "full_state_dict", "save_checkpoint"):
        assert str(inspect.signature(getattr(tp_ext, name)).parameters["group"]).endswith("= None")


# The group of a model


def _model(group):
    torch.manual_seed(0)
    return nn.Sequential(tp_ext.RMSNorm(4, group=group), tp_ext.ParallelMLP(4, 7, group=group), nn.Linear(4, 4))


def _sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _train(model, optimizer):
    model(torch.ones(3, 4)).square().sum().backward()
    norm = tp_ext.clip_grad_norm_(model, 0.5), tp_ext.grad_norm(model)
    optimizer.step()
    return norm


def _without_group(group, path):
    model = _model(group)
    optimizer = _sgd(model)
    norms = _train(model, optimizer)
    debug.check(model)
    full, states = tp_ext.full_state_dict(model), tp_ext.full_optimizer_state_dict(model, optimizer)
    tp_ext.save_checkpoint(path / "checkpoint", model, optimizer)
    tp_ext.save_safetensors(path / "tensors", model)
    for how in ("full", "safetensors", "checkpoint"):
        other = _model(group)
        others = _sgd(other)
        with torch.no_grad():
            for param in other.parameters():
                param.zero_()
        if how == "full":
            tp_ext.load_full_state_dict(other, full)
            tp_ext.load_full_optimizer_state_dict(other, others, states)
        elif how == "safetensors":
            tp_ext.load_safetensors(path / "tensors", other)
        else:
            tp_ext.load_checkpoint(path / "checkpoint", other, others)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True)), how
    return norms, full, states["state"], dict.fromkeys(tp_ext.sharded_state_dict(model)["model"], ())


def test_functions_of_a_model_take_its_group(tmp_path):
    """At p = 3 they give what they give at p = 1, where there is none."""
    want = ranks.run(_without_group, 1, tmp_path / "1")[0]
    for got in ranks.run(_without_group, 3, tmp_path / "3"):
        torch.testing.assert_close(got, want)


def _call(group, what, given):
    model = _model(None if what == "made without" else group)
    wrong = {"whole": group, "none": None, "other": _alone(group)}
    options = {} if given == "left out" else {"group": wrong[given]}
    if what == "list":
        for param in model.parameters():
            param.__dict__.pop("tp_layout", None)
        tp_ext.clip_grad_norm_(model.parameters(), 1.0, **options)
    if what == "overlap":
        model = nn.Sequential(
            # On meta: ranks draw the weights of a layer together, here in orders that wait for each other
            *(tp_ext.ColumnParallelLinear(4, 4, group=one, device="meta") for one in _overlapping(group))
        )
    for call in (tp_ext.grad_norm, tp_ext.full_state_dict, tp_ext.sharded_state_dict):
        call(model, **options)


def _alone(group):
    return _subgroups(group, 1)


@functools.cache
def _overlapping(group):
    """Two groups of this rank that share it and another one."""
    groups = [dist.new_group(members) for members in ([0, 1, 2], [0, 1, 3], [0, 2, 3], [1, 2, 3])]
    return groups[:2] if group.rank() < 2 else groups[2:]


_made = {}


def _subgroups(group, size):
    if size not in _made:
        groups = [dist.new_group(list(range(at, at + size))) for at in range(0, group.size(), size)]
        _made[size] = groups[group.rank() // size]
    return _made[size]


@pytest.mark.parametrize(
    ("what", "given", "match"),
    [
        ("model", "none", r"group: None must be that of the model's layers, the group of ranks \[0, 1, 2, 3\]"),
        ("model", "other", r"group: the group of ranks \[\d\] must be .*, the group of ranks \[0, 1, 2, 3\]"),
        ("made without", "whole", r"group: the group of ranks \[0, 1, 2, 3\] must be .*, which were made without one"),
        (
            "overlap",
            "left out",
            r"group: the model's groups of ranks \[\d, \d, \d\] and \[\d, \d, \d\] share several ranks",
        ),
        ("list", "left out", r"group: must be given with parameters that carry .*\(\d, 4\) is a shard of 7"),
    ],
)
def test_a_group_that_contradicts_or_cannot_be_known(what, given, match):
    ranks.run_raises(_call, 4, ValueError, match, what, given, in_turns=False)


def _unsharded(group):
    return (
        debug.findings(_model(None)),
        debug.findings(nn.Linear(2, 2)),
        debug.findings(_model(None), group=group),
        debug.findings(_model(group)),
    )


def test_check_says_that_no_layer_is_sharded():
    for plain, torchs, given, sharded in ranks.run(_unsharded, 2):
        assert len(plain) == 1 and "no layer is sharded, in a job of 2 ranks" in plain[0] and plain == torchs
        assert given == [] and sharded == []
    assert ranks.run(_unsharded, 1) == [([],) * 4]


# A group created again, in the same processes


def _start(folder, name, rank, p):
    store = dist.FileStore(f"{folder}/{name}", p)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=p)


class _Built:
    """Layers, a loss and regions, all of which hold a group's key."""

    def __init__(self, p):
        torch.manual_seed(0)
        group = dist.group.WORLD
        self.column = tp_ext.ColumnParallelLinear(4, 6, gather_output=True, group=group)
        self.row = tp_ext.RowParallelLinear(6, 4, input_is_parallel=False, group=group)
        self.sp = tp_ext.RowParallelLinear(6, 4, group=group, sequence_parallel=True)
        self.embedding = tp_ext.VocabParallelEmbedding(7, 4, group=group)
        self.loss = tp_ext.VocabParallelCrossEntropy(vocab_size=7, group=group)
        self.p, self.key = p, self.column.tp_group.name

    def calls(self):
        ids, p = torch.tensor([1, 6, 3]), self.p
        logits = torch.ones(3, tp_ext.Sharding(0, (7,)).local_sizes(p)[self.column.tp_group.rank])
        yield "column", lambda: self.column(torch.ones(3, 4))
        yield "row", lambda: self.row(torch.ones(3, 6))
        yield "sequence parallel", lambda: self.sp(torch.ones(3, 6 // p))
        yield "embedding", lambda: self.embedding(ids)
        yield "loss", lambda: self.loss(logits, ids)
        yield "full_state_dict", lambda: tp_ext.full_state_dict(self.column, group=self.key)["weight"]
        for case in simple_cases(p):

            def call(case=case):
                x = torch.ones(case.local_shape(0, p), requires_grad=True)
                y = case(x, self.key)
                y.sum().backward()
                return torch.cat([y.detach().flatten(), x.grad.flatten()])

            yield str(case), call

    def values(self):
        return {name: call() for name, call in self.calls()}

    def check_refused(self, rank, p, before):
        words = (
            rf"^group: '0' was rank {before} of {self.p} when the module was built, and is rank {rank} of {p} now: "
            r"the process group was created again; build the modules anew"
        )
        for name, call in self.calls():
            with pytest.raises(ValueError, match=words):
                print(name, call())
            if name != "full_state_dict":
                with CommDebugMode() as counts, pytest.raises(ValueError, match=words):  # as a trace sees it
                    call()
                assert counts.get_total_counts() == 0, name


def _restart(folder, p, order):
    rank = dist.FileStore(f"{folder}/numbers", -1).add("processes", 1) - 1
    _start(folder, "first", rank, p)
    built = _Built(p)
    before = built.values()
    dist.destroy_process_group()
    if rank not in order:
        return
    again = order.index(rank)
    _start(folder, "second", again, len(order))
    if order == list(range(p)):
        for name, value in built.values().items():
            assert torch.equal(value, before[name]), name
    else:
        built.check_refused(again, len(order), rank)
    for name, value in _Built(len(order)).values().items():  # built anew: right, and nothing was left in the group
        if name in ("column", "row", "embedding", "full_state_dict"):
            torch.testing.assert_close(value, before[name], msg=lambda text, name=name: f"{name}: {text}")
    dist.destroy_process_group()


@pytest.mark.parametrize("order", [[0, 1], [1, 0]], ids=["same", "swapped"])
def test_two_ranks_again(order, tmp_path):
    ranks.run_apart(_restart, 2, str(tmp_path), 2, order)


def test_three_ranks_become_two(tmp_path):
    ranks.run_apart(_restart, 3, str(tmp_path), 3, [0, 1])
