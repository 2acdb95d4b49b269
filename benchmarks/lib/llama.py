"""The decoder block of Llama written with layers of tp_ext, and its weights from those of transformers."""

from typing import Any

import torch
import transformers
from torch import Tensor, nn

import tp_ext


class LlamaBlock(nn.Module):
    """A decoder block of Llama with layers of tp_ext."""

    def __init__(self, config: transformers.LlamaConfig, group: Any) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.norm1 = tp_ext.RMSNorm(hidden, eps=eps, group=group)
        self.attention = tp_ext.ParallelAttention(
            hidden,
            config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            bias=False,
            rope=config.rope_parameters["rope_theta"],
            group=group,
        )
        self.norm2 = tp_ext.RMSNorm(hidden, eps=eps, group=group)
        self.mlp = tp_ext.ParallelMLP(hidden, config.intermediate_size, activation="swiglu", bias=False, group=group)

    def forward(self, x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention(self.norm1(x), cos_sin=cos_sin)
        return x + self.mlp(self.norm2(x))


def block_weights(full: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors of a block under the names of transformers under those of :class:`LlamaBlock`."""
    attention, mlp = "self_attn.{}_proj.weight", "mlp.{}_proj.weight"
    return {
        "norm1.weight": full["input_layernorm.weight"],
        "attention.qkv.weight": torch.cat([full[attention.format(name)] for name in "qkv"]),
        "attention.out.weight": full[attention.format("o")],
        "norm2.weight": full["post_attention_layernorm.weight"],
        "mlp.up.weight": torch.cat([full[mlp.format(name)] for name in ("gate", "up")]),
        "mlp.down.weight": full[mlp.format("down")],
    }
