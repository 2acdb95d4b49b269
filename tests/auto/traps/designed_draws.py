"""Traps of our own: random draws, buffers that average, attributes and caches."""

import contextlib
import functools
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.auto.traps.trap import INNER, LM, WIDTH, Attention, Mlp, Raw, add, ids_and_labels, mlp, trap

# Random draws


def seeded(s: Mlp, x: Tensor, h: Tensor) -> Tensor:
    return s.down(h * torch.rand(h.shape, generator=torch.Generator().manual_seed(5)))


def in_place_draw(s: Mlp, x: Tensor, h: Tensor) -> Tensor:
    return s.down(h + torch.empty_like(h).uniform_(-0.1, 0.1))


def drawn_once_per_row(s: Mlp, x: Tensor, h: Tensor) -> Tensor:
    return s.down(h * torch.bernoulli(torch.full(x.shape[:2], 0.5))[..., None])


DRAWS = {
    "own_generator": seeded,
    "uniform_in_place": in_place_draw,
    "row_mask": drawn_once_per_row,
    "normal_of_mean": lambda s, x, h: s.down(torch.normal(h, 0.1)),
    "multinomial": lambda s, x, h: s.down(h) + x[:, torch.multinomial(torch.ones(x.shape[1]), x.shape[1])],
    "randperm_of_hidden": lambda s, x, h: s.down(h[..., torch.randperm(h.shape[-1])]),
    "randint_like": lambda s, x, h: s.down(h * torch.randint_like(h, 0, 2)),
    "rrelu": lambda s, x, h: s.down(F.rrelu(h, training=s.training)),
    "gumbel_softmax": lambda s, x, h: s.down(F.gumbel_softmax(h, dim=-1)),
    "exponential_in_place": lambda s, x, h: s.down(h * torch.empty_like(h).exponential_()),
    "feature_dropout": lambda s, x, h: s.down(torch.feature_dropout(h, 0.5, s.training)),
    "dropout_of_sum": lambda s, x, h: F.dropout(s.down(F.dropout(h, 0.3, s.training)), 0.3, s.training),
    "dropout_of_weight": lambda s, x, h: F.linear(h, F.dropout(s.down.weight, 0.3, s.training)),
    "dropout_in_place": lambda s, x, h: s.down(F.dropout(h, 0.3, s.training, inplace=True)),
    "dropout_of_view": lambda s, x, h: s.down(F.dropout(h.unflatten(-1, (4, 8)), 0.3, s.training).flatten(-2)),
    "dropout_after_transpose": lambda s, x, h: s.down(F.dropout(h.mT, 0.3, s.training).mT),
    "python_random": lambda s, x, h: s.down(h) * random.Random(3).random(),
    "fork_rng": lambda s, x, h: s.down(h) + forked(x),
}


def forked(x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return torch.randn(x.shape)


for name, f in DRAWS.items():
    mlp(f"draws_{name}", "draws of a part", f, random=True)


mlp(
    "draws_distribution",
    "torch's distributions check values",
    lambda s, x, h: s.down(torch.distributions.Normal(h, 0.1).rsample()),
    random=True,
    branches=True,
)


@trap("layers are dropped by a draw", random=True, branches=True)
class LayerDrop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Mlp(), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        for block in (self.a, self.b):
            if not self.training or torch.rand(()).item() > 0.3:
                x = x + block(x)
        return x


@trap("stochastic depth per row", random=True)
class StochasticDepth(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.training:
            y = y * x.new_empty(len(x), 1, 1).bernoulli_(0.7) / 0.7
        return x + y


@trap("dropout of attention maps, of q and of the result", random=True)
class DropoutEverywhere(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(F.dropout(x, 0.1, self.training))
        q = F.dropout(q, 0.2, self.training)
        maps = F.dropout(self.scores(q, k).softmax(-1), 0.3, self.training)
        return F.dropout(self.join(maps @ v), 0.4, self.training)


# Buffers and attributes


@trap("a moving average of hidden features")
class MovingAverage(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(INNER))

    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(x)
        if self.training:
            self.mean.lerp_(h.detach().mean((0, 1)), 0.1)
        return self.down(h - self.mean)


@trap("a moving average that is a new tensor each time")
class ReplacedAverage(MovingAverage):
    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(x)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * h.detach().mean((0, 1))
        return self.down(h - self.mean) + self.mean.norm()


@trap("a moving maximum of partial sums: quantization's range")
class Range(Raw):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("range", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(F.linear(x, self.w1).relu())
        if self.training:
            self.range.copy_(torch.maximum(self.range, y.detach().abs().max()))
        return y / self.range


@trap("a codebook that follows its assignments", bare=True)
class Codebook(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(6, INNER))
        self.register_buffer("counts", torch.ones(6))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.hidden(x).flatten(0, 1)
        nearest = (h[:, None] - self.codes).square().sum(-1).argmin(-1)
        quantized = h + (self.codes[nearest] - h).detach()
        if self.training:
            hits = F.one_hot(nearest, 6).to(h.dtype)
            self.counts.mul_(0.9).add_(hits.sum(0), alpha=0.1)
            self.codes.mul_(0.9).add_((hits.mT @ h.detach()) / self.counts[:, None], alpha=0.1)
        return self.down(quantized).view_as(x), nearest


@trap("a batch norm by hand, of hidden features")
class OwnBatchNorm(MovingAverage):
    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(x)
        mean = h.mean((0, 1)) if self.training else self.mean
        if self.training:
            with torch.no_grad():
                self.mean += 0.1 * (mean - self.mean)
        return self.down((h - mean) / (h.var((0, 1)) + 1e-5).sqrt())


add(
    "batch_norm_of_sums",
    lambda: nn.Sequential(Mlp(), nn.Flatten(0, 1), nn.BatchNorm1d(WIDTH)),
    "of a row's sum",
    share=0.5,
)


@trap("power iteration in a buffer")
class PowerIteration(Raw):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("u", F.normalize(torch.randn(INNER), dim=0))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            v = F.normalize(self.w1.mT @ self.u, dim=0)
            if self.training:
                self.u.copy_(F.normalize(self.w1 @ v, dim=0))
        sigma = torch.dot(self.u, self.w1 @ v)
        return self.down(F.linear(x, self.w1 / sigma).relu())


@trap("a queue of the last features: MoCo")
class Queue(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.randn(4, INNER))
        self.place = 0

    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(x)
        scores = torch.einsum("bti,qi->btq", h, self.queue.clone()).softmax(-1)
        if self.training:
            self.queue[self.place % 4] = h.detach()[0, 0]
            self.place += 1
        return self.down(h) + scores.amax(-1, keepdim=True)


@trap("a list collects the losses of layers", ids_and_labels)
class Collected(LM):
    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []
        self.mlp.up.register_forward_hook(lambda m, a, y: self.losses.append(y.square().mean()))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        self.losses.clear()
        loss = F.cross_entropy(self.head(self.body(ids)).flatten(0, 1), labels.flatten())
        return loss + 0.01 * torch.stack(self.losses).sum()


@trap("a context manager of the model's own shares features")
class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.store = Mlp(), Mlp(), {}

    @contextlib.contextmanager
    def sharing(self) -> Any:
        yield self.store
        self.store.clear()

    def forward(self, x: Tensor) -> Tensor:
        with self.sharing() as store:
            store["h"] = self.a.hidden(x)
            return self.b.down(store["h"] + self.b.hidden(x)) + self.a.down(store["h"])


class Cached(Mlp):
    """Calls `f(table, self, x, h)` with a function that keeps what it made, by its argument."""

    def __init__(self, f: Callable) -> None:
        super().__init__(functools.partial(f, functools.lru_cache(lambda n: torch.arange(1.0, n + 1) / n)))


CACHED = {
    "of_hidden": lambda table, s, x, h: s.down(h * table(h.shape[-1])),
    "of_weight": lambda table, s, x, h: s.down(h * table(s.up.weight.size(0))),
    "of_tokens": lambda table, s, x, h: s.down(h * table(h.shape[1])[:, None]),
    "of_width": lambda table, s, x, h: s.down(h) * table(x.shape[-1]),
}
for name, f in CACHED.items():
    add(f"cached_{name}", functools.partial(Cached, f), "a cache that is keyed by a length")
