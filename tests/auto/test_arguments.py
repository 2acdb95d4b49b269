"""Kinds of arguments of a forward: any number by position, dataclasses, objects; what code asks of them and of modes.

Switches in them lead to code that is wrong on a shard."""

import collections
import contextlib
import copy
import dataclasses
import datetime
import enum
import fractions
import functools
import pathlib
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from transformers import BatchEncoding, DynamicCache, LlamaConfig, LlamaForCausalLM

from tests.helpers.on_ranks import on_ranks
from tests.helpers.same_values import same_values
from tests.helpers.simulated import run
from tp_ext import auto
from tp_ext.auto.proof.random_values import examples, filled

WIDTH = 8
close = {"rtol": 1e-12, "atol": 1e-12}  # ranks sum in another order


@dataclasses.dataclass
class Scaled:
    x: Tensor
    scale: float = 2.0


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)


class AnyNumber(Mlp):
    def forward(self, *xs: Tensor, mixes: bool = False, added: Tensor | None = None) -> Tensor:
        h = self.up(xs[0])
        y = self.down(h.softmax(-1) if mixes else F.gelu(h))
        return y if added is None else y + added


class ByName(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(input=F.gelu(self.up(input=x)))


class OfDataclass(Mlp):
    def forward(self, of: Scaled) -> Tensor:
        return self.down(F.gelu(self.up(of.x) * of.scale))


def _models(group: Any, made: type[Mlp], example: Any) -> tuple[Mlp, Mlp]:
    torch.manual_seed(0)
    model = made().double()
    plan = auto.plan(model, example, 2)
    assert set(plan.shardings) == {"up.weight", "up.bias", "down.weight"}
    return model, auto.apply(plan, copy.deepcopy(model), group)


def _by_position_and_name(group: Any, kind: str) -> None:
    x = torch.arange(24, dtype=torch.float64).view(3, WIDTH)
    model, sharded = _models(group, AnyNumber, (x,))
    options = {"mixes": True} if kind == "mixes" else {"added": x}
    torch.testing.assert_close(sharded(x, **options), model(x, **options), **close)


def test_options_of_a_forward_that_takes_any_number_by_position():
    run(_by_position_and_name, 2, "added")
    with pytest.raises(RuntimeError, match=r"up.weight cannot be sharded then: dim 0 \(24\) is pinned by _softmax"):
        run(_by_position_and_name, 2, "mixes")


@on_ranks(2)
def test_a_tensor_of_a_dataclass_has_a_complete_gradient(group: Any) -> None:
    x = torch.linspace(-1, 1, 24, dtype=torch.float64).view(3, WIDTH)
    model, sharded = _models(group, OfDataclass, (Scaled(x.clone().requires_grad_()),))
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    for each, argument in zip((model, sharded), inputs, strict=True):
        (each(Scaled(argument)) ** 2).sum().backward()
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad, **close)


@on_ranks(2)
def test_linear_layers_called_with_the_name_of_their_argument(group: Any) -> None:
    x = torch.linspace(-1, 1, 24, dtype=torch.float64).view(3, WIDTH)
    model, sharded = _models(group, ByName, (x,))
    torch.testing.assert_close(sharded(x), model(x), **close)


def test_a_proof_runs_on_the_host():
    with FakeTensorMode():
        module = nn.BatchNorm1d(4, device="cuda")
        module.factor = torch.ones(3, device="cuda")
        filled(module, torch.float64)
        mask = torch.ones(2, dtype=torch.bool, device="cuda")
        ((given,), _), *_ = examples((mask,), None)
    of_module = [*module.parameters(), *module.buffers(), module.factor, given]
    assert {tensor.device.type for tensor in of_module} == {"cpu"} and len(of_module) == 7


# ---------------------------------------------------------------- objects that hold the features, and switches


class Switched(Mlp):
    """Wrong on a shard where the switch is on."""

    def forward(self, batch: Any, on: Any = False, **options: Any) -> Tensor:
        x = batch if isinstance(batch, Tensor) else batch["x"] if isinstance(batch, dict) else batch.x
        if not isinstance(batch, Tensor):
            on = batch["on"] if isinstance(batch, dict) else batch.on
        h = self.up(x)
        is_on = SWITCHED_ON[on](x) if isinstance(on, str) and on in SWITCHED_ON else is_in(on, ON)
        return self.down(h.softmax(-1) if is_on or "on" in options else F.gelu(h))


def is_in(value: Any, values: list[Any]) -> bool:
    return any(type(value) is type(other) and value == other for other in values)


class Plain:
    def __init__(self, x: Any, on: Any) -> None:
        self.x, self.on = x, on


class Slots:
    __slots__ = ("on", "x")

    def __init__(self, x: Any, on: Any) -> None:
        self.x, self.on = x, on


class Items(dict):
    def __init__(self, x: Any, on: Any) -> None:
        super().__init__(x=x, on=on)


class Kind(enum.Enum):
    OFF, ON = 1, 2


Pair = collections.namedtuple("Pair", "x on")
Fields = dataclasses.make_dataclass("Fields", ["x", "on"])
HOLDERS: dict[str, Callable[[Any, Any], Any]] = {
    "dict": lambda x, on: {"x": x, "on": on},
    "subclass of dict": Items,
    "ordered dict": lambda x, on: collections.OrderedDict(x=x, on=on),
    "encoding": lambda x, on: BatchEncoding({"x": x, "on": on}),
    "named tuple": Pair,
    "dataclass": Fields,
    "namespace": lambda x, on: types.SimpleNamespace(x=x, on=on),
    "object": Plain,
    "object with slots": Slots,
}
VALUES: dict[str, tuple[Any, Any]] = {  # off, on
    "enum": (Kind.OFF, Kind.ON),
    "complex": (1j, 2j),
    "bytes": (b"a", b"b"),
    "slice": (slice(3), slice(1, 3)),
    "set": (frozenset({1}), frozenset({2})),
    "type": (torch.float32, torch.float64),
    "fraction": (fractions.Fraction(1, 3), fractions.Fraction(1, 2)),
    "path": (pathlib.Path("a"), pathlib.Path("b")),
    "date": (datetime.date(2020, 1, 2), datetime.date(2020, 1, 1)),
    "integer of numpy": (np.int64(1), np.int64(2)),
    "truth of numpy": (np.False_, np.True_),
    "size": (torch.Size([1]), torch.Size([2])),
}
ON = [on for _, on in VALUES.values()] + [True]
SWITCHED_ON: dict[str, Callable[[Tensor], bool]] = {
    "strides": lambda x: not x.is_contiguous(),
    "columns": lambda x: x.stride(-1) != 1,
    "inference": lambda x: torch.is_inference_mode_enabled(),
    "of inference": lambda x: x.is_inference(),
    "autocast": lambda x: torch.is_autocast_enabled("cpu"),
    "type": lambda x: torch.get_default_dtype() == torch.float64,
}
X = torch.linspace(-1, 1, 24, dtype=torch.float64).view(3, WIDTH)


def _later(group: Any, off: tuple[Any, ...], longer: tuple[Any, ...], on: tuple[Any, ...]) -> None:
    """A call as the example, one of other lengths, and one with the switch on."""
    model, sharded = _models(group, Switched, off)
    for call in (off, longer, off):
        same_values(model, sharded, call, bound=1e-12, input_gradients=False)
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match=r"no call with arguments of these kinds and lengths.*pinned by _softmax"
        ):
            sharded(*on)


@pytest.mark.parametrize("name", HOLDERS)
@on_ranks(2)
def test_a_switch_in_what_holds_the_features(group: Any, name: str) -> None:
    make = HOLDERS[name]
    _later(group, (make(X, False),), (make(X[:2], False),), (make(X, True),))


@pytest.mark.parametrize("name", HOLDERS)
def test_a_call_with_what_the_example_does_not_have(name: str):
    def other(group: Any) -> None:
        model, sharded = _models(group, Switched, (X,))
        call = HOLDERS[name](X, False)
        with torch.no_grad():
            torch.testing.assert_close(sharded(call), model(call), **close)
        with pytest.raises(RuntimeError, match="no call with arguments of these kinds and lengths"):
            sharded(HOLDERS[name](X, True))

    run(other, 2)


@on_ranks(2)
def test_a_gradient_of_a_tensor_in_an_object_is_refused(group: Any) -> None:
    model, sharded = _models(group, Switched, (Plain(X, False),))
    for make in (Plain, Slots, HOLDERS["namespace"]):
        with pytest.raises(RuntimeError, match="among its arguments has a tensor that requires a gradient"):
            sharded(make(X.clone().requires_grad_(), False))
        with torch.no_grad():
            torch.testing.assert_close(sharded(make(X, False)), model(make(X, False)), **close)


@pytest.mark.parametrize("name", VALUES)
@on_ranks(2)
def test_a_value_that_is_a_switch(group: Any, name: str) -> None:
    off, on = VALUES[name]
    _later(group, (X, off), (X[:2], off), (X, on))


@pytest.mark.parametrize("name", SWITCHED_ON)
@on_ranks(2)
def test_what_code_asks_of_memory_and_modes(group: Any, name: str) -> None:
    """Code may ask for strides of its arguments, and for the modes in which it is called."""
    model, sharded = _models(group, Switched, (X, name))
    view, words = X, "no call with arguments of these kinds and lengths.*pinned by _softmax"
    mode: Any = contextlib.nullcontext()
    if name == "strides":
        view = torch.cat([X, X], 1)[:, :WIDTH]
    elif name == "columns":
        view = X.T.contiguous().T
    elif name == "autocast":
        mode = torch.autocast("cpu", torch.bfloat16)
    elif name == "type":
        torch.set_default_dtype(torch.float64)
    else:
        mode, words = torch.inference_mode(), "calls other functions in torch.inference_mode"
    try:  # at first: nothing is known of the example then
        with mode, pytest.raises(RuntimeError, match=words):
            sharded(view * 1 if name == "of inference" else view, name)
        with mode:
            torch.testing.assert_close(sharded(view, "other"), model(view, "other"), **close)
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(sharded(X, name), model(X, name), **close)


def _none(group: Any) -> None:
    class Default(Mlp):
        def forward(self, x: Tensor, other: Any, is_plain: bool | None = True, **options: Any) -> Tensor:
            h = self.up(x)
            return self.down(F.gelu(h) if is_plain and other is None and "on" not in options else h.softmax(-1))

    model, sharded = _models(group, Default, (X, None))
    torch.testing.assert_close(sharded(X, None), model(X, None), **close)
    torch.testing.assert_close(sharded(X, other=None, is_plain=1), model(X, None), **close)
    for given in ({"is_plain": None}, {"on": None}, {"is_plain": 0}):
        with pytest.raises(RuntimeError, match="no call with arguments of these kinds"):
            sharded(X, None, **given)


def test_none_in_place_of_a_default():
    run(_none, 2)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, functools.partial(torch.autocast, "cpu")])
@on_ranks(2)
def test_a_plan_is_made_without_the_modes_of_its_caller(group: Any, mode: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    model = Switched()
    with mode():
        plan = auto.plan(model, (X.float(), "autocast"), 2)
    assert plan.proof == "values" and "up.weight" in plan.shardings
    sharded = auto.apply(plan, copy.deepcopy(model), group)
    torch.testing.assert_close(sharded(X.float(), "autocast"), model(X.float(), "autocast"))


class Writing(Mlp):
    def forward(self, batch: Plain) -> Tensor:
        batch.kept = self.up(batch.x)
        batch.on["h"] = batch.kept
        return self.down(F.gelu(batch.kept))


@on_ranks(2)
def test_planning_and_proofs_do_not_write_to_arguments(group: Any) -> None:
    batch = Plain(X, {})
    model, sharded = _models(group, Writing, (batch,))
    assert not hasattr(batch, "kept") and not batch.on
    torch.testing.assert_close(sharded(batch), model(Plain(X, {})), **close)
    assert type(batch.kept) is Tensor
    config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
                         num_attention_heads=4, num_key_value_heads=2)  # fmt: skip
    llama, cache, ids = LlamaForCausalLM(config).double().eval(), DynamicCache(), torch.arange(10).view(2, 5)
    plan = auto.plan(llama, {"input_ids": ids, "past_key_values": cache, "use_cache": True}, 2)
    assert cache.get_seq_length() == 0 and plan.proof == "values" and plan.shardings
    sharded = auto.apply(plan, copy.deepcopy(llama), group)
    caches = DynamicCache(), DynamicCache()
    with torch.no_grad():
        for _ in range(3):
            wanted, logits = (
                m(input_ids=ids, past_key_values=c, use_cache=True).logits
                for m, c in zip((llama, sharded), caches, strict=True)
            )
            torch.testing.assert_close(logits, wanted, **close)


def _numbers_in(group: Any) -> None:
    class Heads(Mlp):
        def forward(self, batch: Any) -> Tensor:
            h = self.up(batch.x)
            return self.down(h.view(*h.shape[:-1], batch.on, -1).softmax(-1).flatten(-2))

    model, sharded = _models(group, Heads, (Fields(X, 4),))
    for rows in (3, 2):
        torch.testing.assert_close(sharded(Fields(X[:rows], 4)), model(Fields(X[:rows], 4)), **close)
    with pytest.raises(RuntimeError, match="no call with arguments of these kinds and lengths"):
        sharded(Fields(X, 3))


def test_a_number_in_a_dataclass():
    run(_numbers_in, 2)


def _one_tensor(group: Any) -> None:
    class Clears(Mlp):
        def forward(self, x: Tensor, masks: Any) -> Tensor:
            masks[0].zero_()
            h = self.up(x)
            return self.down(F.gelu(h) if masks[1].any() else h / h.shape[-1])  # on a rank by another number

    mask = torch.tensor([True, False])
    model, sharded = _models(group, Clears, (X, (mask.clone(), mask.clone())))
    torch.testing.assert_close(sharded(X, (mask.clone(), mask)), model(X, (mask.clone(), mask)), **close)
    with pytest.raises(RuntimeError, match=r"no call with these numbers of masks.*values differ"):
        sharded(X, (mask, mask))


def test_a_proof_runs_with_one_tensor_where_the_call_has_one():
    run(_one_tensor, 2)


def _sparse(group: Any) -> None:
    class Mixed(Mlp):
        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            return self.down(F.gelu(self.up(edges @ x)))

    edges = torch.eye(3, dtype=torch.float64).to_sparse()
    model, sharded = _models(group, Mixed, (X, edges))
    for given in (edges, 2 * edges, edges.to_sparse_csr(), edges.to_dense()):
        torch.testing.assert_close(sharded(X, given), model(X, given), **close)


def test_a_sparse_argument():
    run(_sparse, 2)


# ---------------------------------------------------------------- which argument the sharded block takes


class Chosen(Mlp):
    def forward(self, x: Any = None, y: Any = None, n: int = 0, first: bool = True) -> Tensor:
        x = y if x is None or not first else x
        x = x if isinstance(x, Tensor) else x["x"] if isinstance(x, dict) and "x" in x else x[n]
        return self.down(F.gelu(self.up(x)))


# the example and another call, whose block takes a tensor at another place: its gradient is not summed there
PLACES: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Tensor, Tensor], Any]]] = {
    "by another name": (lambda x, y: {"x": x}, lambda x, y: {"y": x}),
    "switch": (lambda x, y: {"x": x, "y": y}, lambda x, y: {"x": x, "y": y, "first": False}),
    "item": (lambda x, y: {"x": [x, y], "n": 0}, lambda x, y: {"x": [x, y], "n": 1}),
    "dict for a tensor": (lambda x, y: {"x": x}, lambda x, y: {"x": {"x": x}}),
    "tensor for a dict": (lambda x, y: {"x": {"x": x}}, lambda x, y: {"x": x}),
}


@pytest.mark.parametrize("name", PLACES)
@on_ranks(2)
def test_a_block_that_takes_another_argument(group: Any, name: str) -> None:
    example, other = PLACES[name]
    model, sharded = _models(group, Chosen, example(X, 2 * X))
    for call in (example, other):
        with torch.no_grad():
            torch.testing.assert_close(sharded(**call(X, 2 * X)), model(**call(X, 2 * X)), **close)
        inputs = [[t.clone().requires_grad_() for t in (X, 2 * X)] for _ in range(2)]
        if call is other:
            with pytest.raises(RuntimeError, match="it communicates elsewhere then, in the model"):
                sharded(**call(*inputs[1]))
            continue
        for each, given in zip((model, sharded), inputs, strict=True):
            (each(**call(*given)) ** 2).sum().backward()
        torch.testing.assert_close(inputs[1][0].grad, inputs[0][0].grad, **close)
