"""Draws that ranks take for equal, where their generators differ: without a common seed, and parted in a training."""

import random
from unittest import mock

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import tp_ext
from tests.helpers import ranks
from tp_ext import auto, common_generator
from tp_ext.debug import simulate
from tp_ext.random import Normal

STEPS = 4
X = torch.randn(6, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class _OnOwn(nn.Module):
    """A model of layers of this package, which draws by one of them."""

    def __init__(self, draw, group):
        super().__init__()
        self.mlp = tp_ext.ParallelMLP(8, 16, group=group)
        self.draw, self.norm = draw, nn.LayerNorm(8)

    def forward(self, x):
        return self.norm(x + self.draw(self.mlp(x)))


class _Function(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.group = group

    def forward(self, x):
        return tp_ext.dropout(x, 0.4, self.training, group=self.group)


class _Attention(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.attention = tp_ext.ParallelAttention(8, 4, dropout=0.4, group=group)

    def forward(self, x):
        return self.attention(x[None])[0]


class _Checkpointed(nn.Module):
    def __init__(self, group, use_reentrant):
        super().__init__()
        self.dropout, self.use_reentrant = tp_ext.Dropout(0.4, group=group), use_reentrant
        self.linear = nn.Linear(8, 8)
        with torch.no_grad():
            self.linear.weight.copy_(torch.eye(8))
            self.linear.bias.zero_()

    def forward(self, x):
        return checkpoint(lambda x: self.linear(self.dropout(x)), x, use_reentrant=self.use_reentrant)


class _Adapted(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.up = tp_ext.ColumnParallelLinear(8, 8, group=group, gather_output=True)
        tp_ext.add_lora(self, targets="up", r=2, alpha=4.0, dropout=0.3)

    def forward(self, x):
        return self.up(x)


LAYERS = {
    "Dropout": lambda group: tp_ext.Dropout(0.4, group=group),
    "dropout": _Function,
    "attention": _Attention,
    "checkpoint": lambda group: _Checkpointed(group, False),
    "reentrant checkpoint": lambda group: _Checkpointed(group, True),
    "adapter": _Adapted,
    "row bias": lambda group: tp_ext.RowParallelLinear(8, 8, group=group, input_is_parallel=False),
    "initialiser of torch": lambda group: tp_ext.RowParallelLinear(
        8, 8, group=group, input_is_parallel=False, init=nn.init.xavier_normal_
    ),
}


class _DropPath(nn.Module):
    def forward(self, x):
        return x * (torch.rand(len(x), 1) < 0.6) / 0.6 if self.training else x


class _Call(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x) if self.training else x


class _Sampled(nn.Module):
    """Draws in eval mode, too."""

    def forward(self, x):
        return x + torch.randn_like(x)


AUTO = {
    "nn.Dropout": lambda: nn.Dropout(0.4),
    "drop path": _DropPath,
    "bernoulli": lambda: _Call(lambda x: x * torch.bernoulli(torch.full_like(x, 0.6))),
    "normal_": lambda: _Call(lambda x: x + torch.empty_like(x).normal_()),
    "gumbel_softmax": lambda: _Call(F.gumbel_softmax),
    "rrelu": lambda: _Call(lambda x: F.rrelu(x, training=True)),
    "alpha_dropout": lambda: nn.AlphaDropout(0.4),
    "dropout1d": lambda: nn.Dropout1d(0.4),
    "multinomial": lambda: _Call(lambda x: x[torch.multinomial(torch.ones(len(x)), len(x), True)]),
    "in eval mode": _Sampled,
}


class _Plain(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)
        self.hidden, self.draw = nn.Dropout(0.2), draw

    def forward(self, x):
        return self.norm(x + self.draw(self.down(self.hidden(self.up(x).relu()))))


def _seed(how, rank):
    """Seeds a rank as a script does."""
    if how == "none":
        torch.manual_seed(1000 + 7919 * rank)  # what torch 2.15 does itself
    else:
        torch.manual_seed(5 + (rank if how == "seed + rank" else 0))


def _train(model, how, rank):
    model.double()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    if how == "seed + rank later":
        torch.manual_seed(5 + rank)
    losses = []
    for step in range(STEPS):
        if how == "parted at step 2" and step == 2 and rank == 0:
            torch.randn(3)
        loss = (model(X) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _trained_layers(rank, group, name, how):
    _seed(how, rank)
    model = _OnOwn(LAYERS[name](group), group)
    losses = _train(model, how, rank)
    return losses, tp_ext.full_state_dict(model), _findings(model)


def _findings(model):
    """Those but that of generators, which may part where nothing is drawn any more."""
    return [text for text in tp_ext.debug.findings(model) if "generator" not in text]


HOWS = pytest.mark.parametrize("how", ["common", "none", "seed + rank", "seed + rank later", "parted at step 2"])


def _check(results, expected):
    (losses, state, found), *others = results
    assert not found
    for other_losses, other_state, _ in others:
        assert other_losses == losses
        assert all(torch.equal(value, other_state[key]) for key, value in state.items())
    if expected is not None:  # one process with rank 0's seed
        torch.testing.assert_close(losses, expected[0], rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(dict(state), dict(expected[1]), rtol=1e-9, atol=1e-9)


@HOWS
@pytest.mark.parametrize("name", LAYERS)
def test_layers_draw_from_the_generator_of_rank_0(name, how):
    alone = simulate(_trained_layers, 1, name, how)[0]
    _check(simulate(_trained_layers, 3, name, how), alone)


def _trained_auto(rank, group, name, how, plan):
    torch.manual_seed(3)
    model = _Plain(AUTO[name]()).double()
    _seed(how, rank)
    model = auto.apply(plan, model, group).train(name != "in eval mode")
    return _train(model, how, rank), tp_ext.full_state_dict(model), _findings(model)


@HOWS
@pytest.mark.parametrize("name", AUTO)
def test_models_of_auto_draw_from_the_generator_of_rank_0(name, how):
    results = []
    for p in (1, 2):
        plan = auto.plan(_Plain(AUTO[name]()).double().train(name != "in eval mode"), (X,), p)
        assert p == 1 or plan.shardings
        results.append(simulate(_trained_auto, p, name, how, plan))
    _check(results[1], results[0][0])


def _states(rank, group, how):
    """The states of the generator after a model is made and called, and the first draw before."""
    _seed(how, rank)
    before = torch.get_rng_state()
    tp_ext.Dropout(0.4, group=group)(X)
    follows = torch.get_rng_state()
    torch.set_rng_state(before)
    tp_ext.Dropout(0.4, group=None)(X)
    return follows, torch.get_rng_state()


def test_a_common_seed_changes_nothing():
    for follows, alone in simulate(_states, 2, "common"):
        assert torch.equal(follows, alone)


def _along_data(rank, mesh):
    torch.manual_seed(5 + rank)
    return tp_ext.Dropout(0.4, group=mesh["tp"])(X) == 0


def test_replicas_keep_their_generators():
    masks = simulate(_along_data, {"dp": 2, "tp": 2})
    assert torch.equal(masks[0], masks[1]) and torch.equal(masks[2], masks[3])
    assert not torch.equal(masks[0], masks[2])


def _by_name(rank, group):
    tp_ext.manual_seed(5 + rank)
    model = nn.Sequential(tp_ext.Dropout(0.4, group=group), tp_ext.ParallelMLP(8, 16, group=group))
    tp_ext.name_modules(model)
    masks = []
    for step in range(2):
        with tp_ext.random.at(step):
            masks.append(model[0](X) == 0)
    return torch.stack(masks)


def test_masks_by_name_have_the_seed_of_rank_0():
    first, second = simulate(_by_name, 2)
    assert torch.equal(first, second) and torch.equal(first, simulate(_by_name, 1)[0])


def _init(weight):
    with torch.no_grad():
        weight.copy_(torch.randn(weight.shape))


@pytest.mark.parametrize("init", [Normal(), _init], ids=["ours", "callable"])
def test_shards_are_of_one_tensor(init):
    def weight(rank, group):
        torch.manual_seed(5 + rank)
        layer = tp_ext.ColumnParallelLinear(4, 7, group=group, init=init)
        return tp_ext.full_state_dict(layer)["weight"]

    alone = simulate(weight, 1)[0]
    assert all(torch.equal(full, alone) for full in simulate(weight, 3))


def _built(draw):
    def build(rank):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.BatchNorm1d(8)).double()
        draw(model, rank)
        return model

    return build


def _torchs(model, rank):
    torch.manual_seed(rank)
    model[2].reset_parameters()


@torch.no_grad()
def _pythons(model, rank):
    model[0].bias.fill_(random.Random(rank).random())


@torch.no_grad()
def _numpys(model, rank):
    model[0].bias.copy_(torch.from_numpy(numpy.random.default_rng(rank).random(16)))


@torch.no_grad()
def _buffers(model, rank):
    model[3].running_mean.fill_(rank)


@torch.no_grad()
def _swapped(model, rank):
    """The same elements in another order."""
    model[0].weight.copy_(model[0].weight.roll(rank, 0).clone())


@torch.no_grad()
def _half(model, rank):
    model.bfloat16()
    model[0].bias[3] += rank


WEIGHTS = {
    "torch": (_torchs, "2.weight and 1 more"),
    "random": (_pythons, "0.bias"),
    "numpy": (_numpys, "0.bias"),
    "buffer": (_buffers, "3.running_mean"),
    "order": (_swapped, "0.weight"),
    "bf16": (_half, "0.bias"),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_apply_names_ranks_whose_weights_differ(name):
    draw, where = WEIGHTS[name]
    build = _built(draw)
    plan = auto.plan(build(0).eval(), (X.to(next(build(0).parameters()).dtype),), 2)

    def error(rank, group):
        model = build(rank)
        shapes = [p.shape for p in model.parameters()]
        with pytest.raises(ValueError) as raised:
            auto.apply(plan, model, group)
        assert [p.shape for p in model.parameters()] == shapes
        auto.apply(plan, build(0), group)
        return str(raised.value)

    first, second = simulate(error, 2)
    assert first == second
    assert f"ranks whose weights differ from rank 0's: [1], in {where};" in first


def _parted_in_a_forward(rank, group):
    model = nn.Sequential(tp_ext.Dropout(0.4, group=group), nn.Identity(), tp_ext.Dropout(0.4, group=group))
    model[1].register_forward_hook(lambda *_: torch.randn(rank + 1) if calls else None)
    calls = []
    with tp_ext.debug.compare_inputs():
        model(X)
        calls.append(1)
        with pytest.raises(ValueError) as raised:
            model(X)
    return str(raised.value)


def test_compare_inputs_sees_masks():
    first, second = simulate(_parted_in_a_forward, 2)
    assert first == second and "masks" in first and "ranks [1] differ from rank 0" in first


def _compiled(group, parted):
    torch.manual_seed(5 + group.rank())
    torch._dynamo.reset()
    common_generator._rounds.clear()  # a group's generators are compared when it compiles for the first time
    model = nn.Sequential(tp_ext.ColumnParallelLinear(8, 8, group=group, gather_output=True), nn.Tanh())
    model = model.append(tp_ext.Dropout(0.4, group=group)).double()
    if parted:
        torch.manual_seed(5 + group.rank())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    if not parted:
        return compiled(X) == 0
    with pytest.raises(Exception, match=r"torch.compile: code that draws masks.*ranks \[1\] differ from rank 0"):
        compiled(X)
    return torch.zeros(())


@pytest.mark.parametrize("parted", [False, True])
def test_compiled_code(parted):
    first, second = ranks.run(_compiled, 2, parted)
    assert torch.equal(first, second)


def _over_store(group):
    """As over a group of NCCL, whose device must not be waited for."""
    torch.manual_seed(5 + group.rank())
    layers = [tp_ext.Dropout(0.4, group=group) for _ in range(3)]
    with mock.patch.object(common_generator, "device_of", lambda ranks: torch.device("cuda")):
        return torch.stack([layer(X) == 0 for _ in range(50) for layer in layers])


def test_generators_over_the_store():
    first, second = ranks.run(_over_store, 2)
    assert torch.equal(first, second) and not torch.equal(first[0], first[3])


class Twice(nn.Module):
    """Calls each of its modules twice, as a block with one dropout does."""

    def __init__(self, group):
        super().__init__()
        self.first, self.second = (tp_ext.Dropout(0.4, group=group) for _ in range(2))

    def forward(self, x):
        return torch.stack([layer(x) == 0 for layer in (self.first, self.first, self.second, self.second)])


def _called_twice(group):
    torch.manual_seed(5)
    model, masks = Twice(group), []
    for _ in range(4):
        torch.rand(group.rank())  # a rank draws alone
        masks.append(model(X))
    for _ in range(3):  # without a module around
        torch.rand(group.rank())
        masks.append(model.first(X)[None] == 0)
    return torch.cat(masks)


def test_a_module_that_draws_twice_in_a_forward():
    first, second = simulate(lambda rank, group: _called_twice(group), 2)
    assert torch.equal(first, second)


def _after_a_pipeline(rank, group):
    """A run with masks by name, after one in which this rank had another stage: the generators of the ranks differ."""
    tp_ext.manual_seed(5, tp_ext.init_mesh("cpu", pp=2))
    tp_ext.random_scope.base.stage = rank
    torch.rand(rank)
    mesh = tp_ext.init_mesh("cpu", tp=2)
    model = nn.Sequential(tp_ext.ParallelMLP(8, 16, group=mesh["tp"]), tp_ext.Dropout(0.4, group=mesh["tp"]))
    tp_ext.name_modules(model)
    with tp_ext.random.at(step=2):
        return model(torch.ones(3, 8)) == 0


def test_masks_by_name_on_ranks_that_had_other_stages():
    first, second = simulate(_after_a_pipeline, 2)
    assert torch.equal(first, second) and first.any()
