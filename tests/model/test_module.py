"""The package as a user's tools show it: names, types, printed modules."""

import types
import typing

import pytest
from torch import nn

import tp_ext
from tests.helpers import ranks

pytestmark = pytest.mark.core


def test_completion_shows_public_names():
    shown = {name for name in dir(tp_ext) if not name.startswith("_")}
    assert shown >= set(tp_ext.__all__) - {"__version__"}
    modules = {name for name in shown if isinstance(getattr(tp_ext, name), types.ModuleType)}
    public = {"auto", "debug", "group", "lax", "mesh", "optim", "parallel", "random", "regions", "sharding", "shm"}
    public |= {"low_precision", "planner", "refit"}
    assert public <= modules <= public | {"huggingface", "lightning", "megatron", "verify"}
    assert {"debug", "shm"} <= set(tp_ext.__all__)
    assert shown - modules == set(tp_ext.__all__) - {"__version__"} - modules


def test_forward_of_a_linear_is_typed_so_that_its_methods_can_be_called():
    """A tensor, or with skip_bias_add a pair: a union of both would be an error of a type checker at each use."""
    for kind in (tp_ext.ColumnParallelLinear, tp_ext.RowParallelLinear, tp_ext.LoRALinear):
        assert typing.get_type_hints(kind.forward)["return"] is typing.Any


def _printed(group):
    options = {"group": group, "pad_to_multiple_of": 4}
    return str(
        nn.ModuleList([tp_ext.VocabParallelEmbedding(13, 6, **options), tp_ext.VocabParallelLMHead(6, 13, **options)])
    )


def test_both_ends_print_their_shards():
    text = ranks.run(_printed, 3)[1]
    assert "VocabParallelEmbedding(13, 6, local=(8, 6), p=3, rank=1)" in text
    assert "VocabParallelLMHead(6, 13, bias=False, local=(8, 6), p=3, rank=1)" in text
