"""Draws docs/guide/layer.svg: a layer of Llama as a plan for two ranks shards it.

Run it after a change: python docs/guide/draw_layer.py
"""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import tp_ext

config = LlamaConfig(
    vocab_size=32000,
    hidden_size=2048,
    intermediate_size=5632,
    num_hidden_layers=2,
    num_attention_heads=32,
    num_key_value_heads=8,
)
with torch.device("meta"):
    model = LlamaForCausalLM(config)
ids = torch.zeros(2, 1023, dtype=torch.long)
plan = tp_ext.auto.plan(model, {"input_ids": ids, "labels": ids, "use_cache": False}, 2)
plan.draw(Path(__file__).parent / "layer.svg")
