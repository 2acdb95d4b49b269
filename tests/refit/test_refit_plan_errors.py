"""Errors of a plan and of a run: the same on all ranks, and before anything has changed."""

import re

import pytest
import torch
from torch import nn

import tp_ext
from tests.helpers import simulated
from tests.helpers.on_ranks import on_ranks


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


def _trained(module, optimizer, steps=1):
    for _ in range(steps):
        for param in module.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
    return optimizer


def _states(kind, options_of_source, options, steps=(1, 0)):
    """A plan between optimizers of one class, with other options, that have had some steps."""

    def planned(group):
        models = _linear(group), _linear(None)
        optimizers = [
            _trained(model, kind(model.parameters(), **given), number)
            for model, given, number in zip(models, (options_of_source, options), steps, strict=True)
        ]
        return tp_ext.refit.plan(*models, optimizers=optimizers)

    return planned


def _muon(group, swapped):
    models = _linear(group), _linear(None)
    pairs = [(model.weight, model.bias) for model in models]
    first = tp_ext.optim.Muon([pairs[0][0]], adamw_params=[pairs[0][1]], lr=0.1)
    weight, bias = pairs[1]
    second = tp_ext.optim.Muon([] if swapped else [weight], adamw_params=[weight, bias] if swapped else [bias], lr=0.1)
    return tp_ext.refit.plan(*models, optimizers=(_trained(models[0], first), second))


def _trained_elsewhere(group):
    """The source's optimizer does not hold a parameter whose state the target's has."""
    models = _linear(group), _linear(None)
    first = _trained(models[0], torch.optim.Adam([models[0].weight]))
    return tp_ext.refit.plan(*models, optimizers=(first, _trained(models[1], _adam(models[1]))))


def _parts_with_and_without(group):
    source, target = nn.ModuleDict({name: nn.Linear(4, 3, bias=False) for name in "qk"}), nn.Module()
    target.fused = tp_ext.ColumnParallelLinear(4, 6, parts=(3, 3), bias=False, group=group)
    first = _adam(source)
    source["k"].weight.grad = torch.ones(3, 4)
    first.step()
    names = {"fused.weight": ["q.weight", "k.weight"]}
    return tp_ext.refit.plan(source, target, names=names, optimizers=(first, _adam(target)))


def _of_kinds(group, of_source, of_target):
    models = nn.Module(), nn.Module()
    for model, dtype in zip(models, (of_source, of_target), strict=True):
        model.register_buffer("x", torch.zeros(3, dtype=dtype))
    return tp_ext.refit.plan(*models)


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
        "optimizers: the target's, Adam, must be of the class of the source's, SGD",
    ),
    "no source optimizer": (
        lambda g: tp_ext.refit.plan(_linear(g), b := _linear(g), optimizers=(None, _adam(b))),
        "optimizers: the source's is None on all ranks",
    ),
    "states of the target alone": (
        _states(torch.optim.AdamW, {}, {"amsgrad": True}, (1, 1)),
        "optimizers: the source's must have the state 'max_exp_avg_sq' of 'weight', since the target's has it",
    ),
    "amsgrad, without state": (
        _states(torch.optim.Adam, {}, {"amsgrad": True}),
        "optimizers: 'amsgrad' of 'weight' must be set in the source's as in the target's",
    ),
    "centered": (_states(torch.optim.RMSprop, {}, {"centered": True}), "optimizers: 'centered' of 'weight'"),
    "momentum": (_states(torch.optim.RMSprop, {}, {"momentum": 0.9}), "optimizers: 'momentum' of 'weight'"),
    "more by momentum": (
        _states(torch.optim.RMSprop, {}, {"momentum": 0.9}, (1, 1)),
        "must have the state 'momentum_buffer' of 'weight'",
    ),
    "groups of Muon": (lambda g: _muon(g, True), "optimizers: 'use_muon' of 'weight' must be the same"),
    "not in the source's": (_trained_elsewhere, "must have the state 'exp_avg' of 'bias', since the target's has it"),
    "parts without state": (
        _parts_with_and_without,
        r"optimizers: states of 'k.weight', .* must be those of 'q.weight'",
    ),
    "numbers and codes": (
        lambda g: _of_kinds(g, torch.int8, torch.bfloat16),
        "source: 'x' is of torch.int8 and must be of floating point as 'x' of the target, of torch.bfloat16",
    ),
    "mask and numbers": (lambda g: _of_kinds(g, torch.float32, torch.bool), "source: 'x' is of torch.float32 and must"),
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


def _add(model, optimizer):
    model.more = nn.Parameter(torch.zeros(3))


CHANGES = {
    "added": (_add, "'more' must be as it was when the plan was made: make a new plan"),
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
        ("added", 0, False),
        ("added", 1, False),
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


def _two_that_differ(group):
    model = nn.Module()
    for name in ("first", "second", "third"):
        setattr(model, name, nn.Parameter(torch.zeros(3)))
    if group.rank() == 1:
        with torch.no_grad():
            model.second += 1
            model.third += 1
    try:
        tp_ext.refit.plan(model, nn.ParameterDict({"first": torch.zeros(3)})).run(check=True)
    except ValueError as error:
        return str(error)
    return "nothing"


def test_check_names_all_tensors_that_differ():
    for message in simulated.run(_two_that_differ, 2):
        assert message == (
            "source: 'second' must be equal on the ranks that hold the same elements, and differs between ranks [0] "
            "and [1]; as do 'third'"
        )


def _untied(group, how, rows):
    """An untied source, sharded or not, and a tied target; ``how`` they differ."""
    source = nn.Module()
    source.embedding = tp_ext.VocabParallelEmbedding(6, 4, group=group) if rows else nn.Embedding(6, 4)
    source.head = tp_ext.ColumnParallelLinear(4, 6, bias=False, group=group)
    target = nn.Module()
    target.embedding, target.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
    target.head.weight = target.embedding.weight
    tp_ext.refit.plan(source, target, names={"embedding.weight": "head.weight"}).run(check=True)
    whole = target.head.weight.detach().clone()
    with torch.no_grad():
        for param in source.embedding.parameters():
            param.copy_(whole.chunk(group.size())[group.rank()] if rows and group.size() > 1 else whole)
    optimizers = None
    if how == "a value":
        with torch.no_grad():
            source.head.weight[-1, -1] += 1
    if how in ("a state", "equal states"):
        optimizers = [_trained(model, torch.optim.Adam(model.parameters())) for model in (source, target)]
        if how == "a state" and group.rank() == 0:
            optimizers[0].state[source.head.weight]["exp_avg"][0, 0] += 1
    plan = tp_ext.refit.plan(source, target, optimizers=optimizers)
    before = target.head.weight.clone()
    plan.run()  # gets the first one's without a check
    with torch.no_grad():
        target.head.weight.copy_(before)
    try:
        plan.run(check=True)
    except ValueError as error:
        assert torch.equal(before, target.head.weight)
        return str(error)
    return ""


@pytest.mark.parametrize("rows", [True, False])
@pytest.mark.parametrize("how", ["a value", "a state", "equal states", "equal"])
@pytest.mark.parametrize("p", [1, 2, 3])
def test_check_compares_what_the_target_ties(p, how, rows):
    key = {"a state": ".exp_avg", "a value": ""}.get(how)
    for message in simulated.run(_untied, p, how, rows):
        if key is None:
            assert message == ""
        else:
            assert message.startswith(
                f"source: 'embedding.weight{key}' and 'head.weight{key}' must be equal, which are one"
            )


SERVED = {
    "momentum alone": (torch.optim.SGD, {"lr": 0.1}, {"lr": 0.1, "momentum": 0.9}, (1, 0)),
    "less": (torch.optim.Adam, {"amsgrad": True}, {}, (1, 1)),
    "no steps": (torch.optim.Adam, {}, {"amsgrad": True}, (0, 0)),
    "begins anew": (torch.optim.Adam, {}, {"amsgrad": True}, (0, 1)),
    "another rate": (torch.optim.AdamW, {"lr": 0.1, "betas": (0.5, 0.6)}, {"lr": 0.3, "maximize": True}, (1, 1)),
}


@pytest.mark.parametrize("case", SERVED)
@on_ranks(2)
def test_a_step_after_a_refit_finds_its_states(group, case):
    kind, of_source, options, steps = SERVED[case]
    models = _linear(group), _linear(None)
    pair = [kind(model.parameters(), **given) for model, given in zip(models, (of_source, options), strict=True)]
    for model, optimizer, number in zip(models, pair, steps, strict=True):
        _trained(model, optimizer, number)
    tp_ext.refit.plan(*models, optimizers=pair).run(check=True)
    _trained(models[1], pair[1])


@on_ranks(2)
def test_run_refuses_options_by_which_there_are_more_states(group):
    models = _linear(group), _linear(None)
    pair = [_trained(model, _adam(model)) for model in models]
    plan = tp_ext.refit.plan(*models, optimizers=pair)
    pair[1].param_groups[0]["amsgrad"] = group.rank() == 1
    with pytest.raises(ValueError) as error:
        plan.run()
    assert str(error.value).startswith("optimizers: the options of the target's that add states")
