"""Traps of our own: a tensor that is written in place, and then used by sharded and by replicated work; sums of
convolutions that are used by sharded work at once.

The gradient of what was written must be complete where the operator hands it on to its other inputs.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.auto.traps.trap import WIDTH, Mlp, add, images


class Written(nn.Module):
    """`write(y, s)` changes y, the result of a norm, by that of a replicated layer; an MLP and its residual use y."""

    def __init__(self, write: Callable[[Tensor, Tensor], object]) -> None:
        super().__init__()
        self.norm, self.skip, self.mlp, self.write = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), Mlp(), write

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        self.write(y, self.skip(x))
        return y + self.mlp(y)


WRITES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "added": Tensor.add_,
    "added_and_rectified": lambda y, s: F.relu_(y.add_(s)),
    "added_twice": lambda y, s: y.add_(s).add_(torch.tanh(s)),
    "multiplied": lambda y, s: y.mul_(1 + s),
    "copied": lambda y, s: y.copy_(s.cos()),
    "of_a_view": lambda y, s: y[:, 1:].add_(s[:, :-1]),
    "of_features": lambda y, s: y[..., : WIDTH // 2].mul_(s[..., WIDTH // 2 :]),
    "set_by_index": lambda y, s: y.__setitem__((slice(None), 0), s[:, -1]),
    "interpolated": lambda y, s: y.lerp_(s, 0.3),
    "with_products": lambda y, s: y.addcmul_(s, s.sin()),
    "twice_and_used": lambda y, s: y.add_(s * y.detach().exp()).sub_(s.pow(2)),
}
for name, write in WRITES.items():
    add(f"written_{name}", lambda write=write: Written(write), "the gradient of s is that of all uses of y", share=0.8)


class Used(Written):
    """A layer uses y before it is written as well."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        first = torch.sigmoid(y)
        y.add_(self.skip(x))
        return first * y + self.mlp(y)


class Inside(Written):
    """The tensor is an argument of the module that writes it, and returned."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        out = self.change(y, self.skip(x))
        return out + y + self.mlp(y)

    def change(self, y: Tensor, s: Tensor) -> Tensor:
        y.add_(s)
        return y


class Adder(nn.Module):
    """`y += s` in a module of its own, with a sharded use before and after it ends."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Mlp(), Mlp()

    def forward(self, y: Tensor, s: Tensor) -> Tensor:
        before = self.first(y)
        y = y.add(0)
        y += s
        return y + self.second(y) * before


class Modules(Written):
    def __init__(self) -> None:
        super().__init__(Tensor.add_)
        self.adder = Adder()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        y = self.adder(y, self.skip(x))
        return y + self.mlp(y)


for kind in (Used, Inside):
    add(f"written_{kind.__name__}", lambda kind=kind: kind(Tensor.add_), "likewise", share=0.5)
add("written_Modules", Modules, "likewise", share=0.8)


class Summed(nn.Module):
    """`write(y, x)` changes y, the sum that an MLP returns, by its input; only sharded work uses what it returns."""

    def __init__(self, write: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.c, self.write = Mlp(), Mlp(), Mlp(), write

    def forward(self, x: Tensor) -> Tensor:
        y = self.write(self.a(x), x)
        return self.c(self.write(self.b(y), y))


def filled(y: Tensor, x: Tensor) -> Tensor:
    """Even and odd features written into new memory, as rotary embeddings of diffusers."""
    result = torch.empty_like(y)
    result[..., 0::2], result[..., 1::2] = y[..., 1::2] * x[..., 0::2], x[..., 0::2] + y[..., 0::2]
    return result


def viewed_before(y: Tensor, x: Tensor) -> Tensor:
    """A view that is made before the memory is written, and read after it."""
    memory = torch.zeros_like(y)
    view = memory.view(-1, WIDTH)
    memory[..., 1:].copy_(x[..., 1:] * y[..., :-1])
    return view.reshape(y.shape) + y


OF_SUMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "added": Tensor.add_,
    "multiplied": Tensor.mul_,
    "of_features": lambda y, x: y[..., : WIDTH // 2].add_(x[..., WIDTH // 2 :]) is not None and y,
    "of_a_view": lambda y, x: y.view(-1, WIDTH).sub_(x.reshape(-1, WIDTH)).view(y.shape),
    "rectified": lambda y, x: F.relu_(y.sub_(x).mul_(2)),
    "set_by_index": lambda y, x: torch.zeros_like(y).index_put((torch.arange(2),), (x * y)[:2]).add_(x),
    "filled": filled,
    "viewed_before": viewed_before,
}
for name, of_sum in OF_SUMS.items():
    make = functools.partial(Summed, of_sum)
    add(f"written_sum_{name}", make, "the gradient of x is that of the sharded uses", share=0.9, p=(2, 3))


class Residual(nn.Module):
    """A basic block of a ResNet: batch norms, ReLU in place, the shortcut added in place."""

    def __init__(self, before: int, channels: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(before, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.conv2, self.bn2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.act = nn.ReLU(inplace=True)
        self.shortcut = nn.Identity()
        if before != channels:
            self.shortcut = nn.Sequential(nn.Conv2d(before, channels, 1, bias=False), nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.act(self.bn1(self.conv1(x)))))
        y += self.shortcut(x)
        return self.act(y)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.pool = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)), nn.MaxPool2d(2)
        self.blocks = nn.Sequential(Residual(8, 8), Residual(8, 16), Residual(16, 16))
        self.fc = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.blocks(self.pool(self.stem(x))).mean((2, 3)))


add("written_ResNet", ResNet, "the residual stream is written in place", images, share=0.9)


class Convolutions(nn.Module):
    """`between(y, x)` of the sum that one sharded convolution makes is the input of the next."""

    def __init__(self, between: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.before, self.sum = nn.Conv2d(3, 16, 1), nn.Conv2d(16, 6, 1)
        self.next, self.last, self.between = nn.Conv2d(6, 16, 1), nn.Conv2d(16, 4, 1), between
        self.side = nn.Conv2d(6, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.before(x))
        y = self.between(self.sum(h), x)
        return self.last(torch.sigmoid(self.next(y)) * h) + self.side(y)


BETWEEN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "nothing": lambda y, x: y,
    "view": lambda y, x: y.flatten(2).unflatten(2, y.shape[2:]),
    "silu_in_place": lambda y, x: F.silu(y, inplace=True),
    "scaled": lambda y, x: y * 2,
    "added_in_place": lambda y, x: y.add_(x.mean()),
    "halves": lambda y, x: torch.cat(y.chunk(2, 1), 1),
}
for name, between in BETWEEN.items():
    make = lambda between=between: Convolutions(between)  # noqa: E731
    add(f"sum_of_convolution_{name}", make, "its gradient is partial", images, share=0.8)


class Excitation(nn.Module):
    """Squeeze and excitation with activations in place, between a depthwise and a pointwise convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3)
        self.depthwise, self.norm = nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False), nn.BatchNorm2d(16)
        self.reduce, self.expand, self.pointwise = nn.Conv2d(16, 4, 1), nn.Conv2d(4, 16, 1), nn.Conv2d(16, 8, 1)
        self.act = nn.SiLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.norm(self.depthwise(self.act(self.stem(x)))))
        gate = self.expand(self.act(self.reduce(h.mean((2, 3), keepdim=True))))
        return self.pointwise(h * torch.sigmoid(gate))


add("written_Excitation", Excitation, "a sum is written in place, then used by sharded work", images, share=0.9)


class OneActivation(nn.Module):
    """One activation module for sharded features and for a sum: a sum of gradients at it would serve one of them."""

    def __init__(self, inplace: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.up2, self.down2 = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.act = nn.SiLU(inplace)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.down(self.act(self.up(x))))
        return self.down2(self.act(self.up2(y)))


for inplace in (False, True):
    add(f"one_activation_{inplace}", lambda inplace=inplace: OneActivation(inplace), "called three times", share=0.8)
