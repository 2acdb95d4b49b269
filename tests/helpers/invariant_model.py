"""A small language model of all layers that tp_invariant supports, and its training on simulated ranks."""

import torch
from torch import nn

import tp_ext

SIZES = {"vocab": 101, "hidden": 48, "heads": 8, "kv_heads": 2, "ffn": 100, "head_dim": 16}


class Block(nn.Module):
    def __init__(
        self, group, sequence_parallel=False, dropout=0.1, activation="swiglu", moe=None, latent=None, **attention
    ):
        super().__init__()
        hidden, where = SIZES["hidden"], {"group": group, "sequence_parallel": sequence_parallel}
        self.norm1 = tp_ext.LayerNorm(hidden, **where)
        self.norm2 = tp_ext.RMSNorm(hidden, **where)
        if latent is None:
            heads = {"num_kv_heads": 2, "head_dim": SIZES["head_dim"], "rope": 1e4, "qk_norm": True} | attention
            self.attention = tp_ext.ParallelAttention(hidden, SIZES["heads"], dropout=dropout, **heads, **where)
        else:
            dims = {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "kv_lora_rank": 12} | latent
            self.attention = tp_ext.ParallelLatentAttention(hidden, SIZES["heads"], dropout=dropout, **dims, **where)
        if moe is None:
            self.mlp = tp_ext.ParallelMLP(hidden, SIZES["ffn"], activation=activation, **where)
        else:
            router = tp_ext.RouterConfig(balance_loss=0.1, z_loss=0.01, **moe)
            experts = {"activation": activation, "bias": True, "shared_experts": 1, "router": router}
            self.mlp = tp_ext.ParallelMoE(hidden, 20, 6, 2, attach_loss=1.0, **experts, **where)
        self.dropout = tp_ext.Dropout(dropout, **where)

    def forward(self, x, batch, tokens, cache=None):
        options = {"batch_size": batch, "total_tokens": tokens, "cache": cache}
        x = self.dropout(self.attention(self.norm1(x), **options), x, tokens)
        y, total = self.norm2(x, x)
        return self.dropout(self.mlp(y, tokens), total, tokens)


class Model(nn.Module):
    def __init__(self, group, sequence_parallel=False, layers=2, vocab=SIZES["vocab"], **options):
        super().__init__()
        where = {"group": group, "sequence_parallel": sequence_parallel}
        sizes = vocab, SIZES["hidden"]
        self.embedding = tp_ext.VocabParallelEmbedding(*sizes, padding_idx=3, **where)
        self.blocks = nn.ModuleList(Block(group, sequence_parallel, **options) for _ in range(layers))
        self.norm = tp_ext.LayerNorm(SIZES["hidden"], **where)
        self.head = tp_ext.VocabParallelLMHead(*sizes[::-1], bias=True, **where)
        self.head.weight = self.embedding.weight

    def hidden(self, ids, caches=None):
        (batch, _), tokens = ids.shape, ids.numel()
        x = self.embedding(ids.flatten())
        for i, block in enumerate(self.blocks):
            x = block(x, batch, tokens, None if caches is None else caches[i])
        return self.norm(x)

    def log_probabilities(self, ids, target, caches=None):
        """Returns the log-probability of each id of ``target`` given ``ids`` up to its place, and the caches."""
        losses = self.head.loss(self.hidden(ids, caches), target.flatten(), ids.numel(), reduction="none")
        return -losses.view(ids.shape)

    @torch.no_grad()
    def rollout(self, prompt, count, padding=None, static=False, dtype=None):
        """Texts of ``count`` more ids, sampled, and the log-probability of each."""
        batch, length = prompt.shape
        caches = [b.attention.new_cache(batch, length + count, static=static, dtype=dtype) for b in self.blocks]
        for cache in caches:
            cache.reset(padding)
        ids, new, sampled = prompt, prompt, []
        for _ in range(count):
            x = self.hidden(new, caches).unflatten(0, new.shape)[:, -1]
            new = self.head.sample(x)[:, None]
            sampled.append(-self.head.loss(x, new[:, 0], reduction="none"))
            ids = torch.cat([ids, new], 1)
        return ids, torch.stack(sampled, 1)

    def forward(self, ids, target, **loss):
        return self.head.loss(self.hidden(ids), target.flatten(), ids.numel(), **loss)


def batches(count, seq=13):
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield [torch.randint(SIZES["vocab"], (2, seq), generator=generator) for _ in range(2)]


def optimizer_of(model, muon, lr):
    if not muon:
        return torch.optim.AdamW(model.parameters(), lr=lr)
    matrices, others = tp_ext.optim.split_parameters(model)
    return tp_ext.optim.Muon(matrices, adamw_params=others, model=model, ns_dtype=torch.float32)


def trained(
    group,
    steps=2,
    blocks=8,
    dtype=torch.float32,
    autocast=False,
    threads=1,
    muon=False,
    seq=13,
    loss=None,
    shares=None,
    **options,
):
    """Loss and gradient norm of each step in hex, and the digest of model and optimizer."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    with tp_ext.tp_invariant(blocks) if blocks else tp_ext.invariance.using_blocks(None), tp_ext.shares(shares):
        model = Model(group, **options).to(dtype)
    optimizer = optimizer_of(model, muon, lr=1e-2)
    numbers = []
    for ids, target in batches(steps, seq):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            value = model(ids, target, **(loss or {}))
        value.backward()
        norm = tp_ext.clip_grad_norm_(model, 0.5)
        numbers += [value.item().hex(), norm.item().hex()]
        optimizer.step()
        optimizer.zero_grad()
    return numbers, tp_ext.debug.sha256(model, optimizer)


def simulated(p, *args, **options):
    """``trained`` on p simulated ranks; p = 1 is one process without a group."""
    if p == 1:
        return trained(None, *args, **options)
    results = tp_ext.debug.simulate(lambda rank, group: trained(group, *args, **options), p)
    assert all(result == results[0] for result in results)
    return results[0]
