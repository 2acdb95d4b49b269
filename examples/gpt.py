"""A Llama-style language model from tp_ext's layers: RMSNorm, rotary grouped-query attention, SwiGLU or a mixture of
SwiGLU experts, tied head.

Every tensor between the blocks is ``[tokens, hidden]``, the batch flattened; under sequence parallelism each rank holds
its share of the tokens, over a context group its tokens of each sequence. Without groups this is an ordinary model on
one process.
"""

import contextlib
from typing import Any

import torch
from gpt_config import GPTConfig as GPTConfig
from torch import Tensor, nn

import tp_ext
from tp_ext.group import Group
from tp_ext.random import Normal


class Block(nn.Module):
    def __init__(
        self,
        config: GPTConfig,
        group: Group,
        context_group: Group = None,
        expert_group: Group = None,
        data_groups: Group | list[Group] = None,
    ) -> None:
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
            context_group=context_group,
            context=config.context,
            **parallel,
        )
        self.mlp_norm = tp_ext.RMSNorm(config.hidden_size, 1e-6, **parallel)
        self.mlp: nn.Module
        if config.experts:
            self.mlp = tp_ext.ParallelMoE(
                config.hidden_size,
                config.ffn_hidden_size,
                config.experts,
                config.top_k,
                shared_experts=config.shared_experts,
                # Of sequences: the mean over them is the same however microbatches and ranks share them
                router=tp_ext.RouterConfig(balance_loss=config.balance_loss, balance_over="sequence"),
                expert_group=expert_group,
                data_groups=data_groups,
                context_group=context_group,
                init=Normal(std=0.02),
                **parallel,
            )
        else:
            self.mlp = tp_ext.ParallelMLP(
                config.hidden_size,
                config.ffn_hidden_size,
                activation="swiglu",
                bias=False,
                init=Normal(std=0.02),
                **parallel,
            )
        self.dropout = tp_ext.Dropout(config.dropout, **parallel)
        if self.mlp_norm.invariant_blocks is None:
            tp_ext.coalesce_gradients(self)

    def forward(
        self,
        x: Tensor,
        layout: tp_ext.ContextLayout | None = None,
        total_tokens: int | None = None,
        batch_size: int | None = None,
        cos_sin: tuple[Tensor, Tensor] | None = None,
        cache: tp_ext.KVCache | None = None,
    ) -> Tensor:
        where: dict[str, Any] = {"layout": layout}
        if layout is None:
            where = {"batch_size": batch_size, "total_tokens": total_tokens}
        h, where = self.attention_norm(x), {"cos_sin": cos_sin, "cache": cache, **where}
        if cache is not None and not self.training:  # all-reduce, residual and norm in one operator
            h, x = self.attention(h, residual=x, norm=self.mlp_norm, **where)
        else:
            x = self.dropout(self.attention(h, **where), residual=x, total_tokens=total_tokens)
            h = self.mlp_norm(x)
        sequences = (
            (batch_size if layout is None else layout.batch,) if isinstance(self.mlp, tp_ext.ParallelMoE) else ()
        )
        y = self.mlp(h, total_tokens, *sequences)
        return self.dropout(y, residual=x, total_tokens=total_tokens)


class GPT(nn.Module):
    def __init__(
        self,
        config: GPTConfig,
        group: Group = None,
        context_group: Group = None,
        expert_group: Group = None,
        data_groups: Group | list[Group] = None,
    ) -> None:
        super().__init__()
        self.config, self.group = config, tp_ext.group.group_name(group) or None
        parallel = {"group": group, "sequence_parallel": config.sequence_parallel}
        self.embedding = tp_ext.VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, init=Normal(std=0.02), **parallel
        )
        groups = group, context_group, expert_group, data_groups
        self.blocks = nn.ModuleList(Block(config, *groups) for _ in range(config.num_layers))
        self.norm = tp_ext.RMSNorm(config.hidden_size, 1e-6, **parallel)
        self.head = tp_ext.VocabParallelLMHead(config.hidden_size, config.vocab_size, **parallel)
        self.head.weight = self.embedding.weight

    def pipeline_parts(self) -> tuple[Any, nn.ModuleList, Any]:
        """Returns what comes before the blocks, the blocks, and what comes after: for pipelines and ``parallelize``."""
        return [torch.flatten, self.embedding], self.blocks, [self.norm, self.head]

    def forward(
        self,
        ids: Tensor,
        layout: tp_ext.ContextLayout | None = None,
        total_tokens: int | None = None,
        caches: list[tp_ext.KVCache] | None = None,
    ) -> Tensor:
        """ids ``[batch, seq]``, this rank's by ``layout`` if there is one, continuing the text in the caches if there
        are any; returns this rank's columns of the logits, ``[batch * seq, vocab_local]``. ``total_tokens`` is what a
        pipeline passes to the parts: here the number of ids."""
        (batch, seq), tokens = ids.shape, ids.numel() if total_tokens is None else total_tokens
        x = self.embedding(ids.flatten())
        cos_sin = None
        if layout is None:  # tables once for all layers
            positions = torch.arange(seq, device=ids.device) if caches is None else caches[0].positions(seq).flatten()
            cos_sin = self.blocks[0].attention.rope.cos_sin(positions, x.dtype)
        for i, block in enumerate(self.blocks):
            x = block(x, layout, tokens, batch, cos_sin, None if caches is None else caches[i])
        return self.head(self.norm(x), tokens)

    def cross_entropy(self, logits: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
        """Mean loss of the tokens, or that of each, from this rank's columns of the logits."""
        blocks = self.head.invariant_blocks
        with tp_ext.tp_invariant(blocks) if blocks else contextlib.nullcontext():
            return tp_ext.vocab_parallel_cross_entropy(
                logits,
                target.flatten(),
                self.group,
                vocab_size=self.config.vocab_size,
                sizes=self.head.vocab_sizes,
                reduction=reduction,
            )

    def loss(self, ids: Tensor, target: Tensor) -> Tensor:
        return self.cross_entropy(self(ids), target)

    def log_probabilities(self, ids: Tensor) -> Tensor:
        """Returns the log-probability of each id given those before it: ``[batch, seq]`` -> ``[batch, seq - 1]``."""
        losses = self.cross_entropy(self(ids[:, :-1]), ids[:, 1:], reduction="none")
        return -losses.view(len(ids), -1)

    @torch.inference_mode()
    @torch.compiler.set_stance("force_eager")  # every step has another length: not worth compiling
    def generate(
        self,
        ids: Tensor,
        count: int,
        temperature: float = 0.8,
        top_k: int | None = 40,
        log_probabilities: list[Tensor] | None = None,
    ) -> Tensor:
        """Appends ``count`` sampled tokens to ids ``[batch, seq]``: the same ones on every rank, for every p. Those of
        the model, ``[batch]`` for each token, are appended to ``log_probabilities``."""
        if ids.ndim != 2 or ids.shape[1] == 0:
            raise ValueError(f"ids: shape {tuple(ids.shape)} must be [batch, seq] with at least one token each")
        was_training = self.training
        self.eval()
        dtype = torch.get_autocast_dtype(ids.device.type) if torch.is_autocast_enabled(ids.device.type) else None
        length = ids.shape[1] + count
        caches = [block.attention.new_cache(len(ids), length, dtype=dtype) for block in self.blocks]
        new = ids
        for _ in range(count):
            last = self(new, caches=caches).unflatten(0, (len(ids), -1))[:, -1]
            sizes = {"vocab_size": self.config.vocab_size, "sizes": self.head.vocab_sizes}
            new = tp_ext.vocab_parallel_sample(last, self.group, **sizes, temperature=temperature, top_k=top_k)[:, None]
            if log_probabilities is not None:
                log_probabilities.append(-self.cross_entropy(last, new, reduction="none"))
            ids = torch.cat([ids, new], 1)
        self.train(was_training)
        return ids
