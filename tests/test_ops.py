"""torch.library.opcheck (schema, autograd registration, fake tensors, AOT dispatch) for the operators that communicate:
on no group, and on a fake group of two ranks, which moves no data but takes the path of p > 1. Those of the kernels are
checked in kernels/.
"""

import pytest
import torch
import torch.distributed as dist

import tp_ext._ops  # noqa: F401, defines them
from tests.helpers.ranks import run_fresh

pytestmark = pytest.mark.core


def _x(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


# name -> the arguments before and after the group
CALLS = {
    "copy_to_region": (lambda: (_x(4, 6),), ()),
    "reduce_from_region": (lambda: (_x(4, 6),), ()),
    "scatter_to_region": (lambda: (_x(4, 6),), (-1, None)),
    "gather_from_region": (lambda: (_x(4, 6),), (-1, None)),
    "all_gather_region": (lambda: (_x(4, 6).mT,), (0, None)),
    "reduce_scatter_region": (lambda: (_x(4, 6),), (1, None)),
    "all_to_all_region": (lambda: (_x(4, 6),), (1, 0, None, None)),
    "copy_replicas_to_region": (lambda: (_x(4, 6),), ([1], [2], [0], 2)),
    "reduce_replicas_from_region": (lambda: (_x(4, 6),), ([1], [2], [0], 2)),
    "copy_to_region_coalesced": (lambda: ([_x(4, 6), _x(3)],), ([1, 2, 1, 2, 0, 0],)),
    "column_parallel_linear": (lambda: (_x(4, 6), _x(5, 6), _x(5)), (False, None)),
    "row_parallel_linear": (lambda: (_x(4, 6), _x(5, 6), _x(5)), (False, None)),
    "column_parallel_linear-sp": (lambda: (_x(2, 3, 6), _x(5, 6), None), (True, None)),
    "row_parallel_linear-sp": (lambda: (_x(4, 6), _x(5, 6), _x(5)), (True, None)),
}


def _check(name: str, group: str) -> None:
    tensors, options = CALLS[name]
    operator = getattr(torch.ops.tp_ext, name.removesuffix("-sp")).default
    # A fake group leaves gathered buffers as they were allocated, and torch's own wait_tensor fails the comparison of
    # fake tensors with real ones: only the registration means something then
    checks = ["test_autograd_registration"]
    if group == "":
        checks += ["test_schema", "test_faketensor", "test_aot_dispatch_dynamic"]
    result = torch.library.opcheck(operator, (*tensors(), group, *options), test_utils=checks)
    assert set(result.values()) == {"SUCCESS"}, result


@pytest.mark.parametrize("name", CALLS)
def test_without_a_group(name):
    _check(name, "")


def _check_all_on_a_fake_group() -> None:
    dist.init_process_group("fake", rank=1, world_size=2)
    try:
        for name in CALLS:
            for group in ("0", "0@1/2"):
                _check(name, group)
    finally:
        dist.destroy_process_group()


def test_on_a_fake_group_of_two():
    run_fresh(_check_all_on_a_fake_group, timeout=120)
