"""The comparison of what a model computes on p ranks with what it computes on one: one run, one bound, one difference.

Used by :func:`tp_ext.verify`, by the proof of :mod:`tp_ext.auto`, by ``auto.apply(verify=True)`` and by tests."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from tp_ext._containers import contents_of, is_cache
from tp_ext.model.census import census
from tp_ext.model.layouts import layouts_of
from tp_ext.random import manual_seed

SPAN = 1 << 16  # elements that are compared at once
NOISE = 1e-3  # a gradient of rounding alone has no size of its own: it is compared with this share of the largest
EXACT = 1e-9
"""Bound in fp64: a sum in another order differs by some 1e-15, deep models multiply it; mistakes are above 1e-6."""
# Models in fp64 convert to fp32 inside, and random weights amplify rounding
_BOUNDS = {
    "known": {torch.float64: EXACT},
    "trained": {torch.float64: 1e-6, torch.float32: 1e-4},
    "random": {torch.float64: 1e-6, torch.float32: 2e-3},
}


def bound_of(dtype: torch.dtype, weights: Literal["known", "trained", "random"]) -> float:
    """Returns the relative difference up to which two orders of a sum explain it.

    Args:
        dtype: that of the model; of ``"known"`` the lowest precision in which anything of it computes.
    """
    half_of_digits = math.sqrt(torch.finfo(dtype).eps)
    return _BOUNDS[weights].get(dtype, half_of_digits if weights == "known" else 5e-2)


class UnfitResultError(TypeError):
    """A result of a model has an object that may hold tensors and cannot be looked into."""


@dataclass
class RunResults:
    """What one run of a model has computed.

    Attributes:
        outputs: the tensors and numbers of the result, or the loss, by the expression that leads to each.
        gradients: those of inputs, ``input 0``, and of parameters, by name.
        buffers: the floating-point ones after the run, by name.
    """

    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)


# ---------------------------------------------------------------- runs


def results_of(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    backward: bool = True,
    seed: int | None = 0,
    call: Callable[..., Any] | None = None,
    gather: Callable[[Any], Any] = lambda result: result,
    by_loss: bool = False,
) -> RunResults:
    """Runs a model once, and backward from the :func:`projection` of its outputs.

    Args:
        args, kwargs: of this run: the model may write to them, and gets gradients of those that require them.
        backward: whether with gradients.
        seed: of the masks; None: the generators stay as they are.
        call: what is run with the model, in place of its forward.
        gather: makes a result with full tensors of one with shards.
        by_loss: whether a loss that the result has takes the place of all outputs.
    """
    model.zero_grad(set_to_none=True)  # that of the run before would be added to
    if seed is not None:
        manual_seed(seed)
    with torch.set_grad_enabled(backward):  # a model may take another path without gradients
        result = model(*args, **kwargs) if call is None else call(model, *args, **kwargs)
        loss = loss_of(result) if by_loss else None
        outputs = outputs_of(gather(result)) if loss is None else {"the loss": loss}
        total = projection(outputs) if loss is None else loss
        if backward and total is not None:  # a model may return nothing that depends on a parameter
            total.backward()
    inputs = contents_of((args, kwargs), "input").tensors.values()
    named = [*((f"input {i}", t) for i, t in enumerate(inputs) if t.is_leaf), *model.named_parameters()]
    gradients = {name: t.grad.to_dense() for name, t in named if t.grad is not None}
    # Statistics that forward updates; counters of steps are equal anyway
    buffers = {name: b.clone() for name, b in model.named_buffers() if b.is_floating_point()}
    return RunResults({name: t.detach() for name, t in outputs.items()}, gradients, buffers)


def tensors_of(result: Any) -> dict[str, Tensor]:
    """Returns the tensors of a result, with those in dataclasses and attributes of objects other than caches.

    Raises:
        UnfitResultError: an object may hold others.
    """
    contents = contents_of(result, "the result", is_cache)
    for name, kind in contents.unknown.items():
        raise UnfitResultError(f"{name}: a {kind} may hold tensors that cannot be compared; return a tuple of them")
    return contents.tensors


def outputs_of(result: Any) -> dict[str, Tensor]:
    """Returns the tensors of a result, and its numbers: they were computed from lengths as likely as a tensor was."""
    numbers = [leaf for leaf in tree_leaves(result) if isinstance(leaf, int | float)]
    return tensors_of(result) | {f"number {i}": torch.tensor(float(number)) for i, number in enumerate(numbers)}


def loss_of(result: Any) -> Tensor | None:
    """Returns the loss that a result is, or has: a scalar."""
    named = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
    scalars = (x for x in (result, named) if isinstance(x, Tensor) and x.dim() == 0 and x.is_floating_point())
    return next(scalars, None)


def weights_of(name: str, shape: Sequence[int]) -> Tensor:
    """Returns the fixed random numbers with which an output is multiplied in a loss.

    Under a plain sum elements that change places would pass, and a mean or a sum of squares is constant behind a norm,
    its gradients rounding noise. By name and in fp64: outputs of another order or dtype get the same."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(crc32(name.encode())), dtype=torch.float64)


def projection(outputs: Mapping[str, Tensor], weights: Callable[..., Tensor] = weights_of) -> Tensor | None:
    """Returns the sum of the outputs times fixed random numbers; None: none of them requires a gradient.

    Args:
        weights: of the numbers' name and shape.
    """
    terms = []
    for name, output in outputs.items():
        if output.requires_grad:
            # Of a complex output the real part of the product, in which both of its parts are
            phase = 1 + 0.5j if output.is_complex() else 1
            terms.append((output * (weights(name, output.shape) * phase).to(output)).sum().real.double())
    return torch.stack(terms).sum() if terms else None


# ---------------------------------------------------------------- differences


def difference(locals_: Sequence[Tensor], expected: Sequence[Tensor], floor: float = 0.0) -> float:
    """Returns the largest difference of tensors, relative to the largest finite expected element or to ``floor``; of
    integers 0 or infinity; infinity for other shapes or dtypes, and for NaN or infinities in other places."""
    largest = 0.0
    for local, right in zip(locals_, expected, strict=True):
        if local.shape != right.shape or local.dtype != right.dtype:
            return math.inf
        if torch.equal(local, right):
            continue
        if not (right.is_floating_point() or right.is_complex()):
            return math.inf
        largest = max(largest, _largest(_elements(local), _elements(right)))
    if not largest:
        return 0.0
    scale = max(floor, *map(magnitude, expected))
    return largest / scale if scale else math.inf


def magnitude(x: Tensor) -> float:
    """Returns the largest finite absolute value of a tensor's elements."""
    x = _elements(x)
    size = _largest(x)
    if math.isfinite(size):
        return size
    return _largest(x[x.isfinite()])


def noise_of(gradients: Iterable[Tensor | None]) -> float:
    """Returns the size below which a gradient may be rounding noise, next to the others of its model."""
    return NOISE * max((magnitude(g) for g in gradients if g is not None), default=0.0)


def differences(wanted: RunResults, got: RunResults, shards: Mapping[str, Any]) -> Iterator[tuple[float, str]]:
    """Yields the difference of each tensor of two runs, with its name; those with a layout in ``shards`` are compared
    with a slice."""
    noise = noise_of(wanted.gradients.values())
    for kind, prefix in (("outputs", ""), ("gradients", "the gradient of "), ("buffers", "")):
        left, right = getattr(wanted, kind), getattr(got, kind)
        for name in {**left, **right}:
            full, local = left.get(name), right.get(name)
            if full is not None and name in shards and kind != "outputs":
                full = shards[name].shard(full)
            if full is None or local is None:
                # A missing gradient equals zeros: the code of one side may have no path to the tensor
                present = local if full is None else full
                error = math.inf if present is None or present.any() else 0.0
            else:
                error = difference([local], [full], noise if kind == "gradients" else 0.0)
            yield error, prefix + name


def differences_of_models(
    reference: nn.Module, model: nn.Module, args: Any = (), kwargs: Any = None, input_gradients: bool = True, **how: Any
) -> list[tuple[float, str]]:
    """Runs a model and its shards on this rank with copies of the arguments, by :func:`results_of`; returns how each
    tensor differs, the worst one last."""

    def fresh(x: Tensor) -> Tensor:
        is_differentiable = input_gradients and how.get("backward", True) and x.is_floating_point()
        return x.detach().clone().requires_grad_(is_differentiable)

    def run(each: nn.Module) -> RunResults:
        return results_of(each, *tree_map_only(Tensor, fresh, (args, kwargs or {})), **how)

    wanted, got = run(reference), run(model)
    # Those of parametrized and masked tensors are in no table of a module
    state = {name: entry.layout for name, entry in census(model).state().items()}
    return sorted(differences(wanted, got, layouts_by_name(model) | state))


def layouts_by_name(model: nn.Module) -> dict[str, Any]:
    """Returns the layouts of parameters and buffers by all their names."""
    return {
        f"{name}.{attribute}" if name else attribute: layout
        for name, module in model.named_modules(remove_duplicate=False)
        for attribute, layout in layouts_of(module).items()
    }


def _elements(x: Tensor) -> Tensor:
    return torch.view_as_real(x) if x.is_complex() else x


def _largest(x: Tensor, less: Tensor | None = None) -> float:
    """Returns the largest absolute value of a tensor; or of its difference from another one, in which NaN and
    infinities in the same places count as equal, and others as infinity."""
    if not x.numel():
        return 0.0
    # In spans that stay in the cache: three passes over the gradient of a large table cost more than its backward
    spans = x.reshape(-1).split(SPAN)
    if less is None:
        return torch.stack([span.double().abs().max() for span in spans]).max().item()
    others = less.reshape(-1).split(SPAN)
    largest = torch.stack([(a.double() - b.double()).abs().max() for a, b in zip(spans, others, strict=True)]).max()
    if largest.isfinite():
        return largest.item()
    same = (x == less) | (x.isnan() & less.isnan())
    off = (x.double() - less.double()).abs().masked_fill_(same, 0)
    return off.nan_to_num_(math.inf, math.inf).max().item()
