"""Short soaks of tp_shm: random operations, also over gloo, and that a wrong result is found; groups over one store."""

import pytest
import torch

from tests.helpers.ranks import RankError, run
from tests.soak import shm_groups, shm_operations


@pytest.mark.core
@pytest.mark.parametrize("p, backend, count", [(2, "gloo", 400), (2, "tp_shm", 1200), (3, "tp_shm", 1200)])
def test_random_operations_on_several_groups(p, backend, count):
    answers = run(shm_operations.soak, p, backend, 3, count)
    assert sum(checked for checked, _, _ in answers) > count


def _broken(world):
    """One value of one result of one rank is another one."""
    issue = shm_operations.issue

    def wrong(rank, op):
        work, wanted = issue(rank, op)
        if op.number > 100 and wanted and rank.rank == 1 and wanted[0][1].numel():
            wanted[0][1].view(-1)[-1] += 1
        return work, wanted

    shm_operations.issue = wrong
    try:
        shm_operations.soak(world, "gloo", 3, 200)
    finally:
        shm_operations.issue = issue


def test_one_wrong_value_is_found():
    with pytest.raises(RankError, match=r"rank 1 of 2: Operation\(number=1\d\d.* differs at"):
        run(_broken, 2)
    assert not torch.distributed.is_initialized()


def test_groups_come_and_go_over_one_store():
    """The long form: tests/soak/shm_groups.py."""
    rounds, groups, _ = shm_groups.soak(3, 40, seed=5)
    assert rounds == 40 and groups > 60
