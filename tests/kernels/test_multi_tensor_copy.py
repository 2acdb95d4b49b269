"""Copies of many tensors, bit by bit those of torch, and nothing else changes."""

import contextlib
import random

import pytest
import torch

from tp_ext import _ops

pytestmark = pytest.mark.core

# Rows: one element, ends that overlap, 64 bytes, blocks, from 1024 bytes on with lines that are not whole
WIDTHS = [1, 3, 5, 9, 16, 17, 33, 255, 256, 259, 1000]


@contextlib.contextmanager
def threads(number):
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def drawn(r, width, dtype):
    """Two views of one shape, whose rows are parts of longer ones, one of them perhaps transposed or expanded."""
    shape = [*(r.choice([1, 2, 5]) for _ in range(r.randint(0, 3))), width]

    def view():
        margins = [r.randint(0, 2) for _ in shape]
        whole = torch.randn([n + m for n, m in zip(shape, margins, strict=True)]).to(dtype)
        for dim, margin in enumerate(margins):
            whole = whole.narrow(dim, r.randint(0, margin), shape[dim])
        return whole

    out, value = view(), view()
    if r.random() < 0.2:
        value = value.transpose(0, -1).contiguous().transpose(0, -1)
    elif r.random() < 0.2:
        value = value[..., :1, :].expand(shape) if len(shape) > 1 else value[:1].expand(shape)
    return out, value


@pytest.mark.parametrize("number", [1, 2])
def test_values_and_neighbours(number):
    r = random.Random(0)
    torch.manual_seed(0)
    with threads(number):
        for _ in range(40):
            dtype = r.choice([torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool])
            pairs = [drawn(r, width, dtype) for width in r.sample(WIDTHS, 4)]
            wholes = [out._base if out._base is not None else out for out, _ in pairs]
            expected = [whole.clone() for whole in wholes]
            for whole, (out, value) in zip(expected, pairs, strict=True):
                whole.as_strided(out.shape, out.stride(), out.storage_offset()).copy_(value)
            versions = [out._version for out, _ in pairs]
            _ops.multi_tensor_copy_(*map(list, zip(*pairs, strict=True)))
            assert all(torch.equal(*both) for both in zip(wholes, expected, strict=True))
            assert all(out._version > version for (out, _), version in zip(pairs, versions, strict=True) if out.numel())


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("start", [0, 1])
def test_more_than_a_cache_keeps(number, start):
    """8 MiB and more: long rows are streamed, begin and end within a line; a row of 3 MiB is divided."""
    values = [torch.randn(1500, 2000)[:, start:1500], torch.randn(1300000)[start : start + 786433], torch.randn(9, 3)]
    outs = [torch.zeros(1500, 1600), torch.zeros(800000), torch.zeros(9, 3)]
    views = [outs[0][:, 7 : 7 + 1500 - start], outs[1][3 : 3 + 786433], outs[2]]
    with threads(number):
        _ops.multi_tensor_copy_(views, values)
    for out, view, value in zip(outs, views, values, strict=True):
        assert torch.equal(view, value) and out.count_nonzero() == value.count_nonzero()


def test_other_dtypes_and_empty_tensors(device):
    kinds = {"device": device}
    values = [torch.randn(5, 7, dtype=torch.float64, **kinds), torch.zeros(0, 3, **kinds), torch.randn(4, **kinds)]
    outs = [torch.zeros(5, 7, dtype=torch.bfloat16, **kinds), torch.zeros(0, 3, **kinds), torch.zeros(4, **kinds)]
    _ops.multi_tensor_copy_(outs, values)
    assert all(torch.equal(out, value.to(out.dtype)) for out, value in zip(outs, values, strict=True))
    with pytest.raises(ValueError, match="outs: 1 tensors must be as many as values, 0"):
        _ops.multi_tensor_copy_(outs[:1], [])
