"""Errors of a plan and of a run: the same on all ranks, and before anything has changed."""

import re

import pytest
import torch
from torch import nn

import tp_ext
from tests.helpers import simulated


def _linear(group, size=6, **options):
    return tp_ext.ColumnParallelLinear(4, size, group=group, **options)


def _tied(group, same=True):
    """A fused linear of 2 and 4 features, an embedding and a head, tied or not."""
    model = nn.Module()
    model.fused = tp_ext.ColumnParallelLinear(4, 6, parts=(2, 4), bias=False, group=group)
    model.embedding = nn.Embedding(5, 4)
    model.head = nn.Linear(4, 5, bias=False)
    if same:
        model.head.weight = model.embedding.weight
    return model


def _sgd(module, **options):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, **options)
    for param in module.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    return optimizer


def _adam(module):
    return torch.optim.Adam(module.parameters())


def _share(group):
    model, other = _linear(group), _linear(group)
    other.bias = model.bias
    return tp_ext.refit.plan(model, other)


def _number(group):
    model = _linear(group)
    optimizer = _sgd(model)
    optimizer.state[model.weight]["count"] = 3
    return tp_ext.refit.plan(model, _linear(group), optimizers=(optimizer, _sgd(_linear(group))))


def _expanded(group):
    model, other = nn.Module(), nn.Module()
    model.register_buffer("x", torch.zeros(3, 4))
    other.register_buffer("x", torch.zeros(4).expand(3, 4))
    return tp_ext.refit.plan(model, other)


def _one_rank(group):
    """One rank of two takes part: the other half of the source is nowhere."""
    source = _linear(group)
    alone = torch.distributed.new_group([0])
    return tp_ext.refit.plan(source, _linear(None), process_group=alone) if group.rank() == 0 else _lacks(alone)


def _lacks(_):
    raise ValueError("source: 'weight' must be held as a whole by the ranks, which lack 12 of 24 elements")


def _differ(group):
    return tp_ext.refit.plan(_linear(group), _linear(group), bucket_bytes=1 << (20 + group.rank()))


WRONG = {
    "both None": (lambda g: tp_ext.refit.plan(None, None), "source: None on all ranks"),
    "no target": (lambda g: tp_ext.refit.plan(_linear(g), None), "target: None on all ranks"),
    "no source entry": (
        lambda g: tp_ext.refit.plan(_linear(g, bias=False), _linear(g)),
        "source: must have an entry 'bias', for 'bias' of the target",
    ),
    "shape": (
        lambda g: tp_ext.refit.plan(_linear(g), _linear(None, 8)),
        r"source: \(6, 4\) of \['weight'\] must make up the shape \(8, 4\) of 'weight' of the target",
    ),
    "name": (
        lambda g: tp_ext.refit.plan(_linear(g), _linear(g), names={"wieght": "weight"}),
        "names: 'wieght' must be an entry of the target",
    ),
    "source name": (
        lambda g: tp_ext.refit.plan(_linear(g), _linear(g), names={"bias": "other"}),
        "source: must have an entry 'other', for 'bias' of the target",
    ),
    "part": (
        lambda g: tp_ext.refit.plan(_tied(g), _tied(g), names={"fused.weight": ("fused.weight", 2)}),
        "names: part 2 of 'fused.weight' must be one of its 2 parts",
    ),
    "no parts": (
        lambda g: tp_ext.refit.plan(_tied(g), _tied(g), names={"head.weight": ("head.weight", 0)}),
        "names: part 0 of 'head.weight' must be one of its 1 parts",
    ),
    "concatenated": (
        lambda g: tp_ext.refit.plan(_tied(g), _tied(g), names={"fused.weight": ["embedding.weight", "head.weight"]}),
        r"source: \(5, 4\) and \(5, 4\) of .* must make up the shape \(6, 4\) of 'fused.weight'",
    ),
    "shared memory": (_share, "target: 'bias' shares memory with 'bias' of the source, and must not"),
    "meta": (
        lambda g: tp_ext.refit.plan(_linear(g, device="meta"), _linear(g)),
        "module: 'weight' is on the meta device",
    ),
    "expanded": (_expanded, "module: 'x' is expanded and must have memory for each element"),
    "state is a number": (_number, "optimizer: state 'count' of 'weight', 3, must be a tensor"),
    "classes": (
        lambda g: tp_ext.refit.plan(a := _linear(g), b := _linear(g), optimizers=(_sgd(a), _adam(b))),
        "optimizers: that of the target, Adam, must be of the class of that of the source, SGD",
    ),
    "no source optimizer": (
        lambda g: tp_ext.refit.plan(_linear(g), b := _linear(g), optimizers=(None, _adam(b))),
        "optimizers: that of the source is None on all ranks",
    ),
    "lacking ranks": (_one_rank, "source: 'weight' must be held as a whole by the ranks.* which lack 12 of 24"),
    "arguments": (_differ, "refit.plan: its arguments must be the same on all ranks, and are .*bucket_bytes=1048576"),
}


def _raised(group, name):
    try:
        WRONG[name][0](group)
    except ValueError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("name", WRONG)
def test_plan_refuses(name):
    messages = simulated.run(_raised, 2, name)
    assert all(re.search(WRONG[name][1], message) for message in messages), messages
    assert name == "lacking ranks" or len(set(messages)) == 1


def _replace(model, optimizer):
    model.weight = nn.Parameter(model.weight.detach().clone())


def _convert(model, optimizer):
    model.double()


def _new_state(model, optimizer):
    optimizer.state[model.weight]["more"] = torch.ones(())


def _leave(model, optimizer):
    optimizer.state.clear()


CHANGES = {
    "replaced": (_replace, "'weight' must be the parameter for which the plan was made, and was replaced"),
    "converted": (_convert, "'bias' must be as it was when the plan was made: make a new plan"),
    "more state": (_new_state, "'weight.more' must be as it was"),
    "no state": (_leave, "'bias.momentum_buffer' must be as it was"),
}


def _changed(group, name, side, atomic, states):
    models = _linear(group), _linear(None)
    optimizers = (_sgd(models[0]), _sgd(models[1])) if states else (None, None)
    plan = tp_ext.refit.plan(*models, optimizers=optimizers, atomic=atomic)
    plan.run()
    if group.rank() == 1:  # of one rank, and all raise
        CHANGES[name][0](models[side], optimizers[side])
    with torch.no_grad():
        models[0].bias += 1
    before = [p.clone() for p in models[1].parameters()]
    try:
        plan.run()
    except ValueError as error:
        assert all(torch.equal(a, b) for a, b in zip(before, models[1].parameters(), strict=True))
        return str(error)
    return "nothing"


@pytest.mark.parametrize("atomic", [True, False])
@pytest.mark.parametrize(
    ("name", "side", "states"),
    [
        *((name, side, states) for name, side in (("replaced", 0), ("replaced", 1)) for states in (True, False)),
        ("converted", 0, True),
        ("converted", 1, False),
        ("more state", 0, True),
        ("no state", 0, True),
    ],
)
def test_run_refuses_what_has_changed(name, side, states, atomic):
    messages = simulated.run(_changed, 2, name, side, atomic, states)
    assert len(set(messages)) == 1
    assert messages[0].startswith(("source: ", "target: ")[side] + CHANGES[name][1])


def _unequal(group):
    models = _tied(group), _tied(None)
    with torch.no_grad():
        models[0].embedding.weight.fill_(1 + (group.rank() == 2))
    plan = tp_ext.refit.plan(*models)
    try:
        plan.run(check=True)
    except ValueError as error:
        return str(error)
    return "nothing"


def test_check_compares_copies():
    """It names the parameter and the ranks; without it copies are taken to be equal."""
    messages = simulated.run(_unequal, 4)
    assert len(set(messages)) == 1
    assert re.search(r"'embedding.weight' must be equal .* differs between ranks \[0, 1, 3\] and \[2\]", messages[0])
