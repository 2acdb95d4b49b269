"""Traps from reviews and public reports: numbers in partial sums, lengths as numbers, draws, gradients, state."""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.auto.traps.trap import (
    HEADS,
    INNER,
    LM,
    WIDTH,
    Attention,
    Mlp,
    Raw,
    add,
    ids,
    ids_and_labels,
    lm,
    mlp,
    raw,
    trap,
)

rows = torch.arange(10**4)

# Partial sums: what is added to them is added by every rank

raw("right", "nothing is wrong here", lambda s, x, h: s.down(h), share=0.9, p=(2, 3))
raw("add_number", "1.0 is added on every rank", lambda s, x, h: s.down(h) + 1.0, p=(2, 3))
raw("sub_number", "the same", lambda s, x, h: s.down(h) - 1.0)
raw("rsub_number", "the same", lambda s, x, h: 1.0 - s.down(h))
raw("add_in_place", "the same, in place", lambda s, x, h: s.down(h).add_(1.0))
raw("add_alpha", "alpha times a number", lambda s, x, h: torch.add(s.down(h), 2.0, alpha=0.5))
raw("pad_value", "padding is added p times", lambda s, x, h: F.pad(s.down(h), (0, 1), value=1.0)[..., 1:])
raw(
    "index_add",
    "the base is whole on every rank",
    lambda s, x, h: x.flatten(0, 1).index_add(0, rows[: x[..., 0].numel()], s.down(h).flatten(0, 1)).view_as(x),
)
raw(
    "index_put",
    "the base is whole on every rank",
    lambda s, x, h: x.flatten(0, 1).index_put((rows[:4],), s.down(h).flatten(0, 1)[:4]).view_as(x),
)
raw(
    "scatter_add",
    "the base is whole on every rank",
    lambda s, x, h: x.scatter_add(1, torch.zeros_like(x, dtype=torch.long), s.down(h)),
)
raw("div_floor", "rounding is not linear", lambda s, x, h: torch.div(s.down(h), 0.5, rounding_mode="floor"))

# Lengths and integers that are used as numbers

raw("shape_as_number", "muP divides by the width", lambda s, x, h: s.down(h / h.shape[-1]), p=(2, 3))
raw(
    "patched_heads",
    "an integer that is set for a view also divides",
    lambda s, x, h: s.down((h.view(*x.shape[:2], s.heads, -1) / s.heads).flatten(-2)),
)
raw("arange_of_length", "positions of features", lambda s, x, h: s.down(h * torch.arange(len(s.w1))))
raw("linspace_of_length", "positions of features", lambda s, x, h: s.down(h * torch.linspace(0, 1, len(s.w1))))
raw("one_hot_of_length", "a basis", lambda s, x, h: s.down(h + F.one_hot(torch.tensor(3), len(s.w1))))
raw(
    "tensor_of_list",
    "a table by comprehension",
    lambda s, x, h: s.down(h * torch.tensor([0.9**i for i in range(len(s.w1))])),
)
mlp("TrapLinspaceOfHidden", "positions of features", lambda s, x, h: s.down(h * torch.linspace(0, 1, h.shape[-1])))
mlp("TrapArangeOfHidden", "positions of features", lambda s, x, h: s.down(h * torch.arange(h.shape[-1])))
mlp("TrapTensorOfSize", "a tensor of the width", lambda s, x, h: s.down(h / h.new_tensor(h.size(-1))))
mlp("TrapMeanField", "the mean field's scale", lambda s, x, h: s.down(h / h.shape[-1]), p=(2, 3))
mlp("TrapGatheredWidth", "the width of a weight", lambda s, x, h: s.down(h) * s.down.weight.shape[1] ** -0.5)
mlp("TrapSliceOfHidden", "half of the features by their number", lambda s, x, h: s.down(F.pad(h[..., :20], (0, 12))))
mlp(
    "TrapBranchOnSize",
    "a branch on the number of features",
    lambda s, x, h: s.down(h.relu() if h.shape[-1] > 20 else h.tanh()),
)
mlp(
    "TrapArgsort",
    "ranks among all features",
    lambda s, x, h: s.down(torch.where(h >= h.topk(8).values[..., -1:], h, 0)),
)
mlp("TrapCumsumOfHidden", "a running sum of features", lambda s, x, h: s.down(h.cumsum(-1)))
mlp("TrapShuffleChannels", "features change places", lambda s, x, h: s.down(h.unflatten(-1, (4, 8)).mT.flatten(-2)))
mlp(
    "TrapPairs",
    "pairs of features stay together",
    lambda s, x, h: s.down(h.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)),
)
mlp(
    "TrapKroneckerSizes",
    "an outer product by view",
    lambda s, x, h: s.down((h[..., :8, None] * h[..., None, 8:12]).flatten(-2)),
)


@trap("set_item: one feature of all")
class TrapSetItemOfHidden(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(x).clone()
        h[..., 0] = 1.0
        return self.down(h)


@trap("the number of tokens as a number", plan={"sequence_parallel": "auto"})
class TokensAsNumber(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = Attention(), nn.LayerNorm(WIDTH), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.a(x)
        x = x / x.shape[1] + x * x.size(1) ** -0.5 + x / x.numel()
        return x + self.b(self.norm(x))


# No sum may be scattered, so that True, which asks for some, is refused
add("TokensAsNumberSharded", TokensAsNumber, "the same, in shards", plan={"sequence_parallel": True}, branches=True)


@trap("equalized learning rate: the weight times a number from its shape")
class TrapEqualizedLearningRate(Raw):
    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(F.linear(x, self.w1 * self.w1.shape[1] ** -0.5))
        return F.linear(h, self.w2 * self.w2.shape[1] ** -0.5)


@trap("an integer that is set for split also scales the scores", p=(2, 4))
class TrapScaleFromInteger(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.width = WIDTH

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (-1, 4)).transpose(1, 2) for y in self.qkv(x).split(self.width, -1))
        return self.join((q @ k.mT * self.width**-0.5).softmax(-1) @ v)


@trap("an integer that is set for a view also scales (Gemma)")
class InnerAsNumber(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.inner = INNER

    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(x).unflatten(-1, (-1, 4)).tanh()
        return self.down(h.reshape(*x.shape[:-1], self.inner) * self.inner**0.5)


@trap("slopes of ALiBi from the number of heads")
class TrapAlibiFromInteger(Attention):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        slopes = 2.0 ** (-8 * (torch.arange(self.heads) + 1) / self.heads)
        distance = torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])
        return super().scores(q, k) - slopes[:, None, None] * distance.abs()


@trap("decays of a retention from the number of heads")
class TrapRetention(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        decay = 1 - torch.exp2(-2 - torch.arange(self.heads))
        distance = (torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])).clamp(min=0)
        return self.join((q @ k.mT * decay[:, None, None] ** distance) @ v)


class HeadMean(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        mean = (self.scores(q, k).softmax(-1) @ v).sum(1) / self.number(q)
        return self.out(torch.cat([mean] * 4, -1))


@trap("the mean of heads by an integer that is set")
class TrapMeanOfHeadsByInteger(HeadMean):
    def number(self, q: Tensor) -> int:
        return self.heads


@trap("the mean of heads by a shape")
class TrapMeanOfHeadsByShape(HeadMean):
    def number(self, q: Tensor) -> int:
        return q.shape[1]


@trap("root mean square by sum and size")
class TrapRMSBySumAndSize(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(x)
        return self.down(h * torch.rsqrt(h.pow(2).sum(-1, keepdim=True) / h.size(-1) + 1e-6))


@trap("sizes from the input's width: C // heads", share=0.0)
class TrapGlobalSizes(Attention):
    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(x).split(c, dim=2)
        q, k, v = (y.view(b, t, self.heads, c // self.heads).transpose(1, 2) for y in (q, k, v))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(a.transpose(1, 2).contiguous().view(b, t, c))


@trap("tokens and heads change roles in a view")
class TrapLocalReshape(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(x)
        return self.down(h.view(x.shape[0], -1, 4).cumsum(1).view_as(h))


# Penalties, losses and weights read in forward

mlp(
    "TrapCosine",
    "cosine of hidden features",
    lambda s, x, h: s.down(h) * F.cosine_similarity(h, h.roll(1, 0), -1)[..., None],
)
mlp("penalty_on_weight", "0.1 |w|^2 is added", lambda s, x, h: s.down(h) + 0.1 * s.up.weight.pow(2).sum())
mlp(
    "TrapPenaltyByNumel",
    "the mean by numel",
    lambda s, x, h: s.down(h) + s.up.weight.pow(2).sum() / s.up.weight.numel(),
)
mlp(
    "TrapSumThenNonlinear",
    "partial sums enter a sigmoid",
    lambda s, x, h: s.down(h).sigmoid() * F.linear(h, s.down.weight).sigmoid(),
)
raw("frozen_vocabulary", "a frozen parameter is added", lambda s, x, h: s.down(h) + s.w2.detach()[:, 0])


@trap("the sum of all squares of weights")
class TrapPenaltyOnWeights(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        penalty = sum(parameter.square().sum() for parameter in self.parameters())
        return super().forward(x) + 1e-3 * penalty


@trap("a weight that is centred: weight standardization")
class Centred(Raw):
    def forward(self, x: Tensor) -> Tensor:
        h = F.linear(x, self.w1 - self.w1.mean(1, keepdim=True)).relu()
        return F.linear(h, self.w2 - self.w2.mean(1, keepdim=True))


@trap("a product of weights is a partial sum, then relu")
class TrapMatmulOfWeights(Raw):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, (self.w2 @ self.w1).relu())


@trap("two branches must agree: a loss on hidden features")
class TrapConsistency(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.a(x).tanh(), self.b(x).tanh()
        return self.out(a + b) + F.mse_loss(a, b) + (a - b).pow(2).sum(-1, keepdim=True) / a.shape[-1]


lm(
    "TrapClassWeights",
    "weights of classes",
    lambda s, y, t: F.cross_entropy(y.flatten(0, 1), t.flatten(), torch.linspace(0.5, 1, 48)),
)
lm(
    "label_smoothing",
    "smoothing by the number of classes",
    lambda s, y, t: F.cross_entropy(y.mT, t, label_smoothing=0.1),
)


@trap("focal loss by log_softmax and gather", ids_and_labels)
class TrapFocalLoss(LM):
    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        log = self.head(self.body(ids)).log_softmax(-1).gather(-1, labels[..., None])
        return -((1 - log.exp()) ** 2 * log).mean()


# Logits of which a part is used: a padded vocabulary

lm("logits_first", "columns 0 to 40", lambda s, y, t: y[..., :40], p=(2, 3))
lm("logits_last", "columns 4 to 48", lambda s, y, t: y[..., 4:])
lm("logits_narrow", "columns 8 to 40", lambda s, y, t: y.narrow(-1, 8, 32))
lm("logits_halves", "two halves are added", lambda s, y, t: y[..., :24] + y[..., 24:])
lm("logits_chunk", "two chunks", lambda s, y, t: y.chunk(2, -1))
lm("logits_view", "a sum within a view", lambda s, y, t: y.unflatten(-1, (6, 8)).sum(2))
lm("logits_split", "uneven parts", lambda s, y, t: y.split([40, 8], -1))
lm("logits_loss", "the loss of a part", lambda s, y, t: F.cross_entropy(y[..., :40].flatten(0, 1), t.flatten() % 40))
lm("logits_width", "the width of logits", lambda s, y, t: y / y.shape[-1])

# Tensors that leave a module by an attribute


@trap("a partial sum leaves its module by an attribute")
class Attribute(Raw):
    def forward(self, x: Tensor) -> Tensor:
        self.last = self.down(F.relu(F.linear(x, self.w1)))
        return self.last


@trap("and is read by the module around it")
class AttributeRead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Attribute()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.inner.last.tanh()


@trap("activations are kept", ids)
class TrapStoresActivations(LM):
    def forward(self, ids: Tensor) -> Tensor:
        self.kept = self.mlp.hidden(self.e(ids))
        self.calls = getattr(self, "calls", 0) + 1
        return self.head(self.body(ids)) / self.calls


@trap("a hook changes features", bare=True)
class TrapFeatureHook(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.features: dict[str, Tensor] = {}
        self.up.register_forward_hook(self.keep)

    def keep(self, module: nn.Module, args: tuple, result: Tensor) -> Tensor:
        return result * 2

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


# Only one path is in the example

mlp("softmax_in_eval", "eval mode takes another path", lambda s, x, h: s.down(h if s.training else h.softmax(-1)))
mlp(
    "softmax_in_train",
    "the same, planned in eval",
    lambda s, x, h: s.down(h.softmax(-1) if s.training else h),
    planned="eval",
)
mlp("softmax_with_grad", "gradients decide", lambda s, x, h: s.down(h.softmax(-1) if torch.is_grad_enabled() else h))
mlp("softmax_by_input_grad", "the input decides", lambda s, x, h: s.down(h.softmax(-1) if h.requires_grad else h))


def with_kinds(b: int, t: int) -> dict:
    return {"x": torch.randn(b, t, WIDTH), "kinds": torch.randint(20, (b, t))}


def without_kinds(b: int, t: int) -> dict:
    return {"x": torch.randn(b, t, WIDTH)}


class Optional(nn.Module):
    """`extra` is used if `kinds` comes."""

    def __init__(self, extra: nn.Module) -> None:
        super().__init__()
        self.mlp, self.extra = Mlp(), extra

    def forward(self, x: Tensor, kinds: Tensor | None = None) -> Tensor:
        if kinds is None:
            return self.mlp(x)
        return self.mlp(x) + (self.extra(kinds) if isinstance(self.extra, nn.Embedding) else self.extra(x))


OPTIONAL = {
    "TrapUnusedEmbedding": lambda: nn.Embedding(20, WIDTH),
    "TrapUnusedHead": lambda: nn.Linear(WIDTH, WIDTH),
    "TrapUnusedTower": Mlp,
}
for name, extra in OPTIONAL.items():
    make = functools.partial(lambda extra: Optional(extra()), extra)
    add(name, make, "the example does not use it", without_kinds, others=(with_kinds, without_kinds))


def hidden_too(b: int, t: int) -> dict:
    return {"x": torch.randn(b, t, WIDTH), "hidden": True}


@trap("another branch returns hidden features", without_kinds, others=(hidden_too,), share=0.9)
class TrapOtherBranch(Mlp):
    def forward(self, x: Tensor, hidden: bool = False) -> Tensor:
        h = self.hidden(x)
        return h if hidden else self.down(h)


@trap("hidden features are returned", bare=True)
class TrapReturnsHidden(Mlp):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.hidden(x)
        return self.down(h), h


@trap("maps of attention are returned", bare=True, p=(2, 4))
class ReturnsMaps(Attention):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.split(x)
        maps = self.scores(q, k).softmax(-1)
        return self.join(maps @ v), maps


add("TrapInputGradient", Mlp, "the gradient of the input", bare=True, share=0.9, p=(2, 3))
add(
    "TrapInputGradientOfBlock",
    lambda: nn.Sequential(nn.LayerNorm(WIDTH), Mlp(), nn.LayerNorm(WIDTH)),
    "the gradient of the input, behind a norm",
    bare=True,
    share=0.9,
)
add(
    "tokens_known_as_number",
    lambda: Attention(heads=HEADS),
    "the heads divide the width",
    share=0.9,
    p=(2, 3),
)
