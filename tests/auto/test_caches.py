"""Caches in tuples, lists and dicts, which a call returns whole and the caller's code gives back: the calls of decoding
next to a plan whose example is training, or one of these calls."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tp_ext
from tests.helpers.simulated import run

IDS = torch.randint(0, 23, (2, 7), generator=torch.Generator().manual_seed(3))


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = 4
        self.norm, self.qkv, self.out = nn.LayerNorm(32), nn.Linear(32, 96, bias=False), nn.Linear(32, 32)

    def forward(self, x: Tensor, cache: Any = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        b, n, _ = x.shape
        q, k, v = (t.reshape(b, n, self.heads, -1).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, dim=-1))
        if cache is not None:
            k, v = torch.cat((cache[0], k), dim=-2), torch.cat((cache[1], v), dim=-2)
        mask = torch.ones(n, k.shape[-2], dtype=torch.bool).tril(k.shape[-2] - n)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(y.transpose(1, 2).reshape(b, n, -1)), (k, v)


class _Decoder(nn.Module):
    """``form``: how the keys and values of the layers leave forward, and come back."""

    def __init__(self, form: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.form, self.embedding, self.head = form, nn.Embedding(23, 32), nn.Linear(32, 23)
        self.layers = nn.ModuleList(_Attention() for _ in range(2))

    def forward(self, ids: Tensor, return_loss: bool = False, return_cache: bool = False, cache: Any = None) -> Any:
        x, kept = self.embedding(ids), []
        for i, layer in enumerate(self.layers):
            y, keys_values = layer(x, None if cache is None else self.of_layer(cache, i))
            x = x + y
            kept.append(keys_values)
        logits = self.head(x)
        if return_loss:
            return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        return (logits, self.packed(kept)) if return_cache else logits

    def packed(self, kept: list[tuple[Tensor, Tensor]]) -> Any:
        if self.form == "stacked":  # as of lucidrains' speculative decoding
            return torch.stack([torch.stack(kv, 1) for kv in kept], 1), None
        if self.form == "dict":
            return {f"layer{i}": {"k": k, "v": v} for i, (k, v) in enumerate(kept)}
        return kept if self.form == "list" else tuple(kept)

    def of_layer(self, cache: Any, i: int) -> Any:
        if self.form == "stacked":
            return cache[0].unbind(1)[i].unbind(1)
        return tuple(cache[f"layer{i}"].values()) if self.form == "dict" else cache[i]


class _Alone(nn.Module):
    """The cache is used in the forward of the model itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads, self.embedding = 4, nn.Embedding(23, 32)
        self.q, self.k, self.out = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 23)

    def forward(self, ids: Tensor, return_loss: bool = False, return_cache: bool = False, cache: Any = None) -> Any:
        x = self.embedding(ids)
        q, k = (f(x).view(*ids.shape, self.heads, -1).transpose(1, 2) for f in (self.q, self.k))
        k = k if cache is None else torch.cat([cache[0], k], -2)
        logits = self.out((q.sin() + k.mean(-2, True)).transpose(1, 2).flatten(2))
        if return_loss:
            return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        return (logits, [k]) if return_cache else logits


def _model(form: str) -> nn.Module:
    return (_Alone() if form == "alone" else _Decoder(form)).double()


def _decoded(model: nn.Module) -> list[Tensor]:
    """Logits of a prompt, of one token and of three more with the cache given back, of training, and the gradients."""
    with torch.no_grad():
        first, cache = model(IDS, return_cache=True)
        second, cache = model(IDS[:, :1], return_cache=True, cache=cache)
        third, cache = model(IDS[:, 2:5], return_cache=True, cache=cache)
        last = model(IDS[:, :1], cache=cache)
    with_gradients = model(IDS, return_cache=True)[0]
    loss = model(IDS, return_loss=True)
    (loss + with_gradients.pow(2).mean()).backward()
    kept = torch.utils._pytree.tree_leaves(cache)
    gradients = [p.grad for n, p in model.named_parameters() if "norm" in n or n.endswith("out.bias")]
    return [
        first,
        second,
        third,
        last,
        loss.detach(),
        with_gradients.detach(),
        *filter(torch.is_tensor, kept),
        *gradients,
    ]


def _sharded(group: Any, form: str, plan: Any) -> list[Tensor]:
    model = _model(form)
    tp_ext.auto.apply(plan, model, group)
    return _decoded(copy.deepcopy(model))


@pytest.mark.parametrize(
    "form, p, of_training",
    [("stacked", 2, True), ("stacked", 2, False), ("list", 3, True), ("tuples", 2, True), ("dict", 2, True),
     ("alone", 2, True), ("alone", 2, False)],
)  # fmt: skip
def test_a_cache_is_given_back(form, p, of_training):
    example = {"ids": IDS, "return_loss" if of_training else "return_cache": True}
    plan = tp_ext.auto.plan(_model(form), example, p)
    assert any(name.endswith(("qkv.weight", "k.weight")) for name in plan.shardings)
    expected = _decoded(_model(form))
    for results in run(_sharded, p, form, plan):
        for result, wanted in zip(results, expected, strict=True):
            torch.testing.assert_close(result, wanted, rtol=1e-9, atol=1e-9)


class _Writing(_Alone):
    """It writes into the cache that it is given, which the caller keeps."""

    def forward(self, ids: Tensor, return_loss: bool = False, return_cache: bool = False, cache: Any = None) -> Any:
        if cache is not None:
            cache[0][:, :, 0] = 0.0
        return super().forward(ids, return_loss, return_cache, cache)


def _refused(group: Any, plan: Any, model: nn.Module, with_gradients: bool) -> None:
    tp_ext.auto.apply(plan, model, group)
    with torch.no_grad():
        _, cache = model(IDS, return_cache=True)
    with torch.set_grad_enabled(with_gradients), pytest.raises(RuntimeError, match="cannot be sharded then"):
        model(IDS, return_cache=True, cache=cache)


@pytest.mark.parametrize("kind, with_gradients", [(_Alone, True), (_Writing, False)])
def test_a_cache_that_wants_more_than_a_slice_is_refused(kind, with_gradients):
    plan = tp_ext.auto.plan(kind().double(), {"ids": IDS, "return_loss": True}, 2)
    run(_refused, 2, plan, kind().double(), with_gradients)
