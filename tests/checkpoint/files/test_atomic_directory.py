"""One directory in the place of another, by exchange or, where a file system cannot, by two renames; and what a kill
between them leaves.
"""

import errno
import os

import pytest

from tp_ext.checkpoint.files import atomic_directory
from tp_ext.checkpoint.files.atomic_directory import backup_path, finish_interrupted_swap, staging_path, swap_in

pytestmark = pytest.mark.core


def written(path, content):
    path.mkdir()
    (path / "file").write_text(content)


def put(target, content):
    staging = staging_path(target)
    written(staging, content)
    swap_in(staging, target)


def content(path):
    return (path / "file").read_text()


@pytest.fixture(params=[True, False], ids=["exchange", "two renames"])
def exchanges(request, monkeypatch):
    if not request.param:
        monkeypatch.setattr(atomic_directory, "_exchange", lambda a, b: False)
    return request.param


def test_the_new_one_is_there_and_nothing_else(exchanges, tmp_path):
    target = tmp_path / "x"
    for text in ("first", "second", "third"):
        put(target, text)
        assert content(target) == text
        assert os.listdir(tmp_path) == ["x"]


def test_an_empty_directory_is_replaced(exchanges, tmp_path):
    (tmp_path / "x").mkdir()
    put(tmp_path / "x", "new")
    assert content(tmp_path / "x") == "new" and os.listdir(tmp_path) == ["x"]


def test_the_two_are_exchanged_in_one_step(tmp_path):
    """Linux can, on the file systems that tests run on."""
    written(tmp_path / "a", "a")
    written(tmp_path / "b", "b")
    assert atomic_directory._exchange(tmp_path / "a", tmp_path / "b")
    assert content(tmp_path / "a") == "b" and content(tmp_path / "b") == "a"
    with pytest.raises(FileNotFoundError, match="nowhere") as raised:
        atomic_directory._exchange(tmp_path / "a", tmp_path / "nowhere")
    assert raised.value.errno == errno.ENOENT


class Killed(BaseException):
    pass


@pytest.mark.parametrize("step", range(1, 9))
def test_killed_before_any_step_the_old_or_the_new_one_is_found(step, exchanges, tmp_path, monkeypatch):
    """Every call that changes the directory is one step; the kill comes before the step'th one."""
    target, left = tmp_path / "x", step
    staging = staging_path(target)
    written(target, "old")
    written(staging, "new")

    def counted(name, module):
        original = getattr(module, name)

        def call(*args, **kwargs):
            nonlocal left
            left -= 1
            if left <= 0:
                raise Killed
            return original(*args, **kwargs)

        monkeypatch.setattr(module, name, call)

    for name in ("rename", "unlink", "rmdir"):
        counted(name, os)
    if exchanges:
        counted("_exchange", atomic_directory)
    try:
        swap_in(staging, target)
        assert left > 0
    except Killed:
        pass
    monkeypatch.undo()
    found = target if target.exists() else backup_path(target)
    assert content(found) in ("old", "new")
    before = content(found)
    finish_interrupted_swap(target)
    assert content(target) == before and os.listdir(tmp_path) == ["x"]
