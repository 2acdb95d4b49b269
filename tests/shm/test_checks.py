"""Arguments that are refused, over gloo and tp_shm: those of torch's own tests of gloo, and that the group works on."""

import pytest
import torch
import torch.distributed as dist

from tests.helpers.ranks import run
from tests.shm.backends import both_backends, group_of

pytestmark = pytest.mark.core


def _options(kind, **fields):
    options = getattr(dist, f"{kind}Options")()
    for name, value in fields.items():
        setattr(options, name, value)
    return options


def _t(*shape, dtype=torch.float32):
    return torch.zeros(shape or (1,), dtype=dtype)


# What a rank calls: (group, p, rank) -> a call that must raise before anything is sent
CHECKS = {
    "broadcast from rank -1": lambda g, p, r: g.broadcast([_t()], _options("Broadcast", rootRank=-1)),
    "broadcast from rank p": lambda g, p, r: g.broadcast([_t()], _options("Broadcast", rootRank=p)),
    "broadcast of tensor 1 of 1": lambda g, p, r: g.broadcast([_t()], _options("Broadcast", rootRank=r, rootTensor=1)),
    "broadcast of nothing": lambda g, p, r: g.broadcast([], _options("Broadcast", rootRank=r)),
    "all_reduce of nothing": lambda g, p, r: g.allreduce([], _options("Allreduce")),
    "all_reduce of two dtypes": lambda g, p, r: g.allreduce([_t(), _t(dtype=torch.float64)], _options("Allreduce")),
    "all_reduce of two sizes": lambda g, p, r: g.allreduce([_t(), _t(2)], _options("Allreduce")),
    "coalesced all_reduce of nothing": lambda g, p, r: g.allreduce_coalesced([], _options("AllreduceCoalesced")),
    "reduce to rank -1": lambda g, p, r: g.reduce([_t()], _options("Reduce", rootRank=-1)),
    "reduce to rank p": lambda g, p, r: g.reduce([_t()], _options("Reduce", rootRank=p)),
    "reduce of two": lambda g, p, r: g.reduce([_t(), _t()], _options("Reduce", rootRank=r)),
    "scatter from rank -1": lambda g, p, r: g.scatter([_t()], [], _options("Scatter", rootRank=-1)),
    "scatter from rank p": lambda g, p, r: g.scatter([_t()], [], _options("Scatter", rootRank=p)),
    "scatter into nothing": lambda g, p, r: g.scatter([], [], _options("Scatter", rootRank=0)),
    "scatter into two": lambda g, p, r: g.scatter([_t(), _t()], [], _options("Scatter", rootRank=0)),
    "scatter without input": lambda g, p, r: g.scatter([_t()], [], _options("Scatter", rootRank=r)),
    "scatter of p - 1": lambda g, p, r: g.scatter([_t()], [[_t()] * (p - 1)], _options("Scatter", rootRank=r)),
    "scatter of p + 1": lambda g, p, r: g.scatter([_t()], [[_t()] * (p + 1)], _options("Scatter", rootRank=r)),
    "scatter of another dtype": lambda g, p, r: g.scatter(
        [_t()], [[_t(dtype=torch.float64)] * p], _options("Scatter", rootRank=r)
    ),
    "scatter of another size": lambda g, p, r: g.scatter([_t()], [[_t(2)] * p], _options("Scatter", rootRank=r)),
    "scatter of what no root is": lambda g, p, r: g.scatter(
        [_t()], [[_t()] * p], _options("Scatter", rootRank=(r + 1) % p)
    ),
    "gather to rank -1": lambda g, p, r: g.gather([], [_t()], _options("Gather", rootRank=-1)),
    "gather to rank p": lambda g, p, r: g.gather([], [_t()], _options("Gather", rootRank=p)),
    "gather of nothing": lambda g, p, r: g.gather([], [], _options("Gather", rootRank=0)),
    "gather of two": lambda g, p, r: g.gather([], [_t(), _t()], _options("Gather", rootRank=0)),
    "gather without output": lambda g, p, r: g.gather([], [_t()], _options("Gather", rootRank=r)),
    "gather into p - 1": lambda g, p, r: g.gather([[_t()] * (p - 1)], [_t()], _options("Gather", rootRank=r)),
    "gather into p + 1": lambda g, p, r: g.gather([[_t()] * (p + 1)], [_t()], _options("Gather", rootRank=r)),
    "gather into another dtype": lambda g, p, r: g.gather(
        [[_t(dtype=torch.float64)] * p], [_t()], _options("Gather", rootRank=r)
    ),
    "gather into what no root has": lambda g, p, r: g.gather(
        [[_t()] * p], [_t()], _options("Gather", rootRank=(r + 1) % p)
    ),
    "all_gather of nothing": lambda g, p, r: g.allgather([], []),
    "all_gather without output": lambda g, p, r: g.allgather([], [_t()]),
    "all_gather into p - 1": lambda g, p, r: g.allgather([[_t()] * (p - 1)], [_t()]),
    "all_gather into p + 1": lambda g, p, r: g.allgather([[_t()] * (p + 1)], [_t()]),
    "all_gather into another dtype": lambda g, p, r: g.allgather([[_t(), _t(dtype=torch.float64)] * p][:1], [_t()]),
    "all_gather_into_tensor of another size": lambda g, p, r: dist.all_gather_into_tensor(_t(p + 1), _t(), group=g),
    "all_gather_into_tensor of another dtype": lambda g, p, r: dist.all_gather_into_tensor(
        _t(p, dtype=torch.float64), _t(), group=g
    ),
    "reduce_scatter_tensor of another size": lambda g, p, r: dist.reduce_scatter_tensor(_t(), _t(p + 1), group=g),
    "reduce_scatter of p - 1": lambda g, p, r: dist.reduce_scatter(_t(), [_t()] * (p - 1), group=g),
    "all_to_all_single of p + 1 rows": lambda g, p, r: dist.all_to_all_single(_t(p + 1), _t(p + 1), group=g),
    "all_to_all_single of p + 1 splits": lambda g, p, r: dist.all_to_all_single(
        _t(p), _t(p), [1] * (p + 1), [1] * (p + 1), group=g
    ),
    "all_to_all_single of splits that do not add up": lambda g, p, r: dist.all_to_all_single(
        _t(p), _t(p), [1] * p, [2] * p, group=g
    ),
    "all_to_all_single of two dtypes": lambda g, p, r: dist.all_to_all_single(
        _t(p), _t(p, dtype=torch.float64), group=g
    ),
    "no tensor": lambda g, p, r: dist.all_reduce([1.0], group=g),
}


def _refused(world, backend, names):
    group = group_of(backend)
    passed = []
    for name in names:
        try:
            CHECKS[name](group, group.size(), group.rank())
            passed.append(name)
        except (RuntimeError, ValueError, TypeError, IndexError) as e:
            assert str(e), name
        dist.all_reduce(x := torch.ones(3), group=group)
        assert x.tolist() == [group.size()] * 3, name
    return passed


@both_backends
@pytest.mark.parametrize("p", [2, 3])
def test_wrong_arguments_are_refused_and_the_group_works_on(p, backend):
    passed = run(_refused, p, backend, list(CHECKS))
    taken = {"all_to_all_single of p + 1 rows"} if backend == "gloo" else set()  # by gloo of torch 2.11
    assert [set(names) - taken for names in passed] == [set()] * p
