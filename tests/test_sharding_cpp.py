"""The rule of shards is written in Python and in C++: both give the same. [Note: the rule of shards in C++]"""

import itertools

import pytest

from tp_ext._ops.binding import library
from tp_ext.group import ParallelGroup
from tp_ext.nn.loss import vocab_columns
from tp_ext.sharding import Part, head_parts

pytestmark = [pytest.mark.core, pytest.mark.parametrize("p", range(1, 9))]


def outcome(function, *args):
    """Returns the result of a function, or the first line of its error."""
    try:
        return function(*args)
    except (ValueError, RuntimeError) as error:
        return str(error).splitlines()[0]


def numbers(part):
    return [part.size, part.unit, part.copies, part.groups]


def test_spans(p):
    counts = (1, 2, 3, 4, 8)
    for copies, groups, unit, units in itertools.product(counts, counts, (1, 2, 5), (*range(10), 17)):
        part = Part(groups * unit * units, unit, copies=copies, groups=groups)
        for rank in range(p):
            assert outcome(library.span, *numbers(part), rank, p) == outcome(part.span, rank, p), (part, rank)


def test_parts_of_heads(p):
    for heads, kv_heads in itertools.product(range(1, 18), range(1, 18)):
        ours, wanted = outcome(library.head_parts, heads, kv_heads, 3, p), outcome(head_parts, heads, kv_heads, 3, p)
        assert ours == (wanted if isinstance(wanted, str) else tuple(map(numbers, wanted))), (heads, kv_heads)


def test_columns_of_a_vocabulary(p):
    for rank, width, size in itertools.product(range(p), range(12), (None, *range(1, 30))):
        columns = outcome(library.vocab_columns, width, size, rank, p)
        wanted = outcome(vocab_columns, width, size, ParallelGroup("", p, rank), "logits")
        if isinstance(columns, str):  # Python's error goes on
            assert wanted.startswith(columns), (rank, width, size)
        else:
            assert tuple(columns) == wanted, (rank, width, size)
