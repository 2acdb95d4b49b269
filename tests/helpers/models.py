"""One model with every kind of layer, its block alone, its optimizer and its training: for tests of whole models."""

import torch
from torch import Tensor, nn

import tp_ext

FP64 = {"dtype": torch.float64}
OPTIONS = [{}, {"sequence_parallel": True}, {"pad": 4}]


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

    def forward(self, x: Tensor, batch_size: int = 2, tokens: int = 6) -> Tensor:
        attended = self.attention(self.norm1(x), batch_size=batch_size, total_tokens=tokens)
        x = self.dropout(attended, residual=x, total_tokens=tokens)
        return self.dropout(self.mlp(self.norm2(x), tokens), residual=x, total_tokens=tokens)


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
