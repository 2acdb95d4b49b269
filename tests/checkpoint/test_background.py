"""Asynchronous saves: what is saved is the state at the call, whatever the training does meanwhile; one at a time."""

import os
import subprocess
import sys
import threading

import pytest
import torch
import torch.distributed as dist

import tp_ext
from tests.helpers import ranks
from tests.helpers.numbered import build, fill
from tests.helpers.paths import ROOT
from tp_ext.checkpoint import directory

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
    return tp_ext.save_checkpoint(path, model, optimizer, group=group, step=step, asynchronous=True, **options)


def _train_on(group, path):
    original, begin = directory._write_entries, threading.Event()

    def slowly(file, contents):
        assert begin.wait(30)
        return original(file, contents)

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
        tp_ext.load_checkpoint(path / "second", model, optimizer, group=group)  # waits for it
        assert second.done()
        tp_ext.save_checkpoint(path / "third", model, optimizer, group=group, step=2)
    finally:
        directory._write_entries = original


def test_the_state_at_the_call_is_saved_and_a_second_save_waits(tmp_path):
    ranks.run(_train_on, 2, tmp_path)
    assert [loaded(tmp_path / name) for name in ("first", "second", "third")] == [1, 2, 2]


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

    def full(file, contents):
        if group.rank() == failing:
            raise OSError(28, "No space left on device")
        return original(file, contents)

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


PROGRAM = """
import sys, time, torch, tp_ext
from tests.helpers.numbered import build, fill
from tp_ext.checkpoint import directory
original = directory._write_entries
def slowly(file, contents):
    time.sleep(0.5)
    if len(sys.argv) > 2:
        raise OSError(28, "No space left on device")
    return original(file, contents)
directory._write_entries = slowly
model, optimizer = build(None)
fill(model, optimizer, 7)
tp_ext.save_checkpoint(sys.argv[1], model, optimizer, step=7, asynchronous=True)
fill(model, optimizer, 8)
"""


def test_a_program_that_ends_waits(tmp_path):
    """An error that nobody has seen is on stderr."""
    for more in ([], ["fail"]):
        argv = [sys.executable, "-c", PROGRAM, str(tmp_path / "saved"), *more]
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True)
        assert loaded(tmp_path / "saved") == 7
        assert ("tp_ext: the last asynchronous save failed" in done.stderr) == bool(more), done.stderr


def _change(group, path):
    """One plan after the other over one group: another model, more state, state on one rank alone, the same again."""
    alone = dist.new_group([0])
    model, optimizer = build(group)
    fill(model, optimizer, 1)
    small = tp_ext.ColumnParallelLinear(4, 4, group=group)
    found = []
    for turn, args in enumerate([(model,), (small,), (model, optimizer), (model, optimizer), (model,)]):
        extra = {"turn": turn}
        if turn == 4 and group.rank() == 0:
            model.register_buffer("mine", torch.ones(2))
        tp_ext.save_checkpoint(path, *args, group=group, **extra)
        metadata = tp_ext.CheckpointReader(path).read_metadata()
        found.append((len(metadata.state_dict_metadata), "model.mine" in metadata.state_dict_metadata))
    if group.rank() == 0:
        with pytest.raises(
            ValueError, match=r"process_group: its ranks hold 384 elements of 'model.0.weight' and must"
        ):
            tp_ext.save_checkpoint(path, model, group=group, process_group=alone)
    return found


def test_plans_are_those_of_each_save(tmp_path):
    for found in ranks.run(_change, 2, tmp_path / "saved"):
        assert [mine for _, mine in found] == [False] * 4 + [True]
        sizes = [size for size, _ in found]
        assert sizes[0] == 4 and sizes[1] == 2 and sizes[2] == sizes[3] > 20 and sizes[4] == 5
