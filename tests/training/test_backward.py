"""What people hang on autograd: grad modes, hooks on modules and tensors, anomaly detection, offloading, several
backwards, second derivatives. Every module, the same bits as without."""

import pytest
import torch

from tests.helpers import ranks
from tests.helpers.makers import CASES, build, caller, outcome, own_input, own_upstream, same
from tests.helpers.on_ranks import on_ranks

pytestmark = pytest.mark.core

BOTH = pytest.mark.parametrize("sp", [False, True], ids=["", "sp"])


def _anomaly(module, call):
    def run(x):
        with torch.autograd.set_detect_anomaly(True):
            return call(x)

    return run


def _offloaded(module, call):
    def run(x):
        with torch.autograd.graph.save_on_cpu():
            return call(x)

    return run


def _own_storage(module, call):
    """Saved tensors come back as others, as after any packing."""

    def run(x):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t):
            return call(x)

    return run


def _enabled(module, call):
    def run(x):
        with torch.no_grad(), torch.set_grad_enabled(True):
            return call(x)

    return run


def _hooked(module, call):
    """Hooks of each kind on each module, which see tensors and change nothing."""
    for m in module.modules():
        m.register_forward_pre_hook(lambda m, args: None)
        m.register_forward_hook(lambda m, args, y: None)
        m.register_full_backward_pre_hook(lambda m, grads: None)
        m.register_full_backward_hook(lambda m, dx, dy: None)
    return call


WRAPS = {"anomaly": _anomaly, "save_on_cpu": _offloaded, "packed": _own_storage, "set_grad_enabled": _enabled}


@pytest.mark.thinned(1)
@BOTH
@pytest.mark.parametrize("p", [1, 2])
@on_ranks(backend="gloo")
def test_the_same_bits_whatever_hangs_on_it(group, sp):
    for name in CASES:
        module = build(name, group, sp)
        call, want = caller(name, module), outcome(name, module, group, sp)
        for how, wrap in {**WRAPS, "module hooks": _hooked}.items():
            assert same(outcome(name, module, group, sp, wrap(module, call)), want), f"{name}: {how}"


@BOTH
@on_ranks(2, backend="gloo")
def test_module_hooks_see_the_gradients(group, sp):
    """A full backward hook sees the gradients of the module's input and output."""
    for name in ("column", "row", "mlp", "attention_mqa", "layer_norm", "rich_block"):
        module = build(name, group, sp)
        seen = []
        module.register_full_backward_hook(lambda m, dx, dy, seen=seen: seen.append((dx[0], dy[0])))
        _, dx, *_ = outcome(name, module, group, sp)
        ((got_dx, got_dy),) = seen
        assert torch.equal(got_dx, dx), name
        assert torch.equal(got_dy, own_upstream(name, module, group, sp)), name


@pytest.mark.thinned(1)
@BOTH
@pytest.mark.parametrize("p", [1, 2, pytest.param(4, marks=pytest.mark.exhaustive)])
@on_ranks()
def test_no_grad_and_inference_mode(group, sp):
    for name in CASES:
        module = build(name, group, sp)
        want = outcome(name, module, group, sp)[0]
        for mode in (torch.no_grad, torch.inference_mode):
            torch.manual_seed(14)  # as outcome() does
            with mode():
                y = caller(name, module)(own_input(name, module, group, sp))
            assert torch.equal(y, want) and y.grad_fn is None, f"{name}: {mode.__name__}"
            assert y.is_inference() == (mode is torch.inference_mode)
        module.requires_grad_(False)
        x = own_input(name, module, group, sp)
        torch.manual_seed(14)
        y = caller(name, module)(x.detach())
        assert torch.equal(y, want) and not y.requires_grad, name


@pytest.mark.parametrize("sp", [pytest.param(False, marks=pytest.mark.exhaustive), True], ids=["", "sp"])
@on_ranks(2)
def test_retain_graph_partial_backwards_and_zero_grad(group, sp):
    """retain_graph: the second backward adds the same bits once more; backward for some inputs only."""
    for name, case in CASES.items():
        module = build(name, group, sp)
        want = outcome(name, module, group, sp)
        x, upstream = own_input(name, module, group, sp), own_upstream(name, module, group, sp)
        module.zero_grad()
        torch.manual_seed(14)
        y = caller(name, module)(x)
        params = list(module.parameters())
        leaves = params + ([x] if case.takes != "ids" else [])
        for leaf in leaves:  # one after the other, as zero-bubble pipelines do
            (grad,) = torch.autograd.grad(y, leaf, upstream, retain_graph=True)
            i = 1 if leaf is x else 2 + [id(q) for q in params].index(id(leaf))
            assert torch.equal(grad, want[i]), f"{name}: input {i} alone"
        y.backward(upstream, retain_graph=True)
        y.backward(upstream)
        for leaf, once in zip([x, *params], want[1:], strict=True):
            assert once is None or torch.equal(leaf.grad, 2 * once), name
        first = [None if q.grad is None else q.grad.data_ptr() for q in params]
        module.zero_grad(set_to_none=False)
        assert all(q.grad is None or not q.grad.any() for q in params)
        x.grad = None
        torch.manual_seed(14)
        caller(name, module)(x).backward(upstream)
        assert [None if q.grad is None else q.grad.data_ptr() for q in params] == first, "in place"
        assert same([y.detach(), x.grad, *(q.grad for q in params)], want), name


# Hooks on parameters


@pytest.mark.thinned(1)
@BOTH
@pytest.mark.parametrize("p", [1, 2, 4])
@on_ranks(backend="gloo")
def test_parameter_hooks_see_the_complete_gradient_once(group, sp):
    """Each is called once per parameter, with the gradient that is there afterwards: sums over copies, ranks and uses
    have been made."""
    for name in CASES:
        module = build(name, group, sp)
        want = outcome(name, module, group, sp)[2:]
        before, after = {}, {}
        handles = []
        for key, param in module.named_parameters():
            first, second = before.setdefault(key, []), after.setdefault(key, [])
            handles.append(param.register_hook(lambda g, seen=first: seen.append(g.clone())))
            handles.append(param.register_post_accumulate_grad_hook(lambda q, seen=second: seen.append(q.grad.clone())))
        outcome(name, module, group, sp)
        for (key, _), grad in zip(module.named_parameters(), want, strict=True):
            for seen in (before, after):
                assert len(seen[key]) == 1, f"{name}: {key}: {len(seen[key])} calls"
                assert torch.equal(seen[key][0], grad), f"{name}: {key}"
        [handle.remove() for handle in handles]


@BOTH
@on_ranks(2, backend="gloo")
def test_parameter_hooks_may_change_the_gradient(group, sp):
    """A hook that changes the gradient: what it returns is what is stored."""
    for name in ("mlp", "attention_mqa", "layer_norm", "gpt"):
        module = build(name, group, sp)
        want = outcome(name, module, group, sp)
        handles = [q.register_hook(lambda g: 3 * g) for q in module.parameters()]
        got = outcome(name, module, group, sp)
        [handle.remove() for handle in handles]
        assert same(got, [*want[:2], *(3 * g for g in want[2:])]), name


# Second derivatives

SECOND = {  # None: there is one; else who refuses
    "column": None,
    "row": None,
    "head": None,
    "dropout": None,
    "mlp": "bias_act",
    "mlp_gated": "gated_act",
    "rms_norm": "rms_norm",
    "layer_norm": "layer_norm",
    "embedding": "vocab_parallel_embedding",
    "attention": "scaled_dot_product|second derivative",  # torch's own
    "block": "second derivative|scaled_dot_product",
    "gpt": "second derivative|scaled_dot_product",
}


def _second(group, sp, name):
    module = build(name, group, sp)
    x = own_input(name, module, group, sp)
    torch.manual_seed(14)
    y = caller(name, module)(x)
    leaves = [*module.parameters(), *([x] if x.requires_grad else [])]
    first = torch.autograd.grad(y.sin(), leaves, own_upstream(name, module, group, sp), create_graph=True)
    return torch.autograd.grad(sum(g.sin().sum() for g in first), leaves)


@BOTH
def test_second_derivatives_exist_or_are_refused(sp):
    """Their values: nn/test_linear_compose.py and test_regions.py."""
    for name, refused in SECOND.items():
        if refused is None:
            assert all(g.isfinite().all() and g.any() for gs in ranks.run(_second, 2, sp, name) for g in gs), name
        else:
            errors = (NotImplementedError, RuntimeError)
            ranks.run_raises(_second, 2, errors, refused, sp, name, in_turns=False)
