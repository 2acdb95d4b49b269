"""Rules of ``spmd_types`` for the operators of this package: the type of each result from those of the arguments.

A type is one of :mod:`tp_ext.conversions`, for each axis of a mesh; or V, of different values, of which S(dim) are the
shards of a dim.

Each function here is the rule of the operator of its name: it takes the arguments that matter to the type, and composes
the type of the result from those of einsums and collectives. Its text is the signature of the operator: a collective
that is missing in it would be one that is missing in backward, too. Operators without a rule act on each element, or
run under operators that have one.

Needs ``spmd_types``; imported by :mod:`tp_ext.debug.type_check` when it is used.
"""

from collections.abc import Callable, Sequence
from typing import Any

import spmd_types
from spmd_types import I, P, R, S, V, rules
from torch import Tensor

from tp_ext.conversions import CONVERSIONS, Type
from tp_ext.group import parallel_group, process_group
from tp_ext.model.same_input import check_same_input
from tp_ext.nn.forms import ScaledGradient
from tp_ext.nn.moe.experts import AddedOnce
from tp_ext.nn.moe.router import AttachedLoss, SumWithGradient
from tp_ext.random import OwnRandomNumbers, draw_seed
from tp_ext.random_scope import rows_seed, sequence_seeds

Typed = Any
"""A tensor with a type, or ``rules.NdimWithSpmdType``: its number of dims and the type."""

RULES: dict[str, Callable[..., Any]] = {}
"""Name of an operator -> its rule."""


def rule(function: Callable[..., Any]) -> Callable[..., Any]:
    """Registers the rule of the operator of this name."""
    RULES[function.__name__] = function
    return function


# The collectives of the operators, on a group by its name; "" is one rank


def converted(x: Typed, group: str, before: Type, after: Type, dim: int = 0) -> Typed:
    """Returns the type of x after the region of a conversion; ``dim`` is that of the shards."""
    if not group:
        return x
    if before is Type.P:
        x = partial(x, group)
    shards = S(_positive(dim, x))
    source, result = (shards if kind is Type.S else getattr(spmd_types, kind) for kind in (before, after))
    collective = getattr(rules, CONVERSIONS[before, after].forward or "convert")
    return collective(x, process_group(group), src=source, dst=result)


def copied(x: Typed, group: str) -> Typed:
    """Returns the type of x where each rank computes another part with it: backward all-reduces its gradient."""
    return converted(x, group, Type.I, Type.R)


def replicated(x: Tensor, group: str) -> Typed:
    """Returns the type of x, integers that must be the same on all ranks."""
    return rules.convert(x, process_group(group), src=R, dst=R) if group else x


def summed(x: Typed, group: str, result: Any = I) -> Typed:
    """Returns the type of the sum of x, partial sums or any other values, over the ranks."""
    return rules.all_reduce(partial(x, group), process_group(group), src=P, dst=result) if group else x


def summed_and_scattered(x: Typed, group: str, dim: int) -> Typed:
    """Returns the type of a shard of that sum."""
    return converted(x, group, Type.P, Type.S, dim)


def gathered(x: Typed, group: str, dim: int) -> Typed:
    """Returns the type of the shards of x, concatenated for sharded work."""
    return converted(x, group, Type.S, Type.R, dim)


def scattered(x: Typed, group: str, dim: int) -> Typed:
    """Returns the type of this rank's slice of x."""
    return converted(x, group, Type.I, Type.S, dim)


def exchanged(x: Typed, group: str, dim: int, new_dim: int) -> Typed:
    """Returns the type of x, sharded on ``dim``, after an exchange that shards ``new_dim``."""
    if not group:
        return x
    return rules.all_to_all(x, process_group(group), src=S(_positive(dim, x)), dst=S(_positive(new_dim, x)))


def sharded(x: Typed, group: str, dim: int) -> Typed:
    """Returns x, which must be sharded on ``dim``."""
    return spmd_types.assert_type(x, {process_group(group): S(_positive(dim, x))}) if group else x


def partial(x: Typed, group: Any) -> Typed:
    """Returns the type of x as partial sums over a group, by name, or an axis: of local types a sum over a sharded dim
    is V, not P."""
    if not group:
        return x
    axis = process_group(group) if isinstance(group, str) else group
    if spmd_types.maybe_get_axis_local_type(x, axis) is not V:
        return x
    return rules.reinterpret(x, axis, src=V, dst=P)


def full(x: Typed, group: str) -> Typed:
    """Returns x, which must be R: all of it, for a part of the computation."""
    return spmd_types.assert_type(x, {process_group(group): R}) if group else x


def _positive(dim: int, x: Typed) -> int:
    return dim % x.ndim if x.ndim else dim


def biased(y: Typed, bias: Typed | None) -> Typed:
    """Returns the type of ``y + bias``."""
    return y if bias is None else rules.einsum("...n,n->...n", *alike(y, bias))


def alike(*operands: Typed) -> list[Typed]:
    """Returns the operands, those without a gradient as R or I, like the others: the two differ in gradients alone."""
    trained = [x for x in operands if not isinstance(x, Tensor) or x.requires_grad]
    others = trained or operands[:1]
    results: list[Typed] = []
    for x in operands:
        for axis, own in spmd_types.get_local_type(x).items():
            want = next((t for o in others if (t := spmd_types.maybe_get_axis_local_type(o, axis)) in (I, R)), own)
            if not any(x is o for o in others) and own in (I, R) and want is not own:
                x = rules.convert(x, axis, src=own, dst=want)
        results.append(x)
    return results


# Regions


def _of_region(before: Type, after: Type) -> Callable[..., Any]:
    if Type.S in (before, after):
        return lambda *, x, group, dim: converted(x, group, before, after, dim)
    return lambda *, x, group: converted(x, group, before, after)


RULES.update({region.name: _of_region(*types) for types, region in CONVERSIONS.items()})


@rule
def all_to_all_region(*, x: Tensor, group: str, split_dim: int, concat_dim: int) -> Typed:
    return exchanged(x, group, concat_dim, split_dim)


@rule
def copy_replicas_to_region(*, x: Tensor, group: str) -> Typed:
    return sharded(x, group, 0)  # its shards overlap


@rule
def reduce_replicas_from_region(*, x: Tensor, group: str) -> Typed:
    return sharded(x, group, 0)


@rule
def copy_to_region_coalesced(*, xs: Sequence[Tensor], group: str, replicas: Sequence[int]) -> list[Typed]:
    made, at = [], 0
    for x in xs:
        ranges = replicas[at] if len(replicas) else 0
        at += 2 + 3 * ranges if ranges else 1
        made.append(copied(x, group) if ranges == 0 else sharded(x, group, 0))
    return made


# Linears


def _input(x: Typed, group: str, activations: str) -> Typed:
    """Returns the type of the full input of a column linear."""
    if activations == "replicated":
        return full(copied(x, group), group)
    return full(gathered(x, group, 0 if activations == "tokens" else -1), group)


def _output(y: Typed, group: str, activations: str) -> Typed:
    """Returns the type of the sum over the ranks of a row linear."""
    if activations == "replicated":
        return summed(y, group)
    return summed_and_scattered(y, group, 0 if activations == "tokens" else -1)


def column_type(x: Typed, weight: Typed, bias: Typed | None, group: str, activations: str) -> Typed:
    operands = alike(_input(x, group, activations), sharded(weight, group, 0))
    return biased(rules.einsum("...k,nk->...n", *operands), bias)


def row_type(x: Typed, weight: Typed, bias: Typed | None, group: str, activations: str, sum_bias_grad: bool) -> Typed:
    operands = alike(sharded(x, group, -1), sharded(weight, group, 1))
    y = _output(partial(rules.einsum("...k,nk->...n", *operands), group), group, activations)
    if bias is not None and activations == "tokens" and sum_bias_grad:
        bias = copied(bias, group)
    return biased(y, bias)


def ignored(*tensors: Tensor | None) -> None:
    """Says that the type of the result does not depend on those of ``tensors``."""
    rules.ignore(*(tensor for tensor in tensors if tensor is not None))


@rule
def column_parallel_linear(
    *, x: Tensor, weight: Tensor, bias: Tensor | None, group: str, sequence_parallel: bool, main_grad: Tensor | None
) -> Typed:
    ignored(main_grad)
    return column_type(x, weight, bias, group, _activations(sequence_parallel))


@rule
def row_parallel_linear(
    *,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group: str,
    sequence_parallel: bool,
    main_grad: Tensor | None,
    sum_bias_grad: bool,
) -> Typed:
    ignored(main_grad)
    return row_type(x, weight, bias, group, _activations(sequence_parallel), sum_bias_grad)


@rule
def block_column_linear(
    *, x: Tensor, weight: Tensor, bias: Tensor | None, group: str, sequence_parallel: bool
) -> Typed:
    return column_type(x, weight, bias, group, _activations(sequence_parallel))


@rule
def block_row_linear(*, x: Tensor, weight: Tensor, bias: Tensor | None, group: str, sequence_parallel: bool) -> Typed:
    return row_type(x, weight, bias, group, _activations(sequence_parallel), True)


@rule
def block_copies(*, x: Tensor, group: str, blocks: Sequence[int]) -> list[Typed]:
    return [copied(x, group) for _ in range(max(blocks[parallel_group(group).rank], 1))]


@rule
def block_sum(*, nodes: Tensor, group: str, scatter: bool) -> Typed:
    own = rules.einsum("n...->...", nodes, linear_in=[0])
    return summed_and_scattered(own, group, 0) if scatter else summed(own, group)


@rule
def linear_2d(
    *, x: Tensor, weight: Tensor, bias: Tensor | None, group: str, weight_group: str, row: bool, activations: str
) -> Typed:
    weight = full(gathered(weight, weight_group, 0 if row else 1), weight_group)
    if bias is not None:
        bias = full(gathered(bias, weight_group, 0), weight_group)
    if row:
        return row_type(x, weight, bias, group, activations, False)
    return column_type(x, weight, bias, group, activations)


def _activations(sequence_parallel: bool) -> str:
    return "tokens" if sequence_parallel else "replicated"


@rule
def accumulate_grad_into(*, x: Tensor, main_grad: Tensor) -> Typed:
    ignored(main_grad)
    return rules.einsum("...->...", x)


@rule
def matmul_2d(*, a: Tensor, b: Tensor, rows: str, columns: str) -> Typed:
    a, b = sharded(a, rows, -2), sharded(b, columns, 1)
    a, b = full(gathered(a, columns, -1), columns), full(gathered(b, rows, 0), rows)
    return rules.einsum("...mk,kn->...mn", *alike(a, b))


# Linears of 8-bit floating point


@rule
def float8_column_linear(
    *, x: Tensor, weight: Tensor, bias: Tensor | None, group: str, sequence_parallel: bool, sum_input_grad: bool
) -> Typed:
    if sum_input_grad:
        return column_type(x, weight, bias, group, "tokens" if sequence_parallel else "replicated")
    return biased(rules.einsum("...k,nk->...n", *alike(x, sharded(weight, group, 0))), bias)


@rule
def float8_row_linear(
    *, x: Tensor, weight: Tensor, bias: Tensor | None, group: str, sequence_parallel: bool, sum_bias_grad: bool
) -> Typed:
    return row_type(x, weight, bias, group, "tokens" if sequence_parallel else "replicated", sum_bias_grad)


@rule
def float8_grouped_linear(*, x: Tensor, weight: Tensor) -> Typed:
    return rules.einsum("ek,enk->en", *alike(x, weight))


# Attention


@rule
def context_attention(*, q: Tensor, k: Tensor, v: Tensor, seeds: Tensor | None, group: str) -> Typed:
    ignored(seeds)
    k, v = (full(gathered(t, group, 1), group) for t in (k, v))
    return rules.einsum("bthd,bshd,bshd->bthd", *alike(sharded(q, group, 1), k, v))


@rule
def attention(*, q: Tensor, k: Tensor, v: Tensor) -> Typed:
    return rules.einsum("bhnd,bhmd,bhme->bhne", *alike(q, k, v))


@rule
def rope(*, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None) -> Typed:
    ignored(cos, sin, positions)  # of the positions of x, without a gradient
    return rules.einsum("...->...", x)


# Norms, activations, dropout


def _norm(x: Typed, weight: Tensor | None, bias: Tensor | None) -> Typed:
    for parameter in (weight, bias):
        if parameter is not None:
            x = rules.einsum("..._,_->..._", *alike(x, parameter))
    return rules.einsum("..._->..._", x)


@rule
def rms_norm(*, x: Tensor, weight: Tensor | None) -> Typed:
    return _norm(x, weight, None)


@rule
def layer_norm(*, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Typed:
    return _norm(x, weight, bias)


def _added(x: Typed, residual: Typed) -> Typed:
    return rules.einsum("...,...->...", *alike(x, residual))


@rule
def rms_norm_residual(*, x: Tensor, residual: Tensor, weight: Tensor | None) -> tuple[Typed, Typed]:
    total = _added(x, residual)
    return _norm(total, weight, None), total


@rule
def all_reduce_rms_norm(*, x: Tensor, residual: Tensor, weight: Tensor | None, group: str) -> tuple[Typed, Typed]:
    total = _added(summed(x, group), residual)
    return _norm(total, weight, None), total


@rule
def layer_norm_residual(
    *, x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None
) -> tuple[Typed, Typed]:
    total = _added(x, residual)
    return _norm(total, weight, bias), total


def _sharded_norm(x: Typed, weight: Tensor | None, bias: Tensor | None, group: str) -> Typed:
    x = sharded(x, group, -1)
    row_sums = summed(partial(rules.einsum("...h->...", x), group), group, R)
    y = rules.einsum("...h,...->...h", x, row_sums)
    for parameter in (weight, bias):
        y = biased(y, None if parameter is None else sharded(parameter, group, 0))
    return y


@rule
def sharded_rms_norm(*, x: Tensor, weight: Tensor | None, group: str) -> Typed:
    return _sharded_norm(x, weight, None, group)


@rule
def sharded_layer_norm(*, x: Tensor, weight: Tensor | None, bias: Tensor | None, group: str) -> Typed:
    return _sharded_norm(x, weight, bias, group)


@rule
def bias_act(*, x: Tensor, bias: Tensor | None) -> Typed:
    return biased(rules.einsum("...->...", x), bias)


@rule
def gated_act(*, x: Tensor, bias: Tensor | None) -> Typed:
    return biased(rules.einsum("...->...", x), bias)


@rule
def bias_dropout_residual(*, x: Tensor, bias: Tensor | None, residual: Tensor | None, seed: Tensor) -> Typed:
    ignored(seed)
    y = biased(rules.einsum("...->...", x), bias)
    return y if residual is None else _added(y, residual)


# Vocabulary


@rule
def vocab_parallel_embedding(*, ids: Tensor, weight: Tensor, group: str, sequence_parallel: bool) -> Typed:
    flat = sequence_parallel and ids.ndim > 1  # the result is [tokens_local, hidden]
    formula = f"{'_' * ids.ndim},vd->_d" if flat else "...,vd->...d"
    rows = rules.einsum(formula, replicated(ids, group), sharded(weight, group, 0))
    for axis, held in spmd_types.get_local_type(weight).items():  # another operator may sum them
        if held is V:
            rows = partial(rows, axis)
    return _output(rows, group, _activations(sequence_parallel))


@rule
def vocab_parallel_cross_entropy(*, logits: Tensor, target: Tensor, group: str, reduction: str) -> Typed:
    result = "..." if reduction == "none" else ""
    loss = rules.einsum(f"...v,...->{result}", sharded(logits, group, -1), replicated(target, group))
    return summed(partial(loss, group), group)


def _tokens(*, logits: Tensor, group: str) -> Typed:
    return summed(rules.einsum("...v->...", sharded(logits, group, -1)), group, R)


RULES |= dict.fromkeys(("vocab_parallel_argmax", "vocab_parallel_sample"), _tokens)


@rule
def linear_cross_entropy(
    *,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    group: str,
    reduction: str,
    sequence_parallel: bool,
    main_grad: Tensor | None,
) -> list[Typed]:
    ignored(main_grad)
    logits = column_type(x, weight, bias, group, _activations(sequence_parallel))
    rows = rules.einsum("...v,...->...", logits, replicated(target, group))
    rows = summed(partial(rows, group), group)
    return [rows if reduction == "none" else rules.einsum("...->", rows), rows]


# A mixture of experts. Along the expert group tokens, rows of experts and experts are V. The rows of a rank are those
# of its experts, so both have one letter in the formulas here


@rule
def all_to_all_linear(
    *, rows: Tensor, group: str, x: Tensor, weight: Tensor, main_grad: Tensor | None
) -> tuple[Typed, Typed]:
    ignored(main_grad)
    return exchanged(rows, group, 0, 0), rules.einsum("...k,nk->...n", *alike(x, weight))


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
    return summed(terms, group)


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

# Seeds of masks and comparisons, on which no value of the program depends but through a rule
_own_numbers = (OwnRandomNumbers.__init__, OwnRandomNumbers.__enter__, OwnRandomNumbers.__exit__)
for _function in (draw_seed, rows_seed, sequence_seeds, check_same_input, *_own_numbers):
    spmd_types.register_no_typecheck(_function)
