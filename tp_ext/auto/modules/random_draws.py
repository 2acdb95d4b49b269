"""Dropout of unchanged code: masks are a function of the index in the full tensor, hence those of one process.

One function mode replaces the random calls of a forward. Edits tell it which module runs, so that a call is one of
the innermost module's: modules around it do not see it. A draw is found by the place of its call in that of the
module, and must fit the tensor that is masked: a loop may run as often as it likes."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from tp_ext.auto.modules.token_lengths import TokenLengths
from tp_ext.auto.record.boundary import Edit, EditPlace, EditsOfModules, install
from tp_ext.auto.record.edits import OTHER, Draw
from tp_ext.common_generator import begin_draw
from tp_ext.group import ParallelGroup
from tp_ext.nn.dropout import dropout_slices, masked

CHECKPOINT = "torch/utils/checkpoint.py"


class _RunningCall:
    """A call of a module that runs now."""

    def __init__(self, begun: PlannedDraws, module: nn.Module | None, draws: Sequence[Draw], next: int = 0) -> None:
        self.begun, self.module, self.draws, self.next = begun, module, draws, next
        self.calls: dict[str, int] = {}  # of modules that draw otherwise at other calls: how often it has called them
        self.planned: dict[
            str, int
        ] = {}  # of those among them whose draws only the place distinguishes: the number in the plan

    def again(self) -> _RunningCall:
        """Returns a copy of the present state, with which the next draws can be recomputed."""
        copy = _RunningCall(self.begun, None, self.draws, self.next)
        copy.calls = dict(self.calls)
        return copy

    def check(self) -> None:
        """Raises a RuntimeError if draws that only their place distinguishes were not as many as in the plan."""
        name = self.begun.module or "the model"
        for module, planned in self.planned.items():
            if self.calls[module] % planned:
                raise RuntimeError(
                    f"{name}: its forward calls {module} {self.calls[module]} times where its plan has {planned} calls "
                    "that mask sharded and other tensors of the same lengths; plan with an example that makes as many "
                    "calls, or use a dropout of its own for each tensor"
                )
        if self.draws and self.next % len(self.draws) and _look_alike(self.draws, self.begun.masks.group.rank):
            raise RuntimeError(
                f"{name}: its forward makes {self.next} random calls where its plan has {len(self.draws)}, that mask "
                "sharded and other tensors of the same lengths; plan with an example that makes as many calls"
            )


def _look_alike(draws: Sequence[Draw], rank: int) -> bool:
    """Returns whether two draws of different masks have tensors of the same lengths."""
    return any(
        draw.mask != other.mask  # those of one rank are all the same
        and draw.call == other.call
        and draw.shape is not None
        and other.shape is not None
        and len(draw.shape) == len(other.shape)
        and all(n is None or m is None or n[rank] == m[rank] for n, m in zip(draw.shape, other.shape, strict=True))
        for draw, other in itertools.combinations(draws, 2)
    )


class SharedMode(TorchFunctionMode):
    """A function mode that edits of several modules share: it is active while one of these runs.

    Once for all modules: with a mode for each, modules around saw a replaced call again (OPT, BART)."""

    def __init__(self) -> None:
        super().__init__()
        self.running: list[Any] = []

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "running": []}

    def begin(self, call: Any) -> None:
        if not self.running:
            self.__enter__()
        self.running.append(call)

    def end(self) -> None:
        self.running.pop()
        if not self.running:
            self.__exit__(None, None, None)


def is_in_checkpoint(module: nn.Module) -> bool:
    """True if a call is in a checkpoint within the forward of its module: what that recomputes has no hooks of it."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if code is nn.Module._call_impl.__code__ and frame.f_locals["self"] is module:
            return False
        if code.co_filename.endswith(CHECKPOINT):
            return True
        frame = frame.f_back
    return False


class Masks(SharedMode):
    """Replaces the random calls of the modules of a model."""

    running: list[_RunningCall]

    def __init__(self, group: ParallelGroup, tokens: TokenLengths | None = None) -> None:
        super().__init__()
        self.group, self.tokens = group, tokens

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout:
            return self.drop(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return self.attention(func, *args, **kwargs)
        # Other operators draw for replicated tensors alone: a plan leaves whole what they read and write
        return func(*args, **kwargs)

    # ------------------------------------------------------------ which draw a call is

    def take(self, call: str, x: Tensor) -> Draw:
        """The draw of a random call that masks x, or of attention with the query x.

        Raises:
            RuntimeError: the plan has none that fits.
        """
        running, planned = self.running[-1], self.planned()
        if planned is not None and planned.call == call and self.fits(planned, x):
            return planned
        fitting = [draw for draw in running.begun.draws if draw.call == call and self.fits(draw, x)]
        # The place does not fit, but all draws that fit the tensor would give the same mask
        if fitting and all(draw.mask == fitting[0].mask for draw in fitting):
            return fitting[0]
        where, planned_calls = running.begun.module or "the model", sorted({draw.call for draw in running.begun.draws})
        raise RuntimeError(
            f"{where}: forward calls F.{call} of a tensor {tuple(x.shape)} where its plan has "
            f"{', '.join(planned_calls) or 'nothing'} of other tensors; plan with an example and a mode in which "
            "forward makes the same calls"
        )

    def planned(self) -> Draw | None:
        """The draw of the plan at the place of the next random call, which may mask another tensor."""
        running = self.running[-1]
        self.keep_for_recomputation(running)
        draws = running.draws
        # A loop may run more often than in the example, so that its draws begin again
        running.next += 1
        return draws[(running.next - 1) % len(draws)] if draws else None

    def fits(self, draw: Draw, x: Tensor) -> bool:
        """True if x has the lengths that do not change from run to run."""
        if draw.shape is None:
            return True
        lengths = [size if size is None else size[self.group.rank] for size in draw.shape]
        return len(lengths) == x.dim() and all(n is None or n == m for n, m in zip(lengths, x.shape, strict=True))

    def keep_for_recomputation(self, running: _RunningCall) -> None:
        """Finds a checkpoint that began in the running call of a module: it will be recomputed without this call, and
        has to find the draws as they are now."""
        if torch.compiler.is_compiling():
            return  # the recomputation is part of the graph
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code is not Recomputed.__call__.__code__:
            code = frame.f_code
            if code is nn.Module._call_impl.__code__ and frame.f_locals["self"] is running.module:
                return
            if code.co_filename.endswith(CHECKPOINT):
                holder, name = _recomputation(frame)
                if holder is not None and not isinstance(getattr(holder, name), Recomputed):
                    setattr(holder, name, Recomputed(getattr(holder, name), self, running.again()))
            frame = frame.f_back

    # ------------------------------------------------------------ masks

    def drop(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0:
            self.planned()  # any tensor: nothing is drawn
            return masked(input, p, training)
        result = self.masked(self.take("dropout", input), input, p)
        return input.copy_(result) if inplace and result is not input else result

    def masked(self, draw: Draw, x: Tensor, p: float) -> Tensor:
        begin_draw((self.group,), x.device)
        # The lengths of shards of tokens are those of the run: the plan does not have them
        if draw.tokens and self.tokens is not None and draw.dim is not None:
            sizes = self.tokens.sizes_of(x, draw.dim)
            dim = None if sizes is None else draw.dim
            return masked(x, p, group=self.group.name, dim=dim, sizes=sizes)
        # All ranks draw the mask of one process for a replicated tensor, so that it stays replicated
        if draw.dim is None:
            return masked(x, p)
        if draw.factor is None:
            raise RuntimeError(
                f"{draw.module or 'the model'}: F.{draw.call} masks a dim that has a sharded factor between lengths of "
                "the example; plan with a dropout above 0"
            )
        factor, group = draw.factor, self.group
        divided, dim = factor.divided(x, draw.dim, factor.local_size(group.rank, group.size))
        slices = factor.sharding(dim).slices(group.rank, group.size)
        return dropout_slices(divided, p, dim, slices, factor.size).reshape(x.shape)

    def attention(
        self,
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
        """softmax(q k^T scale + mask) v with dropout of the weights, as the documentation of torch computes it."""
        # Nothing is drawn: any query will do, and the fused kernels may run
        if not dropout_p:
            self.planned()
            options = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
            return func(query, key, value, attn_mask, dropout_p, **options)
        draw = self.take("scaled_dot_product_attention", query)
        if enable_gqa:
            groups = query.shape[-3] // key.shape[-3]
            key, value = (t.repeat_interleave(groups, -3) for t in (key, value))
        # A fused kernel would draw a mask of its own, which no other number of ranks has
        scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(later, -torch.inf)
        if attn_mask is not None:
            is_mask = attn_mask.dtype == torch.bool
            scores = scores.masked_fill(~attn_mask, -torch.inf) if is_mask else scores + attn_mask
        unseen = (scores == -torch.inf).all(-1, keepdim=True)  # rows that see nothing: zeros, as in torch's own kernels
        weights = scores.masked_fill(unseen, 0.0).softmax(-1).masked_fill(unseen, 0.0)
        return self.masked(draw, weights, dropout_p) @ value


def _recomputation(frame: FrameType) -> tuple[Any, str]:
    """The object that keeps the function which a checkpoint recomputes, with the attribute; (None, ""): no checkpoint
    begins in this frame.

    Raises:
        RuntimeError: this version of torch keeps it elsewhere.
    """
    if frame.f_code is torch.utils.checkpoint.CheckpointFunction.forward.__code__:
        return frame.f_locals["ctx"], "run_function"
    generator = frame.f_locals.get("gen")
    # Other frames of torch's file are wrappers, which keep no function
    if generator is None:
        return None, ""
    holder = generator.gi_frame.f_locals.get("new_frame")
    # An error, since the recomputation would draw other masks than the forward, with wrong gradients
    if not hasattr(holder, "recompute_fn"):
        raise RuntimeError(
            f"torch.utils.checkpoint of torch {torch.__version__} inside of a module's forward cannot be followed; "
            "checkpoint modules, not functions inside of their forward"
        )
    return holder, "recompute_fn"


@dataclass
class Recomputed:
    """A function that a checkpoint recomputes, which draws for a call of a module that has ended."""

    function: Callable[..., Any]
    masks: Masks
    running: _RunningCall

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        running = self.masks.running
        outside = len(running)
        self.masks.begin(self.running.again())
        try:
            return self.function(*args, **kwargs)
        finally:
            # torch stops a recomputation by an exception once it has all tensors, within calls of modules
            while len(running) > outside:
                self.masks.end()


@dataclass
class PlannedDraws(Edit):
    """Random calls of a module in training are replaced while its forward runs.

    Attributes:
        module: its name. draws: its draws, those of one call, or of all calls where these differ.
    """

    module: str
    draws: list[Draw]
    masks: Masks
    by_call: dict[str, list[list[Draw]]] = field(init=False)  # those of each caller, in the order of its calls
    alike: set[str] = field(init=False)  # callers whose draws only the place of a call distinguishes
    place = EditPlace.DRAWS
    is_needed_in_stages = True

    def __post_init__(self) -> None:
        self.by_call = {}
        for draw in self.draws:
            if draw.caller is not None:
                calls = self.by_call.setdefault(draw.caller, [])
                calls += [[] for _ in range(draw.number + 1 - len(calls))]
                calls[draw.number].append(draw)
        self.always = any(draw.always for draw in self.draws)
        rank = self.masks.group.rank
        self.alike = {
            caller
            for caller, calls in self.by_call.items()
            if _look_alike([draw for call in calls for draw in call], rank)
        }

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        # Within a call that draws, a module in eval mode must be the innermost, or it would take draws of its caller
        if module.training or self.always or self.masks.running:
            self.begin(module)

    def begin(self, module: nn.Module) -> None:
        masks, draws = self.masks, self.draws
        if self.by_call and masks.running:
            caller = masks.running[-1]
            masks.keep_for_recomputation(caller)
            number = caller.calls.get(self.module, 0)
            caller.calls[self.module] = number + 1
            calls = self.by_call.get(caller.begun.module, [])
            if calls:
                draws = calls[number % len(calls)]
                if caller.begun.module in self.alike:
                    caller.planned[self.module] = len(calls)
        masks.begin(_RunningCall(self, module, draws))

    def end(self, module: nn.Module, output: Any) -> None:
        running = self.masks.running
        # In eval mode, or after an exception of an earlier hook, no call has begun
        if running and running[-1].begun is self:
            call = running[-1]
            self.masks.end()
            if output is not None:  # no exception
                call.check()


@dataclass
class OtherDraws(Edit):
    """Draws the same on all ranks in a module that calls functions of torch on replicated tensors.

    Attributes:
        always: it draws in eval mode, too.
    """

    group: ParallelGroup
    always: bool
    place = EditPlace.OTHER_DRAWS
    is_needed_in_stages = True

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if module.training or self.always:
            # Nothing says on which device it will draw
            values = (*module.parameters(), *tree_leaves(args))
            on_cuda = next((value.device for value in values if isinstance(value, Tensor) and value.is_cuda), None)
            for device in (torch.device("cpu"), on_cuda):
                if device is not None:
                    begin_draw((self.group,), device)


def draw_edits(draws: Sequence[Draw], group: ParallelGroup, tokens: TokenLengths | None) -> Iterator[tuple[str, Edit]]:
    """The edits of the modules that draw, and of those that call one which draws otherwise at other calls."""
    masks, of_module = Masks(group, tokens), dict[str, list[Draw]]()
    for draw in draws:
        if draw.call == OTHER:
            yield draw.module, OtherDraws(group, draw.always)
        else:
            of_module.setdefault(draw.module, []).append(draw)
    callers = {draw.caller: list[Draw]() for draw in draws if draw.call != OTHER and draw.caller is not None}
    for name, draws_of_module in {**callers, **of_module}.items():
        yield name, PlannedDraws(name, draws_of_module, masks)


def register_draws(model: nn.Module, draws: Sequence[Draw], group: ParallelGroup) -> None:
    """Replaces the random calls of a model that has no other edits."""
    edits: EditsOfModules = {}
    for name, edit in draw_edits(draws, group, None):
        edits.setdefault(model.get_submodule(name), []).append(edit)
    for module, edits_of_module in edits.items():
        install(module, edits_of_module)
