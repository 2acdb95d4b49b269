"""A Llama-style language model from tp_ext's layers: RMSNorm, rotary grouped-query attention, SwiGLU, tied head.

Every tensor between the blocks is ``[tokens, hidden]``, the batch flattened; under sequence parallelism each rank holds
its share of the tokens. With ``group=None`` this is an ordinary model on one process.
"""

import torch
from gpt_config import GPTConfig as GPTConfig
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tp_ext
from tp_ext.group import Group
from tp_ext.random import Normal


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
        tp_ext.coalesce_gradients(self)

    def forward(
        self,
        x: Tensor,
        batch_size: int,
        tokens: int,
        cos_sin: tuple[Tensor, Tensor],
        cache: tp_ext.KVCache | None = None,
    ) -> Tensor:
        attended = self.attention(
            self.attention_norm(x), batch_size=batch_size, total_tokens=tokens, cos_sin=cos_sin, cache=cache
        )
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

    def forward(self, ids: Tensor, caches: list[tp_ext.KVCache] | None = None) -> Tensor:
        """ids ``[batch, seq]``, continuing the text in the caches if there are any; returns this rank's columns of the
        logits, ``[batch * seq, vocab_local]``."""
        (batch, seq), tokens = ids.shape, ids.numel()
        x = self.embedding(ids.flatten())
        positions = torch.arange(seq, device=ids.device) if caches is None else caches[0].positions(seq).flatten()
        cos_sin = self.blocks[0].attention.rope.cos_sin(positions, x.dtype)  # once for all layers
        for i, block in enumerate(self.blocks):
            if self.config.activation_checkpointing and self.training:
                x = checkpoint(block, x, batch, tokens, cos_sin, use_reentrant=False)
            else:
                x = block(x, batch, tokens, cos_sin, None if caches is None else caches[i])
        return self.head(self.norm(x), tokens)

    def loss(self, ids: Tensor, target: Tensor) -> Tensor:
        return tp_ext.vocab_parallel_cross_entropy(
            self(ids), target.flatten(), self.group, vocab_size=self.config.vocab_size
        )

    @torch.inference_mode()
    @torch.compiler.set_stance("force_eager")  # every step has another length: not worth compiling
    def generate(self, ids: Tensor, count: int, temperature: float = 0.8, top_k: int | None = 40) -> Tensor:
        """Appends ``count`` sampled tokens to ids ``[batch, seq]``: the same ones on every rank, for every p."""
        if ids.ndim != 2 or ids.shape[1] == 0:
            raise ValueError(f"ids: shape {tuple(ids.shape)} must be [batch, seq] with at least one token each")
        was_training = self.training
        self.eval()
        dtype = torch.get_autocast_dtype(ids.device.type) if torch.is_autocast_enabled(ids.device.type) else None
        length = ids.shape[1] + count
        caches = [block.attention.new_cache(len(ids), length, dtype=dtype) for block in self.blocks]
        new = ids
        for _ in range(count):
            last = self(new, caches).unflatten(0, (len(ids), -1))[:, -1]
            new = tp_ext.vocab_parallel_sample(
                last, self.group, vocab_size=self.config.vocab_size, temperature=temperature, top_k=top_k
            )[:, None]
            ids = torch.cat([ids, new], 1)
        self.train(was_training)
        return ids
