"""assert_replicated: every bit counts; the same error on every rank, with the index and both values."""

import struct

import pytest
import torch
from torch import nn

from tests.helpers.ranks import run, run_raises
from tp_ext import debug
from tp_ext.debug import replication

pytestmark = pytest.mark.core

VALUES = [
    (torch.float32, 0.5, 0.5 + 2**-20, "0.5", "0.500000953"),
    (torch.float64, 1.0, 1 + 2**-52, "1.0", "1.0000000000000002"),
    (torch.bfloat16, 0.0, -0.0, "0.0", "-0.0"),
    (torch.float16, 1.0, float("nan"), "1.0", "nan"),
    (torch.int64, 3, 2**62, "3", str(2**62)),
    (torch.bool, False, True, "False", "True"),
    (torch.complex128, 1j, 1j + 1e-15, "1j", r"\(1e-15\+1j\)"),
    (torch.complex64, 1.0, -1.0, r"\(1\+0j\)", r"\(-1\+0j\)"),
]


def _tensor_differs(group, dtype, value, other, where):
    x = torch.full((3, 5), value, dtype=dtype).t()
    x = x if group.rank() != where else x.clone()
    if group.rank() == where:
        x[4, 1] = other
    debug.assert_replicated(x, group=group)


@pytest.mark.parametrize(("dtype", "value", "other", "shown", "other_shown"), VALUES, ids=lambda v: str(v)[:14])
def test_every_bit_counts(dtype, value, other, shown, other_shown):
    """Two changed columns in one element: the index is the first; the ranks that differ are the fewer."""
    for where in (0, 2):
        same = [rank for rank in range(3) if rank != where]
        match = (
            rf"tensor: must be the same on ranks \[0, 1, 2\]; ranks \[{where}\] differ from \[{same[0]}, {same[1]}\], "
            rf"first at index \(4, 1\): {other_shown}.*, not {shown} \(1 of 15 elements\)"
        )
        messages = run_raises(_tensor_differs, 3, AssertionError, match, dtype, value, other, where, in_turns=False)
        assert len(set(messages)) == 1


def _nan(group, payload):
    bits = 0x7FC00000 + (payload if group.rank() else 0)
    (value,) = struct.unpack("f", struct.pack("I", bits))
    x = torch.zeros(2, dtype=torch.int32)
    x[1] = bits
    assert value != value
    debug.assert_replicated(x.view(torch.float32), group=group)


def test_nans_are_equal_by_their_bits():
    run(_nan, 2, 0)
    run_raises(_nan, 2, AssertionError, r"\(1,\): nan \(bits \[\d+5\]\), not nan \(bits \[\d+4\]\)", 1, in_turns=False)


def _mismatched(group, what):
    if what == "dtype":
        x = torch.zeros(4, dtype=torch.float32 if group.rank() else torch.int32)
    else:
        x = torch.zeros(4 - group.rank())
    debug.assert_replicated(x, group=group)


def test_shapes_and_dtypes_count():
    run_raises(_mismatched, 2, AssertionError, r"torch.float32 \(4,\), not torch.int32 \(4,\)", "dtype", in_turns=False)
    run_raises(_mismatched, 2, AssertionError, r"\(3,\), not torch.float32 \(4,\)", "shape", in_turns=False)


def test_arguments_that_are_neither_model_nor_tensor():
    run_raises(_not_a_tensor, 2, TypeError, "model_or_tensor: list must be a module or a tensor")


def _not_a_tensor(group):
    debug.assert_replicated([torch.zeros(2)], group=group)


def test_checksum_distinguishes_permutations_and_neighbours():
    """Long enough for several chunks."""
    n = 200_000
    x = torch.zeros(n)
    x[0], x[70_000] = 1, 2
    variants = [x, x.flip(0), x.roll(1), x.roll(65_536), x * 2, x[:-1], -x]
    y = x.clone()
    y[-1] = -0.0
    variants.append(y)
    sums = [held.checksum for held in replication.tensor_digests(variants)]
    assert len(set(sums)) == len(sums)
    assert replication.tensor_digests([x.clone()])[0].checksum == sums[0]


def _assert_many(group):
    model = nn.ParameterList([nn.Parameter(torch.full((2,), float(group.rank()))) for _ in range(11)])
    debug.assert_replicated(model, group=group)


def test_the_first_of_many_is_explained():
    run_raises(_assert_many, 2, AssertionError, "^0: must.*; 10 more tensors differ$", in_turns=False)
