"""The configuration of the example model. It does not import torch, so that ``train_gpt.py --help`` answers at once."""

from dataclasses import dataclass


@dataclass
class GPTConfig:
    """The default sizes run on 1 to 6 and on 12 ranks: with at least as many KV heads as ranks any number works, with
    fewer KV heads the number of ranks must be a multiple of them."""

    vocab_size: int = 256
    hidden_size: int = 192
    num_layers: int = 4
    num_heads: int = 12
    num_kv_heads: int = 6
    ffn_hidden_size: int = 512
    dropout: float = 0.1
    sequence_parallel: bool = False
    context: str = "ring"
    experts: int = 0
    top_k: int = 2
    shared_experts: int = 0
    balance_loss: float = 0.01
