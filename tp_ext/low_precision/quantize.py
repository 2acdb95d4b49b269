"""Quantisation of the frozen weights of a model's linears."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tp_ext._checks import check_int
from tp_ext._object_collectives import check_same_names
from tp_ext.group import process_group
from tp_ext.model.fused_paths import refuse_fused_paths
from tp_ext.model.layouts import refuse_computed, refuse_wrapped
from tp_ext.model.module import ParallelModule
from tp_ext.nn.float8 import Float8Linear
from tp_ext.nn.lora import LoRALinear
from tp_ext.nn.low_bits import LowBits, QuantizedLinear
from tp_ext.nn.parallel_linear import ParallelLinear
from tp_ext.sharding import Layout

_BITS = {"int8": 8, "int4": 4}
Filter = Callable[[str, nn.Module], bool]


@torch.no_grad()
def quantize_(model: nn.Module, weights: str, block: int = 64, filter: Filter | None = None) -> list[str]:
    """Quantises the weights of a model's linears in place, for inference and for adapters (:func:`tp_ext.add_lora`).

    ::

        tp_ext.low_precision.quantize_(model, "int4")
        tp_ext.add_lora(model, targets=["qkv", "up"], r=8, alpha=16)

    Symmetric, weights alone: W = q scale with q of 8 bits and a scale per output (``"int8"``), or of 4 bits and a scale
    per output and ``block`` consecutive inputs (``"int4"``), see :mod:`tp_ext.nn.low_bits`. The values are those of the
    unsharded model for every number of ranks. A layer then has no ``weight``, but buffers ``weight_packed`` (int8
    ``[out, in]``, or uint8 ``[out, in / 2]``) and ``weight_scale`` (``[out]``, or ``[out, in / block]``, of the former
    dtype of the weight), which are sharded as the weight was and are in state dicts and checkpoints. Products use the
    dequantised weight in fp32 (fp64 for an input in fp64) and are rounded once; input and bias have gradients.

    Converted are column and row linears, so also those of MLPs and attention, and instances of ``nn.Linear``; not heads
    (``VocabParallelLMHead``, the module of ``get_output_embeddings()``, a weight that is another module's, too),
    experts, or adapters.

    Args:
        weights: ``"int8"`` or ``"int4"``.
        block: of int4, the inputs that share a scale: even, and a divisor of the inputs of every rank.
        filter: called with the name and the module of each of these linears; False: it stays as it is.

    Returns:
        The names of the layers, in the order of ``named_modules()``; ``""``: the model itself.

    Communicates: an all-gather of objects over each group of the layers, and with int8 an all-reduce of a number per
    output of each row linear.

    Raises:
        TypeError: ``model`` is no module. ValueError, on all ranks of a group, nothing has changed then: no layer to
            convert; ``block`` is odd or does not divide; a weight of another dtype than fp32, bf16 or fp16, sharded by
            FSDP2, on meta, computed (``weight_norm``, pruning), or with a NaN or an Inf; DDP inside; a layer that is
            quantised or in float8 already, is on two axes, or was built in :func:`tp_ext.tp_invariant`; a ``filter``
            that chooses other layers on another rank, or other arguments there.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: {model!r} must be a module")
    candidates = linears(model)
    problem: Exception | None = None
    chosen: dict[str, nn.Module] = {}
    forms: dict[str, tuple[LowBits, Tensor]] = {}
    try:
        check_low_bits(weights, block)
        refuse_wrapped(model, "quantise")
        chosen = {name: layer for name, layer in candidates.items() if filter is None or filter(name, layer)}
        if not chosen:
            raise ValueError("model: must have a linear to quantise")
        for name, layer in chosen.items():
            form, weight = form_of(name, layer, weights, block), layer.weight
            assert isinstance(weight, Tensor)
            if weight.is_meta:
                raise ValueError(
                    f"{name or 'model'}.weight: is on meta, and must have values; quantise once it is loaded"
                )
            forms[name] = form, largest_of(form, weight, f"{name or 'model'}.weight")
    except Exception as error:  # of the caller's filter, too
        problem = error
    check_same_names("filter", list(chosen), groups_of(candidates.values()), problem, weights=weights, block=block)
    for name, layer in chosen.items():
        form, largest = forms[name]
        put(layer, form, largest)
    refuse_fused_paths(model, list(chosen))
    return list(chosen)


def groups_of(layers: Iterable[nn.Module]) -> list[dist.ProcessGroup]:
    """Returns the groups of layers. Those of all that could be chosen: a rank that chooses none must meet the others,
    too."""
    groups = [layer.tp_group for layer in layers if isinstance(layer, ParallelModule)]
    return [process_group(name) for name in dict.fromkeys(group.name for group in groups if group.size > 1)]


def check_low_bits(weights: str, block: int) -> None:
    if weights not in _BITS:
        raise ValueError(f"weights: {weights!r} must be one of {', '.join(_BITS)}")
    check_int(least=2, block=block)
    if block % 2:
        raise ValueError(f"block: {block} must be even")


def dequantize(layer: nn.Module) -> Tensor:
    """Returns this rank's shard of the weight of a quantised layer, q scale in fp32: the same bits for every p.

    Raises:
        TypeError: the layer is not quantised.
    """
    form = getattr(layer, "form", None)
    if not isinstance(form, LowBits):
        raise TypeError(f"layer: {type(layer).__name__} must be a linear that quantize_ has converted")
    assert isinstance(layer, ParallelLinear | QuantizedLinear)
    return form.dequantized(layer.weight_packed, layer.weight_scale)


def linears(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the linears of a model that are no heads, experts or adapters, by name."""
    modules = dict(model.named_modules())
    # Also of a model inside of a wrapper
    with_heads: list[Any] = [module for module in modules.values() if hasattr(module, "get_output_embeddings")]
    heads = {id(module.get_output_embeddings()) for module in with_heads}
    owners: dict[int, int] = {}
    for module in modules.values():
        for param in module._parameters.values():
            if param is not None:
                owners[id(param)] = owners.get(id(param), 0) + 1
    adapters = {
        id(part)
        for module in modules.values()
        if isinstance(module, LoRALinear)
        for part in (module.lora_A, module.lora_B)
    }
    return {
        name: module
        for name, module in modules.items()
        if (isinstance(module, ParallelLinear) or type(module) in (nn.Linear, Float8Linear, QuantizedLinear))
        and id(module) not in heads
        and id(module) not in adapters
        and owners.get(id(module._parameters.get("weight")), 1) == 1
    }


def form_of(name: str, layer: nn.Module, weights: str, block: int) -> LowBits:
    """Returns the form that the weight of a linear will have; see :func:`quantize_` for the errors."""
    what = f"{name or 'model'}.weight"
    if isinstance(getattr(layer, "form", None), LowBits):
        raise ValueError(f"{what}: must not be quantised already")
    if getattr(layer, "float8", None) is not None:
        raise ValueError(f"{what}: a layer that was converted to float8 must not be quantised")
    if isinstance(layer, ParallelLinear) and layer.form.option:
        raise ValueError(f"{what}: a layer on two axes, or built in tp_invariant, must not be quantised")
    # A weight that is computed would be put back into its place, or its originals would have no effect any more
    refuse_computed(name or "model", layer, "weight")
    weight = layer.weight
    assert isinstance(weight, Tensor)
    if isinstance(weight, DTensor):
        raise ValueError(f"{what}: a DTensor must not be quantised; quantise before FSDP2")
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"{what}: dtype {weight.dtype} must be one of float32, bfloat16, float16")
    layout = layer.weight_layout if isinstance(layer, ParallelLinear) else Layout()
    form = LowBits(_BITS[weights], None if weights == "int8" else block, layout)
    try:
        form.layouts()
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None
    if form.block is not None and weight.shape[1] % form.block:
        raise ValueError(f"block: {block} must divide the {weight.shape[1]} inputs of {what}")
    return form


def largest_of(form: LowBits, weight: Tensor, name: str) -> Tensor:
    """Returns the largest absolute values of the blocks of a shard.

    Raises:
        ValueError: the shard has a NaN or an Inf.
    """
    largest = form.largest(weight)
    if not largest.isfinite().all():
        raise ValueError(f"{name}: must be finite, and has a NaN or an Inf")
    return largest


def put(layer: Any, form: LowBits, largest: Tensor, weight: Tensor | None = None) -> None:
    """Puts the form of a weight into the place of the parameter. Every rank of ``form.groups()`` calls it.

    Args:
        largest: see :func:`largest_of`.
        weight: this rank's shard; None: the parameter.
    """
    for group in form.groups():
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=process_group(group.name))
    packed, scale = form.pack(layer.weight if weight is None else weight, largest)
    del layer.weight
    layer.register_buffer("weight_packed", packed)
    layer.register_buffer("weight_scale", scale)
    if isinstance(layer, ParallelLinear):
        layer.replace_weight(form)
    else:
        layer.__class__ = QuantizedLinear
        layer.form = form
