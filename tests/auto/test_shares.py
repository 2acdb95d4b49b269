"""Models of ``auto`` whose ranks have shares of their own (``shares=``, :func:`tp_ext.shares`): training next to the
unsharded model, files of plans, full states, and what is refused."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tp_ext
from tests.auto.architectures import build
from tests.auto.compare import loss_or_squares, only_doubles
from tests.auto.test_planner import EXAMPLE, Model
from tests.auto.test_sequence_parallel import Gpt
from tests.helpers.ranks import run_raises
from tests.helpers.same_values import assert_small, differences_of_states
from tests.helpers.simulated import run
from tp_ext import auto
from tp_ext.auto.modules.token_lengths import TokenLengths
from tp_ext.auto.proof.proven_plan import fewer_shares, for_one_rank
from tp_ext.group import parallel_group
from tp_ext.share_sizes import split_sizes
from tp_ext.simulation.comparison import differences_of_models

SHARES = [[2, 1], [1, 3], [2, 1, 1], [0.5, 0.125, 0.25, 0.25]]


class Mlp(nn.Module):
    def __init__(self, inner: int = 13) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(8, inner), nn.Linear(8, inner, bias=False), nn.Linear(inner, 8)
        self.drop = nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(F.silu(self.gate(x)) * self.up(x)))


class GroupedAttention(nn.Module):
    """Eight query heads of four key-value heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, width, bias=False) for width in (32, 16, 16))
        self.out = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (layer(x).view(b, t, -1, 4).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).reshape(b, t, -1))


class TorchAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = nn.MultiheadAttention(20, 5, batch_first=True), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.attention(x, x, x, need_weights=False)[0][..., :8])


class Convolutions(nn.Module):
    """With a norm over the batch, whose running statistics are sharded as the channels are."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(3, 11, 3, padding=1), nn.BatchNorm2d(11), nn.Conv2d(11, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.norm(self.first(x))))


def _of(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(2)

    def x(*shape: int) -> dict[str, Tensor]:
        return {"x": torch.randn(shape, generator=generator, dtype=torch.float64)}

    if name in ("llama", "gpt2", "bert", "t5"):
        return build(name, train=True)
    if name == "tied table and head":
        ids = torch.randint(96, (3, 8), generator=generator)
        return Model(), {"ids": ids, "labels": ids.roll(1)}
    if name == "learned positions":
        return Gpt(), _ids(8)
    models: dict[str, Any] = {
        "mlp": (Mlp, (5, 8)),
        "grouped attention": (GroupedAttention, (2, 6, 16)),
        "attention of torch": (TorchAttention, (2, 6, 20)),
        "convolutions": (Convolutions, (2, 3, 5, 5)),
    }
    cls, shape = models[name]
    return cls(), x(*shape)


NAMES = [
    "mlp", "grouped attention", "attention of torch", "convolutions", "tied table and head",
    "llama", "gpt2", "bert", "t5",
]  # fmt: skip


def _trains(group: Any, name: str, shares: list[float], options: dict[str, Any]) -> float:
    torch.manual_seed(0)
    model, inputs = _of(name)
    inputs = {key: value.double() if value.is_floating_point() else value for key, value in inputs.items()}
    reference = copy.deepcopy(model.double())
    plan = auto.plan(model, inputs, len(shares), shares=shares, **options)
    auto.apply(plan, model, group)
    auto.apply(for_one_rank(plan, dict(reference.named_modules())), reference, None)  # which draws the same masks
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.05, momentum=0.9) for each in (reference, model)]
    for step in range(3):
        assert_small(differences_of_models(reference, model, (), inputs, seed=step, input_gradients=False, call=_loss))
        for optimizer in optimizers:
            optimizer.step()
    assert_small(differences_of_states(reference, model))
    assert plan.heads or name != "tied table and head"
    assert plan.shares == tuple(shares) and bool(plan.tokens) == bool(options)
    for layer in plan.roles:
        assert model.get_submodule(layer).shares == plan.shares, layer
    layouts = dict(tp_ext.layouts(model))
    for parameter, sharding in plan.shardings.items():
        for part in sharding.parts:
            units = split_sizes(part.size // part.unit, len(shares), tuple(shares))
            assert [stop - start for start, stop in (part.span(r, plan.p) for r in range(plan.p))] == [
                unit * part.unit for unit in units
            ]
        assert parameter not in layouts or layouts[parameter][0][0] == sharding
    sizes = {name: torch.Size(plan.shapes[name]).numel() for name in plan.bytes_of_element}
    return sum(size for name, size in sizes.items() if name in plan.shardings) / sum(sizes.values())


def _on_ranks(name: str, shares: list[float], **options: Any) -> list[float]:
    with only_doubles():  # of the process: around all ranks
        return run(_trains, len(shares), name, shares, options)


def _loss(model: nn.Module, **inputs: Tensor) -> Tensor:
    return loss_or_squares(model(**inputs))


def _in_turn(names: list[str], shares: list[list[float]]) -> list[Any]:
    """All pairs; by default each name with the next shares."""
    return [
        pytest.param(name, some, id=f"{name}-{some}", marks=[] if i % len(shares) == j else pytest.mark.exhaustive)
        for i, name in enumerate(names)
        for j, some in enumerate(shares)
    ]


@pytest.mark.parametrize(("name", "shares"), _in_turn(NAMES, SHARES))
def test_a_model_trains_as_unsharded(name: str, shares: list[float]) -> None:
    few_heads = len(shares) == 4 or (len(shares) == 3 and name == "llama")  # a rank would have none
    assert min(_on_ranks(name, shares)) > (0.25 if few_heads else 0.4)


@pytest.mark.parametrize(("name", "shares"), _in_turn(["gpt2", "bert", "learned positions"], SHARES[:3]))
def test_tokens_follow_the_shares(name: str, shares: list[float]) -> None:
    _on_ranks(name, shares, sequence_parallel=True)


def _entered(group: Any) -> list[Any]:
    lengths = TokenLengths(parallel_group(group), forwards=1, records=True, shares=(2, 1, 1))
    few = TokenLengths(parallel_group(group), forwards=1, records=True, shares=(1, 40, 40))
    return [*map(lengths.enter, (8, 13, 2)), few.enter(8)]


def test_the_lengths_of_tokens_on_the_ranks() -> None:
    """Tokens of which a rank would have none stay whole."""
    assert run(_entered, 3) == [[[4, 2, 2], [7, 3, 3], None, None]] * 3


def _ids(tokens: int) -> dict[str, Tensor]:
    ids = torch.randint(96, (3, tokens), generator=torch.Generator().manual_seed(tokens))
    return {"ids": ids, "labels": ids.roll(1)}


# ---------------------------------------------------------------- files, contexts, states


def test_a_file_has_the_shares_of_its_plan(tmp_path: Any) -> None:
    plan, equal = (auto.plan(Model(), EXAMPLE, 3, shares=shares, prove="shapes") for shares in ([2, 1, 1.5], None))
    plan.save(tmp_path / "plan.json")
    again = auto.Plan.load(tmp_path / "plan.json")
    assert again == plan and again.fingerprint == plan.fingerprint and again.shares == (2, 1, 1.5)
    assert plan.fingerprint != equal.fingerprint and "shares" not in equal._content()
    assert "p = 3, shares [2, 1, 1.5]" in str(plan) and "[43, 21, 32] x 64" in str(plan), str(plan)
    wrong = copy.deepcopy(plan)
    wrong.shares = (1, 1, 1)
    wrong.save(tmp_path / "wrong.json")
    with pytest.raises(ValueError, match=r"shares: .* must be those of all shardings"):
        auto.Plan.load(tmp_path / "wrong.json")


def test_the_context_says_the_shares() -> None:
    with tp_ext.shares([2, 1]):
        plan = auto.plan(Model(), EXAMPLE, 2, prove="shapes")
        assert plan.fingerprint == auto.plan(Model(), EXAMPLE, 2, shares=[2.0, 1.0], prove="shapes").fingerprint
        assert auto.plan(Model(), EXAMPLE, 1, prove="shapes").shares is None
    assert plan == auto.plan(Model(), EXAMPLE, 2, shares=[2, 1], prove="shapes")
    assert plan.shares == (2, 1)


def _in_context(group: Any, plan: auto.Plan, weights: Any) -> None:
    with tp_ext.shares(weights[parallel_group(group).rank]):
        auto.apply(plan, Model(), group)


@pytest.mark.parametrize(
    ("of_plan", "weights", "match"),
    [
        ([2, 1], [[1, 2], [1, 2]], "shares: those of the plan, .2, 1., must be those of tp_ext.shares, .1, 2."),
        (None, [[2, 1], [2, 1]], "shares: those of the plan, None, must be those of tp_ext.shares"),
        ([2, 1], [[2, 1], [1, 1, 1]], "shares: those of the plan, .2, 1., must be those of tp_ext.shares, .1, 1, 1."),
        ([2, 1, 1], [None, None], "plan: is for p = 3 and must be for the 2 ranks"),
    ],
)
def test_a_plan_of_other_shares_is_refused(of_plan: Any, weights: Any, match: str) -> None:
    plan = auto.plan(Model(), EXAMPLE, 2 if of_plan is None else len(of_plan), shares=of_plan, prove="shapes")
    run_raises(_in_context, 2, ValueError, match, plan, weights, in_turns=False)


def _with_plans(group: Any, plans: list[auto.Plan]) -> None:
    auto.apply(plans[parallel_group(group).rank], Model(), group)


def test_plans_of_other_shares_on_another_rank_are_refused() -> None:
    plans = [auto.plan(Model(), EXAMPLE, 2, shares=shares, prove="shapes") for shares in ([2, 1], [2.0001, 1])]
    assert plans[0].shapes == plans[1].shapes
    run_raises(_with_plans, 2, ValueError, "plan: that of rank 1 differs from that of rank 0", plans, in_turns=False)


@pytest.mark.parametrize(
    ("p", "options", "error", "match"),
    [
        (2, {"shares": [1, 1, 1]}, ValueError, "shares: .* are 3 weights, and must be one for each rank, p = 2"),
        (3, {"shares": [1, 0, 2]}, ValueError, "shares: .1, 0, 2. must be above 0"),
        (2, {"shares": [1, -1]}, ValueError, "weights: -1 must be a finite number"),
        (2, {"shares": [1, True]}, TypeError, "weights: True must be a number"),
        (2, {"shares": 2}, TypeError, "weights: 2 must be a list"),
        (
            2,
            {"shares": [2, 1], "invariant_blocks": 4},
            ValueError,
            "shares: .* must not be given with invariant_blocks",
        ),
    ],
)
def test_what_is_refused(p: int, options: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        auto.plan(Model(), EXAMPLE, p, **options)


def test_contexts_that_are_refused() -> None:
    with tp_ext.shares([2, 1]), pytest.raises(ValueError, match=r"shares: .1, 1. must be those of tp_ext.shares"):
        auto.plan(Model(), EXAMPLE, 2, shares=[1, 1])
    with tp_ext.shares([2, 1]), pytest.raises(ValueError, match=r"shares: .* are 2 weights, .* p = 3"):
        auto.plan(Model(), EXAMPLE, 3)
    with tp_ext.shares([2, 1], tokens=False), pytest.raises(ValueError, match="tokens=False must not be combined"):
        auto.plan(Model(), EXAMPLE, 2, sequence_parallel="auto")


def test_what_leaves_a_rank_without_a_unit_stays_whole() -> None:
    plan = auto.plan(Model(), EXAMPLE, 2, shares=[1, 40])
    assert "3 parts of 4 x 16: by shares [1, 40] a rank would have none" in plan.why("blocks.0.qkv.weight")
    assert plan.proof == "values" and plan.shardings["blocks.0.up.weight"].local_sizes(2) == [3, 109]


def _states(group: Any, full: dict[str, Tensor], shares: Any) -> dict[str, Tensor]:
    model, p = Model().double(), parallel_group(group).size
    auto.apply(auto.plan(model, EXAMPLE, p, shares=shares, prove="shapes"), model, group)
    tp_ext.load_full_state_dict(model, full)
    return tp_ext.full_state_dict(model)


def test_a_full_state_is_that_of_any_shares() -> None:
    full = Model().double().state_dict()
    for shares in ([2, 1], None, [1, 3, 1], [1, 1, 2, 2]):
        state = run(_states, 2 if shares is None else len(shares), full, shares)[-1]
        assert list(state) == list(full) and all(torch.equal(state[name], full[name]) for name in full)


# ---------------------------------------------------------------- the proof


def test_the_proof_has_the_least_and_the_largest_share() -> None:
    shares = tuple(float(1 + n % 5) for n in range(12))
    fewer = fewer_shares(shares, 8)
    assert fewer is not None and len(fewer) == 8 and (min(fewer), max(fewer)) == (1, 5)
    assert fewer_shares(shares, 12) == shares and fewer_shares(None, 2) is None
    assert auto.plan(Mlp(60), {"x": torch.randn(5, 8)}, 12, shares=shares).proof == "values"


def test_a_smaller_model_has_a_unit_on_each_rank() -> None:
    model = nn.Sequential(Mlp(3000), Mlp(3000))
    plan = auto.plan(model, (torch.randn(5, 8),), 2, shares=[1, 30], budget=50_000)
    assert plan.proof == "values" and plan.shardings["0.up.weight"].local_sizes(2) == [97, 2903]


class Wrong(Mlp):
    """Divides by a number that each rank has of its own."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        return self.down(hidden / hidden.shape[-1])


def test_the_proof_sees_a_length_of_a_rank() -> None:
    plan = auto.plan(Wrong(), {"x": torch.randn(5, 8)}, 2, shares=[2, 1])
    assert not {"up.weight", "down.weight"} & plan.shardings.keys()
