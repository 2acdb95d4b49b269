"""The weights and arguments with which the proof by values runs a model: random numbers, two batches, few tokens."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tp_ext.auto.record.arguments import with_strides_of, with_tensors
from tp_ext.auto.record.record import tensors
from tp_ext.auto.record.trace import Arguments, arguments
from tp_ext.share_sizes import Weights, split_sizes

FEW = 64  # tokens with which the example is run as it is


def bytes_of(model: nn.Module, dtype: torch.dtype | None) -> int:
    """Bytes of the parameters, in a floating-point type."""
    size = {None: 0, torch.float64: 8, torch.float32: 4}.get(dtype, 0)
    return sum(t.numel() * (size if size and t.is_floating_point() else t.element_size()) for t in model.parameters())


def filled(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Gives a model random weights in place, of a floating-point type; buffers keep their values, if they have any."""
    generator = torch.Generator().manual_seed(0)
    by_id: dict[int, Any] = {}
    noise = torch.randn(min(1 << 20, max([p.numel() for p in model.parameters()], default=1)) + 7, generator=generator)
    for module in model.modules():
        for name, tensor in module._parameters.items():
            if tensor is not None:
                if id(tensor) not in by_id:
                    value = _weight(tensor, noise, dtype)
                    by_id[id(tensor)] = tensor, nn.Parameter(value, requires_grad=tensor.requires_grad)
                    if type(tensor) is nn.Parameter:  # that of a fake has its device, too
                        by_id[id(tensor)][1].__dict__.update(tensor.__dict__)
                module._parameters[name] = by_id[id(tensor)][1]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                if id(buffer) not in by_id:
                    by_id[id(buffer)] = buffer, _value(buffer, generator, dtype, is_kept=True)
                module._buffers[name] = by_id[id(buffer)][1]
        # Tensors that modules hold as plain attributes
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and not name.startswith("_") and value.is_floating_point():
                vars(module)[name] = value.to("cpu", _target(value, dtype))


def _target(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def _weight(tensor: Tensor, noise: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Random numbers: repeated noise, which costs a copy; of matrices so small that sums keep their size."""
    if not tensor.is_floating_point():
        return torch.zeros(tensor.shape, dtype=tensor.dtype) if tensor.is_meta else tensor.detach().to("cpu", copy=True)
    flat = torch.empty(tensor.numel(), dtype=_target(tensor, dtype))
    for start in range(0, flat.numel(), noise.numel()):
        flat[start : start + noise.numel()] = noise[: flat.numel() - start]
    value = flat.view(tensor.shape)
    # No vector is zero or one: both hide errors
    return value.mul_(tensor.shape[-1] ** -0.5) if tensor.dim() > 1 else value.mul_(0.2).add_(0.7)


def _value(tensor: Tensor, generator: torch.Generator, dtype: torch.dtype | None, is_kept: bool = False) -> Tensor:
    """The value of a buffer or an argument; one on meta, or one of zeros that is not kept, gets a random one."""
    # Zeros stand for any values, and hide errors
    if not tensor.is_meta and (
        is_kept or tensor.layout != torch.strided or tensor.dtype == torch.bool or bool(tensor.any())
    ):
        return tensor.detach().to("cpu", _target(tensor, dtype), copy=True)
    if tensor.is_floating_point() or tensor.is_complex():
        return torch.randn(tensor.shape, generator=generator, dtype=_target(tensor, dtype))
    if tensor.dtype == torch.bool:
        return torch.ones(tensor.shape, dtype=tensor.dtype)
    # The sizes of tables are not known here: 0 and 1 are rows of nearly every table
    return torch.randint(0, 2, tensor.shape, generator=generator, dtype=tensor.dtype)


def examples(example: Any, dtype: torch.dtype | None, read: Collection[int] = ()) -> list[Any]:
    """The example with values, and one with a row fewer in its batch, or one more. Tensors with these ids, which code
    reads, keep their values."""
    generator = torch.Generator().manual_seed(1)

    def value(x: Tensor) -> Tensor:
        return with_strides_of(x, _value(x, generator, dtype, id(x) in read))

    given = with_tensors(arguments(example), value)
    # A second batch shows a length of the example that has become a constant of the plan
    batch = next((t.shape[0] for _, t in tensors(given) if t.dim() > 1), None)

    def other(x: Tensor) -> Tensor:
        if x.layout != torch.strided or not x.dim() or x.shape[0] != batch:
            return x
        # A row fewer may have other numbers for code that reads them
        return x[:-1] if batch > 1 and not read else torch.cat([x, x[:1]])

    return [given] if batch is None else [given, with_tensors(given, other)]


def few_tokens(example: Any, p: int, shares: Weights | None = None) -> Any:
    """The example with a batch of at most 2 and at most 2 p + 3 tokens, if its first tensor of integers has both; more,
    where a rank has none of so few by its share."""
    args, kwargs = arguments(example)
    ids = next((t for _, t in tensors((args, kwargs)) if t.dim() == 2 and not t.is_floating_point()), None)
    # Images and features have no dim that is known to be of tokens
    if ids is None or ids.numel() <= FEW:
        return example
    tokens = 2 * p + 3
    while shares is not None and tokens < ids.shape[1] and not all(split_sizes(tokens, p, shares)):
        tokens += p
    lengths = {ids.shape[0]: min(2, ids.shape[0]), ids.shape[1]: min(tokens, ids.shape[1])}

    def shorter(x: Tensor) -> Tensor:
        # A mask [batch, 1, query, key] has tokens in its last dims, too
        for dim, size in enumerate(x.shape[:2] if x.dim() < 4 else x.shape):
            x = x.narrow(dim, 0, lengths.get(size, size))
        return x

    short = with_tensors((args, kwargs), shorter)
    if isinstance(example, Arguments):
        return Arguments(*short)
    return {**short[1]} if isinstance(example, Mapping) else short[0]
