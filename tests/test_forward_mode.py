"""Forward-mode AD: the region of a tangent is the tangent of the region, and a linear layer follows the product rule;
what has no forward-mode derivative says so on every rank, before anything is communicated.
"""

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, jacfwd, jvp, linearize, vmap
from torch.nn import functional as F

import tp_ext
from tests.helpers import ranks
from tests.helpers.on_ranks import on_ranks
from tests.helpers.region_maps import Case, cases, simple_cases
from tp_ext import _ops
from tp_ext.group import group_name

# Three ranks share most unevenly
P = pytest.mark.parametrize("p", [1, 3, *(pytest.param(p, marks=pytest.mark.exhaustive) for p in (2, 4))])


def _dual(f, x, v):
    """f and its derivative along v, by dual tensors."""
    with forward_ad.dual_level():
        y, tangent = forward_ad.unpack_dual(f(forward_ad.make_dual(x, v)))
    return y, tangent


def _tangents(group, todo):
    rank = group.rank()
    for case, xs, vs, ys, ts in todo:
        for how in (_dual, lambda f, x, v: jvp(f, (x,), (v,))):
            y, tangent = how(lambda x, case=case: case(x, group), xs[rank], vs[rank])
            assert torch.equal(y, ys[rank]), case
            assert torch.equal(tangent, ts[rank]), case


@P
def test_tangent_of_a_region_is_the_region_of_the_tangent(p):
    todo = []
    for case in cases(p):
        xs, vs = case.inputs(p), case.inputs(p)
        todo.append((case, xs, vs, case.emulate(xs), case.emulate(vs)))
    ranks.run(_tangents, p, todo)


# Forward mode with other transforms. f(x) = sin(region(sin(x))) of case and input.

AT_THREE = [
    Case("copy_to_region", (3, 4)),
    Case("reduce_from_region", (3, 4)),
    Case("scatter_to_region", (5, 4), {"dim": 0}),
    Case("gather_from_region", (6, 4), {"dim": 0, "sizes": [3, 1, 2]}),
    Case("all_gather_region", (2, 6), {"dim": 1, "sizes": [3, 1, 2]}),
    Case("reduce_scatter_region", (5, 4)),
    Case("all_to_all_region", (5, 6), {"split_dim": 0, "concat_dim": 1}),
]


def _expected(case, xs, vs):
    """On every rank: tangents of f, their gradients, tangents of f's gradients; each from the emulated regions."""
    xs = [x.clone().requires_grad_() for x in xs]
    inner = case.emulate([x.cos() * v for x, v in zip(xs, vs, strict=True)])
    outer = case.emulate([x.sin() for x in xs])
    tangents = [y.cos() * t for y, t in zip(outer, inner, strict=True)]
    of_tangents = torch.autograd.grad(sum(t.sum() for t in tangents), xs, retain_graph=True)
    gradients = torch.autograd.grad(sum(y.sin().sum() for y in outer), xs, create_graph=True)
    us = [torch.zeros_like(g, requires_grad=True) for g in gradients]  # twice backward is forward
    back = torch.autograd.grad(gradients, xs, us, create_graph=True)
    return [t.detach() for t in tangents], of_tangents, torch.autograd.grad(back, us, vs)


def _composed(group, todo):
    rank = group.rank()
    for case, xs, vs, (tangents, of_tangents, of_gradients) in todo:
        x, v = xs[rank], vs[rank]

        def f(x, case=case):
            return case(x.sin(), group).sin()

        close = {"rtol": 1e-12, "atol": 1e-12, "msg": lambda m, case=case: f"{case}: {m}"}
        y = f(x)
        for how in (_dual, lambda f, x, v: jvp(f, (x,), (v,))):  # reverse over forward
            leaf = x.clone().requires_grad_()
            _, tangent = how(f, leaf, v)
            torch.testing.assert_close(tangent, tangents[rank], **close)
            (got,) = torch.autograd.grad(tangent.sum(), leaf)
            torch.testing.assert_close(got, of_tangents[rank], **close)
        with forward_ad.dual_level():  # forward over reverse
            leaf = x.clone().requires_grad_()
            dual = forward_ad.make_dual(leaf, v)
            for create_graph in (False, True):
                (gradient,) = torch.autograd.grad(f(dual).sum(), dual, create_graph=create_graph)
                got = forward_ad.unpack_dual(gradient).tangent
                torch.testing.assert_close(got, of_gradients[rank], **close)
        # forward over forward, and a batch of tangents
        _, second = jvp(lambda x, f=f, v=v: jvp(f, (x,), (v,))[1], (x,), (v,))
        _, plus = jvp(f, (x + 1e-6 * v,), (v,))
        _, minus = jvp(f, (x - 1e-6 * v,), (v,))
        torch.testing.assert_close(second, (plus - minus) / 2e-6, rtol=1e-7, atol=1e-7)
        basis = torch.eye(x.numel(), dtype=x.dtype).view(x.numel(), *x.shape)
        if case.name not in ("gather_from_region", "all_gather_region") or len({t.numel() for t in xs}) == 1:
            columns = torch.stack([jvp(f, (x,), (e,))[1] for e in basis], -1).reshape(*y.shape, *x.shape)
            torch.testing.assert_close(jacfwd(f)(x), columns, **close)


def test_forward_mode_composes_with_reverse_mode_and_itself():
    todo = []
    for case in AT_THREE:
        xs = [torch.rand(case.local_shape(rank, 3), dtype=torch.float64) for rank in range(3)]
        vs = [torch.rand_like(x) for x in xs]
        todo.append((case, xs, vs, _expected(case, xs, vs)))
    ranks.run(_composed, 3, todo)


# Layers, against the unsharded module

TOKENS, IN, OUT = 7, 6, 5


def _cut(full, dim, group):
    return full.tensor_split(group.size(), dim)[group.rank()]


def _layer(group, kind, sp):
    """The plain module, ours with its weights, and which dim of input and output is sharded (None: replicated)."""
    torch.manual_seed(3)
    options = {"sequence_parallel": sp, "group": group, "dtype": torch.float64}
    if kind == "embedding":
        plain, ours = nn.Embedding(OUT, IN, dtype=torch.float64), tp_ext.VocabParallelEmbedding(OUT, IN, **options)
        weights, x = {"weight": _cut(plain.weight, 0, group)}, torch.randint(OUT, (TOKENS,))
        return plain, ours, weights, x, None, 0 if sp else None
    plain, x = nn.Linear(IN, OUT, dtype=torch.float64), torch.randn(TOKENS, IN, dtype=torch.float64)
    if kind == "column":
        ours = tp_ext.ColumnParallelLinear(IN, OUT, **options)
        weights = {"weight": _cut(plain.weight, 0, group), "bias": _cut(plain.bias, 0, group)}
        return plain, ours, weights, x, 0 if sp else None, 1
    ours = tp_ext.RowParallelLinear(IN, OUT, **options)
    weights = {"weight": _cut(plain.weight, 1, group), "bias": plain.bias}
    return plain, ours, weights, x, 1, 0 if sp else None


@P
@on_ranks(backend="gloo")
def test_layers_against_the_unsharded_module(group):
    for kind, sp in [(k, s) for k in ("column", "row", "embedding") for s in (False, True)]:
        plain, ours, weights, x, sharded_in, sharded_out = _layer(group, kind, sp)
        options = {}
        if kind == "column" and sp:
            options["total_tokens"] = TOKENS
        tangents = {name: torch.randn_like(param) for name, param in plain.named_parameters()}
        upstream = torch.randn(TOKENS, IN if kind == "embedding" else OUT, dtype=torch.float64)
        dims = {name: s.dim if s else None for name, s in ours.tp_shardings.items()}

        def shard(t, dim, group=group):
            return t if dim is None else _cut(t, dim, group)

        own = {name: t.detach().clone().requires_grad_() for name, t in weights.items()}
        vs = {name: shard(t, dims[name]) for name, t in tangents.items()}
        for with_x in [False] if kind == "embedding" else [False, True]:
            v = torch.randn_like(x) if with_x else None

            def run(module, params, x, v, options, tangents):
                def f(params, x):
                    return functional_call(module, params, (x,), options)

                if v is None:
                    return jvp(lambda p: f(p, x), (params,), (tangents,))
                return jvp(f, (params, x), (tangents, v))

            full = {name: param.detach().clone().requires_grad_() for name, param in plain.named_parameters()}
            want = run(plain, full, x, v, {}, tangents)
            x_own, v_own = shard(x, sharded_in), None if v is None else shard(v, sharded_in)
            got = run(ours, own, x_own, v_own, options, vs)
            with forward_ad.dual_level():
                duals = {name: forward_ad.make_dual(own[name], vs[name]) for name in own}
                x_dual = x_own if v is None else forward_ad.make_dual(x_own, v_own)
                by_duals = forward_ad.unpack_dual(functional_call(ours, duals, (x_dual,), options))
            for a, b, c in zip(got, want, by_duals, strict=True):
                b = shard(b, sharded_out)
                torch.testing.assert_close(a, b, msg=lambda m, at=(kind, sp, with_x): f"{at}: {m}")
                torch.testing.assert_close(c, b)
            # Reverse over forward: gradients of a sum of values and tangents, as of the unsharded module
            (want[0] * upstream + want[1] * upstream).sum().backward()
            own_upstream = shard(upstream, sharded_out)
            grads = torch.autograd.grad((got[0] * own_upstream + got[1] * own_upstream).sum(), list(own.values()))
            for name, grad in zip(own, grads, strict=True):
                torch.testing.assert_close(grad, shard(full[name].grad, dims[name]))


@on_ranks(2, backend="gloo")
def test_main_grad_gets_the_gradients_of_value_and_tangent(group):
    """The gradients of value and tangent go to main_grad."""
    layer = tp_ext.ColumnParallelLinear(4, 6, group=group, grad_accumulation_fusion=True, dtype=torch.float64)
    layer.weight.main_grad = torch.zeros_like(layer.weight)
    x = torch.randn(3, 4, dtype=torch.float64)
    with forward_ad.dual_level():
        v = torch.randn_like(x)
        y = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, v)))
    (y.primal + y.tangent).sum().backward()
    want = torch.ones(3, layer.weight.shape[0], dtype=torch.float64).T @ (x + v)
    torch.testing.assert_close(layer.weight.main_grad, want)


@on_ranks(2, backend="gloo")
def test_dropout_and_rotary_embedding_are_linear(group):
    x = torch.randn(4, 2, 8, dtype=torch.float64)
    torch.manual_seed(group.rank())
    tp_ext.Dropout(0.5, group=group)(x)  # the states that rank 0's has replaced are looked up at each later draw
    v = torch.randn_like(x)
    for make in (
        lambda: tp_ext.Dropout(0.5, group=group, sequence_parallel=True),
        lambda: tp_ext.RotaryEmbedding(8),
    ):
        module = make()
        results = []
        for how in (_dual, lambda f, x, v: jvp(f, (x,), (v,)), lambda f, x, v: (f(x), f(v))):
            torch.manual_seed(1)

            def f(t, module=module):
                torch.manual_seed(1)
                return module(t)

            results.append(how(f, x, v))
        for y, tangent in results[:-1]:
            assert torch.equal(y, results[-1][0])
            torch.testing.assert_close(tangent, results[-1][1])


# Refusals


def _norm(x, group):
    return tp_ext.RMSNorm(4, dtype=torch.float64)(x)


def _layer_norm(x, group):
    return tp_ext.LayerNorm(4, dtype=torch.float64)(x)


def _cross_entropy(x, group):
    return tp_ext.vocab_parallel_cross_entropy(x, torch.zeros(3, dtype=torch.long), group)


def _mlp(x, group):
    return tp_ext.ParallelMLP(4, 8, group=group, dtype=torch.float64)(x)


def _gated(x, group):
    return tp_ext.ParallelMLP(4, 8, activation="swiglu", group=group, dtype=torch.float64)(x)


def _all_to_all_linear(x, group):
    return _ops.all_to_all_linear(x, group_name(group), None, None, x, torch.ones(5, 4, dtype=torch.float64))[0]


ROWS = torch.arange(3).unsqueeze(1)  # of the slots of three tokens

REFUSED = {
    "rms_norm": _norm,
    "layer_norm": _layer_norm,
    "vocab_parallel_cross_entropy": _cross_entropy,
    "bias_act": _mlp,
    "gated_act": _gated,
    "moe_permute": lambda x, group: _ops.moe_permute(x, ROWS, 3),
    "moe_unpermute": lambda x, group: _ops.moe_unpermute(x, ROWS),
    "moe_dot": lambda x, group: _ops.moe_dot(x, x, ROWS),
    "all_to_all_linear": _all_to_all_linear,
}


def _refused(group, name, how):
    x = torch.ones(3, 4, dtype=torch.float64)
    if how == "dual":
        _dual(lambda x: REFUSED[name](x, group), x, x)
    else:
        jvp(lambda x: REFUSED[name](x, group), (x,), (x,))


@pytest.mark.parametrize("how", ["dual", "jvp"])
@pytest.mark.parametrize("name", REFUSED)
def test_fused_kernels_refuse_by_name(name, how):
    # Before the MLP's activation stands a column linear, which communicates nothing in forward
    message = rf"^tp_ext: {name} has no forward-mode derivative; use reverse mode"
    ranks.run_raises(_refused, 2, NotImplementedError, message, name, how)


def _refused_in_backward(group):
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    y = tp_ext.RMSNorm(4, dtype=torch.float64)(x)
    with forward_ad.dual_level():
        torch.autograd.grad(y, x, forward_ad.make_dual(torch.ones_like(y), torch.ones_like(y)))


def test_a_fused_backward_refuses_a_tangent():
    message = "^tp_ext: the backward of rms_norm has no forward-mode derivative"
    ranks.run_raises(_refused_in_backward, 2, NotImplementedError, message)


@on_ranks(2, backend="gloo")
def test_a_linears_backward_passes_a_tangent_on(group):
    """dy alone has a tangent: the backward of a linear, recorded without one, passes it on."""
    for layer in (
        tp_ext.ColumnParallelLinear(4, 6, group=group, dtype=torch.float64),
        tp_ext.RowParallelLinear(8, 4, group=group, dtype=torch.float64),
    ):
        x = torch.randn(3, layer.weight.shape[1], dtype=torch.float64, requires_grad=True)
        y = layer(x)
        dy, v = torch.randn_like(y), torch.randn_like(y)
        leaves = [x, *layer.parameters()]
        want = torch.autograd.grad(y, leaves, v, retain_graph=True)
        with forward_ad.dual_level():
            got = torch.autograd.grad(y, leaves, forward_ad.make_dual(dy, v))
            for a, b in zip(got, want, strict=True):
                torch.testing.assert_close(forward_ad.unpack_dual(a).tangent, b)


@on_ranks(2, backend="gloo")
def test_levels_without_derivatives_are_computed_as_usual(group):
    """A norm of constants, which jvp does not differentiate, is computed as ever, and recorded for backward."""
    norm = tp_ext.RMSNorm(4, dtype=torch.float64)
    x = torch.randn(3, 4, dtype=torch.float64)
    scale = torch.randn(3, 4, dtype=torch.float64)

    def f(scale):
        return tp_ext.reduce_from_region(norm(x) * scale, group)

    y, tangent = jvp(f, (scale,), (torch.ones_like(scale),))
    torch.testing.assert_close(y, tp_ext.reduce_from_region(F.rms_norm(x, (4,), eps=norm.eps) * scale, group))
    (got,) = torch.autograd.grad(tangent.sum(), norm.weight)
    (want,) = torch.autograd.grad(norm(x).sum(), norm.weight)
    torch.testing.assert_close(got, want)


def _batched(group, todo):
    rank = group.rank()
    for case, batches, dims in todo:
        xs = [batch[rank] for batch in batches]
        want = torch.stack([case(x, group) for x in xs])
        for dim in dims:
            stacked = torch.stack(xs, dim).requires_grad_()
            got = vmap(lambda x, case=case: case(x, group), in_dims=dim)(stacked)
            assert torch.equal(got, want), (case, dim)
            upstream = torch.ones_like(got)
            (grad,) = torch.autograd.grad(got, stacked, upstream)
            leaves = [x.clone().requires_grad_() for x in xs]
            ys = [case(x, group) for x in leaves]
            each = torch.autograd.grad(ys, leaves, [torch.ones_like(y) for y in ys])
            assert torch.equal(grad, torch.stack(each, dim)), (case, dim)


@pytest.mark.parametrize(
    ("p", "every"),
    [(1, True), (3, False), pytest.param(3, True, marks=pytest.mark.exhaustive)],
    ids=["1", "3", "3-every dim"],
)
def test_vmap_over_a_region_communicates_all_slices_at_once(p, every):
    dims = (0, -1, 1)
    todo = [
        (case, [case.inputs(p) for _ in range(2)], dims if every else (dims[i % 3],)) for i, case in enumerate(cases(p))
    ]
    ranks.run(_batched, p, todo)


def _wrong_dim(group):
    vmap(lambda x: tp_ext.scatter_to_region(x, group, -3))(torch.ones(2, 4, 4))


def test_vmap_counts_the_dims_of_a_slice():
    ranks.run_raises(_wrong_dim, 2, IndexError, r"dim: -3 must be in \[-2, 2\)")


def _linearized(group, name):
    """copy_to_region and scatter_to_region communicate nothing in forward."""
    options = {"split_dim": 0, "concat_dim": 1} if name == "all_to_all_region" else {}
    x = torch.rand(4, 4)
    _, lines = linearize(lambda x: getattr(tp_ext, name)(x.sin(), group, **options).sin(), x)
    _, want = jvp(lambda x: getattr(tp_ext, name)(x.sin(), group, **options).sin(), (x,), (x,))
    torch.testing.assert_close(lines(x), want)


@pytest.mark.parametrize("name", ["copy_to_region", "scatter_to_region"])
def test_linearize_without_communication(name):
    ranks.run(_linearized, 2, name)


@pytest.mark.parametrize("name", ["reduce_from_region", "all_gather_region", "all_to_all_region"])
def test_linearize_refuses_collectives(name):
    """Its constant folding drops the wait for them: torch's own functional collectives give wrong numbers there."""
    message = "^tp_ext: torch.func.linearize cannot trace a collective"
    ranks.run_raises(_linearized, 2, NotImplementedError, message, name, in_turns=False)


def test_simple_cases_are_those_of_all_regions():
    assert {case.name for case in simple_cases(2)} == {case.name for case in AT_THREE}
