"""All ranks of a group in this process: see :func:`simulate`."""

import functools
import itertools
from collections.abc import Callable
from typing import Any, TypeVar

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import HashStore

from tp_ext._checks import check_int
from tp_ext.simulation.baton import Baton
from tp_ext.simulation.groups import SimulatedGroups, ranks_of, torch_sees_groups_of_rank
from tp_ext.simulation.members import describe_stuck
from tp_ext.simulation.place import RankPlace, enter, here
from tp_ext.simulation.rank_state import own_generators

__all__ = ["simulate"]

T = TypeVar("T")
_serial = itertools.count()


def simulate(fn: Callable[..., T], p: int | dict[str, int], *args: Any, seed: int = 0) -> list[T]:
    """Runs ``fn(rank, group, *args)`` on every rank of a group, inside this process, and returns the results by rank.

    ::

        def forward(rank, group):
            layer = tp_ext.ColumnParallelLinear.from_linear(linear, group=group, gather_output=True)
            return layer(x)

        outputs = tp_ext.debug.simulate(forward, 4)

    Every rank is a thread, of which one runs at a time: a rank runs until it waits for others, in a collective for
    example, and hands over to the next one that can run, in the order of the ranks. So every run is the same, a
    debugger stops one rank while all others stand still, and the state that torch keeps for the process is that of the
    rank that runs: the random generators (torch's, ``random`` and ``numpy.random``), the default dtype, the filters of
    warnings, the seed of :func:`tp_ext.manual_seed`. Gradient mode and autocast are the caller's at first;
    torch's dispatch and function modes do not reach the ranks. Afterwards all state of the caller is as before, no
    thread is left, and nothing that the ranks made is kept but the results.

    ``group`` works for everything that takes a process group: all of this package, ``torch.distributed`` with
    ``group=`` (also ``async_op=True``, messages, objects), functional collectives, ``count_collectives``, which counts
    the rank's own calls. It is also the rank's default group; one of the process is left alone. Values are those of
    processes over ``tp_shm``, bit by bit: sums add in the order of the ranks. A send is buffered: it does not wait for
    its receive. Tensors on one CUDA device work, too; their sums are computed on the CPU. ``new_group``,
    ``init_device_mesh`` and their kin make groups of simulated ranks, whatever ``backend`` they are given.

    A simulation may run inside of a rank of another one, not in two threads at once.

    Args:
        fn: what a rank runs. It may be a closure: all ranks share the objects of this process, so it must not write
            to them, parameters of a model outside included.
        p: the number of ranks; or sizes of named axes, such as ``{"dp": 2, "tp": 2}``: ``group`` is then a
            ``DeviceMesh``, on torch's default device, whose rank is ``rank``.
        *args: passed to every rank.
        seed: every rank begins with ``torch.manual_seed(seed)``.

    Communicates nothing outside of this process.

    Raises:
        RuntimeError: a rank raised an exception, which is the ``__cause__``, or returned while others waited for it;
            two calls do not belong together, by kind, shape, dtype, operation or root; or all ranks wait. The message
            names rank, call and line, and is raised on the other ranks, too, where they wait.
        TypeError, ValueError: ``p`` is no size, nor a dict of them, ``fn`` no function, ``seed`` no integer.
    """
    axes, size = ranks_of(p)
    if not callable(fn):
        raise TypeError(f"fn: {fn!r} must be a function fn(rank, group, *args)")
    check_int(seed=seed)
    outer, serial = here(), next(_serial)
    prefixes = [outer.inner(serial, rank) for rank in range(size)]

    def run_rank(rank: int) -> T:
        new_group, poll = functools.partial(groups.new_group, rank), functools.partial(baton.poll, rank)
        enter(RankPlace(prefixes[rank], groups.world[rank], new_group, {}, outer, store, poll))
        return fn(rank, groups.argument(rank), *args)

    store = HashStore()
    baton = Baton(size, seed, run_rank, describe_stuck)
    groups = SimulatedGroups(baton, axes, size, prefixes)
    _keep_guard_of_fakes()
    try:
        with torch_sees_groups_of_rank(), own_generators():
            return baton.run()
    finally:
        groups.remove()


@functools.cache
def _keep_guard_of_fakes() -> None:
    """Enters a mode of fake tensors in the caller's thread. Where there is no GPU, torch 2.11 leaves a guard for the
    device in the first thread that enters one, and the next one crashes the process if that thread has ended."""
    with FakeTensorMode():
        pass
