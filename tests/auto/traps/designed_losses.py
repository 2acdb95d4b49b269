"""Traps of our own: losses in forward, towers that meet, in-place code, dtypes, lookups, recurrences, images."""

from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.auto.traps.trap import (
    INNER,
    LM,
    VOCAB,
    WIDTH,
    Attention,
    Mlp,
    Raw,
    add,
    flat,
    ids,
    ids_and_labels,
    images,
    mlp,
    raw,
    trap,
    two_vectors,
)


class Towers(nn.Module):
    """Two MLPs for two inputs; `meet(self, a, b)` is the result."""

    def __init__(self, meet: Any) -> None:
        super().__init__()
        self.a, self.b, self.scale, self.meet = Mlp(), Mlp(), nn.Parameter(torch.ones(())), meet

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.meet(self, self.a(x), self.b(y), self.a.hidden(x), self.b.hidden(y))


def contrast(s: Towers, a: Tensor, b: Tensor, h: Tensor, g: Tensor) -> Tensor:
    a, b = F.normalize(a.flatten(0, 1), dim=-1), F.normalize(b.flatten(0, 1), dim=-1)
    return F.cross_entropy(a @ b.mT * s.scale.exp(), torch.arange(len(a)))


def redundancy(s: Towers, a: Tensor, b: Tensor, h: Tensor, g: Tensor) -> Tensor:
    """Cross-correlation of hidden features must be the identity."""
    h, g = (h - h.mean((0, 1))).flatten(0, 1), (g - g.mean((0, 1))).flatten(0, 1)
    c = h.mT @ g / len(h)
    return (c - torch.eye(c.shape[-1])).square().sum() + a.mean() + b.mean()


MEETINGS = {
    "contrast": contrast,
    "redundancy": redundancy,
    "bilinear": lambda s, a, b, h, g: (h * g).sum(-1) * s.scale,
    "distance": lambda s, a, b, h, g: (h - g).norm(dim=-1) + a.sum(-1) + b.sum(-1),
    "cosine": lambda s, a, b, h, g: F.cosine_similarity(h, g, dim=-1) * a[..., 0] + b[..., 0],
    "kernel": lambda s, a, b, h, g: torch.exp(-torch.cdist(h, g)).mean() + (a * b).mean(),
    "swapped": lambda s, a, b, h, g: s.a.down(g) + s.b.down(h) + a * b,
    "concatenated": lambda s, a, b, h, g: torch.cat([h, g], -1).softmax(-1).amax(-1) + (a + b).sum(-1),
    "attended": lambda s, a, b, h, g: F.scaled_dot_product_attention(h, g, g).sum(-1) + (a - b).sum(-1),
    "smallest": lambda s, a, b, h, g: torch.minimum(h, g).sum(-1) + torch.maximum(a, b).mean(-1),
    "divergence": lambda s, a, b, h, g: (
        F.kl_div(h.log_softmax(-1), g.softmax(-1), reduction="batchmean") + (a * b).sum()
    ),
    "mean_losses": lambda s, a, b, h, g: (
        F.mse_loss(h, g) + F.l1_loss(a, b) + F.mse_loss(h, g, reduction="sum") / h.numel()
    ),
    "variances": lambda s, a, b, h, g: F.relu(1 - h.var(0)).mean() + g.std((0, 1)).mean() + (a * b).mean(),
    "triplet": lambda s, a, b, h, g: (
        F.triplet_margin_loss(h, g, h.roll(1, 0)) + F.cosine_embedding_loss(a[0], b[0], torch.ones(a.shape[1]))
    ),
    "determinant": lambda s, a, b, h, g: (
        torch.logdet(torch.eye(h.shape[1]) + h @ h.mT).sum() + (a * b + g.sum()).mean()
    ),
}
for name, f in MEETINGS.items():
    add(f"towers_{name}", lambda f=f: Towers(f), "two sharded tensors meet", two_vectors)


add(
    "towers_gaussian",
    lambda: Towers(lambda s, a, b, h, g: F.gaussian_nll_loss(h, g, h.square() + 0.1) + (a - b).square().mean()),
    "torch's function checks values",
    two_vectors,
    branches=True,
)


def vae(s: Mlp, x: Tensor, h: Tensor) -> Tensor:
    mean, variance = h.chunk(2, -1)
    divergence = 0.5 * (mean.square() + variance.exp() - variance - 1).sum(-1, keepdim=True)
    return s.down(torch.cat([mean * variance.exp(), variance], -1)) + divergence / mean.shape[-1]


def in_place_chain(s: Mlp, x: Tensor, h: Tensor) -> Tensor:
    h = h.clone()
    h.mul_(2).add_(1)
    h[..., ::2] *= -1
    h.unflatten(-1, (4, 8))[..., 0].zero_()
    return s.down(h)


def swapped_in_place(s: Mlp, x: Tensor, h: Tensor) -> Tensor:
    h = h.clone()
    a, b = h[..., :16], h[..., 16:]
    a += b
    b.sub_(a, alpha=0.5)
    return s.down(h)


def filled_by_rows(s: Mlp, x: Tensor, h: Tensor) -> Tensor:
    result = torch.zeros(*x.shape[:2], INNER)
    for i in range(x.shape[1]):
        result[:, i] = h[:, i] / (i + 1)
    return s.down(result)


def filled_by_features(s: Mlp, x: Tensor, h: Tensor) -> Tensor:
    result = torch.zeros_like(h)
    for i in range(0, h.shape[-1], 4):
        result[..., i : i + 4] = h[..., i : i + 4].softmax(-1)
    return s.down(result)


def gathered_by_index(s: Mlp, x: Tensor, h: Tensor) -> Tensor:
    return s.down(h.gather(-1, torch.arange(INNER).flip(0).expand_as(h)))


def mixed_dtypes(s: Mlp, x: Tensor, h: Tensor) -> Tensor:
    return s.down((h.to(torch.float32) / h.shape[-1]).to(h.dtype))


def autocast(s: Mlp, x: Tensor, h: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return s.down(h.softmax(-1) * h.shape[-1])


def sparse(s: Mlp, x: Tensor, h: Tensor) -> Tensor:
    graph = torch.eye(x.shape[1]).roll(1, 0).to_sparse()
    return s.down(torch.stack([torch.sparse.mm(graph, row) for row in h]))


SINGLE = {
    "vae": vae,
    "in_place_chain": in_place_chain,
    "swapped_in_place": swapped_in_place,
    "filled_by_rows": filled_by_rows,
    "filled_by_features": filled_by_features,
    "gathered_by_index": gathered_by_index,
    "autocast": autocast,
    "sparse": sparse,
    "numpy": lambda s, x, h: s.down(h * torch.from_numpy(numpy.arange(INNER) / INNER)),
    "swiglu_chunk": lambda s, x, h: s.down(torch.cat([h.chunk(2, -1)[0] * h.chunk(2, -1)[1].sigmoid()] * 2, -1)),
    "einsum_diagonal": lambda s, x, h: s.down(torch.einsum("btii->bti", h[..., None] * h[..., None, :])),
    "bilinear_einsum": lambda s, x, h: torch.einsum("bth,oh,btg->bto", h, s.down.weight, h),
    "tensordot": lambda s, x, h: torch.tensordot(h, s.down.weight, dims=([-1], [1])) + s.down.bias,
    "matmul_of_transposed": lambda s, x, h: (s.down.weight @ h.mT).mT.contiguous() + s.down.bias,
    "group_norm": lambda s, x, h: s.down(F.group_norm(h.flatten(0, 1), 4).view_as(h)),
    "layer_norm_of_half": lambda s, x, h: s.down(torch.cat([F.layer_norm(h[..., :16], (16,)), h[..., 16:]], -1)),
    "rms_by_functional": lambda s, x, h: s.down(F.rms_norm(h, (h.shape[-1],))),
    "local_response": lambda s, x, h: s.down(F.local_response_norm(h.mT, 3).mT),
    "normalized_sum": lambda s, x, h: F.normalize(s.down(h), dim=-1) * WIDTH**0.5,
    "prelu": lambda s, x, h: s.down(F.prelu(h, s.down.bias.new_tensor([0.3]))),
    "glu_of_sum": lambda s, x, h: F.glu(torch.cat([s.down(h), x], -1)),
    "softmax_in_pairs": lambda s, x, h: s.down(h.unflatten(-1, (-1, 2)).softmax(-1).flatten(-2)),
    "transposed_views": lambda s, x, h: s.down(
        h.transpose(0, 2).reshape(INNER, -1).tanh().view(INNER, *x.shape[1::-1]).transpose(0, 2)
    ),
    "batch_into_features": lambda s, x, h: s.down(h.reshape(x.shape[0], -1)[:, : INNER * x.shape[1]].view_as(h)),
    "tokens_mixed": lambda s, x, h: s.down((torch.ones(x.shape[1], x.shape[1]).tril() @ h) / x.shape[1]),
    "tokens_shifted": lambda s, x, h: s.down(F.pad(h, (0, 0, 1, -1)) + h / h.shape[1]),
    "mean_of_everything": lambda s, x, h: s.down(h) + h.mean(),
    "sum_of_everything": lambda s, x, h: s.down(h) * h.sum().sigmoid(),
    "max_of_everything": lambda s, x, h: s.down(h / (1 + h.abs().max())),
    "global_norm": lambda s, x, h: s.down(h) / torch.linalg.vector_norm(h),
    "two_norms": lambda s, x, h: s.down(h) * (torch._foreach_norm([h, x])[0] / 10),
    "compared_to_mean": lambda s, x, h: s.down(torch.where(h > h.mean(-1, keepdim=True), h, 0.1 * h)),
    "entropy_of_features": lambda s, x, h: s.down(h) - (h.softmax(-1) * h.log_softmax(-1)).sum(-1, keepdim=True),
    "sparsemax_like": lambda s, x, h: s.down((h - h.topk(4).values.mean(-1, keepdim=True)).relu()),
    "winner_takes_all": lambda s, x, h: s.down(h * F.one_hot(h.argmax(-1), h.shape[-1])),
    "constant_of_hidden": lambda s, x, h: s.down(h + torch.full_like(h, 0.1) * h.new_ones(()).expand_as(h)),
    "zero_times_length": lambda s, x, h: s.down(h + h.new_zeros(h.shape) + torch.zeros(h.shape[-1])),
}
for name, f in SINGLE.items():
    mlp(f"between_{name}", "what is between up and down", f)
counted = "its length is a value"
mlp(
    "between_counts",
    counted,
    lambda s, x, h: s.down(h) + torch.bincount(torch.arange(h.shape[-1]) % 3).sum(),
    branches=True,
)
mlp("between_mixed_dtypes", "a length in fp32", mixed_dtypes, bound=1e-6)


@trap("a recurrent cell by hand: the state is sharded and partial in turns")
class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.state, self.out = nn.Linear(WIDTH, INNER), nn.Linear(INNER, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h, results = torch.zeros(len(x), INNER), []
        for step in self.inputs(x).unbind(1):
            h = torch.tanh(step + self.state(h))
            results.append(self.out(h))
        return torch.stack(results, 1)


@trap("an LSTM of torch behind an MLP")
class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.lstm = Mlp(), nn.LSTM(WIDTH, WIDTH // 2, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(self.mlp(x))[0]


@trap("bags of embeddings", lambda b, t: (torch.randint(VOCAB, (b, t)),))
class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sums, self.means = nn.EmbeddingBag(VOCAB, WIDTH, mode="sum"), nn.EmbeddingBag(VOCAB, WIDTH, mode="mean")
        self.mlp = Mlp()

    def forward(self, rows: Tensor) -> Tensor:
        return self.mlp(self.sums(rows) * self.means(rows))


@trap("a table that is indexed, not looked up", ids)
class Indexed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.mlp = nn.Parameter(torch.randn(VOCAB, WIDTH)), Mlp()

    def forward(self, ids: Tensor) -> Tensor:
        return self.mlp(self.table[ids] + self.table.index_select(0, ids[:, 0])[:, None] + self.table[:5].mean(0))


@trap("a one-hot product as a lookup", ids)
class OneHot(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.mlp = nn.Linear(VOCAB, WIDTH), Mlp()

    def forward(self, ids: Tensor) -> Tensor:
        return self.mlp(self.table(F.one_hot(ids, self.table.weight.shape[1]).to(self.table.weight.dtype)))


@trap("hashed rows: ids modulo the number of rows", ids)
class Hashed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.mlp = nn.Embedding(VOCAB, WIDTH), Mlp()

    def forward(self, ids: Tensor) -> Tensor:
        return self.mlp(
            self.table((ids * 7 + 3) % self.table.weight.shape[0]) + self.table((ids + 1) % len(self.table.weight))
        )


@trap("a table by columns and by rows: factorized and scaled by its width", ids_and_labels)
class Scaled(LM):
    def __init__(self) -> None:
        super().__init__(tied=True)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.e(ids) * self.e.weight.shape[1] ** 0.5
        logits = self.head(x + self.mlp(x)) * self.head.weight.shape[0] ** -0.5
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


@trap("a tied head with a bias per word and a mask of words", ids_and_labels)
class MaskedVocabulary(LM):
    def __init__(self) -> None:
        super().__init__(tied=True)
        self.bias = nn.Parameter(torch.zeros(VOCAB))
        self.register_buffer("allowed", torch.arange(VOCAB) % 5 != 0)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = (self.head(self.body(ids)) + self.bias).masked_fill(~self.allowed, -1e4)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + logits.max() * 1e-3


@trap("two heads on one table, mixed: pointer networks", ids_and_labels)
class Pointer(LM):
    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.body(ids)
        copied = torch.zeros(*ids.shape, VOCAB).scatter_add(
            -1, ids[:, None].expand(-1, ids.shape[1], -1), (x @ x.mT).softmax(-1)
        )
        mixed = 0.7 * self.head(x).softmax(-1) + 0.3 * copied
        return F.nll_loss(mixed.add(1e-6).log().flatten(0, 1), labels.flatten())


@trap(
    "classes in two levels: an adaptive softmax",
    lambda b, t: {"x": torch.randn(b * t, WIDTH), "labels": torch.randint(40, (b * t,))},
    branches=True,
)
class Adaptive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.loss = Mlp(), nn.AdaptiveLogSoftmaxWithLoss(WIDTH, 40, [10, 20])

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.mlp(x), labels).loss


@trap("rows without tokens: statistics of a flat batch", flat)
class BatchStatistics(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(x)
        return self.down((h - h.mean(0)) / (h.std(0) + 1e-3)) + (x - x.mean(0)) / len(x)


@trap("attention over features of one row, not over tokens", flat)
class FeatureTokens(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(x)[..., None]
        return self.down(((h @ h.mT).softmax(-1) @ h).squeeze(-1))


@trap("a gate over blocks that sees all of them: hyper-connections")
class Connections(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Mlp(), Attention(), Mlp()])
        self.mix = nn.Parameter(torch.randn(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        states = [x]
        for block, weights in zip(self.blocks, self.mix, strict=True):
            mixed = torch.einsum("s,sbti->bti", weights[: len(states)].softmax(0), torch.stack(states))
            states.append(block(F.layer_norm(mixed, (WIDTH,))))
        return torch.stack(states).mean(0)


@trap("depth by a fixed point: one block many times, its input added each time")
class FixedPoint(Raw):
    def forward(self, x: Tensor) -> Tensor:
        z = torch.zeros_like(x)
        for _ in range(3):
            z = torch.tanh(self.down(F.linear(z, self.w1).relu()) + x)
        return z


raw("two_down_products", "one partial, one whole", lambda s, x, h: s.down(h) + F.linear(h.detach(), s.w2).tanh())
raw("down_of_down", "partial sums enter the first weight again", lambda s, x, h: s.down(F.linear(s.down(h), s.w1)))


@trap("a squeeze-and-excitation of sharded channels", images, bare=True)
class Excitation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, WIDTH, 3, padding=1), nn.Conv2d(WIDTH, 4, 1)
        self.squeeze, self.excite = nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).relu()
        gate = self.excite(self.squeeze(h.mean((2, 3))).relu()).sigmoid()
        return self.b(h * gate[..., None, None]).flatten(1)


@trap("channels are shuffled between groups, by a view", images, bare=True)
class ShuffleNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, WIDTH, 1), nn.Conv2d(WIDTH, WIDTH, 1, groups=4)
        self.out = nn.Conv2d(WIDTH, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).relu()
        b, c, *sizes = h.shape
        return self.out(self.b(h).view(b, 4, c // 4, *sizes).transpose(1, 2).reshape(b, c, *sizes))


@trap("pixels are shuffled out of channels", images, bare=True)
class PixelShuffle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.pixel_shuffle(self.a(x).relu(), 2))
