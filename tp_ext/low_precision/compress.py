"""Compression of gradients over data parallelism, with error feedback."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from tp_ext._checks import check_bool, check_choice, check_int
from tp_ext._object_collectives import call_and_gather
from tp_ext.group import Group, parallel_group, process_group
from tp_ext.low_precision.compressed_exchange import Compressed, Format, GradientBucket, Pipeline, shares_of
from tp_ext.model.census import census
from tp_ext.model.known_parameters import KnownParameters
from tp_ext.parallel.average_gradients import is_sharded_over
from tp_ext.parallel.grad_norm import gradient_terms
from tp_ext.parallel.gradient_sum import average_over, check_kinds, gradient_buckets, kinds_of_gradients
from tp_ext.sharding import Layout, Sharding

Exempt = Callable[[str, nn.Parameter], bool]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_handles: WeakKeyDictionary[nn.Module, ref["CompressedGradients"]] = WeakKeyDictionary()


class _Chosen(NamedTuple):
    """The parameters of a model by name: those that are compressed, and the others that have a mean."""

    compressed: dict[str, nn.Parameter]
    exempt: list[nn.Parameter]


def compress_gradients(
    model: nn.Module,
    compress: str,
    *,
    block: int = 64,
    feedback: bool = True,
    exempt: Exempt | None = None,
    group: Group = None,
) -> "CompressedGradients":
    """Compresses the gradients of a model to 8 bits where data ranks exchange them.

    ::

        handle = tp_ext.low_precision.compress_gradients(model, "int8", group=mesh["dp"])
        loss.backward()
        handle.average()
        optimizer.step()

    Each gradient is flattened and cut into blocks of ``block`` elements, each with a scale in fp32: max |g| / 127 for
    ``"int8"``, max |g| / 448 for ``"float8"`` (e4m3), 1 where that is 0; Q(g) rounds g / scale half to even. Rank r
    sends Q(g_r + e_r) to the owner of a block, which adds the decoded blocks in the order of the ranks in fp32 and its
    own residual e, and sends Q(S) to all: every rank decodes the same bytes, and replicas stay equal. The gradient
    becomes the decoded S over the number of ranks. With ``feedback`` e_r and e are what the codes have lost before
    (Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014), so that errors of all steps do not add up. A
    block with a NaN or an Inf becomes NaN on all ranks, and its residuals 0.

    Args:
        model: wrapped by ``DistributedDataParallel``, whose communication hook compresses; or any module without a
            wrapper, of which ``handle.average()`` takes the means, once a step, after the last backward. Parameters may
            be shards of tensor parallelism; those sharded over ``group`` itself (experts) are left alone.
        compress: ``"int8"`` or ``"float8"``.
        block: even.
        exempt: called with the name, without DDP's ``module.``, and each parameter that requires a gradient; True: it
            is summed as it is. Default: parameters of fewer than two dims, as norms and biases. Always exempt: a shard
            with copies (of KV heads) that would share a block with other elements.
        group: the data axis of a model without DDP.

    Returns:
        The handle, with the residuals, which belong into checkpoints.

    Communicates: an all-gather of objects over the data axis, here. In a step an all-to-all and an all-gather of bytes
    for each bucket (of DDP, or 64 MiB): together (2 + 8 / block) (p - 1) / p bytes per element, and the padding of the
    all-gather.

    Raises:
        TypeError: ``model`` is no module, or ``exempt`` no function. ValueError, on all ranks: another ``compress`` or
            ``block``; ``group`` with DDP, or neither; a model that has a handle or another communication hook; DDP with
            ``find_unused_parameters``; a parameter of FSDP2, of fp64, or with sparse gradients; no parameter to
            compress, or others on another rank.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: {model!r} must be a module")
    ddp = model if isinstance(model, DistributedDataParallel) else None
    if (ddp is None) == (group is None):
        problem = "must not be given with DDP, which has its own" if ddp is not None else "must be given without DDP"
        raise ValueError(f"group: {group!r} {problem}")
    data = ddp.process_group if ddp is not None else process_group(group)

    chosen: list[_Chosen] = []

    def describe() -> Any:
        check_choice(("int8", "float8"), compress=compress)
        check_int(least=2, block=block)
        if block % 2:
            raise ValueError(f"block: {block} must be even")
        check_bool(feedback=feedback)
        if exempt is not None and not callable(exempt):
            raise TypeError(f"exempt: {exempt!r} must be a function of a name and a parameter")
        chosen.append(_choose(model, ddp, exempt or _few_dims, data, block))
        shapes = [(name, tuple(param.shape)) for name, param in chosen[0].compressed.items()]
        return compress, block, feedback, shapes, [tuple(param.shape) for param in chosen[0].exempt]

    # What is wrong on one rank, such as a hook that it alone has, is an error on all
    descriptions = call_and_gather(data, describe)
    for rank, description in enumerate(descriptions):
        if description != descriptions[0]:
            raise ValueError(f"model: parameters and options of rank {rank} must be those of rank 0 of the data axis")
    handle = CompressedGradients(model, chosen[0], Format(block, compress == "float8"), feedback, data)
    for module in model.modules():
        _handles[module] = ref(handle)
    return handle


def _few_dims(name: str, param: nn.Parameter) -> bool:
    return param.dim() < 2


def _choose(
    model: nn.Module, ddp: DistributedDataParallel | None, exempt: Exempt, data: ProcessGroup, block: int
) -> _Chosen:
    handles = {handle for module in model.modules() if (of := _handles.get(module)) and (handle := of()) is not None}
    # One whose model has other parameters now takes no mean any more
    if any(handle._known.is_current() for handle in handles):
        raise ValueError("model: its gradients must not be compressed already")
    parts = census(model)
    # A wrapper inside would take the means of its own part before, in full precision
    if inner := [path for path, wrapper in parts.wrappers.items() if wrapper is not model]:
        raise ValueError(f"model: {inner[0]} must not be wrapped by DDP; pass the wrapper itself")
    if ddp is not None and ddp._comm_hooks:
        raise ValueError("model: must not have another communication hook")
    if ddp is not None and ddp.find_unused_parameters:
        # DDP drops the mean of a parameter that no rank has used, in which a residual was sent
        raise ValueError("model: DDP's find_unused_parameters must be False")
    for path, module in parts.modules:
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ValueError(f"{path}: gradients of sparse=True must not be compressed")
    # Names without DDP's prefix, as users and checkpoints know them
    own = parts if ddp is None else census(ddp.module)
    axis = parallel_group(data)
    chosen = _Chosen({}, [])
    for name, entry in own.parameters.items():
        param = entry.value
        if not param.requires_grad or (ddp is not None and name in ddp.parameters_to_ignore):
            continue
        if entry.layout.blocks:
            raise ValueError(
                f"{name}: its gradient must not be compressed in a model built in tp_invariant: scales depend on where "
                "a shard ends"
            )
        if isinstance(param, DTensor):
            raise ValueError(f"{name}: a DTensor must not be compressed: FSDP2 reduces parts of several parameters")
        # Experts: the ranks of the axis hold different elements, of which there is no mean
        if is_sharded_over(entry.layout, axis, name):
            continue
        assert isinstance(param, nn.Parameter)
        if exempt(name, param) or _cuts_copies(entry.layout, param, block):
            chosen.exempt.append(param)
            continue
        if param.dtype not in _DTYPES:
            raise ValueError(f"{name}: dtype {param.dtype} must be one of float32, bfloat16, float16")
        chosen.compressed[name] = param
    if not chosen.compressed:
        raise ValueError("model: must have a parameter to compress")
    return chosen


def _cuts_copies(layout: Layout, param: Tensor, block: int) -> bool:
    """Returns whether a block has elements of which other ranks hold copies, as of KV heads, and others: its scale
    would be another one on each of those ranks, and the copies would drift apart."""
    for sharding, group in layout:
        if group.size == 1 or not any(part.has_copies for part in sharding.parts):
            continue
        ends = list(accumulate(Sharding(0, [part]).local_sizes(group.size)[group.rank] for part in sharding.parts))
        inner = param.shape[1:].numel()
        if sharding.dim % param.dim() != 0 or any(end * inner % block for end in ends[:-1]):
            return True
    return False


def _is_dense(param: Tensor) -> bool:
    """Returns whether the elements fill their memory, in any order of the dims."""
    step = 1
    for stride, size in sorted(zip(param.stride(), param.shape, strict=True)):
        if size > 1 and stride != step:
            return False
        step *= size
    return True


class CompressedGradients:
    """The compression of a model's gradients and its residuals; :func:`compress_gradients` makes it.

    Attributes:
        names: the compressed parameters.
    """

    def __init__(self, model: nn.Module, chosen: _Chosen, format: Format, feedback: bool, data: ProcessGroup) -> None:
        self.names = list(chosen.compressed)
        self._model, self._format, self._feedback, self._data = model, format, feedback, data
        ranks = data.size()
        self._params = {
            name: Compressed(name, param.shape, shares_of(param.numel(), ranks, format.block, number))
            for number, (name, param) in enumerate(chosen.compressed.items())
        }
        self._compressed: dict[Tensor, Compressed] = {
            param: self._params[name] for name, param in chosen.compressed.items()
        }
        self._exempt = chosen.exempt
        ddp = isinstance(model, DistributedDataParallel)
        self._known = KnownParameters(model.children() if ddp else [model], "compress_gradients", hooked=ddp)
        if isinstance(model, DistributedDataParallel):
            model.register_comm_hook(_Hook(self), _Hook.__call__)
            # DDP calls that hook for the parameters that it knows
            model.register_forward_pre_hook(lambda *_: self._known.check() if torch.is_grad_enabled() else None)

    @torch.no_grad()
    def average(self) -> None:
        """Replaces every gradient by its mean over the data axis, in place: once a step, on all ranks.

        Communicates: an all-reduce of four numbers per parameter; see :func:`compress_gradients`; and of the exempt
        gradients as :func:`tp_ext.parallel.sum_gradients`. Nothing over one rank.

        Raises:
            RuntimeError: the model is under DDP. ValueError, on all ranks: a parameter was replaced, added, removed,
                unfrozen or converted since :func:`compress_gradients`, or has a gradient and is frozen since before;
                see :func:`tp_ext.parallel.sum_gradients`.
        """
        if isinstance(self._model, DistributedDataParallel):
            raise RuntimeError("average: must not be called under DDP, whose hook takes the means")
        problem: ValueError | None = None
        try:
            self._known.check()
            self._check_frozen()
        except ValueError as error:
            # Kept, not raised: the others would wait for this rank
            problem = error
        if self._data.size() == 1:
            if problem is not None:
                raise problem
            return
        params = list(self._compressed)
        # Those of the exempt ones, too: an error of theirs must not come when the others are means already
        kinds = kinds_of_gradients([*params, *self._exempt])
        flag = kinds.new_full((1, kinds.shape[1]), int(problem is not None))
        kinds = torch.cat([kinds, flag])
        dist.all_reduce(kinds, dist.ReduceOp.MAX, group=self._data)
        if kinds[-1].any():
            raise problem or ValueError("model: another rank of the data axis has refused to average, see its error")
        has_grads = check_kinds([*params, *self._exempt], kinds[:-1])[: len(params)]
        owners: dict[int, Compressed] = {}
        grads: list[Tensor] = []
        for param, has_grad in zip(params, has_grads, strict=True):
            if has_grad and param.grad is None:
                param.grad = torch.zeros_like(param)
            terms = gradient_terms(param)
            if len(terms) == 2:  # main_grad of fused layers, and what others have added: one gradient
                terms[1] += terms[0]
                terms[0].zero_()
            if terms:
                owners[id(terms[-1])] = self._compressed[param]
                grads.append(terms[-1])
        pipeline = Pipeline()
        for bucket in gradient_buckets(grads):
            pipeline.add(self.bucket([owners[id(grad)] for grad in bucket], bucket))
        pipeline.finish()
        average_over(self._exempt, self._data)

    def _check_frozen(self) -> None:
        for name, param in self._model.named_parameters():
            if param.grad is not None and not param.requires_grad and not self._known.was_trained(param):
                raise ValueError(
                    f"model: a parameter that was frozen at compress_gradients must have no gradient, and {name!r} has"
                )

    def bucket(
        self, params: Sequence[Compressed], grads: Sequence[Tensor], exempt: Sequence[Tensor] = ()
    ) -> GradientBucket:
        """Returns gradients of compressed and of exempt parameters as a bucket."""
        for param, grad in zip(params, grads, strict=True):
            if self._feedback:
                param.keep_on(grad.device, self._data.rank())
        return GradientBucket(params, grads, self._data, self._format, exempt)

    def residual(self, name: str) -> Tensor:
        """Returns what this rank has not sent yet of the gradients of a parameter: e_r, plus e where it owns the block.

        fp32, in the parameter's shape. Over all steps the sum of the gradients of all ranks is that of the means times
        the ranks, plus the sum of the residuals of all ranks; up to the rounding of a mean to the gradient's dtype.

        Raises:
            ValueError: ``name`` is none of ``names``.
        """
        if name not in self._params:
            raise ValueError(f"name: {name!r} must be one of names")
        param = self._params[name]
        if param.error is None or param.share_error is None:
            return torch.zeros(param.shape, dtype=torch.float32)
        total = param.error.clone()
        first, count = param.shares[self._data.rank()]
        total[first : first + count] += param.share_error
        return total.view(param.shape)

    def state_dict(self) -> dict[str, Any]:
        """Returns the residuals of this rank, for a run that goes on with the same bits on as many ranks."""
        kept = [param for param in self._params.values() if param.error is not None]
        return {
            "place": self._place(),
            "shares": {param.name: list(param.shares[self._data.rank()]) for param in kept},
            "errors": {param.name: param.error for param in kept},
            "share_errors": {param.name: param.share_error for param in kept},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads the residuals of this rank.

        Raises:
            ValueError, nothing has changed then: they are of another rank, number of ranks, block or model, or have
                parameters that are not compressed here, or in another order.
        """
        if list(state["place"]) != self._place():
            raise ValueError(f"state: rank, ranks, block and feedback {state['place']} must be {self._place()}")
        errors, share_errors, shares = state["errors"], state["share_errors"], state["shares"]
        for name, error in errors.items():
            param = self._params.get(name)
            own = None if param is None else param.shares[self._data.rank()]
            if param is None or own is None or list(own) != shares.get(name) or error.numel() != param.shape.numel():
                raise ValueError(f"state: {name!r} must be a compressed parameter of the same shape and place")
        for name, param in self._params.items():
            # A copy: the state may be loaded again
            param.error = errors[name].clone() if name in errors else None
            param.share_error = share_errors[name].clone() if name in errors else None

    def _place(self) -> list[int]:
        return [self._data.rank(), self._data.size(), self._format.block, int(self._feedback)]


class _Hook:
    """DDP's communication hook. DDP waits for the futures after the last bucket, in which all buckets are completed."""

    def __init__(self, handle: CompressedGradients) -> None:
        self._handle, self._pipeline = handle, Pipeline()
        self._futures: dict[int, tuple[Future[Tensor], Tensor]] = {}

    @torch.no_grad()
    def __call__(self, bucket: dist.GradBucket) -> Future[Tensor]:
        buffer = bucket.buffer()
        future: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else [])
        if self._handle._data.size() == 1:
            future.set_result(buffer)
            return future
        params: list[Compressed] = []
        grads: list[Tensor] = []
        exempt: list[Tensor] = []
        for param, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
            compressed = self._handle._compressed.get(param)
            if compressed is None:
                exempt.append(grad)
            elif grad.numel() > 0:
                params.append(compressed)
                # The bucket has the elements in the order of the parameter's memory; DDP's views do not say so
                grads.append(grad.as_strided(param.shape, param.stride()) if _is_dense(param) else grad)
        compressed_bucket = self._handle.bucket(params, grads, exempt)
        self._futures[id(compressed_bucket)] = future, buffer
        self._complete(self._pipeline.add(compressed_bucket))
        if bucket.is_last():
            self._complete(self._pipeline.finish())
        return future

    def _complete(self, arrived: Sequence[GradientBucket]) -> None:
        for bucket in arrived:
            future, buffer = self._futures.pop(id(bucket))
            future.set_result(buffer)
