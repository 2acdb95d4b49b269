"""The proof by values of models whose layers do not fit the budget: they are scaled down, and what differs is found."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tp_ext import auto
from tp_ext.auto.proof import scaled_down

HIDDEN, HEADS, KV, HEAD, INNER, VOCAB = 1024, 16, 4, 32, 2816, 6000
IDS = torch.tensor([[1, 5999, 7, 300, 2, 4000]])
MIB = 2.0**20  # 40 of a layer in fp32, 5 of a smaller one


class Block(nn.Module):
    """Grouped-query attention and a gated MLP; ``wrong`` is a mistake under tensor parallelism."""

    def __init__(self, wrong: str = "") -> None:
        super().__init__()
        self.wrong, self.heads, self.kv = wrong, HEADS, KV
        self.norm, self.norm_2 = nn.LayerNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.q, self.k = nn.Linear(HIDDEN, HEADS * HEAD), nn.Linear(HIDDEN, KV * HEAD)
        self.v, self.o = nn.Linear(HIDDEN, KV * HEAD), nn.Linear(HEADS * HEAD, HIDDEN)
        self.gate_up, self.down = nn.Linear(HIDDEN, 2 * INNER, bias=False), nn.Linear(INNER, HIDDEN)

    def forward(self, x):
        b, t, _ = x.shape
        h = self.norm(x)
        q = self.q(h).view(b, t, self.heads, HEAD).transpose(1, 2)
        k = self.k(h).view(b, t, self.kv, HEAD).transpose(1, 2)
        v = self.v(h).view(b, t, self.kv, HEAD).transpose(1, 2)
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(h.transpose(1, 2).reshape(b, t, -1))
        gate, up = self.gate_up(self.norm_2(x)).chunk(2, -1)
        inner = F.silu(gate) * up
        if self.wrong:
            inner = inner * inner.shape[-1] ** -0.5  # a local length as a number
        return x + self.down(inner)


class Model(nn.Module):
    def __init__(self, wrong: str = "", tied: bool = True, padding: int | None = 5998) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(VOCAB, HIDDEN, padding), nn.Embedding(2048, HIDDEN)
        self.layers = nn.ModuleList(Block(wrong) for _ in range(2))
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids, labels):
        x = self.embed(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten()), logits


def planned(p, budget=16 * MIB, **options):
    with torch.device("meta"):
        model = Model(**options)
    labels = IDS.clone()
    labels[0, 2] = -100
    return auto.plan(model, {"ids": IDS, "labels": labels}, p, budget=budget)


@pytest.mark.parametrize(("p", "tied"), [(3, False), (8, True)], ids=["uneven", "copied KV heads"])
def test_a_large_model_is_proven_by_values(p, tied):
    plan = planned(p, tied=tied)
    assert plan.proof == "values"
    assert {name.split(".")[-2] for name in plan.shardings} == {
        *("q", "k", "v", "o", "gate_up", "down", "embed", "head", "positions"),
    }


def test_what_differs_stays_whole():
    plan = planned(2, wrong="length")
    assert plan.proof == "values"
    assert "values differ" in plan.whole["layers.0.down.weight"]
    assert {"layers.1.q.weight", "embed.weight"} <= set(plan.shardings)


def test_the_smaller_model_keeps_the_kind_of_every_dim(monkeypatch):
    """Two units a rank at least, ties and padding_idx, ids of its own table; the model itself is left alone."""
    seen = []
    original = scaled_down._shrink

    def shrink(model, shapes):
        original(model, shapes)
        seen.append(model)

    monkeypatch.setattr(scaled_down, "_shrink", shrink)
    assert planned(2, padding=5999).proof == "values"
    (small,) = seen
    layer = small.layers[0]
    assert small.head.weight is small.embed.weight and len(small.layers) == 2
    assert (layer.kv, layer.heads, layer.k.out_features) == (4, 16, 4 * HEAD)
    hidden, rows = small.embed.embedding_dim, small.embed.num_embeddings
    assert layer.down.weight.shape[0] == layer.norm.normalized_shape[0] == hidden == 272
    assert layer.gate_up.out_features == 2 * layer.down.in_features and layer.down.in_features % 2 == 0
    assert 128 <= rows < 144 and small.embed.padding_idx == 5999 % rows


def test_a_budget_below_the_smallest_form_leaves_shapes():
    assert planned(2, budget=1024.0).proof.startswith("shapes: one layer of each kind, with fewer heads, has")
