"""The pool of ranks: whatever they do, the parent has an answer in time and the next run works."""

import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import distributed as dist

from tests.helpers import ranks
from tests.helpers.paths import ROOT


def _sum(group, x=1.0):
    t = torch.full((2,), x + group.rank(), requires_grad=True)
    total = t.detach().clone()
    dist.all_reduce(total, group=group)
    return group.rank(), total, {"graph": t * 2}


@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_results_come_in_rank_order(p):
    for rank, (own_rank, total, rest) in enumerate(ranks.run(_sum, p, x=2.0)):
        assert own_rank == rank
        assert torch.equal(total, torch.full((2,), 2.0 * p + p * (p - 1) / 2))
        assert torch.equal(rest["graph"], torch.full((2,), 2.0 * (2 + rank)))
        assert not rest["graph"].requires_grad


def _world(group):
    assert group is dist.group.WORLD
    threads = torch.get_num_threads()
    return os.getpid(), dist.get_rank(), dist.get_world_size(), threads, torch.rand(3)


def test_each_p_has_its_world_its_processes_are_kept_and_seeded():
    before = {p: ranks.run(_world, p) for p in (2, 3)}
    after = {p: ranks.run(_world, p) for p in (3, 2)}
    for p, results in before.items():
        assert [r[:4] for r in results] == [r[:4] for r in after[p]]
        assert [r[1:4] for r in results] == [(rank, p, 1) for rank in range(p)]
        assert all(torch.equal(r[4], after[p][0][4]) for r in results)


def test_a_run_is_cheap():
    ranks.run(_sum, 2)
    seconds = []
    for _ in range(20):
        start = time.perf_counter()
        ranks.run(_sum, 2)
        seconds.append(time.perf_counter() - start)
    assert sorted(seconds)[5] < 0.05  # the machine may be busy during most of them


def _with_groups(group, count):
    for _ in range(count):
        dist.new_group()
    return os.getpid()


def test_workers_end_between_tests_once_the_threads_of_their_groups_cost_more_than_new_ones(monkeypatch):
    ranks.close()
    monkeypatch.setattr(ranks, "_MAX_GROUP_SECONDS", 0)
    workers = ranks.run(_with_groups, 2, 0)
    ranks.close_costly()
    assert ranks.run(_with_groups, 2, 9) == workers  # in use, with one group
    assert ranks.run(_with_groups, 2, 0) == workers  # never within a test
    ranks.close_costly()
    others = ranks.run(_with_groups, 2, 0)
    assert set(others).isdisjoint(workers)  # in use, with ten groups
    ranks.close_costly()
    ranks.close_costly()
    assert set(ranks.run(_with_groups, 2, 0)).isdisjoint(others)  # not in use


def _fail(group, failing, wait=False):
    if group.rank() in failing:
        raise KeyError(f"no key on rank {group.rank()}")
    if wait:
        dist.barrier(group)


def test_the_failing_rank_is_named_with_its_traceback():
    with pytest.raises(ranks.RankError, match="no key on rank 1") as e:
        ranks.run(_fail, 2, [1])
    assert (e.value.rank, e.value.ranks, e.value.type_name) == (1, [1], "KeyError")
    assert "in _fail" in e.value.traceback
    ranks.run(_sum, 2)


def test_a_rank_that_waits_for_a_failed_one_does_not_hold_the_test():
    start = time.monotonic()
    with pytest.raises(ranks.RankError, match=r"(?s)no key on rank 0.*still running: \[1, 2\]"):
        ranks.run(_fail, 3, [0], wait=True)
    assert time.monotonic() - start < 20
    ranks.run(_sum, 3)


def _hang(group):
    if group.rank() == 1:
        time.sleep(1000)


def test_a_hanging_rank_ends_the_run_in_time_and_shows_its_stack():
    start = time.monotonic()
    with pytest.raises(ranks.RankError, match="no answer within 1 s") as e:
        ranks.run(_hang, 2, timeout=1)
    assert time.monotonic() - start < 20
    # rank 0 waits in the sum that ends every run
    assert (e.value.type_name, e.value.ranks) == ("TimeoutError", [0, 1])
    assert "in _hang" in e.value.traceback
    ranks.run(_sum, 2)


def _die(group, killed):
    if group.rank() in killed:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier(group)


def test_a_killed_worker_is_named():
    with pytest.raises(ranks.RankError, match="exit code -9") as e:
        ranks.run(_die, 2, [1])
    assert (e.value.rank, e.value.type_name) == (1, "WorkerDied")
    ranks.run(_sum, 2)


def test_a_worker_killed_between_runs_is_named():
    os.kill(ranks.run(_world, 2)[0][0], signal.SIGKILL)
    with pytest.raises(ranks.RankError, match="exit code -9") as e:
        ranks.run(_sum, 2)
    assert (e.value.rank, e.value.type_name) == (0, "WorkerDied")
    ranks.run(_sum, 2)


def _one_collective_more(group):
    if group.rank() == 0:
        dist.all_reduce(torch.ones(1), group=group, async_op=True)


def test_an_unmatched_collective_fails_its_own_run():
    with pytest.raises(ranks.RankError):
        ranks.run(_one_collective_more, 2, timeout=5)
    ranks.run(_sum, 2)


def test_a_function_that_cannot_travel_is_refused_and_the_pool_is_kept():
    before = ranks.run(_world, 2)[0][0]
    with pytest.raises((AttributeError, pickle.PicklingError), match=r"(?i)pickle"):
        ranks.run(lambda group: None, 2)
    assert ranks.run(_world, 2)[0][0] == before


def _refuse(group, what):
    rank = group.rank()
    if what == "right":
        raise ValueError(f"dim: 7 is wrong on rank {rank}")
    if what == "types differ":
        raise ValueError("dim: wrong") if rank else TypeError("dim: wrong")
    if what == "messages differ":
        raise ValueError("dim: wrong" if rank else "dim: bad wrong")
    if what == "one is silent" and rank == 0:
        raise ValueError("dim: wrong")
    if what == "sends first":
        dist.all_reduce(torch.ones(1), group=group)
        raise ValueError("dim: wrong")


def test_run_raises_wants_one_error_on_all_ranks_and_nothing_sent():
    assert ranks.run_raises(_refuse, 2, ValueError, "dim.*wrong", "right") == [
        "dim: 7 is wrong on rank 0",
        "dim: 7 is wrong on rank 1",
    ]
    for what in ("types differ", "messages differ", "one is silent", "nothing"):
        with pytest.raises(AssertionError):
            ranks.run_raises(_refuse, 2, ValueError, "dim.*wrong", what)
    with pytest.raises(AssertionError, match="is not in"):
        ranks.run_raises(_refuse, 2, ValueError, "sizes", "right")
    with pytest.raises(AssertionError, match="ValueError, expected IndexError or TypeError"):
        ranks.run_raises(_refuse, 2, (IndexError, TypeError), "dim", "right")
    with pytest.raises((ranks.RankError, AssertionError)):
        ranks.run_raises(_refuse, 2, ValueError, "dim", "sends first", timeout=3)
    ranks.run_raises(_refuse, 2, ValueError, "dim", "sends first", in_turns=False)


def _no_group():
    return dist.is_initialized(), os.getpid()


def test_run_fresh_has_no_group_and_no_past():
    first, second = ranks.run_fresh(_no_group), ranks.run_fresh(_no_group)
    assert not first[0]
    assert first[1] != second[1]


_PARENT = """
import os, pickle, sys
if __name__ == "__main__":
    from tests.helpers import ranks
    ranks.PRELOADED = ["torch"]  # what a worker needs, without what takes as long again
    pool = ranks._Pool(0, 2)
    print(pool.run(pickle.dumps((sys.path, pickle.dumps((os.getpid, (), {})))), 180), flush=True)
    if sys.argv[1] == "killed":
        os.kill(os.getpid(), 9)
    raise SystemExit(7)
"""


@pytest.mark.parametrize("how", ["killed", pytest.param("error", marks=pytest.mark.exhaustive)])
def test_no_worker_outlives_its_parent(how, tmp_path):
    (tmp_path / "parent.py").write_text(_PARENT)
    command, environment = [sys.executable, tmp_path / "parent.py", how], os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == (-9 if how == "killed" else 7), done.stderr
    deadline = time.monotonic() + 60
    for pid in map(int, done.stdout.strip("[]\n").split(",")):
        while _alive(pid):
            assert time.monotonic() < deadline, f"worker {pid} is still there"
            time.sleep(0.05)


def _alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")  # a zombie is dead, and there may be no one to reap it
    return not stat.exists() or stat.read_text().split()[2] != "Z"
