"""The run of a model on one rank, and what it has computed: weights, outputs, losses, gradients, inputs and outputs of
every module."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from tp_ext.debug.collective_counts import count_collectives
from tp_ext.group import parallel_group
from tp_ext.model.census import census
from tp_ext.model.layer_shares import know_that_they_agree
from tp_ext.model.module import ParallelModule
from tp_ext.random import manual_seed
from tp_ext.sharding import Layout
from tp_ext.simulation.comparison import loss_of, projection, tensors_of, weights_of
from tp_ext.verify.compare import PartsOfDim, Placement, compare, placements
from tp_ext.verify.precision import LowestPrecision

STEPS = 3
LATER = ("train without gradients", "eval after training")
"""Forwards after the steps: what a model counts or caches shows in them."""


@dataclass(eq=False)
class RecordedCall:
    """A call of a module: what it took and gave, and the gradients of both, in the order of the arguments' leaves.

    ``partial``: outputs and gradients of inputs are partial sums, by the module's ``output_is_partial``.
    """

    name: str
    partial: bool
    start: int
    parent: "RecordedCall | None"
    inputs: list[Tensor | None]
    input_gradients: dict[int, Tensor] = field(default_factory=dict)
    outputs: list[Tensor | None] = field(default_factory=list)
    output_gradients: dict[int, Tensor] = field(default_factory=dict)
    end: int = -1

    def within(self, other: "RecordedCall") -> bool:
        """Returns whether this is ``other`` or a call that it makes."""
        return other.start <= self.start and self.end <= other.end


@dataclass
class Progress:
    """The place of a rank in its model, for errors: the modules that are being called, innermost last; in backward the
    module that got its gradient last."""

    calling: list[str] = field(default_factory=list)
    phase: str = "make_model"

    @property
    def module(self) -> str:
        """The name of the innermost module."""
        return self.calling[-1] if self.calling else ""


@dataclass
class Outcome:
    """The results of one rank."""

    rank: int
    state: dict[str, Tensor] = field(default_factory=dict)
    layouts: dict[str, Layout] = field(default_factory=dict)
    # Of "eval" and "train", in the order of their ends
    calls: dict[str, list[RecordedCall]] = field(default_factory=dict)
    outputs: dict[str, list[Tensor]] = field(default_factory=dict)  # of "eval", "train", "step 1", ..
    placed: list[Placement | None] = field(default_factory=list)  # of the outputs
    scalar: bool = False  # whether the model's result is or has a loss
    loss: Tensor | None = None
    gradients: dict[str, Tensor | None] = field(default_factory=dict)  # of parameters, then of inputs
    owners: dict[str, list[str]] = field(default_factory=dict)  # the modules of each parameter
    trained: dict[str, Tensor] = field(default_factory=dict)
    written: dict[str, Tensor] = field(default_factory=dict)  # non-persistent buffers that forwards have changed
    collectives: dict[str, int] = field(default_factory=dict)
    in_blocks: bool = False  # whether all layers were built in tp_invariant


@dataclass
class Task:
    """The run that is compared, and the objects that its ranks share.

    Attributes:
        arguments: args and kwargs of forward.
        dtype: that to which the model is converted; None: its own.
        built: the parameters of all models, of which no two share one.
        reference: the outcome of one process; None until it is known.
        shared: each rank's outputs, which all of them read after a barrier.
        lowest: None, or what notes the precision of the model.
    """

    make_model: Callable[[Any], nn.Module]
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    dtype: torch.dtype | None
    seed: int
    built: WeakIdKeyDictionary
    reference: Outcome | None = None
    shared: dict[int, Any] = field(default_factory=dict)
    progress: dict[int, Progress] = field(default_factory=dict)
    lowest: LowestPrecision | None = None


class UnfitModelError(TypeError):
    """An error of ``make_model`` that is no property of a number of ranks."""


def run(rank: int, group: Any, task: Task) -> Outcome:
    """Builds the model and runs it in eval mode, in train mode for three steps of AdamW, and in both modes without
    gradients."""
    progress = task.progress[rank] = Progress()
    outcome = Outcome(rank)
    model = _built(group, task)
    entries = census(model, assumed=parallel_group(group)).state()
    tensors = {name: entry.value for name, entry in entries.items() if isinstance(entry.value, Tensor)}
    outcome.state = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    outcome.layouts = {name: entries[name].layout for name in tensors}
    blocks = {module.invariant_blocks for module in model.modules() if isinstance(module, ParallelModule)}
    # One layer outside of the context is enough for bits that depend on p
    outcome.in_blocks = len(blocks) > 0 and None not in blocks
    unsaved = _unsaved_buffers(model, tensors)
    leaves, arguments = _arguments(task)

    def forward() -> Any:
        args, kwargs = arguments()
        return model(*args, **kwargs)

    progress.phase = "eval"
    model.eval()
    manual_seed(task.seed)
    # Before training has changed a weight, and without masks: what differs here is no matter of dropout or gradients
    with torch.no_grad(), _recorded(model, outcome.calls.setdefault("eval", []), progress):
        result = forward()
    outcome.outputs["eval"] = [_kept(leaf) for leaf in tensors_of(result).values()]
    # The loss of train mode is made with it: fixed numbers for each output, of which a rank takes its shard
    outcome.placed = _placed(group, task, outcome)

    progress.phase = "train"
    model.train()
    trainable = [param for param in model.parameters() if param.requires_grad]
    # With a larger eps than the default, the noise in a gradient that is zero is not a step of the size of lr
    optimizer = torch.optim.AdamW(trainable, lr=1e-2, eps=1e-4) if trainable else None
    # Of one step: its collectives are counted, its calls and gradients kept; of the later ones losses and weights
    # suffice
    with count_collectives() as counts:
        manual_seed(task.seed)
        lowest = task.lowest
        if lowest is not None:
            lowest.add(model)
        with _recorded(model, outcome.calls.setdefault("train", []), progress), lowest or _nothing():
            result = forward()
        outcome.outputs["train"] = [_kept(leaf) for leaf in tensors_of(result).values()]
        with lowest or _nothing():
            loss, outcome.scalar = _loss_of(result, task, outcome)
        progress.phase = "backward"
        outcome.loss = loss.detach() if outcome.scalar else None
        with lowest or _nothing():
            if loss.requires_grad:
                # What Tensor.backward calls: the mode would see that method, and nothing within it
                run_backward = torch.autograd.Variable._execution_engine.run_backward
                run_backward((loss,), (torch.ones_like(loss),), False, False, (), True, True)
        outcome.collectives = counts.select(group=group).by_kind()
    trained = census(model, assumed=parallel_group(group))
    for entry in trained.parameters.values():
        outcome.gradients[entry.name] = _kept(entry.value.grad)
        outcome.layouts.setdefault(entry.name, entry.layout)
        outcome.owners[entry.name] = [
            path for path, module in trained.modules if any(p is entry.value for p in module._parameters.values())
        ]
    outcome.gradients |= {name: _kept(leaf.grad) for name, leaf in leaves.items()}
    progress.phase, progress.calling[:] = "optimizer", []
    for step in range(STEPS if optimizer is not None and loss.requires_grad else 0):
        if step:
            result = forward()
            outcome.outputs[f"step {step}"] = [_kept(leaf) for leaf in tensors_of(result).values()]
            _loss_of(result, task, outcome)[0].backward()
        assert optimizer is not None
        optimizer.step()
        optimizer.zero_grad()
    progress.phase = "a forward after the steps"
    for phase in LATER:
        model.train(phase == LATER[0])
        with torch.no_grad():
            outcome.outputs[phase] = [_kept(leaf) for leaf in tensors_of(forward()).values()]
    # Found anew: forward may have put another tensor in the place of a buffer
    entries = census(model, assumed=parallel_group(group)).state()
    outcome.trained = {name: _kept(entry.value) for name, entry in entries.items() if isinstance(entry.value, Tensor)}
    for name, buffer in _unsaved_buffers(model, outcome.trained).items():
        # One that no forward writes may differ rightly: the index of this rank's first row, for instance
        if name not in unsaved or not _same(buffer, unsaved[name]):
            outcome.written[name] = buffer
    return outcome


def _unsaved_buffers(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns copies of the buffers that are not in the state dict."""
    return {name: _kept(buffer) for name, buffer in model.named_buffers() if name not in state}


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, 0.0, 0.0, equal_nan=True)


def _built(group: Any, task: Task) -> nn.Module:
    """Returns a new model, in the dtype of the task.

    Raises:
        UnfitModelError: no module, or one that shares parameters with an earlier one.
    """
    manual_seed(task.seed)
    model = task.make_model(group)
    if not isinstance(model, nn.Module):
        raise UnfitModelError(f"make_model: returned {type(model).__name__} and must return an nn.Module")
    for name, param in model.named_parameters():
        if param in task.built:
            raise UnfitModelError(
                f"make_model: {name!r} belongs to a model that it returned before, for another rank or another p; "
                "each call must build a model of its own (copy.deepcopy)"
            )
    know_that_they_agree(model)  # an all-reduce at their first call would be taken for one of the model
    task.built.update(dict.fromkeys(model.parameters(), True))
    return model if task.dtype is None else model.to(task.dtype)


def _loss_of(result: Any, task: Task, outcome: Outcome) -> tuple[Tensor, bool]:
    """Returns the loss of a result, and whether the result has one. Else the loss is the projection of its outputs, of
    which a rank takes its shard."""
    if (loss := loss_of(result)) is not None:
        return loss, True
    fulls = (task.reference or outcome).outputs["eval"]

    def weights(name: str, shape: Sequence[int]) -> Tensor:
        index = int(name)
        placement = outcome.placed[index] if index < min(len(fulls), len(outcome.placed)) else None
        if placement is None:
            return weights_of(name, shape)
        return placement.expected(weights_of(name, fulls[index].shape))[outcome.rank]

    # Logits of an excluded entry are -inf in some models; their gradient is zero
    finite = {str(i): x.masked_fill(~x.isfinite(), 0) for i, x in enumerate(map(_plain, tensors_of(result).values()))}
    total = projection(finite, weights)
    return torch.zeros((), dtype=torch.float64) if total is None else total, False


def _arguments(task: Task) -> tuple[dict[str, Tensor], Callable[[], tuple[Any, Any]]]:
    """Returns the leaves by which floating-point arguments of forward get gradients, by name, and a function that makes
    args and kwargs for a call, which may write to them."""
    leaves: dict[str, Tensor] = {}
    copies: dict[int, Tensor] = {}

    def copied(name: str) -> Callable[[Tensor], Tensor]:
        def copy(x: Tensor) -> Tensor:
            if id(x) in copies:
                return x
            # A copy: forward may write to its arguments, and each call gets the same
            copies[id(x)] = leaf = x.detach().to(task.dtype or x.dtype, copy=True) if x.is_floating_point() else x
            if leaf.is_floating_point():
                leaves[name if name not in leaves else f"{name} ({len(leaves)})"] = leaf.requires_grad_()
            return x

        return copy

    args, kwargs = task.arguments
    for name, value in [*((f"argument {i}", value) for i, value in enumerate(args)), *kwargs.items()]:
        tree_map_only(Tensor, copied(f"{name} of forward"), value)
    return leaves, lambda: tree_map_only(Tensor, lambda x: copies[id(x)].clone(), (args, kwargs))


def _placed(group: Any, task: Task, outcome: Outcome) -> list[Placement | None]:
    """Returns the placement of each output, by the outputs of all ranks."""
    task.shared[outcome.rank] = outcome
    if task.reference is None:
        tables = [(parts, parts) for parts in {parts_of(layout) for layout in outcome.layouts.values()} if parts]
        candidates = [placements(output.shape, [output.shape], tables) for output in outcome.outputs["eval"]]
        return [next(filter(_padded, fitting), fitting[0]) for fitting in candidates]
    dist.barrier(group=group)
    locals_ = [task.shared[other].outputs["eval"] for other in range(group.size())]
    fulls, tables = task.reference.outputs["eval"], parts_at(task.reference, outcome)
    if any(len(some) != len(fulls) for some in locals_):
        return []
    return [compare(full, some, tables).placement for full, *some in zip(fulls, *locals_, strict=True)]


def _padded(placement: Placement) -> bool:
    return placement.parts is not None and any(part.padding for part in placement.parts[0])


def parts_of(layout: Layout) -> tuple[Any, ...]:
    """Returns the parts of a layout over one group; none of others."""
    return layout[0][0].parts if len(layout) == 1 else ()


def parts_at(reference: Outcome, outcome: Outcome) -> list[PartsOfDim]:
    """Returns the parts of all sharded parameters, at one rank and at p ranks, each pair once."""
    pairs = [
        (parts_of(reference.layouts[name]), parts_of(layout))
        for name, layout in outcome.layouts.items()
        if name in reference.layouts
    ]
    sizes = [{sum(part.size for part in parts) for parts in pair} for pair in pairs]
    return list(dict.fromkeys(pair for pair, size in zip(pairs, sizes, strict=True) if all(pair) and len(size) == 1))


def _kept(tensor: Any) -> Any:
    return _plain(tensor).detach().clone() if isinstance(tensor, Tensor) else None


def _plain(tensor: Tensor) -> Tensor:
    """Returns a tensor without its subclass: of the logits of :mod:`tp_ext.auto`, which are full where they are used,
    this rank's."""
    if type(tensor) in (Tensor, nn.Parameter) or isinstance(tensor, DTensor):
        return tensor
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(Tensor)


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@contextmanager
def _recorded(model: nn.Module, calls: list[RecordedCall], progress: Progress) -> Iterator[None]:
    """Appends every call of a module in the block to ``calls``; what checkpoints call again in backward is none."""
    stack: list[RecordedCall] = []
    clock = iter(range(1 << 62))

    def before(name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            progress.calling.append(name)
            call = RecordedCall(
                name, getattr(module, "output_is_partial", False), next(clock), stack[-1] if stack else None, []
            )
            stack.append(call)

            def watched(x: Tensor) -> Tensor:
                index = len(call.inputs)
                call.inputs.append(_kept(x))
                # A parameter is no activation: its gradient is compared under its name
                if not x.requires_grad or isinstance(x, nn.Parameter) or not torch.is_grad_enabled():
                    return x
                view = x.view_as(x)  # its gradient is that of this module's use alone
                view.register_hook(lambda g: call.input_gradients.__setitem__(index, g.detach().clone()))
                return view

            return tree_map_only(Tensor, watched, (args, kwargs))

        return hook

    def after(name: str) -> Any:
        def hook(module: nn.Module, args: Any, result: Any) -> None:
            while (call := stack.pop()).name != name:  # modules whose error the model has caught
                progress.calling.pop()
            progress.calling.pop()

            def got(i: int, gradient: Tensor) -> None:
                call.output_gradients[i] = gradient.detach().clone()
                progress.calling[:] = [name]

            for index, leaf in enumerate(tensors_of(result).values()):
                call.outputs.append(None if isinstance(leaf, nn.Parameter) else _kept(leaf))
                if leaf.requires_grad and not isinstance(leaf, nn.Parameter):
                    leaf.register_hook(lambda g, i=index: got(i, g))
            call.end = next(clock)
            calls.append(call)

        return hook

    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(before(name), with_kwargs=True, prepend=True))
        handles.append(module.register_forward_hook(after(name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
