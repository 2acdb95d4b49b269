"""The layouts of Megatron-core's weights, by rows that say what they are. Its own classes use them in
test_megatron_core.py."""

import pytest
import torch

from tp_ext.megatron import from_megatron_gated, from_megatron_qkv, to_megatron_gated, to_megatron_qkv

pytestmark = pytest.mark.core

HEADS = {"mha": (4, 4, 3), "gqa": (6, 2, 2), "mqa": (3, 1, 4), "one": (1, 1, 1)}


def _labels(num_heads, num_kv_heads, head_dim):
    """The label of each row, (q, k or v; head; feature) as one number, in both orders."""
    group = num_heads // num_kv_heads

    def rows(kind, head):
        return [10000 * kind + 100 * head + feature for feature in range(head_dim)]

    queries, keys, values = (
        [rows(k, h) for h in range(n)] for k, n in enumerate((num_heads, num_kv_heads, num_kv_heads))
    )
    theirs = []
    for kv in range(num_kv_heads):
        theirs += [*queries[kv * group : (kv + 1) * group], keys[kv], values[kv]]
    return (torch.tensor(heads).flatten() for heads in (theirs, queries + keys + values))


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("columns", [(), (5,)], ids=["bias", "weight"])
def test_rows_of_qkv(name, columns):
    theirs, ours = (t[(...,) + (None,) * len(columns)].expand(-1, *columns) for t in _labels(*HEADS[name]))
    assert torch.equal(from_megatron_qkv(theirs, *HEADS[name]), ours)
    assert torch.equal(to_megatron_qkv(ours, *HEADS[name]), theirs)


@pytest.mark.parametrize("p", [1, 2, 3])
@pytest.mark.parametrize("columns", [(), (5,)], ids=["bias", "weight"])
def test_rows_of_gate_and_up(columns, p):
    gate, up = (start + torch.arange(6)[(...,) + (None,) * len(columns)].expand(-1, *columns) for start in (0, 100))
    theirs = torch.cat([t for pair in zip(gate.chunk(p), up.chunk(p), strict=True) for t in pair])
    ours = torch.cat([gate, up])
    assert torch.equal(from_megatron_gated(theirs, p), ours)
    assert torch.equal(to_megatron_gated(ours, p), theirs)


@pytest.mark.parametrize("convert", [from_megatron_qkv, to_megatron_qkv])
@pytest.mark.parametrize(
    ("rows", "heads", "match"),
    [
        (24, (4, 3, 2), "num_kv_heads: must divide num_heads.*num_heads = 4, num_kv_heads = 3"),
        (24, (4, 0, 2), "num_kv_heads: .*at least 1"),
        (24, (4, 2, 2), r"weight: shape \(24, 3\) must have 16 rows"),
    ],
)
def test_heads_that_do_not_fit(convert, rows, heads, match):
    with pytest.raises(ValueError, match=match):
        convert(torch.zeros(rows, 3), *heads)


@pytest.mark.parametrize("convert", [from_megatron_gated, to_megatron_gated])
@pytest.mark.parametrize("p", [0, 5])
def test_gates_that_do_not_fit(convert, p):
    with pytest.raises(ValueError, match=rf"weight: shape \(12,\) must have a multiple of 2 p rows; p = {p}"):
        convert(torch.zeros(12), p)
