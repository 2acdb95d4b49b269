"""Linears in float8 have the types of those in high precision (``debug.typecheck``)."""

import importlib

import pytest
import torch

import tp_ext
from tests.helpers import ranks
from tp_ext.low_precision import float8

pytest.importorskip("spmd_types")


def typed(group, sequence_parallel, in_float8):
    spmd = importlib.import_module("spmd_types")
    mlp = tp_ext.ParallelMLP(8, 16, group=group, sequence_parallel=sequence_parallel)
    moe = tp_ext.ParallelMoE(8, 16, 4, 2, shared_experts=1, group=group, sequence_parallel=sequence_parallel)
    types = []
    for layer in (mlp, moe):
        if in_float8:
            float8(layer)
        with tp_ext.debug.typecheck(layer, group):
            x = spmd.assert_type(
                torch.randn(4, 8, requires_grad=True), {group: spmd.V if sequence_parallel else spmd.I}
            )
            types.append(str(list(spmd.get_local_type(layer(x)).values())))
    return types


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_types_are_those_of_high_precision(sequence_parallel):
    plain, eight = (ranks.run(typed, 2, sequence_parallel, in_float8) for in_float8 in (False, True))
    assert plain == eight and len(plain[0]) == 2
