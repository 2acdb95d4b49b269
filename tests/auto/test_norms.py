"""Which modules are RMS norms, by the operators that they call; what the fused one computes in their place."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tp_ext
from tests.helpers.on_ranks import on_ranks
from tp_ext import auto
from tp_ext.auto.modules.leaves import fused_norm


class Norm(nn.Module):
    """That of Llama; ``change`` makes it something else."""

    def __init__(self, change: str = "", size: int = 8) -> None:
        super().__init__()
        self.weight, self.change, self.eps = nn.Parameter(torch.randn(size)), change, 1e-3
        if change == "bias":
            self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        dtype, x = x.dtype, x.to(torch.float32)
        square = x.pow(3 if self.change == "power" else 2)
        mean = square.mean(0 if self.change == "dim" else -1, keepdim=True)
        y = x * torch.rsqrt(mean + self.eps)
        if self.change == "square":
            y = square * torch.rsqrt(mean + self.eps)
        weight = 1 + self.weight if self.change == "one" else self.weight
        return y if self.change == "no weight" else weight * y.to(dtype)


class Gated(Norm):
    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        return super().forward(x if gate is None else x * gate)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_rms_norm_is_known_by_what_it_calls(dtype: torch.dtype) -> None:
    norm = Norm().to(dtype)
    fused = fused_norm(norm)
    assert fused is not None and fused.eps == 1e-3 and fused.weight is norm.weight
    x = torch.randn(5, 8, dtype=dtype)
    torch.testing.assert_close(fused(x), norm(x))


@pytest.mark.parametrize("change", ["power", "dim", "square", "one", "no weight", "bias"])
def test_other_modules_are_kept(change: str) -> None:
    assert fused_norm(Norm(change)) is None


def test_norms_that_do_more_and_layers_of_torch_are_kept() -> None:
    assert fused_norm(Gated()) is None
    assert fused_norm(Norm().double()) is None  # it computes in fp32
    assert fused_norm(nn.LayerNorm(8)) is None and fused_norm(nn.Linear(8, 8)) is None


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = Norm(size=16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


@on_ranks(2)
def test_apply_replaces_them(group: Any) -> None:
    torch.manual_seed(0)
    model, x = Wrapped(), torch.randn(3, 5, 16)
    auto.apply(auto.plan(model, (x,), 2), model, group, verify=True, example=(x,))
    assert isinstance(model.norm, tp_ext.RMSNorm) and list(model.norm.state_dict()) == ["weight"]


@on_ranks(2)
def test_verify_of_a_norm_at_the_end(group):
    """The mean of the squares of a norm's result is the same whatever comes in: its gradients are rounding."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.LayerNorm(8)), torch.randn(4, 8)
    auto.apply(auto.plan(model, (x,), 2), model, group, verify=True, example=(x,))
