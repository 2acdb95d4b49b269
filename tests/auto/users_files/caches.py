"""Forward code that leaves something behind: tables made when first needed, counters, results, caches of functions."""

import functools
from typing import Any

import torch
from torch import Tensor, nn

SEEN: dict[str, Any] = {}


@functools.lru_cache(maxsize=8)
def positions(length: int) -> Tensor:
    return torch.arange(length)


class Table:
    """No module, but it is held by one."""

    sin: Tensor | None = None


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cos: Tensor | None = None
        self.table, self.calls, self.seen = Table(), 0, []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        t = x.shape[1]
        if self.cos is None or self.cos.shape[0] < t:
            self.cos = positions(t).cos()[:, None].to(x.dtype)
            self.register_buffer("mask", torch.ones(t), persistent=False)
        if self.table.sin is None:
            self.table.sin = positions(t).sin()[:, None].to(x.dtype)
        SEEN["x"] = x
        self.seen.append(x)
        return x * self.cos[:t] + self.table.sin[:t]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rotary = Rotary()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.down(self.up(self.rotary(x)).relu())
        return self.last


class Failing(Net):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError(f"after {super().forward(x).shape}")
