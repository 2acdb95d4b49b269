"""Files of plans: one that was changed, or is malformed, is an error that names it, and is never carried out."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.auto.test_planner import EXAMPLE, Model
from tests.helpers.paths import ROOT
from tp_ext import auto
from tp_ext.auto.search import plans


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("plan") / "plan.json"
    plan = auto.plan(Model(), EXAMPLE, 2)
    plan.save(file)
    assert auto.Plan.load(file) == plan
    return file.read_text()


def _others(value: Any) -> Any:
    """Values of another type or length, that a program which trusts the file fails on."""
    yield from (None, 3, "x", [None], {"a": 1}, [[1]], 1.5, True, -(10**30), float("inf"))
    if isinstance(value, list | dict) and value:
        yield type(value)()


def _places(value: Any, path: tuple[Any, ...] = ()) -> Any:
    """Paths to the fields, and to the first value of each list and dict in them."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in list(items)[: None if not path else 1]:
        yield from _places(item, (*path, key))


def _put(content: dict[str, Any], path: tuple[Any, ...], value: Any) -> str:
    content = json.loads(json.dumps(content))
    inner: Any = content
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return json.dumps(content)


def _refused(file: Path, text: str, words: str) -> None:
    file.write_text(text)
    with pytest.raises(ValueError, match=words) as caught:
        auto.Plan.load(file)
    assert str(file) in str(caught.value) and len(str(caught.value)) < 1000


def test_any_change_is_refused(saved: str, tmp_path: Path) -> None:
    content = json.loads(saved)
    for path in list(_places(content))[1:]:
        for value in _others(None):
            text = _put(content, path, value)
            if path != ("version",) and text != json.dumps(content):
                _refused(tmp_path / "plan.json", text, "has another content; plan again")
    for name in list(content):
        left = {key: value for key, value in content.items() if key != name}
        _refused(tmp_path / "plan.json", json.dumps(left), "plan again")
    _refused(tmp_path / "plan.json", _put(content, ("copies",), []), "has another content; plan again")


def test_forged_plans_are_malformed_in_one_sentence(saved: str, tmp_path: Path) -> None:
    """With the digest of the changed content: whatever type a value has, an error of ours, or a plan of right types."""
    content = json.loads(saved)
    loaded = 0
    for path in list(_places(content))[1:]:
        if path in ((plans.DIGEST,), ("version",)):
            continue
        for value in _others(None):
            forged = json.loads(_put(content, path, value))
            del forged[plans.DIGEST]
            digest = hashlib.sha256(json.dumps(forged, indent=1).encode()).hexdigest()
            (tmp_path / "plan.json").write_text(json.dumps({plans.DIGEST: digest, **forged}))
            try:
                str(auto.Plan.load(tmp_path / "plan.json").fingerprint)
                loaded += 1
            except ValueError as error:
                assert str(error).startswith(f"path: '{tmp_path}/plan.json' must be a plan: "), error
    assert loaded  # a name, or a reason, may be any text


HOSTILE: dict[str, tuple[Callable[[str], bytes], str]] = {
    "no text": (lambda _: b"\xff", "must be JSON"),
    "a list": (lambda _: b"[1]", "must be a JSON object, not list"),
    "no version": (lambda _: b"{}", "must be a plan of version 8; plan again"),
    "another version": (lambda _: b'{"version": 7}', "must be a plan of version 8; plan again"),
    "no digest": (lambda _: b'{"version": 8}', "has another content; plan again"),
    "truncated": (lambda text: text[:-100].encode(), "must be JSON"),
    "nested": (lambda _: b'{"a":' * 100_000, "must be JSON"),
    "a long number": (lambda _: b'{"p": ' + b"9" * 5000 + b"}", "must be JSON"),
    "a key twice": (lambda text: text.replace('"p": 2', '"p": 2, "p": 3').encode(), "'p' is there twice"),
    "NaN": (lambda text: text.replace('"p": 2', '"p": NaN').encode(), "NaN is no number"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_files_that_are_no_plans(what: str, saved: str, tmp_path: Path) -> None:
    make, words = HOSTILE[what]
    (tmp_path / "plan.json").write_bytes(make(saved))
    with pytest.raises(ValueError, match=words) as caught:
        auto.Plan.load(tmp_path / "plan.json")
    assert f"'{tmp_path}/plan.json'" in str(caught.value)


PLAN = """
from tests.auto.architectures import build
from tp_ext import auto
model, inputs = build("olmo2")
print(auto.plan(model, inputs, 3, sequence_parallel="auto", prove="shapes").fingerprint)
"""


def test_a_plan_is_the_same_in_every_process() -> None:
    """Each rank's process has another order of sets of strings, by its seed of hashes."""
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", PLAN], cwd=ROOT, stdout=subprocess.PIPE, env={**os.environ, "PYTHONHASHSEED": seed}
        )
        for seed in ("1", "3", "4")
    ]
    printed = {run.communicate(timeout=500)[0].split()[-1] for run in runs}
    assert len(printed) == 1 and len(printed.pop()) == 64
