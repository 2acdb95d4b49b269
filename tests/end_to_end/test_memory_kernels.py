"""Each kernel saves for backward what the table of docs/reference/kernels.md says: which inputs, how many tensors of
its own, and how many bytes.

Distinct storages are counted, whole; parameters (weight, bias) exist anyway and count no bytes.
"""

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.helpers.paths import ROOT
from tp_ext import _ops

pytestmark = pytest.mark.core

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
ROWS, N, HEADS, D, R, VOCAB, FFN, CHOICES = 6, 48, 3, 16, 10, 7, 20, 2
PARAMETERS = ("weight", "bias", "up_weight", "down_weight")
EPS = 1e-5


def _table() -> dict[str, tuple[set[str], int, str]]:
    """By operator: inputs that it keeps, number of tensors of its own, formula of the bytes."""
    page = (ROOT / "docs" / "reference" / "kernels.md").read_text()
    section = page.split("## Saved for backward")[1].split("\n## ")[0]
    table = {}
    for line in re.findall(r"^\| (`.*) \|$", section, re.M):
        operators, inputs, own, formula = (re.findall(r"`([^`]+)`", cell) for cell in line.split("|"))
        for operator in operators:
            assert operator not in table
            table[operator] = set(inputs), len(own), formula[0]
    return table


def _normal(*shape: int) -> Callable[[torch.dtype], Tensor]:
    return lambda dtype: torch.randn(shape).to(dtype).requires_grad_()


def _angles(dtype: torch.dtype) -> Tensor:
    return torch.randn(ROWS, R // 2, dtype=torch.float64 if dtype == torch.float64 else torch.float32)


def _integers(bound: int, *shape: int) -> Callable[[torch.dtype], Tensor]:
    return lambda dtype: torch.randint(bound, shape)


def _dropped(x: Tensor, bias: Tensor, residual: Tensor, seed: Tensor) -> Tensor:
    return _ops.bias_dropout_residual(x, bias, residual, seed, 0.25, x.numel(), x.numel(), 0)


def _loss(inplace: bool) -> Callable[[Tensor, Tensor], Tensor]:
    def call(logits: Tensor, target: Tensor) -> Tensor:
        return _ops.vocab_parallel_cross_entropy(logits, target, "", 0, N, N, -100, 0.1, 0.01, "mean", inplace)

    return call


def _embedded(ids: Tensor, weight: Tensor) -> Tensor:
    return _ops.vocab_parallel_embedding(ids, weight, "", 0, VOCAB, VOCAB, False, None)


def _rows(dtype: torch.dtype) -> Tensor:
    return torch.randperm(ROWS * CHOICES).view(ROWS, CHOICES)


def _weights(dtype: torch.dtype) -> Tensor:
    return torch.rand(ROWS, CHOICES, dtype=torch.promote_types(dtype, torch.float32)).requires_grad_()


x, row = _normal(ROWS, N), _normal(N)
# By operator: the forward passes that it has, each with its inputs by name
CALLS: dict[str, list[tuple[Callable[..., Tensor], dict[str, Callable[[torch.dtype], Tensor]]]]] = {
    "bias_act": [
        (lambda x, bias, name=name: _ops.bias_act(x, bias, name), {"x": x, "bias": row})
        for name in ("gelu", "gelu_tanh", "relu", "silu")
    ],
    "gated_act": [
        (lambda x, bias, name=name: _ops.gated_act(x, bias, name), {"x": x, "bias": row})
        for name in ("swiglu", "geglu")
    ],
    "bias_dropout_residual": [
        (_dropped, {"x": x, "bias": row, "residual": x, "seed": _integers(2**62)}),
    ],
    "rms_norm": [(lambda x, weight: _ops.rms_norm(x, weight, EPS), {"x": x, "weight": row})],
    "layer_norm": [
        (lambda x, weight, bias: _ops.layer_norm(x, weight, bias, EPS), {"x": x, "weight": row, "bias": row})
    ],
    "rms_norm_residual": [
        (
            lambda x, residual, weight: _ops.rms_norm_residual(x, residual, weight, EPS)[0],
            {"x": x, "residual": x, "weight": row},
        )
    ],
    "layer_norm_residual": [
        (
            lambda x, residual, weight, bias: _ops.layer_norm_residual(x, residual, weight, bias, EPS)[0],
            {"x": x, "residual": x, "weight": row, "bias": row},
        )
    ],
    "rope": [
        (
            lambda x, cos, sin, between=between: _ops.rope(x, cos, sin, between),
            {"x": _normal(ROWS, HEADS, D), "cos": _angles, "sin": _angles},
        )
        for between in (False, True)
    ],
    "rope(positions=)": [
        (
            lambda x, cos, sin, positions: _ops.rope(x, cos, sin, False, positions),
            {"x": _normal(ROWS, HEADS, D), "cos": _angles, "sin": _angles, "positions": _integers(ROWS, ROWS)},
        )
    ],
    "vocab_parallel_cross_entropy": [
        (_loss(inplace), {"logits": x, "target": _integers(N, ROWS)}) for inplace in (False, True)
    ],
    "vocab_parallel_embedding": [(_embedded, {"ids": _integers(VOCAB, ROWS), "weight": _normal(VOCAB, N)})],
    "moe_permute": [(lambda x, rows: _ops.moe_permute(x, rows, ROWS * CHOICES), {"x": x, "rows": _rows})],
    "moe_unpermute": [(_ops.moe_unpermute, {"y": _normal(ROWS * CHOICES, N), "rows": _rows})],
    "moe_unpermute(weights=)": [
        (
            lambda y, rows, weights: _ops.moe_unpermute(y, rows, weights),
            {"y": _normal(ROWS * CHOICES, N), "rows": _rows, "weights": _weights},
        )
    ],
}


def _saved(call: Callable[..., Tensor], inputs: dict[str, Tensor]) -> dict[int, int]:
    """Bytes of each storage that autograd keeps, by its address."""
    storages, alive = {}, []

    def pack(t: Tensor) -> Tensor:
        storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        alive.append(t)  # or a later tensor could take its place
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        assert call(**inputs).requires_grad
    return storages


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("operator", CALLS)
def test_saved_bytes_are_those_of_the_page(operator: str, dtype: torch.dtype) -> None:
    named, own, formula = _table()[operator]
    for call, makers in CALLS[operator]:
        inputs = {name: make(dtype) for name, make in makers.items()}
        storages = _saved(call, inputs)
        addresses = {t.untyped_storage().data_ptr(): name for name, t in inputs.items()}
        assert {addresses[a] for a in storages if a in addresses} == named
        assert sum(a not in addresses for a in storages) == own
        size = sum(size for a, size in storages.items() if addresses.get(a) not in PARAMETERS)
        letters = {"e": dtype.itemsize, "s": max(dtype.itemsize, 4), "rows": ROWS, "n": N}
        letters |= {"heads": HEADS, "d": D, "r": R, "f": FFN, "k": CHOICES}
        elements = ROWS * HEADS * D if operator.startswith("rope") else ROWS * N
        assert size == pytest.approx(elements * eval(formula, letters), rel=1e-12)


def test_every_operator_that_keeps_something_is_in_the_table() -> None:
    assert set(_table()) == set(CALLS)
