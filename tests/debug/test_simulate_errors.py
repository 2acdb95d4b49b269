"""simulate when a rank fails: which rank, what and where, on all ranks; no rank waits for ever."""

import _thread
import re
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch.autograd import forward_ad

import tp_ext
from tp_ext.debug import simulate


def _raises(rank, group):
    if rank == 1:
        raise KeyError("lost")  # here
    dist.all_reduce(torch.ones(2), group=group)


def _raises_in_backward(rank, group):
    x = torch.ones(2, 4, requires_grad=True)
    y = tp_ext.copy_to_region(x, group)
    if rank == 1:
        y.register_hook(lambda grad: 1 / 0)  # here
    y.sum().backward()


def _returns(rank, group):
    if rank != 1:
        dist.all_reduce(torch.ones(2), group=group)  # here


def _never_sends(rank, group):
    if rank == 0:
        dist.recv(torch.ones(2), group=group, group_src=1)  # here


def _other_collective(rank, group):
    if rank == 1:
        dist.broadcast(torch.ones(2), group=group, group_src=0)  # here
    dist.all_reduce(torch.ones(2), group=group)


def _other(**options):
    """A call that differs on rank 1 in one property."""

    def call(rank, group):
        kind, shape, dtype, op, root = {
            name: values[rank == 1] if isinstance(values, tuple) else values
            for name, values in (
                {"kind": "all_reduce", "shape": 2, "dtype": "float32", "op": "SUM", "root": 0} | options
            ).items()
        }.values()
        x, op = torch.ones(shape, dtype=getattr(torch, dtype)), getattr(dist.ReduceOp, op)
        if kind == "all_reduce":
            dist.all_reduce(x, op, group=group)  # here
        elif kind == "broadcast":
            dist.broadcast(x, group=group, group_src=root)  # here
        else:
            dist.all_gather_into_tensor(torch.ones(3 * shape), x, group=group)  # here

    return call


def _message_of_other_length(rank, group):
    x = torch.ones(2 + rank)
    if rank == 0:
        dist.send(x, group=group, group_dst=1)
    elif rank == 1:
        dist.recv(x, group=group, group_src=0)  # here


def _groups_in_a_circle(rank, mesh):
    for axis in ("a", "b") if rank in (1, 2) else ("b", "a"):
        dist.barrier(group=mesh.get_group(axis))  # here


def _polls(rank, group):
    if rank == 0:
        work = dist.barrier(group=group, async_op=True)
        while not work.is_completed():  # here
            pass


def _catches(rank, group):
    """A rank that goes on after the error meets it at its next call."""
    if rank == 1:
        raise ValueError("bad")  # here
    for _ in range(3):
        try:
            dist.barrier(group=group)
        except RuntimeError as error:
            assert "rank 1 raised ValueError: bad" in str(error)


def _nested(rank, group):
    simulate(_raises, 2)


def _in_forward_mode(differentiate):
    def fn(rank, group):
        layer = tp_ext.ColumnParallelLinear(3, 4, group=group, gather_output=True)
        differentiate(lambda x: layer(x), torch.ones(3))  # here

    fn.__name__ = differentiate.__name__
    return fn


def jvp(f, x):
    torch.func.jvp(f, (x,), (x,))


def jacfwd(f, x):
    torch.func.jacfwd(f)(x)


def dual_level(f, x):
    with forward_ad.dual_level():
        f(forward_ad.make_dual(x, x))


FIT = "which does not fit"
FAILURES = [
    (_raises, 3, "rank 1 raised KeyError: 'lost'", KeyError),
    (_raises_in_backward, 3, "rank 1 raised ZeroDivisionError: division by zero", ZeroDivisionError),
    (_returns, 3, r"rank 1 returned while rank 0 waits for rank 1 in all_reduce\(float32 \[2\], sum\)", RuntimeError),
    (_never_sends, 2, r"rank 1 returned while rank 0 waits for rank 1 in recv\(float32 \[2\], from 1\)", RuntimeError),
    (_other_collective, 3, rf"rank 1 calls broadcast\(.* root 0\) at .*, {FIT} all_reduce\(.* of rank 0", RuntimeError),
    (
        _other(kind=("all_reduce", "all_gather")),
        3,
        rf"rank 1 calls all_gather.*{FIT} all_reduce.* of rank 0",
        RuntimeError,
    ),
    (
        _other(shape=(2, 3)),
        3,
        rf"rank 1 calls all_reduce\(float32 \[3\].*{FIT} all_reduce\(float32 \[2\]",
        RuntimeError,
    ),
    (
        _other(kind="broadcast", shape=(2, 3)),
        3,
        rf"broadcast\(float32 \[2\].*{FIT} broadcast\(float32 \[3\]",
        RuntimeError,
    ),
    (_other(kind="all_gather", shape=(2, 3)), 3, rf"all_gather\(float32 \[[23]\].*{FIT} all_gather", RuntimeError),
    (_other(dtype=("float32", "float64")), 3, rf"all_reduce\(float64 .*{FIT} all_reduce\(float32", RuntimeError),
    (_other(op=("SUM", "MAX")), 3, rf"all_reduce\(.*, max\) at .*{FIT} all_reduce\(.*, sum\)", RuntimeError),
    (
        _other(kind="broadcast", root=(0, 2)),
        3,
        rf"broadcast\(.*root 2\) at .*{FIT} broadcast\(.*root 0\)",
        RuntimeError,
    ),
    (
        _message_of_other_length,
        2,
        rf"rank 0 calls send\(float32 \[2\], to 1\).*{FIT} recv\(float32 \[3\]",
        RuntimeError,
    ),
    (_groups_in_a_circle, {"a": 2, "b": 2}, "no rank can go on: rank 0 waits for rank 1 in barrier", RuntimeError),
    (_polls, 2, "rank 0 polls for a call that no other rank can complete", RuntimeError),
    (_catches, 3, "rank 1 raised ValueError: bad", ValueError),
    (_nested, 2, "rank 0 raised RuntimeError: simulate: rank 1 raised KeyError: 'lost'", RuntimeError),
    *(
        (_in_forward_mode(f), 2, "ranks cannot take turns in forward mode", RuntimeError)
        for f in (jvp, jacfwd, dual_level)
    ),
]


@pytest.mark.parametrize(("fn", "p", "match", "cause"), FAILURES, ids=lambda x: getattr(x, "__name__", ""))
def test_failures(fn, p, match, cause):
    """The message ends with, or has, a line of this file; the cause is the exception of a rank."""
    threads = set(threading.enumerate())
    with pytest.raises(RuntimeError, match=match) as caught:
        simulate(fn, p)
    assert str(caught.value).startswith("simulate: ") and type(caught.value.__cause__) is cause
    lines = [int(number) for number in re.findall(rf"{re.escape(__file__)}:(\d+)", str(caught.value))]
    with open(__file__) as file:
        text = file.read().splitlines()
    assert any("# here" in text[line - 1] for line in lines) or fn is _polls
    assert set(threading.enumerate()) <= threads
    simulate(lambda rank, group: dist.barrier(group=group), 2)  # as if nothing had been


def test_errors_of_all_ranks_name_the_first():
    messages = {}

    def note(rank, group):
        try:
            _raises(rank, group)
        except RuntimeError as error:
            messages[rank] = str(error)
            raise

    with pytest.raises(RuntimeError) as caught:
        simulate(note, 3)
    assert messages == {0: str(caught.value)}  # rank 2 had not begun


@pytest.fixture
def interruptible():
    """A shell starts what it runs in the background with SIGINT ignored, and then Python interrupts nothing."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("nested", [False, True])
def test_an_interrupt_ends_all_ranks(nested, interruptible):
    def loop(rank, group):
        if rank == 1:
            _thread.interrupt_main()
        while True:
            time.sleep(0.001)
            dist.barrier(group=group)

    threads = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt):
        simulate((lambda rank, group: simulate(loop, 2)) if nested else loop, 2)
    assert set(threading.enumerate()) <= threads


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ((print, 0), ValueError, "p: 0 must be at least 1"),
        ((print, True), TypeError, "p: True must be an integer"),
        ((print, {}), ValueError, "p: {} must be"),
        ((print, {"tp": 0}), ValueError, "p: {'tp': 0} must be at least 1 for axis 'tp'"),
        ((print, {"tp": 2.0}), TypeError, "p: .* must be an integer"),
        ((print, {1: 2}), ValueError, "p: {1: 2} must be"),
        ((3, 2), TypeError, "fn: 3 must be a function"),
    ],
)
def test_bad_arguments(arguments, error, match):
    with pytest.raises(error, match=match):
        simulate(*arguments)


def test_a_bad_seed():
    with pytest.raises(TypeError, match="seed: None must be an integer"):
        simulate(print, 2, seed=None)
