"""Properties that all seven regions share, each against one process (region_maps.py), exactly
where sums of small whole numbers are exact and within rounding elsewhere."""

import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

from tests.helpers import ranks
from tests.helpers.on_ranks import on_ranks
from tests.helpers.region_maps import NAMES, Case, cases, simple_cases

pytestmark = pytest.mark.core

SIZES = (1, 2, 3, 4)


def _all_cases(default):
    """Every case at every p; those for which ``default(p, number, case)`` is not true with --exhaustive only."""
    return [
        pytest.param(p, case, id=f"p{p}-{case}", marks=[] if default(p, number, case) else pytest.mark.exhaustive)
        for p in SIZES
        for number, case in enumerate(cases(p))
    ]


def _is_end(number, case):
    """Returns whether a case is the first or the last of its region: an even and an uneven one if there are two."""
    of_region = [i for i, other in enumerate(cases(3)) if other.name == case.name]
    return number in (of_region[0], of_region[-1])


def _on_devices(cases):
    """On CUDA all of them by default."""
    return [
        *(pytest.param(*case.values, "cpu", id=f"{case.id}-cpu", marks=case.marks) for case in cases),
        *(pytest.param(*case.values, "cuda", id=f"{case.id}-cuda", marks=pytest.mark.cuda) for case in cases),
    ]


# One rank: test_one_rank_and_no_group_communicate_nothing; two: every region evenly, in three other dtypes
EVERY = _all_cases(lambda p, number, case: p > 2)
# Values and gradients are tested at each p, and three ranks share most unevenly
AT_THREE = _all_cases(lambda p, number, case: p == 3)
ENDS_AT_THREE = _all_cases(lambda p, number, case: p == 3 and _is_end(number, case))
FEW = [
    pytest.param(p, case, id=f"p{p}-{case}", marks=[] if p == 2 else pytest.mark.exhaustive)
    for p in (2, 4)
    for case in simple_cases(p)
]
AT_TWO = [pytest.param(case, id=str(case)) for case in simple_cases(2)]


def _grad(y, x, g, **kwargs):
    return torch.autograd.grad(y, x, g, **kwargs)[0]


def _data(case, p, dtype=torch.float64):
    """Inputs, and an upstream gradient per rank."""
    xs = case.inputs(p, dtype)
    return xs, [torch.randint(-4, 5, y.shape).to(dtype) for y in case.emulate(xs)]


def _expected(case, xs, gs):
    leaves = [x.double().requires_grad_() for x in xs]
    ys = case.emulate(leaves)
    return ys, torch.autograd.grad(ys, leaves, [g.double() for g in gs])


# Values and gradients


def _first_order(group, case, xs, gs, device):
    x = xs[group.rank()].to(device).requires_grad_()
    y = case(x, group)
    return y, _grad(y, x, gs[group.rank()].to(device))


@pytest.mark.parametrize(("p", "case", "device"), _on_devices(EVERY), indirect=["device"])
def test_output_and_gradient_are_exact(p, case, device):
    _assert_exact(p, case, torch.float64, device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("p", "case", "device"), _on_devices(FEW), indirect=["device"])
def test_every_dtype_is_kept(p, case, dtype, device):
    _assert_exact(p, case, dtype, device)


def _assert_exact(p, case, dtype=torch.float64, device="cpu"):
    xs, gs = _data(case, p, dtype)
    results = ranks.run(_first_order, p, case, xs, gs, device)
    for got, *want in zip(results, *_expected(case, xs, gs), strict=True):
        for a, b in zip(got, want, strict=True):
            assert a.dtype == dtype
            assert torch.equal(a, b.to(dtype))


def _curve(group, case, xs, ws, us):
    rank = group.rank()
    x, w = xs[rank].requires_grad_(), ws[rank].requires_grad_()
    y = case(x**2 / 8, group)
    dx = _grad((y.sin() * w).sum(), x, None, create_graph=True)
    return dx, *torch.autograd.grad((dx.sin() * us[rank]).sum(), [x, w])


@pytest.mark.parametrize(("p", "case"), ENDS_AT_THREE)
def test_second_order_is_that_of_one_process(p, case):
    xs, ws = _data(case, p)
    us = [torch.randn_like(x) for x in xs]
    got = ranks.run(_curve, p, case, xs, ws, us)
    xs, ws = [x.requires_grad_() for x in xs], [w.requires_grad_() for w in ws]
    ys = case.emulate([x**2 / 8 for x in xs])
    loss = sum((y.sin() * w).sum() for y, w in zip(ys, ws, strict=True))
    dxs = torch.autograd.grad(loss, xs, create_graph=True)
    loss = sum((dx.sin() * u).sum() for dx, u in zip(dxs, us, strict=True))
    second = torch.autograd.grad(loss, [*xs, *ws])
    for rank in range(p):
        want = dxs[rank], second[rank], second[p + rank]
        for a, b in zip(got[rank], want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


class _OwnSlot(torch.autograd.Function):
    """[p, ...] equal on all ranks -> this rank's entry; backward: all entries."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x[group.rank()].clone()

    @staticmethod
    def backward(ctx, g):
        return _AllSlots.apply(g, ctx.group), None


class _AllSlots(torch.autograd.Function):
    """The conjugate of _OwnSlot. Both by torch.distributed alone, so that gradcheck sees one
    function of everyone's input that is the same on every rank, whatever the regions do."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        slots = [x.new_empty(x.shape) for _ in range(group.size())]
        dist.all_gather(slots, x.contiguous(), group=group)
        return torch.stack(slots)

    @staticmethod
    def backward(ctx, g):
        return _OwnSlot.apply(g, ctx.group), None


@pytest.mark.parametrize("p", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", NAMES)
@on_ranks()
def test_gradcheck_of_the_function_that_all_ranks_compute(group, name, p):
    """Replicated inputs are perturbed on all ranks at once, replicated outputs count once."""
    options = {"split_dim": 0, "concat_dim": 1} if name == "all_to_all_region" else {}
    case = Case(name, (p, p), options)
    xs = case.inputs(p)
    replicated_in = case.name in ("copy_to_region", "scatter_to_region")
    replicated_out = case.name in ("reduce_from_region", "gather_from_region")

    def whole(x):
        y = case(x if replicated_in else _OwnSlot.apply(x, group), group)
        return y if replicated_out else _AllSlots.apply(y, group)

    x = (xs[0] if replicated_in else torch.stack(xs)).requires_grad_()
    assert torch.autograd.gradcheck(whole, [x])
    assert torch.autograd.gradgradcheck(lambda x: whole(x**2 / 8), [x])


# Memory


def _strided(t):
    """The values of t, last dim first in memory and every other element unused."""
    t = t.transpose(0, -1) if t.dim() else t
    wide = torch.full((*t.shape, 2), float("nan"), dtype=t.dtype)
    wide[..., 0] = t
    return wide[..., 0].transpose(0, -1) if t.dim() else wide[..., 0]


@pytest.mark.parametrize(("p", "case"), AT_THREE)
@on_ranks(backend="gloo")
def test_any_strides_of_input_and_gradient(group, p, case):
    xs, gs = _data(case, p)
    x = xs[group.rank()].requires_grad_()
    odd = _strided(x.detach()).requires_grad_()
    y, from_odd = case(x, group), case(odd, group)
    g = torch.ones((), dtype=x.dtype).expand(y.shape)
    odd_g = _strided(gs[group.rank()])
    from_ones = _grad(y, x, g.contiguous(), retain_graph=True)
    pairs = (
        (y, from_odd),
        (_grad(y, x, g, retain_graph=True), from_ones),
        (_grad(from_odd.sum(), odd, None, retain_graph=True), from_ones),
        (_grad(from_odd, odd, odd_g), _grad(y, x, gs[group.rank()])),
    )
    for a, b in pairs:
        assert torch.equal(a, b)


@pytest.mark.parametrize(("p", "case"), ENDS_AT_THREE)
@on_ranks()
def test_backward_twice_doubles_and_nothing_is_written_to(group, p, case):
    xs, gs = _data(case, p)
    x, g = xs[group.rank()].requires_grad_(), gs[group.rank()]
    x_before, g_before = x.detach().clone(), g.clone()
    y = case(x, group)
    y_before = y.detach().clone()
    version = x._version, g._version, y._version
    y.backward(g, retain_graph=True)
    once = x.grad.clone()
    y.backward(g)
    assert torch.equal(x.grad, 2 * once)
    assert version == (x._version, g._version, y._version)
    for t, before in ((x, x_before), (g, g_before), (y, y_before)):
        assert torch.equal(t, before)


@pytest.mark.parametrize("case", AT_TWO)
@on_ranks(2)
def test_output_is_memory_of_its_own(group, case):
    xs, _ = _data(case, 2)
    x = xs[group.rank()]
    before = x.clone()
    y = case(x, group)
    if case.name != "copy_to_region":  # the identity is a view
        y += 1
        assert torch.equal(x, before)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (4,), (4, 2, 3, 2, 4)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_empty_one_dim_and_five_dims(name, shape):
    options = {"split_dim": 0, "concat_dim": -1} if name == "all_to_all_region" else {}
    _assert_exact(2, Case(name, shape, options))


@pytest.mark.parametrize("name", NAMES[:2])
def test_scalars(name):
    _assert_exact(4, Case(name, ()))


# Groups


@pytest.mark.parametrize("case", AT_TWO)
@on_ranks(2)
def test_group_is_a_process_group_a_mesh_or_a_name(group, case):
    x, p = case.inputs(2)[group.rank()], group.size()
    want = case(x, group)
    mesh = init_device_mesh("cpu", (1, p), mesh_dim_names=("dp", "tp"))["tp"]
    for spelling in (group.group_name, mesh, mesh.get_group(), init_device_mesh("cpu", (p,))):
        assert torch.equal(case(x, spelling), want)


def _counted(x, group, case):
    with CommDebugMode() as counts:
        y = case(x, group)
        y.sum().backward()
    assert counts.get_total_counts() == 0, counts.get_comm_counts()
    return y, x.grad


@pytest.mark.parametrize("case", [pytest.param(c, id=str(c)) for c in cases(1)])
def test_one_rank_and_no_group_communicate_nothing(case):
    x = case.inputs(1)[0]
    y, grad = _counted(x.clone().requires_grad_(), None, case)
    ys = [ranks.run(_alone, 1, case, x)[0], (y, grad)]
    for y, grad in ys:
        assert torch.equal(y, case.emulate([x])[0])
        assert torch.equal(grad, torch.ones_like(x))


def _alone(group, case, x):
    return _counted(x.requires_grad_(), group, case)
