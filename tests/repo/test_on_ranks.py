"""The test is the function on the rank: which ranks run it, and what one that fails shows."""

import multiprocessing
import traceback

import pytest
import torch
from torch import distributed as dist

from tests.helpers import ranks
from tests.helpers.on_ranks import on_ranks


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("values", [[4, 5]])
def test_every_rank_has_a_group_and_arguments_of_its_own(group, p, values):
    values.append(group.rank())
    dist.barrier(group)  # after the others have appended theirs
    assert values == [4, 5, group.rank()]
    total = torch.ones(2)
    dist.all_reduce(total, group=group)
    assert (total.tolist(), torch.get_num_threads()) == ([p] * 2, 1)


@pytest.mark.parametrize("p", [2])
@on_ranks()
def test_the_test_has_a_parameter_of_its_own(group):
    assert group.size() == 2 and multiprocessing.parent_process() is None


@on_ranks(2, backend="gloo")
def test_processes(group):
    assert multiprocessing.parent_process() is not None
    assert "gloo" in dist.get_backend(group)


@on_ranks(2, backend="tp_shm")
def test_shared_memory(group):
    assert dist.get_backend(group) == "tp_shm"


@on_ranks(2)
def wrong(group):
    assert [group.rank()] == [0]


@on_ranks(2, backend="gloo")
def wrong_in_a_process(group):
    assert [group.rank()] == [0]


@pytest.mark.parametrize("test", [wrong, wrong_in_a_process])
def test_a_failure_shows_rank_line_and_values(test):
    with pytest.raises((AssertionError, ranks.RankError)) as e:
        test()
    text = "".join(traceback.format_exception(e.value))
    assert f"in {test.__name__}\n" in text and "assert [1] == [0]" in text
    assert "rank 1 of 2" in text


@on_ranks(2)
def skips(group):
    pytest.skip("as asked")


def test_a_skip_is_one():
    with pytest.raises(pytest.skip.Exception, match="as asked"):
        skips()


@on_ranks(2)
def waits_alone(group):
    if group.rank() == 1:
        dist.barrier(group)


def test_a_rank_that_waits_alone_is_named():
    with pytest.raises(RuntimeError, match="rank 0 returned while rank 1 waits for rank 0 in barrier"):
        waits_alone()
