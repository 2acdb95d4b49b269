"""Training over all axes of a mesh: data, pipeline, context and tensor parallelism around one model."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.profiler import record_function
from torch.distributed import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from tp_ext.group import NOT_GIVEN, Group
from tp_ext.mesh import mesh_axes
from tp_ext.model.census import Census, census
from tp_ext.model.known_parameters import KnownParameters
from tp_ext.model.names import name_joined, reset_parameters
from tp_ext.parallel.average_gradients import ignore_experts
from tp_ext.parallel.block_wrappers import wrap_blocks
from tp_ext.parallel.grad_norm import clip_grad_norm_
from tp_ext.parallel.microbatch_tree import MicrobatchTree
from tp_ext.parallel.pipeline.stages import materialise, pipeline_stages
from tp_ext.parallel.pipeline.steps import reshard
from tp_ext.parallel.replicas import replicas_of
from tp_ext.parallel.run_checks import (
    RunOptions,
    check_invariant_blocks,
    check_model,
    check_options,
    note_parallelized,
)
from tp_ext.parallel.step_inputs import StepInputs, on_all_data_ranks
from tp_ext.parallel.step_loss import StepLoss, loss_of_gathered, loss_terms, zero_of_loss
from tp_ext.random import manual_seed


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    schedule: str | None = None,
    microbatches: int = 1,
    loss: Callable[[Any, Tensor], Tensor],
    reduction: str = "mean",
    count: Callable[[Tensor], Tensor | int] | None = None,
    zero: int = 0,
    offload: bool = False,
    recompute: str | None = None,
    compile: bool = False,
    autocast: torch.dtype | None = None,
    seed: int = 0,
    invariant_blocks: int | None = None,
) -> "ParallelRun":
    """Prepares a model for training over all axes of a mesh.

    ::

        mesh = tp_ext.init_mesh("cuda", pp=2, cp=2, tp=8)
        model = GPT(group=mesh["tp"], context_group=mesh["cp"])
        run = tp_ext.parallelize(model, mesh, microbatches=8, loss=loss, zero=2)
        optimizer = run.optimizer(torch.optim.AdamW, lr=3e-4)
        for inputs, target in loader(run.data_rank, run.data_size):
            loss = run.step(inputs, target)
            run.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()

    The loss and the gradients of a step are those of one process that sees the global batch: the mean over the valid
    tokens of all microbatches, data ranks and context ranks. So are the masks of dropout, and the weights of a model
    on meta. The gradients have those of the losses of routers (:class:`tp_ext.ParallelMoE`), as the mean over
    microbatches; the loss that a step returns is without them. It does nothing that these do not do:
    :func:`tp_ext.name_modules`, :func:`tp_ext.reset_parameters`, :func:`tp_ext.random.at`,
    :func:`tp_ext.parallel.pipeline_stages`, :func:`tp_ext.parallel.sum_gradients`; torch's ``checkpoint_wrapper``,
    ``torch.compile``, DDP, ``fully_shard`` and ``ZeroRedundancyOptimizer``.

    Args:
        model: the whole model, its layers made with ``mesh["tp"]`` and ``mesh["cp"]``, expert layers with
            ``mesh["ep"]`` as ``expert_group`` and the other data axes as ``data_groups``; on meta, or with the same
            weights on every rank. Its blocks are those of ``pipeline_parts()``, which a pipeline needs
            (:func:`tp_ext.parallel.pipeline_stages`), the modules of an ``nn.Sequential``, or the model itself.
        mesh: its axes are among ``pp``, ``dp``, ``ep``, ``cp``, ``tp``.
        schedule: of the pipeline, default ``"1F1B"``; without a pipeline microbatches follow one another.
        microbatches: number of slices of a rank's batch along dim 0.
        loss: ``loss(output, target)`` of a microbatch.
        reduction: ``"mean"`` if ``loss`` returns the mean over the valid tokens, ``"sum"`` if it returns their sum,
            which a microbatch without valid tokens needs.
        count: the number of valid tokens of a target, default those that are not -100. If it returns several numbers,
            ``[m]``, ``loss`` returns as many means or sums, each of its own tokens, and the loss is the sum of their
            means: the next token's and those of :class:`tp_ext.MultiTokenPrediction`, for instance.
        zero: the stage of ZeRO over ``dp``, ``ep`` and ``cp`` together, of experts over ``dp`` and ``cp``: 0 shards
            nothing; 1 the states of the optimizer (:meth:`ParallelRun.optimizer`); 2 gradients and parameters, which
            are gathered once in a step; 3 gathers parameters for each forward and each backward of a block. Under a
            pipeline 3 is 2, see there.
        offload: keeps parameters, gradients and states in the host's memory; with ``zero`` 2 or 3.
        recompute: what backward computes again: None, nothing; ``"full"``, the forward of each block; ``"selective"``,
            all of it but matrix products, attention and collectives.
        compile: compiles each block by ``torch.compile``.
        autocast: the dtype of ``torch.autocast`` for forwards and losses; None: no autocast.
        seed: of weights on meta and of masks.
        invariant_blocks: of a model built in :func:`tp_ext.tp_invariant`: the bits of a step are the same for every
            number of ranks of ``dp``, too, which times ``microbatches`` must be this number: the gradients of all
            microbatches are added by one binary tree, in their order in the global batch. Not with ranks of ``pp``,
            ``cp`` and ``ep``, experts, and ``compile``.

    Communicates: the creation of groups; one number over each axis; a checksum per parameter over the data axes; that
    of :func:`tp_ext.parallel.pipeline_stages`; DDP's broadcast.

    Raises:
        TypeError: an argument of another type. ValueError: an option out of its range, ``offload`` without
            ``zero`` 2 or 3, what the schedule cannot combine; a model without a parameter that requires a gradient,
            with other weights on another data rank, or that was parallelized before; layers whose group is another axis
            of the mesh, expert layers over other ranks than its axes; ``zero`` 1, or 2 and 3 with
            ``recompute="selective"``, and experts over several ranks; ``zero`` 2 or 3 and a parameter of which some
            rank has no element. RuntimeError: a pipeline with torch older than 2.15.

    Rajbhandari et al., "ZeRO", arXiv:1910.02054.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: {type(model).__name__} must be an nn.Module")
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh: {type(mesh).__name__} must be a DeviceMesh")
    axes = mesh_axes(NOT_GIVEN, mesh)
    options = RunOptions(
        schedule=schedule,
        microbatches=microbatches,
        loss=loss,
        reduction=reduction,
        count=count or _valid,
        zero=zero,
        offload=offload,
        recompute=recompute,
        compile=compile,
        autocast=autocast,
        invariant_blocks=invariant_blocks,
    )
    check_options(options)
    known = census(model, axes)
    check_invariant_blocks(known, axes, invariant_blocks, microbatches, compile)
    check_model(known, mesh, zero, recompute)
    for layer in known.routing_layers.values():
        if layer.attach_loss is None:  # backward adds the gradient of the routers' losses, the mean over microbatches
            layer.attach_loss = 1 / microbatches
    manual_seed(seed, mesh)
    name_joined(model)
    # Before FSDP2, whose hooks are then around a block's recomputation: the selective one counts operators inside
    whole = wrap_blocks(known, recompute, compile)
    run = ParallelRun(whole, known, mesh, options)
    run.know_parameters()
    note_parallelized(model, whole)
    return run


class ParallelRun:
    """A model that :func:`tp_ext.parallelize` has prepared.

    Attributes:
        state: the module, or the list of this rank's stages, for checkpoints and exports:
            ``tp_ext.save_checkpoint(path, run.state, optimizer, mesh=mesh)``.
        data_rank, data_size: this rank's index among those with other sequences, and their number: the axes ``dp`` and
            ``ep``.
        next_step: the number of the next step, by which masks are drawn; to be set after a checkpoint is loaded.
    """

    def __init__(self, model: nn.Module, known: Census, mesh: DeviceMesh, options: RunOptions) -> None:
        loss, count, zero, microbatches = options.loss, options.count, options.zero, options.microbatches
        self.mesh, self._microbatches, self._zero = mesh, microbatches, zero
        self._data = data = mesh_axes(NOT_GIVEN, mesh).data
        self.data_size, self.data_rank = data.sequences.size, data.sequences.rank
        self._replicas = replicas = replicas_of(mesh)
        self.next_step = 0
        self._device = device = _device(mesh)
        self._autocast = options.autocast
        pp = mesh["pp"] if "pp" in (mesh.mesh_dim_names or ()) else None
        pp = None if pp is None or pp.size() == 1 else pp  # one stage needs no schedule
        sharding: dict[str, Any] = {}
        if zero > 1:
            # Under a pipeline resharding would communicate in each microbatch, so zero = 3 keeps what it gathered.
            # None frees the blocks alone: the loss may read the rest, such as the head, and backward needs it first
            frees = zero == 3 and pp is None
            sharding = replicas.fsdp_options() | {"reshard_after_forward": None if frees else False}
            if options.offload:
                # Memory is pinned by the driver of CUDA; the default, True, raises without one
                sharding["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type == "cuda")

        def summed(output: Any, target: Tensor) -> Tensor:
            # The zero hangs on all outputs: DDP and FSDP2 need gradients of the same parameters on all ranks
            if target.numel() == 0:  # of a data rank without rows: a mean over no tokens is NaN
                zero = torch.stack([one.sum() for one in tree_leaves(output) if isinstance(one, Tensor)]).sum() * 0
                with self._precision():
                    zero = zero + zero_of_loss(loss, output, target)
                return zero * torch.as_tensor(count(target))
            # A schedule calls the loss outside of the context of the forward
            with self._precision():
                value = loss_of_gathered(loss, output, target)
                if options.reduction == "sum":
                    return value  # StepLoss checks it
                # Sums over tokens add up over microbatches and data ranks of unequal lengths; means do not
                counted = torch.as_tensor(count(target))
                return loss_terms(value, counted) * counted

        mean_over: list[Group] = [axis.name for axis in data.axes]
        self._schedule = self._ddp = None
        self._tree: MicrobatchTree | None = None
        self._known: KnownParameters | None = None
        if pp is not None:
            self._schedule = pipeline_stages(
                model,
                pp,
                schedule=options.schedule or "1F1B",
                microbatches=microbatches,
                loss=summed,
                count=count,
                mean_over=mean_over,
                fsdp=sharding or None,
                context=self._context,
                init=reset_parameters,
                device=device,
            )
            self.state: Any = self._schedule.stages
            # DDP's hooks would fire in every microbatch; FSDP2 sums by itself
            if replicas.exist and not sharding:
                self._schedule.reduce_gradients = lambda: replicas.average_gradients(self.state)
            return
        # A tree adds the gradients of data ranks, where the others take their mean
        self._loss = StepLoss(summed, microbatches, count, mean_over, "sum" if options.invariant_blocks else "mean")
        # [Note: one census for each call]: wrap_blocks has replaced blocks, which are found anew, and no experts
        blocks = known.blocks if model is known.model else [model]
        materialise(model, device, reset_parameters, blocks, sharding, known.experts.values())
        self.state = model
        if options.invariant_blocks is not None:
            self._tree = MicrobatchTree(model, options.invariant_blocks, *data.axes)
            return
        # A data axis of one rank is no replica. What FSDP2 shards it also sums
        if replicas.exist and not sharding:
            assert replicas.whole is not None
            if replicas.shards_experts:  # different ones on the ranks of the data axis, which DDP would overwrite
                ignore_experts(model)
            self._ddp = DistributedDataParallel(model, process_group=replicas.whole.get_group())

    def know_parameters(self) -> None:
        """Notes the parameters that data ranks have copies or shards of: each would train others alone."""
        sharded = self._zero > 1
        hooked = not sharded and (self._ddp is not None or self._tree is not None)
        if hooked or sharded:
            stages = self.state if isinstance(self.state, list) else [self.state]
            self._known = KnownParameters(stages, "parallelize", hooked=hooked, sharded=sharded)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yields this rank's parameters, those of its stages under a pipeline."""
        for module in self.state if isinstance(self.state, list) else [self.state]:
            yield from module.parameters()

    def optimizer(self, optimizer_class: type[Optimizer], **options: Any) -> Optimizer:
        """Makes an optimizer of the parameters: with ``zero=1`` a ``ZeroRedundancyOptimizer``, whose state is saved and
        loaded as any other. Communicates nothing but, with ``zero=1``, its constructor's exchange of sizes."""
        if not callable(optimizer_class):
            raise TypeError(f"optimizer_class: {optimizer_class!r} must be a class of torch.optim.Optimizer")
        if options.get("fused") and self._tree is not None:
            raise ValueError("fused: True must not be given with invariant_blocks: its bits depend on the shards")
        if self._zero == 1 and self._replicas.exist:
            assert self._replicas.whole is not None
            group = self._replicas.whole.get_group()
            return ZeroRedundancyOptimizer(self.parameters(), optimizer_class, process_group=group, **options)
        return optimizer_class(self.parameters(), **options)

    def clip_grad_norm_(self, max_norm: float, **options: Any) -> Tensor:
        """Clips the gradients by the norm of those of the whole model: :func:`tp_ext.clip_grad_norm_`."""
        return clip_grad_norm_(self.state, max_norm, mesh=self.mesh, **options)

    def step(self, inputs: Any, target: Tensor, **keywords: Any) -> Tensor:
        """Runs forward and backward of all microbatches, and adds the complete gradients to those that there are.

        Args:
            inputs: the first argument of the model, or a tuple of arguments; this rank's batch, cut along dim 0 into
                microbatches. A batch of 0 rows counts as no tokens. The same on all ranks of ``tp`` and ``pp``; over
                ``cp`` the rank's tokens.
            target: of the loss, cut in the same way.
            keywords: of the model or, under a pipeline, of those parts that take them; tensors are cut along dim 0. A
                :class:`ContextLayout` of a microbatch, ``layout``, also says where this rank's tokens are, for masks.
                A list has one for each microbatch: packed sequences, of equally many tokens in all microbatches of
                all data ranks.

        Returns:
            0-d, fp64: the mean loss over the valid tokens of the global batch, the same on all ranks.

        Communicates: what the layers do; over the data axes the number of tokens, one number for which the host waits
        (whether the batches of all ranks are valid), and the gradients, once.

        Raises:
            ValueError: ``microbatches`` does not divide the batch; a list of layouts of another length, or of unequal
                numbers of tokens; parameters that were replaced, added, removed, frozen, unfrozen or converted since
            :func:`parallelize`, where data ranks have copies of them. TypeError: no tensor, no layout. On all data
            ranks, if one of them finds it.
        """
        value = self._run(inputs, target, keywords, train=True)
        self.next_step += 1
        return value

    def evaluate(self, inputs: Any, target: Tensor, **keywords: Any) -> Tensor:
        """Runs the forward of all microbatches in evaluation mode, without gradients, for the arguments of
        :meth:`step`, which also says what is returned, communicated and raised. Gradients stay as they are."""
        modules = self.state if isinstance(self.state, list) else [self.state]
        # Not by train() of the whole: modules that were in evaluation mode stay in it
        training = [one for module in modules for one in module.modules() if one.training]
        for module in modules:
            module.eval()
        try:
            with torch.no_grad():
                value = self._run(inputs, target, keywords, train=False)
            # No backward comes that frees what FSDP2 has gathered; the next step would compute with old weights
            reshard(modules)
        finally:
            for one in training:
                one.training = True
        return value

    @property
    def bubble(self) -> float | None:
        """The idle share of the last step of a pipeline, see :func:`tp_ext.parallel.pipeline_stages`; None without
        one."""
        return None if self._schedule is None else self._schedule.bubble

    @property
    def ideal_bubble(self) -> float | None:
        """The idle share if all stages cost the same; None without a pipeline, and if its schedule splits the
        backward."""
        return None if self._schedule is None else self._schedule.ideal_bubble

    def _run(self, inputs: Any, target: Tensor, keywords: dict[str, Any], *, train: bool) -> Tensor:
        """Runs all microbatches, with their backward or without; returns the loss."""

        def checked() -> StepInputs:
            if train and self._known is not None:
                self._known.check()
            return StepInputs(inputs, target, keywords, self._microbatches, self.data_rank)

        # Before any collective of the layers: with a bad batch on one rank the others would wait in theirs
        self._inputs = on_all_data_ranks(checked, self._data, self._device)
        try:
            if self._schedule is not None:
                # Users set this number after a checkpoint is loaded, not that of the schedule
                self._schedule.next_step = self.next_step
                args, named = self._inputs.of_schedule()
                (self._schedule.step if train else self._schedule.eval)(*args, **named)
                return self._schedule.loss
            self._loss.begin([target], self._device)
            if train and self._tree is not None:
                self._tree.begin()
            for i, microbatch in enumerate(zip(*self._inputs.microbatches(), strict=True)):
                (self._train if train else self._evaluate)(i, *microbatch)
            if train and self._ddp is not None:
                # DDP ignores experts that ep shards
                self._replicas.average_expert_gradients(self.state)
            if self._tree is None:
                return self._loss.mean()
            if train:
                self._tree.finish()
            return self._loss.of_sums(self._tree.losses(self._loss.terms()))
        finally:
            del self._inputs  # they may be large

    def _train(self, i: int, args: Any, named: dict[str, Any], target: Tensor) -> None:
        last = i == self._microbatches - 1
        if isinstance(self.state, FSDPModule):
            # Gradients add up on each rank; the sum over the data ranks is needed once. A tree takes each microbatch's
            self.state.set_requires_gradient_sync(last or self._tree is not None)
        # Around the forward, too, in which DDP decides whether its backward reduces
        with self._ddp.no_sync() if self._ddp is not None and not last else nullcontext():
            with record_function(f"forward {i}"), self._context(self.next_step, i):
                value = self._loss((self._ddp or self.state)(*args, **named), target)
            # Outside of the context: a backward must not run under autocast
            with record_function(f"backward {i}"):
                value.backward()
        if self._tree is not None:
            self._tree.add()

    def _evaluate(self, i: int, args: Any, named: dict[str, Any], target: Tensor) -> None:
        with self._context(self.next_step, i):
            self._loss(self.state(*args, **named), target)

    def _context(self, step: int, microbatch: int) -> AbstractContextManager[Any]:
        """Returns the context of a forward: its random numbers and its precision."""
        stack = ExitStack()
        stack.enter_context(self._inputs.random_numbers(step, microbatch))
        stack.enter_context(self._precision())
        return stack

    def _precision(self) -> AbstractContextManager[Any]:
        if self._autocast is None:
            return nullcontext()
        return torch.autocast(self._device.type, self._autocast)


def _valid(target: Tensor) -> Tensor:
    return (target != -100).sum()


def _device(mesh: DeviceMesh) -> torch.device:
    kind = mesh.device_type
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
