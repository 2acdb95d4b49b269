"""A text through an attention layer with a cache, in steps."""

import torch

import tp_ext


def step(module, x, cache):
    """y of x [batch, n, hidden], under sequence parallelism with every rank's tokens put together again."""
    _, p, rank = module.tp_group
    if not module.sequence_parallel:
        return module(x, cache=cache)
    tokens = x.flatten(0, 1)
    own = tokens.tensor_split(p)[rank]
    y = module(own, batch_size=len(x), total_tokens=len(tokens), cache=cache)
    sizes = tp_ext.sharding.split_sizes(len(tokens), p)
    return tp_ext.gather_from_region(y, module.tp_group.name or None, 0, sizes).view(x.shape)


def in_steps(module, x, cache, split):
    return torch.cat([step(module, part, cache) for part in x.split(split, 1)], 1)
