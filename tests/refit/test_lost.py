"""A rank that is killed in the middle of a run: all others know which one, and each target is whole."""

import os
import signal
import tempfile
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tp_ext
from tests.helpers import ranks
from tp_ext.refit.lost import Watch

TIMEOUT = 6.0  # of the group, in seconds
P, VICTIM = 4, 2


def _model(value):
    return nn.ParameterDict({name: torch.full((64, 3), value) for name in "abcd"}) if value is not None else None


def _kill():
    os.kill(os.getpid(), signal.SIGKILL)


def _dying_at(point):
    """Makes this process die at a point of the second run: before or after a call of a collective, by number, or when
    it has confirmed, before or after the all-reduce; or after seconds."""
    kind, number = point
    if kind == "after seconds":
        threading.Timer(number, _kill).start()
    calls = {"buckets": 0}
    reduce, confirm = dist.all_reduce, Watch.confirm

    def counted(exchange):
        def call(*args, **options):
            calls["buckets"] += 1
            if kind == "before bucket" and calls["buckets"] == number:
                _kill()
            exchange(*args, **options)
            if kind == "after bucket" and calls["buckets"] == number:
                _kill()

        return call

    def all_reduce(*args, **options):
        reduce(*args, **options)
        if kind == "after all have confirmed":
            _kill()

    def confirmed(self):
        if kind == "before it confirms":
            _kill()
        confirm(self)
        if kind == "after it has confirmed":
            time.sleep(number)
            _kill()

    dist.all_to_all_single, dist.all_to_all = counted(dist.all_to_all_single), counted(dist.all_to_all)
    dist.all_reduce, Watch.confirm = all_reduce, confirmed


def _survive(store, rank_file, backend, point, atomic):
    """Returns, on a survivor, the ranks that were lost, whether it has the new weights, the values of its target, and
    the seconds that it took."""
    rank = _number(rank_file)
    store = dist.FileStore(store, P)
    dist.init_process_group(backend, store=store, rank=rank, world_size=P, timeout=timedelta(seconds=TIMEOUT))
    # Two train, three generate, one of them both
    source, target = _model(1.0 if rank < 2 else None), _model(0.0 if rank >= 1 else None)
    plan = tp_ext.refit.plan(source, target, bucket_bytes=1024, atomic=atomic)
    plan.run()
    for param in source.parameters() if source is not None else ():
        param.data.fill_(2.0)
    if rank == VICTIM:
        _dying_at(point)
    begun = time.monotonic()
    lost = installed = None
    try:
        plan.run()
    except tp_ext.refit.RankLost as error:
        lost, installed = error.ranks, error.installed
    took = time.monotonic() - begun
    time.sleep(0.5)  # the sockets of a process that ends are closed, as those of one that dies
    values = [] if target is None else sorted({v for p in target.parameters() for v in p.flatten().tolist()})
    return rank, lost, installed, values, took


def _number(folder):
    """A number of its own for each process."""
    for number in range(P):
        try:
            os.close(os.open(os.path.join(folder, str(number)), os.O_CREAT | os.O_EXCL))
            return number
        except FileExistsError:
            continue
    raise AssertionError


def _worker(queue, *args):
    queue.put(_survive(*args))


def survivors_of(backend, point, atomic):
    """Returns for each rank but the victim what :func:`_survive` does."""
    context = ranks._context  # of a server that has imported torch
    queue = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        os.mkdir(f"{folder}/numbers")
        args = queue, f"{folder}/store", f"{folder}/numbers", backend, point, atomic
        processes = [context.Process(target=_worker, args=args, daemon=True) for _ in range(P)]
        for process in processes:
            process.start()
        reports = [queue.get(timeout=60) for _ in range(P - 1)]
        for process in processes:
            process.join(20)
            process.kill()
    return {rank: rest for rank, *rest in reports}


POINTS = [
    *((f"{when} bucket", number) for when in ("before", "after") for number in (1, 2, 3)),
    ("before it confirms", 0),
    ("after it has confirmed", 0.0),
    ("after it has confirmed", 0.5),
    ("after all have confirmed", 0),
]


def check_whole(survivors, may_end):
    """Asserts that all know who died and have whole weights, all the old ones or all the new ones; returns which.

    ``may_end``: a survivor may have ended without an error, since it saw all confirm.
    """
    assert set(survivors) == set(range(P)) - {VICTIM}
    ended = {lost is None or installed for lost, installed, _, _ in survivors.values()}
    assert len(ended) == 1, survivors
    for rank, (lost, installed, values, took) in survivors.items():
        assert lost == (VICTIM,) or (may_end and lost is None), survivors
        if rank:
            assert values == [2.0 if lost is None or installed else 1.0], survivors
        assert took < TIMEOUT + 4
    return ended.pop()


BY_DEFAULT = {(POINTS[0], "gloo"), (POINTS[4], "tp_shm"), (POINTS[6], "gloo"), (POINTS[7], "tp_shm")}
CASES = [
    pytest.param(point, backend, marks=[] if (point, backend) in BY_DEFAULT else pytest.mark.exhaustive)
    for point in POINTS
    for backend in ("gloo", "tp_shm")
]


@pytest.mark.parametrize(("point", "backend"), CASES)
def test_a_rank_is_killed_at_any_point(point, backend):
    ended = check_whole(survivors_of(backend, point, True), may_end=point[0].startswith(("after all", "after it")))
    if "bucket" in point[0] or point[0] == "before it confirms":
        assert not ended


def test_without_atomic_the_error_says_that_the_target_is_mixed():
    survivors = survivors_of("gloo", ("after bucket", 2), False)
    assert {lost for lost, *_ in survivors.values()} == {(VICTIM,)}
