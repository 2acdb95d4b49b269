"""debug.check(batch=) compares every tensor of a batch, in whatever holds it, or says what it cannot look into."""

import collections
import dataclasses
import functools
import re
import types
import weakref
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils import _pytree

import tp_ext
from tp_ext import auto, debug
from tp_ext.debug import simulate

transformers = pytest.importorskip("transformers")


class Named(NamedTuple):
    text: str
    x: torch.Tensor


@dataclasses.dataclass
class Data:
    text: str
    x: Any


@dataclasses.dataclass(slots=True)
class Slotted:
    x: torch.Tensor


@dataclasses.dataclass
class Output(transformers.utils.ModelOutput):
    logits: torch.Tensor | None = None
    more: tuple[torch.Tensor, ...] | None = None


class Plain:
    def __init__(self, x):
        self._x, self.itself = x, self


class Registered:
    def __init__(self, x):
        self.x = x


class Slots:
    __slots__ = ("unset", "x")

    def __init__(self, x):
        self.x = x


_pytree.register_pytree_node(Registered, lambda r: ([r.x], None), lambda items, _: Registered(*items))

# A container of a tensor -> the name that the finding has
CONTAINERS = {
    "tensor": (lambda x: x, "batch"),
    "nested": (lambda x: {"a": [1, (None, {"b": x})]}, r"batch\['a'\]\[1\]\[1\]\['b'\]"),
    "named tuple": (lambda x: Named("", x), r"batch\.x"),
    "dataclass": (lambda x: Data("", x), r"batch\.x"),
    "dataclass in a list": (lambda x: [Data("", {"y": Data("", x)})], r"batch\[0\]\.x\['y'\]\.x"),
    "dataclass with slots": (Slotted, r"batch\.x"),
    "ModelOutput": (lambda x: Output(logits=x), r"batch\['logits'\]"),
    "tuple in a ModelOutput": (lambda x: Output(more=(x,)), r"batch\['more'\]\[0\]"),
    "BatchEncoding": (lambda x: transformers.BatchEncoding({"input_ids": x}), r"batch\['input_ids'\]"),
    "BatchFeature": (lambda x: transformers.BatchFeature({"pixel_values": x}), r"batch\['pixel_values'\]"),
    "UserDict": (lambda x: collections.UserDict(x=x), r"batch\['x'\]"),
    "OrderedDict": (lambda x: collections.OrderedDict(x=x), r"batch\['x'\]"),
    "defaultdict": (lambda x: collections.defaultdict(list, x=[x]), r"batch\['x'\]\[0\]"),
    "mapping proxy": (lambda x: types.MappingProxyType({"x": x}), r"batch\['x'\]"),
    "deque": (lambda x: collections.deque([x]), r"batch\[0\]"),
    "SimpleNamespace": (lambda x: types.SimpleNamespace(x=x), r"batch\.x"),
    "object": (Plain, r"batch\._x"),
    "slots": (Slots, r"batch\.x"),
    "registered": (Registered, r"batch\[0\]"),
    "packed": (lambda x: pack_sequence([x]), r"batch\.data"),
    "array": (lambda x: x.numpy(), "batch"),
    "array of objects": (lambda x: np.array([x, None], dtype=object), r"batch\[0\]"),
    "parameter": (nn.Parameter, "batch"),
    "sparse": (lambda x: x.view(1, -1).to_sparse(), r"batch\.values\(\)"),
    "csr": (lambda x: x.view(1, -1).to_sparse_csr(), r"batch\.values\(\)"),
    "nested tensor": (lambda x: torch.nested.as_nested_tensor([x, x]), r"batch\[0\]"),
    "bfloat16": (lambda x: {"x": x.bfloat16()}, r"batch\['x'\]"),
    "no elements but the shape": (lambda x: x[:0].view(0, int(x[1])), "batch"),
}
UNKNOWN = {
    "generator": lambda x: (y for y in [x]),
    "iterator": lambda x: {"a": iter([x])},
    "zip": lambda x: [zip([x], strict=True)],
    "set": lambda x: {x},
    "frozenset in a dataclass": lambda x: Data("", frozenset([x])),
    "weak reference": lambda x: [weakref.ref(x)],
    "memoryview": lambda x: memoryview(x.numpy()),
    "too deep": lambda x: functools.reduce(lambda inner, _: [inner], range(40), x),
}
NOTHING = [
    None,
    3,
    2.5,
    "text",
    b"",
    True,
    [],
    {},
    (),
    {1, 2},
    torch.float32,
    np.array(["a"]),
    object(),
    len,
    Data("", 1),
]


def _checked(batches):
    def run(rank, group):
        tp_ext.manual_seed(0)
        model = tp_ext.ParallelMLP(8, 16, group=group)
        return debug.model_check.findings(model, group=group, batch=batches[rank])

    first, second = simulate(run, 2)
    assert first == second
    return first


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_tensor_that_differs_is_found_in_every_container(name):
    make, expression = CONTAINERS[name]
    a, b = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 4.0, 3.0])
    assert _checked([make(a), make(a.clone())]) == []
    sentences = _checked([make(a), make(b)])
    assert len(sentences) >= 1
    assert any(re.match(rf"{expression}[:, ]", sentence) for sentence in sentences), sentences


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_cannot_be_looked_into_is_a_finding(name):
    sentences = _checked([UNKNOWN[name](torch.ones(2)) for _ in range(2)])
    assert len(sentences) == 1 and "may hold tensors that cannot be compared; give a dict, list" in sentences[0]


def test_a_batch_without_tensors_is_compared_with_nothing():
    assert _checked([[*NOTHING, Data("", 1)]] * 2) == []


def test_a_tensor_that_one_rank_alone_has_is_found():
    assert "missing on ranks [1]" in str(_checked([Data("", torch.ones(2)), Data("", None)]))


class LocalNumber(nn.Module):
    """Wrong when it is sharded; its result is in an object."""

    def __init__(self, wrap):
        super().__init__()
        self.up, self.down, self.wrap = nn.Linear(16, 64), nn.Linear(64, 16), wrap

    def forward(self, x):
        h = self.up(x).sin()
        return self.wrap(self.down(h * float(sum(1 for _ in range(h.size(-1))))))


@pytest.mark.parametrize("wrap", [Plain, lambda y: types.SimpleNamespace(y=y), lambda y: {"a": [Plain(y)]}, Registered])
def test_the_proof_of_auto_compares_results_in_objects(wrap):
    plan = auto.plan(LocalNumber(wrap), {"x": torch.randn(5, 16)}, 2)
    assert plan.proof == "values" and "values differ" in plan.whole["up.weight"]


def test_the_proof_of_auto_says_what_it_cannot_compare():
    with pytest.warns(UserWarning, match="result: a set may hold tensors that cannot be compared"):
        plan = auto.plan(LocalNumber(lambda y: {y}), {"x": torch.randn(5, 16)}, 2)
    assert plan.proof.startswith("shapes")


class Partial(nn.Module):
    """Each rank adds the bias of a row linear; its result is in an object."""

    def __init__(self, group, wrap):
        super().__init__()
        self.up = tp_ext.ColumnParallelLinear(8, 16, group=group)
        self.down = tp_ext.RowParallelLinear(16, 8, group=group)
        self.p, self.wrap = 1 if group is None else group.size(), wrap

    def forward(self, x):
        return self.wrap(self.down(self.up(x)) * self.p)


@pytest.mark.parametrize("wrap", [Plain, lambda y: [Data("", y)], lambda y: types.SimpleNamespace(y=[y]), Registered])
def test_verify_compares_results_in_objects(wrap):
    assert not tp_ext.verify(lambda group: Partial(group, wrap), (torch.randn(3, 8),), p=(1, 2)).ok


def test_verify_refuses_a_result_that_it_cannot_look_into():
    with pytest.raises(TypeError, match="the result: a set may hold tensors that cannot be compared; return a tuple"):
        tp_ext.verify(lambda group: Partial(group, lambda y: {y}), (torch.randn(3, 8),), p=(1, 2))
