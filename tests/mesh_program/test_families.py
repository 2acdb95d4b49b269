"""Every member of a family of programs on a mesh: operators, writes, uneven results, permutations, transforms."""

import itertools
import re

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

import tp_ext
from tests.helpers import ranks, simulated
from tests.helpers.meshes import xy_mesh
from tests.helpers.on_ranks import on_ranks
from tests.mesh_program.cases import CREATED_WITH_OUT, IN_PLACE, OPERATORS, READS, UNEVEN, WRITES
from tp_ext import P, lax
from tp_ext.mesh_program.varying import VaryingValueError, axes_of

X = P("x")
CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def _over(mesh, function, in_specs=X, out_specs=X, **options):
    return tp_ext.spmd(mesh, in_specs=in_specs, out_specs=out_specs, **options)(function)


@on_ranks(1, backend="gloo", timeout=300)
def test_operators(group):
    """Eager and compiled, as of plain tensors."""
    mesh = xy_mesh(1)
    for bits, x in (False, torch.tensor([1.0, 2.0, 3.5, 4.0])), (True, torch.tensor([1, 2, 3, 4])):
        functions = {name: function for name, (function, of_bits) in OPERATORS.items() if of_bits == bits}

        def program(a, functions=functions):
            return [function(a) for function in functions.values()]

        mapped = _over(mesh, program)
        for found in mapped(x), torch.compile(mapped, fullgraph=True, backend="eager")(x):
            for name, one in zip(functions, found, strict=True):
                torch.testing.assert_close(one, functions[name](x), msg=lambda m, n=name: f"{n}: {m}")


@on_ranks(2)
def test_writes_and_reads_of_what_varies_are_refused(group):
    mesh, unseen = xy_mesh(2), []
    for name, write in WRITES.items():
        u = torch.zeros(4, 3)
        try:
            _over(mesh, lambda a, w=write, u=u: (w(u, a), a)[1])(torch.arange(24.0).view(8, 3))
        except VaryingValueError:
            continue
        if "keeps u" not in name or u.any():
            unseen.append(name)
    for name, read in READS.items():
        try:
            _over(mesh, lambda a, r=read: (r(a), a)[1])(torch.arange(24.0).view(8, 3))
            unseen.append(name)
        except VaryingValueError:
            continue
    assert unseen == []


def _arguments(a):
    """Arguments of operators of one tensor and more, until one fits."""
    index, mask = torch.tensor([0, 1]), a > 1
    yield from ((), (a,), (a, a), (a, a, a), (mask,), (mask, a), (mask, 1.0), (0, index, a[:2]), (0, index, 1.0))
    yield from ((0, a.long() % 2, a), (0,), (a.long() % 2,), (1, 0), (2,), (0, 1), (a[:, :3].T, a), (0.5,), (2, 0, 3.0))
    yield from ((a[0], a[1]), (a.T,), (a.T, a), (a.bool(),), (a.long(), a.long()), ([a, a],), (a, 0, index, a[:2]))
    yield from ((0, index, a[:2], "mean"), (0, a.long() % 2, a, "sum"), ((index,), a[:2]), (a, 1, 0), (a, 2, 0))


def _calls(function, u, a, out=False):
    """Yields the calls of a function that plain tensors permit."""
    for first, arguments in itertools.product((u, u[0], u.bool(), u.long(), u[:3]), _arguments(a)):
        values = arguments if out else (first.clone(), *arguments)
        if not any(isinstance(leaf, torch.Tensor) for leaf in values[0 if out else 1 :]):
            continue
        try:
            result = function(*values)
        except Exception:  # not its arguments
            continue
        if out and not isinstance(result, torch.Tensor | tuple):
            continue
        yield (first, arguments), tree_map(lambda t: torch.zeros_like(t) if isinstance(t, torch.Tensor) else t, result)
        return


def _out_names():
    schemas = torch._C._jit_get_all_schemas()
    found = {s.name[6:] for s in schemas if s.name.startswith("aten::") and any(a.is_out for a in s.arguments)}
    return sorted(n for n in found if hasattr(torch, n) and n not in CREATED_WITH_OUT)


@on_ranks(2, backend="gloo", timeout=300)
def test_all_in_place_and_out_operators_of_torch_are_refused(group):
    """Names of operators of torch whose writes are not refused, and the number that are."""
    mesh, plain = xy_mesh(2), torch.arange(12.0).view(4, 3) + 1
    unseen, seen = [], 0
    for name in [*IN_PLACE, *_out_names()]:
        out = name not in IN_PLACE
        function = getattr(torch, name) if out else getattr(torch.Tensor, name)
        for (first, arguments), result in _calls(function, torch.ones(4, 3), plain, out):
            target = first.clone()

            def program(a, f=function, arguments=arguments, target=target, result=result, out=out):
                def varies(t):
                    return t + (a.sum() * 0).to(t.dtype) if isinstance(t, torch.Tensor) and t.dtype != torch.bool else t

                values = tree_map(varies, arguments)
                if not any(axes_of(v) for v in torch.utils._pytree.tree_leaves(values)):
                    raise VaryingValueError("nothing varies")
                f(*values, out=result) if out else f(target, *values)
                return a

            try:
                _over(mesh, program)(torch.ones(8, 3))
                unseen.append(name)
            except VaryingValueError:
                seen += 1
            except TypeError:  # no out= in Python, or none of these arguments
                continue
            except RuntimeError as e:
                if not re.search("out|dtype", str(e)):  # nor a result that torch refuses to write
                    unseen.append(f"{name}: {e}")
    assert unseen == ["chain_matmul"]  # torch forgets out: docs/guide/mesh.md
    assert seen > 250


@pytest.mark.parametrize("p", [2, 3])
@on_ranks()
def test_results_of_uneven_shards(group):
    p, x = group.size(), torch.arange(20.0, dtype=torch.float64).view(10, 2).requires_grad_()
    mesh = xy_mesh(p)
    for name, case in UNEVEN.items():
        want = case.want(x, p)
        full = _over(mesh, case.program, case.in_spec)(x)
        sharded = _over(mesh, case.program, case.in_spec, P("x").dtensor())(x)
        assert isinstance(sharded, DTensor) and sharded.shape == want.shape, name
        local = _over(mesh, case.program, case.in_spec, P("x").local())(x)
        joined = _over(mesh, lambda a: a * 1, P("x").local())(local)
        for found in full, joined:
            torch.testing.assert_close(found, want, msg=lambda m, n=name: f"{n}: {m}", **CLOSE)
            grads = [torch.autograd.grad(y.square().sum(), x, retain_graph=True)[0] for y in (found, want)]
            torch.testing.assert_close(*grads, msg=lambda m, n=name: f"{n}: {m}", **CLOSE)


@on_ranks(2, backend="gloo")
def test_shards_that_do_not_fit_together_are_an_error_on_all_ranks(group):
    mesh, x, rank = xy_mesh(2), torch.ones(4, 6), group.rank()
    for function, message in (
        (lambda a: a[:, : 2 + rank], r"out_specs: dim 1 of the ranks' shards must have one length along axis 'x'"),
        (lambda a: a if rank else a[None], r"out_specs: the ranks' shards .* must have one dtype and number of dims"),
        (lambda a: a if rank else a.double(), r"out_specs: the ranks' shards .* must have one dtype"),
    ):
        with pytest.raises(ValueError, match=message):
            _over(mesh, function)(x)
    with pytest.raises(Exception, match=r"shards must have equal lengths under torch\.compile"):
        torch.compile(_over(mesh, lambda a: lax.psum_scatter(a, "x"), P()), fullgraph=True, backend="eager")(
            torch.ones(5)
        )
    dist.barrier()


PERMUTATIONS = {
    "none": [],
    "one": [(0, 3)],
    "stay": [(i, i) for i in range(4)],
    "shift": [(i, (i + 1) % 4) for i in range(4)],
    "halo": [(i, i + 1) for i in range(3)],
    "reverse": [(i, 3 - i) for i in range(4)],
    "meet": [(0, 3), (1, 2)],  # both stand on one rank after the first axis
    "all": [(0, 2), (1, 3), (2, 1), (3, 0)],
}


def _permutations(group, x, y):
    mesh, p = xy_mesh(x, y), x * y
    value = torch.randn(p * 2, 3, dtype=torch.float64, requires_grad=True)
    for axes, (name, perm) in itertools.product((("x", "y"), ("y", "x")), PERMUTATIONS.items()):
        perm = [pair for pair in perm if max(pair) < p]
        got = _over(mesh, lambda a, axes=axes, perm=perm: lax.ppermute(a, axes, perm), P(axes), P(axes))(value)
        source = {to: a for a, to in perm}
        blocks = [2 * source[k] + torch.arange(2) if k in source else None for k in range(p)]
        want = torch.cat([torch.zeros(2, 3).double() if b is None else value[b] for b in blocks])
        torch.testing.assert_close(got, want, msg=lambda m, n=name: f"{n}: {m}", **CLOSE)
        if perm:
            grads = [torch.autograd.grad(y.sin().sum(), value)[0] for y in (got, want)]
            torch.testing.assert_close(*grads, msg=lambda m, n=name: f"{n}: {m}", **CLOSE)


@pytest.mark.parametrize(("x", "y"), [(1, 1), (1, 2), (2, 2), (2, 1), (1, 4)])
def test_permutations_over_two_axes(x, y):
    ranks.run(_permutations, x * y, x, y)


def _exchanges(group, x, y):
    mesh, p = xy_mesh(x, y), x * y
    value = torch.randn(2 * p, 2 * p, 3, dtype=torch.float64, requires_grad=True)
    for axes, one, other in itertools.product((("x", "y"), ("y", "x")), (0, 1), (0, 1, -1)):
        if one == other:
            continue
        specs = P(*[axes if dim == other % 3 else None for dim in range(3)])
        if other == -1:
            specs = P()
        result = P(*[axes if dim == one else None for dim in range(3)])
        got = _over(mesh, lambda a, d=(axes, one, other): lax.all_to_all(a, *d), specs, result)(value)
        # slice k of every rank, in the order of the ranks: the full tensor, or p copies of it
        want = torch.cat([value] * p, -1) if other == -1 else value
        torch.testing.assert_close(got, want, **CLOSE)
        grads = [torch.autograd.grad(y.sin().sum(), value)[0] for y in (got, want)]
        torch.testing.assert_close(*grads, **CLOSE)
    if p > 1:
        with pytest.raises(ValueError, match=r"all_to_all: the \d ranks of axes .* must divide dim 0"):
            _over(mesh, lambda a: lax.all_to_all(a[:1], ("x", "y"), 0, 1), P(), P(("x", "y")))(value)


@pytest.mark.parametrize(("x", "y"), [(1, 1), (2, 2), (1, 3)])
def test_exchanges_over_two_axes(x, y):
    ranks.run(_exchanges, x * y, x, y)


@on_ranks(2)
def test_dtypes(group):
    """psum, pmean, pmax, pmin of all ranks' values, for every dtype: numbers by stack, booleans counted."""
    mesh = xy_mesh(2)
    values = torch.tensor([[3.0, 1.0, 0.0], [1.0, 2.0, 0.0]])
    for dtype in (torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, torch.float32, torch.float64):
        x = values.to(dtype)
        counted = x.long() if dtype == torch.bool else x
        for name, want in (
            ("psum", counted.sum(0, dtype=counted.dtype)),
            ("pmean", counted.sum(0) / 2),
            ("pmax", x.amax(0)),
            ("pmin", x.amin(0)),
        ):
            found = _over(mesh, lambda a, n=name: getattr(tp_ext, n)(a[0], "x"), P("x"), P())(x)
            assert found.dtype == want.dtype and torch.equal(found, want), (name, dtype)
    z = torch.randn(4, 3, dtype=torch.complex128, requires_grad=True)
    for name, program, spec, want in (
        ("psum", lambda a: lax.psum(a, "x"), P(), z[:2] + z[2:]),
        ("pmean", lambda a: lax.pmean(a, "x"), P(), (z[:2] + z[2:]) / 2),
        ("psum_scatter", lambda a: lax.psum_scatter(a, "x"), P("x"), z[:2] + z[2:]),
        ("all_gather", lambda a: lax.all_gather(a, "x", -1, invariant=True), P(), torch.cat([z[:2], z[2:]], -1)),
        ("ppermute", lambda a: lax.ppermute(a, "x", [(0, 1), (1, 0)]), P("x"), z.roll(2, 0)),
    ):
        found = _over(mesh, program, P("x"), spec)(z)
        torch.testing.assert_close(found, want, msg=lambda m, n=name: f"{n}: {m}", **CLOSE)
        grads = [torch.autograd.grad(y.abs().pow(3).sum(), z)[0] for y in (found, want)]
        torch.testing.assert_close(*grads, msg=lambda m, n=name: f"{n}: {m}", **CLOSE)


def _structures(group):
    a = torch.arange(4.0)
    value = {"a": a, "b": [a, (a,)]}
    for name, arguments, want in (
        ("psum", (), a[:2] + a[2:]),
        ("pmean", (), (a[:2] + a[2:]) / 2),
        ("pmax", (), a[2:]),
        ("pmin", (), a[:2]),
        ("pvary", (), a),
        ("psum_scatter", (), a[:2] + a[2:]),
        ("all_to_all", (0, 0), a.view(2, 2).T.reshape(-1)),
        ("ppermute", ([(0, 1), (1, 0)],), a.roll(2)),
    ):
        spec = P() if len(want) == 2 and name != "psum_scatter" else P("x")
        found = _over(xy_mesh(2), lambda v, n=name, r=arguments: getattr(tp_ext, n)(v, "x", *r), (P("x"),), spec)(value)
        assert all(torch.equal(one, want) for one in (found["a"], found["b"][0], found["b"][1][0])), name
    numbers = []
    _over(
        xy_mesh(2),
        lambda a: numbers.extend(f(3, "x") for f in (lax.psum, lax.pmean, lax.pmax, lax.pmin)) or a,
    )(a)
    assert numbers == [6, 3.0, 3, 3]


@pytest.mark.parametrize("run", [ranks.run, simulated.run])
def test_structures_and_numbers(run):
    run(_structures, 2)


@on_ranks(2)
def test_second_derivatives_of_pmax_and_pmin(group):
    """Of pmax and pmin as of amax and amin over the ranks' values: equal ones, some equal, all different, alike."""
    mesh, p = xy_mesh(group.size()), group.size()
    generator = torch.Generator().manual_seed(0)
    for values in (torch.full((p, 3), 0.5), torch.randint(0, 2, (p, 3), generator=generator) + 0.5, torch.rand(p, 3)):
        for name, plain in (("pmax", torch.amax), ("pmin", torch.amin)):
            x = values.double().requires_grad_()
            found = _over(mesh, lambda a, n=name: getattr(tp_ext, n)(a[0], "x"), P("x"), P())(x)
            want = plain(x, 0)
            weight = torch.arange(1.0, 4.0, dtype=torch.float64)
            first = [torch.autograd.grad(y.sin().sum(), x, create_graph=True)[0] for y in (found, want)]
            torch.testing.assert_close(*first, **CLOSE)
            second = [torch.autograd.grad((g * x.detach() * weight).sum(), x)[0] for g in first]
            torch.testing.assert_close(*second, **CLOSE)
    x = torch.tensor([0.5], dtype=torch.float64, requires_grad=True)
    y = _over(mesh, lambda a: lax.pmax(a, "x"), P(), P())(x)
    (g,) = torch.autograd.grad(y.sin().sum(), x, create_graph=True)
    torch.testing.assert_close(torch.autograd.grad(g.sum(), x)[0], -x.detach().sin(), **CLOSE)


PROGRAMS = {
    "psum": (lambda a: lax.psum(a * a, "x"), P(), lambda x: x[:2] ** 2 + x[2:] ** 2),
    "pmean": (lambda a: lax.pmean(a.sin(), "x"), P(), lambda x: (x[:2].sin() + x[2:].sin()) / 2),
    "pmax": (lambda a: lax.pmax(a**3, "x"), P(), lambda x: torch.maximum(x[:2] ** 3, x[2:] ** 3)),
    "pmin": (lambda a: lax.pmin(a**3, "x"), P(), lambda x: torch.minimum(x[:2] ** 3, x[2:] ** 3)),
    "psum_scatter": (lambda a: lax.psum_scatter(a**3, "x"), P("x"), lambda x: x[:2] ** 3 + x[2:] ** 3),
    "all_gather": (lambda a: lax.all_gather(a**3, "x").sin() * 2, P("x"), lambda x: torch.cat([x**3] * 2).sin() * 2),
    "invariant": (lambda a: lax.all_gather(a**3, "x", invariant=True), P(), lambda x: x**3),
    "all_to_all": (lambda a: lax.all_to_all(a**3, "x", 1, 0), P(None, "x"), lambda x: x**3),
    "ppermute": (lambda a: lax.ppermute(a**3, "x", [(0, 1)]), P("x"), lambda x: torch.cat([0 * x[:2], x[:2] ** 3])),
    "pvary": (lambda a: a * lax.pvary(lax.psum(a, "x"), "x"), P("x"), lambda x: x * (x[:2] + x[2:]).repeat(2, 1)),
    "mixed": (lambda a: a * lax.psum(a, "x"), P("x"), lambda x: x * (x[:2] + x[2:]).repeat(2, 1)),
}


@pytest.mark.parametrize("check", [True, False])
@on_ranks(2, backend="gloo")
def test_transforms_around_a_map(group, check):
    """Around of a map: grad, vjp, jacrev, grad of grad, jvp of grad, vmap of grad and grad of vmap."""
    mesh, x = xy_mesh(2), torch.randn(4, 2, dtype=torch.float64)
    func = torch.func
    for name, (program, spec, plain) in PROGRAMS.items():
        if name == "mixed" and not check:
            continue
        mapped = _over(mesh, program, P("x"), spec, check=check)
        batch = torch.stack([x, 2 * x])

        def scalar(f):
            return lambda t: f(t).cos().sum()

        def twice(f):
            return lambda t: func.grad(scalar(f))(t).sin().sum()

        for kind, transform in {
            "grad": lambda f: func.grad(scalar(f))(x),
            "vjp": lambda f, plain=plain: func.vjp(f, x)[1](torch.ones_like(plain(x)))[0],
            "jacrev": lambda f: func.jacrev(f)(x),
            "grad of grad": lambda f: func.grad(twice(f))(x),
            "jvp of grad": lambda f: func.jvp(func.grad(scalar(f)), (x,), (x + 1,))[1],
            "vmap of grad": lambda f, batch=batch: torch.vmap(func.grad(scalar(f)))(batch),
            "grad of vmap": lambda f, batch=batch: func.grad(lambda t: torch.vmap(scalar(f))(t).sum())(batch),
        }.items():
            found, want = transform(mapped), transform(plain)
            torch.testing.assert_close(found, want, msg=lambda m, n=(name, kind): f"{n}: {m}", **CLOSE)


@on_ranks(2, backend="gloo")
def test_transforms_inside_of_a_map(group):
    """The gradient of a loss of all rows, with respect to weights that do not vary and rows that do."""
    mesh, func = xy_mesh(2), torch.func
    w, x = torch.randn(3, 2, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)

    def loss(w, x):
        return lax.psum((x @ w).sin().square().sum(), "x")

    def plain(w, x):
        return (x @ w).sin().square().sum()

    def program(w, x):
        dw, dx = func.grad(loss, (0, 1))(w, x)
        assert not axes_of(dw) and axes_of(dx).keys() == {"x"}
        value, pullback = func.vjp(loss, w, x)
        assert not axes_of(value)
        per_row = torch.vmap(lambda row: (row @ w).sum())(x)
        assert axes_of(per_row).keys() == {"x"}
        return dw, dx, pullback(torch.ones_like(value)), func.jacrev(loss)(w, x), func.hessian(loss)(w, x), per_row

    specs = (P(), P("x"), (P(), P("x")), P(), P(), P("x"))
    found = _over(mesh, program, (P(), P("x")), specs)(w, x)
    dw, dx = func.grad(plain, (0, 1))(w, x)
    want = (dw, dx, (dw, dx), dw, func.hessian(plain)(w, x), (x @ w).sum(1))
    for name, one, other in zip(("dw", "dx", "vjp", "jacrev", "hessian", "vmap"), found, want, strict=True):
        torch.testing.assert_close(one, other, msg=lambda m, n=name: f"{n}: {m}", **CLOSE)
    for function in (lambda a: torch.vmap(torch.sin)(a), lambda a: func.grad(lambda t: (t * t).sum())(a)):
        with pytest.raises(VaryingValueError, match="must name axis 'x'"):
            _over(mesh, function, P("x"), P())(x)


@on_ranks(4)
def test_random_numbers_of_a_ranks_own(group):
    mesh, both = xy_mesh(2, 2), P(("x", "y"))

    def draw(axis, spec, seed=3, function=torch.randn, arguments=(4,)):
        return _over(mesh, lambda a: lax.axis_random(axis, seed)(function, *arguments) + 0 * a.sum(), P(), spec)(
            torch.zeros(1)
        )

    numbers = draw("x", P("x"))
    assert len(set(numbers.tolist())) == 8 and torch.equal(numbers, draw("x", P("x")))  # the same along y
    assert len(set(draw(("x", "y"), both).tolist())) == 16
    assert not torch.equal(numbers, draw("x", P("x"), 4)) and not torch.equal(numbers, draw("x", P("x"), (3, 1)))
    means = draw("x", P("x"), 0, torch.bernoulli, (torch.full((10_000,), 0.3),)).view(2, -1).mean(1)
    assert ((means - 0.3).abs() < 0.02).all() and means[0] != means[1]
    written = _over(mesh, lambda a: lax.axis_random("x", 1)(torch.Tensor.normal_, a), P("x"), P("x"))(torch.zeros(6))
    assert len(set(written.tolist())) == 6
    with pytest.raises(VaryingValueError, match="must name axis 'x'"):
        draw("x", P())
    with pytest.raises(VaryingValueError, match="normal_: the tensor that is written does not vary"):
        _over(mesh, lambda a: lax.axis_random("x", 1)(torch.Tensor.normal_, torch.zeros(3)), P("x"), P("x"))(numbers)
