"""Rules of ``spmd_types`` for the operators of a mixture of experts, as those of :mod:`tp_ext.debug.type_rules`.

Along the expert group tokens, rows of experts and experts are V. The rows of a rank are those of its experts, so both
have one letter in the formulas here.
"""

from typing import Any

import spmd_types
from spmd_types import I, R, rules
from torch import Tensor

from tp_ext.debug import type_rules
from tp_ext.debug.type_rules import Typed, alike, ignored, rule
from tp_ext.nn.moe.experts import AddedOnce, ScaledGradient
from tp_ext.nn.moe.router import AttachedLoss, SumWithGradient


@rule
def all_to_all_linear(
    *, rows: Tensor, group: str, x: Tensor, weight: Tensor, main_grad: Tensor | None
) -> tuple[Typed, Typed]:
    ignored(main_grad)
    return type_rules.exchanged(rows, group, 0, 0), rules.einsum("...k,nk->...n", *alike(x, weight))


@rule
def grouped_linear(*, x: Tensor, weight: Tensor, main_grad: Tensor | None) -> Typed:
    ignored(main_grad)
    return rules.einsum("ek,enk->en", *alike(x, weight))


def _permuted(x: Typed, rows: Typed, weights: Tensor | None) -> Typed:
    for axis, held in spmd_types.get_local_type(rows).items():
        if held is I:  # integers have no gradient
            rows = rules.convert(rows, axis, src=I, dst=R)
    if weights is None:
        return rules.einsum("th,tc->th", *alike(x, rows), linear_in=(0,))
    return rules.einsum("th,tc,tc->th", *alike(x, rows, weights), linear_in=(0,))


@rule
def moe_permute(*, x: Tensor, rows: Tensor, weights: Tensor | None) -> Typed:
    return _permuted(x, rows, weights)


@rule
def moe_unpermute(*, y: Tensor, rows: Tensor, weights: Tensor | None) -> Typed:
    return _permuted(y, rows, weights)


def _added_once(*, y: Tensor, added: Tensor) -> Typed:
    ignored(added)  # the same on all ranks, and its gradient; y are partial sums
    return rules.einsum("...->...", y)


def _sum_with_gradient(*, value: Tensor, terms: Tensor, group: str) -> Typed:
    ignored(value)  # the sum of the terms of the ranks
    return type_rules.summed(terms, group)


def _attached_loss(*, x: Tensor, loss: Tensor) -> Typed:
    ignored(loss)
    return rules.einsum("...->...", x)


def _scaled_gradient(*, x: Tensor) -> Typed:
    return rules.einsum("...->...", x)


FUNCTIONS: dict[Any, Any] = {
    AddedOnce: _added_once,
    SumWithGradient: _sum_with_gradient,
    AttachedLoss: _attached_loss,
    ScaledGradient: _scaled_gradient,
}
"""Autograd functions of Python, and their rules."""
for _function, _types in FUNCTIONS.items():
    _function.spmd_typecheck = staticmethod(_types)
