"""Functions of torch where shards of some ranks are empty, or have no gradient there: all ranks decide alike."""

import copy

import pytest
import torch
from torch import nn, ones

import tp_ext
from tests.helpers import ranks, simulated
from tests.helpers.on_ranks import on_ranks


def _listed(change, only):
    """The norm of a list that a rank has changed or made shorter, and the gradients."""

    def norm(model):
        grads = [change(p) for p in model.parameters() if only(p)]
        return nn.utils.get_total_norm(grads)

    return norm


def _clipped(only):
    def norm(model):
        return nn.utils.clip_grad_norm_([p for p in model.parameters() if only(p)], 1.0)

    return norm


def _in_two_steps(model):
    total = nn.utils.get_total_norm([p.grad.detach() for p in model.parameters()])
    nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, total)
    return total


def _always(p):
    return True


NORMS = {
    "get_total_norm": _listed(lambda p: p.grad, _always),
    "get_total_norm, detached": _listed(lambda p: p.grad.detach(), _always),
    "get_total_norm, data": _listed(lambda p: p.grad.data, _always),
    "get_total_norm, not empty": _listed(lambda p: p.grad, lambda p: p.numel()),
    "get_total_norm, not empty, detached": _listed(lambda p: p.grad.detach(), lambda p: p.numel()),
    "get_total_norm, not None": _listed(lambda p: p.grad, lambda p: p.grad is not None),
    "clip_grad_norm_": _clipped(_always),
    "clip_grad_norm_, not empty": _clipped(lambda p: p.numel()),
    "clip_grad_norm_, not None": _clipped(lambda p: p.grad is not None),
    "in two steps": _in_two_steps,
}


def _norm(group, name, drop):
    model = tp_ext.ColumnParallelLinear(8, 1, group=group, gather_output=True)
    model(ones(2, 8)).sum().backward()
    if drop:
        for param in model.parameters():
            if not param.numel():
                param.grad = None
    return NORMS[name](model).item()


def _drops(name):
    return [False, True] if name.endswith("None") or name == "clip_grad_norm_" else [False]


CASES = [(name, drop) for name in NORMS for drop in _drops(name)]


@pytest.mark.thinned(1)
@pytest.mark.parametrize("p", [2, 3, 4])
@pytest.mark.parametrize(("name", "drop"), CASES)
def test_norms(name, drop, p):
    assert simulated.run(_norm, p, name, drop) == [6.0] * p  # of 8 twos and a bias' two


@pytest.mark.parametrize("name", ["get_total_norm, detached", "clip_grad_norm_, not None"])
def test_norms_of_processes(name):
    assert ranks.run(_norm, 2, name, name.endswith("None")) == [6.0] * 2


@pytest.mark.parametrize("keep", [False, True])
@on_ranks(2, 3, 4)
def test_dense_states_load_on_all_ranks_where_one_has_the_whole(group, keep):
    """A model of which rank 0 has the whole, after a step of the unsharded one; its output and its next step's."""
    dense = nn.Linear(8, 1)
    trained = torch.optim.AdamW(dense.parameters())
    dense(ones(2, 8)).sum().backward()
    trained.step()
    model = tp_ext.ColumnParallelLinear(8, 1, group=group, gather_output=True)
    optimizer = torch.optim.AdamW(model.parameters())
    model.load_state_dict(dense.state_dict())
    optimizer.load_state_dict(copy.deepcopy(trained.state_dict()))
    if keep:  # as a loop keeps the best state
        model.load_state_dict({key: value.clone() for key, value in model.state_dict().items()})
    for module, steps in ((model, optimizer), (dense, trained)):
        module.zero_grad()
        module(ones(2, 8)).sum().backward()
        steps.step()
    assert (model(ones(2, 8)) - dense(ones(2, 8))).abs().max().item() == 0.0


def _dense_optimizer(group):
    dense = nn.Linear(8, 4)
    trained = torch.optim.AdamW(dense.parameters())
    dense(ones(2, 8)).sum().backward()
    trained.step()
    model = tp_ext.ColumnParallelLinear(8, 4, group=group)
    torch.optim.AdamW(model.parameters()).load_state_dict(trained.state_dict())


def test_a_dense_state_of_an_optimizer_is_refused():
    ranks.run_raises(_dense_optimizer, 2, RuntimeError, "state.0.exp_avg.* take tp_ext.load_full_optimizer_state_dict")
