"""Optimizers of torch on shards: every implementation, inside backward, over microbatches. The model is a GPT with tied
embedding, copied key and value heads and, where not said otherwise, dropout; fp64, so that p = 1 is met to rounding."""

import pytest
import torch

import tp_ext
from tests.helpers import ranks
from tests.helpers.makers import SEQ, VOCAB, build, gpt
from tests.helpers.on_ranks import on_ranks

pytestmark = pytest.mark.core

BOTH = pytest.mark.parametrize("sp", [False, True], ids=["", "sp"])
IMPLEMENTATIONS = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
OPTIMIZERS = {
    "AdamW": lambda params, **how: torch.optim.AdamW(params, 1e-2, amsgrad=True, **how),
    "Adam": lambda params, **how: torch.optim.Adam(params, 1e-2, weight_decay=0.1, **how),
    "SGD": lambda params, **how: torch.optim.SGD(params, 0.1, momentum=0.9, nesterov=True, **how),
    "Adagrad": lambda params, **how: torch.optim.Adagrad(params, 1e-2, **how),
}


def _batch(step, batch=2):
    generator = torch.Generator().manual_seed(100 + step)
    return (torch.randint(VOCAB, (batch, SEQ), generator=generator) for _ in range(2))


def _trained(group, sp, name, how, steps=3):
    """The full state of model and optimizer, and what each rank holds of what is replicated."""
    model = build("gpt", group, sp)
    optimizer = OPTIMIZERS[name](model.parameters(), **how)
    for step in range(steps):
        optimizer.zero_grad()
        torch.manual_seed(step)
        model.loss(*_batch(step)).backward()
        optimizer.step()
    table = dict(tp_ext.shardings(model))
    replicated = {key: q for key, q in model.named_parameters() if table[key] is None}
    states = tp_ext.full_optimizer_state_dict(model, optimizer)["state"]
    return tp_ext.full_state_dict(model), states, replicated


@pytest.mark.thinned(1)
@pytest.mark.parametrize(("p", "sp"), [(2, True), (4, False)], ids=["2-sp", "4"])
@pytest.mark.parametrize("how", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_implementation_trains_as_on_one_process(name, how, p, sp):
    want, want_states, _ = _trained(None, False, name, IMPLEMENTATIONS[how])
    results = ranks.run(_trained, p, sp, name, IMPLEMENTATIONS[how])
    for state, states, replicated in results:
        torch.testing.assert_close(state, want, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(states, want_states, rtol=1e-9, atol=1e-9)
        assert replicated and all(torch.equal(value, results[0][2][key]) for key, value in replicated.items())


@pytest.mark.thinned(1)
@BOTH
@pytest.mark.parametrize("p", [2, 4])
@on_ranks(backend="gloo")
def test_optimizer_in_backward(group, sp):
    """Each parameter is stepped and its gradient freed as soon as it is there (torch's tutorial of that name)."""
    plain, model = build("gpt", group, sp), build("gpt", group, sp)
    whole = torch.optim.SGD(plain.parameters(), 0.1, momentum=0.9)
    own = {q: torch.optim.SGD([q], 0.1, momentum=0.9) for q in model.parameters()}

    def step_and_free(param):
        own[param].step()
        own[param].zero_grad()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step_and_free)
    for step in range(3):
        whole.zero_grad()
        torch.manual_seed(step)
        plain.loss(*_batch(step)).backward()
        whole.step()
        torch.manual_seed(step)
        model.loss(*_batch(step)).backward()
        assert all(q.grad is None for q in model.parameters())
    for (key, a), b in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b), key


@pytest.mark.thinned(1)
@BOTH
@pytest.mark.parametrize("p", [1, 2, 4])
@on_ranks()
def test_microbatches_add_up_to_the_batch(group, sp):
    """Four microbatches, their losses divided by four, against all rows at once; nothing is dropped here."""
    torch.manual_seed(11)
    model = gpt(group, sp, dropout=0.0).double()
    ids, target = _batch(0, 8)
    model.loss(ids, target).backward()
    want = [q.grad.clone() for q in model.parameters()]
    for set_to_none in (True, False):
        model.zero_grad(set_to_none=set_to_none)
        for one_ids, one_target in zip(ids.chunk(4), target.chunk(4), strict=True):
            (model.loss(one_ids, one_target) / 4).backward()
        for (key, param), grad in zip(model.named_parameters(), want, strict=True):
            torch.testing.assert_close(param.grad, grad, rtol=1e-12, atol=1e-14, msg=lambda m, k=key: f"{k}: {m}")


def _groups(group, sp):
    """Parameter groups with rates of their own, a schedule, and a group added while training."""
    model = build("gpt", group, sp)
    decay, rest, later = [], [], []
    for key, param in model.named_parameters():
        (later if key.startswith("blocks.1") else decay if param.dim() > 1 else rest).append(param)
    [q.requires_grad_(False) for q in later]
    optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "lr": 1e-3}], 1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    for step in range(4):
        if step == 2:
            [q.requires_grad_(True) for q in later]
            optimizer.add_param_group({"params": later, "lr": 5e-3})
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
        optimizer.zero_grad()
        torch.manual_seed(step)
        model.loss(*_batch(step)).backward()
        tp_ext.clip_grad_norm_(model, 0.5)
        optimizer.step()
        schedule.step()
    return tp_ext.full_state_dict(model)


@pytest.mark.thinned(1)
@BOTH
@pytest.mark.parametrize("p", [2, 4])
def test_parameter_groups_schedules_and_layers_unfrozen_later(p, sp):
    want = _groups(None, False)
    for got in ranks.run(_groups, p, sp):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
