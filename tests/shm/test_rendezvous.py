"""The rendezvous of tp_shm over a store that has served other groups of that name, or that fails on the way."""

import os
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.shm.backends import launch, results, segments, timed_error
from tp_ext._build import load

pytestmark = pytest.mark.core


def _meet(store, rank, p, seconds=20.0):
    return load().create_shm_backend(store, rank, p, timedelta(seconds=seconds), "test")


def _on_threads(*calls):
    """The result or error of each call, from a thread each."""
    answers = [None] * len(calls)

    def run(i):
        try:
            answers[i] = calls[i]()
        except Exception as e:
            answers[i] = e

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def _work(groups):
    """One all-reduce over groups of one process."""
    xs = [torch.tensor([float(group.rank() + 1)]) for group in groups]
    works = [group.allreduce([x]) for group, x in zip(groups, xs, strict=True)]
    assert [work.wait() for work in works] and len({x.item() for x in xs}) == 1


class _Store(dist.Store):
    """A store of Python over another one, which is lost after `operations` of them, and counts them."""

    def __init__(self, store, operations=1 << 60):
        super().__init__()
        self.store, self.left, self.used = store, operations, 0

    def _count(self):
        self.used += 1
        if self.used > self.left:
            raise RuntimeError("the store is lost")

    def set(self, key, value):
        self._count()
        self.store.set(key, value)

    def get(self, key):
        self._count()
        return self.store.get(key)

    def check(self, keys):
        self._count()
        return self.store.check(keys)

    def deleteKey(self, key):  # noqa: N802, torch's name
        self._count()
        return self.store.delete_key(key)

    def wait(self, keys, timeout=None):
        self._count()
        self.store.wait(keys, timeout or timedelta(seconds=20))

    def multi_get(self, keys):
        self._count()
        return self.store.multi_get(keys)

    def multi_set(self, keys, values):
        self._count()
        self.store.multi_set(keys, values)


@pytest.mark.parametrize("p", [2, 5])
def test_few_round_trips(p):
    store = dist.HashStore()
    stores = [_Store(store) for _ in range(p)]
    groups = _on_threads(*(lambda r=r: _meet(stores[r], r, p) for r in range(p)))
    assert [group.rank() for group in groups] == list(range(p))
    assert [s.used for s in stores[1:]] == [5] * (p - 1)
    assert stores[0].used < 20  # it may look again while the others come


def test_a_lost_store_leaves_no_name_behind():
    """At each of the operations, on either rank: the process, which lives on, has no segment left."""
    for rank in range(2):
        for operations in range(6):
            store = dist.HashStore()
            stores = [_Store(store), _Store(store)]
            stores[rank].left = operations
            answers = _on_threads(*(lambda r=r, s=stores: _meet(s[r], r, 2, 0.3) for r in range(2)))
            assert not segments([os.getpid()]), (rank, operations)
            assert operations > 1 or all(isinstance(answer, RuntimeError) for answer in answers)
            del answers


def test_keys_of_ranks_that_are_gone():
    """Killed while they waited for rank 0, refused, or answered: the next ranks find each other all the same."""
    store = dist.HashStore()
    number = "0123456789abcdef" * 2
    for word in (number, "!" + number + "no room", ""):
        store.set("tp_shm/rank/1", word)
        store.set(f"tp_shm/offer/{number}", f"elsewhere:0:other\n/tp_shm.1.1.{number}")
        late = lambda: time.sleep(0.2) or _meet(store, 1, 2)  # noqa: E731
        groups = _on_threads(lambda: _meet(store, 0, 2), late)
        _work(groups)
        assert store.get("tp_shm/rank/1") == b""


def test_a_rank_that_gave_up_comes_again():
    store = dist.HashStore()
    _, message = timed_error(lambda: _meet(store, 1, 2, 0.1))
    assert "waited 100 ms for rank 0" in message
    _, message = timed_error(lambda: _meet(store, 0, 2, 0.1))
    assert "waited 100 ms for rank 1" in message
    keys = store.num_keys()
    for _ in range(3):
        groups = _on_threads(*(lambda r=r: _meet(store, r, 2) for r in (1, 0)))
        _work(groups)
        del groups
    assert store.num_keys() == keys  # none is added by a group that comes together


def _another_size(rank, p, folder):
    return timed_error(lambda: _meet(dist.FileStore(str(folder / "store"), p), rank, p + (rank == 2)))


def test_the_reason_of_one_rank_is_raised_on_all():
    """Here one that expects a larger segment."""
    for seconds, message in results(launch(_another_size, 3)):
        assert 0 <= seconds < 10 and "cannot be made: rank 2: shared memory" in message


def _rounds(rank, p, folder, kind, rounds):
    """Default groups over one store, made and destroyed."""
    port = folder / "port"
    if kind == "tcp" and rank == 0:
        store = dist.TCPStore("localhost", 0, p, True, wait_for_workers=False)
        (folder / "port.new").write_text(str(store.port))
        (folder / "port.new").rename(port)
    elif kind == "tcp":
        while not port.exists():
            time.sleep(0.01)
        store = dist.TCPStore("localhost", int(port.read_text()), p, False)
    else:
        store = dist.FileStore(str(folder / "store"), p)
    for i in range(rounds):
        dist.init_process_group("tp_shm", store=store, rank=rank, world_size=p, timeout=timedelta(seconds=20))
        if i % 2:
            dist.all_reduce(x := torch.ones(1))
            assert x.item() == p
        dist.destroy_process_group()
    dist.init_process_group("tp_shm", store=store, rank=rank, world_size=p)
    dist.barrier()  # the server goes with rank 0
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_default_groups_over_a_store_that_lives_on(kind):
    results(launch(_rounds, 3, kind, 12, timeout=150))
