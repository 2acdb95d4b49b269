"""What full state dicts hold and refuse: ties, buffers, extra state, the meta device; errors are the same on all ranks,
also where one alone has the state; memory and bytes.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tp_ext
from tests.helpers import ranks
from tests.helpers.models import model_and_optimizer
from tests.helpers.peak_memory import Peak

pytestmark = pytest.mark.core


class Odd(nn.Module):
    """Every kind of entry, and a layer used twice."""

    def __init__(self, group=None):
        super().__init__()
        self.one = tp_ext.ColumnParallelLinear(3, 5, group=group)
        self.again = self.one
        self.register_buffer("kept", torch.arange(4))
        self.register_buffer("lost", torch.arange(4), persistent=False)
        self.register_buffer("nothing", None)
        self.flags = nn.Parameter(torch.tensor([True, False]), requires_grad=False)
        self.empty = nn.Parameter(torch.ones(0, 3))
        self.note = {"text": "here"}

    def get_extra_state(self):
        return self.note

    def set_extra_state(self, state):
        self.note = state


def _odd(group, from_first, load):
    torch.manual_seed(5)
    model = Odd(group)
    state = tp_ext.full_state_dict(model)
    assert state["one.weight"] is state["again.weight"]
    if not load:
        return state
    other = Odd(group)
    other.kept.zero_()
    other.lost.zero_()
    other.note = None
    other.flags.zero_()
    given = state if not from_first or group.rank() == 0 else {}
    tp_ext.load_full_state_dict(other, given, broadcast_from_rank0=from_first)
    assert not other.lost.any()
    return tp_ext.full_state_dict(other)


@pytest.mark.parametrize("from_first", [False, True])
@pytest.mark.parametrize("p", [1, 3])
def test_kinds_of_entries(p, from_first):
    want = _odd(None, False, False)
    assert list(want) == [
        *("flags", "empty", "kept", "_extra_state"),
        *(f"{layer}.{name}" for layer in ("one", "again") for name in ("weight", "bias")),
    ]
    for state in ranks.run(_odd, p, from_first, True):
        assert state.pop("_extra_state") == {"text": "here"} and state.keys() == want.keys() - {"_extra_state"}
        for name, value in state.items():
            assert torch.equal(value, want[name]) and value.dtype == want[name].dtype


def _meta(group, function):
    with torch.device("meta"):
        model = nn.Sequential(tp_ext.ColumnParallelLinear(3, 5, group=group))
    if function == "save":
        tp_ext.full_state_dict(model)
    tp_ext.load_full_state_dict(model, {}, strict=False)


@pytest.mark.parametrize("function", ["save", "load"])
def test_the_meta_device_is_refused_by_name(function):
    ranks.run_raises(
        _meta, 2, ValueError, "module: '0.weight' is on the meta device", function, in_turns=function == "load"
    )


def _wrong(group, what, from_first):
    model, _ = model_and_optimizer(group)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = {name: value + 1 for name, value in tp_ext.full_state_dict(model_and_optimizer(None)[0]).items()}
    if what == "vocabulary":
        state["embedding.weight"] = state["head.weight"] = torch.ones(17, 8)
    elif what == "tie":
        state["head.weight"] = state["head.weight"] + 1
    elif what == "type":
        state["last.weight"] = [1.0] * 8
    elif what == "keys":
        state["more"] = state.pop("calls")
    if from_first and group.rank():
        state = {}
    try:
        tp_ext.load_full_state_dict(model, state, broadcast_from_rank0=from_first)
    finally:
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


WRONG = {
    "vocabulary": (ValueError, r"'embedding.weight' has shape \(17, 8\) and must have \(13, 8\)"),
    "tie": (ValueError, "'embedding.weight' and 'head.weight' are one tensor in the module and must be equal"),
    "type": (TypeError, "'last.weight' is list"),
    "keys": (KeyError, r"missing keys \['calls'\], unexpected keys \['more'\]"),
}


@pytest.mark.parametrize("from_first", [False, True], ids=["on all ranks", "on rank 0"])
@pytest.mark.parametrize("what", WRONG)
def test_entries_that_do_not_fit_are_named_on_all_ranks_and_nothing_is_loaded(what, from_first):
    ranks.run_raises(_wrong, 3, *WRONG[what], what, from_first, in_turns=not from_first)


def _peak(group, dim, rank0_only, from_first):
    """Peak of gathering, bytes sent, peak of loading, bytes scattered; for a model of 8 equal matrices of 8 KiB."""
    kind = (tp_ext.RowParallelLinear, tp_ext.ColumnParallelLinear)[dim == 0]
    model = nn.Sequential(*(kind(32, 32, False, group=group, dtype=torch.float64) for _ in range(8)))
    sent, gather, scatter = [], dist.gather, dist.scatter

    def count_collectives_of(original):
        def call(*args, **where):
            sent.append(args[0].nbytes if group.rank() else 0)
            assert args[1:] in ((), (None,)) or group.rank() == 0
            return original(*args, **where)

        return call

    dist.gather, dist.scatter = count_collectives_of(gather), count_collectives_of(scatter)
    try:
        with Peak() as gathering:
            state = tp_ext.full_state_dict(model, rank0_only=rank0_only)
        gathered, sent[:] = sum(sent), []
        with Peak() as loading:
            tp_ext.load_full_state_dict(model, state, broadcast_from_rank0=from_first)
        return gathering.most, gathered, loading.most, sum(sent)
    finally:
        dist.gather, dist.scatter = gather, scatter


MATRIX = 32 * 32 * 8


@pytest.mark.parametrize("dim", [0, 1])
def test_one_full_tensor_at_a_time_and_on_rank_0_alone(dim):
    """Rank 0 holds the eight tensors that it returns and, while it gathers one, its own shard and, unless the shards
    are blocks of rows, those of the others. No other rank holds or sends more than its shard. The bounds are twice
    that, since gloo's thread may not have released the previous tensor.
    """
    p = 4
    (peak, _, loading, _), *others = ranks.run(_peak, p, dim, True, True)
    assert 8 * MATRIX <= peak <= (8 + 2 * (0.25 if dim == 0 else 1.25)) * MATRIX
    assert loading <= 2 * 1.5 * MATRIX
    for peak, sent, loading, scattered in others:
        assert peak <= 2 * MATRIX // p and sent == 8 * MATRIX // p
        assert loading <= 2 * MATRIX // p and scattered == 8 * MATRIX // p
    for peak, sent, loading, scattered in ranks.run(_peak, p, dim, False, False):
        assert 8 * MATRIX <= peak <= 11 * MATRIX
        assert sent == loading == scattered == 0  # views of what is given


def _unlike(group, how, function):
    layers = {name: tp_ext.ColumnParallelLinear(4, 4, group=group) for name in ("a", "b")}
    wider = tp_ext.ColumnParallelLinear(4, 6, group=group)  # on all ranks, which draw together
    other = group.rank() == 1
    if how == "missing" and other:
        del layers["b"]
    elif how == "shape" and other:
        layers["b"] = wider
    elif how == "dense" and other:
        layers["b"] = nn.Linear(4, 4)
    elif how == "order" and other:
        layers = dict(reversed(layers.items()))
    elif how == "tied" and other:
        layers["b"].weight = layers["a"].weight
    model = nn.ModuleDict(layers)
    optimizer = torch.optim.Adam(model.parameters())
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    if how == "no step" and other:
        model["b"].bias.grad = None
    optimizer.step()
    FUNCTIONS[function](model, optimizer)


FUNCTIONS = {
    "full_state_dict": lambda model, _: tp_ext.full_state_dict(model),
    "on rank 0": lambda model, _: tp_ext.full_state_dict(model, rank0_only=True),
    "load": lambda model, _: tp_ext.load_full_state_dict(model, {}, strict=False, broadcast_from_rank0=True),
    "optimizer": tp_ext.full_optimizer_state_dict,
    "load optimizer": lambda *of: tp_ext.load_full_optimizer_state_dict(*of, {}, broadcast_from_rank0=True),
    "safetensors": lambda model, _: tp_ext.save_safetensors("x.safetensors", model),
}
UNLIKE = {
    "missing": r"'b.\w+' must be the same on all ranks that hold the model, and .* on rank 0, is missing on rank 1",
    "shape": r"'b.weight' must be the same .* is of shape \(4, 4\).* on rank 0, is of shape \(6, 4\)",
    "dense": r"'b.weight' must be the same .* torch.float32, sharded in dim 0 over 3 ranks on rank 0, is of shape .*",
    "order": "ranks 0 and 1 must have the entries in the same order, and differ from 'a.(weight|bias)' on",
    "tied": "'b.weight' must be the same .* tied to 'a.weight' on rank 1",
    "no step": "optimizer: 'b.bias.(step|exp_avg)' must be the same .* is of shape .* on rank 0, is missing on rank 1",
}

PAIRS = [
    *((how, function) for how in ("missing", "shape", "order") for function in FUNCTIONS),
    *((how, function) for how in ("dense", "tied") for function in FUNCTIONS if "optimizer" not in function),
    ("no step", "optimizer"),
]


@pytest.mark.parametrize(("how", "function"), PAIRS)
def test_models_that_differ_between_ranks_are_refused_on_all(how, function):
    ranks.run_raises(_unlike, 3, ValueError, UNLIKE[how], how, function, in_turns=False)
