"""What count_collectives counts of layers, DDP, FSDP2 and compiled code is what they send uncounted: the kernel's own
count of the bytes that gloo writes to its sockets is one independent counter, torch's CommDebugMode another.
"""

from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import tp_ext
from tests.helpers.on_ranks import on_ranks
from tests.helpers.oracle import count_collectives_of
from tests.helpers.ranks import run
from tp_ext.debug import count_collectives

HEADER = 48  # bytes of gloo's before each message


class Block(nn.Module):
    def __init__(self, hidden, **options):
        super().__init__()
        self.norm = tp_ext.LayerNorm(hidden, **options)
        self.attention = tp_ext.ParallelAttention(hidden, 4, **options)
        self.mlp = tp_ext.ParallelMLP(hidden, 4 * hidden, activation="swiglu", **options)

    def forward(self, x):
        x = x + self.attention(self.norm(x), batch_size=1)
        return x + self.mlp(x)


def step(group, sp, hidden=8, tokens=12):
    block = Block(hidden, group=group, sequence_parallel=sp)
    x = torch.randn(tokens // group.size() if sp else tokens, hidden, requires_grad=True)
    return lambda: block(x).square().sum().backward()


def written(call):
    """Bytes that this process writes, to whatever, during call()."""

    def so_far():
        return int(dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())["wchar"])

    dist.barrier()
    before = so_far()
    call()
    dist.barrier()  # what is on its way belongs to call()
    return so_far() - before


def _counted(call):
    with count_collectives():
        call()


@pytest.mark.thinned(1)
@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="/proc/self/io is Linux's")
@pytest.mark.parametrize("sp", [False, True], ids=["", "sp"])
@on_ranks(2, 3, backend="gloo")
def test_counting_changes_no_collective(group, sp):
    call = step(group, sp)
    call()  # gloo connects
    plain, counted, again, traced = [
        written(one) for one in (call, lambda: _counted(call), call, lambda: count_collectives_of(call))
    ]
    assert plain == counted == again == traced > 0


def _to_the_byte(group):
    call = step(group, False, 64, 240)
    call()
    with count_collectives() as counts:
        sent = written(call)
    counted = counts.select(kind="all_reduce")
    assert counts.by_kind() == {"all_reduce": 4, "barrier": 2}
    nothing = written(lambda: None)
    return sent - nothing, counted.wire_bytes


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="/proc/self/io is Linux's")
@pytest.mark.parametrize("p", [2, 3, 4])
def test_wire_bytes_are_those_of_gloos_ring_without_its_headers(p):
    for sent, wire in run(_to_the_byte, p):
        assert wire == 4 * 2 * (p - 1) / p * 240 * 64 * 4
        assert sent > wire and (sent - wire) % HEADER == 0
        assert sent < 1.02 * wire


def _ways(group, sp):
    """Eager, traced as CommDebugMode sees it, compiled: (kind, payload) and number of each."""
    torch.manual_seed(0)
    module = tp_ext.ParallelMLP(8, 16, group=group, sequence_parallel=sp)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    x = torch.randn(6 // group.size() if sp else 6, 8, requires_grad=True)
    compiled(x).sum().backward()
    found = []
    for call in (module, compiled):
        with count_collectives() as counts:
            call(x).sum().backward()
        found.append(sorted((row.kind, row.payload, row.number) for row in counts.rows))
    with count_collectives() as counts:
        other = count_collectives_of(lambda: module(x).sum().backward())
    assert counts.by_kind() == other
    return [*found, sorted((row.kind, row.payload, row.number) for row in counts.rows)]


@pytest.mark.core
@pytest.mark.parametrize("sp", [False, True], ids=["", "sp"])
def test_eager_compiled_and_traced_are_counted_alike(sp):
    """But for one gather: compiled forward and backward are one graph, which gathers x once and keeps the result."""
    for eager, compiled, traced in run(_ways, 2, sp):
        if sp:
            assert eager[0] == ("all_gather", 192, 3) and compiled[0] == ("all_gather", 192, 2)
            compiled[0] = eager[0]
        assert eager == compiled == traced and eager


@on_ranks(2, 3, backend="gloo")
def test_the_backend_does_not_matter(group):
    """A step over the pool's gloo and over shared memory."""
    found = []
    for one in (group, dist.new_group(backend="tp_shm")):
        call = step(one, True)
        with count_collectives() as counts:
            call()
        assert {row.group for row in counts.rows} == {one.group_name}
        found.append(sorted((row.kind, row.payload, row.number) for row in counts.rows))
    gloo, shared_memory = found
    assert gloo == shared_memory and gloo


@pytest.mark.core
@on_ranks(4)
def test_ddp_and_fsdp2(group):
    """Over a data axis: gradients of DDP in buckets, parameters and gradients of FSDP2 in flat tensors."""
    params = 4 * (8 * 8 + 8 + 8 * 8 + 8)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found = []
    for wrap in ("ddp", "fsdp"):
        model = tp_ext.ParallelMLP(8, 16, group=mesh["tp"])
        if wrap == "ddp":
            wrapped = nn.parallel.DistributedDataParallel(model, process_group=mesh["dp"].get_group())
        else:
            wrapped = fully_shard(model, mesh=mesh["dp"])
        for _ in range(2):  # the second forward of DDP shows the order of its buckets
            wrapped(torch.ones(3, 8)).sum().backward()
        with count_collectives() as counts:
            wrapped(torch.ones(3, 8)).sum().backward()
        found.append({(row.kind, row.payload): row.number for row in counts.select(group=mesh["dp"]).rows})
        assert counts.select(group=mesh["tp"]).by_kind() == {"all_reduce": 1}  # x needs no gradient
    ddp, fsdp = found
    assert ddp == {("all_reduce", params): 1}
    assert fsdp == {("all_gather", params): 1, ("reduce_scatter", params): 1}
