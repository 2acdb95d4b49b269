"""Models whose code reads numbers from arguments that all ranks have alike: masks, lengths, positions."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers.on_ranks import on_ranks
from tests.helpers.same_values import same_values
from tests.helpers.simulated import run
from tp_ext import auto
from tp_ext.auto import guard

WIDTH, HIDDEN, LENGTH = 8, 24, 5


Forward = Callable[[Any, Tensor, Tensor], Tensor]


class Reads(nn.Module):
    """Two MLPs, of which a member's forward uses one or both, by what it reads."""

    def __init__(self, member: str) -> None:
        super().__init__()
        self.member = member
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.second = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, WIDTH))

    def mlp(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))

    def forward(self, x: Tensor, values: Tensor) -> Tensor:
        return MEMBERS[self.member][0](self, x, values)


def any_of_mask(model: Reads, x: Tensor, mask: Tensor) -> Tensor:
    if not mask.any():
        return model.mlp(x)
    return model.second(model.mlp(x).masked_fill(mask[..., None], 0.0))


def longest(model: Reads, x: Tensor, lengths: Tensor) -> Tensor:
    return model.mlp(x[:, : lengths.max()])


def mask_of_lengths(model: Reads, x: Tensor, lengths: Tensor) -> Tensor:
    valid = torch.arange(int(lengths.max().item()), device=x.device)[None] < lengths[:, None]
    return model.mlp(x)[:, : valid.shape[1]] * valid[..., None]


def first_length(model: Reads, x: Tensor, lengths: Tensor) -> Tensor:
    n = int(lengths[0])
    return torch.cat([model.mlp(x[:, :n]), model.second(x[:, n:])], 1)


def listed(model: Reads, x: Tensor, lengths: Tensor) -> Tensor:
    return torch.stack([model.mlp(x[i, :n]).mean(0) for i, n in enumerate(lengths.tolist())])


def split_by_lengths(model: Reads, x: Tensor, lengths: Tensor) -> Tensor:
    rows = model.mlp(x.flatten(0, 1)[: int(lengths.sum())])
    return torch.stack([part.sum(0) for part in rows.split(lengths.tolist())])


def mean_of_lengths(model: Reads, x: Tensor, lengths: Tensor) -> Tensor:
    return model.mlp(x) / lengths.double().mean().item()


def picked(model: Reads, x: Tensor, mask: Tensor) -> Tensor:
    places = mask.flatten().nonzero().squeeze(1)
    rows = x.flatten(0, 1)
    return rows.index_copy(0, places, model.mlp(rows.index_select(0, places))).view_as(x)


def indexed(model: Reads, x: Tensor, mask: Tensor) -> Tensor:
    return model.mlp(x[mask])


def indexed_inside(model: Reads, x: Tensor, mask: Tensor) -> Tensor:
    return model.second(model.mlp(x)[mask])


def scattered(model: Reads, x: Tensor, mask: Tensor) -> Tensor:
    y = model.mlp(x)
    result = torch.zeros_like(y)
    result[mask] = model.second(y[mask])
    return result


def selected(model: Reads, x: Tensor, mask: Tensor) -> Tensor:
    return model.mlp(x).masked_select(mask[..., None]).view(-1, WIDTH)


def where(model: Reads, x: Tensor, mask: Tensor) -> Tensor:
    rows, columns = torch.where(mask)
    return model.mlp(x[rows, columns])


def repeated(model: Reads, x: Tensor, lengths: Tensor) -> Tensor:
    return model.mlp(x.repeat_interleave(lengths, dim=0))


def written(model: Reads, x: Tensor, lengths: Tensor) -> Tensor:
    mask = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
    mask[:, 1:][lengths > 2] = True
    first = mask[:, 0].any()
    mask.logical_not_()
    y = model.second(x) if mask.all() or first else x
    return model.mlp(y)[mask]


def equal(model: Reads, x: Tensor, mask: Tensor) -> Tensor:
    return model.mlp(x) if torch.equal(mask, torch.ones_like(mask)) else model.second(x)


def experts(model: Reads, x: Tensor, ids: Tensor) -> Tensor:
    result = torch.zeros_like(x)
    for i, expert in enumerate((model.mlp, model.second)):
        rows, columns = torch.where(ids % 2 == i)
        if len(rows):
            result = result.index_put((rows, columns), expert(x[rows, columns]))
    return result


def zero(model: Reads, x: Tensor, kind: Tensor) -> Tensor:
    h = model.up(x)
    return model.down(h.tanh() if kind.max() == 0 else h.softmax(-1))


MASK = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 0, 0, 0, 0]]).bool()
OTHER_MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 1, 0, 1, 0]]).bool()
ALL, NONE = torch.ones_like(MASK), torch.zeros_like(MASK)
LENGTHS, SHORTER = torch.tensor([3, 5, 2]), torch.tensor([2, 4, 4])
# forward, the example's values, those of other calls
MEMBERS: dict[str, tuple[Forward, Tensor, list[Tensor]]] = {
    "any": (any_of_mask, MASK, [NONE, OTHER_MASK]),
    "none": (any_of_mask, NONE, [MASK]),
    "longest": (longest, LENGTHS, [SHORTER]),
    "mask_of_lengths": (mask_of_lengths, LENGTHS, [SHORTER]),
    "first_length": (first_length, LENGTHS, [SHORTER]),
    "listed": (listed, LENGTHS, [SHORTER]),
    "split": (split_by_lengths, LENGTHS, [SHORTER]),
    "mean": (mean_of_lengths, LENGTHS, [SHORTER]),
    "picked": (picked, MASK, [OTHER_MASK, ALL]),
    "indexed": (indexed, MASK, [OTHER_MASK, ALL]),
    "indexed_inside": (indexed_inside, MASK, [OTHER_MASK]),
    "scattered": (scattered, MASK, [OTHER_MASK]),
    "selected": (selected, MASK, [OTHER_MASK]),
    "where": (where, MASK, [OTHER_MASK]),
    "repeated": (repeated, LENGTHS, [SHORTER]),
    "written": (written, LENGTHS, [SHORTER, torch.tensor([1, 1, 2])]),
    "zero": (zero, torch.zeros(3).long(), [torch.zeros(3, 5).long()]),
    "equal": (equal, ALL, [MASK, ALL]),
    "experts": (experts, torch.arange(15).view(3, 5), [torch.arange(15).view(3, 5) * 2, torch.zeros(3, 5).long()]),
}


def _x(seed: int) -> Tensor:
    return torch.randn(3, LENGTH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _compare(group: Any, member: str) -> list[str]:
    _, values, others = MEMBERS[member]
    torch.manual_seed(0)
    model = Reads(member).double()
    plan = auto.plan(model, (_x(0), values), group.size())
    assert plan.proof == "values"
    sharded = auto.apply(plan, copy.deepcopy(model), group)
    for seed, given in enumerate([values, *others, values]):
        same_values(model, sharded, (_x(seed), given))
    return sorted(plan.shardings)


@pytest.mark.thinned(1)
@pytest.mark.parametrize("p", [3, 2])
@pytest.mark.parametrize("member", MEMBERS)
def test_what_code_reads_from_arguments(member: str, p: int):
    shardings = run(_compare, p, member)[0]
    assert {"up.weight", "down.weight"} <= {*shardings}


# ---------------------------------------------------------------- what is refused, and what a call costs


def activation(model: Reads, x: Tensor, values: Tensor) -> Tensor:
    y = model.mlp(x)
    return y if y.max() > 0 else x


def activation_in_mask(model: Reads, x: Tensor, values: Tensor) -> Tensor:
    mask = torch.zeros(x.shape[:2], dtype=torch.bool)
    mask |= model.mlp(x).sum(-1) > 0
    return x[mask]


def activation_in_view(model: Reads, x: Tensor, values: Tensor) -> Tensor:
    counts = values.clone()
    first = counts[0]
    counts.copy_(model.mlp(x)[0, 0, 0].long())
    return model.mlp(x) if first > 0 else x


def drawn(model: Reads, x: Tensor, values: Tensor) -> Tensor:
    return model.mlp(x) if torch.rand(1).item() > 0.5 else x


def drawn_alike(model: Reads, x: Tensor, values: Tensor) -> Tensor:
    return model.mlp(x) if torch.rand_like(values.double()).max() > 0.5 else x


BRANCHES = "forward branches on values of tensors, by .*; it must not"
REFUSED: dict[str, tuple[Forward, Tensor, str]] = {
    "activation": (activation, LENGTHS, BRANCHES),
    "activation_in_mask": (activation_in_mask, LENGTHS, "forward computes lengths from values of tensors"),
    "activation_in_view": (activation_in_view, LENGTHS, BRANCHES),
    "drawn": (drawn, LENGTHS, BRANCHES),
    "drawn_alike": (drawn_alike, LENGTHS, BRANCHES),
    "meta": (any_of_mask, MASK.to("meta"), "these arguments have their values, not on meta: argument 1"),
    "meta_lengths": (indexed, MASK.to("meta"), "these arguments have their values, not on meta: argument 1"),
}


@pytest.mark.parametrize("member", REFUSED)
def test_values_that_are_not_those_of_arguments_are_refused(member: str, monkeypatch: pytest.MonkeyPatch):
    forward, values, text = REFUSED[member]
    monkeypatch.setitem(MEMBERS, member, (forward, values, []))
    with pytest.raises(ValueError, match=text):
        auto.plan(Reads(member), (_x(0).float(), values), 2)


def heads(model: Reads, x: Tensor, count: Tensor) -> Tensor:
    h = model.up(x)
    return model.down(h.view(*h.shape[:-1], int(count.max()), -1).softmax(-1).flatten(-2))


def softmax(model: Reads, x: Tensor, count: Tensor) -> Tensor:
    h = model.up(x)
    return model.down(h.softmax(-1) if count.max() > 2 else h.tanh())


def dim(model: Reads, x: Tensor, count: Tensor) -> Tensor:
    h = model.up(x)
    return model.down(h - h.mean(int(count.max()), keepdim=True))


# values with which the plan's shards give other results than the model; the sentence on them
OTHERS: dict[str, tuple[Forward, int, int, str]] = {
    "heads": (heads, 4, 3, "no call with these numbers of values: plan with one"),
    "softmax": (softmax, 1, 3, "no call with these numbers of values: plan with one; up.weight cannot be sharded then"),
    "dim": (dim, 1, 2, "no call with these numbers of values: plan with one; it sums over sharded dims in other calls"),
}


@pytest.mark.parametrize("member", OTHERS)
@on_ranks(2)
def test_numbers_with_which_the_shards_do_not_serve_are_refused(group: Any, member: str) -> None:
    forward, count, other, text = OTHERS[member]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MEMBERS, member, (forward, LENGTHS, []))
        model = Reads(member).double()
        plan = auto.plan(model, (_x(0), torch.tensor([count])), 2)
        sharded = auto.apply(plan, copy.deepcopy(model), group)
        assert "up.weight" in plan.shardings
        torch.testing.assert_close(sharded(_x(1), torch.tensor([count])), model(_x(1), torch.tensor([count])))
        with pytest.raises(RuntimeError, match=text):
            sharded(_x(1), torch.tensor([other]))


def _costs(group: Any, member: str, given: list[Tensor], wanted: list[tuple[int, int]]) -> None:
    """Compares how often each of these calls is recorded and proven by values with what is wanted."""
    torch.manual_seed(0)
    model = Reads(member).double()
    plan = auto.plan(model, (_x(0), MEMBERS[member][1]), 2)
    counts = [0, 0]

    def counted(function: Any, place: int, is_counted: Callable[..., bool]) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[place] += is_counted(*args)
            return function(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        if group.rank() == 0:  # ranks are threads of one process, and share the module
            patch.setattr(guard, "flow_of", counted(guard.flow_of, 0, lambda structure, *_: structure is mine))
            patch.setattr(guard, "plan_again", counted(guard.plan_again, 1, lambda _, s, *rest: s is mine and rest[-1]))
        sharded = auto.apply(plan, copy.deepcopy(model), group)
        mine = next(h for h in sharded._forward_pre_hooks.values() if isinstance(h, guard.Guard)).structure
        sharded(_x(0), MEMBERS[member][1])  # the example's call, for which more is recorded
        for values, (records, proofs) in zip(given, wanted, strict=True):
            counts[:] = 0, 0
            torch.testing.assert_close(sharded(_x(1), values), model(_x(1), values), rtol=1e-12, atol=1e-12)
            assert group.rank() or counts == [records, proofs], (values, counts)


@pytest.mark.parametrize(
    ("member", "given", "wanted"),
    [
        # The same number; another branch, twice
        ("any", [OTHER_MASK, NONE, NONE, MASK], [(0, 0), (1, 1), (0, 0), (0, 0)]),
        # Other lengths, which lead to the same functions
        ("indexed", [OTHER_MASK, ~MASK, OTHER_MASK], [(1, 0), (1, 0), (0, 0)]),
        # Numbers that are sizes: by values, after some by shapes
        (
            "mask_of_lengths",
            [torch.tensor([n, 1, 1]) for n in (2, 1, 4, 2, 3)],
            [(1, 1), (1, 1), (1, 1), (0, 0), (1, 0)],
        ),
    ],
)
def test_what_a_call_costs(member: str, given: list[Tensor], wanted: list[tuple[int, int]]):
    run(_costs, 2, member, given, wanted)


@on_ranks(2)
def test_other_numbers_are_proven_a_bounded_number_of_times(group: Any) -> None:
    model = Reads("any").double()
    plan = auto.plan(model, (_x(0), MASK), 2)
    sharded = auto.apply(plan, model, group)
    guarded = next(h for h in sharded._forward_pre_hooks.values() if isinstance(h, guard.Guard))
    guarded.number_proofs = guard.MAX_PROOFS
    sharded(_x(0), MASK)
    with pytest.raises(
        RuntimeError, match=r"values: forward reads numbers from these .*test_values_read.py:\d+, and those"
    ):
        sharded(_x(0), NONE)


def _saved(group: Any, file: Path) -> None:
    torch.manual_seed(0)
    model = Reads("indexed").double()
    sharded = auto.apply(auto.Plan.load(file), copy.deepcopy(model), group)
    for values in (MASK, OTHER_MASK):
        torch.testing.assert_close(sharded(_x(1), values), model(_x(1), values), rtol=1e-12, atol=1e-12)
    guarded = next(h for h in sharded._forward_pre_hooks.values() if isinstance(h, guard.Guard))
    assert guarded.read and not guarded.__getstate__()["read"]  # operators, which pickle does not know


def test_a_saved_plan_has_the_values_that_are_read(tmp_path: Path):
    file = tmp_path / "plan.json"
    plan = auto.plan(Reads("indexed").double(), (_x(0), MASK), 2)
    plan.save(file)
    assert plan.example["tuple"][1]["values"] == MASK.tolist() and "values" not in plan.example["tuple"][0]
    assert auto.Plan.load(file).fingerprint == plan.fingerprint
    run(_saved, 2, file)


@on_ranks(2)
def test_a_call_that_is_new_in_inference_mode(group: Any) -> None:
    torch.manual_seed(0)
    model = Reads("any").double()
    plan = auto.plan(model, (_x(0), MASK), 2)
    sharded = auto.apply(plan, copy.deepcopy(model), group)
    with torch.inference_mode():
        for values in (MASK, NONE, OTHER_MASK, NONE):
            torch.testing.assert_close(sharded(_x(1), values.clone()), model(_x(1), values), rtol=1e-12, atol=1e-12)


class TwoMasks(Reads):
    def forward(self, x: Tensor, mask: Tensor, other: Tensor) -> Tensor:
        h = self.up(x)
        return self.down(h.tanh() if mask.any() == other.any() else h.softmax(-1))


class WritesToOne(Reads):
    """Writes to one argument, and reads another."""

    def forward(self, x: Tensor, mask: Tensor, other: Tensor) -> Tensor:
        mask[:] = False
        h = self.up(x)
        return self.down(h.tanh() if other.any() else h.softmax(-1))


class Writes(Reads):
    """Writes to its argument, and reads before and after it."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = self.mlp(x) if mask[:, 0].all() else x
        mask[:, 0] = False
        return self.second(y) if mask.any() else y


def _compare_calls(group: Any, model: nn.Module, example: tuple[Any, ...], calls: list[tuple[Any, ...]]) -> None:
    plan = auto.plan(model, (_x(0), *copy.deepcopy(example)), 2)
    assert "up.weight" in plan.shardings
    sharded = auto.apply(plan, copy.deepcopy(model), group)
    for call in calls:
        given = [copy.deepcopy(call) for _ in range(2)]
        is_one = isinstance(model, WritesToOne) and call[0] is call[1]
        if call[0].any() != call[-1].any() or is_one:  # with which the shards do not serve
            with pytest.raises(RuntimeError, match=r"no call with these numbers of .*: plan with one"):
                sharded(_x(1), *call)
            continue
        outputs = [each(_x(1), *args) for each, args in zip((model, sharded), given, strict=True)]
        torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-12, atol=1e-12)
        for wanted, got in zip(*given, strict=True):
            torch.testing.assert_close(got, wanted)


FIRST = torch.tensor([[1, 0, 0, 0, 0]] * 3).bool()
CALLS: dict[str, tuple[type[Reads], tuple[Any, ...], list[tuple[Any, ...]]]] = {
    "one mask as two": (TwoMasks, (MASK, MASK), [(MASK, MASK), (MASK, OTHER_MASK), (NONE, NONE), (MASK, NONE)]),
    "two masks as one": (TwoMasks, (MASK, OTHER_MASK), [(MASK, MASK), (NONE, NONE), (MASK, NONE)]),
    "two that may be one": (WritesToOne, (MASK, OTHER_MASK), [(MASK, OTHER_MASK), (MASK, MASK), (MASK, OTHER_MASK)]),
    "writes": (Writes, (MASK,), [(MASK,), (FIRST,), (NONE,), (OTHER_MASK,), (MASK,)]),
}


@pytest.mark.parametrize("kind", CALLS)
def test_arguments_that_are_one_tensor_or_that_code_writes_to(kind: str):
    torch.manual_seed(0)
    run(_compare_calls, 2, CALLS[kind][0]("").double(), *CALLS[kind][1:])


def divided(model: Reads, x: Tensor, mask: Tensor) -> Tensor:
    h = model.up(x)
    return model.down(h / h.shape[-1] if mask.any() else h)  # on a rank by another number


def test_the_proof_runs_the_code_that_the_values_lead_to(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(MEMBERS, "divided", (divided, MASK, []))
    mask = torch.zeros(2, 40).bool()
    mask[:, -1] = True  # among the first tokens, which the proof takes of other examples, there is none
    plan = auto.plan(Reads("divided"), (torch.randn(2, 40, WIDTH), mask), 2)
    assert "values differ when it is sharded" in plan.why("up.weight")
