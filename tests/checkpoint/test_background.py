"""Asynchronous saves: what is saved is the state at the call, whatever the training does meanwhile; one at a time."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import tp_ext
from tests.helpers import ranks
from tests.helpers.numbered import build, fill
from tests.helpers.on_ranks import on_ranks
from tests.helpers.paths import ROOT
from tp_ext._object_collectives import all_gather_objects, call_and_combine
from tp_ext.checkpoint import background, directory, plan_exchange

pytestmark = pytest.mark.core


def loaded(path):
    """The step of a checkpoint, which every number in it is."""
    model, optimizer = build(None)
    step = tp_ext.load_checkpoint(path, model, optimizer)["step"]
    values = [*model.state_dict().values(), *(v for state in optimizer.state.values() for v in state.values())]
    assert all(bool((value == step).all()) for value in values) and optimizer.param_groups[0]["lr"] == step
    return step


def save(group, path, model, optimizer, step, **options):
    fill(model, optimizer, step)
    return tp_ext.save_checkpoint(path, model, optimizer, step=step, asynchronous=True, **options)


def _train_on(group, path):
    original, begin = directory._write_entries, threading.Event()

    def slowly(*args):
        assert begin.wait(30)
        return original(*args)

    directory._write_entries = slowly
    try:
        model, optimizer = build(group)
        first = save(group, path / "first", model, optimizer, 1)
        fill(model, optimizer, 2)
        total = torch.ones(1)
        for _ in range(5):  # the thread has a group of its own
            dist.all_reduce(total, group=group)
        assert not first.done() and not (path / "first").exists()
        threading.Timer(0.3, begin.set).start()
        second = save(group, path / "second", model, optimizer, 2)
        assert first.done() and (path / "first").exists()
        fill(model, optimizer, 3)
        tp_ext.load_checkpoint(path / "second", model, optimizer)  # waits for it
        assert second.done()
        tp_ext.save_checkpoint(path / "third", model, optimizer, step=2)
    finally:
        directory._write_entries = original


def test_the_state_at_the_call_is_saved_and_a_second_save_waits(tmp_path):
    ranks.run(_train_on, 2, tmp_path)
    assert [loaded(tmp_path / name) for name in ("first", "second", "third")] == [1, 2, 2]


def _destroy(path):
    try:
        (path / "first").mkdir()
        rank = 0
    except FileExistsError:
        rank = 1
    dist.init_process_group("gloo", store=dist.FileStore(str(path / "store"), 2), rank=rank, world_size=2)
    original, reached, destroyed = directory._write_entries, threading.Event(), threading.Event()

    def slowly(*args):
        reached.set()
        assert destroyed.wait(60)
        return original(*args)

    directory._write_entries = slowly
    model, optimizer = build(dist.group.WORLD)
    saving = save(dist.group.WORLD, path / "saved", model, optimizer, 1)
    assert reached.wait(60)
    dist.destroy_process_group()
    destroyed.set()
    with pytest.raises(OSError, match="could not be written: process_group: was destroyed before the save was done"):
        saving.result(60)


def test_a_save_does_not_go_on_after_its_group_is_destroyed(tmp_path):
    """As if each rank were the only one: they would write one file, or wait for ever for the first."""
    ranks.run_apart(_destroy, 2, tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["first", "store"]
    for call in (all_gather_objects, lambda value, group: call_and_combine(group, lambda: value, list)):
        assert call(1, None) in (1, [1])
        with pytest.raises(RuntimeError, match="process_group: was destroyed"):
            call(1, object())


def _interrupt(path):
    original, begin = directory._write_entries, threading.Event()

    def slowly(*args):
        assert begin.wait(60)
        return original(*args)

    directory._write_entries = slowly
    model, optimizer = build(None)
    first = save(None, path / "first", model, optimizer, 1)
    if (child := os.fork()) == 0:  # it has no such thread
        background.wait_for_last_save()
        background._report()
        os._exit(0)
    end = time.monotonic() + 20
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.02)
    assert time.monotonic() < end
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        save(None, path / "second", model, optimizer, 2)
    assert not first.done()
    threading.Timer(0.3, begin.set).start()
    save(None, path / "second", model, optimizer, 2).result()
    assert first.done()


def test_a_waiting_rank_may_be_interrupted_or_fork(tmp_path):
    ranks.run_fresh(_interrupt, tmp_path)
    assert [loaded(tmp_path / name) for name in ("first", "second")] == [1, 2]


def test_an_error_that_a_timeout_has_kept_from_the_caller_is_raised_by_the_next_save():
    begin = threading.Event()

    def fail():
        assert begin.wait(60)
        raise OSError("full")

    saving = background.begin_save("path", fail)
    saving.done = lambda: True  # as when it fails right after the timeout
    with pytest.raises(TimeoutError):
        saving.result(0.01)
    begin.set()
    for _ in range(2):  # by the next save, and by each call of result()
        with pytest.raises(OSError, match="full"):
            background.wait_for_last_save() if background._Last.save else saving.result()
    background.wait_for_last_save()


def test_the_default_device_does_not_matter(tmp_path):
    model = torch.nn.Linear(2, 2)
    model.register_buffer("empty", torch.empty(0, 3))
    with torch.device("meta"):
        tp_ext.save_checkpoint(tmp_path / "saved", model, asynchronous=True).result()
    tp_ext.load_checkpoint(tmp_path / "saved", model)
    with mock.patch("torch.empty") as empty:
        background._copied(SimpleNamespace(is_cuda=True, shape=(2,), dtype=torch.float32))
    assert empty.call_args.kwargs["device"] == "cpu" and empty.call_args.kwargs["pin_memory"]


def _with_shared_memory(group, path):
    shm = dist.new_group(backend="tp_shm")
    model, optimizer = build(shm)
    for step in (1, 2):
        saving = save(shm, path, model, optimizer, step, process_group=shm)
        fill(model, optimizer, 9)
        dist.all_reduce(torch.ones(4), group=shm)
    saving.result()


def test_over_shared_memory(tmp_path):
    ranks.run(_with_shared_memory, 2, tmp_path / "saved")
    assert loaded(tmp_path / "saved") == 2


def _fail_once(group, path, failing):
    original = directory._write_entries

    def full(*args):
        if group.rank() == failing:
            raise OSError(28, "No space left on device")
        return original(*args)

    model, optimizer = build(group)
    directory._write_entries = full
    try:
        saving = save(group, path, model, optimizer, 2)
        if group.rank() == 0:  # the other rank has not seen the error
            with pytest.raises(OSError, match=r"saved' could not be written: \[Errno 28\]"):
                saving.result()
        else:
            threading.Event().wait(0.1)
        with pytest.raises(OSError, match=r"saved' could not be written: \[Errno 28\]"):
            save(group, path, model, optimizer, 3)
    finally:
        directory._write_entries = original
    save(group, path, model, optimizer, 4).result()


def test_an_error_is_raised_once_on_all_ranks(tmp_path):
    """By ``result``, or by the next save on all ranks if one rank has not asked; the one after it saves."""
    model, optimizer = build(None)
    fill(model, optimizer, 1)
    tp_ext.save_checkpoint(tmp_path / "saved", model, optimizer, step=1)
    ranks.run(_fail_once, 2, tmp_path / "saved", 1)
    assert loaded(tmp_path / "saved") == 4 and os.listdir(tmp_path) == ["saved"]


def ends_soon(path, stderr, full):
    """A program that ends while its save, of step 7, has not yet written anything."""
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT), 2)
    original = directory._write_entries

    def slowly(*args):
        time.sleep(0.5)
        if full:
            raise OSError(28, "No space left on device")
        return original(*args)

    directory._write_entries = slowly
    model, optimizer = build(None)
    save(None, path, model, optimizer, 7)
    fill(model, optimizer, 8)


def _ends_as_python_does(*args):
    ends_soon(*args)
    ctypes.pythonapi.Py_Exit(0)  # a process of multiprocessing does not run what is registered at exit


def _forked(*args):
    """From the server of the ranks, which has imported torch."""
    process = ranks._context.Process(target=_ends_as_python_does, args=args)
    process.start()
    process.join(300)
    return process.exitcode


def _started(*args):
    program = f"from {__name__} import ends_soon; ends_soon(*{args!r})"
    return subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=300).returncode


@pytest.mark.parametrize("program", [_forked, pytest.param(_started, marks=pytest.mark.exhaustive)])
def test_a_program_that_ends_waits(program, tmp_path):
    """An error that was not raised is written to stderr."""
    (tmp_path / "place").mkdir()
    path, message = tmp_path / "place" / "saved", "tp_ext: the last asynchronous save failed"
    for full in (False, True):
        stderr = tmp_path / f"stderr{full}"
        assert program(str(path), str(stderr), full) == 0
        assert (message in stderr.read_text()) == full
        assert loaded(path) == 7


@on_ranks(2, backend="gloo")
def test_plans_are_those_of_each_save(group, tmp_path):
    """One plan after the other over one group: another model, more state, state on one rank alone, the same again."""
    path = tmp_path / "saved"
    alone = dist.new_group([0])
    model, optimizer = build(group)
    fill(model, optimizer, 1)
    small = tp_ext.ColumnParallelLinear(4, 4, group=group)
    found, exchanges = [], []
    exchange = plan_exchange.call_and_combine
    plan_exchange.call_and_combine = lambda *args: exchanges.append(turn) or exchange(*args)
    for turn, args in enumerate([(model,), (small,), (model, optimizer), (model, optimizer), (model,)]):
        extra = {"turn": turn}
        if turn == 4 and group.rank() == 0:
            model.register_buffer("mine", torch.ones(2))
        tp_ext.save_checkpoint(path, *args, **extra)
        metadata = tp_ext.CheckpointReader(path).read_metadata()
        found.append((len(metadata.state_dict_metadata), "model.mine" in metadata.state_dict_metadata))
    assert exchanges == [0, 1, 2, 4]
    with pytest.raises(TypeError, match="extra"):  # an error of the first rank, before a plan that is the last one
        tp_ext.save_checkpoint(path, model, extra=object if group.rank() == 0 else 1)
    tp_ext.save_checkpoint(path, model)
    assert exchanges == [0, 1, 2, 4, 4, 4]
    if group.rank() == 0:
        with pytest.raises(
            ValueError, match=r"process_group: its ranks hold 384 elements of 'model.0.weight' and must"
        ):
            tp_ext.save_checkpoint(path, model, process_group=alone)
    assert [mine for _, mine in found] == [False] * 4 + [True]
    sizes = [size for size, _ in found]
    assert sizes[0] == 4 and sizes[1] == 2 and sizes[2] == sizes[3] > 20 and sizes[4] == 5


@on_ranks(2, backend="gloo")
def test_plans_of_destroyed_groups_and_large_ones_are_not_kept(group, tmp_path):
    path = tmp_path / "saved"
    model = tp_ext.ColumnParallelLinear(4, 4, group=group)
    other = dist.new_group([0, 1])
    tp_ext.save_checkpoint(path, model, process_group=other)
    tp_ext.save_checkpoint(path, model, process_group=other, asynchronous=True).result()
    kept = [one.group for one in plan_exchange._last.values()]
    own = background._groups[other.group_name][1]
    assert other in kept and own in kept
    dist.destroy_process_group(own)
    dist.destroy_process_group(other)
    original, plan_exchange._MAX_KEPT = plan_exchange._MAX_KEPT, 3
    tp_ext.save_checkpoint(path, model, asynchronous=True).result()  # 4 entries
    plan_exchange._MAX_KEPT = original
    kept = {one.group for one in plan_exchange._last.values()}
    assert not kept & {other, own, background._groups[group.group_name][1]}
    assert other.group_name not in background._groups
