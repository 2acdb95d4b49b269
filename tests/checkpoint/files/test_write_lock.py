"""One writer at a time: by flock, and by the existence of the file where a file system refuses flock."""

import errno
import fcntl
import json
import os
import signal
import time

import pytest

from tests.helpers import ranks
from tp_ext.checkpoint.files import write_lock
from tp_ext.checkpoint.files.write_lock import WriteLock

pytestmark = pytest.mark.core


def _refused(*_):
    raise OSError(errno.ENOLCK, "No locks available")


@pytest.fixture(params=["flock", "file"])
def how(request, monkeypatch):
    if request.param == "file":
        monkeypatch.setattr(fcntl, "flock", _refused)
    monkeypatch.setattr(write_lock, "TURN_SECONDS", 0.0)
    return request.param


def _try(target):
    lock = WriteLock(target)
    return lock if lock.take_turn(time.monotonic(), 60) else None


def test_one_holds_it_the_next_one_waits_and_names_the_first(how, tmp_path):
    target = tmp_path / "x"
    first = _try(target)
    assert first and _try(target) is None
    second = WriteLock(target)
    with pytest.raises(TimeoutError, match=rf"x' is being written by process {os.getpid()} on .* lock_timeout = 0.1 s"):
        second.take_turn(time.monotonic() - 0.1, 0.1)
    first.check_held()
    first.release()
    assert os.listdir(tmp_path) == []
    assert second.take_turn(time.monotonic(), 0.1)
    second.check_held()
    second.release()
    assert os.listdir(tmp_path) == []


def _hold(target, how, pipe):
    if how == "file":
        fcntl.flock = _refused
    lock = WriteLock(target)
    held = lock.take_turn(time.monotonic(), 60)
    if os.fork() == 0:  # such as a worker of a DataLoader, which may outlive it
        pipe.send(held and os.getpid())
    time.sleep(60)
    os._exit(0)


def test_the_lock_of_a_killed_process_is_free_at_once(how, tmp_path):
    here, there = ranks._context.Pipe(duplex=False)
    holder = ranks._context.Process(target=_hold, args=(tmp_path / "x", how, there), daemon=True)
    holder.start()
    child = here.recv()
    try:
        assert child and _try(tmp_path / "x") is None
        os.kill(holder.pid, signal.SIGKILL)
        holder.join()
        lock = WriteLock(tmp_path / "x")
        assert lock.take_turn(time.monotonic(), 0)
        lock.release()
    finally:
        os.kill(child, signal.SIGKILL)
    assert os.listdir(tmp_path) == []


def test_a_holder_on_another_host_is_watched(tmp_path, monkeypatch):
    """Without flock: as long as its file's time moves on it lives; the clocks of the hosts are not compared."""
    monkeypatch.setattr(fcntl, "flock", _refused)
    monkeypatch.setattr(write_lock, "TURN_SECONDS", 0.1)
    monkeypatch.setattr(write_lock, "_SILENT_SECONDS", 0.3)
    file = WriteLock(tmp_path / "x").path
    file.write_text(json.dumps({"host": "far", "pid": os.getpid(), "started": "1", "machine": "another"}))
    lock, begin = WriteLock(tmp_path / "x"), time.monotonic()
    for beat in range(5):
        os.utime(file, (beat, beat))
        assert not lock.take_turn(begin, 60)
    assert lock.owner() == f"process {os.getpid()} on far"
    for _ in range(5):
        if lock.take_turn(begin, 60):
            break
    lock.check_held()
    lock.release()
    assert os.listdir(tmp_path) == []


def test_the_holder_keeps_the_time_of_its_file_moving(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", _refused)
    monkeypatch.setattr(write_lock, "_TOUCH_SECONDS", 0.02)
    lock = _try(tmp_path / "x")
    before = lock.path.stat().st_mtime_ns
    end = time.monotonic() + 10
    while lock.path.stat().st_mtime_ns == before:
        assert time.monotonic() < end
    lock.release()


def test_a_lock_that_is_taken_away_is_noticed(how, tmp_path):
    lock = _try(tmp_path / "x")
    lock.path.unlink()
    other = _try(tmp_path / "x")
    with pytest.raises(OSError, match=r"removed, or taken by process .* while it was held"):
        lock.check_held()
    lock.release()
    other.check_held()  # is not removed by the one that has lost it
    other.release()


def test_a_forked_child_does_not_unlock_it(tmp_path):
    lock = _try(tmp_path / "x")
    child = os.fork()
    if child == 0:
        del lock
        os._exit(0)
    os.waitpid(child, 0)
    assert WriteLock(tmp_path / "x")._acquired() is False
    lock.release()
