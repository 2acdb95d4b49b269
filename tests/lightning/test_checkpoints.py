"""Hostile and malformed checkpoints of Lightning: one sentence on all ranks, no code executed, nothing loaded."""

import os
import pickle
import shutil

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import tp_ext
from tests.helpers.ranks import run, run_raises
from tp_ext.lightning.checkpoints import load_checkpoint

SHAPE = (12, 10)


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def trained(group):
    torch.manual_seed(0)
    model = nn.Sequential(
        tp_ext.ColumnParallelLinear(*SHAPE, group=group), tp_ext.RowParallelLinear(*SHAPE[::-1], group=group)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, SHAPE[0])).sum().backward()
    optimizer.step()
    return model, optimizer


def save(group, path):
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

    model, optimizer = trained(group)
    state = {"state_dict": get_model_state_dict(model), "optimizer_0": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=path / "folder")
    full = tp_ext.full_state_dict(model)
    if torch.distributed.get_rank() == 0:
        torch.save({"epoch": 1}, path / "folder" / "meta.pt")
        states = torch.optim.AdamW(nn.Sequential(nn.Linear(*SHAPE), nn.Linear(*SHAPE[::-1])).parameters()).state_dict()
        torch.save({"epoch": 1, "state_dict": full, "optimizer_states": [states]}, path / "file")


def load(group, path, weights_only=None):
    model, optimizer = trained(group)
    before = [value.detach().clone() for value in model.parameters()]
    try:
        return load_checkpoint(path, model, [optimizer], True, weights_only)
    except BaseException:
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)), "partly loaded"
        raise


def changed(path, change):
    saved = torch.load(path, weights_only=True)
    change(saved)
    torch.save(saved, path)


def put_evil_entry(folder, evil):
    """An entry that is no tensor, in the place of one: a valid archive, with its checksums."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    name = next(name for name in metadata.state_dict_metadata if name.endswith(".lr"))
    (info,) = (info for index, info in metadata.storage_data.items() if index.fqn == name)
    info.relative_path, info.offset = "evil.distcp", 0
    torch.save(evil, folder / "evil.distcp")
    info.length = (folder / "evil.distcp").stat().st_size
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def not_a_tensor(folder, _):
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    kinds = metadata.state_dict_metadata
    name = next(name for name in kinds if name.endswith("0.weight"))
    kinds[name] = next(entry for entry in kinds.values() if not hasattr(entry, "chunks"))
    for index in [index for index in metadata.storage_data if index.fqn == name]:
        info = metadata.storage_data.pop(index)
        object.__setattr__(index, "offset", None)
        metadata.storage_data[index] = info
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


PICKLE = pickle.UnpicklingError
FOLDERS = {
    "metadata": (lambda f, evil: (f / ".metadata").write_bytes(pickle.dumps(evil)), PICKLE, "posix.mkdir is not of a"),
    "meta": (lambda f, evil: torch.save({"x": evil}, f / "meta.pt"), PICKLE, "must hold tensors and plain values only"),
    "meta is pickle": (
        lambda f, evil: (f / "meta.pt").write_bytes(pickle.dumps(evil)),
        PICKLE,
        "must hold tensors and",
    ),
    "entry": (put_evil_entry, PICKLE, "posix.mkdir"),
    "kind": (not_a_tensor, ValueError, "'state_dict.0.weight' must be a tensor"),
    "meta is a list": (lambda f, _: torch.save([1], f / "meta.pt"), ValueError, "must hold a dict, not list"),
    "meta is cut": (lambda f, _: os.truncate(f / "meta.pt", 100), ValueError, "meta.pt' cannot be read: RuntimeError"),
    "metadata is cut": (lambda f, _: os.truncate(f / ".metadata", 100), PICKLE, "is no whole pickle"),
    "data is cut": (lambda f, _: os.truncate(f / "__0_0.distcp", 10), OSError, "has 10 bytes and must have"),
}
FILES = {
    "a pickle": (lambda f, evil: f.write_bytes(pickle.dumps(evil)), ValueError, "cannot be read: RuntimeError: mmap"),
    "a value": (lambda f, evil: torch.save({"state_dict": {}, "x": evil}, f), PICKLE, "must hold tensors and plain"),
    "a list": (lambda f, _: torch.save([1], f), ValueError, "must hold a dict, not list"),
    "cut": (lambda f, _: os.truncate(f, 500), ValueError, "cannot be read: RuntimeError"),
    "weights": (lambda f, _: changed(f, lambda s: s.update(state_dict=None)), ValueError, "have the dict 'state_dict'"),
    "key": (lambda f, _: changed(f, lambda s: s["state_dict"].update({1: 1})), KeyError, r"unexpected keys \[1\]"),
    "value": (
        lambda f, _: changed(f, lambda s: s["state_dict"].update({"0.weight": 1})), TypeError, "'0.weight' is int and",
    ),
    "states": (lambda f, _: changed(f, lambda s: s.update(optimizer_states=5)), ValueError, "list 'optimizer_states'"),
    "state": (
        lambda f, _: changed(f, lambda s: s.update(optimizer_states=[{"state": None}])), ValueError, "dicts 'state'",
    ),
    "number": (
        lambda f, _: changed(f, lambda s: s["optimizer_states"][0]["state"].update({77: {}})), ValueError,
        "has a state of the parameter 77",
    ),
    "twice": (
        lambda f, _: changed(f, lambda s: s["optimizer_states"][0]["param_groups"][0].update(params=[0, 0, 1, 2])),
        ValueError, "must have each parameter of its optimizer once",
    ),
    "type": (
        lambda f, _: changed(f, lambda s: s["optimizer_states"][0]["param_groups"][0].update(params=[0, 1, 2, "x"])),
        ValueError, "once, as a number",
    ),
}  # fmt: skip


def test_hostile_checkpoints(tmp_path):
    run(save, 2, tmp_path)
    assert [run(load, 2, tmp_path / kind)[0]["epoch"] for kind in ("file", "folder")] == [1, 1]
    pwned = tmp_path / "executed"
    for kind, table in (("folder", FOLDERS), ("file", FILES)):
        for name, (damage, error, match) in table.items():
            target = tmp_path / name
            (shutil.copytree if kind == "folder" else shutil.copy)(tmp_path / kind, target)
            damage(target, Evil(pwned))
            run_raises(load, 2, error, match, target, in_turns=False)
            assert not pwned.exists(), f"{kind}, {name}: executed"
