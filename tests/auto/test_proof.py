"""The proof by values: code that keeps tensors outside of modules, shapes that change in place, warnings."""

import copy
import functools
import logging
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers.same_values import same_values
from tp_ext import auto
from tp_ext.auto.proof.proven_plan import Prover
from tp_ext.auto.record.dims import by_atom, contains
from tp_ext.auto.search import localize, rounds
from tp_ext.auto.search.choose import decisions
from tp_ext.auto.search.integers import IntegerSearch
from tp_ext.auto.search.localize import Localized
from tp_ext.debug import simulate

WIDTH = 8
ALL = ["down.weight", "up.bias", "up.weight"]
X = torch.randn(3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x)


def compare(group: Any, model: nn.Module, example: Any) -> list[str]:
    """Plans, applies, and compares outputs and all gradients; returns what is sharded."""
    plan = auto.plan(model, example, group.size())
    assert plan.proof == "values" or group.size() == 1, plan.proof
    sharded = auto.apply(plan, copy.deepcopy(model), group)
    same_values(model, sharded, example, input_gradients=False)  # some are read as integers
    return sorted(plan.shardings)


def test_ranks_of_a_proof_compare_no_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have the same one, and its fingerprint takes as long as a run of a model."""

    def computed(_: auto.Plan) -> str:
        raise AssertionError("a fingerprint is computed in a proof")

    monkeypatch.setattr(auto.Plan, "fingerprint", property(computed))
    plan = auto.plan(Base(), (X.float(),), 2)
    assert plan.proof == "values" and sorted(plan.shardings) == ALL


class Headed(Base):
    def __init__(self) -> None:
        super().__init__()
        self.heads = 4

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)).view(-1, self.heads, 6).flatten(1))


def test_all_layers_share_one_walk_over_the_dims(monkeypatch: pytest.MonkeyPatch) -> None:
    """A walk for each layer would make the time to plan grow with the square of their number."""
    walks = []

    def counted(dims: Any) -> Any:
        walks.append(by_atom(dims))
        return walks[-1]

    monkeypatch.setattr(localize, "by_atom", counted)
    for layers in (2, 6):
        walks.clear()
        plan = auto.plan(nn.Sequential(*(Headed() for _ in range(layers))), (X.float(),), 2, prove="shapes")
        assert [plan.patches[str(i)] for i in range(layers)] == [{"heads": (4, 2)}] * layers
        assert len(walks) == 1
    assert all(contains(dim, atom) for atom, dims in walks[0].items() for dim in dims)


# ---------------------------------------------------------------- what code keeps


def by_lru_cache(function: Callable) -> Callable:
    cached = functools.lru_cache(maxsize=4)(function)
    return functools.wraps(function)(lambda *args: cached(*args))


def by_dict(function: Callable) -> Callable:
    kept: dict[Any, Tensor] = {}

    def called(*args: Any) -> Tensor:
        if args not in kept:
            kept[args] = function(*args)
        return kept[args]

    return called


def by_variable(function: Callable) -> Callable:
    kept = None

    def called(*args: Any) -> Tensor:
        nonlocal kept
        if kept is None:
            kept = function(*args)
        return kept

    return called


def steps(n: int) -> Tensor:
    return torch.arange(n, dtype=torch.float64)[:, None] / n


class Keeper:
    """No module, among the globals."""


KEEPER, TABLE = Keeper(), None
steps_by_lru_cache, steps_by_dict, steps_by_variable = by_lru_cache(steps), by_dict(steps), by_variable(steps)


def in_default(n: int, kept: dict[int, Tensor] = {}) -> Tensor:  # noqa: B006
    return kept.setdefault(n, steps(n))


def in_global(n: int) -> Tensor:
    global TABLE
    TABLE = steps(n) if TABLE is None else TABLE
    return TABLE


def in_function(n: int) -> Tensor:
    in_function.table = getattr(in_function, "table", None)
    if in_function.table is None:
        in_function.table = steps(n)
    return in_function.table


def in_object(n: int) -> Tensor:
    if not hasattr(KEEPER, "table"):
        KEEPER.table = steps(n)
    return KEEPER.table


class Class:
    pass


def in_class(n: int) -> Tensor:
    if not hasattr(Class, "table"):
        Class.table = steps(n)
    return Class.table


class Keeping(Base):
    def __init__(self, table: Callable) -> None:
        super().__init__()
        self.table = table

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x + self.table(x.shape[1]))


class ByMethod(Base):
    @by_lru_cache
    def of_class(self, n: int) -> Tensor:
        return steps(n)

    @by_dict
    def of_closure(self, n: int) -> Tensor:
        return steps(n)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x + self.of_class(x.shape[1]) + self.of_closure(x.shape[1]))


TABLES = [
    steps_by_lru_cache, steps_by_dict, steps_by_variable, in_default, in_global, in_function, in_object, in_class,
]  # fmt: skip


@pytest.mark.parametrize("has_run", [False, True])
@pytest.mark.parametrize("table", [*TABLES, None], ids=lambda f: getattr(f, "__qualname__", "methods"))
def test_a_model_may_keep_tensors_anywhere(table: Callable | None, has_run: bool):
    torch.manual_seed(0)
    model: nn.Module = Keeping(table).double() if table else ByMethod().double()
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64)
    if has_run:
        expected = model(x)
    plan = auto.plan(model, (x,), 2)
    assert plan.proof == "values" and sorted(plan.shardings) == ALL
    output = model(x)  # on real tensors: planning has left nothing
    assert type(output) is Tensor
    if has_run:
        assert torch.equal(output, expected)


LENGTHS: dict[int, int] = {}


class LengthOfFirstBatch(Base):
    """Divides by the number of features, which is kept by the length of a batch: on a rank, its own number."""

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.up(x))
        return self.down(h / LENGTHS.setdefault(x.shape[1], h.shape[-1]))


def test_a_rank_finds_nothing_that_another_has_kept():
    plan = auto.plan(LengthOfFirstBatch(), (torch.randn(2, 5, WIDTH),), 2)
    assert "up.weight" not in plan.shardings and plan.why("up.weight").count("values differ") == 1
    assert not LENGTHS


# ---------------------------------------------------------------- shapes in place, rules that do not fit


class Power(Base):
    """The largest singular value, by hand: a vector times a matrix is a product whose result is squeezed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("u", torch.ones(24))
        self.register_buffer("v", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(F.linear(x, self.up.weight / (self.u @ self.up.weight @ self.v), self.up.bias)))


class InPlace(Base):
    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.change(F.gelu(self.up(x)).clone()).reshape(x.shape[0], -1))


CHANGES = {
    "unsqueeze_": lambda h: h.unsqueeze_(1),
    "squeeze_": lambda h: h[:, None].clone().squeeze_(1) * 2,
    "t_": lambda h: (h.t_() * 2).t(),
    "transpose_": lambda h: (h.transpose_(0, 1) + 1).transpose(0, 1),
    "swapaxes_": lambda h: (h.swapaxes_(0, 1) + 1).transpose(0, 1),
    "as_strided_": lambda h: h.as_strided_(h.shape, h.stride()) + 1,
}


@pytest.mark.thinned(1)
@pytest.mark.parametrize("p", [3, 2])
@pytest.mark.parametrize("name", ["power", *CHANGES])
def test_operators_that_change_a_shape_in_place(name: str, p: int):
    torch.manual_seed(0)
    model = (Power() if name == "power" else InPlace(CHANGES[name])).double()
    plan = auto.plan(model, (X,), p)

    def on_rank(rank: int, group: Any) -> None:
        same_values(copy.deepcopy(model), auto.apply(plan, copy.deepcopy(model), group), (X,))

    simulate(on_rank, p)
    assert (sorted(plan.shardings) == ALL) == (name not in ("power", "as_strided_"))


# ---------------------------------------------------------------- what is said


def test_values_that_are_not_proven_are_a_warning_and_with_strict_an_error():
    example = (torch.randn(3, WIDTH),)
    model = nn.Sequential(nn.Linear(WIDTH, 24, bias=False), nn.GELU(), nn.Linear(24, WIDTH, bias=False))
    with pytest.warns(UserWarning, match="not proven, its shapes alone: one layer .* than budget"):
        plan = auto.plan(model, example, 2, budget=1)
    assert plan.proof.startswith("shapes: ")
    with pytest.raises(ValueError, match=r'strict: the values .* not proven.*; prove="shapes" asks for no'):
        auto.plan(model, example, 2, budget=1, strict=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        auto.plan(model, example, 2, prove="shapes", strict=True)
        auto.plan(model, example, 2, strict=True)


class Heads(Base):
    def __init__(self) -> None:
        super().__init__()
        self.heads = 4

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x).view(x.shape[0], self.heads, 6)
        return self.down((h + torch.ones(x.shape[0], self.heads, 1, dtype=h.dtype)).flatten(1))


def test_torch_logs_nothing_while_sizes_are_tried(monkeypatch: pytest.MonkeyPatch):
    logged: list[Any] = []
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    monkeypatch.setattr(logger, "handle", logged.append)
    plan = auto.plan(Heads().double(), (X,), 2)
    assert sorted(plan.shardings) == ALL and not logged and not logger.disabled


class Numbers(Heads):
    def forward(self, x: Tensor) -> Tensor:
        shape = (x.shape[0], 24 // 6, 6)  # no integer of the module helps
        return self.down(F.gelu(self.up(x).view(shape)).flatten(1))


class Renamed(Numbers):
    """Its code may read any attribute."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * getattr(self, f"unused_{len(x.shape) - 2}") / 24


class Counted:
    """Counts the calls of a method."""

    def __init__(self, cls: type, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls, original = 0, getattr(cls, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(cls, name, counted)


@pytest.mark.parametrize(
    ("cls", "more"),
    [
        pytest.param(Numbers, 0, id="not read"),
        # In all combinations of seven it would reach the limit of runs
        pytest.param(Renamed, 7, id="perhaps read"),
    ],
)
def test_integers_that_forward_does_not_read_cost_no_run_or_one(
    cls: type[Numbers], more: int, monkeypatch: pytest.MonkeyPatch
):
    runs, numbers = Counted(Localized, "run", monkeypatch), []
    for unused in (1, 8):
        model = cls().double()
        for i in range(unused):
            setattr(model, f"unused_{i}", 24)
        plan = auto.plan(model, (X,), 2, prove="shapes")
        assert sorted(plan.shardings) == ALL and plan.sizes
        numbers.append(runs.calls)
    assert numbers[1] == 2 * numbers[0] + more


def test_code_of_equal_layers_is_searched_once(monkeypatch: pytest.MonkeyPatch):
    model = nn.Sequential(*(Heads() for _ in range(3))).double()
    searches = Counted(IntegerSearch, "find", monkeypatch)
    plan = auto.plan(model, (X,), 2)
    assert plan.proof == "values" and len(plan.shardings) == 3 * len(ALL) and plan.patches
    assert searches.calls == 1  # not again in the proof, which runs two of the three


def test_candidates_are_computed_once_for_all_reasons(monkeypatch: pytest.MonkeyPatch):
    """They cost as much as a round: of a network with hundreds of whole parameters, most of its plan."""
    calls = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return decisions(*args, **kwargs)

    monkeypatch.setattr(rounds, "decisions", counted)
    plan = auto.plan(nn.Sequential(*(Base() for _ in range(6))).double(), (X,), 2, prove="shapes")
    assert sum("leaves fewer bytes" in reason for reason in plan.whole.values()) >= 6 and calls == 1


class Blocks(nn.Module):
    """MLPs of different widths, whose weights are kinds of their own; ``f(x, i, widths)`` is what follows block i."""

    def __init__(self, number: int, f: Callable[[Tensor, int, list[int]], Tensor]) -> None:
        super().__init__()
        self.after = f
        for i in range(number):
            setattr(self, chr(ord("a") + i), nn.Sequential(nn.Linear(8, 16 + i), nn.GELU(), nn.Linear(16 + i, 8)))

    def forward(self, x: Tensor) -> Tensor:
        widths: list[int] = []
        for i, (up, act, down) in enumerate(self.children()):
            hidden = act(up(x))
            widths.append(hidden.shape[-1])
            x = self.after(x + down(hidden), i, widths)
        return x


@pytest.mark.parametrize(
    ("number", "f", "wrong"),
    [
        (16, lambda x, i, widths: x / (widths[i] if i == 5 else 1), "f"),
        (8, lambda x, i, widths: x / (widths[i] if i in (1, 6) else 1), "bg"),
        (8, lambda x, i, widths: x * (1 + (i == 7 and widths[1] < 17 and widths[6] < 22)), "b"),
        (1, lambda x, i, widths: x / widths[i], "a"),
    ],
    ids=["one of 16", "two of 8", "two together", "one of one"],
)
def test_few_blocks_are_left_whole_after_few_runs(
    number: int, f: Callable[..., Tensor], wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[Any] = []
    tried = Prover._tried
    monkeypatch.setattr(Prover, "_tried", lambda *args, **options: (runs.append(args), tried(*args, **options))[1])
    plan = auto.plan(Blocks(number, f), (torch.randn(3, 8),), 2)
    assert plan.proof == "values" and "".join(sorted(n[0] for n in plan.whole if n.endswith("0.weight"))) == wrong
    # Two halves at each level, the whole before and after, and the line of the difference
    assert len(runs) <= 2 * len(wrong) * math.log2(number) + 3, len(runs)
