"""matmul_2d against torch.matmul of the full matrices: values, gradients of both orders, traffic, memory, choice."""

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close
from torch.testing._internal.distributed.fake_pg import FakeStore

import tp_ext
from tests.helpers import ranks
from tests.helpers.meshes import mesh_of
from tests.helpers.on_ranks import on_ranks
from tests.helpers.peak_memory import Peak
from tp_ext import P, sharded_matmul

pytestmark = pytest.mark.core

ALGORITHMS = ["gather", "summa"]
CLOSE = {"rtol": 1e-12, "atol": 1e-12}
EVEN, UNEVEN, SHORT = (12, 24, 12), (5, 7, 11), (3, 1, 2)  # with one element of k, most ranks have none


def _mesh(x, y):
    return mesh_of(x, y, names=("x", "y"))


def _shard(full, mesh):
    """This rank's shard of the last two dims, a leaf."""
    for dim, axis in ((-2, "x"), (-1, "y")):
        full = full.tensor_split(mesh[axis].size(), dim)[mesh[axis].get_local_rank()]
    return full.detach().clone().requires_grad_()


def _operands(mesh, shape, batch=(), dtype=torch.float64):
    """Full matrices, and this rank's shards of them."""
    torch.manual_seed(0)
    m, k, n = shape
    full = [torch.randn(*dims, dtype=dtype, requires_grad=True) for dims in ((*batch, m, k), (k, n))]
    return full, [_shard(x, mesh) for x in full]


def _like_dense(group, x, y, shape, batch, algorithm):
    mesh = _mesh(x, y)
    full, shards = _operands(mesh, shape, batch)
    c = tp_ext.matmul_2d(*shards, mesh["x"], mesh["y"], shape=shape, algorithm=algorithm)
    want = full[0] @ full[1]
    assert_close(c, _shard(want, mesh), **CLOSE)
    loss = tp_ext.reduce_from_region(tp_ext.reduce_from_region(c.sin().sum(), mesh["x"]), mesh["y"])
    grads = torch.autograd.grad(loss, shards, create_graph=True)
    wants = torch.autograd.grad(want.sin().sum(), full, create_graph=True)
    assert_close(grads, tuple(_shard(grad, mesh) for grad in wants), **CLOSE)
    loss.backward(retain_graph=True)
    first = [shard.grad.clone() for shard in shards]
    assert_close(first, [_shard(grad, mesh) for grad in wants], **CLOSE)
    loss.backward(retain_graph=True)
    assert all(torch.equal(shard.grad, 2 * grad) for shard, grad in zip(shards, first, strict=True))
    again = torch.autograd.grad(_sum_of_squares(grads, mesh), shards)
    assert_close(again, tuple(_shard(g, mesh) for g in torch.autograd.grad(_sum_of_squares(wants), full)), **CLOSE)


def _sum_of_squares(grads, mesh=None):
    total = sum(grad.square().sum() for grad in grads)
    for axis in ("x", "y") if mesh else ():
        total = tp_ext.reduce_from_region(total, mesh[axis])
    return total


MESHES = [
    pytest.param(1, 1, EVEN, ()),
    pytest.param(1, 2, EVEN, (2,)),
    pytest.param(2, 1, UNEVEN, (2, 3)),
    pytest.param(2, 2, EVEN, ()),
    pytest.param(2, 2, UNEVEN, (2,)),
    pytest.param(1, 3, UNEVEN, ()),
    pytest.param(3, 1, EVEN, ()),
    pytest.param(4, 1, SHORT, ()),
    pytest.param(2, 3, UNEVEN, (), marks=pytest.mark.exhaustive),
    pytest.param(4, 2, EVEN, (2,), marks=pytest.mark.exhaustive),
    pytest.param(4, 2, SHORT, (), marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(("x", "y", "shape", "batch"), MESHES)
def test_values_and_gradients_are_those_of_the_full_matrices(x, y, shape, batch, algorithm):
    ranks.run(_like_dense, x * y, x, y, shape, batch, algorithm)


@on_ranks(4)
def test_products_follow_one_another_and_run_in_a_map(group):
    """(a b) b^T b and its gradients: each product is sharded as the operands of the next."""
    mesh = _mesh(2, 2)
    full, (a, b) = _operands(mesh, (4, 6, 6))

    def product(a, b):
        return tp_ext.matmul_2d(a, b, mesh["x"], mesh["y"])

    @tp_ext.spmd(mesh, in_specs=(P("x", "y"), P("x", "y")), out_specs=P("x", "y"))
    def mapped(a, b):
        return product(product(a, b).tanh(), b)

    want = (full[0] @ full[1]).tanh() @ full[1]
    wants = torch.autograd.grad(want.sin().sum(), full)
    assert_close(product(product(a, b).tanh(), b), _shard(want, mesh), **CLOSE)
    found = mapped(*full)
    assert_close(found, want, **CLOSE)
    assert_close(torch.autograd.grad(found.sin().sum(), full), wants, **CLOSE)


def _traffic(group, algorithm):
    """Payloads over x and y, forward and backward, and the number of collectives of each kind. k is in four panels."""
    mesh = _mesh(2, 3)
    _, (a, b) = _operands(mesh, (4, 12, 6))
    payloads, kinds = [], []
    c = None
    for run in range(2):
        with tp_ext.debug.count_collectives() as counts:
            if run == 0:
                c = tp_ext.matmul_2d(a, b, mesh["x"], mesh["y"], algorithm=algorithm)
            else:
                c.sum().backward()
        payloads.append([counts.select(group=mesh[axis]).payload_bytes for axis in ("x", "y")])
        kinds.append(counts.by_kind())
    return payloads, kinds


def test_traffic_is_that_of_the_formula():
    """Ranks of a row need 2 x 12 elements of a, those of a column 12 x 2 of b."""
    of_a, of_b = 8 * 2 * 12, 8 * 12 * 2
    for payloads, kinds in ranks.run(_traffic, 6, "gather"):
        assert payloads == [[of_b, of_a], [2 * of_b, 2 * of_a]]
        assert kinds == [{"all_gather": 2}, {"all_gather": 2, "reduce_scatter": 2}]
    for payloads, kinds in ranks.run(_traffic, 6, "summa"):
        assert payloads == [[of_b, of_a], [of_b + of_b // 2, of_a + of_a * 2 // 3]]
        assert kinds == [{"broadcast": 8}, {"broadcast": 8, "all_to_all": 3}]


def _saved_and_peak(y, algorithm):
    """Numbers of elements: saved, and the most at once in forward and backward. The shards of a are [16, 8] for every
    number of ranks, those of b [8 y, 4]. Over torch's fake group, since gloo's threads keep tensors for a while."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=y)
    mesh = dist.init_device_mesh("cpu", (1, y), mesh_dim_names=("x", "y"))
    _, (a, b) = _operands(mesh, (16, 8 * y, 4 * y))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        c = tp_ext.matmul_2d(a, b, mesh["x"], mesh["y"], algorithm=algorithm)
    with Peak() as forward:
        c = tp_ext.matmul_2d(a, b, mesh["x"], mesh["y"], algorithm=algorithm)
    g = torch.ones_like(c)
    with Peak() as backward:
        torch.autograd.grad(c, a, g, retain_graph=True)
    return saved == [a.numel(), b.numel()], forward.most // 8, backward.most // 8


def test_shards_alone_are_saved_and_summa_holds_few_panels():
    c, panel = 16 * 4, 16 * 8  # those of b are views here
    for p in (2, 4):
        saved, forward, backward = ranks.run_fresh(_saved_and_peak, p, "gather")
        assert saved and forward == c + 2 * p * panel and backward > 2 * p * panel  # and the ranks' blocks of it
        saved, forward, backward = ranks.run_fresh(_saved_and_peak, p, "summa")
        assert saved and forward <= c + 3 * panel and backward <= 4 * panel


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@on_ranks(4, backend="gloo")
def test_compiles_whole(group, algorithm):
    mesh = _mesh(2, 2)
    _, shards = _operands(mesh, UNEVEN)

    def loss(a, b):
        return tp_ext.matmul_2d(a, b, mesh["x"], mesh["y"], shape=UNEVEN, algorithm=algorithm).sin().sum()

    want = torch.autograd.grad(loss(*shards), shards)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    assert_close(torch.autograd.grad(compiled(*shards), shards), want, **CLOSE)


@on_ranks(2, backend="gloo")
def test_forward_mode(group):
    mesh = _mesh(1, 2)
    full, (a, b) = _operands(mesh, EVEN)
    tangents = [torch.randn_like(x) for x in full]
    own = tuple(_shard(t, mesh).detach() for t in tangents)
    function = lambda a, b: tp_ext.matmul_2d(a, b, mesh["x"], mesh["y"], algorithm="summa")  # noqa: E731
    found = torch.func.jvp(function, (a.detach(), b.detach()), own)
    want = torch.func.jvp(torch.matmul, tuple(x.detach() for x in full), tuple(tangents))
    assert_close(found, tuple(_shard(t, mesh).detach() for t in want), **CLOSE)


@on_ranks(2)
def test_dtypes_autocast_and_one_gradient(group):
    mesh = _mesh(2, 1)
    for dtype, bound in ((torch.float32, 1e-6), (torch.bfloat16, 6e-3)):
        full, (a, b) = _operands(mesh, EVEN, dtype=dtype)
        want = _shard(full[0].double() @ full[1].double(), mesh)
        for algorithm in ALGORITHMS:
            c = tp_ext.matmul_2d(a, b, mesh["x"], mesh["y"], algorithm=algorithm)
            assert c.dtype == dtype
            assert (c - want).norm() <= bound * want.norm()
    _, (a, b) = _operands(mesh, EVEN, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        c = tp_ext.matmul_2d(a, b, mesh["x"], mesh["y"])
    c.sum().backward()
    assert c.dtype == torch.bfloat16 and a.grad.dtype == torch.float32


def _chosen(group, limit):
    mesh = _mesh(1, 2)
    _, (a, b) = _operands(mesh, EVEN)
    sharded_matmul._GATHERED_BYTES = limit
    with tp_ext.debug.count_collectives() as counts:
        tp_ext.matmul_2d(a, b, mesh["x"], mesh["y"])
    sharded_matmul._GATHERED_BYTES = 64 << 20
    return list(counts.by_kind())


def test_summa_is_chosen_by_the_size_of_the_gathered_operands():
    gathered = 24 * (12 + 6) * 8
    assert ranks.run(_chosen, 2, gathered) == [["all_gather"]] * 2
    assert ranks.run(_chosen, 2, gathered - 1) == [["broadcast"]] * 2
