"""Decoding token by token with a KV cache: against the same in plain torch, and against no cache.

4 layers of attention (8 heads, 2 KV heads, RoPE) and SwiGLU, 512 features, no norms; one token after a text of LENGTH.
Tokens a second are batch / ms * 1000.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import tp_ext
from benchmarks.lib.harness import Case, inference, main

LAYERS, HIDDEN, HEADS, KV, FFN, LENGTH = 4, 512, 8, 2, 1408, 512
HEAD = HIDDEN // HEADS


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


class Model(torch.nn.Module):
    def __init__(self, batch: int, **options) -> None:
        super().__init__()
        make = partial(tp_ext.ParallelAttention, HIDDEN, HEADS, num_kv_heads=KV, rope=1e4, bias=False, **options)
        self.attention = torch.nn.ModuleList(make() for _ in range(LAYERS))
        make = partial(tp_ext.ParallelMLP, HIDDEN, FFN, activation="swiglu", bias=False, **options)
        self.mlp = torch.nn.ModuleList(make() for _ in range(LAYERS))
        self.caches = [a.new_cache(batch, LENGTH + 1) for a in self.attention]

    def forward(self, x: Tensor, caches: list[tp_ext.KVCache | None]) -> Tensor:
        start, n = caches[0].length if caches[0] else 0, x.shape[1]
        positions = torch.arange(start, start + n, device=x.device)
        tables = self.attention[0].rope.cos_sin(positions, x.dtype)
        for attention, mlp, cache in zip(self.attention, self.mlp, caches, strict=True):
            x = x + attention(x, cache=cache, cos_sin=tables)
            x = x + mlp(x)
        return x

    def decode(self, x: Tensor) -> Tensor:
        return self(x, [cache.truncate(LENGTH) for cache in self.caches])

    def torch_reference(self, x: Tensor, start: int) -> Tensor:
        """The same in torch, on the same weights and buffers."""
        frequencies = 1e4 ** -(torch.arange(0, HEAD, 2, device=x.device) / HEAD)
        end = start + x.shape[1]
        angle = (torch.arange(start, end, device=x.device)[:, None] * frequencies).repeat(1, 2)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        for attention, mlp, cache in zip(self.attention, self.mlp, self.caches, strict=True):
            heads = F.linear(x, attention.qkv.weight).unflatten(-1, (-1, HEAD)).transpose(1, 2)
            q, k, cache.v[:, :, start:end] = heads.split([HEADS, KV, KV], 1)
            q, cache.k[:, :, start:end] = turn(q, cos, sin), turn(k, cos, sin)
            y = F.scaled_dot_product_attention(q, cache.k[:, :, :end], cache.v[:, :, :end], enable_gqa=True)
            x = x + F.linear(y.transpose(1, 2).flatten(2), attention.out.weight)
            gate, up = F.linear(x, mlp.up.weight).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, mlp.down.weight)
        return x


def cases(device: str, dtype: torch.dtype) -> list[Case]:
    result = []
    for batch in (1, 8):
        torch.manual_seed(0)
        model = Model(batch, device=device, dtype=dtype).eval()
        x = torch.randn(batch, LENGTH + 1, HIDDEN, device=device).to(dtype)
        inference(lambda m=model, x=x: m(x[:, :LENGTH], m.caches))
        new = x[:, LENGTH:]
        peers = {
            "torch, cache": partial(inference, partial(model.torch_reference, new, LENGTH)),
            "no cache": partial(inference, lambda m=model, x=x: m(x, [None] * LAYERS)[:, LENGTH:]),
        }
        result.append(Case(f"a token, batch {batch}", partial(inference, partial(model.decode, new)), peers))
    return result


if __name__ == "__main__":
    main(cases)
