"""How modules come to be and are copied: meta device, deepcopy, pickle, averaged copies, moves between dtypes, ties."""

import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import tp_ext
from tests.helpers import ranks
from tests.helpers.makers import CASES, FFN, HIDDEN, build, outcome, same
from tests.helpers.on_ranks import on_ranks
from tests.helpers.oracle import full_gradients, gradients

pytestmark = pytest.mark.core

BOTH = pytest.mark.parametrize("sp", [False, True], ids=["", "sp"])


def _reset(model):
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


@pytest.mark.thinned(1)
@BOTH
@pytest.mark.parametrize("p", [1, 2, 4])
@on_ranks()
def test_from_meta_as_constructed_directly(group, sp):
    for name in CASES:
        direct = build(name, group, sp, torch.float32)
        before = torch.random.get_rng_state()
        with torch.device("meta"):
            module = CASES[name].make(group=group, sequence_parallel=sp)
        assert torch.equal(torch.random.get_rng_state(), before), f"{name}: drew random numbers on meta"
        assert all(q.is_meta for q in module.parameters())
        module.to_empty(device="cpu")
        torch.manual_seed(11)  # as build() does
        _reset(module)
        if name == "gpt":  # torch's to_empty unties what comes from meta; tied again when all has been drawn
            module.head.weight = module.embedding.weight
        assert module.state_dict().keys() == direct.state_dict().keys()
        for key, value in module.state_dict().items():
            assert torch.equal(value, direct.state_dict()[key]), f"{name}: {key}"
        assert dict(tp_ext.shardings(module)) == dict(tp_ext.shardings(direct))
        for (key, param), (_, sharding) in zip(module.named_parameters(), tp_ext.shardings(module), strict=True):
            assert param.tp_sharding == sharding, f"{name}: {key}"


@on_ranks(2, backend="gloo")
def test_own_initialisers_wait_for_memory(group):
    """A meta module makes no full tensor, and draws nothing."""
    made = []

    def init(full):
        made.append(full.device.type)
        nn.init.orthogonal_(full)

    layer = tp_ext.ColumnParallelLinear(HIDDEN, FFN, group=group, init=init, device="meta")
    assert made == []
    torch.manual_seed(1)
    layer.to_empty(device="cpu").reset_parameters()
    torch.manual_seed(1)
    direct = tp_ext.ColumnParallelLinear(HIDDEN, FFN, group=group, init=init)
    assert made == ["cpu", "cpu"] and torch.equal(layer.weight, direct.weight) and torch.equal(layer.bias, direct.bias)


# Copies


def _train(module, name, group, sp):
    outcome(name, module, group, sp)
    _descend(module)


def _descend(module):
    with torch.no_grad():
        for param in module.parameters():
            param -= 0.1 * param.grad


def _through_file(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "torch.save": _through_file,
    "deepcopy of pickle": lambda m: copy.deepcopy(pickle.loads(pickle.dumps(m))),
    "there and back": lambda m: copy.deepcopy(m).cpu().double(),
    "state dict": lambda m: _loaded(
        copy.deepcopy(m).to_empty(device="cpu"), pickle.loads(pickle.dumps(m.state_dict()))
    ),
}


def _loaded(module, state):
    module.load_state_dict(state)
    return module


@pytest.mark.parametrize("sp", [pytest.param(False, marks=pytest.mark.exhaustive), True], ids=["", "sp"])
@on_ranks(2)
def test_copies_compute_the_same_and_train_independently(group, sp):
    for name in CASES:
        module = build(name, group, sp)
        want = outcome(name, module, group, sp)
        for how, make in COPIES.items():
            copied = make(module)
            assert not {id(q) for q in copied.parameters()} & {id(q) for q in module.parameters()}
            assert same(outcome(name, copied, group, sp), want), f"{name}: {how}"
            assert dict(tp_ext.shardings(copied)) == dict(tp_ext.shardings(module)), f"{name}: {how}"
            for param, (key, sharding) in zip(copied.parameters(), tp_ext.shardings(copied), strict=True):
                assert param.tp_sharding == sharding, f"{name}: {how}: {key}"
            _descend(copied)
        assert same(outcome(name, module, group, sp), want), f"{name}: training the copies changed the model"
        twice = copy.deepcopy(module)  # trains as the original does
        for m in (module, twice):
            _train(m, name, group, sp)
        assert same(outcome(name, twice, group, sp), outcome(name, module, group, sp)), name


def _swapped(group, what):
    """Each rank loads what the other one pickled."""
    make = {"loss": lambda: tp_ext.VocabParallelCrossEntropy(group=group)}
    module = make.get(what, lambda: build(what, group, False))()
    pickles = [None, None]
    dist.all_gather_object(pickles, pickle.dumps(module), group=group)
    pickle.loads(pickles[1 - group.rank()])


@pytest.mark.parametrize("what", ["gpt", "rms_norm", "loss"])
def test_another_ranks_pickle_is_refused(what):
    """It holds that rank's shard, and would compute that rank's part twice."""
    match = "tp_group: pickled by rank . of 2, this must be loaded there.*full_state_dict"
    ranks.run_raises(_swapped, 2, ValueError, match, what, in_turns=False)


def _averaged(group, sp):
    """An exponential moving average of the model; its full state is the average of the unsharded model's."""
    model = build("gpt", group, sp)
    averages = [AveragedModel(model), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)]
    states = []
    for _ in range(3):
        _train(model, "gpt", group, sp)
        [average.update_parameters(model) for average in averages]
        states.append(tp_ext.full_state_dict(model))
    mean, ema = (tp_ext.full_state_dict(average) for average in averages)
    for key in states[0]:
        a, b, c = (state[key] for state in states)
        torch.testing.assert_close(mean[f"module.{key}"], (a + b + c) / 3, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(ema[f"module.{key}"], a / 4 + b / 4 + c / 2, rtol=1e-12, atol=1e-12)
    assert averages[1].module.head.weight is averages[1].module.embedding.weight
    assert dict(tp_ext.shardings(averages[0].module)) == dict(tp_ext.shardings(model))
    return ema


@pytest.mark.thinned(1)
@BOTH
@pytest.mark.parametrize("p", [2, 4])
def test_averaged_models(p, sp):
    want = _averaged(None, False)
    for got in ranks.run(_averaged, p, sp):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


@on_ranks(2)
def test_parameters_to_vector_and_back(group):
    for name in CASES:
        module = build(name, group, False)
        want = outcome(name, module, group, False)
        if not list(module.parameters()):
            continue
        vector = parameters_to_vector(module.parameters())
        with torch.no_grad():
            [q.zero_() for q in module.parameters()]
        vector_to_parameters(vector, module.parameters())
        assert same(outcome(name, module, group, False), want), name
        assert dict(tp_ext.shardings(module)) == dict(tp_ext.shardings(build(name, group, False)))


# Ties


def _tied(group, sp, how):
    model = build("gpt", group, sp)
    if how == "load":
        state = tp_ext.full_state_dict(model)
        tp_ext.load_full_state_dict(model, {key: value + 0.5 for key, value in state.items()})
        tp_ext.load_full_state_dict(model, state)
    moves = {"deepcopy": copy.deepcopy, "pickle": COPIES["pickle"], "to": lambda m: m.float().to("cpu").double()}
    model = moves.get(how, lambda m: m)(model)
    assert model.head.weight is model.embedding.weight
    assert [name for name, _ in tp_ext.shardings(model) if name.endswith(("head.weight", "embedding.weight"))] == [
        "embedding.weight"
    ]
    for _ in range(2):
        _train(model, "gpt", group, sp)
    outcome("gpt", model, group, sp)
    norm = tp_ext.clip_grad_norm_(model, 1e6)
    return norm, tp_ext.full_state_dict(model), gradients(model)


@pytest.mark.thinned(1)
@BOTH
@pytest.mark.parametrize("how", ["", "deepcopy", "pickle", "load", "to"])
def test_tied_embeddings_stay_tied(how, sp):
    """Counted once by the norm, trained by both uses' gradients. p = 2: 13 words are cut unevenly."""
    norm, state, grads = _tied(None, False, how)
    results = ranks.run(_tied, 2, sp, how)
    for got_norm, got_state, _ in results:
        torch.testing.assert_close(got_norm, norm, rtol=1e-11, atol=0)
        torch.testing.assert_close(got_state, state, rtol=1e-11, atol=1e-11)
        assert torch.equal(got_state["head.weight"], got_state["embedding.weight"])
    torch.testing.assert_close(full_gradients([r[2] for r in results]), full_gradients([grads]), rtol=1e-11, atol=1e-11)


def _shared(group, sp):
    block = build("rich_block", group, sp)
    y, dx, *_ = outcome("rich_block", block, group, sp, lambda x: block(block(block(x))))
    return y, dx, gradients(block)


@pytest.mark.thinned(1)
@BOTH
@pytest.mark.parametrize("p", [1, 2, 4])
def test_a_module_used_several_times(p, sp):
    y, dx, grads = _shared(None, False)
    results = ranks.run(_shared, p, sp)
    join = torch.cat if sp else lambda ts: ts[0]
    torch.testing.assert_close(join([r[0] for r in results]), y, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(join([r[1] for r in results]), dx, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(full_gradients([r[2] for r in results]), full_gradients([grads]), rtol=1e-10, atol=1e-10)
