"""A short soak of tests/soak_shm.py over gloo and tp_shm, and that it finds a wrong result."""

import pytest
import soak_shm
import torch
from ranks import RankError, run


@pytest.mark.core
@pytest.mark.parametrize("p, backend, count", [(2, "gloo", 400), (2, "tp_shm", 4000), (3, "tp_shm", 4000)])
def test_random_operations_on_several_groups(p, backend, count):
    answers = run(soak_shm.soak, p, backend, 3, count)
    assert sum(checked for checked, _, _ in answers) > count


def _broken(world):
    """One value of one result of one rank is another one."""
    issue = soak_shm.issue

    def wrong(rank, op):
        work, wanted = issue(rank, op)
        if op.number > 100 and wanted and rank.rank == 1 and wanted[0][1].numel():
            wanted[0][1].view(-1)[-1] += 1
        return work, wanted

    soak_shm.issue = wrong
    try:
        soak_shm.soak(world, "gloo", 3, 200)
    finally:
        soak_shm.issue = issue


def test_one_wrong_value_is_found():
    with pytest.raises(RankError, match=r"rank 1 of 2: Operation\(number=1\d\d.* differs at"):
        run(_broken, 2)
    assert not torch.distributed.is_initialized()
