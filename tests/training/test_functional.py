"""torch.func over the modules: functional_call; vmap and the transforms of autograd right or refused."""

import pytest
import torch
from torch.func import functional_call, grad, hessian, jvp, stack_module_state, vjp, vmap

from tests.helpers import ranks
from tests.helpers.makers import CASES, HIDDEN, TOKENS, build, caller, own_input, own_upstream
from tests.helpers.on_ranks import on_ranks

pytestmark = [pytest.mark.core, pytest.mark.filterwarnings("ignore:There is a performance drop")]

BOTH = pytest.mark.parametrize("sp", [False, True], ids=["", "sp"])


@pytest.mark.thinned(1)
@BOTH
@pytest.mark.parametrize("p", [1, 2, 4])
@on_ranks()
def test_functional_call_ties_and_all(group, sp):
    """Values of another module put in: its output, and gradients that go to them, not to the module's own."""
    for name, case in CASES.items():
        module = build(name, group, sp)
        other = build(name, group, sp)
        with torch.no_grad():
            [q.mul_(1.25) for q in other.parameters()]
        values = {key: q.detach().clone().requires_grad_() for key, q in other.named_parameters()}
        x, upstream = own_input(name, module, group, sp), own_upstream(name, module, group, sp)
        torch.manual_seed(14)
        want = caller(name, other)(x)
        want.backward(upstream)
        torch.manual_seed(14)
        got = functional_call(module, values, (x,), dict(case.call))
        got.backward(upstream)
        assert torch.equal(got, want), name
        assert all(q.grad is None for q in module.parameters()), name
        for key, param in other.named_parameters():
            assert torch.equal(values[key].grad, param.grad), f"{name}: {key}"


# vmap runs an operator without a batching rule once per slice, collectives too: slow, and right

BATCHED = ["column", "row", "mlp", "mlp_gated", "rms_norm", "layer_norm", "embedding", "head", "attention"]


@pytest.mark.thinned(1)
@BOTH
@pytest.mark.parametrize("p", [1, 2])
@on_ranks(backend="gloo")
def test_vmap_over_inputs(group, sp):
    for name in BATCHED:
        module = build(name, group, sp)
        one = own_input(name, module, group, sp)
        scales = [1, 0, 1] if name == "embedding" else [1.0, -0.5, 2.0]
        xs = torch.stack([(one * scale).detach() for scale in scales])
        call = caller(name, module)
        with torch.no_grad():
            want = torch.stack([call(x) for x in xs])
            torch.testing.assert_close(vmap(call)(xs), want, rtol=1e-12, atol=1e-12)
        got = vmap(call)(xs)  # and with a graph below, whose gradients are those of the sum over slices
        upstream = torch.ones_like(got)
        got.backward(upstream)
        grads = [q.grad.clone() for q in module.parameters()]
        module.zero_grad()
        torch.stack([call(x) for x in xs]).backward(upstream)
        for (key, param), g in zip(module.named_parameters(), grads, strict=True):
            torch.testing.assert_close(
                g, param.grad, rtol=1e-12, atol=1e-12, msg=lambda m, at=(name, key): f"{at}: {m}"
            )


@on_ranks(2)
def test_vmap_over_weights(group):
    """An ensemble of models, their weights stacked."""
    models = [build("mlp", group, False) for _ in range(3)]
    with torch.no_grad():
        [q.mul_(i + 1) for i, m in enumerate(models) for q in m.parameters()]
        params, buffers = stack_module_state(models)
        x = torch.randn(TOKENS, HIDDEN, dtype=torch.float64)
        got = vmap(lambda values: functional_call(models[0], (values, buffers), (x,)))(params)
        torch.testing.assert_close(got, torch.stack([m(x) for m in models]), rtol=1e-12, atol=1e-12)


def _randomness(group):
    dropout = build("dropout", group, False)
    vmap(dropout)(torch.ones(3, TOKENS, HIDDEN, dtype=torch.float64))


def test_vmap_over_masks_asks_for_randomness_as_torch_does():
    ranks.run_raises(_randomness, 2, RuntimeError, "vmap: called random operation")


TRANSFORMS = {
    "grad": lambda call, x: grad(lambda x: call(x).sum())(x),
    "vjp": lambda call, x: vjp(call, x),
    "hessian": lambda call, x: hessian(lambda x: call(x).sum())(x),
}


def _transformed(group, name, how):
    module = build(name, group, False)
    TRANSFORMS[how](caller(name, module), own_input(name, module, group, False).detach())


@pytest.mark.parametrize("how", TRANSFORMS)
@pytest.mark.parametrize("name", ["column", "row", "mlp", "rms_norm", "dropout", "attention", "head"])
def test_transforms_of_autograd_are_refused_before_anything_is_sent(name, how):
    """torch refuses C++ autograd Functions under functorch; torch.autograd.grad does what grad and vjp would."""
    message = r"C\+\+ torch::autograd::Function with functorch|vmap: called random operation"
    ranks.run_raises(_transformed, 2, RuntimeError, message, name, how)


@on_ranks(2, backend="gloo")
def test_forward_mode_of_linear_modules(group):
    """The tangent of a module that is linear in its input is its output without the bias."""
    for name in ("column", "row", "dropout", "head"):
        module = build(name, group, False)
        x = own_input(name, module, group, False).detach()
        call = caller(name, module)

        def seeded(x, call=call):
            torch.manual_seed(14)
            return call(x)

        y, tangent = jvp(seeded, (x,), (x,))
        torch.testing.assert_close(y, seeded(x))
        torch.testing.assert_close(tangent, seeded(x) - seeded(torch.zeros_like(x)))
