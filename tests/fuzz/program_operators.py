"""Operators of the programs of programs.py: functions of one value or two, [batch, tokens, width], and of a module."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTHS, HEADS = (8, 12, 16, 24), 4
OPERATORS: dict[str, Callable] = {}  # name -> f(program, module, a[, b]): a value [batch, tokens, width]
MODULES: dict[str, Callable] = {}  # name of an operator -> width of its input, random number -> its module
PAIRS: set[str] = set()  # operators of two values of one width


def operator(make: Callable | None = None, pair: bool = False) -> Callable:
    def enter(f: Callable) -> Callable:
        OPERATORS[f.__name__] = f
        if make is not None:
            MODULES[f.__name__] = make
        if pair:
            PAIRS.add(f.__name__)
        return f

    return enter


class Vector(nn.Module):
    """A parameter that no module of torch has."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape) / shape[-1] ** 0.5)


class Fixed(nn.Module):
    """A buffer."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.register_buffer("value", value)


def width_of(n: float) -> int:
    return WIDTHS[int(n * len(WIDTHS))]


# With modules and parameters: each is drawn three times as often
@operator(lambda width, n: nn.Linear(width, width_of(n), bias=n * 100 % 2 < 1))
def linear(m, a):
    return m(a)


@operator(lambda width, n: nn.Sequential(nn.Linear(width, 24), nn.GELU(), nn.Linear(24, width)))
def mlp(m, a):
    return a + m(a)


@operator(lambda width, n: Vector(width_of(n), width))
def raw_linear(m, a):
    return F.linear(a, m.weight)


@operator(lambda width, n: Vector(width, width_of(n)))
def matmul(m, a):
    return a @ m.weight


@operator(lambda width, n: Vector(width, width_of(n)))
def einsum(m, a):
    return torch.einsum("bti,ij->btj", a, m.weight)


@operator(lambda width, n: Vector(width_of(n), width))
def there_and_back(m, a):
    return torch.relu(a @ m.weight.T) @ m.weight


@operator(lambda width, n: Vector(HEADS, width // HEADS, width // HEADS))
def per_head(m, a):
    return torch.einsum("bthi,hij->bthj", a.unflatten(-1, (HEADS, -1)), m.weight).flatten(-2)


@operator(lambda width, n: Vector(width))
def scaled(m, a):
    return a * (1 + m.weight)


@operator(lambda width, n: Vector(width))
def shifted(m, a):
    return a + m.weight


@operator(lambda width, n: Vector(1))
def scalar(m, a):
    return a * m.weight + m.weight.sum()


@operator(lambda width, n: nn.LayerNorm(width))
def layer_norm(m, a):
    return m(a)


@operator(lambda width, n: nn.RMSNorm(width))
def rms_norm(m, a):
    return m(a)


@operator(lambda width, n: nn.Linear(width, width))
def normed_weight(m, a):
    return m(a) / (1 + m.weight.norm())


@operator(lambda width, n: nn.Linear(width, 3 * width))
def attention(m, a):
    q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in m(a).chunk(3, -1))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)


@operator(lambda width, n: nn.Linear(width, 2 * width))
def gated(m, a):
    gate, up = m(a).chunk(2, -1)
    return F.silu(gate) * up


@operator(lambda width, n: nn.Linear(width, 3 * width // 2))
def uneven(m, a):
    first, second = m(a).split([a.shape[-1], a.shape[-1] // 2], -1)
    return first + second.repeat(1, 1, 2)


@operator(lambda width, n: nn.Conv1d(width, width, 3, padding=1, groups=(1, 2, width)[int(n * 3)]))
def conv(m, a):
    return m(a.transpose(1, 2)).transpose(1, 2)


@operator(lambda width, n: Fixed(torch.randperm(width)))
def permuted(m, a):
    return a[..., m.value]


@operator(lambda width, n: Fixed(torch.arange(width) % 3 == 0))
def masked(m, a):
    return a.masked_fill(m.value, 0.5)


@operator(lambda width, n: Fixed(torch.linspace(-1, 1, width)))
def table(m, a):
    return a * m.value + m.value[: a.shape[-1] // 2].sum()


# Elementwise, and of the last dim
@operator()
def gelu(m, a):
    return F.gelu(a)


@operator()
def affine(m, a):
    return 0.5 * a + 1


@operator()
def tanh(m, a):
    return torch.tanh(a)


@operator()
def abs_(m, a):
    return a.abs()


@operator()
def softmax(m, a):
    return a.softmax(-1)


@operator()
def log_softmax(m, a):
    return a.log_softmax(-1)


@operator()
def normalize(m, a):
    return F.normalize(a, dim=-1, eps=0.1)


@operator()
def mean(m, a):
    return a - a.mean(-1, keepdim=True)


@operator()
def sum_(m, a):
    return a * a.sum(-1, keepdim=True)


@operator()
def largest(m, a):
    return a - a.amax(-1, keepdim=True)


@operator()
def spread(m, a):
    return a / (1 + a.var(-1, keepdim=True))


@operator()
def cumsum(m, a):
    return a.cumsum(-1)


@operator()
def flip(m, a):
    return a.flip(-1)


@operator()
def roll(m, a):
    return a.roll(1, -1)


@operator()
def rotated(m, a):
    first, second = a.chunk(2, -1)
    return torch.cat([-second, first], -1)


@operator()
def strided(m, a):
    return a[..., ::2] * a[..., 1::2]


@operator()
def narrowed(m, a):
    return a.narrow(-1, 2, a.shape[-1] - 4) if a.shape[-1] > 8 else a[..., 0:4].repeat(1, 1, 2)


@operator()
def repeated(m, a):
    return a.repeat_interleave(2, -1) if a.shape[-1] <= 12 else a.tile(1)


@operator()
def padded(m, a):
    return F.pad(a, (0, 4)) if a.shape[-1] <= 12 else a


@operator()
def by_width(m, a):
    return a / a.shape[-1] ** 0.5


@operator()
def by_number(m, a):
    return a * (1 + 1 / a.numel())


@operator()
def outer(m, a):
    return (a.unsqueeze(-1) * a.unsqueeze(-2)).mean(-1)


@operator()
def clamped(m, a):
    return torch.where(a > 0, a.clamp(max=2), 0.1 * a)


@operator()
def sorted_(m, a):
    return a.sort(-1).values


# Of heads
@operator()
def softmax_over_heads(m, a):
    return a.unflatten(-1, (HEADS, -1)).softmax(-2).flatten(-2)


@operator()
def swapped(m, a):
    return a.unflatten(-1, (HEADS, -1)).transpose(-1, -2).flatten(-2)


@operator()
def sum_over_heads(m, a):
    heads = a.view(*a.shape[:-1], HEADS, -1)
    return (heads + heads.sum(-2, keepdim=True)).flatten(-2)


@operator()
def norm_of_heads(m, a):
    heads = a.unflatten(-1, (HEADS, -1))
    return (heads * heads.pow(2).mean(-1, keepdim=True).add(0.1).rsqrt()).flatten(-2)


@operator()
def interleaved(m, a):
    return torch.stack([a, -a], -1).flatten(-2)[..., : a.shape[-1]]


@operator()
def first_head(m, a):
    heads = a.unflatten(-1, (HEADS, -1))
    return (heads * heads[..., :1, :]).flatten(-2)


# Of tokens
@operator()
def mixed(m, a):
    return (a @ a.mT / a.shape[-1]).softmax(-1) @ a


@operator()
def mean_of_tokens(m, a):
    return a - a.mean(1, keepdim=True)


@operator()
def shifted_tokens(m, a):
    return F.pad(a, (0, 0, 1, 0))[:, :-1]


@operator()
def cumulated_tokens(m, a):
    return a.cumsum(1)


@operator()
def flat_tokens(m, a):
    return F.gelu(a.flatten(0, 1)).view(a.shape)


@operator()
def reshaped(m, a):
    return torch.tanh(a.reshape(-1, a.shape[-1])).reshape(*a.shape)


# In place
@operator()
def written(m, a):
    y = a.clone()
    y[..., : y.shape[-1] // 2] *= 2
    return y


@operator()
def zeroed(m, a):
    y = a * 1
    y[..., 0] = 0
    return y


@operator()
def detached(m, a):
    return a * a.detach().mean(-1, keepdim=True)


# Of two values
@operator(pair=True)
def add(m, a, b):
    return a + b


@operator(pair=True)
def multiply(m, a, b):
    return a * b


@operator(pair=True)
def added(m, a, b):
    y = a.clone()
    y += b
    return y


@operator(pair=True)
def dot(m, a, b):
    return a * (a * b).sum(-1, keepdim=True)


@operator(pair=True)
def cat(m, a, b):
    return torch.cat([a, b], -1)


@operator(pair=True)
def stacked(m, a, b):
    return torch.stack([a, b]).mean(0)


@operator(pair=True)
def cat_of_heads(m, a, b):
    return torch.cat([a.unflatten(-1, (HEADS, -1)), b.unflatten(-1, (HEADS, -1))], -1).flatten(-2)


@operator(pair=True)
def attended(m, a, b):
    q, k = (x.unflatten(-1, (HEADS, -1)).transpose(1, 2) for x in (a, b))
    return ((q @ k.mT).softmax(-1) @ k).transpose(1, 2).flatten(-2)


@operator(pair=True)
def lerp(m, a, b):
    return torch.lerp(a, b, 0.3)
