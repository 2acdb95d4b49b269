"""Which shares even out the times of unequal ranks, by timing each rank's own work in forward and backward."""

import contextlib
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tp_ext._checks import check_type
from tp_ext._object_collectives import all_gather_objects, call_and_gather
from tp_ext.auto.argument_checks import check_example
from tp_ext.common_generator import device_of
from tp_ext.group import Group, parallel_group, process_group
from tp_ext.parallel.pipeline.clock import Clock

_COMMUNICATION = ("_c10d_functional", "_c10d_functional_autograd", "c10d", "symm_mem")  # namespaces of operators
_SECONDS = 12.0  # of the passes after the warm-up
_LAST_END = 18.0  # seconds after which no pass is to end, the warm-up counted
_FEW, _CHUNKS = 3, 9  # passes at least; sums of passes in a row of which the median counts


class Pass(NamedTuple):
    """A pass of one rank: its seconds, and those in each collective."""

    seconds: float
    in_collectives: list[float]


def measure_shares(model: nn.Module, example: Mapping[str, Any] | tuple[Any, ...], group: Group) -> list[float]:
    """Measures which shares even out the times of ranks that are not alike: weights for :func:`tp_ext.shares`.

    Runs forward and backward on all ranks at once, in the mode of training in which the model is, with its real
    collectives, and times what is between them: a rank that waits for a slower one does not work. Of the time in a
    collective what exceeds its shortest time in any pass counts for the rank that comes last: a rank that shares its
    core is often halted there. After a warm-up passes follow for about twelve seconds, or three passes if they are
    longer; ranks decide together which is the last. A rank's weight is its present share by the median of its times
    over nine intervals. A rank also has work that does not depend on its share (norms, the host's launches), so that
    very unequal ranks come closer by measuring a model again that is built with the measured weights; not ranks that
    share their core with other processes, which get more of it after they have waited.

    The example should be of the size of a microbatch: each operator passes through Python while it is timed, which is
    some microseconds more.

    ::

        weights = planner.measure_shares(make_model(), (tokens,), group)
        with tp_ext.shares(weights):
            model = make_model()

    Args:
        model: whose layers are over ``group``, built without shares, or with any of which none is 0. Its gradients
            (``main_grad`` too), buffers and the generators are left as they were; no hook of a gradient's accumulation
            runs.
        example: arguments of forward, a dict by name or a tuple; of a result with a ``loss`` its gradient is taken,
            otherwise that of the sum of all results.
        group: the tensor-parallel group.

    Returns:
        A weight for each rank; their sum is 1. The same list on all ranks; of a group of one rank [1.0].

    Communicates: exchanges of checks and of times, what the model does, and an all-reduce of a number for each pass.

    Raises:
        TypeError: ``model`` is no module, ``example`` neither a dict nor a tuple. ValueError, on all ranks: a share of
            0, layers of different shares, a model whose layers are over another group, or that has nothing to train.
    """
    alone = parallel_group(group).size == 1
    ranks = None if alone else process_group(group)
    present = call_and_gather(ranks, lambda: _present_share(model, example, group))
    if ranks is None:
        return [1.0]
    device = next(model.parameters()).device
    with _left_as_it_was(model, device):
        passes = _passes(lambda: _forward_and_backward(model, example), device, ranks)
    seconds = own_seconds(all_gather_objects(passes, ranks))
    speeds = [share / taken for share, taken in zip(present, seconds, strict=True)]
    return [speed / sum(speeds) for speed in speeds]


def _present_share(model: Any, example: Any, group: Group) -> float:
    """Returns the share of this rank in the layers of the model, up to a factor that all ranks have."""
    check_type(nn.Module, "an nn.Module", model=model)
    check_example(example)
    if not any(param.requires_grad for param in model.parameters()):
        raise ValueError("model: must have at least one parameter that requires a gradient")
    ranks = parallel_group(group)
    layers: dict[str, Any] = {path: layer for path, layer in model.named_modules() if hasattr(layer, "tp_group")}
    over_it = {path: layer for path, layer in layers.items() if layer.tp_group.torch_name == ranks.torch_name}
    if layers and not over_it and ranks.size > 1:
        path, layer = next(iter(layers.items()))
        raise ValueError(
            f"group: of {ranks.size} ranks, must be the group of the model's layers; {path or 'the model'} is over "
            f"one of {layer.tp_group.size}"
        )
    distinct = {layer.shares: path for path, layer in over_it.items() if layer.shares is not None}
    if len(distinct) > 1:
        first, second = itertools.islice(distinct.items(), 2)
        raise ValueError(
            f"model: all layers must have the same shares; {first[1]} has {list(first[0])}, {second[1]} has "
            f"{list(second[0])}"
        )
    weights: tuple[float, ...] = next(iter(distinct), (1.0,) * ranks.size)
    if 0 in weights:
        raise ValueError(f"shares: {list(weights)} must be above 0 to be measured: a rank without work has no time")
    return float(weights[ranks.rank] / max(weights))


def _forward_and_backward(model: nn.Module, example: Mapping[str, Any] | tuple[Any, ...]) -> None:
    output = model(**example) if isinstance(example, Mapping) else model(*example)
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    results = tree_leaves(output) if loss is None else [loss]
    results = [result for result in results if isinstance(result, Tensor) and result.requires_grad]
    params = [param for param in model.parameters() if param.requires_grad]
    # Not backward(): it would add to gradients, and call hooks that communicate or step an optimizer
    torch.autograd.grad(results, params, [torch.ones_like(result) for result in results], allow_unused=True)


@contextlib.contextmanager
def _left_as_it_was(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Restores what a pass changes: generators, buffers, and gradients that operators add up by themselves."""
    sums = (getattr(param, "main_grad", None) for param in model.parameters())
    changed = [tensor for tensor in (*model.buffers(), *sums) if isinstance(tensor, Tensor)]
    saved = [tensor.detach().clone() for tensor in changed]
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.enable_grad():
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, value in zip(changed, saved, strict=True):
                    tensor.copy_(value)


def _passes(step: Callable[[], object], device: torch.device, ranks: ProcessGroup) -> list[Pass]:
    """Returns passes of this rank, as many as on the others."""
    begin = time.perf_counter()
    step()  # allocates, compiles, and lets ranks meet that draw
    last = [_timed(step, device)]
    warm = before = _latest(begin, ranks)
    longest = warm / 2
    taken: list[Pass] = []
    while before + longest < _LAST_END and (len(taken) < _FEW or before - warm < _SECONDS):
        taken.append(_timed(step, device))
        now = _latest(begin, ranks)
        longest, before = (now - before if len(taken) == 1 else max(longest, now - before)), now
    return taken or last  # of passes that are very long


# [Note: time in a collective counts for the last rank]
def own_seconds(of_ranks: list[list[Pass]]) -> list[float]:
    """Returns the seconds of each rank's own work in a pass, from the passes of all ranks."""
    sums = []
    least: dict[tuple[int, int], float] = {}  # by the number of collectives of a pass, and the number of the collective
    for passes in zip(*of_ranks, strict=True):
        for number, spans in enumerate(zip(*(each.in_collectives for each in passes), strict=False)):
            key = len(passes[0].in_collectives), number
            least[key] = min(least.get(key, math.inf), *spans)
    for passes in zip(*of_ranks, strict=True):
        own = [each.seconds - sum(each.in_collectives) for each in passes]
        if len({len(each.in_collectives) for each in passes}) == 1:  # else they are not the same ones
            for number, spans in enumerate(zip(*(each.in_collectives for each in passes), strict=True)):
                shortest = min(spans)
                own[spans.index(shortest)] += shortest - least[len(passes[0].in_collectives), number]
        sums.append(own)
    count = min(_CHUNKS, len(sums))
    ends = [len(sums) * i // count for i in range(count + 1)]
    chunks = [sums[a:b] for a, b in itertools.pairwise(ends)]
    return [
        max(1e-9, statistics.median(statistics.fmean(own[rank] for own in chunk) for chunk in chunks))
        for rank in range(len(of_ranks))
    ]


def _latest(begin: float, ranks: ProcessGroup) -> float:
    """Returns the seconds since ``begin`` of the rank that needed most, which comes last."""
    elapsed = torch.tensor([time.perf_counter() - begin], dtype=torch.float64, device=device_of(ranks))
    dist.all_reduce(elapsed, dist.ReduceOp.MAX, group=ranks)
    return float(elapsed)


def _timed(step: Callable[[], object], device: torch.device) -> Pass:
    clock = Clock(device)
    with clock.step(), _Waits(clock):
        step()
    return Pass(clock.seconds()[1], clock.parts())


class _Waits(TorchDispatchMode):
    """Measures collectives. Within a mode layers call those that the dispatcher sees, and wait for each at once."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self._clock.part("collective") if func.namespace in _COMMUNICATION else contextlib.nullcontext():
            return func(*args, **(kwargs or {}))
