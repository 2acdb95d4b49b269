"""Six small models from our layers, right for every p, with their examples."""

import torch
from torch import Tensor, nn

import tp_ext
from tests.helpers.makers import gpt
from tp_ext.random import Normal, Uniform

HIDDEN, FFN, VOCAB, BATCH, SEQ = 8, 12, 14, 2, 6
GENERATOR = torch.Generator().manual_seed(3)
X = torch.randn(BATCH * SEQ, HIDDEN, generator=GENERATOR)
IDS, TARGET = torch.randint(VOCAB, (2, BATCH * SEQ), generator=GENERATOR)


class GatedMLP(nn.Module):
    """A norm and a swiglu of three linears, with dropout of the hidden features."""

    def __init__(self, group):
        super().__init__()
        self.group = group
        self.norm = tp_ext.LayerNorm(HIDDEN, group=group)
        self.gate = tp_ext.ColumnParallelLinear(HIDDEN, FFN, group=group)
        self.up = tp_ext.ColumnParallelLinear(HIDDEN, FFN, group=group)
        self.down = tp_ext.RowParallelLinear(FFN, HIDDEN, group=group)
        self.scale = nn.Parameter(torch.rand(HIDDEN))

    def masked(self, h):
        return tp_ext.dropout(h, 0.25, self.training, group=self.group, dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        h = torch.nn.functional.silu(self.gate(x)) * self.up(x)
        return self.down(self.masked(h)) * self.scale


class Attention(nn.Module):
    """Grouped-query attention with one KV head, a learned mask and a residual."""

    def __init__(self, group):
        super().__init__()
        self.norm = tp_ext.RMSNorm(HIDDEN, group=group)
        self.attention = tp_ext.ParallelAttention(HIDDEN, 4, num_kv_heads=1, rope=100.0, group=group)
        self.mask = nn.Parameter(torch.randn(SEQ, SEQ))
        with torch.no_grad():  # biases that matter
            self.attention.out.bias.uniform_(0.5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(self.norm(x), batch_size=BATCH, attn_mask=self.mask)


class Experts(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.norm = tp_ext.RMSNorm(HIDDEN, group=group)
        router = tp_ext.RouterConfig(balance_loss=0.1)
        self.moe = tp_ext.ParallelMoE(HIDDEN, FFN, 4, 2, router=router, shared_experts=1, group=group)

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.moe(self.norm(x))
        return y, tp_ext.router_loss(self)


class Words(nn.Module):
    """Embedding, linear and head with the loss of padded words."""

    def __init__(self, group):
        super().__init__()
        options = {"group": group, "pad_to_multiple_of": 4}
        self.embedding = tp_ext.VocabParallelEmbedding(VOCAB, HIDDEN, init=Normal(), **options)
        self.mix = nn.Linear(HIDDEN, HIDDEN)
        self.head = tp_ext.VocabParallelLMHead(HIDDEN, VOCAB, init=Uniform(-1, 1), **options)
        self.criterion = tp_ext.VocabParallelCrossEntropy(group=group, vocab_size=VOCAB, label_smoothing=0.1)

    def forward(self, ids: Tensor, target: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.mix(self.embedding(ids)))
        return {"loss": self.criterion(logits, target), "logits": logits}


class SequenceParallel(nn.Module):
    """Scatters the tokens to a block under sequence parallelism, and gathers them."""

    def __init__(self, group):
        super().__init__()
        self.group = group
        parallel = {"group": group, "sequence_parallel": True}
        self.norm = tp_ext.RMSNorm(HIDDEN, **parallel)
        self.up = tp_ext.ColumnParallelLinear(HIDDEN, FFN, **parallel)
        self.down = tp_ext.RowParallelLinear(FFN, HIDDEN, **parallel)
        self.dropout = tp_ext.Dropout(0.25, **parallel)

    def forward(self, x: Tensor) -> Tensor:
        x = tp_ext.scatter_to_region(x, self.group, dim=0)
        y = self.dropout(self.down(self.up(self.norm(x)).relu()), residual=x, total_tokens=BATCH * SEQ)
        return tp_ext.gather_from_region(y, self.group, dim=0)


def language_model(group):
    return gpt(group, vocab_size=VOCAB, num_kv_heads=4, ffn_hidden_size=FFN)


MODELS = {
    "gpt": (language_model, (IDS.view(BATCH, SEQ),)),
    "mlp": (GatedMLP, {"x": X}),
    "attention": (Attention, (X,)),
    "experts": (Experts, (X,)),
    "words": (Words, (IDS, TARGET)),
    "sequence": (SequenceParallel, (X,)),
}
