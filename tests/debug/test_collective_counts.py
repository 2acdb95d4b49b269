"""count_collectives sees every collective once, with the right bytes, from any caller and any thread; and counting
changes nothing: the kernel's count of bytes written to gloo's sockets is the independent counter.
"""

import contextlib
import re
import threading
from fractions import Fraction

import pytest
import torch
import torch.distributed._functional_collectives as functional
import torch.distributed._symmetric_memory  # defines the fused operators
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import tp_ext
from tests.helpers.on_ranks import on_ranks
from tests.helpers.paths import CSRC
from tests.helpers.ranks import run
from tp_ext.debug import count_collectives

EVERY_P = pytest.mark.parametrize("p", [1, 2, 3, 4])


def found(counts):
    """{(kind, bytes of payload of each): number}"""
    assert len({row.group for row in counts.rows}) <= 1
    result = {}
    for row in counts.rows:
        key = row.kind, row.payload
        result[key] = result.get(key, 0) + row.number
    return result


def rows(*lengths):
    return [torch.ones(n, 3) for n in lengths]  # of 12 bytes


# torch.distributed, call by call


def _calls(p, rank):
    """The call, its kind, the payload, the bytes that this rank sends."""
    even, uneven = [2] * p, [k + 1 for k in range(p)]
    total, last = sum(uneven), p - 1
    x = torch.ones(p, 3)
    ring = Fraction(2 * (p - 1), p)
    away = (p - 1) * 12  # of p rows, all but this rank's
    result = {
        "all_reduce": (lambda: dist.all_reduce(x), "all_reduce", 12 * p, ring * 12 * p),
        "async": (lambda: dist.all_reduce(x, async_op=True).wait(), "all_reduce", 12 * p, ring * 12 * p),
        "int64": (lambda: dist.all_reduce(torch.tensor(1)), "all_reduce", 8, ring * 8),
        "bool": (lambda: dist.all_reduce(torch.tensor([True] * 3), dist.ReduceOp.MAX), "all_reduce", 3, ring * 3),
        "all_gather": (lambda: dist.all_gather(rows(*even), *rows(2)), "all_gather", 24 * p, 2 * away),
        "one tensor": (lambda: dist.all_gather_into_tensor(x, *rows(1)), "all_gather", 12 * p, away),
        "reduce_scatter": (lambda: dist.reduce_scatter_tensor(*rows(1), x), "reduce_scatter", 12 * p, away),
        "scatter lists": (lambda: dist.reduce_scatter(*rows(2), rows(*even)), "reduce_scatter", 24 * p, 2 * away),
        "all_to_all": (lambda: dist.all_to_all_single(x.clone(), x), "all_to_all", 12 * p, away),
        "all_to_all uneven": (
            lambda: dist.all_to_all_single(*rows(p * (rank + 1), total), [rank + 1] * p, uneven),
            "all_to_all",
            12 * total,
            12 * (total - uneven[rank]),
        ),
        "broadcast": (lambda: dist.broadcast(x, last), "broadcast", 12 * p, 12 * p if p > 1 else 0),
        "reduce": (lambda: dist.reduce(x, last), "reduce", 12 * p, 12 * p if p > 1 else 0),
        "gather": (lambda: dist.gather(x[0], list(x) if rank == 0 else None), "gather", 12 * p, away),
        "scatter": (lambda: dist.scatter(x[0], list(x) if rank == last else None, last), "scatter", 12 * p, away),
        "barrier": (dist.barrier, "barrier", 0, 0),
        "functional": (
            lambda: functional.all_reduce(x, "sum", dist.group.WORLD) + 1,
            "all_reduce",
            12 * p,
            ring * 12 * p,
        ),
        "functional gather": (
            lambda: functional.all_gather_tensor(x, 0, dist.group.WORLD) + 1,
            "all_gather",
            12 * p * p,
            p * away,
        ),
        "in a region": (lambda: tp_ext.reduce_from_region(x, dist.group.WORLD), "all_reduce", 12 * p, ring * 12 * p),
    }
    if p == 1:
        del result["in a region"]
    return result


@pytest.mark.core
@EVERY_P
@on_ranks()
def test_every_call_of_torch_distributed(group):
    for name, (call, kind, payload, wire) in _calls(group.size(), group.rank()).items():
        with count_collectives() as counts:
            call()
        (row,) = counts.rows
        assert (row.kind, row.payload, row.number) == (kind, payload, 1), name
        assert (row.group, row.ranks) == (group.group_name, tuple(range(group.size()))), name
        assert row.wire_bytes == counts.wire_bytes == float(wire), name


@pytest.mark.parametrize("p", [2, 3])
@on_ranks()
def test_messages(group):
    p, rank = group.size(), group.rank()
    with count_collectives() as counts:
        ops = [
            dist.P2POp(dist.isend, torch.ones(5), (rank + 1) % p),
            dist.P2POp(dist.irecv, torch.ones(5), (rank - 1) % p),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
    assert found(counts) == {("send", 20): 1, ("recv", 20): 1}
    assert counts.wire_bytes == 40
    with count_collectives() as counts, contextlib.suppress(RuntimeError):
        if rank == 0:
            dist.recv(torch.ones(3))  # from any
        elif rank == 1:
            dist.send(torch.ones(3), 0)
    assert found(counts) == {0: {("recv", 12): 1}, 1: {("send", 12): 1}}.get(rank, {})


@pytest.mark.core
@on_ranks(2, 3)
def test_a_coalesced_call_is_one_of_the_sum_of_its_sizes(group):
    p = group.size()
    with count_collectives() as counts:
        with dist._coalescing_manager(group=group, async_ops=True) as manager:
            dist.all_reduce(torch.ones(3))
            dist.all_reduce(torch.ones(5))
        manager.wait()
        with dist._coalescing_manager(group=group):
            dist.all_gather_into_tensor(torch.ones(2 * p), torch.ones(2))
            dist.all_gather_into_tensor(torch.ones(p), torch.ones(1))
        with dist._coalescing_manager(group=group):
            dist.reduce_scatter_tensor(torch.ones(2), torch.ones(2 * p))
            dist.reduce_scatter_tensor(torch.ones(1), torch.ones(p))
    want = {("all_reduce", 32): 1, ("all_gather", 12 * p): 1, ("reduce_scatter", 12 * p): 1}
    assert found(counts) == want
    assert counts.wire_bytes == float(Fraction(2 * (p - 1) * 32, p) + 24 * (p - 1))


@pytest.mark.core
def test_every_operator_of_c10d_is_known():
    """One that a new torch brings needs its line in csrc/comm/counter.cpp."""
    file = CSRC / "comm" / "counter.cpp"
    known = set(re.findall(r'^    \{"(\w+)", "\w+", ', file.read_text(), re.M))
    schemas = [s for s in torch._C._jit_get_all_schemas() if s.name.startswith("c10d::")]
    of_groups = {s.name[6:] for s in schemas if any("ProcessGroup" in str(a.type) for a in s.arguments)}
    assert len(of_groups) > 15 and of_groups <= known


@pytest.mark.core
@on_ranks(2, 4)
def test_symmetric_memory_counts_as_the_collectives_it_stands_for(group):
    """Kernels for CPU tensors that do nothing: only the calls matter."""
    p, name = group.size(), group.group_name
    x, w = torch.ones(4, 6), torch.ones(6, 10)
    ops = torch.ops.symm_mem
    with torch.library._scoped_library("symm_mem", "IMPL") as library, count_collectives() as counts:
        library.impl("one_shot_all_reduce_copy", lambda buffer, x, op, group: x.clone(), "CPU")
        library.impl("two_shot_all_reduce_out", lambda x, op, group, out: out, "CPU")
        library.impl("fused_all_gather_matmul", lambda x, ws, dim, group, **_: (None, []), "CPU")
        library.impl("fused_matmul_reduce_scatter", lambda x, w, op, dim, group: x.clone(), "CPU")
        ops.one_shot_all_reduce_copy(torch.empty(100), x, "sum", name)
        ops.two_shot_all_reduce_out(x[:2], "sum", name, x[2:])
        ops.fused_all_gather_matmul(x, [w], 0, name, return_A=False)
        ops.fused_matmul_reduce_scatter(x, w, "sum", 0, name)
    assert {row.group for row in counts.rows} == {name} and p == counts.rows[0].size
    want = {("all_reduce", 96): 1, ("all_reduce", 48): 1, ("all_gather", 96 * p): 1, ("reduce_scatter", 160): 1}
    assert found(counts) == want
    assert counts.wire_bytes == (p - 1) / p * (2 * (96 + 48) + 96 * p + 160)


# Groups, threads, blocks


def _subgroups(group):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = tp_ext.ParallelMLP(4, 8, group=mesh["tp"])
    with count_collectives() as counts:
        model(torch.ones(3, 4)).sum().backward()
        dist.all_reduce(torch.ones(7), group=mesh["dp"].get_group())
    for row in counts.rows:
        assert row.ranks == tuple(mesh["tp" if row.payload == 48 else "dp"].mesh.tolist()) and row.size == 2
    of_tp, of_dp = counts.select(group=mesh["tp"]), counts.select(group=mesh["dp"], kind="all_reduce")
    assert found(of_tp) == {("all_reduce", 48): 1} and found(of_dp) == {("all_reduce", 28): 1}
    assert (of_tp.number, of_tp.payload_bytes, of_tp.wire_bytes) == (1, 48, 48)
    assert counts.wire_bytes == of_tp.wire_bytes + of_dp.wire_bytes
    assert counts.select(group=mesh["dp"], kind="all_gather").rows == ()
    assert counts.by_kind() == {"all_reduce": 2}
    return str(counts), [row.group for row in counts.rows]


@pytest.mark.core
def test_groups_are_distinguished_and_printed():
    text, (tp, dp) = run(_subgroups, 4)[0]
    lines = [line.split() for line in text.splitlines()]
    assert lines[0] == ["group", "ranks", "kind", "number", "bytes", "each", "payload", "bytes", "wire", "bytes"]
    assert lines[1] == [tp, "[0,", "1]", "all_reduce", "1", "48", "48", "48"]
    assert lines[2] == [dp, "[0,", "2]", "all_reduce", "1", "28", "28", "28"]
    assert lines[3] == ["all", "2", "76", "76"]


def _blocks(group):
    dist.all_reduce(torch.ones(1))
    with count_collectives() as outer:
        dist.all_reduce(torch.ones(1))
        with count_collectives() as inner:
            dist.all_reduce(torch.ones(2))
            assert inner.number == 1 and outer.number == 2  # read inside
            thread = threading.Thread(target=dist.all_reduce, args=(torch.ones(3),))
            thread.start()
            thread.join()
        dist.all_reduce(torch.ones(1))
        with contextlib.suppress(KeyError), count_collectives() as failed:
            dist.all_reduce(torch.ones(4))
            raise KeyError
    dist.all_reduce(torch.ones(5))
    with count_collectives() as nothing:
        torch.ones(3).sum()
    return [found(one) for one in (outer, inner, failed, nothing)]


@pytest.mark.core
def test_blocks_nest_and_threads_count():
    outer, inner, failed, nothing = run(_blocks, 2)[0]
    assert outer == {("all_reduce", 4): 2, ("all_reduce", 8): 1, ("all_reduce", 12): 1, ("all_reduce", 16): 1}
    assert inner == {("all_reduce", 8): 1, ("all_reduce", 12): 1}
    assert failed == {("all_reduce", 16): 1}
    assert nothing == {}


@on_ranks(2, backend="gloo")
def test_a_group_that_is_gone(group):
    passing = dist.new_group([0, 1])
    with count_collectives() as counts:
        dist.all_reduce(torch.ones(3), group=passing)
        dist.destroy_process_group(passing)
    (row,) = counts.rows
    assert (row.ranks, row.size, row.wire_bytes) == ((), 2, 12)
    assert "2 ranks" in str(counts)


def test_select_refuses_unknown_names():
    with count_collectives() as counts:
        pass
    assert (counts.number, counts.payload_bytes, counts.wire_bytes, counts.by_kind()) == (0, 0, 0, {})
    with pytest.raises(ValueError, match="kind: 'allreduce' must be one of all_reduce, all_gather"):
        counts.select(kind="allreduce")
    with pytest.raises(TypeError, match="group: 3 must be"):
        counts.select(group=3)
