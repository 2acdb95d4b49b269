"""Transforms of torch.func over sharded models: right, or refused before anything is traced, also repeated; and code of
models that asks how a tensor was made."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from tests.helpers.on_ranks import on_ranks
from tp_ext import auto
from tp_ext.debug import simulate

close = {"rtol": 1e-11, "atol": 1e-12}


class Attention(nn.Module):
    """Heads that are set, a norm that keeps all features, logits that are gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.enter, self.norm = 4, nn.Linear(6, 16), nn.LayerNorm(16)
        self.qkv, self.out, self.head = nn.Linear(16, 48), nn.Linear(16, 16), nn.Linear(16, 40)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        h = self.enter(x)
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(self.norm(h)).chunk(3, -1))
        scores = (q @ k.transpose(-1, -2)).softmax(-1)
        return self.head(h + self.out((scores @ v).transpose(1, 2).reshape(b, t, -1)))


class Loss(nn.Module):
    """Logits that stay sharded up to their cross entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(6, 32), nn.Linear(32, 16), nn.Linear(16, 40, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.head(self.down(self.up(x).relu()))
        return F.cross_entropy(logits, torch.arange(len(x)))


def _parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach() for name, param in model.named_parameters()}


def _ensemble(model: nn.Module, x: Tensor) -> Tensor:
    stacked = {name: torch.stack([param, 2 * param]) for name, param in _parameters(model).items()}
    return vmap(lambda weights: functional_call(model, weights, (x[0],)))(stacked)


Transform = Callable[[nn.Module, Tensor], Tensor]
RIGHT: dict[str, Transform] = {
    "vmap": lambda model, x: vmap(model)(x),
    "vmap of a vmap": lambda model, x: vmap(vmap(model))(x[None]),
    "ensemble": _ensemble,
    "jvp": lambda model, x: jvp(model, (x[0],), (x[1],))[1],
    "jacfwd": lambda model, x: jacfwd(model)(x[0]),
    "vmap of jvp": lambda model, x: vmap(lambda row: jvp(model, (row,), (row,))[1])(x),
    "Jacobian": lambda model, x: torch.autograd.functional.jacobian(model, x[0]),
}
REFUSED: dict[str, Transform] = {
    "grad": lambda model, x: grad(lambda row: model(row).sum())(x[0]),
    "vjp": lambda model, x: vjp(model, x[0])[0],
    "jacrev": lambda model, x: jacrev(model)(x[0]),
    "vmap of jacrev": lambda model, x: vmap(jacrev(model))(x),
    "hessian": lambda model, x: hessian(lambda row: model(row).sum())(x[0]),
    "jacfwd of jacrev": lambda model, x: jacfwd(jacrev(model))(x[0]),
    "gradients of samples": lambda model, x: vmap(
        grad(lambda weights, row: functional_call(model, weights, (row,)).sum()), in_dims=(None, 0)
    )(_parameters(model), x),
}
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], set[str]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 2)), (3, 6), set(RIGHT)),
    "attention": (Attention, (3, 2, 4, 6), set(RIGHT)),
    "loss": (Loss, (3, 4, 6), {"vmap", "vmap of a vmap", "ensemble", "Jacobian"}),  # the others: no rule of its kernel
}


@pytest.mark.parametrize("planned_rows", [True, False])
@pytest.mark.parametrize("name", MODELS)
@on_ranks(2, backend="gloo")
def test_transforms_are_right_or_refused(group: Any, name: str, planned_rows: bool) -> None:
    torch.manual_seed(0)
    make, shape, right = MODELS[name]
    dense, x = make().double(), torch.randn(shape, dtype=torch.float64)
    # An example of other lengths, or another number of dims: what a transform calls is proven when it comes
    example = x[0] if planned_rows else x if x.dim() == 2 else torch.cat([x[0]] * 9)
    plan = auto.plan(dense, (example,), 2)
    sharded = auto.apply(plan, copy.deepcopy(dense), group)
    for _ in range(2):
        for transform in REFUSED.values():
            with pytest.raises(RuntimeError, match="grad, vjp, jacrev and hessian cannot go through it"):
                transform(sharded, x)
        for key in right:
            torch.testing.assert_close(RIGHT[key](sharded, x), RIGHT[key](dense, x), **close)
        torch.testing.assert_close(sharded(x[0]), dense(x[0]), **close)


# ---------------------------------------------------------------- code that asks where a tensor comes from


@pytest.mark.parametrize("read", ["is_leaf", "grad_fn", "retains_grad", "grad"])
@pytest.mark.parametrize("of", ["an argument", "a parameter", "an activation"])
def test_code_that_reads_how_a_tensor_was_made(read: str, of: str):
    """An argument may be a result of the model before: its code would go on in a way that nothing has proven."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 24), nn.Linear(24, 6)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x)
            h = F.gelu(self.up(y))
            value = getattr({"an argument": x, "a parameter": self.norm.weight, "an activation": y}[of], read)
            return self.down(h if value is None or value is (read == "is_leaf") else h.cumsum(-1))

    torch.manual_seed(0)
    model = Branches().double()
    x = torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    plan = auto.plan(model, (x,), 2)
    if of == "an argument":
        assert not plan.shardings and f"reads {read} of an argument" in plan.whole["up.weight"]

    def on_rank(rank: int, group: Any) -> None:
        sharded, dense = auto.apply(plan, copy.deepcopy(model), group), copy.deepcopy(model)
        for make in (lambda y: y, lambda y: y.requires_grad_(), lambda y: y.requires_grad_() * 1):
            torch.testing.assert_close(sharded(make(x.clone())), dense(make(x.clone())), rtol=1e-12, atol=1e-12)

    simulate(on_rank, 2)
