"""What the linears refuse: with the same error on every rank, before anything is sent."""

import pytest
import torch
from torch import nn

from tests.helpers import ranks
from tp_ext import ColumnParallelLinear, Part, RowParallelLinear

pytestmark = pytest.mark.core


def _make(group, kind, arguments, options):
    kind(*arguments, group=group, **options)


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize(
    ("kind", "arguments", "options", "match"),
    [
        (ColumnParallelLinear, (4, 6), {"parts": (2, 3)}, r"parts: .* must sum to out_features = 6"),
        (RowParallelLinear, (6, 4), {"parts": (2, 3)}, r"parts: .* must sum to in_features = 6"),
        (ColumnParallelLinear, (4, 6), {"parts": (2, 4), "unit": 2}, "unit: 2 must be given in each Part"),
        (ColumnParallelLinear, (4, 6), {"unit": 4}, r"size: 6 .* units of 4"),
        (ColumnParallelLinear, (4, 6), {"skip_bias_add": True, "gather_output": True}, "skip_bias_add.*gather_output"),
        (RowParallelLinear, (4, 6), {"parts": (Part(4, copies=2),)}, "copies"),
        (RowParallelLinear, (4, 6), {"input_is_parallel": False, "sequence_parallel": True}, "input_is_parallel"),
        (ColumnParallelLinear, (0, 6), {}, "in_features: 0 must be an integer of at least 1"),
        (RowParallelLinear, (4, 1.5), {}, "out_features: 1.5 must be an integer"),
    ],
    ids=str,
)
def test_layers_that_cannot_be(kind, arguments, options, match, p):
    ranks.run_raises(_make, p, ValueError, match, kind, arguments, options)


def _call(group, kind, shape, dtype, tokens, options):
    kind(4, 4, group=group, **options)(torch.empty(shape, dtype=dtype), tokens)


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_inputs_that_do_not_fit(kind):
    sp = {"sequence_parallel": True}
    width = 4 if kind is ColumnParallelLinear else 2
    for shape, dtype, tokens, options, error, match in (
        ((2, 3), torch.float32, None, {}, ValueError, rf"x: shape \[2, 3\] must end in the {width}"),
        ((), torch.float32, None, {}, ValueError, r"x: shape \[\]"),
        ((2, width), torch.float64, None, {}, TypeError, "x.*weight|weight.*x"),
        ((2, width), torch.int64, None, {}, TypeError, "x"),
        ((width,), torch.float32, None, sp, ValueError, "x: shape .*tokens under sequence_parallel"),
        ((2, width), torch.float32, 11, sp, ValueError, "total_tokens: 11 "),
        ((2, width), torch.float32, -1, sp, ValueError, "total_tokens: -1"),
        ((2, width), torch.float32, 2.0, sp, ValueError, "total_tokens: 2.0"),
    ):
        ranks.run_raises(_call, 2, error, match, kind, shape, dtype, tokens, options)
    if kind is RowParallelLinear:
        options = {"input_is_parallel": False}
        ranks.run_raises(_call, 2, ValueError, "in_features = 4", kind, (2, 2), torch.float32, None, options)


def test_only_an_nn_linear_is_taken_over():
    with pytest.raises(TypeError, match=r"linear: Conv1d must be an nn\.Linear"):
        ColumnParallelLinear.from_linear(nn.Conv1d(1, 1, 1))


def _wrong_weight(group, kind):
    layer = kind(6, 6, group=group)
    layer.weight = nn.Parameter(torch.empty(5, layer.weight.shape[1]))  # the input fits
    layer(torch.empty(2, 6 if kind is ColumnParallelLinear else 6 // group.size()))


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_an_assigned_weight_of_other_features(kind, p):
    ranks.run_raises(
        _wrong_weight, p, ValueError, r"weight: shape \(5, \d\) must be \(\d, \d\), this rank's shard", kind
    )


def _wrong_weight_with_copies(group):
    layer = ColumnParallelLinear(4, 12, parts=(8, Part(2, copies=2), Part(2, copies=2)), group=group)
    layer(torch.empty(2, 4), weight=torch.empty(3, 4))


def test_a_weight_of_the_callers_without_its_copied_rows():
    """The shape is checked before the region that sums the gradients of those rows, which has an error of its own."""
    ranks.run_raises(_wrong_weight_with_copies, 4, ValueError, r"weight: shape \(3, 4\) must be \(4, 4\)")
