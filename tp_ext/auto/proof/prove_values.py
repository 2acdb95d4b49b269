"""The proof by values: a model with its repeated layers taken once is sharded and run, all ranks in this process, and
compared with the unsharded one.

The proof of shapes (:mod:`tp_ext.auto.search.localize`) cannot see a number that is wrong with every shape right: a
mean over a local length, a constant added by every rank. Here outputs, the gradients of inputs and of every parameter,
and buffers are compared, in train and eval mode, with gradients on and off, at two sizes of batch, and the reason of
what differs is a kind of weights that stays whole."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import tp_ext.random as tp_random
from tp_ext._containers import contents_of, is_cache
from tp_ext.auto.modules.logits import ShardedLogits
from tp_ext.auto.proof.copies import copied_model
from tp_ext.auto.proof.watched_hooks import watched_hooks
from tp_ext.auto.record.arguments import with_strides_of, with_tensors
from tp_ext.auto.record.reachable import Notes
from tp_ext.auto.record.record import tensors
from tp_ext.auto.record.trace import Arguments, arguments
from tp_ext.auto.record.unchanged import places_of
from tp_ext.auto.search.localize import replaced
from tp_ext.auto.search.plans import Plan
from tp_ext.model.layouts import layouts_of
from tp_ext.simulation import simulate
from tp_ext.simulation.rank_state import owned_by_ranks

MAX_PROVEN_RANKS = 8  # that run; more ranks have smaller shards of the same kinds
SPAN = 1 << 16  # elements that are compared at once
FEW = 64  # tokens with which the example is run as it is
BOUNDS = {torch.float64: 1e-6, torch.float32: 2e-3}  # relative; models in fp64 convert to fp32 inside


Apply = Callable[[Plan, nn.Module, Any], Any]


class DifferentValuesError(Exception):
    """A tensor of the sharded model that is not that of the unsharded one, with the run that showed it, if both ran."""

    def __init__(self, text: str, run: Run | None = None) -> None:
        super().__init__(text)
        self.run = run


class UnprovenError(Exception):
    """A model cannot be run, for the reason given."""


@dataclass
class RunResults:
    """The outputs, gradients and buffers of one run of a model.

    Attributes:
        outputs: the tensors by their path, and the numbers. gradients: those of inputs, ``input 0``, and parameters by
        name. buffers: the floating-point ones after it, by name.
    """

    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]

    @functools.cached_property
    def noise(self) -> float:
        """A gradient of rounding noise alone has no size of its own, and is compared with this share of the largest."""
        gradients = (t.abs() if t.is_complex() else t for t in self.gradients.values() if t.numel())
        return 1e-3 * max(map(_largest, gradients), default=0.0)


# ---------------------------------------------------------------- a smaller model


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


def examples(example: Any, dtype: torch.dtype | None, read: Container[int] = ()) -> Iterator[tuple[str, Any]]:
    """The example with values, and one with a row more in its batch. Tensors with these ids, which code reads, keep
    their values."""
    generator = torch.Generator().manual_seed(1)

    def value(x: Tensor) -> Tensor:
        return with_strides_of(x, _value(x, generator, dtype, id(x) in read))

    first = with_tensors(arguments(example), value)
    yield "the example", first
    # A second batch shows a length of the example that has become a constant of the plan
    batch = next((t.shape[0] for _, t in tensors(first) if t.dim() > 1), None)

    def longer(x: Tensor) -> Tensor:
        return torch.cat([x, x[:1]]) if x.layout == torch.strided and x.dim() and x.shape[0] == batch else x

    if batch is not None:
        yield "another batch", with_tensors(first, longer)


def few_tokens(example: Any, p: int) -> Any:
    """The example with a batch of at most 2 and at most 2 p + 3 tokens, if its first tensor of integers has both."""
    args, kwargs = arguments(example)
    ids = next((t for _, t in tensors((args, kwargs)) if t.dim() == 2 and not t.is_floating_point()), None)
    # Images and features have no dim that is known to be of tokens
    if ids is None or ids.numel() <= FEW:
        return example
    lengths = {ids.shape[0]: min(2, ids.shape[0]), ids.shape[1]: min(2 * p + 3, ids.shape[1])}

    def shorter(x: Tensor) -> Tensor:
        # A mask [batch, 1, query, key] has tokens in its last dims, too
        for dim, size in enumerate(x.shape[:2] if x.dim() < 4 else x.shape):
            x = x.narrow(dim, 0, lengths.get(size, size))
        return x

    short = with_tensors((args, kwargs), shorter)
    if isinstance(example, Arguments):
        return Arguments(*short)
    return {**short[1]} if isinstance(example, Mapping) else short[0]


# ---------------------------------------------------------------- runs


def run_model(
    model: nn.Module,
    call: Any,
    backward: bool,
    gather: Callable[[Any], Any] = lambda x: x,
    input_gradients: bool = True,
) -> RunResults:
    """Runs a model once; the loss is a product of its outputs with random numbers. What hooks keep is an output."""
    with watched_hooks(model) as hooks:
        results = _results(model, call, backward, gather, input_gradients)
    results.outputs |= hooks.kept()
    return results


def _results(
    model: nn.Module, call: Any, backward: bool, gather: Callable[[Any], Any], input_gradients: bool
) -> RunResults:

    def fresh(x: Tensor) -> Tensor:
        # Copies: a model may write to its inputs, and both runs must get the same
        is_differentiable = backward and input_gradients and x.is_floating_point()
        return with_strides_of(x, x.detach().clone()).requires_grad_(is_differentiable)

    args, kwargs = with_tensors(call, fresh)
    for parameter in model.parameters():
        parameter.grad = None  # of the run before; it would be added to
    tp_random.manual_seed(0)
    with torch.enable_grad() if backward else torch.no_grad():  # a model may take another path without gradients
        result = gather(model(*args, **kwargs))
        outputs = {".".join(map(str, path)): t for path, t in tensors(result)} | _in_objects(result)
        # Random: under a plain sum elements that change places would pass, and a mean or a sum of squares is constant
        # behind a norm, its gradients rounding noise. In fp64 and by name, so that outputs of another dtype or order
        # get the same
        generator = torch.Generator().manual_seed(2)
        weights = {name: torch.randn(t.shape, generator=generator, dtype=torch.float64) for name, t in outputs.items()}
        # Of a complex output the real part of the product, in which both of its parts are
        phases = {name: 1 + 0.5j if t.is_complex() else 1 for name, t in outputs.items()}
        terms = [(t * weights[n].to(t.dtype) * phases[n]).sum().real for n, t in outputs.items() if t.requires_grad]
        # A number that the model returns was computed from local lengths as likely as a tensor was
        numbers = [leaf for leaf in tree_leaves(result) if isinstance(leaf, int | float)]
        outputs |= {f"number {i}": torch.tensor(float(number)) for i, number in enumerate(numbers)}
        if backward and terms:  # a model may return nothing that depends on a parameter
            torch.stack([term.double() for term in terms]).sum().backward()
    gradients = {f"input {i}": t.grad for i, (_, t) in enumerate(tensors((args, kwargs))) if t.grad is not None}
    gradients |= {
        name: p.grad.to_dense() if p.grad.is_sparse else p.grad  # of an embedding; comparisons take dense ones
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    # Statistics that forward updates; counters of steps are equal anyway
    buffers = {name: b.clone() for name, b in model.named_buffers() if b.is_floating_point()}
    return RunResults({name: t.detach() for name, t in outputs.items()}, gradients, buffers)


def _in_objects(result: Any) -> dict[str, Tensor]:
    """The tensors of a result in objects that a plan does not look into, other than caches: they must be whole."""
    contents = contents_of(result, "result", is_cache)
    for name, kind in contents.unknown.items():
        raise UnprovenError(f"{name}: a {kind} may hold tensors that cannot be compared")
    known = {id(t) for _, t in tensors(result)}
    return {name: t for name, t in contents.tensors.items() if id(t) not in known}


def full_logits(result: Any) -> Any:
    """Outputs with logits of all columns, for a comparison."""
    for path, tensor in list(tensors(result)):
        if isinstance(tensor, ShardedLogits):
            result = replaced(result, path, ShardedLogits.full)  # type: ignore[arg-type]
    return result


def _largest(tensor: Tensor, less: Tensor | None = None) -> float:
    """The largest absolute value of a tensor, or of its difference from another; NaN if there is one."""
    # In spans that stay in the cache: three passes over the gradient of a large table cost more than its backward
    spans = tensor.reshape(-1).split(SPAN)
    others = [torch.zeros(())] * len(spans) if less is None else less.reshape(-1).split(SPAN)
    sizes = [(x.double() - y.double()).abs().max() for x, y in zip(spans, others, strict=True)]
    return torch.stack(sizes).max().item()


def _difference(name: str, wanted: Tensor | None, got: Tensor | None, scale: float) -> tuple[float, str]:
    """The difference of a tensor relative to its largest element; infinite where one is missing."""
    # A missing gradient equals zeros: the code of one side may have no path to the tensor
    if wanted is None or got is None:
        present = got if wanted is None else wanted
        return (float("inf") if present is not None and present.any() else 0.0), name
    if wanted.shape != got.shape:
        return float("inf"), name
    if not wanted.numel():
        return 0.0, name
    wanted, got = (torch.view_as_real(t) if t.is_complex() else t for t in (wanted, got))
    error, largest = _largest(wanted, got), _largest(wanted)
    # An output may be -inf on both sides, as masked scores are, and the difference of these is NaN
    if not math.isfinite(error + largest):
        both = torch.isfinite(wanted)
        if not torch.equal(both, torch.isfinite(got)):
            return float("inf"), name
        error, largest = (_largest(wanted[both], got[both]), _largest(wanted[both])) if both.any() else (0.0, 0.0)
    return error / max(largest, scale, 1e-30), name


def compare_runs(wanted: RunResults, got: RunResults, layouts: Mapping[str, Any]) -> tuple[float, str]:
    """The largest difference of two runs, and the tensor's name; shards are compared with slices."""
    rows = []
    for kind in ("outputs", "gradients", "buffers"):
        left, right = getattr(wanted, kind), getattr(got, kind)
        for name in {**left, **right}:
            full = left.get(name)
            if full is not None and name in layouts and kind != "outputs":
                full = layouts[name].shard(full)
            what = {"outputs": f"the output {name}".rstrip(), "gradients": f"the gradient of {name}"}.get(kind, name)
            rows.append(_difference(what, full, right.get(name), wanted.noise if kind == "gradients" else 0.0))
    return max(rows, key=lambda row: row[0], default=(0.0, ""))


@dataclass(frozen=True)
class Run:
    """One run of the proof: a call of the model, in a mode.

    Attributes:
        input_gradients: whether the floating-point arguments require gradients.
    """

    call: Any
    training: bool
    backward: bool
    input_gradients: bool = True

    def __call__(self, model: nn.Module) -> RunResults:
        return run_model(model.train(self.training), self.call, self.backward, full_logits, self.input_gradients)


def prove(
    reduced: nn.Module,
    plan: Plan,
    whole: Plan,
    calls: list[tuple[str, Any]],
    dtype: torch.dtype | None,
    apply: Apply,
    gradients: bool = True,
) -> None:
    """Runs a model with weights on all ranks of a plan, in this process, next to the same model on one rank.

    Args:
        whole: the plan of one rank, whose draws are those of every number of ranks. calls: :func:`examples`.
        gradients: whether it may run with gradients.

    Raises:
        DifferentValuesError: a tensor differs. UnprovenError: the unsharded model does not run.
    """
    # Its shapes have been proven, in the types that the model has; calls that the example lacks are the user's
    plan = dataclasses.replace(plan, proofs=[], example=None)
    bound = BOUNDS.get(dtype or torch.float32, 5e-2)

    def runs(rank: int, group: Any, plan: Plan) -> tuple[list[RunResults], dict[str, Any]]:
        model = copied_model(reduced)
        apply(plan, model, group)
        return [run(model) for run in accepted], layouts_by_name(model)

    with torch.random.fork_rng(devices=[]), no_garbage():
        notes = Notes(places_of(reduced))
        notes.empty_caches()
        accepted, wanted = _reference(reduced, whole, calls, apply, gradients)
        # Ranks are processes: what the code keeps outside of the model is not what another rank has computed
        shared = notes.changed()
        notes.put_back()
        try:
            with owned_by_ranks(lambda: Notes(shared).put_back) if shared else contextlib.nullcontext():
                ranks = simulate(runs, plan.p, plan)
        except RuntimeError as error:
            raise DifferentValuesError(str(error)) from error
    for rank, (runs_of_rank, of_rank) in enumerate(ranks):
        for run, expected, got in zip(accepted, wanted, runs_of_rank, strict=True):
            size, name = compare_runs(expected, got, of_rank)
            if not size <= bound:
                raise DifferentValuesError(f"{name} differs by {size:.0e} on rank {rank}", run)


@contextlib.contextmanager
def no_garbage() -> Iterator[None]:
    """Fills memory that an operator leaves uninitialised alike in all runs, such as rows after the last group of a
    grouped product."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _reference(
    reduced: nn.Module, whole: Plan, calls: list[tuple[str, Any]], apply: Apply, gradients: bool
) -> tuple[list[Run], list[RunResults]]:
    """Runs the unsharded model in all modes; returns the runs that it accepts, and their results.

    Raises:
        UnprovenError: it accepts no run of training. DifferentValuesError: it does without the
            layers and masks of ``whole``.
    """
    modes = [(training, backward) for training in (True, False) for backward in (True, False)[not gradients :]]
    runs = [Run(call, *mode) for _, call in calls for mode in modes]
    try:
        return _accepted(reduced, runs, lambda model, group: apply(whole, model, group))
    except UnprovenError as error:
        try:
            _accepted(reduced, runs, lambda model, group: model)
        except UnprovenError:
            raise error from None
        # The model runs, but not with layers of this package
        raise DifferentValuesError(str(error)) from error


def _accepted(
    reduced: nn.Module, runs: list[Run], prepare: Callable[[nn.Module, Any], object]
) -> tuple[list[Run], list[RunResults]]:
    """Runs a model on one rank, without the runs that it does not accept; returns the others and their results.

    Some models reject one sequence in training, a row more, or an argument that requires a gradient."""
    # Text: an exception has the frames of the run that has failed, and all activations in them
    first_error = ""

    def run_all(rank: int, group: Any) -> tuple[list[RunResults], str]:
        model = copied_model(reduced)
        prepare(model, group)
        results: list[RunResults] = []
        for run in runs:
            try:
                results.append(run(model))
            except Exception as error:
                return results, f"{type(error).__name__}: {str(error)[:200]}"
        return results, ""

    with_gradients = any(run.backward for run in runs)
    while any(run.training and run.backward == with_gradients for run in runs):
        try:
            results, error = simulate(run_all, 1)[0]
        except RuntimeError as refused:  # by `prepare`
            raise UnprovenError(f"{type(refused).__name__}: {str(refused)[:200]}") from refused
        if not error:
            return runs, results
        first_error = first_error or error
        failed = runs[len(results)]
        # All runs again, in a new copy: one that fails half-way leaves other buffers
        if failed.backward and failed.input_gradients:
            runs = [dataclasses.replace(run, input_gradients=False) for run in runs]
        else:
            runs = [run for run in runs if run is not failed]
    raise UnprovenError(first_error)


def layouts_by_name(model: nn.Module) -> dict[str, Any]:
    """The layouts of parameters and buffers by their names."""
    return {
        f"{name}.{attribute}" if name else attribute: layout
        for name, module in model.named_modules(remove_duplicate=False)
        for attribute, layout in layouts_of(module).items()
    }
