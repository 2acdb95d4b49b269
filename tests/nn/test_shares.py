"""Layers whose ranks have shares of their own (``tp_ext.shares``) are compared with the unsharded ones: outputs, all
gradients and three steps, in fp64; and what is refused."""

import contextlib
import random

import pytest
import torch
from torch import nn

import tp_ext
from tp_ext.low_precision import quantize_
from tp_ext.nn.moe.router import RouterConfig
from tp_ext.share_sizes import split_sizes

BOUND = 1e-11  # of fp64 sums of a few hundred terms in another order
HIDDEN = 12


class Case:
    """One layer: how it is made, its full inputs, and how input and output lie on the ranks."""

    takes, gives = "tokens", "tokens"  # under SP; without it both are replicated. Or "features", "whole"
    needs_total = True
    sp = (False, True)
    dtype = torch.float64

    def __init__(self, rng):
        self.rng = rng
        self.sequence_parallel = rng.choice(self.sp)
        self.tokens = rng.choice([4, 6, 8, 12])

    def options(self, group):
        return {"group": group, "sequence_parallel": self.sequence_parallel, "dtype": self.dtype}

    def inputs(self):
        return torch.randn(self.tokens, HIDDEN, dtype=torch.float64)

    def call(self, layer, x, total):
        return layer(x, total)

    def after(self, layer):
        """Changes a layer that was made."""


class Column(Case):
    def __init__(self, rng):
        super().__init__(rng)
        self.gather, self.bias = rng.random() < 0.5, rng.random() < 0.5
        self.units = rng.choice([1, 2])
        self.parts = [self.units * rng.randint(1, 7) for _ in range(rng.choice([1, 2, 3]))]
        self.gives = "whole" if self.gather else "features"

    def make(self, group):
        parts = [tp_ext.Part(size, self.units) for size in self.parts]
        options = self.options(group) | {"parts": parts, "gather_output": self.gather}
        return tp_ext.ColumnParallelLinear(HIDDEN, sum(self.parts), self.bias, **options)

    def sharding(self, layer):
        return layer.weight_layout[0][0]


class Row(Case):
    takes, needs_total = "features", False

    def __init__(self, rng):
        super().__init__(rng)
        self.bias, self.features = rng.random() < 0.5, rng.choice([1, 2, 7, 12])
        self.parallel = self.sequence_parallel or rng.random() < 0.5
        self.takes = "features" if self.parallel else "whole"

    def make(self, group):
        options = self.options(group) | {"input_is_parallel": self.parallel}
        return tp_ext.RowParallelLinear(self.features, 5, self.bias, **options)

    def inputs(self):
        return torch.randn(self.tokens, self.features, dtype=torch.float64)

    def sharding(self, layer):
        return layer.weight_layout[0][0]


class MLP(Case):
    def __init__(self, rng):
        super().__init__(rng)
        self.mlp = {"activation": rng.choice(["gelu", "swiglu", "relu"]), "bias": rng.random() < 0.5}
        self.ffn = rng.choice([2, 9, 16])

    def make(self, group):
        return tp_ext.ParallelMLP(HIDDEN, self.ffn, **self.mlp, **self.options(group))


class LoRA(MLP):
    def after(self, layer):
        tp_ext.add_lora(layer, targets=["up", "down"], r=2, alpha=3)
        torch.manual_seed(7)
        full = {
            f"{name}.lora_B.weight": torch.randn(module.out_features, 2, dtype=torch.float64)
            for name, module in layer.named_modules()
            if isinstance(module, tp_ext.LoRALinear)
        }
        for name, value in full.items():  # else the gradient of A is 0
            param = layer.get_parameter(name)
            param.data.copy_(layout_of(layer, name).shard(value))


class Int4(MLP):
    dtype = torch.float32  # quantised, and used in the dtype of x

    def __init__(self, rng):
        super().__init__(rng)
        self.mlp, self.ffn = {"activation": "relu", "bias": False}, 16

    def make(self, group):
        options = self.options(group)
        up = tp_ext.ColumnParallelLinear(HIDDEN, self.ffn, False, unit=4, **options)
        return nn.Sequential(up, tp_ext.RowParallelLinear(self.ffn, HIDDEN, False, unit=4, **options))

    def call(self, layer, x, total):
        return layer[1](layer[0](x, total).relu(), total)

    def after(self, layer):
        quantize_(layer, weights="int4", block=4)


class Attention(Case):
    def __init__(self, rng):
        super().__init__(rng)
        kv = rng.choice([1, 2, 3, 4])
        self.heads = {"num_heads": kv * rng.choice([1, 2]), "num_kv_heads": kv, "head_dim": 4}
        self.heads |= {"qk_norm": rng.random() < 0.5, "rope": rng.choice([None, 100.0]), "bias": rng.random() < 0.5}
        self.heads |= {"sliding_window": rng.choice([None, 2]), "softcap": rng.choice([None, 5.0])}
        self.heads |= {"dropout": rng.choice([0.0, 0.3]), "causal": rng.random() < 0.7}
        self.batch = rng.choice([1, 2])

    def make(self, group):
        return tp_ext.ParallelAttention(HIDDEN, **self.heads, **self.options(group))

    def call(self, layer, x, total):
        return layer(x, batch_size=self.batch, total_tokens=total)


class MLA(Attention):
    def __init__(self, rng):
        super().__init__(rng)
        sizes = {"kv_lora_rank": 6, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 3}
        self.heads = {"num_heads": rng.choice([1, 2, 3, 5]), "q_lora_rank": rng.choice([None, 5]), **sizes}

    def make(self, group):
        return tp_ext.ParallelLatentAttention(HIDDEN, **self.heads, **self.options(group))


class MoE(Case):
    def __init__(self, rng):
        super().__init__(rng)
        self.moe = {"shared_experts": rng.choice([0, 1]), "bias": rng.random() < 0.5}
        self.moe["router"] = RouterConfig(balance_loss=rng.choice([0.0, 0.1]))
        self.ffn = rng.choice([2, 7])

    def make(self, group):
        return tp_ext.ParallelMoE(HIDDEN, self.ffn, 3, 2, **self.moe, attach_loss=1.0, **self.options(group))


class Norm(Case):
    needs_total = False
    sp = (True,)

    def __init__(self, rng):
        super().__init__(rng)
        self.kind = rng.choice([tp_ext.RMSNorm, tp_ext.LayerNorm])

    def make(self, group):
        return self.kind(HIDDEN, **self.options(group))

    def call(self, layer, x, total):
        return layer(x)


class Model(Case):
    """Embedding, a block, head and loss."""

    takes, gives = "whole", "whole"

    def __init__(self, rng):
        super().__init__(rng)
        self.attention, self.mlp = Attention(rng), rng.choice([MLP, MoE])(rng)
        self.attention.sequence_parallel = self.mlp.sequence_parallel = self.sequence_parallel
        self.vocab, self.keep, self.bias = rng.choice([2, 5, 23]), rng.random() < 0.5, rng.random() < 0.5
        self.tied = not self.bias and rng.random() < 0.5
        self.loss = {"label_smoothing": rng.choice([0.0, 0.1]), "z_loss": rng.choice([0.0, 0.1])}
        self.loss["reduction"] = rng.choice(["mean", "none"])

    def make(self, group):
        options = self.options(group)
        model = nn.ModuleDict()
        model["embedding"] = tp_ext.VocabParallelEmbedding(self.vocab, HIDDEN, padding_idx=1, **options)
        model["norm"], model["attention"] = tp_ext.RMSNorm(HIDDEN, **options), self.attention.make(group)
        model["mlp"] = self.mlp.make(group)
        model["head"] = tp_ext.VocabParallelLMHead(HIDDEN, self.vocab, bias=self.bias, **options)
        if self.tied:
            model["head"].weight = model["embedding"].weight
        return model

    def inputs(self):
        shape = (self.tokens,) if self.sequence_parallel else (2, self.tokens)
        return torch.randint(self.vocab, (2, *shape))

    def call(self, model, x, total):
        total = x[0].numel() if self.sequence_parallel else None
        h = model["embedding"](x[0])
        h, total_h = model["norm"](h), h
        attended = self.attention.call(model["attention"], h, total) if h.dim() == 2 else model["attention"](h)
        h = total_h + attended
        h = h + model["mlp"](h, total)
        chosen = model["head"].argmax(h.detach(), total), model["head"].sample(h.detach(), total, top_k=3)
        loss = model["head"].loss(h, x[1], total, keep_logits=self.keep, **self.loss)
        return torch.cat([loss.flatten(), *(c.flatten().to(loss.dtype) for c in chosen)])


KINDS = [Column, Row, MLP, LoRA, Int4, Attention, MLA, MoE, Norm, Model, Attention, Model]


def layout_of(layer, name):
    owner, _, local = name.rpartition(".")
    return layer.get_submodule(owner).tp_layouts[local]


def weights_of(rng, p):
    """Random weights, zeros included."""
    kinds = [lambda: rng.randint(0, 4), lambda: rng.choice([0, 1, 1000]), lambda: rng.random()]
    weights = [rng.choice(kinds)() for _ in range(p)]
    return weights if any(weights) else [1] * p


def trained(case, layer, x, cotangent, local):
    """Yields for three steps of SGD the results, with ``local``: how this rank's slices are cut."""
    optimizer = torch.optim.SGD([p for p in layer.parameters() if p.requires_grad] or [torch.zeros(1)], 0.05, 0.9)
    total = len(x) if case.sequence_parallel and case.needs_total else None
    for step in range(3):
        optimizer.zero_grad()
        part = local(layer, x, case.takes).detach()
        part.requires_grad_(part.is_floating_point())
        torch.manual_seed(50 + step)  # of masks
        y = case.call(layer, part, total)
        if cotangent is None:
            torch.manual_seed(90)
            cotangent = torch.randn_like(y)
            cotangent[-1:] = 1
        (y * local(layer, cotangent, case.gives)).sum().backward()
        yield y.detach(), part.grad, {n: p.grad for n, p in layer.named_parameters()}, cotangent
        optimizer.step()


def compared(seed):
    rng = random.Random(seed)
    p = rng.choice([2, 3, 4])
    weights, tokens, case = weights_of(rng, p), rng.random() < 0.7, rng.choice(KINDS)(rng)
    torch.manual_seed(seed)
    x = case.inputs()

    def built(group, context):
        torch.manual_seed(seed)
        with context:
            layer = case.make(group)
        case.after(layer)
        return layer

    reference = built(None, contextlib.nullcontext())
    results = list(trained(case, reference, x, None, lambda _, value, __: value))
    full_params = dict(reference.named_parameters())

    def rank_of(rank, group):
        layer = built(group, tp_ext.shares(weights, tokens=tokens))

        def local(layer, value, lies):
            if lies == "tokens" and case.sequence_parallel:
                return value.split(split_sizes(len(value), p, tuple(weights) if tokens else None))[rank]
            if lies == "features":
                sharding = case.sharding(layer)
                return tp_ext.Sharding(-1, sharding.parts).shard(value, rank, p)
            return value

        def check(what, value, full):
            assert (value is None) == (full is None), what
            if full is not None and full.numel() and value.numel():
                assert value.shape == full.shape, what
                difference, size = (value - full).abs().max(), full.abs().max()
                assert difference <= BOUND * (1 + size), (what, float(difference))
            elif full is not None:
                assert value.shape == full.shape, what

        cotangent = results[0][3]
        for step, (mine, theirs) in enumerate(zip(trained(case, layer, x, cotangent, local), results, strict=True)):
            check(f"y {step}", mine[0], local(layer, theirs[0], case.gives))
            check(f"dx {step}", mine[1], None if theirs[1] is None else local(layer, theirs[1], case.takes))
            assert mine[2].keys() == theirs[2].keys()
            for name, grad in theirs[2].items():
                expected = None if grad is None else layout_of(layer, name).shard(grad)
                check(f"grad of {name} {step}", mine[2][name], expected)
        for name, param in layer.named_parameters():
            check(name, param.detach(), layout_of(layer, name).shard(full_params[name].detach()))

    tp_ext.debug.simulate(rank_of, p)


@pytest.mark.parametrize("seed", [n if n < 40 else pytest.param(n, marks=pytest.mark.exhaustive) for n in range(300)])
def test_layers_of_shares_are_those_of_one_rank(seed):
    compared(seed)


def _later_tokens(group, weights, x):
    """Loss, gradients and layouts of a multi-token prediction, under sequence parallelism if there are ranks."""
    torch.manual_seed(0)
    options = {"group": group, "sequence_parallel": group is not None, "dtype": torch.float64}
    with tp_ext.shares(weights):
        embedding = tp_ext.VocabParallelEmbedding(11, HIDDEN, **options)
        head = tp_ext.VocabParallelLMHead(HIDDEN, 11, **options)
        block = tp_ext.ParallelMLP(HIDDEN, 6, **options)
        model = tp_ext.MultiTokenPrediction(HIDDEN, block, embedding=embedding, head=head, **options)
    ids = torch.arange(1, len(x) + 1)[:, None] % 11
    keywords = {} if group is None else {"total_tokens": len(x)}
    if group is not None:
        x = x.split(split_sizes(len(x), len(weights), tuple(weights)))[group.rank()]
    loss = model.loss(model(x, ids, **keywords), ids)
    loss.backward()
    return loss, {name: p.grad for name, p in model.named_parameters()}, dict(tp_ext.layouts(model))


@pytest.mark.parametrize("weights", [[2, 1], [0, 1, 3]])
def test_later_tokens_are_predicted_alike(weights):
    x = torch.randn(7, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    loss, grads, _ = _later_tokens(None, None, x)
    ranks = tp_ext.debug.simulate(lambda rank, group: _later_tokens(group, weights, x), len(weights))
    for value, of_rank, layouts in ranks:
        assert torch.allclose(value, loss, rtol=BOUND, atol=BOUND)
        for name, grad in of_rank.items():
            assert torch.allclose(grad, layouts[name].shard(grads[name]), rtol=BOUND, atol=BOUND), name
