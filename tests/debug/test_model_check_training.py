"""tp_ext.debug.check finds NaN, gradients summed by hand and differing options, and raises no false alarm."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tp_ext
from tests.helpers.meshes import mesh_of
from tests.helpers.on_ranks import on_ranks
from tests.helpers.ranks import run_raises
from tp_ext import debug

pytestmark = pytest.mark.core


def _model(group):
    return nn.Sequential(
        tp_ext.VocabParallelEmbedding(12, 8, group=group),
        tp_ext.ParallelMLP(8, 12, group=group),
        tp_ext.ColumnParallelLinear(8, 12, group=group, gather_output=True),
    )


def _trained(group, defect, rank):
    model = _model(group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.tensor([0, 4, 8, 1])).square().sum().backward()
    debug.check(model, group=group, optimizer=optimizer)
    with torch.no_grad():
        DEFECTS[defect][0](model, optimizer, group.rank() == rank, group)
    debug.check(model, group=group, optimizer=optimizer)


def _nan(model, optimizer, here, group):
    if here:
        model[1].up.weight[1, 2] = float("nan")
        model[1].down.weight[0, 1] = float("inf")


def _nan_of_all(model, optimizer, here, group):
    model[1].down.bias.fill_(float("nan"))


def _infinite_gradient(model, optimizer, here, group):
    if here:
        model[1].up.weight.grad[2, 3] = -float("inf")


def _sum_by_hand(model, optimizer, here, group):
    for param in model.parameters():
        dist.all_reduce(param.grad, group=group)


def _sum_and_step(model, optimizer, here, group):
    _sum_by_hand(model, optimizer, here, group)
    optimizer.step()


def _main_gradients(model):
    for param in model.parameters():
        param.main_grad = param.grad.double()


def _nan_in_main_grad(model, optimizer, here, group):
    _main_gradients(model)
    if here:
        model[1].up.weight.main_grad[2, 3] = float("nan")


def _sum_of_main_grad(model, optimizer, here, group):
    _main_gradients(model)
    for param in model.parameters():
        dist.all_reduce(param.main_grad, group=group)


def _main_grad_drifts(model, optimizer, here, group):
    _main_gradients(model)
    if here:
        model[1].down.bias.main_grad[3] = 9.0


def _fewer_parameters(model, optimizer, here, group):
    if here:
        optimizer.param_groups[0]["params"].pop()


def _other_rate(model, optimizer, here, group):
    if here:
        optimizer.param_groups[0].update(lr=1e-4, betas=(0.9, torch.tensor(0.5)))


DEFECTS = {
    "nan": (
        _nan,
        r"1 findings\n- on ranks \[1\]: 1.up.weight: first at index \(1, 2\): nan must be finite \(1 such elements\); "
        "1 more parameters",
    ),
    "nan of all": (_nan_of_all, r"1 findings\n- 1.down.bias: first at index \(0,\): nan must be finite \(8 such"),
    "infinite gradient": (_infinite_gradient, r"on ranks \[1\]: 1.up.weight.grad: first at index \(2, 3\): -inf must"),
    "sum by hand": (
        _sum_by_hand,
        r"6 findings\n- 0.weight.grad: ranks 0 and 1 hold the same bits and .* slices; something summed it over ranks",
    ),
    "sum by hand, later": (_sum_and_step, r"1.up.weight.grad: ranks 0 and 1 hold the same bits and should hold differ"),
    "nan in main_grad": (
        _nan_in_main_grad,
        r"1 findings\n- on ranks \[1\]: 1.up.weight.main_grad: .* \(2, 3\): nan must",
    ),
    "sum of main_grad": (
        _sum_of_main_grad,
        r"6 findings\n- 0.weight.main_grad: ranks 0 and 1 hold the same bits and .* slices; something summed it over",
    ),
    "main_grad drifts": (_main_grad_drifts, r"1 findings\n- 1.down.bias.main_grad: .*ranks \[1\] differ .* 9.0, not"),
    "fewer parameters": (_fewer_parameters, r"params of the optimizer's parameter group 0: 7 on .*\[0\], 6 on .*\[1\]"),
    "rate": (
        _other_rate,
        r"2 findings\n- lr of the optimizer's parameter group 0: 0.001 on ranks \[0\], 0.0001 on ranks \[1\]\n"
        r"- betas .*: \(0.9, 0.999\) on ranks \[0\], \(0.9, 0.5\) on ranks \[1\]",
    ),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_check_finds(defect):
    messages = run_raises(_trained, 2, RuntimeError, DEFECTS[defect][1], defect, 1, in_turns=False)
    assert len(set(messages)) == 1, "not the same on all ranks"


@on_ranks(2)
def test_equal_gradients_of_a_right_program_are_no_finding(group):
    """Programs that are right, with gradients that are alike: of sums, of equal weights, of rows that are not used."""
    found = []
    for last in (False, True):
        model = _model(group)[: 3 if last else 1]
        model(torch.tensor([0, 6])).sum().backward()
        found += debug.findings(model, group=group)
    model = tp_ext.ColumnParallelLinear(4, 8, group=group)
    for param in model.parameters():
        nn.init.constant_(param, 0.5)
    sparse = nn.Sequential(nn.Embedding(5, 8, sparse=True), tp_ext.ParallelMLP(8, 12, group=group))
    sparse(torch.tensor([1, 2, 1])).square().sum().backward()
    found += debug.findings(sparse, group=group)
    model(torch.arange(12.0).view(3, 4)).square().sum().backward()
    assert found + debug.findings(model, group=group) == []


@on_ranks(2)
def test_experts_alone_are_sharded(group):
    """No layer has a tensor-parallel group."""
    model = tp_ext.ParallelMoE(4, 6, 4, 2, expert_group=group, group=None)
    assert debug.findings(model) == []


def _over_data(group, what):
    mesh = mesh_of(2, 1, names=("dp", "tp"))
    model = nn.Linear(3, 4) if what == "nan alone" else _model(mesh["tp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 if what != "rate" else 0.1 + group.rank())
    if what == "nan alone" and group.rank() == 1:
        model.weight.data[2, 1] = float("nan")
    debug.check(model, mesh=mesh, optimizer=optimizer)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("rate", r"over the ranks \[0, 1\]: lr of the optimizer's parameter group 0: 0.1 on ranks \[0\], 1.1 on"),
        ("nan alone", r"on rank 1: weight: first at index \(2, 1\): nan must be finite"),
    ],
)
def test_over_data_axes(what, message):
    run_raises(_over_data, 2, RuntimeError, message, what, in_turns=False)


def test_a_copy_and_dtypes_without_nan():
    model = nn.ParameterList([nn.Parameter(torch.arange(3), requires_grad=False), nn.Parameter(torch.ones(2).cfloat())])
    assert debug.findings(copy.deepcopy(model)) == []
    model[1].data[1] = complex(0, float("inf"))
    assert debug.findings(model) == ["1: first at index (1,): infj must be finite (1 such elements)"]
