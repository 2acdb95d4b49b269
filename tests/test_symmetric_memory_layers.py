"""Layers made with symmetric memory, on a CPU: nothing changes, copies keep it and pickles do not; and where the fused
GEMMs are called, when they are given CPU kernels.
"""

import contextlib
import copy
import pickle

import pytest
import torch
import torch.distributed._symmetric_memory as torch_symm_mem
from torch.distributed.tensor.debug import CommDebugMode

import tp_ext
from tests.helpers import ranks
from tests.helpers.on_ranks import on_ranks
from tp_ext import symmetric_memory
from tp_ext.group import parallel_group

pytestmark = pytest.mark.core


def with_memory(group, fused_matmul=False):
    """The group as `enable` would give it back."""
    return f"{parallel_group(group).name}/262144/10485760/7/{int(fused_matmul)}"


def results(kind, group, sequence_parallel, tokens=12, dtype=torch.float64):
    """Output and gradients of a linear over the group, from values that every rank draws alike."""
    torch.manual_seed(0)
    layer = kind(8, 12, group=group, sequence_parallel=sequence_parallel, dtype=dtype)
    p, rank = layer.tp_group.size, layer.tp_group.rank
    x = torch.randn(tokens, 3, 8, dtype=dtype)
    if kind is tp_ext.RowParallelLinear:
        x = x.tensor_split(p, -1)[rank]
    elif sequence_parallel:
        x = x.tensor_split(p)[rank]
    x = x.clone().requires_grad_()
    options = {"total_tokens": tokens} if sequence_parallel else {}
    y = layer(x, **options)
    y.sin().sum().backward()
    return [y.detach(), *(leaf.grad for leaf in (x, *layer.parameters()))]


def both(group, kind, sequence_parallel, fused_matmul=True, **options):
    """Without symmetric memory and with it."""
    with_it = with_memory(group, fused_matmul)
    return results(kind, group, sequence_parallel, **options), results(kind, with_it, sequence_parallel, **options)


LINEARS = [tp_ext.ColumnParallelLinear, tp_ext.RowParallelLinear]


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("kind", LINEARS)
@pytest.mark.parametrize("p", [2, 3])
def test_tensors_of_another_device_go_through_the_backend(p, kind, sequence_parallel):
    """Of a dtype and size that on CUDA would not."""
    for plain, enabled in ranks.run(both, p, kind, sequence_parallel, dtype=torch.float32):
        assert all(map(torch.equal, plain, enabled))


@on_ranks(2, backend="gloo")
def test_a_compiled_function_takes_it(group):
    def f(x, group):
        return tp_ext.reduce_from_region(tp_ext.copy_to_region(x, group).sin(), group)

    x, name = torch.randn(4, 8, requires_grad=True), with_memory(group)
    ys = [f(x, group), torch.compile(f, fullgraph=True, backend="aot_eager")(x, name)]
    grads = [torch.autograd.grad(y.sum(), x)[0] for y in ys]
    assert torch.equal(*ys) and torch.equal(*grads)


@on_ranks(2, backend="gloo")
def test_copies_keep_the_memory_and_pickles_leave_it(group):
    layer = tp_ext.RowParallelLinear(8, 12, group=with_memory(group))
    loaded = pickle.loads(pickle.dumps(layer)).tp_group.name
    assert layer.tp_group.name == copy.deepcopy(layer).tp_group.name != loaded == f"0@{group.rank()}/2"


@contextlib.contextmanager
def cpu_kernels(calls):
    """Fused GEMMs for CPU tensors: those that torch runs in place of its own in tests, counted."""

    def counted(name, kernel):
        def call(*args, **kwargs):
            calls.append(name)
            return kernel(*args, **kwargs)

        return call

    with torch.library._scoped_library("symm_mem", "IMPL") as library:
        for name in symmetric_memory.FUSED:
            library.impl(name, counted(name, getattr(torch_symm_mem, f"_{name}_fallback")), "CPU")
        yield


def fused(group, kind, sequence_parallel, tokens=12, watched=False):
    calls = []
    with cpu_kernels(calls), CommDebugMode() if watched else contextlib.nullcontext():
        return *both(group, kind, sequence_parallel, tokens=tokens), calls


def expected_calls(kind, sequence_parallel):
    if not sequence_parallel:
        return []
    column = ["fused_all_gather_matmul"]
    return column if kind is LINEARS[0] else ["fused_matmul_reduce_scatter", "fused_all_gather_matmul"]


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("kind", LINEARS)
@pytest.mark.parametrize("p", [2, 4])
def test_fused_matmuls_serve_sequence_parallel_linears(p, kind, sequence_parallel):
    """The same sums of products by other kernels: equal to rounding in fp64."""
    for plain, enabled, calls in ranks.run(fused, p, kind, sequence_parallel):
        assert calls == expected_calls(kind, sequence_parallel)
        for a, b in zip(plain, enabled, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", LINEARS)
@pytest.mark.parametrize("options", [{"tokens": 11}, {"watched": True}], ids=["uneven", "watched"])
def test_fused_matmuls_leave_uneven_lengths_and_watched_operators_alone(kind, options):
    for plain, enabled, calls in ranks.run(fused, 2, kind, True, **options):
        assert calls == [] and all(map(torch.equal, plain, enabled))
