"""Whose random numbers count where each rank of a group draws for itself and all take the result for equal: rank 0's.

Initial weights, adapters, masks of dropout and other draws of a model come from torch's default generator of each
rank, whose states must agree. They do after ``manual_seed`` with one value; they do not if nobody sets a seed (torch
2.15 seeds each process differently), under ``torch.manual_seed(seed + rank)``, or once one rank has drawn alone. So
before such a draw every rank takes over the state of rank 0's generator, which changes nothing where the states agree.
Groups of other ranks, such as those along a data axis, keep their generators apart.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from tp_ext import random_scope
from tp_ext._imports import after_import
from tp_ext.group import ParallelGroup, parallel_group, process_group

_SEED_BYTES = 32
_CUDA = torch.device("cuda")
_REMEMBERED, _ROUNDS = 64, 1024  # states that were replaced, for recomputation, and for how many forwards
_FROM_FIRST = dist.BroadcastOptions()
_FROM_FIRST.rootRank, _FROM_FIRST.rootTensor = 0, 0
_KEPT_MESSAGES = 1024  # in the store: by as many a rank may be behind the first, which the layers' collectives bound


@dataclass
class _Meetings:
    """The meetings of a group.

    Attributes:
        number: of forwards that have drawn. compiled: whether code that draws has been compiled. messages: number of
        meetings. replaced: state of this rank's generator before a meeting -> number of the forward, state of rank 0.
    """

    number: int = 0
    compiled: bool = False
    messages: int = 0
    replaced: dict[bytes, tuple[int, Tensor]] = field(default_factory=dict)


class DrawObserver:
    """What the debug mode does at each draw, with the group and the generator."""

    compare: Callable[[ParallelGroup, torch.Generator], None] | None = None


_own = threading.local()  # of a rank, which a simulation runs in a thread
_rounds: weakref.WeakKeyDictionary[ProcessGroup, _Meetings] = weakref.WeakKeyDictionary()
_CALL = nn.Module._wrapped_call_impl.__code__


def default_generator(device: torch.device) -> torch.Generator:
    """Returns torch's default generator of a device."""
    if device.type != "cuda":
        return torch.default_generator
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


# [Note: rank 0's generator counts]
def follow_first(groups: Iterable[ParallelGroup], device: torch.device) -> None:
    """Gives this rank the state of the default generator of a device, and the seed of :func:`tp_ext.manual_seed`, that
    the first rank of the groups has. Every rank of the groups must call it.

    Communicates: one broadcast of 5 KB (CUDA: 48 bytes) over each group of several ranks, which
    :func:`tp_ext.debug.count_collectives` does not count; over a group of NCCL alone through torch's store, since the
    device must not be waited for.
    """
    for group in groups:
        if group.size > 1 and can_meet(device):
            _take_over(group, device)


def begin_draw(groups: Iterable[ParallelGroup], device: torch.device) -> None:
    """Calls :func:`follow_first` at the first draw of a forward: of a call of the outermost module that runs now, or of
    each draw outside of modules.

    So no code has to say where a forward begins, and all ranks meet at the same draws. In a recomputation, whose
    generators torch has put back, a state that was replaced is replaced again."""
    for group in groups:
        if group.size == 1:
            continue
        if torch.compiler.is_compiling():
            _compare_while_compiling(group.name, device.type, device.index)
        elif can_meet(device) and (present := _round_of(group)) is not None:
            if torch._C._current_graph_task_id() != -1:
                _replace_again(present, device)
                continue
            if _is_first_of_forward(group.name, device):
                present.number += 1
                _take_over(group, device)
            if DrawObserver.compare is not None and not random_scope.is_entered():
                DrawObserver.compare(group, default_generator(device))


def _is_first_of_forward(group: str, device: torch.device) -> bool:
    """True at the first draw over a group in the call of the outermost module that runs now, and outside of modules.

    It is noted among the locals of that call, whose end no hook has to see."""
    outermost, frame = None, sys._getframe(2)
    while frame is not None:
        if frame.f_code is _CALL:
            outermost = frame
        frame = frame.f_back  # type: ignore[assignment]
    if outermost is None:
        return True
    met = outermost.f_locals.setdefault("tp_ext drew", set())
    key = group, device.type, device.index
    is_first = key not in met
    met.add(key)
    return is_first


def can_meet(device: torch.device) -> bool:
    """Returns whether the ranks of a group can communicate here about what a device computes."""
    if device.type not in ("cpu", "cuda") or torch._C._len_torch_dispatch_stack() > 0 or not dist.is_initialized():
        return False  # nothing is drawn, or by fakes
    return not (device.type == "cuda" and torch.cuda.is_current_stream_capturing())


def _round_of(group: ParallelGroup) -> _Meetings | None:
    try:
        ranks = process_group(group.name)
    except (ValueError, RuntimeError, KeyError):  # destroyed, or never made: nothing will communicate over it
        return None
    return _rounds.setdefault(ranks, _Meetings())


def _compare_while_compiling(name: str, kind: str, index: int | None) -> None:
    """Compares generators once for each group, when code is compiled for the first time: torch puts their states back
    after it, and later ranks may compile at other calls.

    Raises:
        RuntimeError: they differ; on all ranks.
    """
    group, device = parallel_group(name), torch.device(kind if index is None else f"{kind}:{index}")
    present = _round_of(group)
    if present is None or present.compiled:
        return
    present.compiled = True
    ranks, state = process_group(name), default_generator(device).get_state()
    states = [torch.empty_like(state, device=where) for where in [device_of(ranks, device)] * group.size]
    with not_counted():
        dist.all_gather(states, state.to(states[0].device), group=ranks)
    differing = [rank for rank, other in enumerate(states) if not torch.equal(other, states[0])]
    if differing:
        raise RuntimeError(
            f"torch.compile: code that draws masks must begin with one state of torch's generator of the {kind}; ranks "
            f"{differing} differ from rank 0, p = {group.size}: call tp_ext.manual_seed with one seed on all ranks"
        )


after_import("torch._dynamo", lambda: torch.compiler.assume_constant_result(_compare_while_compiling))


def _take_over(group: ParallelGroup, device: torch.device) -> None:
    present = _round_of(group)
    if present is not None:
        with torch._C._DisableFuncTorch():  # within torch.func states would be wrapped, whose bytes nothing can read
            _receive(group, present, device)


def _receive(group: ParallelGroup, present: _Meetings, device: torch.device) -> None:
    generator = default_generator(device)
    before = generator.get_state()
    message = torch.cat([_bytes_of_seed(), before])
    received = _from_first(group, present, message)
    if torch.equal(received, message):
        if present.replaced:  # of an earlier run with the same seed
            present.replaced.pop(before.numpy().tobytes(), None)
        return
    scope_seed = random_scope.take_over_seed(_seed_of(received[:_SEED_BYTES]))
    state = received[_SEED_BYTES:].clone()
    if scope_seed is not None:
        # Masks by name follow from the seed of the job. The first rank's generator may be that of another stage, whose
        # scopes are not known here
        if scope_seed == generator.initial_seed():
            return
        state = torch.Generator(device).manual_seed(scope_seed).get_state()
    present.replaced[before.numpy().tobytes()] = present.number, state
    while len(present.replaced) > _REMEMBERED:
        del present.replaced[next(iter(present.replaced))]
    generator.set_state(state)


def _replace_again(present: _Meetings, device: torch.device) -> None:
    if present.replaced:
        generator = default_generator(device)
        number, state = present.replaced.get(generator.get_state().numpy().tobytes(), (-_ROUNDS, None))
        if state is not None and present.number - number < _ROUNDS:
            generator.set_state(state)


def _from_first(group: ParallelGroup, present: _Meetings, message: Tensor) -> Tensor:
    ranks = process_group(group.name)
    present.messages += 1
    if device_of(ranks).type == "cpu":
        received = message.clone()
        with not_counted():
            # Past torch's function, which a type checker of programs looks into
            ranks.broadcast([received], _FROM_FIRST).wait()
        return received
    store, key = store_of(ranks), f"tp_ext.generator.{group.torch_name}.{present.messages}"
    if group.rank > 0:
        return torch.frombuffer(bytearray(store.get(key)), dtype=torch.uint8)
    store.set(key, message.numpy().tobytes())
    if present.messages > _KEPT_MESSAGES:
        store.delete_key(f"tp_ext.generator.{group.torch_name}.{present.messages - _KEPT_MESSAGES}")
    return message


def device_of(ranks: ProcessGroup, device: torch.device = _CUDA) -> torch.device:
    """Returns the device of tensors that the group communicates, the CPU if it can."""
    return torch.device("cpu") if torch.device("cpu") in ranks._device_types else device


def store_of(ranks: ProcessGroup) -> Any:
    """Returns the store of a group, by which its ranks met."""
    return dist.distributed_c10d._world.pg_map[ranks][1]


@contextmanager
def not_counted() -> Iterator[None]:
    """Communicates what is no collective of the program, and is not counted as one."""
    torch._C._autograd._enable_record_function(False)
    _own.meeting = True
    try:
        yield
    finally:
        _own.meeting = False
        torch._C._autograd._enable_record_function(True)


def is_meeting() -> bool:
    """Returns whether this thread communicates for a draw, which is no collective of the program."""
    return getattr(_own, "meeting", False)


def _bytes_of_seed() -> Tensor:
    seed = random_scope.base.seed
    known = seed is not None and abs(seed) < 1 << (8 * _SEED_BYTES - 9)
    number = (seed << 1 | 1) if known and seed is not None else 0
    return torch.frombuffer(bytearray(number.to_bytes(_SEED_BYTES, "little", signed=True)), dtype=torch.uint8)


def _seed_of(received: Tensor) -> int | None:
    number = int.from_bytes(received.numpy().tobytes(), "little", signed=True)
    return number >> 1 if number & 1 else None
