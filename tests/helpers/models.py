"""Models of the package's layers: a block and a GPT by options, and one with every kind of layer, its optimizer and
its training."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import tp_ext

FP64 = {"dtype": torch.float64}
OPTIONS = [{}, {"sequence_parallel": True}, {"pad": 4}]


class Block(nn.Module):
    """Norm, attention, dropout, residual; norm, MLP or experts, dropout, residual.

    ``attention``: options of ParallelAttention; ``mlp``: those of ParallelMLP, or of ParallelMoE with ``num_experts``;
    ``parallel``: those of every layer. The call of attention is ``where``, or a layout of sequences.
    """

    def __init__(
        self,
        hidden: int,
        attention: dict[str, Any],
        mlp: dict[str, Any],
        *,
        norm: type[nn.Module] = tp_ext.RMSNorm,
        dropout: float = 0.0,
        **parallel: Any,
    ):
        super().__init__()
        self.norms = nn.ModuleList(norm(hidden, **parallel) for _ in range(2))
        self.attention = tp_ext.ParallelAttention(hidden, **attention, **parallel)
        kind = tp_ext.ParallelMoE if "num_experts" in mlp else tp_ext.ParallelMLP
        self.mlp = kind(hidden, **mlp, **parallel)
        self.dropout = tp_ext.Dropout(dropout, **{name: parallel[name] for name in parallel if name != "dtype"})

    def forward(self, x: Tensor, layout: Any = None, total_tokens: int | None = None, **where: Any) -> Tensor:
        call = {"total_tokens": total_tokens, **where} if layout is None else {"layout": layout}
        x = self.dropout(self.attention(self.norms[0](x), **call), residual=x, total_tokens=total_tokens)
        sequences = {}
        if isinstance(self.mlp, tp_ext.ParallelMoE):
            sequences["batch_size"] = where.get("batch_size") if layout is None else layout.batch
        y = self.mlp(self.norms[1](x), total_tokens=total_tokens, **sequences)
        return self.dropout(y, residual=x, total_tokens=total_tokens)


class GPT(nn.Module):
    """Embedding, blocks, norm and head, which a pipeline may cut. ``block()`` makes a block; keywords of forward are
    those of the blocks."""

    def __init__(
        self,
        vocab: int,
        hidden: int,
        block: Callable[[], nn.Module],
        blocks: int = 2,
        *,
        norm: type[nn.Module] | None = tp_ext.RMSNorm,
        tied: bool = True,
        flat: bool = True,
        **parallel: Any,
    ):
        super().__init__()
        self.flat = flat
        self.embedding = tp_ext.VocabParallelEmbedding(vocab, hidden, **parallel)
        self.blocks = nn.ModuleList(block() for _ in range(blocks))
        self.norm = nn.Identity() if norm is None else norm(hidden, **parallel)
        self.head = tp_ext.VocabParallelLMHead(hidden, vocab, **parallel)
        if tied:
            self.head.weight = self.embedding.weight

    def pipeline_parts(self) -> tuple[list[Any], nn.ModuleList, list[nn.Module]]:
        return [torch.flatten, self.embedding] if self.flat else [self.embedding], self.blocks, [self.norm, self.head]

    def forward(self, ids: Tensor, total_tokens: int | None = None, **call: Any) -> Tensor:
        x = self.embedding(ids.flatten() if self.flat else ids)
        call |= {} if total_tokens is None else {"total_tokens": total_tokens}
        for block in self.blocks:
            x = block(x, **call)
        return self.head(self.norm(x), total_tokens=total_tokens)


class RichBlock(nn.Module):
    """A transformer block with what the Block of the examples lacks: LayerNorm, biases, norms of q and k, one KV head
    for all ranks, dropout of the attention weights."""

    def __init__(
        self, group=None, sequence_parallel=False, *, ffn=10, activation="gelu_tanh", dropout=0.25, dtype=None
    ):
        super().__init__()
        parallel = {"group": group, "sequence_parallel": sequence_parallel}
        options = parallel | {"dtype": dtype}
        self.norm1, self.norm2 = tp_ext.LayerNorm(8, **options), tp_ext.LayerNorm(8, **options)
        heads = {"num_kv_heads": 1, "qk_norm": True, "rope": 100.0, "dropout": dropout}
        self.attention = tp_ext.ParallelAttention(8, 4, **heads, **options)
        self.mlp = tp_ext.ParallelMLP(8, ffn, activation=activation, **options)
        self.dropout = tp_ext.Dropout(dropout, **parallel)

    def forward(self, x: Tensor, batch_size: int = 2, total_tokens: int = 6) -> Tensor:
        attended = self.attention(self.norm1(x), batch_size=batch_size, total_tokens=total_tokens)
        x = self.dropout(attended, residual=x, total_tokens=total_tokens)
        return self.dropout(self.mlp(self.norm2(x), total_tokens), residual=x, total_tokens=total_tokens)


class Scale(nn.Module):
    """A module of the user's own between sharded layers: a replicated parameter whose gradient the ranks sum."""

    def __init__(self, group, dtype):
        super().__init__()
        self.group = tp_ext.group.group_name(group)
        self.weight = nn.Parameter(torch.ones(1, dtype=dtype))  # FSDP2 takes no 0-d ones

    def forward(self, x: Tensor) -> Tensor:
        return x * tp_ext.copy_to_region(self.weight, self.group)


class RichModel(RichBlock):
    """The block between an embedding and a head, and every kind of sharding and of state: uneven, copied, padded,
    gated, replicated, tied, a parameter of the user's own, a buffer."""

    def __init__(
        self,
        group=None,
        sequence_parallel=False,
        *,
        vocab=13,
        pad=None,
        tied=True,
        ffn=11,
        activation="swiglu",
        dropout=0.0,
        dtype=torch.float64,
    ):
        super().__init__(group, sequence_parallel, ffn=ffn, activation=activation, dropout=dropout, dtype=dtype)
        options = {"group": group, "sequence_parallel": sequence_parallel, "dtype": dtype}
        self.embedding = tp_ext.VocabParallelEmbedding(vocab, 8, pad_to_multiple_of=pad, **options)
        self.column = tp_ext.ColumnParallelLinear(8, 7, parts=(3, 4), **options)
        self.row = tp_ext.RowParallelLinear(7, 8, parts=(3, 4), **options)
        self.last = tp_ext.RMSNorm(8, 1e-6, **options)
        self.head = tp_ext.VocabParallelLMHead(8, vocab, pad_to_multiple_of=pad, bias=True, **options)
        if tied:
            self.head.weight = self.embedding.weight
        self.scale = Scale(group, dtype)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, ids: Tensor) -> Tensor:
        tokens = ids.numel()
        x = super().forward(self.embedding(ids.flatten()), len(ids), tokens)
        x = x + self.row(self.column(x, tokens).tanh(), tokens)
        self.calls += 1
        return self.scale(self.head(self.last(x), tokens))


def model_and_optimizer(group, seed=7, **options):
    torch.manual_seed(seed)
    model = RichModel(group, **options)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model, optimizer, group, steps, vocab_size=13):
    """The losses of some steps on the same made-up tokens."""
    ids, losses = torch.arange(14).view(2, 7) * 5 % vocab_size, []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = tp_ext.vocab_parallel_cross_entropy(model(ids), ids.roll(1).flatten(), group, vocab_size=vocab_size)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def assert_same(a, b, exact=True):
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0 if exact else 1e-12, atol=0 if exact else 1e-12)
