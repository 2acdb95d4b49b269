"""The run of a model on one rank, and what it has computed: weights, outputs, losses, gradients, inputs and outputs of
every module."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from tp_ext.checkpoint.entries import state_entries
from tp_ext.debug.collective_counts import count_collectives
from tp_ext.group import parallel_group
from tp_ext.nn.fqn import resolve_fqn
from tp_ext.random import manual_seed
from tp_ext.sharding import Layout
from tp_ext.verify.compare import Parts, Placement, compare, placements

STEPS = 3


@dataclass
class Call:
    """A call of a module: what it took and gave, and the gradients of both, in the order of the arguments' leaves.

    ``partial``: the module gives partial sums, by its attribute ``output_is_partial``, and so are its inputs' gradients.
    """

    name: str
    partial: bool
    start: int
    parent: "Call | None"
    inputs: list[Tensor | None]
    input_gradients: dict[int, Tensor] = field(default_factory=dict)
    outputs: list[Tensor | None] = field(default_factory=list)
    output_gradients: dict[int, Tensor] = field(default_factory=dict)
    end: int = -1

    def within(self, other: "Call") -> bool:
        """Returns whether this is ``other`` or a call made by it."""
        return other.start <= self.start and self.end <= other.end


@dataclass
class Progress:
    """The place of a rank in its model, for errors: the modules that are being called, innermost last."""

    calling: list[str] = field(default_factory=list)
    phase: str = "make_model"


@dataclass
class Outcome:
    """What one rank has computed."""

    rank: int
    state: dict[str, Tensor] = field(default_factory=dict)
    layouts: dict[str, Layout] = field(default_factory=dict)
    calls: dict[str, list[Call]] = field(default_factory=dict)  # of "eval" and "train", in the order of their ends
    outputs: dict[str, list[Tensor]] = field(default_factory=dict)  # of "eval", "train", "step 1", ..
    placed: list[Placement | None] = field(default_factory=list)  # of the outputs
    scalar: bool = False  # whether the model's result is or has a loss
    loss: Tensor | None = None
    gradients: dict[str, Tensor | None] = field(default_factory=dict)  # of parameters, then of inputs
    owners: dict[str, list[str]] = field(default_factory=dict)  # the modules of each parameter
    trained: dict[str, Tensor] = field(default_factory=dict)
    collectives: dict[str, int] = field(default_factory=dict)


@dataclass
class Task:
    """What the ranks are to run, and what they share while they do.

    Attributes:
        arguments: args and kwargs of forward.
        dtype: that to which the model is converted; None: its own.
        reference: the outcome of one process; None while it is made.
        shared: each rank's outputs, which all of them read after a barrier.
    """

    make_model: Callable[[Any], nn.Module]
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    dtype: torch.dtype | None
    seed: int
    reference: Outcome | None = None
    shared: dict[int, Any] = field(default_factory=dict)
    progress: dict[int, Progress] = field(default_factory=dict)
    lowest: "LowestPrecision | None" = None


class LowestPrecision(TorchFunctionMode):
    """The lowest precision of the tensors that depend on parameters: it bounds what two orders of a sum have in common.

    Attributes:
        dtype: the floating dtype of the least precision.
    """

    dtype = torch.float64

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in tree_leaves(result) if isinstance(result, Tensor | tuple | list) else ():
            if isinstance(one, Tensor) and one.is_floating_point() and one.requires_grad:
                if torch.finfo(one.dtype).eps > torch.finfo(self.dtype).eps:
                    self.dtype = one.dtype
        return result


def run(rank: int, group: Any, task: Task) -> Outcome:
    """Builds the model and runs it in eval mode, then in train mode for three steps of AdamW."""
    progress = task.progress[rank] = Progress()
    made = Outcome(rank)
    manual_seed(task.seed)
    model = task.make_model(group)
    if not isinstance(model, nn.Module):
        raise TypeError(f"make_model: returned {type(model).__name__} and must return an nn.Module")
    if task.dtype is not None:
        model = model.to(task.dtype)
    entries = state_entries(model, parallel_group(group))
    tensors = {name: entry.value for name, entry in entries.items() if isinstance(entry.value, Tensor)}
    made.state = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    made.layouts = {name: entries[name].layout for name in tensors}
    args, kwargs, leaves = _arguments(task)

    progress.phase = "eval"
    model.eval()
    manual_seed(task.seed)
    with torch.no_grad(), _recorded(model, made.calls.setdefault("eval", []), progress):
        result = model(*args, **kwargs)
    made.outputs["eval"] = [_kept(one) for one in output_leaves(result)]
    made.placed = _placed(group, task, made)

    progress.phase = "train"
    model.train()
    trainable = [param for param in model.parameters() if param.requires_grad]
    # With a larger eps than the default, the noise in a gradient that is zero is not a step of the size of lr
    optimizer = torch.optim.AdamW(trainable, lr=1e-2, eps=1e-4) if trainable else None
    with count_collectives() as counts:
        manual_seed(task.seed)
        with _recorded(model, made.calls.setdefault("train", []), progress), task.lowest or _nothing():
            result = model(*args, **kwargs)
        made.outputs["train"] = [_kept(one) for one in output_leaves(result)]
        loss, made.scalar = loss_of(result, task, made)
        progress.phase = "backward"
        made.loss = loss.detach() if made.scalar else None
        if loss.requires_grad:
            loss.backward()
        made.collectives = counts.by_kind()
    group_of = parallel_group(group)
    for name, param in model.named_parameters():
        found = resolve_fqn(model, name, group_of)
        made.gradients[found.name] = _kept(param.grad)
        made.layouts.setdefault(found.name, found.layout)
        made.owners[found.name] = [
            owner for owner, module in model.named_modules() if any(one is param for one in module._parameters.values())
        ]
    made.gradients |= {name: _kept(leaf.grad) for name, leaf in leaves.items()}
    progress.phase = "optimizer"
    for step in range(STEPS if optimizer is not None and loss.requires_grad else 0):
        if step:
            result = model(*args, **kwargs)
            made.outputs[f"step {step}"] = [_kept(one) for one in output_leaves(result)]
            loss_of(result, task, made)[0].backward()
        assert optimizer is not None
        optimizer.step()
        optimizer.zero_grad()
    made.trained = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    return made


def output_leaves(result: Any) -> list[Any]:
    """Returns the tensors of a result, with those in dataclasses."""
    if dataclasses.is_dataclass(result) and not isinstance(result, type | Mapping):
        result = {entry.name: getattr(result, entry.name) for entry in dataclasses.fields(result)}
    return [one for one in tree_leaves(result) if isinstance(one, Tensor)]


def loss_of(result: Any, task: Task, made: Outcome) -> tuple[Tensor, bool]:
    """Returns the loss of a result, and whether the result has one: it is a scalar, or has a scalar ``loss``. Else the
    loss is the sum of the outputs times fixed random numbers, of which a rank takes its shard."""
    named = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
    for one in (result, named):
        if isinstance(one, Tensor) and one.dim() == 0 and one.is_floating_point():
            return one, True
    fulls = (task.reference or made).outputs["eval"]
    total = torch.zeros((), dtype=torch.float64)
    for index, one in enumerate(output_leaves(result)):
        if not (one.is_floating_point() and one.requires_grad):
            continue
        placement, full = (made.placed + [None] * len(fulls))[index], fulls[index] if index < len(fulls) else None
        generator = torch.Generator().manual_seed(index)
        shape = one.shape if placement is None or full is None else full.shape
        weights = torch.randn(shape, generator=generator, dtype=torch.float64)
        local = weights if placement is None else placement.expected(weights)[made.rank]
        # Logits of an excluded entry are -inf in some models; their gradient is zero
        finite = one.masked_fill(~one.isfinite(), 0)
        total = total + (finite * local.to(one)).sum().to(torch.float64)
    return total, False


def _arguments(task: Task) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, Tensor]]:
    """Returns this rank's copy of args and kwargs, and the leaves by which floating-point ones get gradients."""
    leaves: dict[str, Tensor] = {}

    def copied(name: str) -> Callable[[Tensor], Tensor]:
        def copy(x: Tensor) -> Tensor:
            x = x.detach().clone()
            if not x.is_floating_point():
                return x
            x = x.to(task.dtype or x.dtype).requires_grad_()
            leaves[f"{name} of forward" if name not in leaves else f"{name} of forward ({len(leaves)})"] = x
            return x.clone()  # no leaf: a model may write to its input

        return copy

    args, kwargs = task.arguments
    some = tuple(tree_map_only(Tensor, copied(f"argument {i}"), one) for i, one in enumerate(args))
    others = {name: tree_map_only(Tensor, copied(name), one) for name, one in kwargs.items()}
    return some, others, leaves


def _placed(group: Any, task: Task, made: Outcome) -> list[Placement | None]:
    """Returns the placement of each output, by the outputs of all ranks."""
    task.shared[made.rank] = made
    if task.reference is None:
        tables = [(parts, parts) for parts in {parts_of(layout) for layout in made.layouts.values()} if parts]
        found = [placements(one.shape, [one.shape], tables) for one in made.outputs["eval"]]
        return [next((one for one in some if one.parts and _padded(one)), some[0]) for some in found]
    dist.barrier(group=group)
    locals_ = [task.shared[other].outputs["eval"] for other in range(group.size())]
    fulls, tables = task.reference.outputs["eval"], parts_at(task.reference, made)
    if any(len(some) != len(fulls) for some in locals_):
        return []
    return [compare(full, some, tables).placement for full, *some in zip(fulls, *locals_, strict=True)]


def _padded(placement: Placement) -> bool:
    return placement.parts is not None and any(part.padding for part in placement.parts[0])


def parts_of(layout: Layout) -> tuple[Any, ...]:
    """Returns the parts of a layout over one group; none of others."""
    return layout[0][0].parts if len(layout) == 1 else ()


def parts_at(reference: Outcome, made: Outcome) -> list[Parts]:
    """Returns the parts of all sharded parameters, at one rank and at p ranks, each pair once."""
    pairs = [
        (parts_of(reference.layouts[name]), parts_of(layout))
        for name, layout in made.layouts.items()
        if name in reference.layouts
    ]
    return list(dict.fromkeys(pair for pair in pairs if all(pair)))


def _kept(tensor: Any) -> Any:
    return tensor.detach().clone() if isinstance(tensor, Tensor) else None


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@contextmanager
def _recorded(model: nn.Module, calls: list[Call], progress: Progress) -> Iterator[None]:
    """Appends every call of a module in the block to ``calls``; what checkpoints call again in backward is none."""
    stack: list[Call] = []
    clock = iter(range(1 << 62))

    def before(name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            progress.calling.append(name)
            call = Call(name, getattr(module, "output_is_partial", False), next(clock), stack[-1] if stack else None, [])
            stack.append(call)

            def watched(x: Tensor) -> Tensor:
                index = len(call.inputs)
                call.inputs.append(_kept(x))
                if not x.requires_grad or isinstance(x, nn.Parameter) or not torch.is_grad_enabled():
                    return x
                view = x.view_as(x)  # its gradient is that of this module's use alone
                view.register_hook(lambda g: call.input_gradients.__setitem__(index, g.detach().clone()))
                return view

            return tree_map_only(Tensor, watched, (args, kwargs))

        return hook

    def after(module: nn.Module, args: Any, result: Any) -> None:
        progress.calling.pop()
        call = stack.pop()
        for index, one in enumerate(output_leaves(result)):
            call.outputs.append(None if isinstance(one, nn.Parameter) else _kept(one))
            if one.requires_grad and not isinstance(one, nn.Parameter):
                one.register_hook(lambda g, i=index: call.output_gradients.__setitem__(i, g.detach().clone()))
        call.end = next(clock)
        calls.append(call)

    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(before(name), with_kwargs=True))
        handles.append(module.register_forward_hook(after))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
