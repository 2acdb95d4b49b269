"""Measured shares: they follow the speeds of the ranks, not their waiting, and leave the model as it was."""

import time

import pytest
import torch
from torch import nn

import tp_ext
from tests.helpers import ranks
from tp_ext import planner
from tp_ext.planner import share_times


class _Slow(torch.autograd.Function):
    """Sleeps in forward and in backward, for a time by the shard's features."""

    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        time.sleep(seconds)
        return x * 1

    @staticmethod
    def backward(ctx, dy):
        time.sleep(ctx.seconds)
        return dy, None


class _Model(nn.Module):
    """Two linears whose ranks need `seconds[rank]` for the work of a whole layer, a buffer, and dropout."""

    def __init__(self, group, seconds):
        super().__init__()
        self.up = tp_ext.ColumnParallelLinear(16, 60, group=group, gather_output=False)
        self.down = tp_ext.RowParallelLinear(60, 16, group=group)
        self.norm, self.dropout = nn.BatchNorm1d(16), nn.Dropout(0.5)
        self.seconds = seconds[group.rank()]

    def forward(self, x):
        hidden = self.up(x)
        return self.norm(self.dropout(self.down(_Slow.apply(hidden, self.seconds * hidden.shape[-1] / 60))))


def _measured(group, seconds, weights):
    share_times._SECONDS = 0.3
    with tp_ext.shares(weights):
        model = _Model(group, seconds)
    return planner.measure_shares(model, (torch.randn(4, 16),), group)


@pytest.mark.parametrize("weights", [None, [1, 1], [2, 1], [1, 3]], ids=str)
def test_weights_follow_the_speeds_from_any_shares(weights):
    # What a rank has is a factor of its time: 0.1 s and 0.3 s for a whole layer are speeds of 3 and 1
    first, second = ranks.run(_measured, 2, (0.1, 0.3), weights)
    assert first == second and sum(first) == pytest.approx(1)
    assert first[0] == pytest.approx(0.75, abs=0.05)


def _state_around(group):
    share_times._SECONDS = 0.05
    torch.manual_seed(3)
    model = _Model(group, (0.001, 0.001))
    model.dropout.eval()
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    model.up.weight.main_grad = torch.randn_like(model.up.weight)
    stepped = []
    model.down.weight.register_post_accumulate_grad_hook(stepped.append)

    def state():
        grads = [param.grad.clone() for param in model.parameters()]
        others = [model.up.weight.main_grad, *model.buffers(), torch.get_rng_state()]
        return [tensor.clone() for tensor in (*grads, *others)], [m.training for m in model.modules()]

    x = torch.randn(4, 16)
    before, modes = state()
    planner.measure_shares(model, {"x": x}, group)
    after, modes_after = state()
    assert modes == modes_after and not stepped
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_the_model_is_left_as_it_was():
    ranks.run(_state_around, 2)


def _refused(group, case):
    share_times._SECONDS = 0.05
    x = (torch.randn(4, 16),)
    linear = {"gather_output": False}
    match case:
        case "zero":
            with tp_ext.shares([1, 0]):
                model = tp_ext.ColumnParallelLinear(16, 60, group=group, **linear)
        case "differing":
            with tp_ext.shares([1, 2]):
                first = tp_ext.ColumnParallelLinear(16, 60, group=group, gather_output=True)
            with tp_ext.shares([2, 1]):
                model = nn.Sequential(first, tp_ext.ColumnParallelLinear(60, 60, group=group, **linear))
        case "alone":
            model = tp_ext.ColumnParallelLinear(16, 60, group=None)
        case "frozen":
            model = tp_ext.ColumnParallelLinear(16, 60, group=group).requires_grad_(False)
        case "one rank":  # whose example alone is wrong
            model = tp_ext.ColumnParallelLinear(16, 60, group=group)
            x = x[0] if group.rank() == 1 else x
    with pytest.raises((ValueError, TypeError)) as error:
        planner.measure_shares(model, x, group)
    return str(error.value)


@pytest.mark.parametrize(
    "case, says",
    [
        ("zero", "shares: [1, 0] must be above 0 to be measured: a rank without work has no time"),
        ("differing", "model: all layers must have the same shares; 0 has [1, 2], 1 has [2, 1]"),
        ("alone", "group: of 2 ranks, must be the group of the model's layers; the model is over one of 1"),
        ("frozen", "model: must have at least one parameter that requires a gradient"),
        ("one rank", "example: Tensor must be a dict of keyword arguments or a tuple of arguments"),
    ],
)
def test_refusals_on_all_ranks(case, says):
    assert ranks.run(_refused, 2, case) == [says, says]


def test_one_rank_has_all():
    assert planner.measure_shares(nn.Linear(2, 2), (torch.ones(1, 2),), None) == [1.0]
    with pytest.raises(TypeError, match=r"model: int must be an nn\.Module"):
        planner.measure_shares(3, (), None)


def test_time_in_a_collective_counts_for_the_rank_that_comes_last():
    # Rank 1 is halted for 4 s in the second collective, in which rank 0, there before it, waits for 10 s
    first = share_times.Pass(20.2, [0.1, 10.1])
    second = share_times.Pass(20.2, [0.1, 4.1])
    assert share_times.own_seconds([[first] * 9, [second] * 8 + [share_times.Pass(16.2, [0.1, 0.1])]]) == pytest.approx(
        [10, 20]
    )
    # Passes in which ranks differ in their collectives count without them
    assert share_times.own_seconds([[first], [share_times.Pass(20.2, [4.1])]]) == pytest.approx([10, 16.1])


def test_few_intervals_with_other_work_do_not_count():
    passes = [[share_times.Pass(1.0 + 5 * (i in (7, 8)), [0.0]) for i in range(18)]]
    assert share_times.own_seconds(passes) == pytest.approx([1.0])
