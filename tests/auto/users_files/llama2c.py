"""The idioms of llama2.c: ``.forward`` of submodules called directly, rotary tables as buffers, ``repeat_kv``."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
    cos, sin = cos[None, :, None], sin[None, :, None]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(3)


def repeat_kv(x: Tensor, n_rep: int) -> Tensor:
    b, t, heads, dim = x.shape
    if n_rep == 1:
        return x
    return x[:, :, :, None, :].expand(b, t, heads, n_rep, dim).reshape(b, t, heads * n_rep, dim)


class Attention(nn.Module):
    def __init__(self, dim: int, n_heads: int, n_kv_heads: int) -> None:
        super().__init__()
        self.n_local_heads, self.n_local_kv_heads = n_heads, n_kv_heads
        self.n_rep = n_heads // n_kv_heads
        self.head_dim = dim // n_heads
        self.wq = nn.Linear(dim, n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(n_heads * self.head_dim, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, t, _ = x.shape
        xq, xk, xv = self.wq(x), self.wk(x), self.wv(x)
        xq = rotary(xq.view(b, t, self.n_local_heads, self.head_dim), cos, sin)
        xk = rotary(xk.view(b, t, self.n_local_kv_heads, self.head_dim), cos, sin)
        xv = xv.view(b, t, self.n_local_kv_heads, self.head_dim)
        xk, xv = repeat_kv(xk, self.n_rep), repeat_kv(xv, self.n_rep)
        y = F.scaled_dot_product_attention(xq.transpose(1, 2), xk.transpose(1, 2), xv.transpose(1, 2), is_causal=True)
        return self.wo(y.transpose(1, 2).contiguous().view(b, t, -1))


class FeedForward(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(dim, hidden, bias=False), nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.w2(F.silu(self.w1(x)) * self.w3(x)))


class Block(nn.Module):
    def __init__(self, dim: int, n_heads: int, n_kv_heads: int) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(dim, n_heads, n_kv_heads), FeedForward(dim, 80)
        self.attention_norm, self.ffn_norm = RMSNorm(dim), RMSNorm(dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = x + self.attention.forward(self.attention_norm(x), cos, sin)
        return h + self.feed_forward.forward(self.ffn_norm(h))


class Transformer(nn.Module):
    def __init__(
        self, vocab: int = 64, dim: int = 48, n_heads: int = 6, n_kv_heads: int = 6, n_layers: int = 2
    ) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Block(dim, n_heads, n_kv_heads) for _ in range(n_layers))
        self.norm, self.output = RMSNorm(dim), nn.Linear(dim, vocab, bias=False)
        self.tok_embeddings.weight = self.output.weight
        size = dim // n_heads
        angles = torch.outer(torch.arange(16).float(), 1e4 ** -(torch.arange(0, size, 2).float() / size))
        self.register_buffer("freqs_cos", angles.cos(), persistent=False)
        self.register_buffer("freqs_sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        t = tokens.shape[1]
        h = self.tok_embeddings(tokens)
        for layer in self.layers:
            h = layer(h, self.freqs_cos[:t], self.freqs_sin[:t])
        h = self.norm(h)
        if targets is None:
            return self.output(h[:, [-1], :])
        logits = self.output(h)
        self.last_loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return self.last_loss
