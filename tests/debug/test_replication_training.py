"""40 steps with dropout, sequence parallelism, copied KV heads and AdamW: what is replicated stays the same bits."""

import pytest
import torch
from gpt import GPT, GPTConfig

import tp_ext
from tests.helpers.ranks import run
from tp_ext.debug import replication
from tp_ext.model.census import census

pytestmark = pytest.mark.core


def _train(group, steps=40):
    tp_ext.manual_seed(7)
    sizes = {"vocab_size": 13, "hidden_size": 8, "num_layers": 1, "num_heads": 4, "ffn_hidden_size": 6}
    config = GPTConfig(**sizes, num_kv_heads=1, dropout=0.3, sequence_parallel=True)
    model = GPT(config, group)
    start = [param.detach().clone() for param in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for step in range(steps):
        windows = torch.randint(13, (2, 6), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model.loss(windows[:, :-1].contiguous(), windows[:, 1:]).backward()
        optimizer.step()
        if step == steps // 2:
            tp_ext.debug.check(model)
    tp_ext.debug.assert_replicated(model, group=group)
    tp_ext.debug.check(model)
    tensors = replication.compared_tensors(census(model), group)
    keys = [key for tensor in tensors for key, _ in replication.replicated_parts(tensor, group)]
    return [float((a - b).abs().max()) for a, b in zip(start, model.parameters(), strict=True)], keys


def test_replicas_do_not_drift_in_40_steps():
    """In fp32, with tokens that p does not divide. Norms and two of three parts of qkv, with their gradients, are what
    is compared, and every parameter has moved by then."""
    for moved, keys in run(_train, 3, timeout=120):
        assert min(moved) > 0.05
        names = {(name, part) for name, part, _ in keys if not name.endswith(".grad")}
        qkv = "blocks.0.attention.qkv.weight"
        norms = {(name, -1) for name in ("blocks.0.attention_norm.weight", "blocks.0.mlp_norm.weight", "norm.weight")}
        assert names == norms | {(qkv, 1), (qkv, 2)} and len(keys) == 2 * len(names)
