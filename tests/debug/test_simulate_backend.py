"""The groups of simulated ranks under the programs that test tp_shm in processes: the same values, bits and errors."""

import pytest
import torch
import torch.distributed as dist

from tests.helpers.ranks import run
from tests.shm import test_checks as checks
from tests.shm import test_gathers as gathers
from tests.shm import test_point_to_point as messages
from tests.shm import test_reductions as reductions
from tests.shm import test_tensors as tensors
from tests.shm import test_works as works
from tp_ext.debug import simulate

PROGRAMS = [
    *((reductions._all_reduce, 3, name) for name in reductions.OPERATIONS),
    *((reductions._reduce, 3, name) for name in reductions.OPERATIONS),
    *((reductions._reduce_scatter, 3, name) for name in reductions.OPERATIONS),
    (reductions._uneven_reduce_scatter, 3),
    *((reductions._special, 2, dtype) for dtype in (torch.float64, torch.bfloat16)),
    (reductions._wraps, 2),
    (gathers._every_dtype, 3),
    (gathers._all_gather, 3),
    (gathers._all_gather_forms, 3),
    (gathers._uneven_all_gather, 3, [3, 0, 2]),
    (gathers._roots, 3),
    (gathers._all_to_all_single, 3),
    (gathers._all_to_all, 4),
    (gathers._objects, 3),
    (gathers._coalesced, 2),
    (gathers._managed, 2, True),
    (gathers._managed, 2, False),
    (tensors._empty, 3),
    (tensors._scalars, 2),
    (tensors._around, 2),
    (tensors._shared_storage, 3),
    (tensors._inference, 2),
    (tensors._on, 2, "meta"),
    (tensors._sparse, 2),
    (works._async, 3),
    (works._in_flight, 3, 100, 5),
    (works._futures, 2),
    (works._collective_in_a_callback, 2),
    (works._dropped, 2),
    (works._read_after_wait, 2),
    (messages._pairs, 3),
    (messages._everyone_to_everyone, 3, 1001),
    (messages._tags, 2),
    (messages._any_source, 3),
    (messages._batch, 3),
    (messages._between, 2),
    (messages._empty_and_scalar, 2),
    (messages._many, 2, 100),
    (messages._buffer_after_wait, 2),
    (messages._wrong_peer, 2, 7),
]


def _simulate(program, p, *args):
    return simulate(lambda rank, group: program(group, "simulated", *args), p)


@pytest.fixture(autouse=True)
def _world_as_the_group(monkeypatch):
    """The programs take a group of the backend over all ranks."""
    for module in (checks, gathers, messages, reductions, tensors, works):
        monkeypatch.setattr(module, "group_of", lambda *_: dist.group.WORLD)


@pytest.mark.filterwarnings("ignore:.*will be deprecated:FutureWarning")
@pytest.mark.parametrize("case", PROGRAMS, ids=lambda case: "-".join(getattr(x, "__name__", str(x)) for x in case))
def test_programs_of_tp_shm(case):
    _simulate(*case)


@pytest.mark.parametrize("make", tensors.STRIDED)
def test_strided_tensors(make):
    _simulate(tensors._strided, 2, make)


def test_wrong_arguments_are_refused_on_the_rank_and_the_group_works_on():
    """No check passes but those that are for tp_shm's own reasons."""
    assert _simulate(checks._refused, 3, list(checks.CHECKS)) == [[]] * 3


@pytest.mark.parametrize("dtype", reductions.FLOATS)
def test_sums_have_the_bits_of_tp_shm(dtype, monkeypatch):
    here = _simulate(reductions._bits, 3, dtype, 1031)
    monkeypatch.undo()
    there = run(reductions._bits, 3, "tp_shm", dtype, 1031)
    assert all(torch.equal(x, y) for x, y in zip(here, there, strict=True))


@pytest.mark.parametrize("op", ["PREMUL_SUM", "AVG"])
def test_operations_that_tp_shm_does_not_have_are_refused(op):
    def reduce(rank, group):
        factor = dist._make_nccl_premul_sum(2.0) if op == "PREMUL_SUM" else dist.ReduceOp.AVG
        with pytest.raises(ValueError, match=f"op: ReduceOp.{op} must be one"):
            dist.all_reduce(torch.ones(2, dtype=torch.int64), factor, group=group)

    simulate(reduce, 2)
