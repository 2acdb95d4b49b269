"""``compare_collectives``: what differs between ranks is named on all of them before it hangs, and nothing else is."""

import re
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn, ones
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.fsdp import fully_shard

import tp_ext
from tests.helpers import ranks, simulated
from tests.shm.backends import launch, start
from tp_ext import P
from tp_ext.debug import compare_collectives, count_collectives, simulate

SECONDS = 60


def _mesh(group, *sizes):
    names = ("x", "y") if len(sizes) == 2 else ("x",)
    return dist.init_device_mesh("cpu", sizes, mesh_dim_names=names)


def _in_order(group, bad, axes=("x", "y")):
    """As a loop over a set of axes, which another process goes through in another order."""
    return reversed(axes) if bad else axes


def _sums(group, bad):
    mesh = _mesh(group, 2, 2)
    for axis in _in_order(group, bad):
        dist.all_reduce(ones(2), group=mesh[axis].get_group())


def _varies(group, bad):
    w, mesh = ones(3, requires_grad=True), _mesh(group, 2, 2)

    def program(w, x):
        for axis in _in_order(group, bad):
            w = tp_ext.pvary(w, axis)
        return x * w

    mapped = tp_ext.spmd(mesh, in_specs=(P(), P(("x", "y"))), out_specs=P(("x", "y")), check=False)(program)
    torch.autograd.grad(mapped(w, ones(4, 3)).sum(), w)


def _regions(group, bad):
    x, mesh = ones(3, requires_grad=True), _mesh(group, 2, 2)
    y = x
    for axis in _in_order(group, bad):
        y = tp_ext.copy_to_region(y, mesh[axis])
    y.sum().backward()


def _functional(group, bad):
    mesh = _mesh(group, 2, 2)
    for axis in _in_order(group, bad):
        all_reduce(ones(2), "sum", mesh[axis].get_group()).sum()


def _after_equal_steps(group, bad):
    mesh = _mesh(group, 2, 2)
    mlp = tp_ext.ParallelMLP(4, 8, group=mesh["x"])
    for _ in range(3):
        mlp(ones(3, 4)).sum().backward()
    for axis in _in_order(group, bad):
        dist.all_reduce(mlp.up.weight.grad, group=mesh[axis].get_group())


def _equal_groups(group, bad):
    """Two groups of the same ranks, which differ in nothing but their names."""
    for some in _in_order(group, bad, [dist.new_group([*range(group.size())]) for _ in range(2)]):
        dist.all_reduce(ones(2), group=some)


def _fewer(group, bad):
    for _ in range(2 if bad else 3):
        dist.all_reduce(ones(2), group=group)


def _asynchronous(group, bad):
    mesh = _mesh(group, 2, 2)
    pending = [dist.all_reduce(ones(2), group=mesh[axis].get_group(), async_op=True) for axis in _in_order(group, bad)]
    for work in pending:
        work.wait()


def _after_messages(group, bad):
    """Between stages of a pipeline only calls of their group are compared, within a stage all."""
    mesh = _mesh(group, 2, 2)  # x: stages
    _messages(mesh["x"].get_group())
    for axis in _in_order(group, bad):
        dist.all_reduce(ones(2), group=mesh[axis].get_group())


def _messages(group):
    if group.rank() == 0:
        dist.send(ones(2), group=group, group_dst=1)
    else:
        dist.recv(ones(2), group=group, group_src=0)


def _raised(group, bad):
    if bad:
        raise ValueError("of this rank")
    dist.all_reduce(ones(2), group=group)


def _raised_alone(group, bad):
    dist.all_reduce(ones(2), group=group)
    if bad:
        raise ValueError("of this rank")


def _both(*patterns):
    """In any order: ranks that have not come yet are not listed, and ranks are listed by the calls that they have."""
    return "".join(f"(?=.*{pattern})" for pattern in patterns)


LINE = r"\S*tests/debug/test_collective_order.py:\d+"
ISSUED = rf"ranks \[[0123, ]+\] issue all_reduce\(float32 \[2\], sum\) over [xy] at {LINE}"
ORDERS = rf"call 1 differs: {ISSUED}; {ISSUED}"
BACKWARD = rf"all_reduce\(float32 \[3\], sum\) over [xy] at {LINE}, in backward of CopyTo; ranks \[.\] issue .* over"
DIFFERENT = {  # the call, of the group of 4 ranks and whether this one is bad; the error of all ranks
    "sums": (_sums, ORDERS),
    "functional collectives": (_functional, ORDERS),
    "asynchronous": (_asynchronous, ORDERS),
    "varying in spmd": (_varies, BACKWARD),
    "regions": (_regions, BACKWARD),
    "after equal steps": (_after_equal_steps, r"call 4 differs: .* over [xy] at .* over [xy] at"),
    "equal groups": (
        _equal_groups,
        r"over group (\S+|new.*) of ranks \[0, 1, 2, 3\] at .* over group .* of ranks \[0, 1, 2, 3\] at",
    ),
    "fewer": (
        _fewer,
        "call 3 differs: " + _both(rf"issue all_reduce.* at {LINE}", r"ranks \[1\] issue no further call"),
    ),
    "after messages": (_after_messages, r"ranks \[[01]\] issue .* over [xy] at .* over [xy] at"),
    "an exception": (_raised, "rank 1 left the block by ValueError: of this rank; rank . issues all_reduce"),
    "an exception alone": (_raised_alone, "rank 1 left the block by ValueError: of this rank"),
    "a shape": (
        lambda g, bad: dist.all_reduce(ones(3 if bad else 2), group=g),
        _both(r"issue all_reduce\(float32 \[2\], sum\)", r"ranks \[1\] issue all_reduce\(float32 \[3\], sum\)"),
    ),
    "a dtype": (
        lambda g, bad: dist.broadcast(ones(2, dtype=torch.float64 if bad else torch.float32), 0, group=g),
        _both(r"issue broadcast\(float32 \[2\], root 0\)", r"ranks \[1\] issue broadcast\(float64 \[2\], root 0\)"),
    ),
    "a root": (
        lambda g, bad: dist.broadcast(ones(2), int(bad), group=g),
        _both("root 0", r"ranks \[1\] issue .*root 1"),
    ),
    "a reduction": (
        lambda g, bad: dist.all_reduce(ones(2), dist.ReduceOp.MAX if bad else dist.ReduceOp.SUM, group=g),
        _both("sum", "max"),
    ),
    "a function": (
        lambda g, bad: dist.barrier(g) if bad else dist.all_reduce(ones(2), group=g),
        _both(r"issue all_reduce", r"ranks \[1\] issue barrier\(\)"),
    ),
    "an option of a layer": (
        lambda g, bad: tp_ext.ParallelMLP(4, 8, group=g, sequence_parallel=bad)(ones(4, 4)),
        _both("issue all_reduce", r"ranks \[1\] issue all_gather"),
    ),
}
BAD = 1


def _compared(group, name):
    begin = time.monotonic()
    try:
        with compare_collectives(timeout=SECONDS):
            DIFFERENT[name][0](group, group.rank() == BAD)
    except (RuntimeError, ValueError) as error:
        return str(error), time.monotonic() - begin
    return "", 0.0


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_difference_is_the_same_error_on_all_ranks(name):
    outcomes = ranks.run(_compared, 4, name)  # the pool checks that the group still works
    if name.startswith("an exception"):
        assert outcomes.pop(BAD)[0] == "of this rank"
    assert len({message for message, _ in outcomes}) == 1, outcomes
    assert re.match("compare_collectives: .*" + DIFFERENT[name][1], outcomes[0][0]), outcomes[0]
    assert max(seconds for _, seconds in outcomes) < SECONDS / 2


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_difference_of_simulated_ranks(name):
    def on_rank(group):
        with compare_collectives():
            DIFFERENT[name][0](group, group.rank() == BAD)

    of_exception = "raised ValueError: of this rank"
    pattern = of_exception if name.startswith("an exception") else "compare_collectives: .*" + DIFFERENT[name][1]
    with pytest.raises(RuntimeError, match=pattern):
        simulated.run(on_rank, 4)


def test_without_it_another_order_is_silent():
    """A sum over x of what one rank has summed over y before: the reason for all this."""

    def on_rank(group, swapped):
        mesh, x = _mesh(group, 2, 2), torch.tensor([10.0 ** group.rank()])
        for axis in _in_order(group, swapped and group.rank() in (1, 3)):
            work = dist.all_reduce(x, group=mesh[axis].get_group(), async_op=True)
            if not swapped:
                work.wait()
        dist.barrier(group)
        return x.item()

    assert simulated.run(on_rank, 4, False) == [1111.0] * 4
    assert set(simulated.run(on_rank, 4, True)) != {1111.0}


def _over_shared_memory(rank, p, folder, backend, fused):
    start(rank, p, folder, backend)
    group = dist.group.WORLD
    if fused:  # an all-reduce that tp_shm gives to a norm without c10d, unless something listens
        block = nn.Sequential(tp_ext.RowParallelLinear(8, 6, group=group, input_is_parallel=False), nn.Identity())
        with compare_collectives(), torch.no_grad():
            block(ones(2, 8))
            dist.all_reduce(ones(3 + (rank == BAD)), group=group)
    else:
        with compare_collectives():
            _sums(group, rank == BAD)


@pytest.mark.parametrize(("fused", "message"), [(False, ORDERS), (True, "call 2 differs: .*3.*4")])
def test_over_shared_memory(fused, message):
    for outcome in launch(_over_shared_memory, 4, "cpu:tp_shm", fused, timeout=100):
        assert re.search(message, outcome.message), outcome


def _trained(group, **sizes):
    mesh = tp_ext.init_mesh("cpu", **sizes)
    model = nn.Sequential(*(tp_ext.ParallelMLP(4, 8, group=mesh["tp"]) for _ in range(4)))
    run = tp_ext.parallelize(model, mesh, loss=nn.functional.mse_loss, microbatches=4)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        run.step(ones(4, 4), ones(4, 4))
        optimizer.step()


def _language_model(group):
    model = nn.ModuleList(
        [
            tp_ext.VocabParallelEmbedding(11, 8, group=group),
            tp_ext.ParallelAttention(8, 4, group=group),
            tp_ext.ParallelMLP(8, 13, group=group, sequence_parallel=True),
            tp_ext.VocabParallelLMHead(8, 11, group=group),
        ]
    )
    ids = torch.arange(7)
    x = model[2](model[1](model[0](ids)[None])[0])
    model[3].loss(x, ids).backward()
    tp_ext.clip_grad_norm_(model, 1.0)
    tp_ext.full_state_dict(model)


def _wrapped(group):
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for wrap in (
        lambda m: fully_shard(m, mesh=mesh["dp"]),
        lambda m: nn.parallel.DistributedDataParallel(m, process_group=mesh["dp"].get_group()),
    ):
        model = wrap(tp_ext.ParallelMLP(4, 8, group=mesh["tp"]))
        for _ in range(2):
            model(ones(3, 4) * (1 + mesh["dp"].get_local_rank())).sum().backward()


def _experts(group):
    moe = tp_ext.ParallelMoE(8, 16, 4, 2, group=None, expert_group=group)
    moe(torch.randn(6, 8, generator=torch.Generator().manual_seed(group.rank()))).sum().backward()


def _context(group):
    layout = tp_ext.ContextLayout([4 * group.size()], group=group)
    attention = tp_ext.ParallelAttention(8, 4, group=None, context_group=group)
    attention(ones(4, 8, requires_grad=True), layout=layout).sum().backward()


def _chain(group):
    """Groups that overlap, and one that some ranks alone have."""
    for pair in ([0, 1], [1, 2], [2, 3]):
        some = dist.new_group(pair)
        if group.rank() in pair:
            dist.all_reduce(ones(2), group=some)
    dist.all_reduce(ones(2), group=group)


def _objects(group):
    dist.all_gather_object([None] * group.size(), "x" * (10 * group.rank()), group=group)
    dist.broadcast_object_list([group.rank()], src=0, group=group)
    lengths = [1 + (group.rank() + i) % 2 for i in range(group.size())]
    into = [1 + (i + group.rank()) % 2 for i in range(group.size())]
    dist.all_to_all_single(torch.empty(sum(into)), torch.ones(sum(lengths)), into, lengths, group=group)


RIGHT = {
    "a language model": _language_model,
    "wrapped": _wrapped,
    "experts": _experts,
    "a context": _context,
    "groups that overlap": _chain,
    "objects and uneven lengths": _objects,
    "a pipeline": lambda g: _trained(g, pp=2, tp=2),
    "stages alone": lambda g: _trained(g, pp=4),
    "replicas": lambda g: _trained(g, dp=2, tp=2),
    "stages and replicas": lambda g: _trained(g, dp=2, pp=2),
}


def _right(group, name):
    with compare_collectives(timeout=SECONDS), count_collectives() as counts:
        RIGHT[name](group)
    return counts.number


@pytest.mark.parametrize("name", RIGHT)
def test_right_programs_pass(name):
    assert min(ranks.run(_right, 4, name)) > 0


@pytest.mark.parametrize("name", sorted(RIGHT.keys() - {"wrapped"}))
def test_right_programs_of_simulated_ranks_pass(name):
    assert min(simulated.run(_right, 4, name)) > 0


def _absent(group):
    if group.rank() == BAD:
        time.sleep(3)
        return ""
    try:
        with compare_collectives(timeout=1):
            dist.all_reduce(ones(2), group=group)
    except RuntimeError as error:
        return str(error)


def test_a_rank_that_does_not_come_is_named():
    for rank, message in enumerate(ranks.run(_absent, 3)):
        assert rank == BAD or re.search("rank 1 did not issue .*, which has issued nothing in the block", message)


def test_a_rank_alone_compares_nothing():
    with compare_collectives():
        pass

    def on_rank(rank, group):
        with compare_collectives(), compare_collectives():  # the inner one adds nothing
            dist.all_reduce(ones(1), group=group)

    assert simulate(on_rank, 1) == [None]
    assert simulate(on_rank, 2) == [None] * 2


@pytest.mark.parametrize("given", [False, True])
def test_stages_of_another_name(given):
    """Of a pipeline that torch knows nothing of: other programs before the first message."""

    def on_rank(group):
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipe", "tp"))
        with compare_collectives(pipeline=mesh["pipe"] if given else None):
            for _ in range(1 + mesh["pipe"].get_local_rank()):
                dist.all_reduce(ones(1), group=mesh["tp"].get_group())
            dist.barrier(group)
        return True

    if given:
        assert all(simulated.run(on_rank, 4))
    else:
        with pytest.raises(RuntimeError, match=r"call 2 differs: .* over tp at"):
            simulated.run(on_rank, 4)


def test_nothing_is_left():
    """Outside of a block c10d's operators are torch's own."""

    def on_rank(rank, group):
        with compare_collectives():
            dist.all_reduce(ones(1), group=group)

    simulate(on_rank, 2)
    assert not torch._C._dispatch_has_kernel_for_dispatch_key("c10d::allreduce_", "BackendSelect")


def test_arguments():
    with pytest.raises(ValueError, match="timeout"), compare_collectives(timeout=-1):
        pass
