"""What tp_shm leaves on the machine: nothing, in /dev/shm or elsewhere; who may read it while it is there; forks."""

import ctypes
import os
import stat
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from tests.helpers.other_host import move_to_another_host
from tests.helpers.paths import ROOT
from tests.helpers.ranks import run
from tests.shm.backends import launch, results, segments, start, timed_error

pytestmark = pytest.mark.core
SHM = Path("/dev/shm")


class _Watch(threading.Thread):
    """Looks at /dev/shm as often as it can: name -> (mode, owner), of the segments of any process."""

    def __init__(self):
        super().__init__(daemon=True)
        self.seen, self.over = {}, threading.Event()

    def run(self):
        while not self.over.is_set():
            for name in {name for name in os.listdir(SHM) if name.startswith("tp_shm.")} - self.seen.keys():
                try:
                    found = os.stat(SHM / name)
                    self.seen[name] = stat.S_IMODE(found.st_mode), found.st_uid
                except FileNotFoundError:
                    pass

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *exception):
        self.over.set()
        self.join()


def _groups(world, backend, count):
    for i in range(count):
        group = dist.new_group(backend=backend)
        dist.all_reduce(x := torch.full((3,), float(i)), group=group)
        assert x.tolist() == [i * world.size()] * 3
        dist.destroy_process_group(group)
    return os.getpid()


def test_segments_are_private_and_their_names_cannot_be_guessed():
    with _Watch() as watch:
        pids = run(_groups, 2, "tp_shm", 60)
    made = {name for name in watch.seen if any(f".{pid}." in name for pid in pids)}
    assert made, "no segment was seen: look more often, or it has no name at all, which is better still"
    for name, (mode, owner) in watch.seen.items():
        assert mode == 0o600 and owner == os.getuid(), (name, oct(mode))
    ends = [name[-16:] for name in watch.seen]
    assert len(set(ends)) == len(ends) and all(int(end, 16) for end in ends)
    assert not segments(pids)


def _mapped(rank, p, folder):
    start(rank, p, folder, "cpu:tp_shm")
    dist.all_reduce(torch.ones(3))
    dist.barrier()
    return segments([os.getpid()])


def test_no_name_stays_while_a_group_lives():
    """So that not even the kill of all its ranks leaves something behind."""
    assert results(launch(_mapped, 2)) == [set()] * 2


def _stopped(rank, p, folder, after):
    """Killed that long after its start began, wherever it is by then."""
    if rank == p - 1:
        os.fork() or os.setpgid(0, 0) or time.sleep(after) or os.kill(os.getppid(), 9) or os._exit(0)
    errors = timed_error(lambda: start(rank, p, folder, "cpu:tp_shm", seconds=1) and dist.barrier())
    return errors[0]


def test_nothing_stays_when_a_rank_is_killed_while_it_starts():
    for trial in range(4):
        outcomes = launch(_stopped, 2, trial * 0.005)
        assert outcomes[0].error is None and outcomes[0].exitcode == 0, outcomes[0]
        assert not segments(outcome.pid for outcome in outcomes)


SCRIPT = """
import sys, time
from datetime import timedelta
import torch, torch.distributed as dist
import tp_ext
rank, folder, how = int(sys.argv[1]), sys.argv[2], sys.argv[3]
store = dist.FileStore(folder + "/store", 2)
dist.init_process_group("cpu:tp_shm", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=30))
other = dist.new_group(backend="tp_shm")
dist.all_reduce(x := torch.ones(5))
assert x.tolist() == [2.0] * 5
dist.barrier()
if "works" in how:
    dist.all_reduce(torch.ones(5), group=other, async_op=True)
    pending = dist.irecv(torch.ones(3), 1 - rank)
if "raises" in how:
    raise SystemExit(3)
print("end", flush=True)
"""


ENDS = [("works", "works raises"), ("works", "works"), ("raises", "raises")]


@pytest.mark.exhaustive  # a forked process, as the next test has, needs not import torch
@pytest.mark.parametrize("hows", ENDS, ids=" and ".join)
def test_a_program_ends_without_destroy_process_group(hows, tmp_path):
    """Works in flight among them; no hang, no crash, nothing left."""
    command = [sys.executable, "-c", SCRIPT]
    root = str(ROOT)
    environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path), how], env=environment, stderr=subprocess.PIPE, text=True)
        for rank, how in enumerate(hows)
    ]
    try:
        for rank, how in zip(ranks, hows, strict=True):
            _, errors = rank.communicate(timeout=60)
            assert rank.returncode == (3 if "raises" in how else 0), errors
    finally:
        for rank in ranks:
            rank.kill()
    assert not segments(rank.pid for rank in ranks)


def _finalized(rank, p, folder, script, hows):
    """The same script in a process that is forked, and ends as the interpreter does: all is finalized."""
    sys.argv[1:] = [str(rank), str(folder), hows[rank]]
    try:
        exec(compile(script, "script", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        ctypes.pythonapi.Py_Exit(end.code)
    ctypes.pythonapi.Py_Exit(0)


def test_an_interpreter_ends_without_destroy_process_group():
    outcomes = launch(_finalized, 2, SCRIPT, ENDS[0])
    assert [(outcome.error, outcome.exitcode) for outcome in outcomes] == [("Died", 0), ("Died", 3)], outcomes
    assert not segments(outcome.pid for outcome in outcomes)


# Forks


class _Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, i):
        return torch.tensor(float(i * i))


def _loads(rank, p, folder, backend):
    """Workers of a DataLoader are forked from a rank that has groups, and end before it."""
    start(rank, p, folder, backend)
    dist.all_reduce(torch.ones(3))
    total = torch.zeros(())
    for batch in DataLoader(_Squares(), batch_size=4, num_workers=2, multiprocessing_context="fork"):
        total += batch.sum()
        dist.all_reduce(x := torch.ones(1))
        assert x.item() == p
    dist.all_reduce(total)
    return total.item()


@pytest.mark.parametrize("backend", ["cpu:gloo", "cpu:tp_shm"])
def test_forked_workers_of_a_data_loader_do_no_harm(backend):
    assert results(launch(_loads, 2, backend)) == [2.0 * sum(i * i for i in range(16))] * 2


def _forked(rank, p, folder):
    """A forked child uses the groups, works and futures of its parent."""
    world = start(rank, p, folder, "cpu:tp_shm")
    x, y = torch.ones(3), torch.ones(3)
    work = dist.all_reduce(x, async_op=True) if rank == 0 else None
    child = os.fork()
    if child == 0:
        # Uses of what is under way are refused; abort does nothing
        uses = [lambda: dist.all_reduce(y)]
        if rank == 0:
            uses += [work.wait, work.is_completed, work.get_future, lambda: work.wait(timedelta(seconds=1))]
        refused = ["forked" in timed_error(use)[1] for use in uses]
        world._get_backend(torch.device("cpu")).abort()
        os._exit(0 if all(refused) else 1 + refused.index(False))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    dist.all_reduce(x) if rank == 1 else work.wait()
    dist.all_reduce(y)
    return x.tolist() + y.tolist()


def test_a_forked_child_does_no_harm_to_its_parents_group():
    assert results(launch(_forked, 2)) == [[2.0] * 6] * 2


# Another host


def _hosts(rank, p, folder, hostname):
    if rank == p - 1 and not move_to_another_host(hostname):
        return "not permitted", ""
    return timed_error(lambda: start(rank, p, folder, "cpu:tp_shm", seconds=5))


@pytest.mark.parametrize("hostname", ["another-host", ""], ids=["host", "container"])
def test_ranks_on_two_hosts_are_refused_at_init(hostname):
    outcomes = launch(_hosts, 3, hostname)
    errors = results(outcomes)
    if errors[2][0] == "not permitted":
        pytest.skip("no permission to make namespaces")
    for rank, (seconds, message) in enumerate(errors):
        assert 0 <= seconds < 4, (rank, seconds, message)
        assert "host" in message or "/dev/shm" in message, (rank, message)
    assert not segments(outcome.pid for outcome in outcomes)
