"""Directories from anywhere: nothing in them is executed; malformed ones are errors before anything is loaded."""

import os
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

import tp_ext
from tests.helpers import ranks
from tp_ext.checkpoint.files import pinned_directory
from tp_ext.checkpoint.files.atomic_directory import staging_path, swap_in
from tp_ext.checkpoint.files.reader import CheckpointReader

pytestmark = [pytest.mark.core, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]


class Evil:
    """Makes a directory as soon as it is unpickled, by a function that no allow-list has."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


_BYTES_OF_A_WEIGHT = bytes(torch.arange(12.0).view(torch.uint8).tolist())


@pytest.fixture
def saved(tmp_path):
    model = nn.Linear(3, 4)
    model.weight.data[:] = torch.arange(12.0).view(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tp_ext.save_checkpoint(tmp_path / "saved", model, optimizer, losses=[1.0], numbers=torch.arange(3))
    return tmp_path / "saved"


def load(path):
    model = nn.Linear(3, 4)
    before = [param.detach().clone() for param in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        return tp_ext.load_checkpoint(path, model, optimizer)
    except Exception:
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
        raise


def change(path, by):
    """Rewrites the metadata as one with a hostile hand would."""
    file = path / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    file.write_bytes(pickle.dumps(by(metadata) or metadata))


def test_the_metadata_read_are_those_of_torch(saved):
    ours, torchs = CheckpointReader(saved).read_metadata(), dcp.FileSystemReader(saved).read_metadata()
    assert ours.storage_data == torchs.storage_data
    assert ours.state_dict_metadata.keys() == torchs.state_dict_metadata.keys()
    for key, entry in torchs.state_dict_metadata.items():
        found = ours.state_dict_metadata[key]
        assert type(found) is type(entry)
        if hasattr(entry, "chunks"):
            assert (found.size, found.chunks) == (entry.size, entry.chunks)
            assert found.properties.dtype == entry.properties.dtype
    extra = load(saved)
    assert extra["losses"] == [1.0] and extra["numbers"].tolist() == [0, 1, 2]


def _hidden(marker):
    def by(metadata):
        metadata.storage_meta.modules = [Evil(marker)]

    return by


EVIL_METADATA = {
    "all of it": lambda marker: lambda metadata: Evil(marker),
    "hidden": _hidden,
    "a key": lambda marker: lambda metadata: metadata.state_dict_metadata.update({"x": Evil(marker)}),
}


@pytest.mark.parametrize("where", EVIL_METADATA)
def test_metadata_that_run_something(where, saved, tmp_path):
    change(saved, EVIL_METADATA[where](tmp_path / "ran"))
    with pytest.raises(pickle.UnpicklingError, match=r"\.metadata: posix\.mkdir is not of a checkpoint's metadata"):
        load(saved)
    assert not (tmp_path / "ran").exists()
    pickle.loads((saved / ".metadata").read_bytes())  # as torch's reader does
    assert (tmp_path / "ran").exists()


def test_no_class_that_is_named_is_written_to(saved):
    """BUILD sets attributes of whatever stands on the stack: of the class itself, here."""
    module = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
    (saved / ".metadata").write_bytes(module + b"(N(Vversion\nVhurt\ndtb.")
    with pytest.raises((ValueError, pickle.UnpicklingError, TypeError)):
        load(saved)
    from torch.distributed.checkpoint.metadata import Metadata

    assert Metadata.version is None


def test_entries_that_run_something(saved, tmp_path):
    """An option of the optimizer that is no plain value: refused before any tensor is written."""
    marker = tmp_path / "ran"
    model = nn.Linear(3, 4)
    state = tp_ext.sharded_state_dict(model, torch.optim.SGD(model.parameters(), lr=0.1))
    state["optimizer"]["param_groups.weight.lr"] = Evil(marker)
    dcp.save(state, checkpoint_id=tmp_path / "evil", no_dist=True)
    with pytest.raises(pickle.UnpicklingError, match=r"posix\.mkdir"):
        load(tmp_path / "evil")
    assert not marker.exists()
    dcp.load(state, checkpoint_id=tmp_path / "evil", no_dist=True)
    assert marker.exists()


def test_an_extra_that_runs_something(saved, tmp_path):
    torch.save({"losses": Evil(tmp_path / "ran")}, saved / "extra.pt")
    with pytest.raises(pickle.UnpicklingError):
        load(saved)
    assert not (tmp_path / "ran").exists()


def _load_on_all(group, path):
    tp_ext.load_checkpoint(path, tp_ext.ColumnParallelLinear(3, 4, group=group))


def test_all_ranks_refuse_alike(saved, tmp_path):
    change(saved, EVIL_METADATA["hidden"](tmp_path / "ran"))
    ranks.run_raises(_load_on_all, 2, pickle.UnpicklingError, "posix.mkdir", saved, in_turns=False)
    assert not (tmp_path / "ran").exists()


def _first(metadata):
    return next(iter(metadata.storage_data.values()))


def _chunk(metadata):
    return metadata.state_dict_metadata["model.weight"].chunks[0]


def _split(metadata, offsets):
    """Two chunks of (2, 3) of a weight of (4, 3), the storage of the first."""
    chunks = metadata.state_dict_metadata["model.weight"].chunks
    chunks[:] = [ChunkStorageMetadata(torch.Size(offset), torch.Size((2, 3))) for offset in offsets]


def _unstored(metadata):
    del metadata.storage_data[MetadataIndex("optimizer.param_groups.weight.lr")]


def _enormous(metadata):
    entry = metadata.state_dict_metadata["model.weight"]
    entry.size = torch.Size((1 << 40, 1 << 40))
    entry.chunks[0].sizes = entry.size


MALFORMED = {
    "elsewhere": (lambda m: setattr(_first(m), "relative_path", "../x"), "'../x' must be a file of the checkpoint"),
    "hole": (lambda m: setattr(_chunk(m), "sizes", torch.Size([3, 3])), "'model.weight' has 12 elements, its chunks 9"),
    "beyond": (lambda m: setattr(_chunk(m), "offsets", torch.Size([1, 0])), r"has shape \(4, 3\), a chunk.* beyond"),
    "dims": (lambda m: setattr(_chunk(m), "offsets", torch.Size([0])), "has 2 dims"),
    "negative": (lambda m: setattr(_first(m), "offset", -1), "-1 must be a int"),
    "key": (lambda m: m.state_dict_metadata.update({3: None}), "3 must be a str"),
    "no metadata": (lambda m: _first(m), "must be a Metadata"),
    "overlap": (lambda m: _split(m, [(0, 0), (0, 0)]), r"'model.weight' has chunks that overlap: .*\(0, 2\)"),
    "stored nowhere": (
        lambda m: _split(m, [(0, 0), (2, 0)]),
        r"'model.weight', its chunk at \(2, 0\), must have an entry",
    ),
    "a value stored nowhere": (_unstored, r"'optimizer.param_groups.weight.lr' must have an entry in storage_data"),
    "too large": (_enormous, r"must be a int|which no tensor can have"),
    "no entries": (lambda m: setattr(m, "state_dict_metadata", [1]), "must be a dict"),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_malformed_metadata(what, saved):
    by, message = MALFORMED[what]

    def change_in_place(metadata):
        found = by(metadata)
        return found if what == "no metadata" else None

    change(saved, change_in_place)
    with pytest.raises(ValueError, match=message):
        load(saved)


@pytest.mark.parametrize("name", [".metadata", "extra.pt", "__0_0.distcp"])
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_files_that_are_not_regular_are_refused_without_waiting(kind, name, saved):
    (saved / name).unlink()
    if kind == "pipe":
        os.mkfifo(saved / name)
    elif kind == "device":
        (saved / name).symlink_to("/dev/zero")
    else:
        (saved / name).mkdir()
    with pytest.raises(OSError, match=rf"path: '{name}' must be a regular file"):
        load(saved)


def test_damaged_files_are_an_error_of_the_documented_kind(saved):
    file = saved / "extra.pt"
    file.write_bytes(file.read_bytes()[:-30])
    with pytest.raises(OSError, match=r"extra\.pt, from byte 0 on, is damaged: it is no whole archive"):
        load(saved)
    torch.save([1], file)
    with pytest.raises(ValueError, match=r"extra\.pt: must hold a dict, not list"):
        load(saved)
    file.unlink()
    data = saved / "__0_0.distcp"
    data.write_bytes(bytes(data.stat().st_size))
    with pytest.raises((OSError, pickle.UnpicklingError)):
        load(saved)


def test_each_flipped_bit_of_a_tensor_a_value_or_the_metadata_is_found(saved, monkeypatch):
    """One in every 97 bytes. The rest are names and times in the archives' headers, which nothing reads."""
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"plain": 1}, saved / "extra.pt")  # has zeros for checksums
    finally:
        torch.serialization.set_crc32_options(True)
    assert load(saved) == {"plain": 1}
    metadata, data = (saved / name for name in (".metadata", "__0_0.distcp"))
    for file, start in ((metadata, 0), (data, data.read_bytes().index(_BYTES_OF_A_WEIGHT))):
        whole = file.read_bytes()
        for at in range(start, len(whole) if file == metadata else start + len(_BYTES_OF_A_WEIGHT), 97):
            file.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
            with pytest.raises(OSError, match=r"is damaged.*; load another checkpoint"):
                load(saved)
        file.write_bytes(whole)
    load(saved)


# Checkpoints that are replaced while they are read


def _swap(path, others):
    """Puts the next one in its place, as save_checkpoint does, and removes the old one."""
    staging = staging_path(path)
    others.pop(0).rename(staging)
    swap_in(staging, path)


def _steps(folder, count):
    """Checkpoints of steps 0, 1, ..: every number in one of them is its step."""
    for step in range(count):
        tp_ext.save_checkpoint(folder / str(step), _filled(step), step=torch.tensor(step))
    return [folder / str(step) for step in range(count)]


def _filled(value):
    model = nn.Linear(3, 4)
    for param in model.parameters():
        nn.init.constant_(param, value)
    return model


@pytest.mark.parametrize("stay_open", [True, False])
@pytest.mark.parametrize("method", ["read_extra", "read_data", "_checked"])
def test_a_load_is_of_one_checkpoint_though_it_is_replaced_at_each_step(method, stay_open, tmp_path, monkeypatch):
    """Files that are open stay readable; where they cannot be, the load starts over with the new checkpoint."""
    path, *others = _steps(tmp_path, 4)
    if not stay_open:
        monkeypatch.setattr(pinned_directory, "_MAX_OPEN", 0)
    original = getattr(CheckpointReader, method)

    def replacing(self, *args):
        if others:
            _swap(path, others)
        return original(self, *args)

    monkeypatch.setattr(CheckpointReader, method, replacing)
    model = nn.Linear(3, 4)
    step = tp_ext.load_checkpoint(path, model)["step"].item()
    assert step == (0 if stay_open and method != "_checked" else 3)
    assert {value for param in model.parameters() for value in param.flatten().tolist()} == {step}


def test_a_reader_keeps_to_the_checkpoint_that_it_has_opened(tmp_path):
    path, *others = _steps(tmp_path, 2)
    reader, model = CheckpointReader(path), nn.Linear(3, 4)
    reader.read_metadata()
    _swap(path, others)
    for step in range(2):
        tp_ext.load_sharded_state_dict(model, storage_reader=reader)
        assert model.weight.eq(step).all()
        reader.reset()


def test_a_checkpoint_that_is_replaced_for_ever_is_an_error(tmp_path, monkeypatch):
    path, *others = _steps(tmp_path, 4)
    monkeypatch.setattr("tp_ext.checkpoint.sharded_load._ATTEMPTS", 3)
    original = CheckpointReader._checked

    def replacing(self, directory):
        _swap(path, others)
        return original(self, directory)

    monkeypatch.setattr(CheckpointReader, "_checked", replacing)
    with pytest.raises(OSError, match="0' was replaced while it was read; 3 attempts"):
        tp_ext.load_checkpoint(path, nn.Linear(3, 4))


def _load_late(group, path, others):
    """A new checkpoint is put in place when rank 0 has opened the old one, and rank 1 none."""
    original = CheckpointReader.read_metadata

    def opened(self):
        if group.rank() == 0:
            original(self)
            if others:
                _swap(path, others)
        group.barrier().wait()
        metadata = original(self)
        group.barrier().wait()  # rank 0 replaces it again only after rank 1 has read it
        return metadata

    model = tp_ext.ColumnParallelLinear(3, 4, group=group)
    CheckpointReader.read_metadata = opened
    try:
        step = tp_ext.load_checkpoint(path, model)["step"].item()
    finally:
        CheckpointReader.read_metadata = original
    return step, model.weight.detach()


def test_all_ranks_load_the_same_checkpoint(tmp_path, monkeypatch):
    path, *others = _steps(tmp_path, 3)
    for step, weight in ranks.run(_load_late, 2, path, others):
        assert step == 2 and weight.eq(2).all()


def test_files_that_are_cut_short(saved):
    file = saved / "__0_0.distcp"
    size = file.stat().st_size
    os.truncate(file, size - 1)
    with pytest.raises(OSError, match=f"__0_0.distcp has {size - 1} bytes and must have {size}"):
        load(saved)
    file.unlink()
    with pytest.raises(FileNotFoundError):
        load(saved)
    os.truncate(saved / ".metadata", 100)
    with pytest.raises((pickle.UnpicklingError, ValueError, RuntimeError)):
        load(saved)
