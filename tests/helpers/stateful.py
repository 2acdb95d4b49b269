"""A small model with every kind of layer, its optimizer and some training: for tests of states and checkpoints."""

import torch
from torch import nn

import tp_ext

OPTIONS = [{}, {"sequence_parallel": True}, {"pad": 4}]
SMALL = {"dtype": torch.float64}


class Model(nn.Module):
    """Every kind of layer, of sharding and of entry: uneven, copied, padded, gated, replicated, tied; a buffer."""

    def __init__(self, group=None, sequence_parallel=False, pad=None):
        super().__init__()
        options = SMALL | {"group": group, "sequence_parallel": sequence_parallel}
        self.pad, self.sequence_parallel = pad, sequence_parallel
        self.embedding = tp_ext.VocabParallelEmbedding(13, 8, pad_to_multiple_of=pad, **options)
        self.norm = tp_ext.LayerNorm(8, **options)
        self.attention = tp_ext.ParallelAttention(8, 4, num_kv_heads=1, head_dim=2, qk_norm=True, rope=100.0, **options)
        self.mlp = tp_ext.ParallelMLP(8, 11, activation="swiglu", **options)
        self.last = tp_ext.RMSNorm(8, 1e-6, **options)
        self.column = tp_ext.ColumnParallelLinear(8, 7, parts=(3, 4), gather_output=True, **options)
        self.back = tp_ext.RowParallelLinear(7, 8, input_is_parallel=False, **SMALL, group=group)
        self.head = tp_ext.VocabParallelLMHead(8, 13, pad_to_multiple_of=pad, bias=True, **options)
        self.head.weight = self.embedding.weight
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, ids):
        n = ids.numel()
        x = self.embedding(ids.flatten())
        x = x + self.attention(self.norm(x), batch_size=len(ids), total_tokens=n)
        x = x + self.mlp(x, n)
        if not self.sequence_parallel:
            x = x + self.back(self.column(x))
        self.steps += 1
        return self.head(self.last(x), n)


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


def made(group, seed=7, **options):
    torch.manual_seed(seed)
    model = Model(group, **options)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def assert_same(a, b, exact=True):
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0 if exact else 1e-12, atol=0 if exact else 1e-12)
