"""Checkpoints: the same for every number of ranks, loaded at any other, whole or not at all."""

import os

import pytest
import ranks
import torch
from stateful import OPTIONS, assert_same, made, train

import tp_ext

pytestmark = pytest.mark.core


def _save(group, path, options, steps, **more):
    model, optimizer = made(group, **options)
    train(model, optimizer, group, steps)
    tp_ext.save_checkpoint(path, model, optimizer, group=group, epoch=3, **more)
    # Every rank finds the file as soon as it is back from saving
    model, optimizer = made(group, seed=8, **options)
    assert tp_ext.load_checkpoint(path, model, optimizer, group=group) == {"epoch": 3, **more}
    return train(model, optimizer, group, steps)


def _resume(group, path, options, steps):
    model, optimizer = made(group, seed=9, **options)
    tp_ext.load_checkpoint(path, model, optimizer, group=group)
    before = tp_ext.full_state_dict(model, group=group), tp_ext.full_optimizer_state_dict(model, optimizer, group=group)
    return *before, train(model, optimizer, group, steps)


@pytest.mark.parametrize(("p", "q"), [(1, 2), (2, 1), (2, 4), (3, 2), (4, 3)])
def test_training_goes_on_at_another_p_as_if_nothing_had_happened(p, q, tmp_path):
    """fp64 bound 1e-12: the sums over ranks run in another order."""
    model, optimizer = made(None)
    want = train(model, optimizer, None, 6)[3:]
    path = tmp_path / "new" / "model.pt"
    for losses in ranks.run(_save, p, path, {}, 3):
        torch.testing.assert_close(losses, want, rtol=1e-12, atol=1e-12)
    assert os.listdir(path.parent) == ["model.pt"]
    content = torch.load(path, weights_only=True)
    assert content["optimizer"]["state"]["embedding.weight"]["exp_avg"].shape == (13, 8)
    for options in OPTIONS[::2]:
        for state, optimizer_state, losses in ranks.run(_resume, q, path, options, 3):
            assert_same(state, content["model"])
            assert_same(
                {f"{a}.{b}": v for a, entry in optimizer_state["state"].items() for b, v in entry.items()},
                {f"{a}.{b}": v for a, entry in content["optimizer"]["state"].items() for b, v in entry.items()},
            )
            torch.testing.assert_close(losses, want, rtol=1e-12, atol=1e-12)


def _crash(group, path, where):
    def fail(*args, **kwargs):
        if where == "save":
            args[1].write(b"half a checkpoint")
        raise OSError("no space left on device")

    model, optimizer = made(group)
    original = torch.save, os.fsync
    try:
        torch.save = fail if where == "save" else torch.save
        os.fsync = fail if where == "fsync" else os.fsync
        tp_ext.save_checkpoint(path, model, optimizer, group=group)
    finally:
        torch.save, os.fsync = original


@pytest.mark.parametrize("where", ["save", "fsync"])
@pytest.mark.parametrize("p", [1, 2])
def test_a_crash_while_saving_leaves_the_old_file_and_nothing_else(p, where, tmp_path):
    path = tmp_path / "model.pt"
    ranks.run(_save, p, path, {}, 1)
    before = path.read_bytes()
    # in_turns=False: that the others learn of it takes a collective
    ranks.run_raises(_crash, p, OSError, "path: .*model.pt' could not be written", path, where, in_turns=False)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["model.pt"]
