"""Pipelines: the stages of a model over the ranks of a pipeline, under a schedule of torch.distributed.pipelining."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MappingProxyType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from tp_ext.group import Group, ParallelGroup, global_ranks, process_group
from tp_ext.model.census import Census, census
from tp_ext.model.coalesce import uncoalesce_gradients
from tp_ext.model.layouts import MIRRORED
from tp_ext.model.names import name_joined, reset_parameters
from tp_ext.parallel.pipeline.clock import Clock, TimedStage
from tp_ext.parallel.pipeline.parts import parts_of, watch_reads
from tp_ext.parallel.pipeline.shapes import Precision, ShapeModel
from tp_ext.parallel.pipeline.split import Split, split_blocks
from tp_ext.parallel.pipeline.steps import PipelineSetup, PipelineSteps
from tp_ext.parallel.pipeline.tied import TiedWeights
from tp_ext.parallel.run_checks import check_model_is_new, check_shards, note_parallelized
from tp_ext.parallel.schedules import (
    check_microbatches,
    check_pipeline_model,
    known_schedule,
    number_of_stages_per_rank,
)
from tp_ext.parallel.step_loss import StepLoss

Fsdp = None | DeviceMesh | Mapping[str, Any]


def pipeline_stages(
    model: nn.Module,
    mesh: Group,
    *,
    schedule: str = "1F1B",
    microbatches: int,
    loss: Callable[..., Tensor],
    split: Split = None,
    fsdp: Fsdp = None,
    stages_per_rank: int | None = None,
    count: Callable[[Tensor], Tensor | int] | None = None,
    mean_over: Group | list[Group] = None,
    gradient_reduction: str = "mean",
    context: Callable[[int, int], AbstractContextManager[Any]] | None = None,
    init: Callable[[nn.Module], None] | None = None,
    device: torch.device | str | None = None,
) -> Any:
    """Makes the stages of a model over the ranks of a pipeline, and a schedule of ``torch.distributed.pipelining`` that
    runs them.

    ::

        schedule = tp_ext.parallel.pipeline_stages(model, mesh["pp"], microbatches=8, loss=loss)
        optimizer = torch.optim.AdamW(schedule.parameters())
        for ids, target in batches:
            schedule.step(ids, target=target, return_outputs=False)
            tp_ext.clip_grad_norm_(schedule.stages, 1.0, mesh=mesh)
            optimizer.step()
            optimizer.zero_grad()

    The gradients of a step are those of the same batch in one process: of the mean of ``loss`` over the microbatches,
    or, with ``count``, of the sum of ``loss`` divided by the number of tokens, however unevenly the microbatches have
    them.

    The result is torch's schedule (``isinstance(schedule, torch.distributed.pipelining.Schedule1F1B)``) with, in
    addition: ``stages``, the modules of this rank's stages, which functions of whole models take as their module, and
    whose parameters have the names of the whole model; ``parameters()``; ``losses``, ``loss`` and ``bubble`` of the
    last step, ``ideal_bubble``; ``next_step``. Its ``step`` takes inputs and target on every rank, and uses them where
    they belong. No forward runs but those of the microbatches: shapes between stages come from one call of the model on
    fake tensors.

    The blocks are those of ``model.pipeline_parts()``, which returns ``(first, blocks, last)``: what comes before the
    blocks, a list of the blocks, and what comes after; ``first`` and ``last`` are a module, a function without
    parameters, a list of both, or None. The parts are applied one after the other, each to the result of the one before
    (a tuple: several arguments). All parts of an ``nn.Sequential`` are blocks. The stages have the modules of ``model``
    itself, which is not to be used any more.

    A weight that is tied over stages is a copy on each of them (:func:`tp_ext.declare_tied`); ``step`` sums its
    gradients.

    Args:
        model: the whole model, unsharded along the pipeline; its layers may have a tensor-parallel and a context group.
            On meta, only the stages of this rank get memory.
        mesh: the pipeline, ``mesh["pp"]``.
        schedule: ``"GPipe"``, ``"1F1B"``, ``"LoopedBFS"``, ``"Interleaved1F1B"``, ``"InterleavedZeroBubble"``,
            ``"ZBVZeroBubble"`` or ``"DualPipeV"``. The last three split the backward: gradients of weights are then not
            coalesced (:func:`tp_ext.uncoalesce_gradients`).
        microbatches: number of slices of a batch along dim 0.
        loss: ``loss(output, target)`` of a microbatch, a mean; with ``count`` a sum.
        split: how blocks are assigned to stages, at least one each: None, the same number; ``"parameters"``, by the
            number of their full parameters, those of the first and last part included; a list of the numbers of blocks
            of the stages; or a list of costs, of the blocks or of first part, blocks and last part.
        fsdp: a mesh along which FSDP2 shards the parameters, ``mesh["dp"]``, or options of ``fully_shard`` with it:
            each block, and the rest of each stage. An option ``expert_mesh`` is the mesh of the experts of
            :class:`tp_ext.ParallelMoE`, without the axis that shards them. Parameters are kept after forward, since
            resharding them loses gradients under schedules that split the backward.
        stages_per_rank: default 2 for schedules with several stages on a rank.
        count: the number of tokens of a target, such as ``lambda target: (target != -100).sum()``; or several numbers,
            ``[m]``, for a ``loss`` of as many sums, each divided by its own number.
        mean_over: the ranks that have other tokens of the same step, as in ``vocab_parallel_cross_entropy``; with
            ``count``.
        gradient_reduction: how data parallelism combines their gradients: ``"mean"`` (FSDP2, DDP) or ``"sum"``, with
            ``count``.
        context: ``context(step, microbatch)`` returns a context manager around the forward of each microbatch, for
            random numbers that are those of the model in one process. Steps are counted by ``schedule.next_step``.
        init: initialises a stage of a model on meta, in place; default: ``reset_parameters()`` of each of its modules.
            Buffers that are not on meta keep their values.
        device: default: that of the parameters, or for a model on meta the current device of the kind of ``mesh``.

    Communicates: one message for each copy of a tied weight. A step: messages between neighbouring stages, twice the
    gradient of each tied weight; in the first step two exchanges of objects over the pipeline, of shapes.

    Raises:
        TypeError: a model without parts; a loss, context or init that is no function; a schedule that is no name.
        ValueError: an unknown schedule or a number of microbatches or stages that it cannot run; fewer blocks than
            stages, another split; a tensor of the model in no part, a module in two stages; a model that is already
            sharded by ``fully_shard``, or parallelized; a tensor on meta that would get no value; with ``fsdp``, a
            weight tied between two blocks of one stage, or of which some rank has no element, or the pipeline's axis,
            or a mesh over which experts are sharded already.
            Under a schedule that splits the backward: compiled modules, recomputation, parameters with
            post-accumulate-grad hooks.
        RuntimeError: torch older than 2.15.

    Warns:
        PipelineShapeWarning: in the first step: the model cannot be called on fake tensors.

    Huang et al., "GPipe", arXiv:1811.06965; Narayanan et al., "Megatron-LM", arXiv:2104.04473; Lamy-Poirier,
    "Breadth-First Pipeline Parallelism", arXiv:2211.05953; Qi et al., "Zero Bubble Pipeline Parallelism",
    arXiv:2401.10241; DeepSeek-AI, "DeepSeek-V3", arXiv:2412.19437.
    """
    known = known_schedule(schedule)
    group = process_group(mesh)
    ranks, rank = group.size(), group.rank()
    per_rank = number_of_stages_per_rank(known, stages_per_rank)
    number = ranks * per_rank
    check_microbatches(known, microbatches, ranks, number)
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: {type(model).__name__} must be an nn.Module")
    for name, function, arguments in (("context", context, "the step and the microbatch"), ("init", init, "a module")):
        if function is not None and not callable(function):
            raise TypeError(f"{name}: {function!r} must be a function of {arguments}, or None")
    step_loss = StepLoss(loss, microbatches, count, mean_over, gradient_reduction)
    options = _fsdp_options(fsdp)
    whole = census(model)
    check_model_is_new(model)
    if options:
        check_shards(whole)
    parts = parts_of(whole)
    modules = [part.function for part in parts.all if isinstance(part.function, nn.Module)]
    check_pipeline_model(known, whole, modules)
    modules_of_stages = parts.stages(split_blocks(split, len(parts.blocks), number, parts.sizes), model.training)
    own_stages = {stage: modules_of_stages[stage] for stage in known.stages_of(rank, ranks, per_rank)}
    owner_of = {stage: owner for owner in range(ranks) for stage in known.stages_of(owner, ranks, per_rank)}
    copies = TiedWeights(whole, modules_of_stages, own_stages, owner_of, group)
    _check_meta(modules, init)
    if options:
        _check_sharding(modules_of_stages, [part.name for part in parts.blocks])
        _check_axis(options["mesh"], group)
        _check_expert_mesh(whole, options)
    stage_device = _device(model, mesh, device)

    # All checks have passed: from here on the model changes
    name_joined(model)
    for stage in own_stages.values() if known.splits else ():
        uncoalesce_gradients(stage)
    policy = options.get("mp_policy")
    ignored = frozenset(map(id, options.get("ignored_params") or ()))
    precision = Precision(getattr(policy, "param_dtype", None), getattr(policy, "output_dtype", None), ignored)
    # Before FSDP2 shards the parameters
    shapes = ShapeModel(modules_of_stages, stage_device, precision)
    # Before memory and shards: a copy is a parameter of its own to the initialiser and to FSDP2
    copies.separate()
    blocks = [cast(nn.Module, part.function) for part in parts.blocks]
    for stage in own_stages.values():
        materialise(stage, stage_device, init, blocks, options, whole.experts.values())
    # Only now do the stages have values, on meta each its own
    copies.equalise()
    # Those of other stages that this rank has nevertheless, as it has the whole model; it does not keep them alive
    own = {id(param) for stage in own_stages.values() for param in stage.parameters()}
    others = [weakref.ref(param) for stage in modules_of_stages for param in stage.parameters() if id(param) not in own]
    pipeline, clock = _schedule(
        known.torch_class, own_stages, number, microbatches, step_loss, stage_device, group, others
    )
    # torch's schedules of one stage per rank have another base class, with one attribute
    torch_stages = [pipeline._stage] if per_rank == 1 and not known.looped else pipeline._stages
    setup = PipelineSetup(
        schedule=known,
        group=group,
        device=stage_device,
        stages=own_stages,
        rank_of=owner_of,
        torch_stages=torch_stages,
        loss=step_loss,
        clock=clock,
        tied=copies,
        keywords=parts.keywords,
        microbatches=microbatches,
        sharded=bool(options),
        context=context or _no_context,
    )
    pipeline.set_up(setup, shapes)
    # No stage says what files of the whole model are: its class and options do, without the tensors of other stages
    options_of_model = {name: model.__dict__.get(name) for name in ("config", "tp_ext_plan", "_weight_conversions")}
    for stage in own_stages.values():
        stage.__dict__["tp_whole_model"] = type(model), options_of_model
    note_parallelized(model)
    return pipeline


def _no_context(step: int, microbatch: int) -> AbstractContextManager[None]:
    return nullcontext()


def _fsdp_options(fsdp: Fsdp) -> dict[str, Any]:
    if fsdp is None:
        return {}
    options: dict[str, Any] = dict(fsdp) if isinstance(fsdp, Mapping) else {"mesh": fsdp}
    if not isinstance(options.get("mesh"), DeviceMesh):
        raise TypeError(f"fsdp: {fsdp!r} must be a mesh, or options of fully_shard with one as 'mesh'")
    if options.setdefault("reshard_after_forward", False) is not False:
        raise ValueError(
            "fsdp: reshard_after_forward must be False: resharding communicates in each microbatch, and loses "
            "gradients under schedules that split the backward"
        )
    return options


def _device(model: nn.Module, mesh: Group, given: torch.device | str | None) -> torch.device:
    devices = {param.device for param in model.parameters()} - {torch.device("meta")}
    if given is None:
        kind = mesh.device_type if isinstance(mesh, DeviceMesh) else "cuda" if torch.cuda.is_available() else "cpu"
        given = next(iter(devices), kind)
    device = torch.device(given)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device


@contextmanager
def _kept_attributes(model: nn.Module) -> Iterator[None]:
    """Gives the parameters that a model has afterwards the attributes that users have put on those of these names;
    ``to_empty`` and FSDP2 make new ones. Tensors are left out, which may have the former shape."""
    attributes = {name: dict(param.__dict__) for name, param in model.named_parameters()}
    yield
    for name, param in model.named_parameters():
        for attribute, value in attributes.get(name, {}).items():
            if not isinstance(value, Tensor) and attribute not in MIRRORED:
                param.__dict__.setdefault(attribute, value)


def materialise(
    stage: nn.Module,
    device: torch.device,
    init: Callable[[nn.Module], None] | None,
    blocks: Sequence[nn.Module] = (),
    options: Mapping[str, Any] = MappingProxyType({}),
    experts: Iterable[nn.Module] = (),
) -> None:
    """Gives a stage that is on meta memory and values, and moves what is not on meta to the device; shards it by FSDP2,
    each of the blocks and of the experts in it and the rest, if there are options of ``fully_shard``.

    Weights by name are drawn as shards; other initialisers need the full tensors of the stage.

    Raises:
        ValueError: see :func:`_check_meta`.
    """
    with _kept_attributes(stage):
        if not any(tensor.is_meta for tensor in (*stage.parameters(), *stage.buffers())):
            stage.to(device)
            if options:
                _shard(stage, blocks, options, experts)
            return
        _check_meta([stage], init)
        if options and init is reset_parameters:
            _shard(stage, blocks, options, experts)
        names: dict[int, list[str]] = {}
        for name, param in stage.named_parameters(remove_duplicate=False):
            names.setdefault(id(param), []).append(name)
        offloads = isinstance(options.get("offload_policy"), CPUOffloadPolicy)

        def made(tensor: Tensor) -> Tensor:
            # Under offload FSDP2 refuses parameters that are not on the CPU
            own = torch.device("cpu") if offloads and isinstance(tensor, DTensor) else device
            return torch.empty_like(tensor, device=own) if tensor.is_meta else tensor.to(own)

        stage._apply(made)
        if init is not None:
            init(stage)
        else:
            for module in stage.modules():
                reset = getattr(module, "reset_parameters", None)
                if callable(reset):
                    reset()
        for first, *others in names.values():  # each name of a tied parameter has got its own memory
            for path, _, local in (name.rpartition(".") for name in others):
                stage.get_submodule(path)._parameters[local] = stage.get_parameter(first)
        if options and init is not reset_parameters:
            _shard(stage, blocks, options, experts)


def _check_meta(parts: Sequence[nn.Module], init: Any) -> None:
    """Raises ValueError if a tensor on meta would not get its value: from ``init``, or where that is None or
    :func:`tp_ext.reset_parameters` from ``reset_parameters()`` of its module.
    """
    # init fills a whole stage: it would overwrite the parameters that have values
    params = {param.is_meta for part in parts for param in part.parameters()}
    if len(params) > 1:
        raise ValueError("model: its parameters must be all on meta or none of them")
    # A function of the user's may initialise any module: nothing can be checked
    own_init = init is not None and init is not reset_parameters
    for module in {id(module): module for part in parts for module in part.modules()}.values():
        tensors = [*module._parameters.items(), *module._buffers.items()]
        on_meta = [name for name, tensor in tensors if tensor is not None and tensor.is_meta]
        # Its value would come from init, which would also overwrite the parameters
        if on_meta and False in params:
            raise ValueError(
                f"model: the buffer {on_meta[0]!r} of {type(module).__name__} must not be on meta, since the "
                "parameters are not"
            )
        # tp_ext.reset_parameters also calls that of nn.MultiheadAttention, which begins with an underscore
        resets = ["reset_parameters"] if init is None else ["reset_parameters", "_reset_parameters"]
        if on_meta and not own_init and not any(callable(getattr(module, name, None)) for name in resets):
            raise ValueError(
                f"init: must be {'given' if init is None else 'a function of your own'} for a model on meta in which "
                f"{type(module).__name__} has parameters or buffers, but no reset_parameters()"
            )


def _check_sharding(stages: Sequence[nn.Module], blocks: Sequence[str]) -> None:
    """Raises ValueError if a parameter is in two of the modules that FSDP2 shards on their own."""
    for stage in stages:
        own = dict(stage.named_modules())
        units: dict[int, tuple[str, str]] = {}
        for name, param in stage.named_parameters(remove_duplicate=False):
            unit = next((block for block in blocks if block in own and name.startswith(f"{block}.")), "")
            other = units.setdefault(id(param), (unit, name))
            if other[0] != unit:
                raise ValueError(
                    f"fsdp: the parameter {name!r} must not be {other[1]!r}, too: blocks of one stage are sharded each "
                    "on their own; tie weights of the first and last part, or of different stages"
                )


def _check_axis(mesh: DeviceMesh, pipeline: ProcessGroup) -> None:
    """Raises ValueError if other ranks of the pipeline, which have other parameters, are to shard this rank's."""
    along = {rank for dim in range(mesh.ndim) for rank in global_ranks(mesh.get_group(dim))}
    # This rank itself is in the groups of every axis
    if along & set(global_ranks(pipeline)) - {dist.get_rank()}:
        raise ValueError(f"fsdp: {mesh} must be a data-parallel axis, not that of the pipeline")


def _check_expert_mesh(model: Census, options: dict[str, Any]) -> None:
    """Raises ValueError if FSDP2 is to shard experts over ranks that hold different experts."""
    name = "expert_mesh" if "expert_mesh" in options else "mesh"
    mesh = options[name]
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"fsdp: expert_mesh {mesh!r} must be a mesh")
    along = {rank for dim in range(mesh.ndim) for rank in global_ranks(mesh.get_group(dim))}
    for module in model.experts.values():
        group = module.expert_group
        assert isinstance(group, ParallelGroup)
        shared = sorted(along & set(group.ranks))
        if len(shared) > 1:
            raise ValueError(
                f"fsdp: {name} holds the ranks {shared}, which have different experts; pass a mapping with the data "
                "axes as 'mesh' and those without the expert group's as 'expert_mesh'"
            )


def _shard(
    model: nn.Module, blocks: Sequence[nn.Module], options: Mapping[str, Any], experts: Iterable[nn.Module]
) -> None:
    """Applies ``fully_shard`` to those of the experts and of the blocks that are in the model, and to the model."""
    expert_mesh = options.get("expert_mesh")
    options = {name: value for name, value in options.items() if name != "expert_mesh"}
    # A stage of a single block may be that block: it is sharded once, by the last call
    inside = set(model.modules()) - {model}
    # From the inside out: fully_shard takes the parameters that no module inside has taken
    for module in experts if expert_mesh is not None else ():
        if module in inside:
            fully_shard(module, **options | {"mesh": expert_mesh})
    for block in blocks:
        if block in inside:
            fully_shard(block, **options)
    fully_shard(model, **options)


def _schedule(
    kind: type[Any],
    held: Mapping[int, nn.Module],
    number: int,
    microbatches: int,
    loss: StepLoss,
    device: torch.device,
    group: ProcessGroup,
    others: Sequence[Callable[[], Tensor | None]],
) -> tuple[Any, Clock]:
    """Returns a schedule of torch's class, with :class:`PipelineSteps`, and the clock of its stages.

    The first step raises ValueError if the loss reads one of the ``others``, parameters of stages of other ranks.
    """
    clock = Clock(device)
    stages = [TimedStage(module, index, number, device, group=group, clock=clock) for index, module in held.items()]

    checked = False

    def see(tensor: Tensor) -> None:
        # Not raised here: the ranks of other stages would wait for gradients
        if tensor.requires_grad and any(param() is tensor for param in others):
            loss.misread = (
                f"loss: must not read a parameter of another stage, as that of shape {tuple(tensor.shape)}: the rank "
                "of the loss would train a copy. Make it an nn.Module of the last part of the model; tie a weight by "
                "assigning it to both"
            )

    def timed_loss(*args: Any, **options: Any) -> Tensor:
        nonlocal checked
        with clock.part("forward: loss"), nullcontext() if checked else watch_reads(see):
            result = loss(*args, **options)
        checked = True
        return result

    # [Note: a pipeline's schedule is torch's own, made a subclass]
    made = type(kind.__name__, (PipelineSteps, kind), {"__doc__": PipelineSteps.__doc__})
    # scale_grads: torch would divide the gradients of earlier steps, too; StepLoss has scaled the losses
    single = issubclass(kind, torch.distributed.pipelining.schedules.PipelineScheduleSingle)
    return made(stages[0] if single else stages, microbatches, loss_fn=timed_loss, scale_grads=False), clock
