"""A Llama-style language model from tp_ext's layers: RMSNorm, rotary grouped-query attention, SwiGLU, tied head.

Every tensor between the blocks is ``[tokens, hidden]``, the batch flattened; under sequence parallelism each rank holds
its share of the tokens. With ``group=None`` this is an ordinary model on one process.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tp_ext
from tp_ext.group import Group
from tp_ext.random import Normal


@dataclass
class GPTConfig:
    vocab_size: int = 256
    hidden_size: int = 192
    num_layers: int = 4
    num_heads: int = 6
    num_kv_heads: int = 2
    ffn_hidden_size: int = 512
    dropout: float = 0.1
    sequence_parallel: bool = False
    activation_checkpointing: bool = False


class Block(nn.Module):
    def __init__(self, config: GPTConfig, group: Group) -> None:
        super().__init__()
        parallel = {"group": group, "sequence_parallel": config.sequence_parallel}
        self.attention_norm = tp_ext.RMSNorm(config.hidden_size, 1e-6, **parallel)
        self.attention = tp_ext.ParallelAttention(
            config.hidden_size,
            config.num_heads,
            num_kv_heads=config.num_kv_heads,
            bias=False,
            rope=10000.0,
            init=Normal(std=0.02),
            **parallel,
        )
        self.mlp_norm = tp_ext.RMSNorm(config.hidden_size, 1e-6, **parallel)
        self.mlp = tp_ext.ParallelMLP(
            config.hidden_size,
            config.ffn_hidden_size,
            activation="swiglu",
            bias=False,
            init=Normal(std=0.02),
            **parallel,
        )
        self.dropout = tp_ext.Dropout(config.dropout, **parallel)

    def forward(self, x: Tensor, batch_size: int, tokens: int) -> Tensor:
        attended = self.attention(self.attention_norm(x), batch_size=batch_size, total_tokens=tokens)
        x = self.dropout(attended, residual=x, total_tokens=tokens)
        return self.dropout(self.mlp(self.mlp_norm(x), tokens), residual=x, total_tokens=tokens)


class GPT(nn.Module):
    def __init__(self, config: GPTConfig, group: Group = None) -> None:
        super().__init__()
        self.config, self.group = config, tp_ext.group.group_name(group) or None
        parallel = {"group": group, "sequence_parallel": config.sequence_parallel}
        self.embedding = tp_ext.VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, init=Normal(std=0.02), **parallel
        )
        self.blocks = nn.ModuleList(Block(config, group) for _ in range(config.num_layers))
        self.norm = tp_ext.RMSNorm(config.hidden_size, 1e-6, **parallel)
        self.head = tp_ext.VocabParallelLMHead(config.hidden_size, config.vocab_size, **parallel)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        """ids ``[batch, seq]`` -> this rank's logits ``[batch * seq, vocab_local]``."""
        tokens = ids.numel()
        x = self.embedding(ids.flatten())
        for block in self.blocks:
            if self.config.activation_checkpointing and self.training:
                x = checkpoint(block, x, ids.shape[0], tokens, use_reentrant=False)
            else:
                x = block(x, ids.shape[0], tokens)
        return self.head(self.norm(x), tokens)

    def loss(self, ids: Tensor, target: Tensor) -> Tensor:
        return tp_ext.vocab_parallel_cross_entropy(
            self(ids), target.flatten(), self.group, vocab_size=self.config.vocab_size
        )

    @torch.no_grad()
    @torch.compiler.set_stance("force_eager")  # every step has another length: not worth compiling
    def generate(self, ids: Tensor, count: int, temperature: float = 0.8) -> Tensor:
        """Appends ``count`` sampled tokens to ids ``[batch, seq]``; every rank draws the same ones."""
        self.eval()
        sizes = tp_ext.sharding.split_sizes(self.config.vocab_size, self.head.tp_group.size)
        for _ in range(count):
            last = self(ids[:, -256:]).unflatten(0, (ids.shape[0], -1))[:, -1]
            logits = tp_ext.gather_from_region(last, self.group, -1, sizes).float()
            ids = torch.cat([ids, torch.multinomial((logits / temperature).softmax(-1), 1)], 1)
        self.train()
        return ids
