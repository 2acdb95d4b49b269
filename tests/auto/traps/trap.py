"""Traps: tiny models for which a sharding with right shapes has wrong numbers, or for which a plan is hard to find.

A trap is a function that builds the model, with the inputs of its forward. `TRAPS` has all, by name; the files next to
this one fill it, `run` compares each with the unsharded model.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, INNER, HEADS, VOCAB = 16, 32, 4, 48


def vectors(b: int, t: int) -> tuple:
    return (torch.randn(b, t, WIDTH),)


def flat(b: int, t: int) -> tuple:
    """Rows without a dim of tokens."""
    return (torch.randn(b * t, WIDTH),)


def two_vectors(b: int, t: int) -> tuple:
    return torch.randn(b, t, WIDTH), torch.randn(b, t, WIDTH)


def images(b: int, t: int) -> tuple:
    return (torch.randn(b, 3, 8, 8),)


def ids(b: int, t: int) -> tuple:
    return (torch.randint(VOCAB, (b, t)),)


def ids_and_labels(b: int, t: int) -> dict:
    return {"ids": torch.randint(VOCAB, (b, t)), "labels": torch.randint(VOCAB, (b, t))}


@dataclass
class Trap:
    """One model. `share`: the least share of the elements of its parameters that a right plan shards, where one is
    obvious. `random`: forward draws numbers; the reference is then the model planned at p = 1. `branches`: forward
    branches on values of tensors, so that `plan` may refuse it. `others`: arguments of later calls that the example
    does not show; they may raise an error of tp_ext, but give no wrong number. `planned`: the mode of `plan`.
    """

    name: str
    make: Callable[[], nn.Module]
    why: str
    inputs: Callable[[int, int], Any] = vectors
    share: float = 0.0
    random: bool = False
    branches: bool = False
    may_raise: bool = False  # a call may raise an error of tp_ext, since `plan` cannot foresee its path
    planned: str = "train"
    modes: tuple[str, ...] = ("train", "eval")
    others: tuple[Callable[[int, int], Any], ...] = ()
    p: tuple[int, ...] = (2,)
    published: bool = True  # in a report or review, not made up here
    file: str = ""  # that enters it
    plan: dict = field(default_factory=dict)  # more arguments of plan
    apply: Callable[[Any], dict] = lambda example: {}  # more arguments of apply
    bare: bool = False  # the model as it is, without a norm before it and tanh after it
    bound: float = 1e-9  # larger only where forward itself computes in fp32
    optimizer: Callable[..., Any] = lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, eps=1e-6)

    def build(self) -> nn.Module:
        model = self.make()
        return model if self.bare else Wrapped(model)


TRAPS: dict[str, Trap] = {}


def add(name: str, make: Callable[[], nn.Module], why: str, inputs: Callable = vectors, **options: Any) -> None:
    """Enters a trap. Only models of one tensor [.., 16] and one result are wrapped."""
    if name in TRAPS:
        raise ValueError(f"two traps are called {name}")
    options.setdefault("bare", inputs not in (vectors, flat))
    TRAPS[name] = Trap(name, make, why, inputs, **options)


def trap(why: str, inputs: Callable = vectors, **options: Any) -> Callable[[type], type]:
    """The decorator of a class that is a trap under its own name."""

    def enter(model: type) -> type:
        add(model.__name__, model, why, inputs, **options)
        return model

    return enter


class Wrapped(nn.Module):
    """Replicated layers before and after: their gradients must be complete, and their inputs as well."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.before, self.inner, self.after = nn.LayerNorm(WIDTH), inner, nn.Tanh()

    def forward(self, x: Tensor) -> Any:
        return self.after(self.inner(self.before(x)))


class Raw(nn.Module):
    """An MLP of two parameters: the results of `down` are partial sums inside of its forward, `f(self, x, h)`."""

    def __init__(self, f: Callable | None = None) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(INNER, WIDTH) / 4)
        self.w2 = nn.Parameter(torch.randn(WIDTH, INNER) / 6)
        self.heads, self.f = HEADS, f

    def forward(self, x: Tensor) -> Tensor:
        return self.f(self, x, F.relu(F.linear(x, self.w1)))

    def down(self, h: Tensor) -> Tensor:
        return F.linear(h, self.w2)


class Mlp(nn.Module):
    """An MLP of two layers, with `f(self, x, h)` for what is done with the hidden features."""

    def __init__(self, f: Callable | None = None, inner: int = INNER) -> None:
        super().__init__()
        self.up, self.down, self.heads, self.f = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH), HEADS, f

    def hidden(self, x: Tensor) -> Tensor:
        return F.gelu(self.up(x))

    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(x)
        return self.f(self, x, h) if self.f else self.down(h)


class Attention(nn.Module):
    """Causal attention, its softmax in the open; `scores` may be overridden."""

    def __init__(self, heads: int = HEADS) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        b, t, _ = x.shape
        return tuple(y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT * q.shape[-1] ** -0.5

    def forward(self, x: Tensor) -> Any:
        q, k, v = self.split(x)
        return self.join(self.scores(q, k).softmax(-1) @ v)

    def join(self, a: Tensor) -> Tensor:
        return self.out(a.transpose(1, 2).flatten(-2))


class LM(nn.Module):
    """A table, an MLP and a head over the vocabulary; `f(self, logits, labels)` makes the result."""

    def __init__(self, f: Callable | None = None, tied: bool = False) -> None:
        super().__init__()
        self.e, self.mlp, self.head = nn.Embedding(VOCAB, WIDTH), Mlp(), nn.Linear(WIDTH, VOCAB, bias=False)
        self.f = f
        if tied:
            self.head.weight = self.e.weight

    def body(self, ids: Tensor) -> Tensor:
        x = self.e(ids)
        return x + self.mlp(x)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.head(self.body(ids))
        return self.f(self, logits, labels) if self.f else logits


def raw(name: str, why: str, f: Callable, **options: Any) -> None:
    add(name, lambda: Raw(f), why, **options)


def mlp(name: str, why: str, f: Callable, **options: Any) -> None:
    add(name, lambda: Mlp(f), why, **options)


def lm(name: str, why: str, f: Callable, inputs: Callable = ids_and_labels, **options: Any) -> None:
    add(name, lambda: LM(f), why, inputs, **options)
