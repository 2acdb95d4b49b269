"""Traps of our own: small models as somebody would write them: sharing, branches, results, views, complex numbers."""

import collections
import copy
import dataclasses
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.auto.traps.trap import (
    HEADS,
    INNER,
    WIDTH,
    Attention,
    Mlp,
    Raw,
    mlp,
    trap,
)

# Sharing


@trap("a weight is tied to its own transpose in another module")
class TiedTranspose(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.down.weight = nn.Parameter(self.up.weight.detach().mT.clone())
        self.back = nn.Linear(WIDTH, INNER)
        self.back.weight = self.up.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.hidden(x) + self.back(x).tanh()) + F.linear(self.back(x), self.up.weight.mT)


@trap("one module under two names, in other roles", share=0.0)
class TwoNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.b, self.c = self.a, nn.Linear(WIDTH, WIDTH)
        self.parts = nn.ModuleList([self.a, self.c, self.a])

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x).relu()
        return self.b(x)


@trap("a bias is shared by an output and by hidden features")
class SharedBias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.b.bias = self.a.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu())


@trap("a parameter is a view of the buffer of all parameters", bare=True)
class FlatParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.flat = nn.Parameter(torch.randn(2 * WIDTH * INNER) / 5)

    def forward(self, x: Tensor) -> Tensor:
        w1, w2 = self.flat.split(WIDTH * INNER)
        return F.linear(F.linear(x, w1.view(INNER, WIDTH)).relu(), w2.view(WIDTH, INNER))


@trap("weights in a ParameterList and a ParameterDict")
class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ups = nn.ParameterList(torch.randn(INNER, WIDTH) / 4 for _ in range(2))
        self.downs = nn.ParameterDict({str(i): nn.Parameter(torch.randn(WIDTH, INNER) / 6) for i in range(2)})

    def forward(self, x: Tensor) -> Tensor:
        for i, up in enumerate(self.ups):
            x = x + F.linear(F.linear(x, up).relu(), self.downs[str(i)])
        return x


@trap("a module that is in no attribute: held by a closure and by a list")
class Hidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()
        self.calls = [self.mlp.up, torch.tanh, self.mlp.down]

    def forward(self, x: Tensor) -> Tensor:
        for call in self.calls:
            x = call(x)
        return x


@trap("a teacher that is a frozen copy", share=0.5)
class Teacher(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student = Mlp()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.teacher(x)
        y = self.student(x)
        return y + F.mse_loss(y, target) + (y - target).abs().mean(-1, keepdim=True)


@trap("a teacher that follows its student within forward")
class MomentumTeacher(Teacher):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                for a, b in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                    a.lerp_(b, 0.1)
        return super().forward(x)


@trap("the same linear for queries and keys, its bias for values")
class SharedQueries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qk, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in (self.qk(x), x + self.qk.bias))
        return self.out(F.scaled_dot_product_attention(q, q, v).transpose(1, 2).flatten(-2))


# Paths that the example lacks


def masked(b: int, t: int) -> dict:
    return {"x": torch.randn(b, t, WIDTH), "mask": torch.arange(t) < t - 1}


def unmasked(b: int, t: int) -> dict:
    return {"x": torch.randn(b, t, WIDTH)}


@trap("a mask that the example lacks normalizes features", unmasked, others=(masked, unmasked), bare=True)
class OptionalMask(Mlp):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        h = self.hidden(x)
        if mask is not None:
            h = h.softmax(-1) * mask[:, None]
        return self.down(h)


def scaled(b: int, t: int) -> dict:
    return {"x": torch.randn(b, t, WIDTH), "scale": 2.0, "kind": "mean"}


@trap("an option by a string and a number", unmasked, others=(scaled, unmasked), bare=True)
class Kinds(Mlp):
    def forward(self, x: Tensor, scale: float = 1.0, kind: str = "none") -> Tensor:
        h = self.hidden(x) * scale
        return self.down(h if kind == "none" else h - h.mean(-1, keepdim=True))


def two_dims(b: int, t: int) -> dict:
    return {"x": torch.randn(b, WIDTH)}


def one_token(b: int, t: int) -> dict:
    return {"x": torch.randn(b, 1, WIDTH)}


@trap("another path for one token, for two dims", unmasked, others=(one_token, two_dims), bare=True)
class Shapes(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(x)
        if x.ndim == 2 or x.shape[1] == 1:
            return self.down(h / h.sum(-1, keepdim=True))
        return self.down(h)


@trap("long inputs take another path", unmasked, others=(lambda b, t: unmasked(b, 20),), bare=True)
class Long(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(x)
        return self.down(h.cumsum(-1) if x.shape[1] > 16 else h)


@trap("the first calls take another path", bare=True, may_raise=True)
class Warmup(Mlp):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = self.hidden(x)
        return self.down(h if self.calls < 3 else h / h.norm(dim=-1, keepdim=True))


@trap("a flag that is set after planning by train()", share=0.0)
class TrainFlag(Mlp):
    scale = 1.0

    def train(self, mode: bool = True) -> "TrainFlag":
        self.scale = 1.0 if mode else 0.5
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(x)
        return self.down(h * self.scale if self.scale == 1.0 else h.softmax(-1))


mlp(
    "inference_mode",
    "inference mode takes another path",
    lambda s, x, h: s.down(h.cumsum(-1) if not torch.is_grad_enabled() else h),
)
mlp(
    "frozen_path",
    "a frozen weight takes another path",
    lambda s, x, h: s.down(h if s.up.weight.requires_grad else h.sort(-1).values),
)
mlp("branch_on_value", "a branch on a value", lambda s, x, h: s.down(h if h.sum() > 0 else -h), branches=True)
mlp(
    "branch_on_input",
    "a branch on a value",
    lambda s, x, h: s.down(h if x.mean() > 0 else h.softmax(-1)),
    branches=True,
)
mlp("rows_by_value", "a number of rows by values", lambda s, x, h: s.down(h)[x[..., 0] > 0], branches=True, bare=True)

# Results that carry sharded dims


@dataclasses.dataclass
class Outputs:
    result: Tensor
    hidden: Tensor
    maps: tuple[Tensor, ...] = ()


Pair = collections.namedtuple("Pair", ["result", "gate"])


@trap("hidden features in a dataclass", bare=True)
class InDataclass(Mlp):
    def forward(self, x: Tensor) -> Outputs:
        h = self.hidden(x)
        return Outputs(self.down(h), h, (h.sum(-1), h.mean((0, 1))))


@trap("hidden features in a dict in a list", bare=True)
class InDict(Mlp):
    def forward(self, x: Tensor) -> dict:
        h = self.hidden(x)
        return {"y": self.down(h), "all": [x, {"h": h.relu()}], "none": None, "number": float(h.shape[-1])}


@trap("hidden features in a named tuple", bare=True)
class InNamedTuple(Mlp):
    def forward(self, x: Tensor) -> Pair:
        h = self.hidden(x)
        return Pair(self.down(h), h.sigmoid().mT)


@trap("keys and values are returned, and taken in the next call", bare=True, p=(2, 4))
class Cached(Attention):
    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        q, k, v = self.split(x)
        return self.join(self.scores(q, k).softmax(-1) @ v), (k, v)


@trap("only hidden features are returned", bare=True)
class OnlyHidden(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return self.hidden(x)


@trap("a weight is returned", bare=True)
class ReturnsWeight(Mlp):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), self.up.weight


@trap("partial sums are returned twice, once as they are", bare=True)
class ReturnsParts(Raw):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.down(F.linear(x, self.w1).relu())
        return y, y.tanh(), x + y


@trap("a shape is returned", bare=True)
class ReturnsShape(Mlp):
    def forward(self, x: Tensor) -> tuple[Tensor, int, Tensor]:
        h = self.hidden(x)
        return self.down(h), h.shape[-1], torch.tensor(h.shape)


@trap("heads of many tasks in a dict", bare=True)
class Tasks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Mlp()
        self.heads = nn.ModuleDict({"a": nn.Linear(WIDTH, 4), "b": nn.Linear(WIDTH, 1), "c": nn.Linear(WIDTH, 6)})

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.body(x)
        results = {name: head(y) for name, head in self.heads.items()}
        results["c"] = results["c"].softmax(-1) * results["b"].sigmoid()
        return results


# Small models


@trap("dense experts, routed by a softmax over hidden features")
class DenseExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 4), nn.ModuleList(Mlp(inner=8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        top = weights * (weights >= weights.topk(2).values[..., -1:])
        y = torch.stack([expert(x) for expert in self.experts], -2)
        balance = weights.mean((0, 1)).square().sum() * weights.shape[-1]
        return (top[..., None] * y).sum(-2) + 0.01 * balance


@trap("experts as one tensor; the capacity is a number of theirs")
class StackedExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(4, WIDTH) / 4)
        self.w1, self.w2 = nn.Parameter(torch.randn(4, WIDTH, 8) / 4), nn.Parameter(torch.randn(4, 8, WIDTH) / 3)

    def forward(self, x: Tensor) -> Tensor:
        weights = F.linear(x, self.gate).softmax(-1)
        h = torch.einsum("bti,eih->bteh", x, self.w1).relu()
        return torch.einsum("bteh,eho,bte->bto", h, self.w2, weights) / len(self.w1)


@trap("index_add over experts to the residual stream")
class ScatteredExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Mlp(inner=8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        rows, result = x.flatten(0, 1), x.flatten(0, 1).clone()
        for i, expert in enumerate(self.experts):
            mine = torch.arange(i, len(rows), 2)
            result.index_add_(0, mine, expert.down(F.gelu(expert.up(rows[mine]))))
        return result.view_as(x)


@trap("linear attention, normalized by sums over heads' dims")
class LinearAttention(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        sums = torch.einsum("bhtd,bhd->bht", q, k.sum(2)) + 1e-6
        a = torch.einsum("bhtd,bhde->bhte", q, torch.einsum("bhtd,bhte->bhde", k, v)) / sums[..., None]
        return self.join(a)


@trap("maps of all heads are mixed, before and after the softmax")
class TalkingHeads(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(HEADS, HEADS), nn.Linear(HEADS, HEADS)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        maps = self.before(self.scores(q, k).movedim(1, -1)).movedim(-1, 1).softmax(-1)
        return self.join(self.after(maps.movedim(1, -1)).movedim(-1, 1) @ v)


@trap("q and k are normalized over all heads, with one weight", p=(2, 4))
class NormalizedQueries(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (self.norm(q), self.norm(k), v))
        return self.join(self.scores(q, k).softmax(-1) @ v)


@trap("q and k are normalized per head: its weight is used by all", share=0.9, p=(2, 4))
class NormalizedHeads(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH // HEADS)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return super().scores(self.norm(q), self.norm(k))


@trap("interleaved q, k, v per head: GPT-NeoX", p=(2, 4))
class Interleaved(Attention):
    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = self.qkv(x).view(*x.shape[:2], self.heads, -1).transpose(1, 2).chunk(3, -1)
        return q, k, v


@trap("rotary positions in complex numbers, from the width of a head", p=(2, 4))
class ComplexRotary(Attention):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        angles = torch.arange(q.shape[2])[:, None] * 100.0 ** (-torch.arange(0, q.shape[-1], 2) / q.shape[-1])
        turn = torch.polar(torch.ones_like(angles), angles)
        q, k = (torch.view_as_real(torch.view_as_complex(y.unflatten(-1, (-1, 2)).contiguous()) * turn) for y in (q, k))
        return super().scores(q.flatten(-2), k.flatten(-2))


@trap("relative positions, one table for all heads", share=0.0, p=(2, 4))
class RelativePositions(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, HEADS)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        distance = (torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])).clamp(-8, 8) + 16
        return super().scores(q, k) + self.table(distance).movedim(-1, 0)


@trap("a selective scan over tokens with sharded channels")
class Scan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, 4), nn.Linear(INNER, WIDTH)
        self.a = nn.Parameter(torch.rand(INNER, 4))

    def forward(self, x: Tensor) -> Tensor:
        h, state, results = self.up(x), torch.zeros(len(x), INNER, 4), []
        gate = self.gate(h).sigmoid()
        for i in range(x.shape[1]):
            state = state * torch.exp(-self.a) + h[:, i, :, None] * gate[:, i, None]
            results.append((state * gate[:, i, None]).sum(-1))
        return self.down(torch.stack(results, 1) / math.sqrt(self.a.shape[0]))
