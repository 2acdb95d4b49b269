"""The model of examples/gpt.py, small, and its training on made-up tokens: what the tests of whole models share."""

import torch
from gpt import GPT, GPTConfig
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import tp_ext
from tests.helpers.dtypes import default_dtype

CONFIG = {
    "vocab_size": 61,
    "hidden_size": 24,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "ffn_hidden_size": 44,
    "dropout": 0.2,
}
BATCH, SEQ, STEPS = 3, 7, 25


def batches(steps=STEPS):
    """(ids, target) of each step. 21 tokens, which 2 and 4 ranks do not share evenly."""
    generator = torch.Generator().manual_seed(5)
    windows = torch.randint(61, (STEPS, BATCH, SEQ + 1), generator=generator)
    windows[..., 1::2] = windows[..., ::2]  # something to learn
    return [(window[:, :-1].contiguous(), window[:, 1:].contiguous()) for window in windows[:steps]]


def make(group, activation_checkpointing=False, **options):
    """The model, always from the same seed. Two KV heads cannot be sharded over three ranks: there it is one."""
    tp_ext.manual_seed(7)
    kv = 1 if group is not None and group.size() == 3 else 2
    model = GPT(GPTConfig(**CONFIG | {"num_kv_heads": kv} | options), group)
    return checkpointed(model) if activation_checkpointing else model


def checkpointed(model):
    """The model, whose blocks are computed again in backward."""
    for i, block in enumerate(model.blocks):
        model.blocks[i] = checkpoint_wrapper(block)
    return model


def train(group, dtype, steps=STEPS, **options):
    """Losses and gradient norms of the steps, and the model after them."""
    with default_dtype(dtype):
        model = make(group, **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses, norms = [], []
        for ids, target in batches(steps):
            loss = model.loss(ids, target)
            optimizer.zero_grad()
            loss.backward()
            norms.append(tp_ext.clip_grad_norm_(model, 1.0, group=group).item())
            optimizer.step()
            losses.append(loss.item())
        return losses, norms, model
