"""Traps of our own: means, sums and norms over all heads or hidden features, which a call sums over the ranks."""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.auto.traps.trap import HEADS, INNER, WIDTH, add

Norm = Callable[[nn.Module, Tensor], Tensor]


class OverHeads(nn.Module):
    """Attention whose `norm(self, x)` of q and k is over all heads."""

    def __init__(self, norm: Norm, size: int = INNER) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, INNER) for _ in range(3))
        self.o, self.size, self.norm = nn.Linear(INNER, WIDTH), size, norm
        self.scale, self.shift = nn.Parameter(torch.randn(INNER)), nn.Parameter(torch.randn(INNER))

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.norm(self, self.q(x)), self.norm(self, self.k(x))
        q, k, v = (t.unflatten(-1, (-1, INNER // HEADS)).transpose(1, 2) for t in (q, k, self.v(x)))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def by_moments(s: nn.Module, x: Tensor) -> Tensor:
    centred = x - torch.mean(x, dim=-1, keepdim=True)
    return centred / (centred**2).mean(-1, True).add_(1e-3).sqrt() * s.scale + s.shift


NORMS: dict[str, Norm] = {
    "by_mean": lambda s, x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3) * s.scale + s.shift,
    "by_sum": lambda s, x: x / (x * x).sum(dim=-1, keepdim=True).sqrt() * s.scale - s.shift,
    "by_mean_without_dim": lambda s, x: x / (x.abs().mean(-1)[..., None] + 1) * s.scale + s.shift,
    "by_moments": by_moments,
    "layer_norm": lambda s, x: F.layer_norm(x, (INNER,), s.scale, s.shift, 1e-3),
    "layer_norm_of_code": lambda s, x: F.layer_norm(x, [s.size], bias=s.shift, weight=s.scale),
    "rms_norm": lambda s, x: F.rms_norm(x, (s.size,), weight=s.scale) + s.shift,
    "after_a_mean_of_tokens": lambda s, x: (
        (x - x.mean(1, keepdim=True)) / x.square().mean(-1, True) * s.scale + s.shift
    ),
}
for name, norm in NORMS.items():
    why = "the ranks' means are of their own heads"
    add(f"norm_of_heads_{name}", functools.partial(OverHeads, norm), why, share=0.9, p=(2, 3))


class RmsNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-4))


class OfHidden(nn.Module):
    """A gated MLP with a norm of its hidden features, as BitNet and Mamba 2 have it."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.norm = norm(INNER)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(F.silu(self.gate(x)) * self.up(x)))


MODULES: dict[str, Callable[[int], nn.Module]] = {
    "of_code": RmsNorm,
    "rms": nn.RMSNorm,
    "rms_without_weight": lambda size: nn.RMSNorm(size, elementwise_affine=False),
    "layer": nn.LayerNorm,
    "layer_without_bias": lambda size: nn.LayerNorm(size, bias=False),
    "twice": lambda size: nn.Sequential(nn.LayerNorm(size), nn.Tanh(), RmsNorm(size)),
}
for name, make in MODULES.items():
    add(f"norm_of_hidden_{name}", functools.partial(OfHidden, make), "the ranks' own features", share=0.9, p=(2, 3))


class Pooled(nn.Module):
    """A mean of hidden features is used by replicated work, and its gradient is complete."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.skip = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH), nn.Linear(1, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.up(x))
        return self.down(h) + torch.sin(self.skip(h.mean(-1, keepdim=True)))


class Both(Pooled):
    """The same mean is used by sharded work, too."""

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.up(x))
        mean = h.mean(-1, keepdim=True)
        return self.down(h - mean) + torch.sin(self.skip(mean))


add("norm_Pooled", Pooled, "the gradient of the mean is complete", share=0.9, p=(2, 3))
add("norm_Both", Both, "the gradient of the mean is partial in one of its uses")
