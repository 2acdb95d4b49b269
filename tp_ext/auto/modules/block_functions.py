"""Functions of torch in models applied with ``invariant_blocks``: replaced where their bits depend on the shard.

torch's SiLU, GELU and sigmoid take another path for the last elements of a tensor; its batched products and the
backward of its softmax depend on the other heads or on the number of threads. A function mode replaces them in the
calls of the modules that a plan lists, on replicated tensors, too, which are the same for every number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from tp_ext import _ops
from tp_ext.auto.modules.random_draws import SharedMode, is_in_checkpoint
from tp_ext.auto.record.boundary import Edit, EditPlace, edits_at
from tp_ext.auto.record.keywords import by_place
from tp_ext.auto.search.in_blocks import REPLACED
from tp_ext.auto.search.localize import is_conv1d
from tp_ext.invariance import refuse_compiled
from tp_ext.nn.attention.scaled_dot_product import explicit_attention

PLAIN = (Tensor, nn.Parameter)
Replacement = Callable[..., Tensor]
REPLACEMENTS: dict[Any, Replacement] = {}


def _in_place_of(operator: str) -> Callable[[Replacement], Replacement]:
    """Registers a function in place of those that run an operator."""

    def registered(function: Replacement) -> Replacement:
        REPLACEMENTS.update(dict.fromkeys(REPLACED[operator], function))
        return function

    return registered


class BlockFunctions(SharedMode):
    """Replaces the functions of :data:`REPLACED` in the calls of the modules of a model."""

    running: list[nn.Module]
    generates = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        replacement = REPLACEMENTS.get(func)
        args, kwargs = by_place(func, args, kwargs or {}) if replacement is not None else (args, kwargs or {})
        # Sharded logits answer themselves: they gather their columns for these functions
        if replacement is None or not args or type(args[0]) not in PLAIN or not args[0].is_floating_point():
            return func(*args, **kwargs)
        self.check_is_recomputed()
        if self.generates and replacement is _softmax:
            raise ValueError(
                f"generate: {type(self.running[-1]).__name__} computes attention by a softmax, whose bits with a cache "
                "are not those of a forward of the whole text, as invariant_blocks promises; load it with "
                'attn_implementation="sdpa"'
            )
        return replacement(func, *args, **kwargs)

    def check_is_recomputed(self) -> None:
        """Raises a RuntimeError if what recomputes the call would call torch's own function."""
        if is_in_checkpoint(self.running[-1]):
            raise RuntimeError(
                f"torch.utils.checkpoint inside of the forward of {type(self.running[-1]).__name__} cannot be "
                "followed with invariant_blocks; checkpoint modules, not functions inside of their forward"
            )


def _lowered(*tensors: Tensor) -> list[Tensor]:
    """The operands of a product as autocast gives them to torch's."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)
    return [t.to(dtype) if t.dtype != torch.float64 else t for t in tensors]


class _Expanded(torch.autograd.Function):
    """``expand`` of one dim of length 1, whose gradients are added in their order, in fp32 (fp64 for fp64): torch's sum
    has another order for some shapes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, n: int) -> Tensor:
        ctx.dim = dim
        return x.expand(*x.shape[:dim], n, *x.shape[dim + 1 :])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        first, *rest = grad.unbind(ctx.dim)
        total = first.float() if first.element_size() < 4 else first
        for each in rest:
            total = total + each
        return total.to(grad.dtype).unsqueeze(ctx.dim), None, None


def _expanded(x: Tensor, shape: Sequence[int]) -> Tensor:
    x = x[(None,) * (len(shape) - x.dim())]
    for dim, n in enumerate(shape):
        if x.shape[dim] == 1 and n > 1:
            x = _Expanded.apply(x, dim, n)
    return x


@_in_place_of("expand")
def _expand(func: Any, input: Tensor, *sizes: Any, **options: Any) -> Tensor:
    if options or not (input.requires_grad and torch.is_grad_enabled()):
        return func(input, *sizes, **options)
    shape = sizes[0] if isinstance(sizes[0], list | tuple) else sizes
    return func(input, *sizes) if 0 in shape else _expanded(input, shape)


@_in_place_of("silu")
def _silu(func: Any, input: Tensor, inplace: bool = False) -> Tensor:
    y: Tensor = _ops.bias_act(input.contiguous(), None, "silu")
    return input.copy_(y) if inplace else y


@_in_place_of("gelu")
def _gelu(func: Any, input: Tensor, approximate: str = "none") -> Tensor:
    return _ops.bias_act(input.contiguous(), None, "gelu" if approximate == "none" else "gelu_tanh")


@_in_place_of("sigmoid")
def _sigmoid(func: Any, input: Tensor) -> Tensor:
    wide = input.float() if input.element_size() < 4 else input
    return (torch.tanh(wide * 0.5) * 0.5 + 0.5).to(input.dtype)


@_in_place_of("bmm")
def _matmul(func: Any, input: Tensor, other: Tensor) -> Tensor:
    if input.dim() < 3 or other.dim() < 3:
        return func(input, other)
    a, b = _lowered(input, other)
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = (_expanded(t, [*batch, *t.shape[-2:]]).flatten(0, -3) for t in (a, b))
    return _ops.block_bmm(a, b).unflatten(0, batch)


@_in_place_of("_softmax")
def _softmax(func: Any, input: Tensor, dim: int | None = None, *rest: Any, **options: Any) -> Tensor:
    dtype = options.get("dtype", rest[-1] if rest and isinstance(rest[-1], torch.dtype) else None)
    if dim not in (-1, input.dim() - 1) or input.dim() < 2:
        return func(input, dim, *rest, **options)
    if dtype is None and torch.is_autocast_enabled(input.device.type) and input.dtype != torch.float64:
        dtype = torch.float32
    x = input if dtype is None else input.to(dtype)
    return _ops.block_softmax(x.reshape(-1, *x.shape[-2:]), False).view(x.shape)


@_in_place_of("scaled_dot_product_attention")
def _attention(
    func: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if dropout_p or query.dim() != 4 or (is_causal and attn_mask is not None):
        return func(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    query, key, value = _lowered(query, key, value)
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        attn_mask = attn_mask.to(query.dtype)
    share = query.shape[1] // key.shape[1] if enable_gqa else 1
    if share > 1:
        key, value = (_Expanded.apply(t.unsqueeze(2), 2, share).flatten(1, 2) for t in (key, value))
    has_mask_gradient = attn_mask is not None and attn_mask.requires_grad and torch.is_grad_enabled()
    fits = query.shape[:2] == key.shape[:2] and key.shape[:3] == value.shape[:3] and 0 not in (*query.shape, *key.shape)
    in_tiles = query.is_cpu and fits and len({query.dtype, key.dtype, value.dtype}) == 1 and not has_mask_gradient
    if not in_tiles and _is_fused(query, key, value, has_mask_gradient):
        return func(query, key, value, attn_mask, 0.0, is_causal, scale=scale)
    last_queries = is_causal and query.shape[2] == key.shape[2]
    if is_causal and not (in_tiles and last_queries):  # torch's first query is that of the first key
        attn_mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None:
        attn_mask = (
            attn_mask.expand(*attn_mask.shape[-4:])
            if attn_mask.dim() == 4
            else attn_mask[(None,) * (4 - attn_mask.dim())]
        )
    # Rows that depend on their own keys alone: a token generated with a cache has the bits of the whole text
    if in_tiles:
        return _ops.block_attention(query, key, value, attn_mask, None, [], last_queries, scale, None, None)
    return explicit_attention(
        query, key, value, attn_mask, scale=scale, softcap=None, blind=attn_mask is not None, by_head=True
    )


def _is_fused(query: Tensor, key: Tensor, value: Tensor, has_mask_gradient: bool) -> bool:
    """True if torch computes each head by itself, by a fused kernel."""
    lengths = query.shape[2] and key.shape[2]
    strides = {t.stride(-1) for t in (query, key, value)}
    return bool(lengths) and query.shape[3] == value.shape[3] and strides == {1} and not has_mask_gradient


@dataclass
class ReplacedFunctions(Edit):
    """Functions are replaced while the module's forward runs."""

    functions: BlockFunctions
    place = EditPlace.FUNCTIONS
    is_needed_in_stages = True

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        refuse_compiled()
        self.functions.begin(module)

    def end(self, module: nn.Module, output: Any) -> None:
        # After an exception of an earlier hook no call has begun
        if self.functions.running and self.functions.running[-1] is module:
            self.functions.end()


def function_edits(model: nn.Module, names: list[str]) -> Iterator[tuple[str, Edit]]:
    """The edits of the modules whose functions are replaced; lets ``generate`` refuse what has other bits."""
    if callable(getattr(model, "generate", None)):
        model.generate = MethodType(generate, model)  # type: ignore[assignment]
    functions = BlockFunctions()
    return ((name, ReplacedFunctions(functions)) for name in names)


@contextmanager
def generating(model: nn.Module) -> Iterator[None]:
    """The context of a model's ``generate``, applied with ``invariant_blocks``: log-probabilities have the bits of a
    forward of the whole text.

    Raises:
        ValueError: on entry, or in the model's forward: a part of it has rows that depend on others; nothing has been
            communicated.
    """
    for name, module in model.named_modules():
        if type(module) is nn.Linear or is_conv1d(module):
            raise ValueError(
                f"generate: {name} is whole, and its bits for a token with a cache are not those of a forward of the "
                "whole text, as invariant_blocks promises; plan without a hint that leaves it whole"
            )
    if any(param.is_cuda for param in model.parameters()):
        raise ValueError(
            "generate: must not be called on cuda with invariant_blocks: products of few rows round otherwise"
        )
    shared = [edit.functions for module in model.modules() for edit in edits_at(module, ReplacedFunctions)]
    for functions in shared:
        functions.generates = True
    try:
        yield
    finally:
        for functions in shared:
            functions.generates = False


def generate(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Returns what the ``generate`` of the model's class does, in :func:`generating`."""
    with generating(model):
        return type(model).generate(model, *args, **kwargs)  # type: ignore[attr-defined]
