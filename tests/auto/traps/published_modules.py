"""Traps from reviews and public reports: modules of torch, hooks, draws, caches, code that no plan was found for."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.auto.traps.trap import (
    HEADS,
    INNER,
    LM,
    VOCAB,
    WIDTH,
    Attention,
    Mlp,
    Raw,
    add,
    ids,
    ids_and_labels,
    images,
    mlp,
    raw,
    trap,
    vectors,
)

# Gradients that code changes


class Clamped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient.clamp(-0.05, 0.05)


class Normalized(Clamped):
    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient / gradient.norm()


class Mixed(Clamped):
    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient - gradient.mean(-1, keepdim=True)


mlp("clamped_before", "a partial gradient is clamped", lambda s, x, h: s.down(F.gelu(s.up(Clamped.apply(x)))))
mlp("TrapGradientNormalized", "a sharded gradient is normalized", lambda s, x, h: s.down(Normalized.apply(h)))
mlp("TrapGradientClamped", "a partial gradient is clamped", lambda s, x, h: s.down(F.gelu(s.up(Clamped.apply(x * 2)))))
mlp("gradient_mixed", "features are mixed in backward", lambda s, x, h: s.down(Mixed.apply(h)))


@trap("a hook on a tensor clamps a partial gradient")
class TensorHook(Raw):
    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient.clamp(-0.05, 0.05))
        return self.down(F.relu(F.linear(x, self.w1)))


# Random draws: every rank draws the same numbers for other features

mlp("torch_dropout", "torch.dropout", lambda s, x, h: s.down(torch.dropout(h, 0.5, s.training)), random=True)
mlp("TrapAlphaDropout", "alpha dropout", lambda s, x, h: s.down(F.alpha_dropout(h, 0.5, s.training)), random=True)
mlp("TrapDropout1d", "dropout of rows", lambda s, x, h: s.down(F.dropout1d(h.mT, 0.5, s.training).mT), random=True)
mlp("bernoulli", "a mask of its own", lambda s, x, h: s.down(h * torch.bernoulli(torch.full_like(h, 0.5))), random=True)
mlp("rand_like", "a mask of its own", lambda s, x, h: s.down(h * (torch.rand_like(h) > 0.5)), random=True)
mlp("TrapNoiseLike", "noise", lambda s, x, h: s.down(h + 0.1 * torch.randn_like(h)), random=True)
mlp("TrapNoise", "noise of a shape", lambda s, x, h: s.down(h + 0.1 * torch.randn(h.shape)), random=True)
mlp(
    "functional_dropout",
    "dropout",
    lambda s, x, h: s.down(F.dropout(h, 0.5, s.training)),
    random=True,
    share=0.9,
    p=(2, 3),
)


@trap("alpha dropout as a module", random=True)
class AlphaDropoutModule(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.AlphaDropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(self.hidden(x)))


@trap("the masks at p = 1 are those of every p", random=True, share=0.9)
class DropoutOfLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(WIDTH, INNER), nn.Dropout(0.5), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(self.up(x)).relu())


@trap("one dropout, of a replicated and of a sharded tensor", random=True)
class TrapSharedDropout(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.down(self.drop(self.hidden(self.drop(x)))))


@trap("one dropout in two MLPs of different widths", random=True)
class TrapSharedDropoutTwoWidths(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.a, self.b = Mlp(self.use), Mlp(self.use, inner=24)

    def use(self, mlp: Mlp, x: Tensor, h: Tensor) -> Tensor:
        return mlp.down(self.drop(h))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


class Sdpa(nn.Module):
    def __init__(self, probability: float = 0.0) -> None:
        super().__init__()
        self.probability = probability

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, dropout_p=self.probability if self.training else 0.0)


class NestedDropout(Mlp):
    """https://github.com/deepspeedai/DeepSpeed/pull/4712 led to it: OPT, BART, Falcon."""

    def __init__(self, inner: float, outer: float) -> None:
        super().__init__()
        self.attention, self.probability = Sdpa(inner), outer

    def forward(self, x: Tensor) -> Tensor:
        h = self.down(F.gelu(self.up(self.attention(x))))
        return x + F.dropout(h, self.probability, self.training)


for inner in (0.0, 0.3):
    for outer in (0.0, 0.3):
        name = f"dropout_around_attention_{inner}_{outer}"
        make = lambda inner=inner, outer=outer: NestedDropout(inner, outer)  # noqa: E731
        add(name, make, "draws of nested modules", random=True, share=0.9)

# Options of embeddings, https://github.com/pytorch/torchtitan/pull/4637


def table(**options: object) -> nn.Module:
    return nn.Sequential(nn.Embedding(VOCAB, WIDTH, **options), Mlp())


add("TrapGradByFrequency", lambda: table(scale_grad_by_freq=True), "gradients by counts", ids)
add("TrapPaddingIndex", lambda: table(padding_idx=VOCAB - 1), "the last row has no gradient", ids)
add("padding_first", lambda: table(padding_idx=-VOCAB), "the first row has no gradient", ids, share=0.9)
add("max_norm", lambda: table(max_norm=0.5), "rows are scaled in place", ids)
add(
    "sparse_gradient",
    lambda: table(sparse=True),
    "a sparse gradient",
    ids,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
)

# What forward leaves in modules


@trap("a table that the first forward makes", share=0.9, p=(2, 3))
class TrapLazyRope(Mlp):
    cos: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.cos is None or self.cos.shape[0] < x.shape[1]:
            self.cos = torch.arange(x.shape[1]).cos()[:, None]
        return super().forward(x * self.cos[: x.shape[1]])


@trap("calls are counted, in a buffer and in an integer")
class Counter(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.steps += 1
        return super().forward(x) * self.steps / self.calls


class Biased(Attention):
    def forward(self, x: Tensor, alibi: Tensor) -> Tensor:
        q, k, v = (y.reshape(-1, *y.shape[2:]) for y in self.split(x))
        a = torch.baddbmm(alibi, q, k.mT, beta=1.0, alpha=0.5).softmax(-1) @ v
        return self.join(a.view(x.shape[0], self.heads, *a.shape[1:]))


@trap("ALiBi as [batch * heads, 1, keys]: Bloom", p=(2, 4))
class Bloom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads, self.attention = HEADS, Biased()

    def forward(self, x: Tensor) -> Tensor:
        slopes = 2.0 ** -(torch.arange(self.heads) + 1)
        alibi = slopes[None, :, None] * torch.arange(x.shape[1])[None, None].expand(len(x), 1, -1)
        return self.attention(x, alibi.reshape(len(x) * self.heads, 1, x.shape[1]))


def verified(example: object) -> dict:
    return {"verify": True, "example": example}


add(
    "verify_norm",
    lambda: nn.Sequential(Mlp(), nn.LayerNorm(WIDTH)),
    "a right model",
    bare=True,
    apply=verified,
    share=0.9,
)
raw(
    "verify_dropout",
    "a right model",
    lambda s, x, h: F.dropout(s.down(h), 0.5, s.training),
    random=True,
    apply=verified,
)

# Models of which no plan was found


@trap("torch's attention")
class TorchAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


layer = lambda **options: nn.TransformerEncoderLayer(WIDTH, HEADS, INNER, batch_first=True, **options)  # noqa: E731
add("TorchEncoder", lambda: layer(dropout=0.0), "its fast path in eval mode", share=0.3)
add("TorchEncoderDropout", lambda: layer(dropout=0.2), "three dropouts", random=True)


@trap("an output that a 1x1 convolution makes: FNO", images)
class FNO(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lift, self.proj = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 1)
        self.w = nn.Parameter(torch.randn(8, 8, 3, 3, dtype=torch.complex128) / 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        spectrum = torch.fft.rfft2(x)
        low = torch.einsum("bixy,ioxy->boxy", spectrum[..., :3, :3], self.w)
        spectrum = F.pad(low, (0, spectrum.shape[-1] - 3, 0, spectrum.shape[-2] - 3))
        return self.proj(F.gelu(x + torch.fft.irfft2(spectrum, s=x.shape[-2:])))


@trap("a linear output in patches of 2 x 2 x 3: DiT", bare=True, p=(2, 4))
class Patches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.out = Mlp(), nn.Linear(WIDTH, 12)

    def forward(self, x: Tensor) -> Tensor:
        y = self.out(self.mlp(x)).reshape(*x.shape[:2], 2, 2, 3)
        return torch.einsum("btpqc->bctpq", y)


add("compiled", lambda: torch.compile(Attention(), backend="eager"), "a compiled module", bare=True)


def cube(x: Tensor) -> Tensor:
    return x * x * x


@trap("a scripted function")
class Scripted(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.act = torch.jit.script(cube)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


@trap("`.forward` of a submodule: llama2.c")
class ForwardOfParts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention.forward(x)
        return x + self.mlp.forward(x)


@trap("sizes in a dict: einops' Rearrange", p=(2, 4))
class Rearranged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sizes = {"h": HEADS}
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.sizes["h"], -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))


@trap("a closure over submodules: minGPT")
class Closure(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.ModuleDict({"fc": nn.Linear(WIDTH, INNER), "proj": nn.Linear(INNER, WIDTH)})
        m = self.mlp
        self.mlpf = lambda x: m.proj(F.gelu(m.fc(x)))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlpf(x)


# Modules of torch on sharded features


def between(*parts: nn.Module, width: int = INNER, inner: int = INNER) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, inner), *parts, nn.ReLU(), nn.Linear(width, WIDTH))


class Channels(nn.Module):
    """Applies a module of [batch, channels, length] to [batch, length, channels]."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.mT).mT


add("TrapGroupNormOfHidden", lambda: between(Channels(nn.GroupNorm(4, INNER))), "statistics of groups")
add("TrapBatchNormOfHidden", lambda: between(Channels(nn.BatchNorm1d(INNER))), "running statistics", p=(2, 3))
add("TrapGlu", lambda: between(nn.GLU(), width=INNER // 2), "halves are multiplied")


@trap("a head tied by hand", ids_and_labels)
class TiedByHand(LM):
    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(self.body(ids), self.e.weight).flatten(0, 1), labels.flatten())


@trap("a block that is called twice")
class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = x + self.mlp(self.norm(x))
        return x


@trap("an encoder and its transpose", vectors)
class TiedAutoencoder(Raw):
    def forward(self, x: Tensor) -> Tensor:
        h = F.linear(x, self.w1).tanh()
        return h @ self.w1 / h.pow(2).sum(-1, keepdim=True).add(1).sqrt()
