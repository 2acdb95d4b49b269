"""The model of examples/gpt.py written in plain torch, its linears, embedding and loss from one of `peers`.

Same weights, same keys, no dropout, as many KV heads as heads: code that shards it sees an ordinary Llama.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.peers.layers import Plain, rank_order


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of ``[batch, seq, heads, head_dim]``, half style."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Norm(nn.RMSNorm):
    def __init__(self, weight: Tensor) -> None:
        super().__init__(len(weight), eps=1e-6)
        self.weight.data.copy_(weight)


class Block(nn.Module):
    def __init__(self, peer: Plain, state: dict[str, Tensor], heads: int) -> None:
        super().__init__()
        hidden, ffn = state["mlp.down.weight"].shape
        self.heads = heads // peer.p
        self.attention_norm = Norm(state["attention_norm.weight"])
        self.qkv = peer.column(rank_order(state["attention.qkv.weight"], (hidden,) * 3, peer.p))
        self.out = peer.row(state["attention.out.weight"])
        self.mlp_norm = Norm(state["mlp_norm.weight"])
        self.up = peer.column(rank_order(state["mlp.up.weight"], (ffn, ffn), peer.p))
        self.down = peer.row(state["mlp.down.weight"])

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        q, k, v = (t.transpose(1, 2) for t in (turn(q, cos, sin), turn(k, cos, sin), v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(attended)
        gate, up = self.up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class PlainGPT(nn.Module):
    """``state``: the full state dict of examples/gpt.py's model."""

    def __init__(self, peer: Plain, state: dict[str, Tensor], layers: int, heads: int, seq: int) -> None:
        super().__init__()
        self.peer = peer
        self.embedding = peer.embedding(state["embedding.weight"])
        blocks = []
        for i in range(layers):
            prefix = f"blocks.{i}."
            own = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
            blocks.append(Block(peer, own, heads))
        self.blocks = nn.ModuleList(blocks)
        self.norm = Norm(state["norm.weight"])
        self.head = peer.head(self.embedding)
        head_dim = state["embedding.weight"].shape[1] // heads
        frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        angles = torch.arange(seq, dtype=torch.float64)[:, None, None] * frequencies
        self.register_buffer("cos", angles.cos().float())
        self.register_buffer("sin", angles.sin().float())

    def loss(self, ids: Tensor, target: Tensor) -> Tensor:
        """ids, target ``[batch, seq]``; inside ``peer.training()``."""
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.peer.loss(self.head(self.norm(x)).flatten(0, 1), target.flatten())
