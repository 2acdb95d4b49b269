"""Layouts over two groups, against one sharding after the other; no process group."""

import copy
import itertools
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.test_chunks import assert_covers
from tests.test_sharding import some_parts
from tp_ext import Layout, Part, Sharding
from tp_ext.group import ParallelGroup
from tp_ext.random import Normal, initialise_

pytestmark = pytest.mark.core


def member(name: str, rank: int, p: int) -> ParallelGroup:
    return ParallelGroup(f"{name}@{rank}/{p}", p, rank)


def laid(first: Sharding, p: int, second: Sharding | int, q: int) -> dict[tuple[int, int], Layout]:
    """The layout of each pair of ranks: ``first`` over p, then ``second`` over q; an int: along the same dim once
    more, with this number of copies."""
    layouts = {}
    for i, j in itertools.product(range(p), range(q)):
        again = (
            Sharding(first.dim, [Part(first.local_size(i, p), copies=second)]) if isinstance(second, int) else second
        )
        layouts[i, j] = Layout((first, member("x", i, p)), (again, member("y", j, q)))
    return layouts


@st.composite
def two_entries(draw):
    p, q = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    first = Sharding(0, draw(some_parts(p)))
    copies = st.sampled_from([n for n in range(1, q + 1) if q % n == 0])
    second = draw(st.one_of(copies, some_parts(q).map(lambda parts: Sharding(1, parts))))
    return laid(first, p, second, q), (first.size, 3 if isinstance(second, int) else second.size, 2)


@settings(max_examples=200, deadline=None)
@given(two_entries())
def test_two_entries_are_one_sharding_after_the_other(drawn):
    layouts, shape = drawn
    full = torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)
    held, locals_ = [], []
    for (i, j), layout in layouts.items():
        (first, x), (second, y) = layout
        local = layout.shard(full)
        assert torch.equal(local, second.shard(first.shard(full, x.rank, x.size), y.rank, y.size))
        assert layout.local_shape(shape) == local.shape and layout.full_shape(local.shape) == shape
        found, chunks = layout.local_chunks(local)
        assert found == shape and local.count_nonzero() == sum(chunk.tensor.numel() for chunk in chunks)
        owned = [chunk.tensor.data_ptr() for chunk in chunks if chunk.owned]
        assert owned == [view.data_ptr() for view in layout.owned(local)]
        held.append(chunks)
        locals_.append(local)
        if all(size > 0 for size in shape):
            assert layouts[0, 0].at(i, j) == layout
        for made in (copy.deepcopy(layout), pickle.loads(pickle.dumps(layout))):
            assert made == layout and type(made) is Layout
    assert_covers(full, held)
    assert torch.equal(layouts[0, 0].unshard(locals_), full)


@pytest.mark.parametrize("dims", [(0, 1), (1, 2), (0, 2), (2, 0), (1, 0), (-1, -3)], ids=str)
def test_initial_values_of_tensors_that_are_sharded_in_two_dims(dims):
    """Every element by its index in the full tensor, whichever two of three dims are sharded."""

    def draw(layout):
        torch.manual_seed(3)
        local = torch.empty(layout.local_shape(shape), dtype=torch.float64)
        initialise_(local, Normal(), layout, shape)
        return local

    shape = torch.Size((4, 5, 6))
    full = draw(Layout())
    assert full.unique().numel() == full.numel()
    first, second = (Sharding(dim, (shape[dim] - 1, 1)) for dim in dims)
    for layout in laid(first, 2, second, 3).values():
        assert torch.equal(draw(layout), layout.shard(full))


def test_three_entries_and_none():
    full = torch.randn(6, 4)
    assert Layout() == () and torch.equal(Layout().shard(full), full) and torch.equal(Layout().unshard([full]), full)
    assert repr(Layout()) == "Layout()" and Layout().local_chunks(full)[0] == (6, 4)
    rows, columns, left = Sharding(0, [6]), Sharding(1, [4]), Sharding(0, [3])
    held = [
        Layout((rows, member("x", i, 2)), (columns, member("y", j, 2)), (left, member("z", k, 2))).shard(full)
        for i, j, k in itertools.product(range(2), repeat=3)
    ]
    layout = Layout((rows, member("x", 1, 2)), (columns, member("y", 0, 2)), (left, member("z", 1, 2)))
    assert torch.equal(layout.unshard(held), full) and layout.sizes == (2, 2, 2)


def test_errors():
    x, y, rows = member("x", 0, 2), member("y", 0, 2), Sharding(0, [5])
    for entries, error, match in [
        ([rows], TypeError, r"entries: Sharding\(.* must be a pair of a Sharding and a group"),
        ([(rows, 3)], TypeError, "group: 3 must be"),
        ([(rows, x), (Sharding(0, [5]), y)], ValueError, r"entries: .*5.* must have the 3 elements of dim 0"),
        ([(rows, x), (Sharding(1, [4]), x)], ValueError, "entries: .* must have another group"),
        ([(rows, x), (Sharding(-1, [3]), y)], ValueError, "entries: dim -1 must count from the same end"),
    ]:
        with pytest.raises(error, match=match):
            Layout(*entries)
    layout = Layout((rows, x), (Sharding(1, [4]), y))
    with pytest.raises(ValueError, match=r"locals: 2 tensors must be one for each rank of groups of \(2, 2\)"):
        layout.unshard([torch.ones(3, 2)] * 2)
    with pytest.raises(ValueError, match=r"ranks: \(1,\) must be one rank for each of the 2 entries"):
        layout.at(1)
    with pytest.raises(ValueError, match=r"tensor: shape \(3, 4\) on rank 0 must have 2 elements in dim 1"):
        layout.local_chunks(torch.ones(3, 4))
    parts = Layout((rows, x), (Sharding(0, (2, 1)), y))
    with pytest.raises(ValueError, match=r"ranks: \(1, 0\) have 2 elements in dim 0"):
        parts.at(1, 0)
