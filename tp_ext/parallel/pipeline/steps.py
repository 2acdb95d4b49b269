"""The steps of a pipeline: those of torch's schedules, with checks, counts of tokens and tied gradients around them."""

import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import _utils
from torch.distributed.pipelining.microbatch import split_args_kwargs_into_chunks

from tp_ext._object_collectives import all_gather_objects, call_and_gather
from tp_ext.parallel.pipeline.clock import Clock, TimedStage
from tp_ext.parallel.pipeline.parts import ReadParameterError
from tp_ext.parallel.pipeline.shapes import Shape, ShapeModel, StageShapes, calls_of_checkpoint
from tp_ext.parallel.pipeline.tied import TiedWeights
from tp_ext.parallel.schedules import Schedule, check_hooks, refuse_recomputation
from tp_ext.parallel.step_loss import StepLoss
from tp_ext.random_scope import base

_OPTIONS = {"return_outputs", "loss_kwargs", "finalize_gradients"}  # of torch's step; other keywords are the model's


class PipelineShapeWarning(UserWarning):
    """A warning that the shapes between stages could not be computed without running the model."""


class Batch(NamedTuple):
    """The shapes of one microbatch, as far as this rank was given them: of the arguments and of the target."""

    inputs: tuple[Shape, ...] | None
    target: Shape | None


class PipelineSetup(NamedTuple):
    """The stages, groups and options of a pipeline, as its steps use them.

    Attributes:
        schedule: the schedule.
        rank_of: stage -> the rank in the pipeline that has it.
        keywords: the keyword arguments that some part of the model takes; None if any.
        sharded: whether FSDP2 shards the stages.
        context: (step, microbatch) -> the context of a forward.
    """

    schedule: Schedule
    group: ProcessGroup
    device: torch.device
    stages: Mapping[int, nn.Module]
    rank_of: dict[int, int]
    torch_stages: list[TimedStage]
    loss: StepLoss
    clock: Clock
    tied: TiedWeights
    keywords: frozenset[str] | None
    microbatches: int
    sharded: bool
    context: Callable[[int, int], AbstractContextManager[Any]]


class PipelineSteps:
    """A schedule of torch with its stages, see :func:`tp_ext.parallel.pipeline_stages`.

    Attributes:
        stages: the modules of this rank's stages, with the names of the whole model; functions of whole models take the
            list as their module.
        next_step: the number of the next step, which ``context`` gets; to be set after a checkpoint is loaded.
        reduce_gradients: None, or a function without arguments that reduces the gradients over data-parallel ranks. It
            is called at the end of each backward, before gradients of tied weights are summed over stages, so that
            all copies get the same bits.
    """

    stages: list[nn.Module]
    next_step: int
    reduce_gradients: Callable[[], None] | None
    _setup: PipelineSetup
    _batch: Batch | None

    def set_up(self, setup: PipelineSetup, shapes: ShapeModel) -> None:
        """Completes a new schedule."""
        self._setup, self._batch, self._shapes = setup, None, shapes
        self.stages, self.next_step = list(setup.stages.values()), 0
        self.reduce_gradients = None
        self._losses: Tensor | None = None
        self._loss: Tensor | None = None
        self._loss_checked = False
        self._trained = False  # whether the last step has computed gradients, so that all ranks know that it has losses
        self._trainable: dict[str, bool] = {}
        for stage in setup.torch_stages:
            stage.register_forward_context(partial(self._context_of, stage.stage_index))

    def _context_of(self, stage: int, info: Any) -> AbstractContextManager[Any]:
        # Modules without a name draw by it: those of two stages on a rank would draw the same numbers
        base.stage = stage
        return self._setup.context(self.next_step, info.microbatch_index)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yields the parameters of this rank's stages."""
        for stage in self.stages:
            yield from stage.parameters()

    @property
    def losses(self) -> Tensor:
        """The loss of each microbatch of the last step, ``[microbatches]``, in fp64, the same on all ranks of the
        pipeline; all of them must read it. Communicates, when first read: a broadcast over the pipeline.

        Raises:
            RuntimeError: there was no step, or the last one was an evaluation without target.
        """
        if self._losses is None:
            self._losses = self._from_last_stage("losses", self._setup.microbatches, StepLoss.losses)
        return self._losses

    @property
    def loss(self) -> Tensor:
        """The loss of the last step, in fp64: the mean of ``losses``; with ``count``, their sum divided by the tokens,
        over the ranks of ``mean_over``. As ``losses``, with an all-reduce over each axis of ``mean_over``.
        """
        if self._loss is None:
            self._loss = self._from_last_stage("loss", 1, StepLoss.mean).reshape(())
        return self._loss

    @property
    def bubble(self) -> float:
        """The idle share of the ranks of the pipeline in the last step: one minus the time of forward and backward
        passes, loss included, over all ranks, divided by the number of ranks times the longest step of a rank.
        Collectives of the layers count as computation, messages between stages do not.

        Communicates, each time: an exchange of two numbers over the pipeline, which all its ranks must read.

        Raises:
            RuntimeError: there was no step.
        """
        self._check_stepped("bubble")
        seconds = all_gather_objects(self._setup.clock.seconds(), self._setup.group)
        return 1 - sum(busy for busy, _ in seconds) / (len(seconds) * max(step for _, step in seconds))

    @property
    def ideal_bubble(self) -> float | None:
        """The idle share if all stages cost the same and messages nothing: (p - 1) / (m v + p - 1) for p ranks, m
        microbatches and v stages on each rank. None for schedules that split the backward."""
        setup = self._setup
        return setup.schedule.bubble(setup.group.size(), setup.microbatches, len(setup.stages))

    def step(
        self,
        *inputs: Any,
        target: Tensor | None = None,
        losses: list[Tensor] | None = None,
        arg_mbs: Any = None,
        kwarg_mbs: Any = None,
        target_mbs: Any = None,
        **options: Any,
    ) -> Any:
        """Runs one step of torch's schedule: forward and backward of all microbatches. Gradients are added to those
        that there are, and complete but for data parallelism's sum where FSDP2 is not in the stages.

        ``eval`` takes the same arguments and runs the forwards alone, without gradients; the modules keep their mode.

        Args:
            inputs: the arguments of the first stage for the whole batch, cut along dim 0.
            target: the target of ``loss`` for the whole batch, cut along dim 0.
            losses: a list that receives the loss of each microbatch, on the rank of the last stage.
            arg_mbs, kwarg_mbs, target_mbs: lists of the arguments, keyword arguments and target of each microbatch, in
                place of inputs, keyword arguments and target.
            options: those of torch's ``step``, and keyword arguments of the parts of the model; tensors are cut along
                dim 0 and must be given on all ranks. ``return_outputs=False``: the last stage does not keep and return
                the outputs of all microbatches.

        Raises:
            TypeError: a keyword that no part takes; no inputs for the first stage or no target for the last; inputs,
                target or keywords together with those of microbatches.
            ValueError: a batch that ``microbatches`` does not divide, or of another shape than in the first step; a
                parameter whose ``requires_grad`` is not that of the first step. In the first step, which exchanges
                shapes, these are raised on every rank of the pipeline; later, too, if all are given inputs and target,
                else on those which see them.
            RuntimeError: under ``torch.no_grad()``. In the first step: its call on fake tensors has left some outside
                of the model, as in a cache.
        """
        setup, last = self._setup, self._setup.torch_stages[-1].num_stages - 1
        keywords = {name: value for name, value in options.items() if name not in _OPTIONS}
        given_names = keywords.keys() | (kwarg_mbs[0].keys() if kwarg_mbs else set())
        # None: a part takes any keyword. A misspelt one would be dropped without a word: no part of this stage has it
        unknown = set() if setup.keywords is None else given_names - setup.keywords
        if unknown:
            raise TypeError(f"step: {sorted(unknown)[0]!r} must be an argument of a part of the model")
        training = bool(self._has_backward)  # type: ignore[attr-defined]
        if training and not torch.is_grad_enabled():
            raise RuntimeError("step: must not run under torch.no_grad(); eval runs the forwards alone")

        def batch() -> Batch:  # not called here: in the first step its errors are exchanged
            mixed = [*(["inputs"] if inputs else []), *([] if target is None else ["target"]), *keywords]
            if mixed and not (arg_mbs is None and kwarg_mbs is None and target_mbs is None):
                raise TypeError(
                    f"{mixed[0]}: must not be given together with arg_mbs, kwarg_mbs or target_mbs, the arguments of "
                    "each microbatch"
                )
            return self._batch_of(inputs, target, arg_mbs, target_mbs)

        if self._batch is None:
            self._begin_first(batch, keywords, kwarg_mbs)
        else:
            self._check_same(batch(), self._batch, training)
            self._check_keywords(keywords, self._batch)
        if training:
            self._check_trainable()
        # All ranks may be given everything; what is for other stages does not go on to torch's step
        if any(stage.is_first for stage in setup.torch_stages):
            given = {"arg_mbs": arg_mbs}
        else:
            inputs, given = (), {"arg_mbs": None}
        on_last = last in setup.stages
        if not on_last:
            target = target_mbs = None
        if arg_mbs is not None or kwarg_mbs is not None or target_mbs is not None:
            given |= {"kwarg_mbs": kwarg_mbs, "target_mbs": target_mbs}
        self._losses = self._loss = None
        self._trained = False
        self._internal_losses: list[Tensor] = []  # those of a step that an exception ended
        if on_last:  # targets come before the first microbatch, for a mean over the tokens of all of them
            setup.loss.begin(target_mbs if target is None else [target], setup.device)
        if training:  # puts aside what earlier steps have summed over the stages already
            setup.tied.begin()
        try:
            with setup.clock.step(), torch.set_grad_enabled(training):
                result = super().step(*inputs, target=target, **given, **options)  # type: ignore[misc]
            self._check_loss()
        except BaseException:  # as before the step, also after Ctrl-C: who catches it may go on
            setup.tied.restore()
            setup.loss.begin(None, setup.device)
            raise
        if training:
            if self.reduce_gradients is not None:  # first: tied sums add means over data ranks
                self.reduce_gradients()
            setup.tied.finish(options.get("finalize_gradients", True) or not setup.sharded)
            self.next_step += 1
            self._trained = True
        elif setup.sharded:  # forward alone leaves the parameters whole, the backward that frees them does not come
            reshard(self.stages)
        if losses is not None and on_last and setup.loss.values:
            # Those of the user's loss; torch's own list has the scaled ones
            losses[:] = setup.loss.values[-setup.microbatches :]
        return result

    def _batch_of(self, inputs: tuple[Any, ...], target: Any, arg_mbs: Any, target_mbs: Any) -> Batch:
        """Returns the shapes of a microbatch.

        Raises:
            ValueError: the microbatches do not divide the batch or have different shapes.
        """
        count = self._setup.microbatches
        if arg_mbs is not None:
            args: tuple[Shape, ...] | None = _same_shapes("arg_mbs", arg_mbs, count)
        else:
            args = tuple(_microbatch("inputs", one, count) for one in inputs) if inputs else None
        if target_mbs is not None:
            goal: Shape | None = _same_shapes("target_mbs", [(one,) for one in target_mbs], count)[0]
        else:
            goal = None if target is None else _microbatch("target", target, count)
        return Batch(args, goal)

    def _maybe_compute_loss(self, stage: Any, output: Any, target_mbs: Any, *others: Any) -> None:
        if target_mbs is not None:  # in evaluation there may be none
            super()._maybe_compute_loss(stage, output, target_mbs, *others)  # type: ignore[misc]

    def _begin_first(self, batch: Callable[[], Batch], keywords: dict[str, Any], kwarg_mbs: Any) -> None:
        """Compares the batch over the ranks and gives the stages their shapes. Communicates: one exchange of shapes."""
        setup = self._setup
        training = bool(self._has_backward)  # type: ignore[attr-defined]

        def checked() -> tuple[Batch, list[tuple[str, bool, bool]]]:
            # Again: hooks may have been registered since the stages were made
            check_hooks(setup.schedule, self.stages)
            return batch(), setup.tied.states()

        found = call_and_gather(setup.group, checked)
        known = Batch(
            next((one.inputs for one, _ in found if one.inputs is not None), None),
            next((one.target for one, _ in found if one.target is not None), None),
        )
        # Only the ranks that need them must be given inputs and target; who is given more is compared, too
        at_first, at_last = (found[setup.rank_of[stage]][0] for stage in (0, max(setup.rank_of)))
        if at_first.inputs is None or known.inputs is None:
            raise TypeError("inputs: must be given on the ranks of the first stage")
        if training and at_last.target is None:
            raise TypeError("target: must be given on the ranks of the last stage")
        for one, _ in found:
            self._check_same(one, known, training=False)
        states = sorted({state for _, copies in found for state in copies})
        # Sorted by name, so two copies that differ are neighbours; else one stage would wait for the other's gradient
        for state, following in itertools.pairwise(states):
            name, has_main, _ = state
            if name == following[0]:
                what = "require a gradient" if has_main == following[1] else "have main_grad"
                raise ValueError(f"model: {name!r} must {what} on all stages that have the weight or on none")

        def leaves_fakes(inputs: Sequence[Shape] = known.inputs) -> bool:
            self._check_keywords(keywords, known)
            chunks = keywords and split_args_kwargs_into_chunks((), keywords, setup.microbatches)[1]
            self._set_shapes(inputs, (kwarg_mbs or chunks or [{}])[0])  # those of one microbatch
            return self._shapes.close()

        # Found on one rank: all raise, since the others would wait for the activations of its stage
        if any(call_and_gather(setup.group, leaves_fakes)):
            raise RuntimeError(
                "model: its call on fake tensors, for the shapes between the stages, has left some outside of the "
                "model, as in a functools.lru_cache of tables, which a forward must not use; keep what forward "
                "computes in buffers or attributes of the modules"
            )
        self._batch, self._trainable = known, self._requires_grad()

    def _set_shapes(self, inputs: Sequence[Shape], keywords: dict[str, Any]) -> None:
        """Gives torch's stages the shapes of inputs and outputs, so that no forward runs to find them."""
        setup = self._setup
        called: list[str] = []
        try:
            watched = calls_of_checkpoint() if setup.schedule.splits else nullcontext(called)
            with setup.context(self.next_step, 0), watched as called:
                shapes = self._shapes.run(inputs, keywords)
            metas = {stage.stage_index: _stage_meta(shapes[stage.stage_index]) for stage in setup.torch_stages}
        except ReadParameterError as error:  # of the model, not of its being fake
            raise ValueError(str(error)) from error
        # A model may do anything that fake tensors cannot, such as branch on values: slower then, not wrong
        except Exception as error:
            warnings.warn(
                f"the shapes between the stages cannot be computed without running the model ({type(error).__name__}: "
                f"{error}), so the first step runs one more forward and backward to find them",
                PipelineShapeWarning,
                stacklevel=5,
            )
            metas = {}
        if called:
            refuse_recomputation(setup.schedule, called[0])
        for stage in setup.torch_stages:
            if stage.stage_index in metas:
                # Its constructor would take them, but the shapes of a batch are known since the first step only
                stage._user_meta = metas[stage.stage_index]

    def _requires_grad(self) -> dict[str, bool]:
        return {name: param.requires_grad for stage in self.stages for name, param in stage.named_parameters()}

    def _check_trainable(self) -> None:
        """Raises ValueError if other parameters require a gradient than in the first step."""
        now = self._requires_grad()
        if now != self._trainable:
            changed = [name for name in [*now, *self._trainable] if now.get(name) != self._trainable.get(name)]
            raise ValueError(
                f"model: requires_grad of {changed[0]!r} must be as in the first step, which says between which stages "
                "gradients are sent; make the stages again to freeze or train other parameters"
            )

    def _check_keywords(self, keywords: Mapping[str, Any], batch: Batch | None) -> None:
        """Raises ValueError if a tensor would be cut along a dim other than the batch's."""
        shapes = batch.inputs if batch is not None and batch.inputs else ()
        length = self._setup.microbatches * shapes[0].shape[0] if shapes and shapes[0].shape else None
        for name, value in keywords.items():
            if isinstance(value, Tensor) and length is not None and (value.dim() == 0 or len(value) != length):
                raise ValueError(
                    f"{name}: shape {tuple(value.shape)} must have the {length} rows of the batch, along which it "
                    "is cut; pass kwarg_mbs=, the keyword arguments of each microbatch, for others"
                )

    def _check_loss(self) -> None:
        """Raises ValueError if the first loss has read what it must not. Communicates: an exchange until it has run."""
        if not self._loss_checked:
            loss = self._setup.loss
            ranks = all_gather_objects((bool(loss.values), loss.misread), self._setup.group)
            if misread := next((text for _, text in ranks if text), ""):
                raise ValueError(misread)
            self._loss_checked = any(has_run for has_run, _ in ranks)

    def _check_same(self, batch: Batch, known: Batch, training: bool) -> None:
        """Raises ValueError if a batch has another shape than the known one, as far as this rank sees it."""
        stages = self._setup.torch_stages
        if training and batch.inputs is None and any(stage.is_first for stage in stages):
            raise TypeError("inputs: must be given on the ranks of the first stage")
        if training and batch.target is None and any(stage.is_last for stage in stages):
            raise TypeError("target: must be given on the ranks of the last stage")
        for name, one, other in (("inputs", batch.inputs, known.inputs), ("target", batch.target, known.target)):
            if one is not None and other is not None and one != other:
                raise ValueError(
                    f"{name}: microbatches of {_described(one)} must be of {_described(other)}, as in the first step; "
                    "fill a last short batch up with ignored targets, or leave it out"
                )

    def _from_last_stage(self, name: str, length: int, of: Callable[[StepLoss], Tensor]) -> Tensor:
        self._check_stepped(name)
        setup, last = self._setup, max(self._setup.rank_of)
        # First whether there are losses, which only the last stage knows after an evaluation
        value = torch.zeros(1 + length, dtype=torch.float64, device=setup.device)
        if last in setup.stages and setup.loss.values:
            value[0], value[1:] = 1, of(setup.loss)
        dist.broadcast(value, group=setup.group, group_src=setup.rank_of[last])
        if not self._trained and not value[0]:
            raise RuntimeError(f"{name}: there must be a step with a target first")
        return value[1:]

    def _check_stepped(self, name: str) -> None:
        if self._batch is None:
            raise RuntimeError(f"{name}: there must be a step first")


def reshard(modules: Sequence[nn.Module]) -> None:
    """Frees the parameters that FSDP2 has gathered for an evaluation, so that the next step gathers new values."""
    for module in modules:
        for one in module.modules():
            if isinstance(one, FSDPModule):
                one.reshard()


def _microbatch(name: str, given: Any, count: int) -> Shape:
    if not isinstance(given, Tensor):
        raise TypeError(f"{name}: {type(given).__name__} must be a tensor; other arguments are keyword arguments")
    if given.dim() == 0 or len(given) % count:
        raise ValueError(f"{name}: shape {tuple(given.shape)} must be a multiple of {count} microbatches in dim 0")
    return _contiguous(torch.Size([len(given) // count, *given.shape[1:]]), given)


def _same_shapes(name: str, given: Any, count: int) -> tuple[Shape, ...]:
    rows = [tuple(_contiguous(one.shape, one) for one in microbatch) for microbatch in given]
    if len(rows) != count:
        raise ValueError(f"{name}: {len(rows)} entries must be {count}, one for each microbatch")
    for shapes in rows:
        if shapes != rows[0]:
            raise ValueError(f"{name}: {_described(shapes)} must be {_described(rows[0])}, as in the first microbatch")
    return rows[0]


def _contiguous(shape: torch.Size, like: Tensor) -> Shape:
    # As of a contiguous tensor: batches that differ in strides alone are the same to the stages
    return Shape.of(torch.empty(shape, dtype=like.dtype, device="meta", requires_grad=like.requires_grad))


def _described(shapes: Any) -> str:
    if isinstance(shapes, Shape):
        return f"{list(shapes.shape)} {str(shapes.dtype).removeprefix('torch.')}"
    return ", ".join(map(_described, shapes))


def _stage_meta(shapes: StageShapes) -> Any:
    return _utils._StageMeta(
        inputs=tuple(_utils._TensorMeta(*shape) for shape in shapes.inputs),
        outputs=tuple(_utils._TensorMeta(*shape) for shape in shapes.outputs),
    )
