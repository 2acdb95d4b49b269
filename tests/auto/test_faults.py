"""Faults put into plans and rules: the proof of shapes, the check of the flow or ``verify`` catches each of them."""

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import tp_ext
from tests.auto.architectures import build
from tests.auto.compare import loss_or_squares
from tests.auto.test_planner import Model
from tests.helpers.one_plan import run
from tp_ext import Part, Sharding, auto
from tp_ext.auto.record import rules
from tp_ext.auto.record.edits import Conversion
from tp_ext.auto.record.rules import OperatorCall, Rule
from tp_ext.auto.search.plans import Plan
from tp_ext.conversions import I, P, R, S


def _model(name: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    if name == "own":
        ids = torch.randint(96, (3, 5))
        return Model().double(), {"ids": ids, "labels": ids.roll(1)}
    model, inputs = build(name)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return model.double(), inputs


def _patches(plan: Plan, model: nn.Module) -> Iterator[tuple[str, Plan]]:
    """Each integer forgotten, and each wrong by one, in all modules of a kind."""
    seen = set()
    for module, changes in plan.patches.items():
        for attribute, (old, new) in changes.items():
            kind = type(model.get_submodule(module)), attribute
            if kind in seen:
                continue
            seen.add(kind)
            for wrong in (old, new + 1):
                patches = copy.deepcopy(plan.patches)
                for other in patches:
                    if type(model.get_submodule(other)) is kind[0] and attribute in patches[other]:
                        patches[other][attribute] = old, wrong
                yield f"{kind} is {wrong}", dataclasses.replace(plan, patches=patches)


def _edits(plan: Plan, model: nn.Module) -> Iterator[tuple[str, Plan]]:
    """Each kind of copy, sum and slice forgotten, or in a place where it is wrong."""
    seen = set()
    for i, edit in enumerate([*plan.copies, *plan.sums, *plan.slices]):
        kind = edit.types, edit.at, edit.module.rpartition(".")[2]
        if kind in seen:
            continue
        seen.add(kind)
        left = [other for other in plan.conversions if other is not edit]
        yield f"{i}: no {edit}", dataclasses.replace(plan, conversions=left)
        if edit.at == "output" and edit.before is I:
            twice = [*plan.conversions, dataclasses.replace(edit, span=(-1, 0, 7))]
            yield f"{i}: {edit} once more for some", dataclasses.replace(plan, conversions=twice)
        if edit.at == "parameter":
            flipped = [*left, dataclasses.replace(edit, after=R if edit.after is P else P)]
            yield f"{i}: {edit} divided or not", dataclasses.replace(plan, conversions=flipped)
    again = Conversion(next(iter(plan.roles)).rpartition(".")[0], "output", (), P, I)
    yield "a sum of what is complete", dataclasses.replace(plan, conversions=[*plan.conversions, again])


def _shardings(plan: Plan, model: nn.Module) -> Iterator[tuple[str, Plan]]:
    """Shards of the same length with other elements: only numbers differ."""
    for name, sharding in plan.shardings.items():
        if len(sharding.parts) > 1:
            one = Sharding(sharding.dim, [Part(sharding.size, unit=sharding.parts[0].unit)])
            yield f"{name} in one part", dataclasses.replace(plan, shardings={**plan.shardings, name: one})
            return
        if sharding.parts[0].unit > 1 and sharding.dim == 1:
            half = Sharding(1, [Part(sharding.size // 2), Part(sharding.size // 2)])
            yield f"{name} in two parts", dataclasses.replace(plan, shardings={**plan.shardings, name: half})
            return


def _tokens(plan: Plan, model: nn.Module) -> Iterator[tuple[str, Plan]]:
    """Each kind of boundary of sharded tokens forgotten, along another dim, or of the conjugate kind; and gradients of
    parameters used on shards that are not summed, or always."""
    seen = set()
    for edit in plan.tokens:
        if edit.types == (S, S) or edit.types in seen:
            continue
        seen.add(edit.types)
        other = (S, R) if edit.types == (S, I) else (S, I)
        for text, put in (
            ("no", []),
            ("another dim in", [dataclasses.replace(edit, dim=0)]),
            ("the other kind of", [dataclasses.replace(edit, before=other[0], after=other[1])]),
        ):
            i = plan.conversions.index(edit)
            edits = [*plan.conversions[:i], *put, *plan.conversions[i + 1 :]]
            yield f"{text} {edit}", dataclasses.replace(plan, conversions=edits)
    copies = [edit for edit in plan.copies if edit.tokens]
    left = [edit for edit in plan.conversions if edit is not copies[0]]
    yield f"no {copies[0]}", dataclasses.replace(plan, conversions=left)


def _mean_without_pin(op: OperatorCall) -> None:
    op.give([*op.dims()[:-1], []])


# A model and a wrong rule, with which a dim would be sharded over which the operator sums
WRONG_RULES: dict[str, tuple[str, str, Rule]] = {
    "mean of squares": ("llama", "mean", _mean_without_pin),
    "mean of squares, norms of q and k": ("qwen3", "mean", _mean_without_pin),
}


def _is_right(model: nn.Module, sharded: nn.Module, inputs: Any, rank: int) -> bool:
    """Whether all gradients are those of the unsharded model: the call's proof has seen the fault, and keeps all tokens
    whole."""
    for one in (copy_of_model := copy.deepcopy(model), sharded):
        one.zero_grad()
        loss_or_squares(one(**inputs)).backward()
    shards = dict(tp_ext.shardings(sharded))
    wanted = dict(copy_of_model.named_parameters())
    for key, parameter in sharded.named_parameters():
        want, sharding = wanted[key].grad, shards[key]
        want = want if sharding is None else sharding.shard(want, rank, 2)
        if not torch.allclose(parameter.grad, want, rtol=1e-6, atol=1e-6 * wanted[key].grad.abs().max().item()):
            return False
    return True


def _tampered(group: Any, name: str, kind: str) -> list[tuple[str, str]]:
    """The faults of a kind that trained, with wrong gradients: there must be none; and their number."""
    model, inputs = _model(name)
    plan = auto.plan(model, inputs, 2, sequence_parallel=kind == "tokens")
    kinds = {"patches": _patches, "edits": _edits, "shardings": _shardings, "tokens": _tokens}
    faults = list(kinds[kind](plan, model))
    trained = []
    for fault, wrong in faults:
        assert wrong.fingerprint != plan.fingerprint
        try:
            sharded = auto.apply(wrong, copy.deepcopy(model), group, verify=True, example=inputs)
        except (ValueError, RuntimeError, AttributeError, IndexError, TypeError):
            continue
        if kind != "tokens" or not _is_right(model, sharded, inputs, group.rank()):
            trained.append((fault, "trained"))
    return [*trained, (str(len(faults)), "faults")]


@pytest.mark.parametrize(
    ("name", "kind", "number"),
    [
        ("own", "patches", 4), ("bloom", "patches", 2), ("falcon-new", "patches", 4), ("own", "edits", 6),
        ("bloom", "edits", 8), ("qwen3", "edits", 10), ("own", "shardings", 1), ("phi3", "shardings", 1),
        ("llama", "tokens", 10),
        *(
            pytest.param(*row, marks=pytest.mark.exhaustive)
            for row in (
                ("gpt2", "patches", 2), ("t5", "patches", 2), ("bigcode-mha", "patches", 2), ("gpt2", "edits", 6),
                ("gpt_bigcode", "edits", 4), ("t5", "edits", 5), ("gpt2", "tokens", 13),
            )
        ),
    ],
)  # fmt: skip
def test_faults_in_plans_are_caught(name: str, kind: str, number: int) -> None:
    *trained, (count, _) = run(_tampered, 2, name, kind, timeout=300)[0]
    assert not trained
    assert int(count) == number


def _with_wrong_rule(group: Any, fault: str) -> str:
    name, operator, wrong = WRONG_RULES[fault]
    model, inputs = _model(name)
    right = rules.RULES.get(operator)
    rules.RULES[operator] = wrong
    try:
        proven = auto.plan(model, inputs, 2)  # by values, which leaves whole what is wrong
        reasons = [why for why in proven.whole.values() if why.startswith("values differ")]
        plan = auto.plan(model, inputs, 2, prove="shapes")
        auto.apply(plan, model, group, verify=True, example=inputs)
    except (ValueError, RuntimeError) as error:
        return f"caught: {error}" if reasons else "not caught by values"
    finally:
        if right is None:
            del rules.RULES[operator]
        else:
            rules.RULES[operator] = right
    return "trains"


@pytest.mark.parametrize("fault", WRONG_RULES)
def test_wrong_rules_are_caught(fault: str) -> None:
    outcome = run(_with_wrong_rule, 2, fault, timeout=300)[0]
    assert outcome.startswith("caught: verify"), outcome
