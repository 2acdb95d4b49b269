"""How full tensors are cut, against a model made of ``torch.tensor_split``. No process group."""

import copy
import dataclasses
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tp_ext import Part, Sharding
from tp_ext.sharding import split_sizes

PADDING = -1


def shards_of(part: Part, p: int) -> list[list[int]]:
    """The elements of the part that each rank holds, by the words of section 3: groups, units, copies."""
    elements = torch.cat([torch.arange(part.size), torch.full((part.padding,), PADDING)])
    holders = p // (part.copies * part.groups)
    held = []
    for group in elements.chunk(part.groups) if elements.numel() else [elements] * part.groups:
        units = torch.tensor_split(group.view(-1, part.unit), holders)
        held += [u.flatten().tolist() for u in units for _ in range(part.copies)]
    return held


def held_elements(parts: list[Part], p: int) -> list[list[int]]:
    """The same for a dim that is the concatenation of parts."""
    held, offset = [[] for _ in range(p)], 0
    for part in parts:
        for rank, elements in enumerate(shards_of(part, p)):
            held[rank] += [e if e == PADDING else e + offset for e in elements]
        offset += part.size
    return held


@st.composite
def some_parts(draw, p: int) -> list[Part]:
    parts = []
    for _ in range(draw(st.integers(1, 3))):
        copies = draw(st.sampled_from([c for c in range(1, p + 1) if p % c == 0]))
        groups = draw(st.sampled_from([g for g in range(1, p + 1) if p % (copies * g) == 0]))
        unit = draw(st.integers(1, 3))
        total = unit * groups * draw(st.integers(0, 5))
        padding = draw(st.integers(0, total))
        parts.append(Part(total - padding, unit, copies, padding, groups))
    return parts


cuts = st.integers(1, 6).flatmap(lambda p: st.tuples(st.just(p), some_parts(p)))


@settings(max_examples=300, deadline=None)
@given(cuts)
def test_ranks_hold_their_shards(cut):
    p, parts = cut
    sharding = Sharding(0, parts)
    held = held_elements(parts, p)
    numbers = torch.arange(sharding.size)
    assert sharding.local_sizes(p) == [len(elements) for elements in held]
    for rank, elements in enumerate(held):
        slices = sharding.slices(rank, p)
        assert len(slices) == len(parts)
        assert torch.cat([numbers[s] for s in slices]).tolist() == [e for e in elements if e != PADDING]
        assert sharding.local_shape((sharding.size, 7), rank, p) == (len(elements), 7)
        local = sharding.shard(numbers + 1, rank, p)  # counted from 1, so that padding is 0 and nothing else
        assert local.tolist() == [0 if e == PADDING else e + 1 for e in elements]


@settings(max_examples=200, deadline=None)
@given(cuts, st.integers(0, 2), st.booleans())
def test_unshard_undoes_shard(cut, dim, from_the_end):
    p, parts = cut
    sharding = Sharding(dim - 3 if from_the_end else dim, parts)
    shape = [2, 3, 2]
    shape[dim] = sharding.size
    full = torch.randn(shape).transpose(0, 2).contiguous().transpose(0, 2)
    locals_ = [sharding.shard(full, rank, p) for rank in range(p)]
    for rank, local in enumerate(locals_):
        assert local.shape == sharding.local_shape(shape, rank, p)
        assert local.is_contiguous()
        assert local.untyped_storage().data_ptr() != full.untyped_storage().data_ptr() or not full.numel()
    assert torch.equal(sharding.unshard(locals_), full)


@settings(max_examples=200, deadline=None)
@given(cuts)
def test_every_element_has_one_owner_and_copies_stay_together(cut):
    p, parts = cut
    sharding = Sharding(0, parts)
    full = torch.arange(sharding.size)
    locals_ = [sharding.shard(full, rank, p) for rank in range(p)]
    owned = [view for rank, local in enumerate(locals_) for view in sharding.owned(local, rank, p)]
    assert sorted(torch.cat([full[:0], *owned]).tolist()) == full.tolist()
    for rank, local in enumerate(locals_):
        views = sharding.owned(local, rank, p)
        assert all(v.untyped_storage().data_ptr() == local.untyped_storage().data_ptr() for v in views)
        rows_held = sharding.copied_rows(rank, p)
        copied = [part for part in parts if part.copies > 1]
        assert (rows_held is None) == (not copied)
        if rows_held is None:
            continue
        assert rows_held.full_size >= sum(part.size for part in copied)
        rows = torch.full((rows_held.full_size,), PADDING)
        for start, length, at in zip(rows_held.local_starts, rows_held.lengths, rows_held.full_starts, strict=True):
            assert at + length <= rows_held.full_size, "the rows reach beyond the tensor that sums the copies"
            rows[at : at + length] = local[start : start + length]
        # a rank's rows do not overlap: all of its copied elements, padding included, are there
        assert int((rows != PADDING).sum()) == sum(len(shards_of(part, p)[rank]) for part in copied)


def test_split_sizes_are_those_of_tensor_split():
    for n in range(12):
        for p in range(1, 8):
            assert split_sizes(n, p) == [len(t) for t in torch.tensor_split(torch.arange(n), p)]


def test_gated_shard_is_gate_then_up():
    full = torch.cat([torch.arange(6), 100 + torch.arange(6)])
    sharding = Sharding(0, (6, 6))
    assert sharding.shard(full, 1, 3).tolist() == [2, 3, 102, 103]
    assert sharding.slices(1, 3) == [slice(2, 4), slice(8, 10)]


def test_grouped_query_heads():
    """8 query heads, 2 KV heads of 1 feature on 4 ranks: each KV head on two neighbours, who share its query heads."""
    full = torch.cat([torch.arange(8), 10 + torch.arange(2), 20 + torch.arange(2)])
    sharding = Sharding(0, (Part(8, groups=2), Part(2, copies=2), Part(2, copies=2)))
    got = [sharding.shard(full, rank, 4).tolist() for rank in range(4)]
    assert got == [[0, 1, 10, 20], [2, 3, 10, 20], [4, 5, 11, 21], [6, 7, 11, 21]]


def test_unshard_takes_the_first_copy_and_no_padding():
    sharding = Sharding(0, (Part(1, copies=2), Part(3, padding=1)))
    first, second = torch.tensor([5, 1, 2]), torch.tensor([99, 3, 99])
    assert sharding.unshard([first, second]).tolist() == [5, 1, 2, 3]


def test_dtype_strides_and_gradient_of_shard():
    full = torch.randn(6, 4, dtype=torch.bfloat16).t().requires_grad_()  # [4, 6]
    local = Sharding(1, (2, 4)).shard(full, 1, 2)
    assert local.dtype == torch.bfloat16
    assert torch.equal(local, full[:, [1, 4, 5]])
    local.sum().backward()
    assert torch.equal(full.grad, torch.tensor([0, 1, 0, 0, 1, 1]).bfloat16().expand(4, 6))


# Values


def test_immutable_hashable_equal_by_value():
    sharding = Sharding(0, [4, Part(6, unit=2)])
    assert sharding.parts == (Part(4), Part(6, 2))
    with pytest.raises(dataclasses.FrozenInstanceError):
        sharding.dim = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        sharding.parts[0].size = 1
    same = Sharding(0, (Part(4), Part(6, unit=2)))
    assert sharding == same and hash(sharding) == hash(same)
    for other in (Sharding(1, same.parts), Sharding(0, (4, 6)), Sharding(0, (10,))):
        assert sharding != other
    for copied in (copy.copy(sharding), copy.deepcopy(sharding), pickle.loads(pickle.dumps(sharding))):
        assert copied == sharding and hash(copied) == hash(sharding)
    assert eval(repr(sharding)) == sharding


# Errors: name, value, rule


@pytest.mark.parametrize("name", ["size", "unit", "copies", "padding", "groups"])
@pytest.mark.parametrize("value", [-1, 1.5, "2", None, True])
def test_numbers_of_a_part(name, value):
    with pytest.raises(ValueError, match=rf"{name}: {value!r} must be an integer"):
        Part(**{"size": 4, name: value})


def test_sizes_of_a_part_must_be_at_least_one():
    for name in ("unit", "copies", "groups"):
        with pytest.raises(ValueError, match=f"{name}: 0 must be an integer of at least 1"):
            Part(**{"size": 4, name: 0})
    assert Sharding(0, (0,)).shard(torch.empty(0, 3), 1, 2).shape == (0, 3)


def test_units_that_do_not_fill_a_part():
    with pytest.raises(ValueError, match=r"size: 5 .*units of 2"):
        Part(5, unit=2)
    with pytest.raises(ValueError, match=r"size: 8 .*3 groups"):
        Part(8, groups=3)
    assert Part(5, unit=2, padding=1).span(0, 1) == (0, 6)


def test_copies_and_groups_that_do_not_divide_the_ranks():
    for part in (Part(4, copies=2), Part(4, groups=2)):
        with pytest.raises(ValueError, match=r"copies: .*groups .*p = 3"):
            Sharding(0, (part,)).local_size(0, 3)
    with pytest.raises(ValueError, match=r"copies: 2 times groups 2 .*p = 2"):
        Sharding(0, (Part(4, copies=2, groups=2),)).slices(0, 2)


def test_no_parts():
    with pytest.raises(ValueError, match=r"parts: \(\) must"):
        Sharding(0, ())


@pytest.mark.parametrize("rank", [-1, 2])
def test_rank_out_of_range(rank):
    sharding = Sharding(0, (4,))
    for call in (sharding.slices, sharding.local_size):
        with pytest.raises(ValueError, match=rf"rank: {rank} must be in \[0, 2\)"):
            call(rank, 2)
    for call, full in ((sharding.shard, torch.empty(4)), (sharding.local_shape, (4,))):
        with pytest.raises(ValueError, match=f"rank: {rank} "):
            call(full, rank, 2)


@pytest.mark.parametrize(("dim", "shape"), [(0, (5, 4)), (1, (4, 5)), (2, (4, 4)), (-3, (4, 4)), (0, ())])
def test_full_tensor_of_another_shape(dim, shape):
    sharding = Sharding(dim, (1, 3))
    with pytest.raises(ValueError, match=r"full: shape \(.*\) must have 4 elements in dim"):
        sharding.shard(torch.empty(shape), 0, 2)
    with pytest.raises(ValueError, match="full: shape"):
        sharding.local_shape(shape, 0, 2)


def test_local_tensors_of_another_length():
    locals_ = [torch.empty(2, 3), torch.empty(3, 3)]
    with pytest.raises(ValueError, match=r"locals: shape \(3, 3\) on rank 1 must have 2 elements in dim 0.*p = 2"):
        Sharding(0, (4,)).unshard(locals_)
    with pytest.raises(ValueError, match=r"locals: \[\]"):
        Sharding(0, (4,)).unshard([])
    with pytest.raises(ValueError, match=r"locals: shape \(2, 3\) on rank 0"):
        Sharding(2, (4,)).unshard(locals_)
