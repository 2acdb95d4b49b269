"""Batching rules of torch.vmap for the regions: one collective for all slices, with the batch as one more dim.

An operator without a rule runs once per slice, including its collectives, by torch's fallback, which is slow but
correct. The fallback refuses operators that return views, as the schemas of regions declare (the input itself may be
returned), so each region needs a rule.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tp_ext import _ops

_Result = tuple[Tensor, int]


def _inner(dim: int, x: Tensor, name: str = "dim") -> int:
    """Converts ``dim`` of a slice to a dim of ``x``, whose dim 0 is the batch."""
    ndim = x.dim() - 1
    if not -ndim <= dim < ndim:
        raise IndexError(f"{name}: {dim} must be in [{-ndim}, {ndim}) for a tensor of {ndim} dims")
    return 1 + dim % ndim


def _register(name: str, rule: Callable[..., Any]) -> None:
    torch.library.register_vmap(f"tp_ext::{name}", rule)


def _register_elementwise(name: str) -> None:
    region = getattr(_ops, name)

    def rule(info: Any, in_dims: Sequence[int], x: Tensor, group: str) -> _Result:
        return region(x, group), in_dims[0]

    _register(name, rule)


def _register_dim(name: str, default: int) -> None:
    region = getattr(_ops, name)

    def rule(
        info: Any, in_dims: Sequence[int], x: Tensor, group: str, dim: int = default, sizes: _ops.Sizes = None
    ) -> _Result:
        x = x.movedim(in_dims[0], 0)
        return region(x, group, _inner(dim, x), sizes), 0

    _register(name, rule)


def _register_copied_rows(name: str) -> None:
    region = getattr(_ops, name)

    def rule(info: Any, in_dims: Sequence[int], x: Tensor, *arguments: Any) -> _Result:
        return region(x.movedim(in_dims[0], -1), *arguments), x.dim() - 1  # copied rows are rows of dim 0

    _register(name, rule)


def _all_to_all(
    info: Any,
    in_dims: Sequence[int],
    x: Tensor,
    group: str,
    split_dim: int,
    concat_dim: int,
    split_sizes: _ops.Sizes = None,
    concat_sizes: _ops.Sizes = None,
) -> _Result:
    x = x.movedim(in_dims[0], 0)
    dims = _inner(split_dim, x, "split_dim"), _inner(concat_dim, x, "concat_dim")
    return _ops.all_to_all_region(x, group, *dims, split_sizes, concat_sizes), 0


def _refuse_accumulation(*_: Any) -> _Result:
    raise NotImplementedError("tp_ext: gradients of parameters under torch.vmap cannot be added to main_grad")


# Without a rule torch runs the operator a slice at a time, with the collectives of each: the ranks would wait
def _refuse_draws(*_: Any) -> _Result:
    raise NotImplementedError("tp_ext: vocab_parallel_sample under torch.vmap would draw each slice by another seed")


for _name in ("copy_to_region", "reduce_from_region"):
    _register_elementwise(_name)
for _name in ("scatter_to_region", "gather_from_region"):
    _register_dim(_name, -1)
for _name in ("all_gather_region", "reduce_scatter_region"):
    _register_dim(_name, 0)
for _name in ("copy_replicas_to_region", "reduce_replicas_from_region"):
    _register_copied_rows(_name)
_register("all_to_all_region", _all_to_all)
_register("accumulate_grad_into", _refuse_accumulation)
_register("vocab_parallel_sample", _refuse_draws)
