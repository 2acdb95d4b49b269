"""From which rank an element comes, and in which round: computed from descriptions alone."""

import random

import pytest
import torch

from tp_ext.refit.contents import Description, Item
from tp_ext.refit.rectangles import Rectangle, cells, difference, intersection, split
from tp_ext.refit.routes import Routes


def _model(**shapes):
    """A description of a rank that has these tensors whole, of the shapes."""
    items = [
        Item(name, "", shape, torch.float32, (Rectangle((0,) * len(shape), shape),), names=(name,))
        for name, shape in shapes.items()
    ]
    return Description(items, [], [], None, "cpu")


def _moves(sources, targets, hosts, bucket=1 << 20):
    return [move for round_ in Routes(sources, targets, hosts, {}, None, bucket).rounds for move in round_]


def test_what_a_rank_holds_it_copies():
    model = _model(a=(4, 2), b=(3,))
    assert not _moves([model, model], [model, model], ["host"] * 2)


def test_the_holder_on_the_same_host_sends():
    model = _model(a=(4, 2), b=(3,))
    moves = _moves([model, None, None, model], [None, model, model, None], ["one", "one", "two", "two"])
    assert {(move.sender, move.receiver) for move in moves} == {(0, 1), (3, 2)}


def test_of_several_the_one_sends_that_has_sent_least_then_the_lowest_rank():
    shapes = {"a": (8,), "b": (2,), "c": (2,), "d": (4,), "e": (1,)}
    model = _model(**shapes)
    moves = _moves([model, model, None], [None, None, model], ["host"] * 3)
    # a: rank 0; b, c, d: rank 1, that has then sent as much; e: rank 0
    senders = {model.items[move.target.item].name: move.sender for move in moves}
    assert senders == {"a": 0, "b": 1, "c": 1, "d": 1, "e": 0}


@pytest.mark.parametrize("bucket", [64, 100, 1 << 20])
def test_no_rank_sends_or_receives_more_than_a_bucket_in_a_round(bucket):
    rng = random.Random(bucket)
    shapes = {f"w{i}": tuple(rng.randint(1, 9) for _ in range(rng.randint(1, 3))) for i in range(20)}
    model, size = _model(**shapes), 4
    routes = Routes([model, model, None, None], [None, None, model, model], ["host"] * size, {}, None, bucket)
    for moves in routes.rounds:
        for rank in range(size):
            assert sum(move.bytes for move in moves if move.sender == rank) <= bucket
            assert sum(move.bytes for move in moves if move.receiver == rank) <= bucket
    total = sum(move.bytes for moves in routes.rounds for move in moves)
    assert total == 2 * 4 * sum(torch.Size(shape).numel() for shape in shapes.values())


def _points(rectangle):
    grid = [range(start, start + size) for start, size in zip(*rectangle, strict=True)]
    return {(i, j) for i in grid[0] for j in grid[1]}


def test_rectangles_by_sets_of_elements():
    """Intersection, difference, cells and splits of random rectangles."""
    rng = random.Random(0)

    def drawn():
        return Rectangle((rng.randint(0, 5), rng.randint(0, 5)), (rng.randint(1, 5), rng.randint(1, 5)))

    for _ in range(300):
        first, second = drawn(), drawn()
        common = intersection(first, second)
        assert (set() if common is None else _points(common)) == _points(first) & _points(second)
        if common is not None:
            rest = list(difference(first, common))
            assert sum(part.numel for part in rest) == first.numel - common.numel
            assert set().union(*map(_points, rest)) == _points(first) - _points(common)
        holders_of = {drawn(): (rank,) for rank in range(4)}
        for rectangle, (rank,) in holders_of.items():
            parts = [_points(cell) for cell, holders in cells(holders_of) if rank in holders]
            assert set().union(*parts) == _points(rectangle) and sum(map(len, parts)) == rectangle.numel
        most = rng.randint(1, 8)
        parts = list(split(first, most))
        assert all(part.numel <= most for part in parts) and sum(part.numel for part in parts) == first.numel
        assert set().union(*map(_points, parts)) == _points(first)
