"""Comparison of the order of collectives over the ranks, as they are issued: see :func:`compare_collectives`.

Each rank writes what it is about to issue into a store, waits until the other ranks of the group have written theirs,
and issues it if they agree. So a difference is named before a rank waits in a collective for ever.
"""

import itertools
import json
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from tp_ext import _ops
from tp_ext._build import load
from tp_ext._checks import check_number
from tp_ext.common_generator import is_meeting
from tp_ext.group import Group, global_ranks
from tp_ext.simulation.baton import user_line
from tp_ext.simulation.place import RankPlace, here

_FRUITLESS_POLLS = 1000  # of a simulated rank, after which no other rank can come


class _Operator(NamedTuple):
    """An operator of c10d.

    Attributes:
        kind: as :func:`count_collectives` names it.
        tensors: the position of the tensors that have one shape on all ranks, among the arguments.
        group: that of the group.
        root: that of the root, as a number in the group.
        reduction: that of what reduces.
        uneven: whether shapes may differ.
        first: whether only the first tensor counts.
    """

    kind: str
    tensors: int | None
    group: int
    root: int | None = None
    reduction: int | None = None
    uneven: bool = False
    first: bool = False


_OPERATORS = {
    "allreduce_": _Operator("all_reduce", 0, 1, reduction=2, first=True),  # tp_shm's has its input after the result
    "allreduce_coalesced_": _Operator("all_reduce", 0, 1, reduction=2),
    "allgather_": _Operator("all_gather", 0, 2),
    "_allgather_base_": _Operator("all_gather", 1, 2),
    "allgather_coalesced_": _Operator("all_gather", 1, 2),
    "allgather_into_tensor_coalesced_": _Operator("all_gather", 1, 2),
    "reduce_scatter_": _Operator("reduce_scatter", 1, 2, reduction=3),
    "_reduce_scatter_base_": _Operator("reduce_scatter", 1, 2, reduction=3),
    "reduce_scatter_tensor_coalesced_": _Operator("reduce_scatter", 1, 2, reduction=3),
    "alltoall_": _Operator("all_to_all", 1, 2, uneven=True),
    "alltoall_base_": _Operator("all_to_all", 1, 2, uneven=True),
    "broadcast_": _Operator("broadcast", 0, 1, root=2),
    "reduce_": _Operator("reduce", 0, 1, root=3, reduction=2),
    "gather_": _Operator("gather", 1, 2, root=3),
    "gather_into_tensor_": _Operator("gather", 1, 2, root=3),
    "scatter_": _Operator("scatter", 0, 2, root=3),
    "send": _Operator("send", 0, 1, root=2),
    "recv_": _Operator("recv", 0, 1, root=2),
    "recv_any_source_": _Operator("recv", 0, 1),
    "barrier": _Operator("barrier", None, 1),
    "monitored_barrier_": _Operator("barrier", None, 1),
}
_NAMES = re.compile(r"[A-Za-z]\w*")
_MESH = "mesh_"  # with which the description of a mesh's group begins


class _IssuedCall(NamedTuple):
    """What a rank is about to issue, as the store has it.

    Attributes:
        text: function, dtype and shape.
        axis: the axis of the group (:func:`_axis`).
        name: the name of the group.
        ranks: its global ranks.
        line: of the user's code.
        before: the numbers of the rank's earlier calls, by axis, of every axis on which it has one group.
        stages: whether the group has a rank of another stage, or one with which this rank has exchanged messages.
    """

    text: str
    axis: str
    name: str
    ranks: list[int]
    line: str
    before: dict[str, int]
    stages: bool

    @property
    def title(self) -> str:
        """Function, tensor and axis or group."""
        name = self.axis.partition("/")[0]
        return f"{self.text} over {name or f'group {self.name} of ranks {self.ranks}'}"

    def is_that(self, other: "_IssuedCall") -> bool:
        """Whether another rank of the same program may issue this as that call."""
        return (self.text, self.axis) == (other.text, other.axis) and (
            self.ranks != other.ranks or self.name == other.name
        )


@contextmanager
def compare_collectives(*, pipeline: Group = None, timeout: float = 300.0) -> Iterator[None]:
    """Compares the order of the collectives of the ``with`` block over the ranks: of each call the function, the axis
    or group, the dtype and the shape. It raises on all ranks before the first call that differs is issued, and names
    it, with its line, on each rank.

    ::

        with tp_ext.debug.compare_collectives():
            step(batch)

    In one group of ranks, an order that differs hangs or raises. Over two axes of a mesh it may not: each group has one
    call on each of its ranks, whose values are sums over the first axis already on some of them. Loops over a ``set``
    of axes, which each process goes through in its own order, are such a program.

    Compared are the calls that :func:`count_collectives` counts, of any thread, forward and backward, except those over
    symmetric memory. Two ranks of a group are compared by that call, and by the numbers of their earlier calls over
    every other axis on which both have a group; an axis is that of a mesh, or what groups have in common whose ranks
    have the same distances. Stages of a pipeline run different programs: in a group with two of them, or with two ranks
    that have exchanged messages in the block (``send``, ``recv``), the second comparison is left out. Messages are not
    compared.

    Args:
        pipeline: the group of this rank's stages, if it is not that of an axis ``pp`` of a mesh.
        timeout: the seconds for which a rank waits for the others of a group to issue the same call, or to leave the
            block.

    Every rank of the job, or of the simulation, must enter the block. Before each collective a rank communicates some
    300 bytes over the job's store (0.5 ms for two ranks on two cores; asynchronous calls wait, too); at the end ranks
    wait for each other. Without the block nothing is done or paid for. A block inside of a block, one of a job of one
    rank, and the ``fake`` backend compare nothing.

    Raises:
        RuntimeError: the same on all ranks: calls differ, ranks wait for each other, one did not come in time, or has
            left the block, by its end or an exception, which is raised there.
    """
    check_number(above=0, timeout=timeout)
    place = here()
    world = place.world or (c10d._get_default_group() if dist.is_initialized() else None)
    if place.prefix in _blocks or world is None or world.size() == 1 or dist.get_backend(world) == "fake":
        yield
        return
    stages = global_ranks(pipeline)
    block = _ComparedBlock(place, world, timeout, stages)
    _open(place.prefix, block)
    try:
        try:
            yield
        finally:
            _close(place.prefix)
    except BaseException as error:
        block.leave(f"{type(error).__name__}: {error}")
        raise
    block.leave("")
    block.wait_for_all()


_blocks: dict[str, "_ComparedBlock"] = {}  # by the prefix of the rank, which is empty outside of simulations
_kernels: list[tuple[torch.library.Library, int]] = []  # and a counter, while a block is open
_lock = threading.Lock()


# [Note: collectives are compared where the dispatcher selects a backend]
def _open(prefix: str, block: "_ComparedBlock") -> None:
    with _lock:
        _blocks[prefix] = block
        if not _kernels:
            library = torch.library.Library("c10d", "IMPL")
            for name in _OPERATORS:
                library.impl(name, _comparing(name), "BackendSelect", with_keyset=True)
            # An all-reduce that is fused with a norm calls c10d only where something listens
            _kernels.append((library, load().open_counter(False)))


def _close(prefix: str) -> None:
    with _lock:
        del _blocks[prefix]
        if not _blocks:
            library, counter = _kernels.pop()
            load().close_counter(counter)
            library._destroy()


def _comparing(name: str) -> Callable[..., Any]:
    """Returns the kernel that compares a call and passes it on to the backends' kernels."""
    operator, overload = _OPERATORS[name], _ops.c10d_operator(name)
    after = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)

    def call(keys: Any, *args: Any, **kwargs: Any) -> Any:
        block = _blocks.get(here().prefix)
        if block is not None and not _is_fake(operator, args):
            block.issue(operator, args)
        return overload.redispatch(keys & after, *args, **kwargs)

    return call


class _ComparedBlock:
    """One rank's part of a block. What the ranks write into the store:

    - ``rank/i``: its i-th call; ``rank/last``: the number of its last one; ``rank/left``: how it left the block;
    - ``ranks of a group/k/rank``: the i of the rank's k-th call in that group;
    - ``ranks of a group/k``: whether the ranks issue the k-th call; the first one that knows decides for all, so that
      no rank waits in a call that another one has refused;
    - ``events``: their number; ``error``: the first one that a rank has raised.
    """

    def __init__(self, place: RankPlace, world: dist.ProcessGroup, timeout: float, stages: list[int]) -> None:
        self._place, self._timeout = place, timeout
        self._rank, self._size = dist.get_rank(), world.size()
        store = dist.PrefixStore("tp_ext/compare_collectives", place.store or c10d._get_default_store())
        self._store = dist.PrefixStore(str(store.add(str(self._rank), 1)), store)
        self._issued = 0
        self._numbers: Counter[str] = Counter()  # of calls, by ranks of the group
        self._before: Counter[str] = Counter()  # of calls, by axis
        self._peers = set(stages) - {self._rank}

    def issue(self, operator: _Operator, args: tuple[Any, ...]) -> None:
        """Compares a call with the calls of the other ranks of its group.

        Raises:
            RuntimeError: see :func:`compare_collectives`.
        """
        if is_meeting():  # for a draw
            return
        group = dist.ProcessGroup.unbox(args[operator.group])
        members = c10d._world.pg_group_ranks.get(group)
        if members is None or self._place.is_of_other_rank(group.group_name):  # not one of torch.distributed
            return
        ranks = list(members)
        if operator.kind in ("send", "recv"):
            self._note_message(None if operator.root is None else args[operator.root], ranks)
            return
        axis, name = _axis(group, ranks), group.group_name.removeprefix(self._place.prefix)
        before = {known: self._before[known] for known in self._axes()}
        stages = not self._peers.isdisjoint(ranks)
        call = _IssuedCall(_described(operator, args, ranks), axis, name, ranks, _line(), before, stages)
        place = f"{ranks}/{self._numbers[str(ranks)]}"
        self._store.set(f"{self._rank}/{self._issued}", json.dumps(call))
        self._store.set(f"{self._rank}/last", str(self._issued))
        self._store.set(f"{place}/{self._rank}", str(self._issued))
        self._store.add("events", 1)
        self._issued += 1
        self._before[axis] += 1
        self._numbers[str(ranks)] += 1
        difference = self._meet(place, call)
        if self._store.compare_set(place, "", "refused" if difference else "issued") == b"refused":
            self._fail(difference)

    def leave(self, error: str) -> None:
        """Reports that this rank issues no more calls."""
        self._store.set(f"{self._rank}/left", error)
        self._store.add("events", 1)

    def wait_for_all(self) -> None:
        """Waits until all ranks have left the block.

        Raises:
            RuntimeError: one raised, or does not come.
        """
        waiting = self._waiting()
        for rank in range(self._size):
            while not self._left(rank):
                if self._store.check(["error"]) or next(waiting):
                    self._fail(f"rank {rank} did not leave the block, {self._last(rank)}")
            if error := self._store.get(f"{rank}/left"):
                self._fail(f"rank {rank} left the block by {error.decode()}")

    def _note_message(self, peer: int | None, ranks: list[int]) -> None:
        # From any source: it may be any of them
        self._peers.update(ranks if peer is None else ranks[peer : peer + 1])
        self._peers.discard(self._rank)

    def _axes(self) -> Iterator[str]:
        """Yields the axes on which this rank has one group."""
        ranks_by_axis: dict[str, set[tuple[int, ...]]] = {}
        for group, members in c10d._world.pg_group_ranks.items():
            # Torch's mark for groups of other ranks is in the table, too
            if isinstance(group, dist.ProcessGroup) and not self._place.is_of_other_rank(group.group_name):
                ranks = list(members)
                ranks_by_axis.setdefault(_axis(group, ranks), set()).add(tuple(ranks))
                if group.group_desc == f"{_MESH}pp":
                    self._peers.update(rank for rank in ranks if rank != self._rank)
        return (axis for axis, groups in ranks_by_axis.items() if len(groups) == 1)

    def _waiting(self) -> Iterator[bool]:
        """Yields, each after a while, whether the time is up."""
        end, pause = time.monotonic() + self._timeout, 1e-4
        events, fruitless = -1, 0
        while True:
            if self._place.poll is None:
                time.sleep(pause)
                pause = min(2 * pause, 0.02)
            else:
                self._place.poll()
                known, events = events, self._store.add("events", 0)
                fruitless = fruitless + 1 if known == events else 0
            yield time.monotonic() > end or fruitless > _FRUITLESS_POLLS

    def _meet(self, place: str, call: _IssuedCall) -> str:
        """Waits until all ranks of the group are there. Returns what differs."""
        missing, waiting = [rank for rank in call.ranks if rank != self._rank], self._waiting()
        while True:
            for rank in [rank for rank in missing if self._store.check([f"{place}/{rank}"])]:
                missing.remove(rank)
                if _differ(call, self._call(rank, f"{place}/{rank}")):
                    return self._first_difference(call, rank)
            if not missing:
                return ""
            if self._store.check(["error"]):
                return "an error of another rank"  # which is the one that is raised
            reasons = (self._never_comes(rank, call) for rank in missing)
            if (reason := next(filter(None, reasons), "")) != "":
                return reason
            if next(waiting):
                return f"rank {missing[0]} did not issue {call.title} at {call.line}, {self._last(missing[0])}"

    def _never_comes(self, rank: int, call: _IssuedCall) -> str:
        """Returns why a rank that is missing will not issue the call."""
        if self._left(rank):
            error = self._store.get(f"{rank}/left").decode()
            here = f"rank {self._rank} issues {call.title} at {call.line}"
            return f"rank {rank} left the block by {error}; {here}" if error else self._first_difference(call, rank)
        if not self._store.check([f"{rank}/last"]):
            return ""
        last = self._call(rank, f"{rank}/last")
        if last.stages or call.stages:
            return ""
        # It has issued more than this rank over an axis, and will not have issued less when it comes
        after = Counter(last.before)
        after[last.axis] += last.axis in last.before
        ahead = any(after[axis] > number for axis, number in call.before.items() if axis != call.axis)
        return self._first_difference(call, rank) if ahead else ""

    def _left(self, rank: int) -> bool:
        return bool(self._store.check([f"{rank}/left"]))

    def _fail(self, difference: str) -> None:
        error = self._store.compare_set("error", "", difference).decode()
        self._store.add("events", 1)
        raise RuntimeError(f"compare_collectives: {error}")

    def _first_difference(self, call: _IssuedCall, other: int) -> str:
        """Describes the first call of this rank that is not the other one's, as the ranks of the group have it."""
        members = {*call.ranks} if not call.stages else {self._rank, other}  # stages have not much in common
        calls = {rank: self._calls_of(rank, call) for rank in sorted(members)}
        pairs = zip(calls[self._rank], calls[other], strict=False)
        equal = itertools.takewhile(lambda pair: pair[0].is_that(pair[1]), pairs)
        number = sum(1 for _ in equal)
        texts: dict[str, list[int]] = {}
        for rank, issued in calls.items():
            if number < len(issued):
                texts.setdefault(f"{issued[number].title} at {issued[number].line}", []).append(rank)
            elif self._left(rank):
                texts.setdefault("no further call", []).append(rank)
        shown = "; ".join(f"ranks {ranks} issue {text}" for text, ranks in texts.items())
        return f"call {number + 1} differs: {shown}"

    def _calls_of(self, rank: int, call: _IssuedCall) -> list[_IssuedCall]:
        """Returns the calls of a rank over the axes of ``call``; of a pipeline, of its group alone."""
        number = int(self._store.get(f"{rank}/last")) + 1 if self._store.check([f"{rank}/last"]) else 0
        calls = [self._call(rank, f"{rank}/{i}", number=i) for i in range(number)]
        if call.stages:
            return [other for other in calls if other.ranks == call.ranks]
        return [other for other in calls if other.axis in call.before or other.ranks == call.ranks]

    def _call(self, rank: int, key: str, number: int | None = None) -> _IssuedCall:
        """Returns the call of a rank whose number is stored under ``key``."""
        if number is None:
            number = int(self._store.get(key))
        return _IssuedCall(*json.loads(self._store.get(f"{rank}/{number}")))

    def _last(self, rank: int) -> str:
        if not self._store.check([f"{rank}/last"]):
            return "which has issued nothing in the block"
        last = self._call(rank, f"{rank}/last")
        return f"whose last call is {last.title} at {last.line}"


def _differ(call: _IssuedCall, other: _IssuedCall) -> bool:
    if not call.is_that(other):
        return True
    shared = () if call.stages or other.stages else call.before.keys() & other.before.keys()
    return any(call.before[axis] != other.before[axis] for axis in shared)


def _axis(group: dist.ProcessGroup, ranks: list[int]) -> str:
    """Returns what groups along one axis have in common: the axis' name, and the distances of their ranks."""
    # The default group of a job, which a mesh of one axis uses, has no name of an axis
    name = group.group_desc.removeprefix(_MESH) if group.group_desc.startswith(_MESH) else ""
    return f"{name}/{[rank - ranks[0] for rank in ranks]}"


def _described(operator: _Operator, args: tuple[Any, ...], ranks: list[int]) -> str:
    """Returns what has to be the same on all ranks of the group."""
    facts = [_tensor(operator, x) for x in _compared(operator, args)]
    if operator.reduction is not None:
        facts.append(str(dist.ReduceOp.unbox(args[operator.reduction]).op).rpartition(".")[2].lower())
    if operator.root is not None:
        facts.append(f"root {ranks[args[operator.root]]}")
    return f"{operator.kind}({', '.join(facts)})"


def _compared(operator: _Operator, args: tuple[Any, ...]) -> list[Tensor]:
    tensors = [] if operator.tensors is None else tree_leaves(args[operator.tensors])
    return tensors[:1] if operator.first else tensors


def _is_fake(operator: _Operator, args: tuple[Any, ...]) -> bool:
    return any(isinstance(x, FakeTensor) or x.is_meta for x in _compared(operator, args))


def _tensor(operator: _Operator, x: Tensor) -> str:
    shape = "" if operator.uneven else f" {list(x.shape)}"
    return str(x.dtype).removeprefix("torch.") + shape


def _line() -> str:
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    node, line = torch._C._current_autograd_node(), user_line(frame)
    if node is None:
        return line
    return f"{line}, in backward of {_NAMES.findall(node.name())[-1]}"  # without the templates of C++
