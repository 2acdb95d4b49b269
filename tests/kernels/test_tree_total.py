"""The root of a tree of nodes, bit by bit the additions of its formula in torch's operators."""

import random

import pytest
import torch
from torch.library import opcheck

from tp_ext import _ops

pytestmark = pytest.mark.core

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def formula(nodes, joins, dtype):
    waiting = []
    for node, number in zip(nodes, joins, strict=True):
        for _ in range(number):
            node = waiting.pop() + node
        waiting.append(node)
    (root,) = waiting
    return root.to(dtype)


def drawn(r, count):
    """Numbers of additions that leave one sum."""
    joins, waiting = [], 0
    for i in range(count):
        joins.append(waiting if i == count - 1 else r.randint(0, waiting))
        waiting += 1 - joins[-1]
    return joins


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_additions_are_those_of_the_tree(dtype, device):
    """Around the chunk of 1024 elements; more nodes, and more that wait, than a launch on a GPU takes."""
    r = random.Random(0)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    trees = [[0], [0, 1], [0, 0, 2], [0, 1, 1], [0, 1, 0, 2], [0] * 39 + [39], *(drawn(r, n) for n in (7, 16, 300))]
    for joins in trees:
        for shape in ((), (0,), (3,), (5, 7), (1023,), (1025,), (3, 1024)):
            nodes = torch.randn(len(joins), *shape, device=device, dtype=wide)
            got = _ops.tree_total(nodes, joins, dtype)
            assert got.dtype == dtype and got.shape == shape
            assert got.equal(formula(nodes, joins, dtype)), (joins, shape)
    strided = torch.randn(9, 3, device=device, dtype=wide).t()
    assert _ops.tree_total(strided, [0, 1, 1], dtype).equal(formula(strided, [0, 1, 1], dtype))


def test_signs_of_zero_stay(device):
    nodes = torch.tensor([[-0.0, -0.0, 0.0], [-0.0, 0.0, -0.0]], device=device)
    assert _ops.tree_total(nodes, [0, 1], torch.float32).signbit().tolist() == [True, False, False]


def test_errors_name_the_argument(device):
    nodes = torch.ones(3, 4, device=device)
    for joins, message in (
        ([0, 1], r"joins: 2 numbers must be one for each"),
        ([], r"joins: 0 numbers"),
        ([0, 0, 0], r"must leave one sum, not 3"),
        ([0, 2, 0], r"must add sums that wait"),
        ([0, -1, 2], r"must add sums that wait"),
    ):
        with pytest.raises(ValueError, match=message):
            _ops.tree_total(nodes, joins, torch.float32)
    with pytest.raises(TypeError, match=r"nodes: dtype Float must be float32, and float64 for"):
        _ops.tree_total(nodes, [0, 1, 1], torch.float64)
    opcheck(_ops.tree_total, (nodes, [0, 1, 1], torch.bfloat16))
