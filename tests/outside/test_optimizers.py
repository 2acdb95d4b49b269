"""Optimizers that look beyond an element are refused over shards, by their first step and by `debug.check`, known by
running them; their updates of shards are indeed others, and those of the optimizers that pass are not.
"""

import copy
import random

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

import tp_ext
from tests.helpers import ranks, simulated
from tests.helpers.data_parallel import mesh
from tests.helpers.meshes import mesh_of
from tp_ext.outside.optimizers import beyond_elements, runs_elementwise

WRONG = "must not update {}, which is sharded over 2 ranks: .*take tp_ext.optim.Muon, or .*torch.optim.AdamW"


class Own(torch.optim.Optimizer):
    """param -= lr * scale * grad, where subclasses compute scale."""

    def __init__(self, params, lr=0.1, bound=1.0):
        super().__init__(params, {"lr": lr})
        self.bound = bound

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(group["lr"] * self.direction(param, group["params"]))


class Larson(Own):
    """Elementwise, whatever its name."""

    def direction(self, param, params):
        return param.grad.clamp(-self.bound, self.bound)


class Dot(Own):
    """Of all tensors: no dot product of one alone."""

    def direction(self, param, params):
        return param.grad / (1 + sum((p * p.grad).sum() for p in params).abs())


class Norm(Own):
    def direction(self, param, params):
        return param.grad / param.grad.norm()


class Clipped(Own):
    """By its own gradient norm, which small gradients do not reach."""

    def direction(self, param, params):
        return param.grad * min(1.0, 20.0 / float(param.grad.norm()))


class Sorted(Own):
    def direction(self, param, params):
        return torch.where(param.grad >= param.grad.flatten().sort().values[len(param.grad) // 2], param.grad, 0)


class Rows(Own):
    """Of single rows: seen where a rank has some of the columns."""

    def direction(self, param, params):
        return param.grad - param.grad.mean(-1, keepdim=True)


class Noisy(Own):
    """Draws numbers, of torch and of Python."""

    def direction(self, param, params):
        return param.grad * random.random() + torch.randn_like(param)


class SeldomShampoo(Own):
    """Looks beyond an element after twenty steps of three tensors."""

    count = 0

    def direction(self, param, params):
        self.count += 1
        return param.grad / (param.grad.norm() if self.count > 60 else 1)


class Late(Own):
    """Normalises after a warm-up of some steps."""

    count = 0

    def direction(self, param, params):
        self.count += 1
        return param.grad / (param.grad.norm() if self.count > 20 else 1)


class Cautious(Own):
    """Drops what opposes the gradient, which none does while gradients grow, and scales the rest by their share."""

    def direction(self, param, params):
        momentum = self.state[param].setdefault("momentum", torch.zeros_like(param)).mul_(0.9).add_(param.grad)
        mask = (momentum * param.grad > 0).to(param.dtype)
        return momentum * mask / mask.mean().clamp(min=1e-3)


class FactoredWhereLarge(Own):
    """Takes means of rows and of columns of large matrices."""

    def direction(self, param, params):
        square = param.grad.square() + 1e-30
        if min(param.shape) >= 128:
            square = square.mean(0, keepdim=True) * square.mean(1, keepdim=True) / square.mean()
        return param.grad * square.rsqrt()


class Wrapping(torch.optim.Optimizer):
    """Of another optimizer, whose parameters it has; cannot be made from options."""

    def __init__(self, inner):
        self.inner = inner
        super().__init__(inner.param_groups[0]["params"], {"lr": 0.1})
        self.param_groups = inner.param_groups

    def step(self, closure=None):
        self.inner.step()


class Wants(Own):
    """Makes its state from all its parameters, as no copy can; not known by its name."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        self.sums = [torch.zeros_like(p) for group in self.param_groups for p in group["params"]]

    def direction(self, param, params):
        index = next(i for i, one in enumerate(params) if one is param)
        return self.sums[index].add_(param.grad)


class StrangeLamb(Own):
    """Cannot be run on small tensors: known by its name."""

    def direction(self, param, params):
        assert param.numel() > 100
        return param.grad


BEYOND = [Dot, Norm, Clipped, Sorted, Rows, Noisy, SeldomShampoo, Late, Cautious, FactoredWhereLarge, StrangeLamb]
TORCH_BEYOND = {"Adafactor", "LBFGS", "Muon"}
TORCH = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
}
OPTIONS = [
    {"foreach": True},
    {"foreach": False},
    {"fused": True},
    {"capturable": True},
    {"maximize": True},
    {"differentiable": True},
    {"amsgrad": True},
    {"momentum": 0.9},
    {"weight_decay": 0.1},
    {"lr": torch.tensor(0.01)},
    {"lr": 0.0},
]


def _params(device="cpu"):
    return [torch.nn.Parameter(torch.randn(8, 4, device=device)) for _ in range(3)]


@pytest.mark.parametrize("name", TORCH)
def test_optimizers_of_torch(name, device):
    seen = 0
    for options in ({}, *OPTIONS):
        try:
            optimizer = TORCH[name](_params(device), **options)
        except (TypeError, ValueError, RuntimeError, AssertionError):  # no option of this one
            continue
        seen += 1
        assert bool(beyond_elements(optimizer)) == (name in TORCH_BEYOND), options
        if device.type == "cuda" and name == "Adagrad" and "fused" in options:
            continue  # torch has it for the CPU only, which the first step says
        if name != "SparseAdam" and (device.type == "cuda" or "capturable" not in options):
            assert runs_elementwise(optimizer, 3) is (name not in TORCH_BEYOND), options
        assert not optimizer.state or name == "Adagrad", options
    assert seen


@pytest.mark.parametrize("kind", [*BEYOND, Larson, Wants])
def test_optimizers_of_ones_own(kind):
    want = "" if kind in (Larson, Wants) else kind.__name__
    assert beyond_elements(kind(_params())) == want
    if kind is not Wants:  # a wrapper that can be copied is not known by the name of what it wraps
        assert bool(beyond_elements(Wrapping(kind(_params())))) == (kind in BEYOND and kind is not SeldomShampoo)


def test_options_are_those_of_the_optimizer():
    """What is found of one is not taken for that of another of the class, nor is a default taken for an attribute."""

    class Switched(Own):
        def direction(self, param, params):
            return param.grad / (param.grad.norm() if self.bound > 1 else 1)

    assert [beyond_elements(Switched(_params(), bound=bound)) for bound in (1.0, 2.0, 1.0)] == ["", "Switched", ""]

    class Given(Own):
        def direction(self, param, params):
            return param.grad / self.bound(param.grad)

    assert [beyond_elements(Given(_params(), bound=bound)) for bound in (torch.abs, torch.norm)] == ["", "Given"]
    groups = [{"params": _params(), "lr": 0.1}, {"params": _params(), "lr": 0.2, "weight_decay": 1.0}]
    assert beyond_elements(torch.optim.SGD(groups)) == ""


def test_nothing_is_changed():
    params = _params()
    optimizer = Noisy(params, lr=torch.tensor(0.3))
    before = copy.deepcopy((params, optimizer.param_groups, dict(optimizer.state), optimizer.defaults))
    numbers = torch.get_rng_state(), random.getstate()
    hooked = []
    handle = register_optimizer_step_pre_hook(lambda *_: hooked.append(1))
    assert beyond_elements(optimizer) == "Noisy"
    handle.remove()
    assert torch.equal(torch.get_rng_state(), numbers[0]) and random.getstate() == numbers[1] and not hooked
    after = params, optimizer.param_groups, dict(optimizer.state), optimizer.defaults
    assert repr(before) == repr(after) and not any(p.grad is not None for p in params)


def _layer(group):
    tp_ext.manual_seed(1)
    layer = tp_ext.ColumnParallelLinear(4, 8, bias=False, group=group)
    full = torch.arange(32.0).view(8, 4).sin()
    layer.weight.grad = layer.weight.tp_layout.shard(full)
    return layer


OPTIMIZERS = {kind.__name__: kind for kind in (torch.optim.Muon, torch.optim.Adafactor, torch.optim.LBFGS, *BEYOND)}


def _first_step(group, name):
    layer = _layer(group)
    before = layer.weight.detach().clone()
    optimizer = OPTIMIZERS[name](layer.parameters())
    closure = [lambda: layer.weight.sum()] if name == "LBFGS" else []
    try:
        optimizer.step(*closure)
    except ValueError:
        assert torch.equal(before, layer.weight) and not optimizer.state
        raise


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "StrangeLamb"])
def test_the_first_step_over_shards(name):
    text = f"optimizer: {name} " + WRONG.format(r"a parameter of shape \(4, 4\)")
    ranks.run_raises(_first_step, 2, ValueError, text, name, in_turns=False)  # layers draw together
    ranks.run(_first_step, 1, name)


def _accepted(group):
    for kind in (Norm, StrangeLamb):
        layer = _layer(group)
        accepted = kind(layer.parameters())
        assert tp_ext.optim.accept(accepted) is accepted
        assert tp_ext.debug.findings(layer, optimizer=accepted) == []
    tp_ext.optim.accept(Norm(layer.parameters())).step()


def test_an_optimizer_is_accepted():
    ranks.run(_accepted, 2)
    with pytest.raises(TypeError, match=r"optimizer: int must be a torch.optim.Optimizer"):
        tp_ext.optim.accept(3)


def _with_hook(group, register, late):
    """The messages of a step and of debug.findings with a hook of a user."""
    layer = _layer(group)
    optimizer, seen = torch.optim.SGD(layer.parameters(), lr=0.1), []
    if late:
        optimizer.step()
    before = layer.weight.detach().clone()
    getattr(optimizer, register)(lambda *_: seen.append(layer.weight.norm()))
    try:
        optimizer.step()
    except ValueError as error:
        assert torch.equal(layer.weight, before) and not seen
        return str(error), *tp_ext.debug.findings(layer, optimizer=optimizer)
    tp_ext.optim.accept(optimizer).step()
    return len(seen)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("register", ["register_step_pre_hook", "register_step_post_hook"])
def test_a_hook_of_the_steps_over_shards_is_refused(register, late):
    """Its norm would be that of a shard. Over whole parameters it is called."""
    for message, finding in ranks.run(_with_hook, 2, register, late):
        assert message.startswith(
            "optimizer: SGD must not have the step hook _with_hook.<locals>.<lambda> over a param"
        )
        assert finding.startswith("optimizer: SGD must not have the step hook") and "sharded over 2 ranks" in finding
    assert ranks.run(_with_hook, 1, register, late) == [2]


def _under_fsdp2(group, kind):
    axes = mesh(2, 2)
    layer = fully_shard(_layer(axes["tp"].get_group()), mesh=axes["dp"])
    layer(torch.ones(4)).sum().backward()
    kind(layer.parameters()).step()


def test_the_first_step_under_fsdp2():
    match = "optimizer: Norm " + WRONG.format(r"a parameter of shape \(4, 4\)")
    ranks.run_raises(_under_fsdp2, 4, ValueError, match, Norm, in_turns=False, timeout=60)
    ranks.run(_under_fsdp2, 4, Larson)


def _checked(group):
    layer = _layer(group)
    kinds = (torch.optim.Muon, torch.optim.Adafactor, Dot)
    found = [tp_ext.debug.findings(layer, optimizer=kind(layer.parameters())) for kind in kinds]
    axes = mesh_of(1, 1, 1, group.size())
    zero = ZeroRedundancyOptimizer(layer.parameters(), torch.optim.Muon, process_group=axes["dp"].get_group())
    found.append(tp_ext.debug.findings(layer, optimizer=zero))
    for kind in (Larson, torch.optim.AdamW, tp_ext.optim.Muon):
        tp_ext.debug.check(layer, optimizer=kind(layer.parameters(), lr=0.1))
    return found


def test_check_of_an_optimizer():
    for found in ranks.run(_checked, 2):
        assert [len(sentences) for sentences in found] == [1, 1, 1, 1]
        for (sentence,), name in zip(found, ["Muon", "Adafactor", "Dot", "Muon"], strict=True):
            assert sentence.startswith(f"optimizer: {name} must not update weight, which is sharded over 2 ranks")
    assert not any(ranks.run(_checked, 1)[0])


def _updated(group, kind):
    """The full weight after three steps without the guard."""
    layer = _layer(group)
    optimizer = tp_ext.optim.accept(kind(layer.parameters(), lr=0.1))
    for _ in range(3):
        optimizer.step()
    return tp_ext.full_state_dict(layer)["weight"]


@pytest.mark.parametrize("kind", [torch.optim.Muon, torch.optim.Adafactor, Norm, Larson, torch.optim.AdamW])
def test_what_is_refused_is_another_update(kind):
    want = _updated(None, kind)
    for got in ranks.run(_updated, 2, kind):
        gap = (got - want).abs().max()
        assert gap == 0 if kind in (Larson, torch.optim.AdamW) else gap > 1e-3


class Kron(Own):
    """Cannot be run on small tensors, and has no known name, as timm's."""

    def direction(self, param, params):
        assert param.numel() >= 40
        return param.grad / param.grad.norm()


def _step_of_unknown(group, accepted):
    layer = tp_ext.ColumnParallelLinear(40, 4, group=group, bias=False, gather_output=True)
    optimizer = Kron(layer.parameters())
    if accepted:
        tp_ext.optim.accept(optimizer)
    layer(torch.ones(2, 40)).sum().backward()
    optimizer.step()


def test_what_cannot_be_tried_is_refused():
    match = r"Kron, which cannot be tried on small tensors, must not .* tp_ext.optim.accept\(optimizer\)"
    with pytest.raises(RuntimeError, match=match):
        simulated.run(_step_of_unknown, 2, False)
    simulated.run(_step_of_unknown, 2, True)
