"""Embeddings and bags of embeddings with each of torch's options: right by shards, or whole with the option named."""

import copy
import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.auto.torch_modules import Called, Model, same
from tests.helpers.on_ranks import on_ranks
from tests.helpers.simulated import run
from tp_ext import auto

indices = torch.tensor([[1, 5, 5, 12], [0, 12, 5, 3], [12, 12, 1, 1]])


def _table(columns: bool = False, **options: Any) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """An embedding of 13 rows, whose features are whole for a norm, or sharded with those of a linear layer."""
    if columns:
        return nn.Sequential(nn.Embedding(13, 8, **options), nn.ReLU(), nn.Linear(8, 6)), (indices,)
    layers = nn.Embedding(13, 8, **options), nn.LayerNorm(8), nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 8)
    return nn.Sequential(*layers), (indices,)


def _looked_up(columns: bool, **options: Any) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """As `_table`, by a call of ``F.embedding``."""
    (table, *layers), example = _table(columns)
    rest = nn.Sequential(*layers)
    return Called(lambda m, i: m.rest(F.embedding(i, m.table.weight, **options)), table=table, rest=rest), example


def _bags(columns: bool = False, *more: Tensor, **options: Any) -> tuple[nn.Module, tuple[Tensor, ...]]:
    def forward(model: Any, indices: Tensor, *more: Tensor) -> Tensor:
        offsets = next((t for t in more if not t.is_floating_point()), None)
        weights = next((model.scale(t[..., None])[..., 0] for t in more if t.is_floating_point()), None)
        return model.last(model.bags(indices if offsets is None else indices.flatten(), offsets, weights).relu())

    last = nn.Linear(8, 6) if columns else nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 8))
    model = Called(forward, bags=nn.EmbeddingBag(40, 8, **options), scale=nn.Linear(1, 1), last=last)
    return model, (indices, *more)


offsets = torch.tensor([0, 3, 3, 8])  # the second bag is empty
ends = torch.tensor([0, 3, 3, 8, 12])
# name -> the model, and what the table is: sharded, or whole by an option
TABLES: dict[str, tuple[Model, str]] = {
    "padding in the last row": (lambda: _table(padding_idx=12), ""),
    "padding by a negative index": (lambda: _table(padding_idx=-1), ""),
    "padding in the first row": (lambda: _table(padding_idx=0), ""),
    "features with padding": (lambda: _table(True, padding_idx=12), ""),
    "max_norm": (lambda: _table(max_norm=0.5, norm_type=1.0), "max_norm of embedding"),
    "scale_grad_by_freq": (lambda: _table(scale_grad_by_freq=True), "scale_grad_by_freq=True of embedding"),
    "features, scale_grad_by_freq": (lambda: _table(True, scale_grad_by_freq=True), ""),
    "features by a call": (lambda: _looked_up(True, padding_idx=12, scale_grad_by_freq=True), ""),
    "rows by a call": (lambda: _looked_up(False, padding_idx=12), "by no forward of nn.Embedding"),
    "max_norm by a call": (lambda: _looked_up(True, max_norm=0.5), "max_norm of embedding"),
    "sums": (lambda: _bags(mode="sum"), ""),
    "means": (lambda: _bags(mode="mean", padding_idx=5), ""),
    "means of offsets": (lambda: _bags(False, offsets, mode="mean"), ""),
    "means of ends, with padding": (lambda: _bags(False, ends, include_last_offset=True, padding_idx=-28), ""),
    "weighted sums": (lambda: _bags(False, torch.rand(3, 4), mode="sum", padding_idx=12), ""),
    "maxima": (lambda: _bags(mode="max"), "mode='max' of embedding_bag"),
    "maxima of features": (lambda: _bags(True, mode="max"), ""),
    "bags, scale_grad_by_freq": (lambda: _bags(scale_grad_by_freq=True), "scale_grad_by_freq=True of embedding_bag"),
    "bags, max_norm": (lambda: _bags(max_norm=0.5), "max_norm of embedding"),
}
MODELS: dict[str, Model] = {name: made for name, (made, _) in TABLES.items()}


@pytest.mark.parametrize(("name", "p"), [*((n, 3) for n in TABLES), ("sums", 2), ("means", 4)])
def test_tables(name: str, p: int) -> None:
    made, reason = TABLES[name]
    (table,) = (n for n, t in made()[0].named_parameters() if t.shape[0] in (13, 40))
    sharded = run(same, p, name, "MODELS", __name__)[0]
    assert (table in sharded) == (not reason)
    assert reason in auto.plan(*made(), p).why(table)


@pytest.mark.parametrize("made", [_table, _bags])
def test_sparse_gradients_are_those_of_a_whole_table(made: Any) -> None:
    model, example = made(sparse=True)
    plan = auto.plan(model, example, 2)
    assert "sparse=True of embedding" in plan.why(next(iter(plan.shapes)))


@pytest.mark.parametrize("made", [_table, _bags])
@on_ranks(2)
def test_a_table_of_shards_can_be_copied(group: Any, made: Any) -> None:
    model, example = made()
    auto.apply(auto.plan(model, example, 2), model, group)
    torch.testing.assert_close(copy.deepcopy(model)(*example), model(*example))


def test_every_option_of_the_layers_that_are_replaced_is_known() -> None:
    """One that torch adds must be looked at: it may be one that a layer of ours does not read."""
    common = {"self", "device", "dtype"}
    tables = {"num_embeddings", "embedding_dim", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse",
              "_weight", "_freeze"}  # fmt: skip
    known = {
        nn.Linear: {"in_features", "out_features", "bias"},
        nn.Embedding: tables,
        nn.EmbeddingBag: tables - {"_freeze"} | {"mode", "include_last_offset"},
        nn.MultiheadAttention: {"embed_dim", "num_heads", "dropout", "bias", "add_bias_kv", "add_zero_attn", "kdim",
                                "vdim", "batch_first"},
    }  # fmt: skip
    for cls, options in known.items():
        assert set(inspect.signature(cls.__init__).parameters) - common == options, cls
