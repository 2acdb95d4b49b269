"""The model of ``planner.transformer``, made of layers of this library, for predictions next to what really runs."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh

import tp_ext


class Block(nn.Module):
    def __init__(self, sizes: Mapping[str, int], mesh: DeviceMesh, parallel: Mapping[str, Any]) -> None:
        super().__init__()
        h, tp = sizes["hidden"], parallel
        self.norm1, self.norm2 = tp_ext.RMSNorm(h, **tp), tp_ext.RMSNorm(h, **tp)
        kv_heads, context = sizes["kv_heads"], mesh["cp"]
        self.attention = tp_ext.ParallelAttention(
            h, sizes["heads"], num_kv_heads=kv_heads, rope=1e4, bias=False, context_group=context, **tp
        )
        self.mlp: nn.Module
        if "experts" in sizes:
            groups = {"expert_group": mesh["ep"], "data_groups": mesh["dp"], "context_group": context}
            experts = sizes["expert_ffn"], sizes["experts"], sizes["top_k"]
            self.mlp = tp_ext.ParallelMoE(h, *experts, **groups, **tp)
        else:
            self.mlp = tp_ext.ParallelMLP(h, sizes["ffn"], activation="swiglu", bias=False, **tp)

    def forward(self, x: Tensor, layout: tp_ext.ContextLayout | None = None, batch_size: int | None = None) -> Tensor:
        x = x + self.attention(self.norm1(x), batch_size=batch_size, layout=layout)
        y: Tensor = x + self.mlp(self.norm2(x))
        return y


class Model(nn.Module):
    """``sizes``: the arguments of ``planner.transformer``; experts if it has them."""

    def __init__(self, sizes: Mapping[str, int], mesh: DeviceMesh, sequence_parallel: bool) -> None:
        super().__init__()
        parallel = {"group": mesh["tp"], "sequence_parallel": sequence_parallel}
        self.mesh, self.vocab = mesh, sizes["vocab"]
        self.embedding = tp_ext.VocabParallelEmbedding(self.vocab, sizes["hidden"], **parallel)
        self.blocks = nn.ModuleList(Block(sizes, mesh, parallel) for _ in range(sizes["layers"]))
        self.norm = tp_ext.RMSNorm(sizes["hidden"], **parallel)
        self.head = tp_ext.VocabParallelLMHead(sizes["hidden"], self.vocab, bias=False, **parallel)

    def pipeline_parts(self) -> tuple[list[Any], nn.ModuleList, list[nn.Module]]:
        return [torch.flatten, self.embedding], self.blocks, [self.norm, self.head]

    def forward(self, ids: Tensor, layout: tp_ext.ContextLayout | None = None) -> Tensor:
        x = self.embedding(ids.flatten())
        for block in self.blocks:
            x = block(x, layout, len(ids) if layout is None else None)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        return tp_ext.vocab_parallel_cross_entropy(logits, target.flatten(), self.mesh["tp"], vocab_size=self.vocab)
