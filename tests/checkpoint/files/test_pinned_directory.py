"""Files are of the directory that was opened, whatever is put at its path; pipes are refused, not waited for."""

import os
import shutil

import pytest

from tp_ext.checkpoint.files import pinned_directory
from tp_ext.checkpoint.files.pinned_directory import PinnedDirectory

pytestmark = pytest.mark.core


def _read(directory, name):
    with directory.opened(name) as file:
        return file.read()


def _made(path, text):
    path.mkdir()
    for name in ("a", "b"):
        (path / name).write_text(text + name)


@pytest.mark.parametrize("most", [256, 1])
def test_files_are_of_the_directory_that_was_opened(most, tmp_path, monkeypatch):
    monkeypatch.setattr(pinned_directory, "_MAX_OPEN", most)
    _made(tmp_path / "x", "old ")
    directory = PinnedDirectory(tmp_path / "x")
    assert directory.size("a") == 5 and directory.is_at(tmp_path / "x")
    (tmp_path / "x").rename(tmp_path / "y")
    _made(tmp_path / "x", "new ")
    assert [_read(directory, name) for name in "abba"] == [b"old a", b"old b", b"old b", b"old a"]
    assert directory.is_at(tmp_path / "y") and not directory.is_at(tmp_path / "x")
    shutil.rmtree(tmp_path / "y")
    assert _read(directory, "a") == b"old a"  # open since its size was asked for
    if most == 1:
        with pytest.raises(FileNotFoundError):
            directory.size("b")
    opened = set(os.listdir("/proc/self/fd"))
    directory.close()
    assert len(opened - set(os.listdir("/proc/self/fd"))) == most.bit_length() // 8 + 2  # b, too, if it may stay open
    assert not directory.is_at(tmp_path / "x")


def test_files_that_are_not_regular_are_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("/dev/zero")
    directory = PinnedDirectory(tmp_path)
    for name in ("pipe", "folder", "link"):
        with pytest.raises(OSError, match=f"path: '{name}' must be a regular file"):
            directory.size(name)
    with pytest.raises(NotADirectoryError):
        PinnedDirectory(tmp_path / "pipe")
