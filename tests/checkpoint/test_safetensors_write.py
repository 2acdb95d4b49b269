"""Exports while they are written: memory, failures and interruptions. There is always one whole export, the old or the
new.
"""

import itertools
import json
import math
import os
import resource
import signal
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import tp_ext
from tests.helpers import ranks
from tests.helpers.models import model_and_optimizer
from tests.helpers.peak_memory import Peak
from tp_ext.checkpoint import safetensors_files
from tp_ext.checkpoint.files import safetensors_slices
from tp_ext.checkpoint.files.write_lock import WriteLock

pytestmark = pytest.mark.core


def _save(group, path, options, **more):
    tp_ext.save_safetensors(path, model_and_optimizer(group, **options)[0], **more)


def _peaks(group, path):
    """Peaks of saving and loading a model of 8 matrices of 8 KiB; bytes of tensors that loading reads."""
    layers = [tp_ext.ColumnParallelLinear(32, 32, False, group=group, dtype=torch.float64) for _ in range(8)]
    model = nn.Sequential(*layers)
    with Peak() as saving:
        tp_ext.save_safetensors(path, model)
    taken, preadv = [], os.preadv
    counted = mock.patch("os.preadv", lambda *args: taken.append(preadv(*args)) or taken[-1])
    with counted, Peak() as loading:
        tp_ext.load_safetensors(path, model)
    return saving.most, loading.most, sum(taken)


def test_one_tensor_at_a_time_is_written_and_own_slices_are_read(tmp_path):
    """Twice what one takes, since gloo's thread may not yet have let go of the last one."""
    matrix, p = 32 * 32 * 8, 4
    (saving, loading, taken), *others = ranks.run(_peaks, p, tmp_path)
    assert matrix <= saving <= 2 * 1.25 * matrix and loading == matrix // p and taken == 8 * matrix // p
    for saving, loading, taken in others:
        assert saving <= 2 * matrix // p and loading == matrix // p and taken == 8 * matrix // p
    assert Path(tmp_path / "model.safetensors").stat().st_size > 8 * matrix
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".tmp")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
@pytest.mark.parametrize("shape", [(), (0,), (7,), (5, 0), (5, 3), (3, 600), (4, 5, 6)])
def test_slices_of_a_file_are_those_of_the_tensor(shape, dtype, tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors_slices, "_BLOCK", 64)
    tensor = torch.arange(math.prod(shape)).reshape(shape).to(dtype)
    save_file({"before": torch.ones(3), "x": tensor}, tmp_path / "a.safetensors")
    with safetensors_slices.SafetensorsFile(tmp_path / "a.safetensors") as file:
        cuts = [[(0, n), (n // 3, n), (0, n // 2), (n // 2, n // 2)] for n in shape]
        for where in itertools.product(*([slice(*cut) for cut in of_dim] for of_dim in cuts)):
            assert torch.equal(file.tensors["x"][where], tensor[where])


def _no_space(group, path, size, limit):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        if group.rank() == 0:  # Python ignores the signal: write fails with "File too large"
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
        tp_ext.save_safetensors(path, model_and_optimizer(group, seed=9)[0], max_shard_size=size)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("size", [None, 800], ids=["one file", "several"])
@pytest.mark.parametrize("p", [1, 3])
def test_a_full_disk_is_an_error_on_all_ranks_and_the_old_export_stays(p, size, tmp_path):
    ranks.run(_save, p, tmp_path, {}, max_shard_size=size)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    for limit in (0, 1500):
        ranks.run_raises(
            _no_space, p, OSError, "path: .* could not be written by rank 0", tmp_path, size, limit, in_turns=False
        )
        assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_a_path_that_cannot_be_written_is_an_error_on_all_ranks(tmp_path):
    (tmp_path / "file").touch()
    ranks.run_raises(_save, 2, OSError, "could not be written by rank 0", tmp_path / "file" / "x", {}, in_turns=False)


class Killed(BaseException):
    pass


def _kept(path, value):
    """Which of two models the folder holds: all weights 1, or all `value`."""
    model = nn.Linear(8, 8)
    tp_ext.load_safetensors(path, model)
    values = set(model.weight.flatten().tolist()) | set(model.bias.tolist())
    assert len(values) == 1 and values <= {1.0, value}
    return values == {value}


def _fill(value):
    model = nn.Linear(8, 8)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(value)
    return model


@pytest.mark.parametrize(("old", "new"), [(None, None), (1, 1), (None, 1), (1, None)], ids=str)
def test_wherever_it_is_killed_one_whole_export_is_there(old, new, tmp_path, monkeypatch):
    """The system calls that change the folder, each in its turn the last one; None: one file, 1: two, and an index."""
    changing = [(os, "fsync"), (Path, "replace"), (Path, "unlink"), (Path, "open")]
    for last in range(100):
        folder = tmp_path / str(last)
        tp_ext.save_safetensors(folder, _fill(1), max_shard_size=old)
        left = [last]

        def dying(original, left=left):
            def call(*args, **options):
                if left[0] == 0:
                    raise Killed
                left[0] -= 1
                return original(*args, **options)

            return call

        with monkeypatch.context() as patch:
            for owner, name in changing:
                patch.setattr(owner, name, dying(getattr(owner, name)))
            patch.setattr(tp_ext.checkpoint.safetensors_files.Export, "clean", lambda self: None)
            try:
                tp_ext.save_safetensors(folder, _fill(2), max_shard_size=new)
                done = True
            except Killed:
                done = False
        is_new = _kept(folder, 2.0)
        tp_ext.save_safetensors(folder, _fill(3), max_shard_size=new)  # goes on from whatever is there
        assert _kept(folder, 3.0)
        if done:
            assert is_new and last > 3
            names = {file.name for file in folder.iterdir()}
            assert len(names) == (1 if new is None else 3)
            return
    pytest.fail("never done")


# Files of others, and what killed exports leave


def test_only_safetensors_files_of_the_folder_are_removed(tmp_path):
    """An index may name anything: what is no export's file stays, whatever the index says."""
    kept = ["config.json", "tokenizer.json", ".hidden.safetensors"]
    for name in (*kept, "old.safetensors"):
        (tmp_path / name).write_text("mine")
    places = {str(i): name for i, name in enumerate((*kept, "old.safetensors"))}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    tp_ext.save_safetensors(tmp_path, _fill(1))
    assert sorted(os.listdir(tmp_path)) == sorted([*kept, "model.safetensors"])
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": ".."}}')
    tp_ext.save_safetensors(tmp_path, _fill(1))
    assert _kept(tmp_path, 1.0)


def _save_and_die(path, size):
    """Killed before the first rename, when all files are written."""
    safetensors_files.Export.finish = lambda self: os.kill(os.getpid(), signal.SIGKILL)
    tp_ext.save_safetensors(path, _fill(2), max_shard_size=size)


def test_temporary_files_of_killed_exports_are_removed_by_the_next_one(tmp_path):
    for size in (None, 1):
        with pytest.raises(ranks.RankError, match="exit code -9"):
            ranks.run_fresh(_save_and_die, tmp_path, size)
    others = {"other.safetensors.0123abcd.tmp", "model.safetensors.tmp", "model.safetensors.0123abcd.tmp.txt"}
    for name in others:
        (tmp_path / name).touch()
    assert len(list(tmp_path.glob("model*.????????.tmp"))) == 2  # the second one has removed the file of the first
    tp_ext.save_safetensors(tmp_path, _fill(1))
    assert set(os.listdir(tmp_path)) == others | {"model.safetensors"}


def _save_against(group, path, timeout):
    tp_ext.save_safetensors(path, _fill(2), lock_timeout=timeout)


def test_exports_to_one_folder_take_turns(tmp_path):
    first = WriteLock(tmp_path / "model.safetensors")
    assert first.take_turn(time.monotonic(), 0)
    message = "could not be written by rank 0"
    ranks.run_raises(_save_against, 2, OSError, message, tmp_path, 0.1, in_turns=False)
    with pytest.raises(OSError, match=message) as raised:
        tp_ext.save_safetensors(tmp_path, _fill(1), lock_timeout=0.0)
    assert f"is being written by process {os.getpid()} on" in str(raised.value.__cause__)
    threading.Timer(1.5, first.release).start()  # later than the first turn ends
    ranks.run(_save_against, 2, tmp_path, 60)
    assert _kept(tmp_path, 2.0) and os.listdir(tmp_path) == ["model.safetensors"]


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_a_pipe_is_refused_and_not_waited_for(name, tmp_path):
    os.mkfifo(tmp_path / name)
    with pytest.raises(OSError, match=f"path: .*{name}' must be a regular file"):
        tp_ext.load_safetensors(tmp_path, nn.Linear(8, 8))


@pytest.mark.parametrize(
    "text", ['{"weight_map": {"a": ".."}}', '{"weight_map": {"a": 3}}', '{"weight_map": ' + "[" * 10**5, "\xff", ""]
)
def test_an_index_that_is_none(text, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"index.json' must be an index"):
        tp_ext.load_safetensors(tmp_path, nn.Linear(8, 8))


def test_an_index_of_a_terabyte_is_not_read(tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    index.touch()
    os.truncate(index, 1 << 40)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=r"index.json' must be an index"):
        tp_ext.load_safetensors(tmp_path, nn.Linear(8, 8))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 << 10
