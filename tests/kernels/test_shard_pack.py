"""Packing and unpacking of shards: bit for bit what cat, narrow and pad make, whatever dtype, lengths and strides."""

import itertools

import pytest
import torch
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

import tp_ext
from tests.helpers.on_ranks import on_ranks
from tp_ext import _ops

pytestmark = pytest.mark.core

DTYPES = [torch.bool, torch.int8, torch.bfloat16, torch.float32, torch.int64, torch.complex64, torch.complex128]
# Lengths of the ranks: even, like tensor_split, any, with ranks that have nothing
SIZES = [
    (5,),
    (3, 3),
    (3, 2),
    (4, 4, 4, 4),
    (0, 7, 0),
    (0, 0),
    (2, 1, 1),
    (9, 1, 0, 30),
    (1,) * 8,
    (17, 16) * 3,
    (1, 2) * 40,
]
# Elements before and behind the dim: runs of any length around the widths of the copies, and rows in many tiles
AROUND = [((), ()), ((3,), ()), ((), (5,)), ((2, 3), (4,)), ((0,), (3,)), ((70,), (2, 9)), ((1,), (257,))]


def values(shape, dtype, device):
    """Distinct bits in every byte of an element."""
    numbers = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, device=device)
    return (numbers % 2).bool().reshape(shape) if dtype == torch.bool else numbers.view(dtype).reshape(shape)


def same(a, b):
    """Equal in every bit: NaN, too."""
    assert a.shape == b.shape and a.dtype == b.dtype and a.is_contiguous()
    assert torch.equal(a.reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))


def packed(x, dim, sizes, padded):
    """The blocks, by torch's operators."""
    shards = x.split(sizes, dim)
    if not padded:
        return torch.cat([shard.reshape(-1) for shard in shards])
    shape = list(x.shape)
    shape[dim] = max(sizes)
    blocks = x.new_zeros([len(sizes), *shape])
    for block, shard in zip(blocks, shards, strict=True):
        block.narrow(dim, 0, shard.shape[dim]).copy_(shard)
    return blocks


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_there_and_back(dtype, device):
    for sizes, (before, behind), padded in itertools.product(SIZES, AROUND, (True, False)):
        x, dim = values((*before, sum(sizes), *behind), dtype, device), len(before)
        blocks = _ops.pack_shards(x, dim, sizes, padded)
        same(blocks, packed(x, dim, sizes, padded))
        if padded:  # what stands there must not matter
            hidden = torch.arange(max(sizes), device=device) >= torch.tensor(sizes, device=device)[:, None]
            hidden = hidden.view(len(sizes), *(1,) * len(before), max(sizes), *(1,) * len(behind))
            blocks = torch.where(hidden, values(blocks.shape, dtype, device), blocks)
        same(_ops.unpack_shards(blocks, dim, sizes, None if padded else x.shape), x)
        same(_ops.unpack_shards(blocks, dim - x.dim(), sizes, None if padded else x.shape), x)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float64, torch.complex128], ids=str)
def test_storage_offsets_and_strides(dtype, device):
    """Starts at every offset within 16 bytes; rows of a wider tensor; transposed, expanded, reversed dims."""
    for offset, sizes in itertools.product(range(18), ((8, 8), (16, 3), (64, 64), (130, 30, 1))):
        n = sum(sizes)
        flat = values((6 * n + offset,), dtype, device)[offset:]
        for x, dim in ((flat.view(6, n), 1), (flat.view(n, 6), 0), (flat.view(2, 3, n)[:, 1:], 2)):
            for padded in (True, False):
                same(_ops.pack_shards(x, dim, sizes, padded), packed(x, dim, sizes, padded))
        blocks = values((len(sizes) * 3 * max(sizes) + offset,), dtype, device)[offset:]
        blocks = blocks.view(len(sizes), 3, max(sizes))
        want = torch.cat([block[:, :size] for block, size in zip(blocks, sizes, strict=True)], 1)
        same(_ops.unpack_shards(blocks, 1, sizes, None), want)
        same(_ops.unpack_shards(blocks.transpose(1, 2).contiguous().transpose(1, 2), 1, sizes, None), want)
    wide = values((7, 5, 12), dtype, device)
    for x in (wide[:, :, 2:9], wide[:, 1:3], wide.transpose(0, 2), wide.permute(1, 2, 0), wide[:1].expand(4, 5, 12)):
        for dim, padded in itertools.product(range(3), (True, False)):
            sizes = [x.shape[dim] - 2, 2, 0]
            same(_ops.pack_shards(x, dim, sizes, padded), packed(x, dim, sizes, padded))


@pytest.mark.parametrize("threads", [1, 2])
def test_large_ones_go_past_the_cache(threads, device):
    """Over the size from which stores are streamed, with runs that begin and end within a cache line."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for shape, dim, sizes in (
            ((1031, 2100), 1, (1071, 1029)),
            ((2065, 1037), 0, (1033, 1032)),
            ((2, 9001, 130), 1, (9000, 1)),
        ):
            x = values(shape, torch.float32, device)
            for padded in (True, False):
                blocks = _ops.pack_shards(x, dim, sizes, padded)
                same(blocks, packed(x, dim, sizes, padded))
                same(_ops.unpack_shards(blocks, dim, sizes, None if padded else x.shape), x)
    finally:
        torch.set_num_threads(before)


@pytest.mark.cuda
def test_over_2_to_the_31_bytes_on_cuda():
    x = torch.arange((1 << 31) + 3 * 1024, device="cuda", dtype=torch.uint8).view(-1, 1024)
    blocks = _ops.pack_shards(x, 1, [511, 513], True)
    assert torch.equal(blocks[1, -1], x[-1, 511:]) and not blocks[0, :, 511:].any()
    assert torch.equal(_ops.unpack_shards(blocks, 1, [511, 513], None), x)


def test_lazy_conjugates(device):
    x = torch.randn(3, 4, dtype=torch.complex64, device=device).conj()
    assert torch.equal(_ops.pack_shards(x, 1, [1, 3], False), packed(x.resolve_conj(), 1, [1, 3], False))


def test_opcheck_and_compile(device):
    x = torch.randn(3, 5, 2, device=device)
    for padded in (True, False):
        opcheck(torch.ops.tp_ext._pack_shards, (x, 1, [2, 3], padded))
        blocks = _ops.pack_shards(x, -2, [2, 3], padded)
        opcheck(torch.ops.tp_ext._unpack_shards, (blocks, 1, [2, 3], None if padded else x.shape))

    def there_and_back(x):
        return _ops.unpack_shards(_ops.pack_shards(x, 1, [2, 3], True), 1, [2, 3], None) + x

    assert torch.equal(torch.compile(there_and_back, fullgraph=True, backend="aot_eager")(x), 2 * x)


@pytest.mark.parametrize(
    "call, error, word",
    [
        (lambda x: _ops.pack_shards(x, 2, [2, 3], True), IndexError, "dim: 2"),
        (lambda x: _ops.pack_shards(x, 1, [2, 2], True), ValueError, "sizes: .*sum to 5"),
        (lambda x: _ops.pack_shards(x, 1, [-1, 6], True), ValueError, "sizes: .*negative"),
        (lambda x: _ops.pack_shards(x, 1, [], True), ValueError, "sizes: .*one length per rank"),
        (lambda x: _ops.unpack_shards(x, 0, [2, 2], None), ValueError, "blocks: shape .*ranks"),
        (lambda x: _ops.unpack_shards(x, 1, [5, 5, 5], None), IndexError, "dim: 1"),
        (lambda x: _ops.unpack_shards(x.view(-1), 0, [8, 6], [15]), ValueError, "sizes: .*sum to 15"),
        (lambda x: _ops.unpack_shards(x, 0, [8, 7], [15]), ValueError, "blocks: shape .*one dim"),
    ],
)
def test_errors_name_the_argument(call, error, word, device):
    with pytest.raises(error, match=word):
        call(torch.zeros(3, 5, device=device))


class _Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def _exchanged(group, dim, sizes):
    """The results of each region, eager by the primitives and traced by ATen's operators."""
    rank, p = group.rank(), group.size()
    full = torch.arange(3.0 * sum(sizes) * 4).view(3, sum(sizes), 4).movedim(1, dim).contiguous()
    own = full.split(sizes, dim)[rank]
    others = [other for other in range(3) if other != dim]

    def call():
        yield tp_ext.gather_from_region(own, group, dim, sizes)
        yield tp_ext.reduce_scatter_region(full, group, dim, sizes)
        yield tp_ext.reduce_scatter_region(full.transpose(0, 2).contiguous().transpose(0, 2), group, dim, sizes)
        for other in others:
            lengths = [part.shape[other] for part in full.tensor_split(p, other)]
            yield tp_ext.all_to_all_region(full.split(lengths, other)[rank], group, dim, other, sizes, lengths)

    eager = list(call())
    with _Operators() as seen:
        watched = list(call())
    assert any("_c10d_functional" in name for name in seen.names)
    want = [full, p * own, p * own, *(own for _ in others)]
    return all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(eager, watched, want, strict=True))


@on_ranks(2, 3, 4, backend="gloo")
def test_regions_move_the_same_with_and_without_them(group):
    p = group.size()
    cases = itertools.product(range(3), ([4] * p, [3, 0, 5, 1][:p], [2, 1, 1, 1][:p]))
    assert [case for case in cases if not _exchanged(group, *case)] == []


@on_ranks(2, backend="gloo")
def test_no_cat_and_no_permuted_copy_in_eager(group):
    """The operators that an eager gather and reduce-scatter of the last dim run."""
    x = torch.ones(4, 6)
    with torch.profiler.profile() as profile:
        y = tp_ext.all_gather_region(x, group, -1)
        tp_ext.reduce_scatter_region(y, group, -1)
        tp_ext.all_to_all_region(x, group, -1, 0)
    names = {event.name for event in profile.events()}
    assert {"tp_ext::_pack_shards", "tp_ext::_unpack_shards"} <= names
    assert not {"aten::cat", "aten::movedim", "aten::contiguous"} & names  # gloo itself clones
