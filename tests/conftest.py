"""Fixtures: device, seeded generators. Hooks: thinning of large grids, teardown of rank processes, a count of skips."""

import collections
import gc
import os
import random
import sys
from unittest import mock

import numpy
import pytest
import torch

from tests.helpers import ranks, seeds
from tests.helpers.paths import ROOT
from tests.helpers.thinning import mark_exhaustive

# Of many seconds: begun first, since a worker has a file for itself and the others would wait for it at the end
LONG_FILES = [
    "shm/test_core.py",
    "emulation/test_emulation.py",
    "end_to_end/test_finetune_hf.py",
    "training/test_compile.py",
    "huggingface/test_composition.py",
    "nn/attention/test_context_attention.py",
    "parallel/test_run.py",
    "test_regions_compose.py",
    "conformance/test_51_capture.py",
    "nn/attention/test_attention_context.py",
    "parallel/pipeline/test_stages.py",
    "repo/test_docs.py",
    "end_to_end/test_torchrun.py",
]

_GPUS = range(torch.cuda.device_count())
_skips: collections.Counter[str] = collections.Counter()
_seconds: collections.Counter[str] = collections.Counter()  # of test files


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--exhaustive", action="store_true", help="run all cases of thinned tests")


def pytest_configure(config: pytest.Config) -> None:
    ranks._ENVIRONMENT.update(ranks.STRICT)
    text = "cuda: needs a CUDA device; TP_EXT_REQUIRE_CUDA=1 turns its skip into a failure"
    config.addinivalue_line("markers", text)
    seeds.cheapen()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what only ``--exhaustive`` runs. TP_EXT_SHARD=i/n: every n-th test from the i-th on, for n processes
    at the same time."""
    mark_exhaustive(items)
    long = {ROOT / "tests" / name: place for place, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: long.get(item.path, len(long)))
    if not config.getoption("--exhaustive"):
        named = {argument for argument in config.args if "[" in argument}
        left_out = [item for item in items if item.get_closest_marker("exhaustive") and item.nodeid not in named]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]
    if shard := os.environ.get("TP_EXT_SHARD"):
        i, n = map(int, shard.split("/"))
        config.hook.pytest_deselected(items=[item for k, item in enumerate(items) if k % n != i])
        items[:] = items[i::n]


def pytest_collection_finish() -> None:
    """A million objects of modules and tests stay: else each collection goes through them, in most of a second, and a
    pipeline of simulated ranks asks for one on each of its ranks."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # libraries report objects that outlive the interpreter


def pytest_runtest_setup(item: pytest.Item) -> None:
    ranks.close_costly()
    if item.get_closest_marker("cuda") and not torch.cuda.is_available():
        if os.environ.get("TP_EXT_REQUIRE_CUDA") == "1":
            pytest.fail("no CUDA device, though TP_EXT_REQUIRE_CUDA=1", pytrace=False)
        pytest.skip("no CUDA device")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every device there is, one test each."""
    return torch.device(request.param)


@pytest.fixture(scope="session", autouse=True)
def _caches(tmp_path_factory):
    """One folder for all processes of this run, of plans and of what inductor finds out about the compiler, which takes
    seconds. Not its default folder, which may hold code that was compiled with another build of the operators."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
    (folder / "plans").mkdir(exist_ok=True)
    os.environ[ranks.PLANS] = str(folder / "plans")


@pytest.fixture(autouse=True)
def _fixed_random_state():
    """Each test starts from seed 0 and leaves the generators as it found them."""
    states = random.getstate(), numpy.random.get_state()
    with torch.random.fork_rng(_GPUS):
        torch.manual_seed(0)
        random.seed(0)
        numpy.random.seed(0)
        yield
    random.setstate(states[0])
    numpy.random.set_state(states[1])


@pytest.fixture(scope="module", autouse=True)
def _no_patch_stays():
    """Fails where a file leaves a mock or a function of its own in tp_ext: simulated ranks that replace the same name
    in turns put back each other's, and later tests run with it."""
    yield
    left = [
        f"{name}.{key}"
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] == "tp_ext"
        for key, value in list(vars(module).items())
        if isinstance(value, mock.NonCallableMock) or str(getattr(value, "__module__", "")).startswith("tests.")
    ]
    assert not left, f"of tests, and still in place: {', '.join(left)}"


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _seconds[report.nodeid.partition("::")[0]] += report.duration
    if report.skipped and not hasattr(report, "wasxfail"):
        where = report.longrepr
        _skips[where[2] if isinstance(where, tuple) else str(where)] += 1


def pytest_terminal_summary(terminalreporter) -> None:
    for reason, count in sorted(_skips.items()):
        terminalreporter.write_line(f"{count} skipped: {reason.removeprefix('Skipped: ')}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    ranks.close()
    config = session.config
    parts = config.getoption("keyword") or config.getoption("markexpr") or "TP_EXT_SHARD" in os.environ
    if not parts and not hasattr(config, "workerinput") and hasattr(config, "cache"):
        kept = config.cache.get("tp_ext/seconds", {})
        config.cache.set("tp_ext/seconds", kept | {file: round(t, 1) for file, t in _seconds.items()})
