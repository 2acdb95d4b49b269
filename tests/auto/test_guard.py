"""Calls of a sharded model that its plan has not seen: each is proven when it first comes, or refused by a sentence
that names what is new. The table is the test: a change, and whether the numbers are the unsharded model's."""

import contextlib
import copy
import dataclasses
import enum
import io
import types
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

from tests.helpers.on_ranks import on_ranks
from tests.helpers.same_values import same_values
from tests.helpers.simulated import run
from tp_ext import auto
from tp_ext.auto import guard

close = {"rtol": 1e-12, "atol": 1e-12}
WIDTH = 16
SWITCH = {"on": False}  # a global that forward reads
LIMIT = 100


class Kind(enum.Enum):
    PLAIN = 1
    NORM = 2


@dataclasses.dataclass
class Options:
    norm: bool = False


def _normed(h: Tensor) -> Tensor:
    """Wrong on a shard of its last dim."""
    return h / h.norm(dim=-1, keepdim=True)


class Net(nn.Module):
    """Two blocks of which the first looks at everything: each switch leads to code that the plan has not seen."""

    limit = 100  # of tokens
    norms = False

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, WIDTH)
        self.last = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))
        self.drop, self.layer_norm = nn.Dropout(0.0), nn.LayerNorm(WIDTH)
        self.flag, self.mode, self.number, self.ratio = False, "a", 1, 0.5
        self.sizes, self.table, self.options = (1, 2), {"norm": False}, Options()
        self.config = types.SimpleNamespace(inner=types.SimpleNamespace(attention="a"))
        self.names: list[str] = []

    def is_switched(self, x: Tensor) -> bool:
        return (
            self.flag
            or self.mode == "b"
            or self.number > 3
            or self.ratio < 0
            or self.sizes[0] == 2
            or self.table["norm"]
            or self.options.norm
            or self.config.inner.attention == "b"
            or bool(self.names)
            or self.norms
            or SWITCH["on"]
            or self.drop.training != self.training
            or x.shape[1] > self.limit
            or getattr(self, "new", False)
        )

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        h = self.act(self.up(x))
        if self.is_switched(x):
            h = _normed(h)
        return self.layer_norm(self.last(x + self.down(h)))


class Called(Net):
    """The same for arguments."""

    def forward(
        self,
        x: Tensor,
        n: int = 1,
        scale: float = 1.0,
        shift: float = 0.0,
        flag: bool = False,
        mode: str = "a",
        kind: Kind = Kind.PLAIN,
        sizes: tuple[int, ...] = (1, 2),
        options: Any = None,
        kept: int = WIDTH,
    ) -> Tensor:
        y = x
        for _ in range(n):
            h = self.act(self.up(y)) * scale
            if flag or mode == "b" or kind is Kind.NORM or sizes[0] == 2 or (options is not None and options.norm):
                h = _normed(h)
            if x.shape[1] > 6 or scale > 2:
                h = _normed(h)
            y = self.down(h)
        y = y[..., :kept].sum(-1, keepdim=True)
        if shift:
            y = y + shift
        return self.layer_norm(self.last(x + y))


def _x(tokens: int = 5, batch: int = 2) -> Tensor:
    return torch.randn(batch, tokens, WIDTH, generator=torch.Generator().manual_seed(tokens), dtype=torch.float64)


Change = Callable[[nn.Module], Any]
RIGHT = ""


def _models(group: Any, made: type[nn.Module], example: dict[str, Any]) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = made().double()
    plan = auto.plan(model, example, 2)
    assert {"up.weight", "last.0.weight"} <= set(plan.shardings), plan.whole
    return model, auto.apply(plan, copy.deepcopy(model), group)


def _compare(model: nn.Module, sharded: nn.Module, call: Callable[[nn.Module, Tensor], Any], tokens: int = 5) -> None:
    """Runs both; outputs and all gradients are the same."""
    same_values(model, sharded, (_x(tokens),), call=call)


def _refused(call: Callable[[], Any], words: str) -> None:
    for _ in range(2):  # what is refused once is not known afterwards
        with pytest.raises(RuntimeError, match=words):
            call()


STATES: dict[str, tuple[Change, str]] = {
    "flag": (lambda m: setattr(m, "flag", True), "flag is True"),
    "text": (lambda m: setattr(m, "mode", "b"), "mode is 'b'"),
    "int": (lambda m: setattr(m, "number", 4), "number is 4"),
    "int that leads nowhere": (lambda m: setattr(m, "number", 2), RIGHT),
    "float": (lambda m: setattr(m, "ratio", -0.5), "ratio is -0.5"),
    "tuple": (lambda m: setattr(m, "sizes", (2, 2)), "sizes is"),
    "dict": (lambda m: m.table.update(norm=True), "table.norm is True"),
    "dataclass": (lambda m: setattr(m.options, "norm", True), "options.norm is True"),
    "another object": (lambda m: setattr(m, "options", Options(True)), "options.norm is True"),
    "config": (lambda m: setattr(m.config.inner, "attention", "b"), "config.inner.attention is 'b'"),
    "list": (lambda m: m.names.append("a"), "names is"),
    "new attribute": (lambda m: setattr(m, "new", True), "new is True"),
    "unused attribute": (lambda m: setattr(m, "other", 3), RIGHT),
    "eval": (lambda m: m.eval(), RIGHT),
    "eval of a module": (lambda m: m.drop.eval(), "drop.training is False"),
    "softmax": (lambda m: setattr(m, "act", nn.Softmax(-1)), "act is torch.*Softmax"),
    "another pointwise": (lambda m: setattr(m, "act", nn.SiLU()), RIGHT),
    "module inside": (lambda m: m.last.__setitem__(1, nn.Softmax(-1)), "last.1 is torch.*Softmax"),
    "layer": (lambda m: setattr(m, "up", nn.Linear(WIDTH, 64).double()), "up has been replaced"),
    "block": (lambda m: setattr(m, "last", nn.Identity()), RIGHT),
    "wrapped layer": (lambda m: setattr(m, "up", nn.Sequential(m.up, nn.Softmax(-1))), "up is torch.*Sequential"),
    "forward hook": (lambda m: m.up.register_forward_hook(lambda m, a, o: o.softmax(-1)), "up._forward_hooks"),
    "hook by keyword": (
        lambda m: m.act.register_forward_hook(lambda m, a, k, o: _normed(o), with_kwargs=True),
        "act._forward_hooks",
    ),
    "pre-hook": (
        lambda m: m.down.register_forward_pre_hook(lambda m, a: (a[0].softmax(-1),)),
        "down._forward_pre_hooks",
    ),
    "pointwise hook": (lambda m: m.up.register_forward_hook(lambda m, a, o: o * 2), RIGHT),
    "hook that looks": (lambda m: m.up.register_forward_hook(lambda m, a, o: None), RIGHT),
    "hook of the model": (lambda m: m.register_forward_hook(lambda m, a, o: o.softmax(-1)), RIGHT),
    "backward hook": (
        lambda m: m.down.register_full_backward_hook(lambda m, i, o: (i[0] / i[0].norm(),)),
        "down._backward_hooks",
    ),
    "backward pre-hook": (
        lambda m: m.up.register_full_backward_pre_hook(lambda m, o: (o[0] / o[0].norm(),)),
        "up._backward_pre_hooks",
    ),
    "frozen": (lambda m: m.up.requires_grad_(False), RIGHT),
    "all frozen but one": (lambda m: (m.requires_grad_(False), m.down.weight.requires_grad_()), RIGHT),
}


@pytest.mark.parametrize("name", STATES)
@on_ranks(2)
def test_a_change_of_the_model(group: Any, name: str) -> None:
    change, words = STATES[name]
    model, sharded = _models(group, Net, {"x": _x()})
    _compare(model, sharded, lambda m, x: m(x))
    if "hook" in name:
        change(sharded)
        change(model)
    else:
        change(model)
        change(sharded)
    if words == RIGHT:
        _compare(model, sharded, lambda m, x: m(x))
        _compare(model, sharded, lambda m, x: m(x), tokens=7)
    else:
        _refused(lambda: sharded(_x()), words)
        with torch.no_grad():
            _refused(lambda: sharded(_x()), words) if "backward" not in name else None


def _softmax_of_up(module: nn.Module, args: Any, output: Any) -> Any:
    return output.softmax(-1) if isinstance(output, Tensor) and output.shape[-1] in (32, 64) else None


@on_ranks(2)
def test_globals_class_attributes_and_hooks_of_all_modules(group: Any) -> None:
    model, sharded = _models(group, Net, {"x": _x()})
    _compare(model, sharded, lambda m, x: m(x))
    for holder, key in ((SWITCH, "on"), (vars(nn.modules.module)["_global_forward_hooks"], 10**9)):
        value = True if key == "on" else _softmax_of_up
        with mock.patch.dict(holder, {key: value}):
            _refused(lambda: sharded(_x()), "SWITCH is|_global_forward_hooks is")
        _compare(model, sharded, lambda m, x: m(x))
    with mock.patch.object(Net, "norms", True):
        _refused(lambda: sharded(_x()), "norms is True")
    with mock.patch.object(Net, "limit", 1):
        _refused(lambda: sharded(_x()), "limit is 1")


@on_ranks(2)
def test_what_was_frozen_when_it_was_planned(group: Any) -> None:
    torch.manual_seed(0)
    model = Net().double()
    model.layer_norm.requires_grad_(False)
    first = nn.Linear(WIDTH, WIDTH).double().requires_grad_(False)
    model = nn.Sequential(first, model)
    plan = auto.plan(model, (_x(),), 2)
    sharded = auto.apply(plan, copy.deepcopy(model), group)
    _compare(model, sharded, lambda m, x: m(x.detach()) + 0 * x)
    for each in (model, sharded):
        each[1].layer_norm.requires_grad_(True)
    _compare(model, sharded, lambda m, x: m(x.detach()) + 0 * x)
    for each in (model, sharded):
        each[0].requires_grad_(True)
    # A sum that the plan has not made may be missing: refused, or right
    with contextlib.suppress(RuntimeError):
        _compare(model, sharded, lambda m, x: m(x))
        return
    _refused(lambda: sharded(_x()), "0.bias.requires_grad is True")


class Counter(Net):
    """Attributes that forward sets: some before it reads them, one that it counts with."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.length, self.kept = 0, 0, None

    def forward(self, x: Tensor) -> Tensor:
        self.calls, self.length, self.kept, self.shape = self.calls + 1, x.shape[1], x, tuple(x.shape)
        h = self.act(self.up(x * self.length))
        return self.last(x + self.down(_normed(h) if self.calls > 200 else h))


@on_ranks(2)
def test_attributes_that_forward_sets(group: Any) -> None:
    model, sharded = _models(group, Counter, {"x": _x()})
    for tokens in range(2, 6):
        _compare(model, sharded, lambda m, x: m(x), tokens)
    sharded.calls = 199
    torch.testing.assert_close(sharded(_x()), model(_x()), **close)
    _refused(lambda: sharded(_x()), "calls is 200")


def _compiled(group: Any) -> None:
    torch.compiler.reset()
    model, sharded = _models(group, Called, {"x": _x(), "n": 1, "scale": 1.0, "shift": 0.0})
    compiled = torch.compile(sharded, backend="eager")
    for tokens in (5, 4, 6):
        _compare(model, sharded, lambda m, x: m(x) if m is model else compiled(x), tokens)
    _refused(lambda: compiled(_x(), flag=True), "flag")
    _refused(lambda: compiled(_x(7)), "lengths")
    sharded.act = nn.Softmax(-1)
    _refused(lambda: compiled(_x()), "act is torch.*Softmax")


def test_a_compiled_model_is_looked_at_for_each_trace() -> None:
    with torch._dynamo.config.patch(recompile_limit=64):  # two ranks in one process
        run(_compiled, 2)


@on_ranks(2)
def test_attentions_of_transformers_are_not_those_of_a_rank(group: Any) -> None:
    config = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=112,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).double().eval()
    ids = torch.arange(14).view(2, 7)
    plan = auto.plan(model, {"input_ids": ids, "use_cache": False}, 2)
    sharded = auto.apply(plan, copy.deepcopy(model), group)
    for each in (model, sharded):
        each.set_attn_implementation("eager")
    for option in ("output_hidden_states", "output_attentions"):
        results = [each(input_ids=ids, use_cache=False, **{option: True}) for each in (model, sharded)]
        torch.testing.assert_close(results[1].logits, results[0].logits)
        name = option.removeprefix("output_")
        torch.testing.assert_close(results[1][name], results[0][name])


ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "loops": ({"n": 2}, RIGHT),
    "no loop": ({"n": 0}, RIGHT),
    "scale": ({"scale": 1.5}, RIGHT),
    "scale that is tested": ({"scale": 2.5}, "scale"),
    "zero": ({"scale": 0.0}, RIGHT),
    "shift": ({"shift": 1.0}, RIGHT),
    "flag": ({"flag": True}, "flag"),
    "text": ({"mode": "b"}, "mode"),
    "enum": ({"kind": Kind.NORM}, "kind"),
    "same enum": ({"kind": Kind.PLAIN}, RIGHT),
    "tuple": ({"sizes": (2, 2)}, "sizes"),
    "tuple that leads nowhere": ({"sizes": (1, 3)}, RIGHT),
    "dataclass": ({"options": Options(True)}, "options"),
    "namespace": ({"options": types.SimpleNamespace(norm=True)}, "options"),
    "default object": ({"options": Options()}, RIGHT),
    "slice": ({"kept": 3}, RIGHT),
}


@pytest.mark.parametrize("name", ARGUMENTS)
@on_ranks(2)
def test_arguments_that_the_example_does_not_have(group: Any, name: str) -> None:
    given, words = ARGUMENTS[name]
    model, sharded = _models(group, Called, {"x": _x(), "n": 1, "scale": 1.0, "shift": 0.0})
    _compare(model, sharded, lambda m, x: m(x))
    if words == RIGHT:
        _compare(model, sharded, lambda m, x: m(x, **given))
    else:
        _refused(lambda: sharded(_x(), **given), words)
        _refused(lambda: sharded.forward(_x(), **given), words)
        _refused(lambda: type(sharded).forward(sharded, _x(), **given), words)


def _lengths(group: Any) -> None:
    recorded: Any = guard.flow_of  # the mock
    model, sharded = _models(group, Called, {"x": _x()})
    for tokens in (1, 2, 3, 4, 5, 6, 6, 2, 3):
        _compare(model, sharded, lambda m, x: m(x), tokens)
        # The others have shown that 6 is right, not that 7 is
        _refused(lambda: sharded(_x(7)), "lengths")
    scales = [1 + i / 50 for i in range(1, 40)]
    for scale in scales[:6]:
        _compare(model, sharded, lambda m, x, scale=scale: m(x, scale=scale))
    # After a few lengths, and a few scales, no other is recorded but where the code branches on it
    dist.barrier(group)  # the other rank has recorded its own
    count = recorded.call_count
    for batch in range(2, 12):
        torch.testing.assert_close(sharded(_x(4, batch)), model(_x(4, batch)), **close)
    for scale in scales:
        _compare(model, sharded, lambda m, x, scale=scale: m(x, scale=scale))
    assert recorded.call_count == count
    dist.barrier(group)
    _refused(lambda: sharded(_x(7, 3)), "lengths")
    _refused(lambda: sharded(_x(), scale=2.01), "scale")


def test_lengths_and_numbers_of_which_many_come() -> None:
    with mock.patch.object(guard, "flow_of", wraps=guard.flow_of):  # here: ranks are threads, and share it
        run(_lengths, 2)


class WithTarget(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(61, 32), nn.Linear(32, 61, bias=False)

    def forward(self, ids: Tensor, target: Tensor | None = None) -> Tensor:
        logits = self.head(torch.tanh(self.table(ids)))
        return logits if target is None else nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())

    def generate(self, ids: Tensor, count: int) -> Tensor:
        for _ in range(count):
            ids = torch.cat([ids, self(ids)[:, -1:].argmax(-1)], 1)
        return ids


@pytest.mark.parametrize("how", ["method", "file", "compiled"])
@on_ranks(2)
def test_later_calls_of(group: Any, how: str) -> None:
    """A call that the example lacks, also of a model that was read from a file or compiled in place."""
    torch.manual_seed(0)
    model, ids = WithTarget().double(), torch.arange(15).view(3, 5)
    plan = auto.plan(model, (ids, ids), 2, hints={"table": "whole"} if how == "method" else None)
    sharded = auto.apply(plan, copy.deepcopy(model), group)
    if how == "file":
        file = io.BytesIO()
        torch.save(sharded, file)
        file.seek(0)
        sharded = torch.load(file, weights_only=False)
    if how == "compiled":
        sharded.compile(backend="eager")
    torch.testing.assert_close(torch.as_tensor(sharded(ids[:2])), model(ids[:2]), rtol=1e-12, atol=1e-12)
    assert torch.equal(sharded.generate(ids, 3), model.generate(ids, 3))
