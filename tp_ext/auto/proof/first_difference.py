"""The line of the user's code whose result is the first that differs between the sharded and the unsharded model.

One more run of both, after a difference of the model's outputs or gradients has been found: the result of each call of
torch from the user's code is kept, and those of the ranks are put together as shards, parts of a sum, or copies."""

from __future__ import annotations

import dataclasses
import functools
import linecache
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from tp_ext.auto.proof.copies import copied_model
from tp_ext.auto.proof.prove_values import Apply, Run, no_garbage
from tp_ext.auto.record.reachable import Notes
from tp_ext.auto.record.unchanged import places_of
from tp_ext.auto.search.plans import Plan
from tp_ext.simulation import simulate
from tp_ext.simulation.comparison import bound_of

MOST_ELEMENTS = 1 << 22  # of a result that is looked at
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class _CallPlace(NamedTuple):
    """Where a call is: the text of its source, or the module of torch that makes it, and file and line."""

    source: str
    line: str


class _Key(NamedTuple):
    """A call: its place, its function, and how many such calls were before it."""

    place: _CallPlace
    function: str
    number: int
    result: int


@dataclasses.dataclass
class _CallResult:
    """The result of a call: its value, the numbers and tensors among the arguments, and the gradient after backward."""

    value: Tensor
    numbers: list[float]
    inputs: list[Tensor]
    gradient: Tensor | None = None


@dataclasses.dataclass
class KeptResults(TorchFunctionMode):
    """Keeps the results of the calls of torch that the code of a model makes.

    Attributes:
        modules: names of the modules by their ids.
        results: by call, in their order.
    """

    modules: Mapping[int, str]
    results: dict[_Key, _CallResult] = dataclasses.field(default_factory=dict)
    _counts: dict[tuple[_CallPlace, str], int] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs a function and keeps its results."""
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name == "__get__" or (place := _place_of_caller(self.modules)) is None:
            return result
        self._keep(place, name, (args, kwargs), result)
        return result

    def of_module(self, module: nn.Module, args: Any, result: Any) -> None:
        """A forward hook that keeps the results of a layer."""
        if (place := _place_of_caller(self.modules)) is not None:
            self._keep(place, f"the forward of {self.modules.get(id(module), '')}", args, result)

    def _keep(self, place: _CallPlace, name: str, arguments: Any, result: Any) -> None:
        number = self._counts[place, name] = self._counts.get((place, name), -1) + 1
        leaves = tree_leaves(arguments)
        numbers = [float(x) for x in leaves if isinstance(x, int | float)]
        inputs = [x.detach() for x in leaves if _is_kept(x)]
        for index, leaf in enumerate(tree_leaves(result)):
            if _is_kept(leaf):
                kept = self.results[_Key(place, name, number, index)] = _CallResult(
                    leaf.detach().clone(), numbers, inputs
                )
                if leaf.requires_grad:
                    leaf.register_hook(functools.partial(_keep_gradient, kept))


def _is_kept(value: object) -> bool:
    return type(value) in (Tensor, nn.Parameter) and value.is_floating_point() and value.numel() <= MOST_ELEMENTS  # type: ignore[attr-defined]


def _keep_gradient(result: _CallResult, gradient: Tensor) -> None:
    result.gradient = gradient.detach().clone()


def _place_of_caller(modules: Mapping[int, str]) -> _CallPlace | None:
    """Returns the place in the user's code of the call that runs; None if this package makes it, in its layers."""
    frame: FrameType | None = sys._getframe(2)
    of_torch = ""
    while frame is not None:
        top = frame.f_globals.get("__name__", "").partition(".")[0]
        if frame.f_code.co_name == "__torch_function__":  # of other modes
            frame = frame.f_back
            continue
        if top != "torch":
            break
        module = frame.f_locals.get("self")
        if (
            not of_torch
            and isinstance(module, nn.Module)
            and not isinstance(module, _CONTAINERS)
            and id(module) in modules
        ):
            of_torch = f"{modules[id(module)]}, {type(module).__name__}"
        frame = frame.f_back
    if frame is None or top == "tp_ext":
        return _CallPlace(of_torch, "") if of_torch else None
    file = frame.f_code.co_filename
    return _CallPlace(_source(frame), f"{file.rpartition('/')[2]}:{frame.f_lineno}")


def _source(frame: FrameType) -> str:
    """Returns the text of the expression that a frame evaluates, or of its line."""
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    positions = list(frame.f_code.co_positions())[frame.f_lasti // 2]
    first, last, start, end = positions
    if first != last or first != frame.f_lineno or start is None or end is None:
        return line.strip()
    return line.encode()[start:end].decode() or line.strip()


def _first_difference(whole: KeptResults, ranks: Sequence[KeptResults], bound: float) -> str:
    """Returns a clause about the first call whose results do not fit; "" if there is none.

    Args:
        whole: of the unsharded model.
        ranks: of each rank.
        bound: of differences, relative to the largest element.
    """
    both = {key: [rank.results[key] for rank in ranks] for key in whole.results if all(key in r.results for r in ranks)}
    for key, of_ranks in both.items():
        result = whole.results[key]
        if not _fit(result.value, [each.value for each in of_ranks], bound):
            # What torch shows to no mode, as a Function of autograd, has made it
            inputs = zip(result.inputs, *(each.inputs for each in of_ranks), strict=False)
            if not all(_fit(full, parts, bound) for full, *parts in inputs):
                return f"a tensor that {_named(key)} reads is the first that differs"
            return f"the result of {_named(key)} {_cause(result, of_ranks)}"
    for key in reversed(both):
        gradient = whole.results[key].gradient
        gradients = [each.gradient for each in both[key]]
        present = [g for g in gradients if g is not None]
        if gradient is not None and len(present) == len(ranks) and not _fit(gradient, present, bound):
            return f"the gradient of the result of {_named(key)} is the first that differs"
    return ""


def _named(key: _Key) -> str:
    return f"`{key.place.source}` at {key.place.line}" if key.place.line else f"{key.function} in {key.place.source}"


def _cause(result: _CallResult, of_ranks: Sequence[_CallResult]) -> str:
    for each in of_ranks:
        for full, local in zip(result.numbers, each.numbers, strict=False):
            if full != local:
                return f"depends on a local length: {local:g} in place of {full:g}"
    return "is the first that differs"


def _fit(full: Tensor, parts: Sequence[Tensor], bound: float) -> bool:
    """Returns whether the tensors of the ranks are copies, shards along a dim, or parts of a sum of the full one."""
    if any(part.dim() != full.dim() for part in parts):
        return True  # it is not known how they fit
    scale = max(full[full.isfinite()].abs().max().item() if full.isfinite().any() else 0.0, 1e-30)
    full, *parts = (t.double().nan_to_num(0.0, 1e300, -1e300) for t in (full, *parts))
    dims = {d for part in parts for d in range(full.dim()) if part.shape[d] != full.shape[d]}
    if len(dims) > 1:
        return True
    if dims:
        dim = dims.pop()
        rows, *rows_of_parts = (t.movedim(dim, 0).reshape(t.shape[dim], -1) for t in (full, *parts))
        # In any order: shards of fused weights are not neighbours
        joined = torch.cat(rows_of_parts)
        return _among(joined, rows, bound * scale) and _among(rows, joined, bound * scale)
    sums = torch.stack(list(parts)).sum(0)
    return _close(sums, full, bound * scale) or all(_close(part, full, bound * scale) for part in parts)


def _close(a: Tensor, b: Tensor, size: float) -> bool:
    return not a.numel() or bool((a - b).abs().max() <= size)


def _among(rows: Tensor, others: Tensor, size: float) -> bool:
    """Returns whether each row is one of the others."""
    if not rows.numel():
        return True
    return bool((torch.cdist(rows, others, p=float("inf")).amin(1) <= size).all())


def _kept_run(model: nn.Module, run: Callable[[nn.Module], Any]) -> KeptResults:
    """Runs a model and returns the results of its calls."""
    kept = KeptResults({id(module): name for name, module in model.named_modules()})
    for module in model.modules():
        module.register_forward_hook(kept.of_module)
    with kept:
        run(model)
    return kept


def first_difference_of(
    reduced: nn.Module, plan: Plan, whole: Plan, run: Run, dtype: torch.dtype | None, apply: Apply
) -> str:
    """Returns a clause with the line of the user's code whose result is the first that differs in a run; "" if none is.

    Args: those of :func:`tp_ext.auto.proof.prove_values.prove`.
    """

    def kept(rank: int, group: Any, plan: Plan) -> KeptResults:
        model = copied_model(reduced)
        apply(plan, model, group)
        return _kept_run(model, run)

    plan = dataclasses.replace(plan, proofs=[], example=None)
    with torch.random.fork_rng(devices=[]), no_garbage():
        notes = Notes(places_of(reduced))
        notes.empty_caches()
        unsharded = simulate(kept, 1, whole)[0]
        notes.put_back()
        ranks = simulate(kept, plan.p, plan)
        notes.put_back()
    return _first_difference(unsharded, ranks, bound_of(dtype or torch.float32, "random"))
