"""Training in 8-bit floating point: conversion of a model's linears."""

from collections.abc import Callable, Set

from torch import nn
from torch.distributed.tensor import DTensor

from tp_ext._object_collectives import check_same_names
from tp_ext.low_precision.quantize import groups_of, linears
from tp_ext.model.fused_paths import refuse_fused_paths
from tp_ext.nn.float8 import DTYPES, Float8, Float8Linear, with_float8
from tp_ext.nn.forms import form_of_options
from tp_ext.nn.low_bits import LowBits
from tp_ext.nn.moe.experts import ParallelExperts
from tp_ext.nn.parallel_linear import ParallelLinear

Filter = Callable[[str, nn.Module], bool]


def float8(model: nn.Module, recipe: Float8 | None = None, filter: Filter | None = None) -> list[str]:
    """Has the linears of a model compute their three products in 8-bit floating point, in place.

    ::

        tp_ext.low_precision.float8(model, tp_ext.low_precision.Float8(scaling="row"))

    Parameters, names and checkpoints stay as they were: each call quantises anew (:class:`Float8`). Converted are
    column and row linears, so also those of MLPs and attention, experts (``ParallelExperts``, each expert with scales
    of its own) and ``nn.Linear`` (no subclass of it); not heads, adapters, embeddings and tp_ext's routers. Routers of
    transformers are linears like others: leave them out by ``filter``. ``overlap_chunks`` has no effect then.

    On a CPU it is for tests: a step of a linear takes 6.6 times as long as in bf16.

    Args:
        recipe: default ``Float8()``.
        filter: called with the name and the module of each of these linears; False: it stays as it is.

    Returns:
        The names of the layers, in the order of ``named_modules()``; ``""``: the model itself. ``layer.float8`` is the
        recipe of each.

    Communicates: an all-gather of objects over each group of the layers. A layer then adds a max-reduce of scales to
    forward and backward where ranks share what a scale is of; gathers of sequence parallelism move 8 bits.

    Raises:
        TypeError: no module, no recipe. ValueError, nothing has changed then: no layer to convert; a layer that is
            converted or quantised already, is on two axes, was built in :func:`tp_ext.tp_invariant` or with
            ``grad_accumulation_fusion``; a weight in fp64 or sharded by FSDP2; an ``nn.Linear`` that a plan of
            :mod:`tp_ext.auto` with ``sequence_parallel`` leaves whole, whose scales would be those of a rank's tokens;
            on all ranks, another ``recipe`` on one of them, or a ``filter`` that chooses other layers there.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: {model!r} must be a module")
    recipe = Float8() if recipe is None else recipe
    if not isinstance(recipe, Float8):
        raise TypeError(f"recipe: {recipe!r} must be a Float8")
    candidates = linears(model)
    experts = {name: module for name, module in model.named_modules() if isinstance(module, ParallelExperts)}
    chosen: dict[str, nn.Module] = {}
    problem: Exception | None = None
    try:
        # fully_shard changes the classes of linears, which would not be found
        for name, param in model.named_parameters():
            if isinstance(param, DTensor):
                raise ValueError(f"{name}: a DTensor must not be converted to float8; convert before FSDP2")
        chosen = _chosen(model, candidates.keys() | experts.keys(), recipe, filter)
    except Exception as error:  # of the caller's filter, too
        problem = error
    # All are checked before one is converted
    check_same_names(
        "filter", list(chosen), groups_of([*candidates.values(), *experts.values()]), problem, recipe=recipe
    )
    refuse_fused_paths(model, list(chosen))
    for layer in chosen.values():
        if type(layer) is nn.Linear:
            layer.__class__ = Float8Linear
        setattr(layer, "form", recipe)  # noqa: B010, modules declare tensors and modules alone
    return list(chosen)


def _chosen(model: nn.Module, names: Set[str], recipe: Float8, filter: Filter | None) -> dict[str, nn.Module]:
    """Returns the layers to convert, in the order of the model; see :func:`float8`."""
    chosen = {
        name: module
        for name, module in model.named_modules()
        if name in names and (filter is None or filter(name, module))
    }
    if not chosen:
        raise ValueError("model: must have a linear to convert to float8")
    shards_tokens = any(getattr(module, "tp_tokens", None) is not None for module in model.modules())
    for name, layer in chosen.items():
        _check(name or "model", layer, recipe)
        if shards_tokens and isinstance(layer, nn.Linear):
            raise ValueError(f"{name}: must be left out by filter: it is whole, and has the tokens of one rank alone")
    return chosen


def _check(name: str, layer: nn.Module, recipe: Float8) -> None:
    if isinstance(getattr(layer, "form", None), LowBits | Float8):
        raise ValueError(f"{name}: must not be converted or quantised already")
    if isinstance(layer, ParallelLinear | ParallelExperts):
        try:
            with_float8(form_of_options(layer), recipe, next(layer.parameters()).dtype, layer.grad_accumulation_fusion)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    for param in layer.parameters(recurse=False):
        if param.dtype not in DTYPES:
            raise ValueError(f"{name}: dtype {param.dtype} must be one of float32, bfloat16, float16")
