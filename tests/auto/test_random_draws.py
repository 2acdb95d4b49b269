"""Random numbers of unchanged models: sharded models draw what the model of one rank draws, whatever calls what."""

import collections
import copy
import itertools
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tp_ext
from tests.auto.test_sequence_parallel import VOCAB, Gpt
from tests.helpers import one_plan
from tests.helpers.ranks import run_raises
from tests.helpers.same_values import same_values
from tests.helpers.simulated import run
from tp_ext import auto
from tp_ext.auto.proof.copies import copied_model
from tp_ext.auto.proof.proven_plan import for_one_rank
from tp_ext.group import parallel_group

WIDTH, INNER = 16, 24
KINDS = ("none", "F.dropout", "nn.Dropout", "sdpa", "sdpa with dropout")


def compare_with_one_rank(
    group: Any, model: nn.Module, x: Any, hows: tuple[str, ...] = ("train",), **options: Any
) -> auto.Plan:
    """Trains a copy of a model on one rank and one on all; the losses and all gradients must be the same."""
    model = model.double()
    x = x if isinstance(x, tuple) else (x.double(),)
    plan = auto.plan(model, x, parallel_group(group).size, **options)
    alone = auto.apply(for_one_rank(plan, dict(model.named_modules())), copy.deepcopy(model), None)
    sharded = auto.apply(plan, copy.deepcopy(model), group)
    for how in hows:
        for each in (alone, sharded):
            if how == "compile":
                for block in each.blocks:
                    block.compile(backend="aot_eager")
            for module in each.train(how != "eval").modules():
                module.how = how
        same_values(alone, sharded, x, seed=5)
    return plan


# ---------------------------------------------------------------- calls inside of calls


class Attention(nn.Module):
    """Sharded by heads; draws in the middle of sharded work."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.heads = kind, 4
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        if kind == "nn.Dropout":
            self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        if self.kind.startswith("sdpa"):
            p = 0.2 if self.training and "dropout" in self.kind else 0.0
            a = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
        else:
            weights = (q @ k.mT / 2).softmax(-1)
            a = (self.drop(weights) if self.kind == "nn.Dropout" else weights) @ v
        a = a.transpose(1, 2).flatten(2)
        return self.out(F.dropout(a, 0.2, self.training) if self.kind == "F.dropout" else a)


class Nest(nn.Module):
    """A module that draws around one that draws: before it, after it, on replicated and on sharded tensors."""

    def __init__(self, outer: str, inner: str) -> None:
        super().__init__()
        self.outer, self.attention, self.how = outer, Attention(inner), ""
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        if outer == "nn.Dropout":
            self.drop = nn.Dropout(0.1)

    def draws(self, h: Tensor) -> Tensor:
        if self.outer == "F.dropout":
            return F.dropout(h, 0.1, self.training)
        if self.outer == "nn.Dropout":
            return self.drop(h)
        if self.outer.startswith("sdpa"):
            p = 0.1 if self.training and "dropout" in self.outer else 0.0
            return F.scaled_dot_product_attention(h[:, None], h[:, None], h[:, None], dropout_p=p)[:, 0]
        return h

    def forward(self, x: Tensor) -> Tensor:
        if "function" in self.how:  # a recomputation that calls no hook of the block
            return checkpoint(self.body, x, use_reentrant="reentrant" in self.how)
        return self.body(x)

    def body(self, x: Tensor) -> Tensor:
        x = x + self.draws(self.attention(self.norm(self.draws(x))))
        if self.outer == "F.dropout":
            return x + self.down(self.draws(self.up(x).relu()))
        return x + self.down(self.up(x).relu())


class Nests(nn.Module):
    def __init__(self, pairs: list[tuple[str, str]]) -> None:
        super().__init__()
        self.blocks, self.norm, self.how = nn.ModuleList(Nest(*pair) for pair in pairs), nn.LayerNorm(WIDTH), ""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if "block" in self.how:
                x = checkpoint(block, x, use_reentrant="reentrant" in self.how)
            else:
                x = block(x)
        return self.norm(x)


PAIRS = [pair for pair in itertools.product(KINDS, KINDS) if pair != ("none", "none")]


FEW = [pair for i, pair in enumerate(PAIRS) if i % 2]  # every kind is around another one, and inside of one


@pytest.mark.parametrize("pairs", [FEW, pytest.param(PAIRS, marks=pytest.mark.exhaustive)], ids=["few", "all"])
def test_calls_inside_of_calls(pairs: list[tuple[str, str]]) -> None:
    x = torch.randn(2, 3, WIDTH).requires_grad_()
    hows = ("train", "eval", "block", "reentrant block", "function", "reentrant function")
    run(compare_with_one_rank, 2, Nests(pairs), x, hows)


def test_calls_inside_of_calls_compiled() -> None:
    pairs = [("F.dropout", "sdpa"), ("nn.Dropout", "F.dropout"), ("sdpa with dropout", "sdpa with dropout")]
    one_plan.run(compare_with_one_rank, 2, Nests(pairs), torch.randn(2, 3, WIDTH), ("compile",), timeout=180)


class Recomputed(Gpt):
    """A model of which ``how`` says how its layers are recomputed."""

    @property
    def how(self) -> str:
        return "block" if self.recompute is False else ""

    @how.setter
    def how(self, how: str) -> None:
        self.recompute = how.startswith("reentrant") if "block" in how else None


def test_shards_of_tokens_draw_as_one_rank() -> None:
    ids = torch.randint(VOCAB, (3, 5))
    hows = ("train", "block", "reentrant block", "eval")
    run(compare_with_one_rank, 2, Recomputed(), (ids,), hows, sequence_parallel=True)


# ---------------------------------------------------------------- a module that is called several times


class Mlp(nn.Module):
    def __init__(self, inner: int, drop: nn.Module) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH), drop

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(self.up(x).relu()))


class Halves(nn.Module):
    """Two draws of its own in a call, on one tensor."""

    def forward(self, h: Tensor) -> Tensor:
        return F.dropout(h, 0.2, self.training) + F.dropout(h, 0.4, self.training)


class Shared(nn.Module):
    """One dropout, on replicated and sharded tensors, in two widths, in a loop whose length is the run's."""

    def __init__(self, drop: nn.Module, inner: int) -> None:
        super().__init__()
        self.drop, self.norm, self.times = drop, nn.LayerNorm(WIDTH), 2
        self.blocks = nn.ModuleList()
        self.mlps = nn.ModuleList(Mlp(inner, drop) for inner in (24, 40))
        self.up, self.down, self.how = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH), ""

    def body(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.drop(x)
        h = self.up(x).relu()
        for _ in range(self.times):
            h = self.drop(h)
        return self.drop(self.down(h)) + sum(mlp(x) for mlp in self.mlps)

    def forward(self, x: Tensor) -> Tensor:
        if "longer" in self.how:
            self.times = 3
        if "function" in self.how:
            return self.norm(x + checkpoint(self.body, x, use_reentrant="reentrant" in self.how))
        return self.norm(x + self.body(x))


def _shared(group: Any, drop: nn.Module, inner: int, longer: bool = True) -> None:
    model, x = Shared(drop, inner), torch.randn(2, 3, WIDTH).requires_grad_()
    hows = ("train", "function", "reentrant function", "eval", *(("longer", "longer function") if longer else ()))
    plan = compare_with_one_rank(group, model, x, hows)
    assert len(plan.roles) == 6, plan


@pytest.mark.parametrize("drop", [nn.Dropout(0.3), Halves()])
def test_a_module_that_is_called_several_times_draws_for_each_call(drop: nn.Module) -> None:
    run(_shared, 2, drop, 28)


def test_of_tensors_that_look_alike_the_place_of_the_call_names_the_draw() -> None:
    run(_shared, 2, nn.Dropout(0.3), 2 * WIDTH, longer=False)


def test_another_number_of_calls_that_look_alike_is_refused() -> None:
    words = "it draws other random numbers then, in drop"
    run_raises(_shared, 2, RuntimeError, words, nn.Dropout(0.3), 2 * WIDTH, in_turns=False)


class Switched(Mlp):
    """Draws where an argument says so."""

    def forward(self, x: Tensor, draws: bool = False) -> Tensor:
        h = self.up(x).relu()
        return self.down(F.dropout(h, 0.5, self.training) if draws else h)


def _switched(group: Any) -> None:
    model, x = Switched(INNER, nn.Identity()).double(), torch.randn(2, 3, WIDTH, dtype=torch.float64)
    auto.apply(auto.plan(model, (x,), parallel_group(group).size), model, group)(x, draws=True)


def test_a_call_that_draws_where_the_example_did_not_is_refused() -> None:
    run_raises(_switched, 2, RuntimeError, "it draws other random numbers then, in the model", in_turns=False)


# ---------------------------------------------------------------- random numbers of other operators

OWN_NUMBERS = {
    "torch.dropout": lambda h: torch.dropout(h, 0.5, True),
    "alpha_dropout": lambda h: F.alpha_dropout(h, 0.5, True),
    "feature_alpha_dropout": lambda h: F.feature_alpha_dropout(h.mT, 0.5, True).mT,
    "nn.AlphaDropout": lambda h: nn.AlphaDropout()(h),
    "dropout1d": lambda h: F.dropout1d(h.mT, 0.5).mT,
    "dropout2d": lambda h: F.dropout2d(h[..., None].movedim(2, 1)).movedim(1, 2)[..., 0],
    "dropout3d": lambda h: F.dropout3d(h[..., None, None].movedim(2, 1)).movedim(1, 2)[..., 0, 0],
    "bernoulli": lambda h: h * torch.bernoulli(torch.full_like(h, 0.5)),
    "bernoulli_": lambda h: h * torch.empty_like(h).bernoulli_(0.5),
    "rand_like": lambda h: h + torch.rand_like(h),
    "randn_like": lambda h: h + torch.randn_like(h),
    "randint_like": lambda h: h * torch.randint_like(h, 3),
    "normal_": lambda h: h + h.new_empty(h.shape).normal_(),
    "uniform_": lambda h: h + torch.empty(h.shape).uniform_(),
    "exponential_": lambda h: h + torch.empty_like(h).exponential_(),
    "normal of a tensor": lambda h: torch.normal(h, 1.0),
    "poisson": lambda h: torch.poisson(h),
    "rrelu": lambda h: F.rrelu(h, training=True),
    "gumbel_softmax": lambda h: F.gumbel_softmax(h, dim=0),
    "multinomial": lambda h: h * torch.multinomial(h.flatten(0, 1), 1, replacement=True).view(2, 3, 1),
    "randn": lambda h: h + torch.randn(h.shape),
    "rand of a size": lambda h: h * torch.rand(h.size(0), h.size(1), h.size(-1)),
    "randint": lambda h: h * torch.randint(3, h.shape[-1:]),
    "randperm": lambda h: h * torch.randperm(h.shape[-1]),
    "normal": lambda h: h + torch.normal(0.0, 1.0, h.shape),
}


class Drawn(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.up, self.down, self.function = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH), function

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.function(self.up(x).sigmoid()))


@pytest.mark.parametrize("name", OWN_NUMBERS)
def test_operators_that_draw_themselves_leave_their_tensors_whole(name: str) -> None:
    plan = auto.plan(Drawn(OWN_NUMBERS[name]), (torch.randn(2, 3, WIDTH),), 2)
    assert "draws random numbers of its own" in plan.whole["up.weight"], plan.why("up.weight")


def test_random_numbers_of_replicated_tensors_leave_the_rest_sharded() -> None:
    for function in (torch.rand_like, lambda x: torch.rand(x.shape), F.alpha_dropout):
        model = nn.Sequential(
            nn.Linear(WIDTH, INNER), nn.ReLU(), nn.Linear(INNER, WIDTH), Drawn(lambda h: h), nn.Tanh()
        )
        model[4].forward = lambda x, function=function: x + function(x)
        assert len(auto.plan(model, (torch.randn(2, 3, WIDTH),), 2).roles) == 4


# ---------------------------------------------------------------- verify, and what cannot be copied


class Held(nn.Module):
    """An MLP with dropout, in a model that holds what ``copy.deepcopy`` refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.norm = Mlp(INNER, nn.Dropout(0.3)), nn.LayerNorm(WIDTH)
        self.held = {"lock": threading.Lock(), "generator": (i for i in range(3)), "file": open(__file__)}  # noqa: SIM115
        self.objects, self.script = 2 * [Holder(self.mlp)], torch.jit.script(scripted)
        self.by_default = collections.defaultdict(list, calls=[self.mlp.up])

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.script(self.mlp(x)))


class Holder:
    def __init__(self, module: nn.Module) -> None:
        self.module, self.lock = module, threading.Lock()


def scripted(x: Tensor) -> Tensor:
    return x * 2


def _verified(group: Any) -> None:
    model, x = Held().double(), torch.randn(2, 3, WIDTH, dtype=torch.float64)
    model.group = group
    plan = auto.plan(model, (x,), 2)
    assert plan.roles == {"mlp.up": "column", "mlp.down": "row"}
    before = torch.get_rng_state()
    auto.apply(plan, model, group, verify=True, example=(x,))
    assert torch.equal(torch.get_rng_state(), before)
    assert type(model.held["lock"]) is type(threading.Lock()) and model.script(x) is not None


def test_verify_draws_the_same_masks_in_a_model_that_cannot_be_copied_whole() -> None:
    with pytest.raises(TypeError, match="cannot pickle"):
        copy.deepcopy(Held())
    run(_verified, 2)


def test_copies_keep_what_is_the_same_object_the_same() -> None:
    model = Held()
    clone = copied_model(model, {})
    assert clone.mlp is not model.mlp and clone.mlp.up.weight is not model.mlp.up.weight
    assert clone.by_default["calls"][0] is clone.mlp.up and clone.by_default.default_factory is list
    assert clone.held["lock"] is model.held["lock"] and clone.script is model.script
    assert clone.objects[0] is clone.objects[1] is model.objects[0]  # it has a lock


# ---------------------------------------------------------------- one rank


def _adapted(group: Any) -> list[str]:
    torch.manual_seed(0)
    model, x = Nests([("F.dropout", "sdpa")]).double(), torch.randn(2, 3, WIDTH, dtype=torch.float64)
    sharded = auto.apply(auto.plan(model, (x,), parallel_group(group).size), copy.deepcopy(model), group)
    keys, parameters = list(model.state_dict()), list(model.parameters())
    alone = auto.apply(auto.plan(model, (x,), 1), model, None)
    assert list(alone.state_dict()) == keys and all(a is b for a, b in zip(alone.parameters(), parameters, strict=True))
    assert alone.tp_ext_plan.roles == sharded.tp_ext_plan.roles
    names = []
    for one in (alone, sharded):
        tp_ext.manual_seed(1)
        names.append(tp_ext.add_lora(one, targets=["qkv", "down"], r=2, alpha=4.0, dropout=0.2))
    assert names[0] == names[1]
    same_values(alone, sharded, (x,), seed=2)
    return names[0]


def test_adapters_of_one_rank_are_those_of_several() -> None:
    assert run(_adapted, 2) == [["blocks.0.attention.qkv", "blocks.0.down"]] * 2
