"""Modules and models that return one of their arguments, next to what they compute of it: the gradient that a caller
gives it is complete, and is summed by nobody."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tp_ext
from tests.helpers.same_values import same_gradients
from tests.helpers.simulated import run

X = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class _Mlp(nn.Module):
    def __init__(self, form: Callable[[Tensor, Tensor], Any] = lambda x, y: y) -> None:
        super().__init__()
        self.up, self.down, self.form = nn.Linear(16, 42), nn.Linear(42, 16), form

    def forward(self, x: Tensor) -> Any:
        return self.form(x, self.down(self.up(x).relu()))


class _Outer(nn.Module):
    """Returns what its part returns, so that both return the argument."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


class _Model(nn.Module):
    """``encoded``, which each call returns, may be given to the next one in place of ``x``."""

    def __init__(self, block: nn.Module, use: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.enter, self.block, self.leave, self.use = nn.LayerNorm(16), block, _Mlp(), use

    def forward(self, x: Tensor | None = None, encoded: Tensor | None = None) -> dict[str, Tensor]:
        encoded = self.enter(x) if encoded is None else encoded
        return {"y": self.leave(self.use(self.block(encoded))), "encoded": encoded}


FORMS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], Tensor]]] = {
    "tuple": (lambda x, y: (x, y), lambda o: o[0].sin() + o[1]),
    "list": (lambda x, y: [y, x], lambda o: o[1].sin() + o[0]),
    "dict": (lambda x, y: {"x": x, "y": y}, lambda o: o["x"].sin() + o["y"]),
    "unused": (lambda x, y: (x, y), lambda o: o[1]),
    "twice": (lambda x, y: (x, y, x), lambda o: o[0] * o[2] + o[1]),
}


def _trained(model: nn.Module) -> dict[str, Tensor]:
    """Results of a training call, and of calls that give ``encoded`` back; gradients, also that of ``encoded``."""
    output = model(x=X)
    (output["y"].square().sum() + output["encoded"].cos().sum()).backward()
    encoded = output["encoded"].detach()
    with torch.no_grad():
        given = model(encoded=encoded)
    return {"y": output["y"].detach(), "given": given["y"], "returned": given["encoded"]}


@pytest.mark.parametrize("nested", [False, True], ids=["inner", "outer"])
@pytest.mark.parametrize("form", FORMS)
def test_is_that_of_the_unsharded_model(form: str, nested: bool) -> None:
    torch.manual_seed(0)
    pack, use = FORMS[form]
    block = _Mlp(pack)
    model = _Model(_Outer(block) if nested else block, use).double()
    path = "block.inner" if nested else "block"
    plan = tp_ext.auto.plan(model, {"x": X}, 2)
    assert {f"{path}.up.weight", f"{path}.down.weight", "leave.up.weight"} <= plan.shardings.keys()
    dense = copy.deepcopy(model)
    expected = _trained(dense)

    def sharded(group: Any) -> None:
        applied = copy.deepcopy(model)
        tp_ext.auto.apply(plan, applied, group)
        torch.testing.assert_close(_trained(applied), expected, rtol=1e-10, atol=1e-12)
        same_gradients(dense, applied, rtol=1e-10, atol=1e-12)

    run(sharded, 2)
