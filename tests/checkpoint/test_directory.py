"""Checkpoints: what p ranks saved any other number loads, whole or not at all, and training goes on."""

import os
import resource
import shutil
import threading
import time

import pytest
import torch

import tp_ext
from tests.helpers import ranks
from tests.helpers.models import assert_same, model_and_optimizer, train
from tp_ext.checkpoint import directory
from tp_ext.checkpoint.files.write_lock import WriteLock

pytestmark = pytest.mark.core


def _save(group, path, options, steps, **more):
    model, optimizer = model_and_optimizer(group, **options)
    train(model, optimizer, group, steps)
    tp_ext.save_checkpoint(path, model, optimizer, epoch=3, **more)
    want = train(model, optimizer, group, steps)
    # Every rank finds it as soon as it is back from saving
    model, optimizer = model_and_optimizer(group, seed=8, **options)
    assert tp_ext.load_checkpoint(path, model, optimizer) == {"epoch": 3, **more}
    assert torch.equal(train(model, optimizer, group, steps), want)
    return want


def _resume(group, path, options, steps):
    model, optimizer = model_and_optimizer(group, seed=9, **options)
    tp_ext.load_checkpoint(path, model, optimizer)
    before = tp_ext.full_state_dict(model), tp_ext.full_optimizer_state_dict(model, optimizer)
    return *before, train(model, optimizer, group, steps)


def _flat(state):
    return {f"{name}.{key}": value for name, entry in state.items() for key, value in entry.items()}


@pytest.mark.parametrize(
    ("p", "q", "options"),
    [
        (1, 3, {}),
        (4, 3, {"pad": 4}),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in ((1, 4, {}), (2, 3, {"pad": 4}), (4, 1, {}), (4, 3, {}), (3, 1, {}), (4, 2, {"pad": 4}))
        ),
    ],
    ids=str,
)
def test_training_goes_on_at_another_p_as_if_nothing_had_happened(p, q, options, tmp_path):
    """fp64 bound 1e-12: the sums over ranks run in another order. What is loaded is what was saved to the last bit."""
    model, optimizer = model_and_optimizer(None)
    want = train(model, optimizer, None, 4)[2:]
    path = tmp_path / "new" / "step-2"
    for losses in ranks.run(_save, p, path, options, 2):
        torch.testing.assert_close(losses, want, rtol=1e-12, atol=1e-12)
    assert os.listdir(path.parent) == ["step-2"]
    (state, optimizer_state, _), *_ = ranks.run(_resume, p, path, options, 1)
    for loaded, optimizer_loaded, losses in ranks.run(_resume, q, path, {}, 2):
        assert_same(loaded, state)
        assert_same(_flat(optimizer_loaded["state"]), _flat(optimizer_state["state"]))
        assert optimizer_loaded["param_groups"] == optimizer_state["param_groups"]
        torch.testing.assert_close(losses, want, rtol=1e-12, atol=1e-12)
    assert optimizer_state["state"]["embedding.weight"]["exp_avg"].shape == (13, 8)


# What goes wrong


def _fail(group, path, failing, how):
    """Saves; if `how` is "full", rank `failing` cannot write files of more than a few bytes."""
    model, optimizer = model_and_optimizer(group, seed=8)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        if group.rank() == failing and how == "full":
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, limit[1]))
        tp_ext.save_checkpoint(path, model, optimizer, numbers=torch.ones(100))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)


def _files(path):
    return {file.name: file.read_bytes() for file in path.iterdir()}


@pytest.mark.parametrize(("p", "failing"), [pytest.param(1, 0, marks=pytest.mark.exhaustive), (2, 0), (2, 1)])
def test_a_full_disk_on_one_rank_is_the_error_of_all_and_the_last_checkpoint_stays(p, failing, tmp_path):
    path = tmp_path / "saved"
    ranks.run(_fail, p, path, failing, "")
    before = _files(path)
    # in_turns=False: that the others learn of it takes a collective
    message = "path: .*saved' could not be written: .*"
    ranks.run_raises(_fail, p, OSError, message, path, failing, "full", in_turns=False)
    assert _files(path) == before and os.listdir(tmp_path) == ["saved"]
    ranks.run(_fail, p, path, failing, "")  # and the next one succeeds


def test_places_where_no_checkpoint_can_be(tmp_path):
    """Nothing of someone's own is replaced."""
    (tmp_path / "file").write_text("mine")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    for name, error, message in (
        ("file", FileExistsError, "is a file and must be a directory of a checkpoint, or new"),
        ("mine", FileExistsError, "mine' holds 'notes.txt', which no checkpoint does"),
        ("file/x", (FileExistsError, NotADirectoryError), "file"),
    ):
        ranks.run_raises(_fail, 2, error, message, tmp_path / name, 0, "", in_turns=False)
    assert (tmp_path / "file").read_text() == (tmp_path / "mine" / "notes.txt").read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == ["file", "mine"]


def test_a_link_stays_one_and_its_directory_is_replaced(tmp_path):
    (tmp_path / "here").symlink_to("there")
    model = tp_ext.ColumnParallelLinear(2, 2, group=None)
    for step in range(2):
        tp_ext.save_checkpoint(tmp_path / "here", model, step=step)
    assert (tmp_path / "here").is_symlink() and tp_ext.load_checkpoint(tmp_path / "there", model) == {"step": 1}
    assert sorted(os.listdir(tmp_path)) == ["here", "there"]


class Odd:
    pass


def _odd_extra(group, path, failing):
    extra = {"odd": Odd()} if group.rank() == failing else {}
    tp_ext.save_checkpoint(path, tp_ext.ColumnParallelLinear(2, 2, group=group), **extra, step=1)


def test_an_extra_that_could_not_be_loaded_is_not_saved(tmp_path):
    message = r"extra: \['odd'\] must be tensors and plain values, which can be loaded with weights_only"
    ranks.run_raises(_odd_extra, 2, TypeError, message, tmp_path / "saved", 0, in_turns=False)
    assert os.listdir(tmp_path) == []
    ranks.run(_odd_extra, 2, tmp_path / "saved", 1)  # those of other ranks than the first are not saved


def test_a_missing_checkpoint(tmp_path):
    (tmp_path / "empty").mkdir()
    model, must = tp_ext.ColumnParallelLinear(2, 2, group=None), "must be a checkpoint, a directory with .metadata"
    with pytest.raises(FileNotFoundError, match=f"nowhere' {must}; it does not exist$"):
        tp_ext.load_checkpoint(tmp_path / "nowhere", model)
    with pytest.raises(FileNotFoundError, match=f"empty' {must}$"):
        tp_ext.load_checkpoint(tmp_path / "empty", model)


def test_an_unfinished_checkpoint_of_torch_is_replaced(tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / ".metadata.tmp").touch()
    model = tp_ext.ColumnParallelLinear(2, 2, group=None)
    tp_ext.save_checkpoint(tmp_path / "x", model, step=1)
    assert tp_ext.load_checkpoint(tmp_path / "x", model) == {"step": 1}


# Saves to one path


def _save_against(group, path, lock_timeout):
    tp_ext.save_checkpoint(path, tp_ext.ColumnParallelLinear(2, 2, group=group), lock_timeout=lock_timeout, step=2)


def test_a_second_save_waits_for_its_turn(tmp_path, monkeypatch):
    """Without end it is an error on all ranks that names the first; when the first is done, the second one saves."""
    path, model = tmp_path / "saved", tp_ext.ColumnParallelLinear(2, 2, group=None)
    tp_ext.save_checkpoint(path, model, step=0)
    first = WriteLock(path)
    assert first.take_turn(time.monotonic(), 0)
    message = f"saved' is being written by process {os.getpid()} on .*, which must be done within lock_timeout = 0.1 s"
    ranks.run_raises(_save_against, 2, TimeoutError, message, path, 0.1, in_turns=False)
    assert tp_ext.load_checkpoint(path, model) == {"step": 0}
    threading.Timer(1.5, first.release).start()  # later than the ranks' first message
    ranks.run(_save_against, 2, path, 60)
    assert tp_ext.load_checkpoint(path, model) == {"step": 2} and os.listdir(tmp_path) == ["saved"]


def _bad_timeout(group, path, value, save):
    save(path, tp_ext.ColumnParallelLinear(2, 2, group=group), group=group, lock_timeout=value)


@pytest.mark.parametrize("save", [tp_ext.save_checkpoint, tp_ext.save_safetensors], ids=["checkpoint", "safetensors"])
def test_a_lock_timeout_is_a_number_of_seconds(save, tmp_path):
    for value in (-1, float("nan"), "1", None):
        message = f"lock_timeout: {value!r} must be a number of seconds, at least 0"
        ranks.run_raises(_bad_timeout, 2, ValueError, message, tmp_path / "saved", value, save)
    assert os.listdir(tmp_path) == []


def _bad_type(group, path, loads, options):
    model = tp_ext.ColumnParallelLinear(2, 2, group=group)
    (tp_ext.load_checkpoint if loads else tp_ext.save_checkpoint)(path, model, group=group, **options)


def test_types_are_checked_before_anything_is_sent(tmp_path):
    for value in ("yes", 1, 3.5):
        message = f"asynchronous: {value!r} must be True or False"
        ranks.run_raises(_bad_type, 2, TypeError, message, tmp_path / "saved", False, {"asynchronous": value})
    for loads in (False, True):
        message = "optimizer: int must be a torch.optim.Optimizer"
        ranks.run_raises(_bad_type, 2, TypeError, message, tmp_path / "saved", loads, {"optimizer": 3})
    with pytest.raises(TypeError, match=message):
        tp_ext.sharded_state_dict(tp_ext.ColumnParallelLinear(2, 2, group=None), 3)
    assert os.listdir(tmp_path) == []


def _lose_a_file(group, path):
    original = directory._check_complete

    def check(folder, ends):
        os.unlink(folder / "__1_0.distcp")
        original(folder, ends)

    directory._check_complete = check
    try:
        tp_ext.save_checkpoint(path, model_and_optimizer(group)[0])
    finally:
        directory._check_complete = original


def test_an_incomplete_file_is_not_put_in_place(tmp_path):
    ranks.run(_fail, 2, tmp_path / "saved", 0, "")
    before = _files(tmp_path / "saved")
    ranks.run_raises(_lose_a_file, 2, OSError, "__1_0.distcp", tmp_path / "saved", in_turns=False)
    assert _files(tmp_path / "saved") == before and os.listdir(tmp_path) == ["saved"]


def test_a_save_does_not_make_its_directory_again(tmp_path, monkeypatch):
    """Where the first rank has died and its leftovers are removed, the others must not leave new ones."""
    original = directory._write_entries

    def removing(file, *args):
        shutil.rmtree(file.parent)
        return original(file, *args)

    monkeypatch.setattr(directory, "_write_entries", removing)
    with pytest.raises(OSError, match="could not be written"):
        tp_ext.save_checkpoint(tmp_path / "saved", tp_ext.ColumnParallelLinear(2, 2, group=None))
    assert os.listdir(tmp_path) == []


def test_files_left_by_a_kill_are_found_and_cleared(tmp_path):
    """On file systems that cannot exchange two directories, a kill may come when the old one stands aside."""
    path = tmp_path / "saved"
    model = tp_ext.ColumnParallelLinear(2, 2, group=None)
    tp_ext.save_checkpoint(path, model, step=1)
    path.rename(tmp_path / ".saved.replaced")
    for left in (".saved.saving", ".saved.0123abcd.saving", ".saved.0123abcd.removing"):
        (tmp_path / left).mkdir()
    (tmp_path / ".saved.tp_ext-lock").touch()
    assert tp_ext.load_checkpoint(path, model) == {"step": 1}
    tp_ext.save_checkpoint(path, model, step=2)
    assert tp_ext.load_checkpoint(path, model) == {"step": 2} and os.listdir(tmp_path) == ["saved"]
