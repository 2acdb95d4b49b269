"""Integers that must be found together, or that mean something else than another equal one; one class at several
widths; sizes held in a dict, or written as numbers."""

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class Grouped(nn.Module):
    """Minimal Llama: fused q, k, v, split by products of its integers."""

    def __init__(self, dim: int, heads: int, kv: int) -> None:
        super().__init__()
        self.hd, self.heads, self.kv = dim // heads, heads, kv
        self.wqkv = nn.Linear(dim, (heads + 2 * kv) * self.hd, bias=False)
        self.out = nn.Linear(heads * self.hd, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = self.wqkv(x).split([self.heads * self.hd, self.kv * self.hd, self.kv * self.hd], -1)
        q, k, v = (part.view(b, t, -1, self.hd).transpose(1, 2) for part in (q, k, v))
        return self.out(attention(q, k, v).reshape(b, t, self.heads * self.hd))


class Explicit(Grouped):
    """The same with the numbers of heads in the views."""

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = self.wqkv(x).split([self.heads * self.hd, self.kv * self.hd, self.kv * self.hd], -1)
        q = q.view(b, t, self.heads, self.hd).transpose(1, 2)
        k, v = (part.view(b, t, self.kv, self.hd).transpose(1, 2) for part in (k, v))
        return self.out(attention(q, k, v).reshape(b, t, self.heads * self.hd))


class Interleaved(nn.Module):
    """litgpt: a config whose number of heads may be the size of a head, and groups of q, k, v of one KV head each."""

    def __init__(self, dim: int, heads: int, groups: int) -> None:
        super().__init__()
        size = dim // heads
        self.config = SimpleNamespace(n_embd=dim, n_head=heads, n_query_groups=groups, head_size=size, window=heads)
        self.attn = nn.Linear(dim, (heads + 2 * groups) * size)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        c = self.config
        b, t, _ = x.size()
        per = c.n_head // c.n_query_groups
        qkv = self.attn(x).view(b, t, c.n_query_groups, per + 2, c.head_size).permute(0, 2, 3, 1, 4)
        q, k, v = qkv.split((per, 1, 1), dim=2)
        q = q.reshape(b, -1, t, c.head_size)
        k, v = k.reshape(b, -1, t, c.head_size), v.reshape(b, -1, t, c.head_size)
        return self.proj(attention(q, k, v).reshape(b, t, c.head_size * c.n_head))


class Rearrange(nn.Module):
    """As the layer of einops, ``b n (h d) -> b h n d``: it holds h in a dict, and reads the rest from its input."""

    def __init__(self, **lengths: int) -> None:
        super().__init__()
        self.lengths: dict[str, Any] = lengths

    def forward(self, x: Tensor) -> Tensor:
        h = self.lengths["h"]
        return x.reshape(*x.shape[:2], h, x.shape[2] // h).permute(0, 2, 1, 3)


class Dicts(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(dim, dim, bias=False), nn.Linear(dim, 2 * dim, bias=False)
        self.split, self.out = Rearrange(h=heads), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(part) for part in (self.q(x), *self.kv(x).chunk(2, dim=-1)))
        return self.out(attention(q, k, v).flatten(2))


class Numbers(nn.Module):
    """Sizes as numbers, and heads and batch in one dim."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(48, 144), nn.Linear(48, 48)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, 6, 8).permute(2, 0, 3, 1, 4).reshape(3, b * 6, t, 8).unbind(0)
        y = (q @ k.transpose(1, 2)).softmax(-1) @ v
        return self.out(y.view(b, 6, t, 8).transpose(1, 2).reshape(b, t, 48))


class Hierarchical(nn.Module):
    """Swin, PVT, MViT: one class of attention at two widths, with as many heads as the other has per head."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = Explicit(48, 6, 3), nn.LayerNorm(96), Explicit(96, 12, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.a(x)
        return self.b(self.norm(torch.cat([y, y.tanh()], -1)))


class Net(nn.Module):
    def __init__(self, attention: nn.Module, width: int = 48) -> None:
        super().__init__()
        self.attention, self.norm = attention, nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(self.norm(x))
