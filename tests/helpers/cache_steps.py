"""A text through an attention layer with a cache, in steps."""

import torch

import tp_ext


def loaded(module, state):
    tp_ext.load_full_state_dict(module, state)
    return module.eval()


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


def left_padded(module, texts, static):
    """Prompts [seq, hidden] of different lengths in one batch, then two more tokens each; y without the padding."""
    longest = max(map(len, texts)) - 2
    padding = torch.tensor([longest - (len(text) - 2) for text in texts])
    noise = [torch.randn(n, texts[0].shape[1], dtype=texts[0].dtype) for n in padding]
    x = torch.stack([torch.cat([before, text]) for before, text in zip(noise, texts, strict=True)])
    cache = module.new_cache(len(texts), longest + 2, static=static)
    with torch.inference_mode():
        y = in_steps(module, x, cache.reset(padding=padding), [longest - 1, 1, 2])
    assert y.isfinite().all()  # padding too, or the next layer would spread it
    return [row[n:] for row, n in zip(y, padding, strict=True)]
