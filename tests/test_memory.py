"""keep_memory: blocks are reused and not fetched anew, values stay, the process does not grow, and it can be undone."""

import os
import random
import resource
import threading

import pytest
import torch
from torch import nn

import tp_ext
from tests.helpers.ranks import run_fresh
from tp_ext._build import load

pytestmark = pytest.mark.core
MIB = 1 << 20


def _kept():
    return load().kept_bytes() / MIB


def _tensor(mib):
    return torch.empty(int(mib * MIB), dtype=torch.uint8)


def _reused():
    before = _tensor(8)
    tp_ext.keep_memory()
    del before  # of torch's allocator: it frees it itself
    small, first = _tensor(0.4), _tensor(8)
    address = first.data_ptr()
    del small, first
    assert _kept() == 8
    again = _tensor(7.9)
    assert again.data_ptr() == address
    del again
    assert _kept() == 8  # rounded up to 8
    one, other = _tensor(8), _tensor(8)
    assert one.data_ptr() == address != other.data_ptr() and _kept() == 0
    assert other.data_ptr() % 64 == 0
    one.resize_(20 * MIB)
    assert _kept() == 8
    assert one.fill_(1).all()
    tp_ext.keep_memory(False)
    assert _kept() == 0
    del one, other
    assert _kept() == 0
    tp_ext.keep_memory()
    del_later = _tensor(3)
    assert _kept() == 0
    del del_later
    assert _kept() == 3


def test_blocks_are_reused_until_it_is_undone():
    run_fresh(_reused)


def _faults():
    x, faults = torch.ones(8 * MIB), []  # 32 MiB
    for keep in (False, True, False):
        tp_ext.keep_memory(keep)
        for _ in range(3):
            x.clone()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(10):
            x.clone()
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return faults


def test_pages_are_not_fetched_anew():
    before, kept, after = run_fresh(_faults)
    assert kept < 100 and min(before, after) > 10 * kept + 100, (before, kept, after)


def _bounded():
    """As batches of other lengths: each size is used once."""
    tp_ext.keep_memory()
    held = _tensor(30)
    for i in range(60):
        for mib in (1 + i * 0.5, 31 - i * 0.5):
            _tensor(mib)
            assert _kept() + 30 <= 1.25 * 64, (i, mib)  # the most in use: 30 and 32, rounded up
    del held
    assert _kept() <= 1.25 * 64


def test_the_process_does_not_grow():
    run_fresh(_bounded)


def _trained(keep):
    torch.manual_seed(0)
    tp_ext.keep_memory(keep)
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.GELU(), nn.Flatten(), nn.Linear(32 * 62 * 62, 10)).bfloat16()
    optimizer, x = torch.optim.AdamW(model.parameters()), torch.randn(16, 3, 64, 64).bfloat16()
    for step in range(3):
        if step == 1 and keep:  # oneDNN gets memory from one allocator and may give it back to the other
            tp_ext.keep_memory(False)
        elif keep:
            tp_ext.keep_memory()
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach().clone() for param in model.parameters()]


def test_training_has_the_same_bits():
    for got, want in zip(run_fresh(_trained, True), run_fresh(_trained, False), strict=True):
        assert torch.equal(got, want)


def _filled():
    return all(bool((_tensor(2).fill_(3) == 3).all()) for _ in range(3))


def _threads():
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    tp_ext.keep_memory()
    wrong, warm = [], threading.Barrier(5)
    assert _filled()  # torch's operators prepare themselves at their first call, under locks that a fork must find free

    def work(number):
        draw, held = random.Random(number), []
        for i in range(150):
            if i == 16:
                warm.wait()
            value = number * 16 + i % 16
            held.append((torch.full((draw.randrange(MIB // 2, 4 * MIB),), value, dtype=torch.uint8), value))
            if len(held) > 4:
                tensor, expected = held.pop(draw.randrange(len(held)))
                if tensor.min() != expected or tensor.max() != expected:
                    wrong.append((number, i))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    warm.wait()
    for _ in range(5):  # a fork finds the lock free, whatever the threads do
        child = os.fork()
        if child == 0:
            os._exit(0 if _filled() else 1)
        assert os.waitpid(child, 0)[1] == 0
    for thread in threads:
        thread.join()
    return wrong


def test_threads_and_forks():
    assert run_fresh(_threads) == []


def _profiled():
    tp_ext.keep_memory()
    with torch.profiler.profile(profile_memory=True) as profile:
        _tensor(4)
    return [event.self_cpu_memory_usage for event in profile.events() if event.name in ("aten::empty", "[memory]")]


def test_the_profiler_sees_it():
    assert sorted(run_fresh(_profiled)) == [-4 * MIB, 4 * MIB]


def test_bad_input():
    with pytest.raises(TypeError, match="enabled: 1 must be True or False"):
        tp_ext.keep_memory(1)
