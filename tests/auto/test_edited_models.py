"""Edits of a sharded model after ``apply``: modules that are added, moved, removed and wrapped, and layers whose weight
is computed from others. Each is right when the next call comes, or refused by a sentence that names the module."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from tests.helpers.on_ranks import on_ranks
from tests.helpers.same_values import same_values
from tp_ext import auto

close = {"rtol": 1e-10, "atol": 1e-11}
WIDTH = 16
RIGHT = ""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.act = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.GELU()
        self.down, self.scale = nn.Linear(32, WIDTH), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(self.act(self.up(self.norm(x))))


class Net(nn.Module):
    """The last block's output is that of ``mid``, whose gradient is summed there unless there is a norm after it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.norm = nn.ModuleList(Block() for _ in range(3)), nn.LayerNorm(WIDTH)
        self.mid = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        x = self.mid(self.norm(x))
        return self.extra(x) if hasattr(self, "extra") else x


class Wrapper(nn.Module):
    """As one that takes times, which counts its calls."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.calls = inner, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.inner(x)


class Gated(Wrapper):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.gate = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.gate) * self.inner(x)


class Adapted(Wrapper):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        generator = torch.Generator().manual_seed(3)
        self.a = nn.Parameter(torch.randn(WIDTH, 4, generator=generator, dtype=torch.float64))
        self.b = nn.Parameter(torch.randn(4, WIDTH, generator=generator, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + x @ self.a @ self.b


class Normed(Wrapper):
    """Wrong on a shard of its last dim."""

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).softmax(-1)


class Halved(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / 2


def _new(kind: Callable[[], nn.Module] = Block) -> nn.Module:
    torch.manual_seed(5)  # on all ranks, and for both models
    return kind().double()


def _swap(model: Any) -> None:
    model.blocks[0], model.blocks[1] = model.blocks[1], model.blocks[0]


def _each(model: Any, wrap: Callable[[nn.Module], nn.Module]) -> None:
    for i, block in enumerate(model.blocks):
        model.blocks[i] = wrap(block)


def _linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def _mask(model: Any) -> None:
    weight = model.blocks[0].up.weight
    prune.custom_from_mask(model.blocks[0].up, "weight", (weight > 0).to(weight.dtype))


NEW_BLOCK = "blocks.3 is .*Block.forward, a new module, which was not so when the plan was applied"
EDITS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "append": (lambda m: m.blocks.append(_new()), RIGHT),
    "insert": (lambda m: m.blocks.insert(1, _new()), RIGHT),
    "extend": (lambda m: m.blocks.extend([_new(), _new()]), RIGHT),
    "remove the first": (lambda m: m.blocks.__delitem__(0), RIGHT),
    "remove the last": (lambda m: m.blocks.pop(2), RIGHT),
    "slice": (lambda m: setattr(m, "blocks", m.blocks[:2]), RIGHT),
    "swap": (_swap, RIGHT),
    "reverse": (lambda m: setattr(m, "blocks", nn.ModuleList([*m.blocks][::-1])), RIGHT),
    "one block twice": (lambda m: m.blocks.append(m.blocks[0]), RIGHT),
    "a copy of a block": (lambda m: m.blocks.append(copy.deepcopy(m.blocks[0])), "blocks.3 is a copy of blocks.0"),
    "add_module": (lambda m: m.add_module("extra", _new()), RIGHT),
    "setattr": (lambda m: setattr(m, "extra", _new(_linear)), RIGHT),
    "a module that nothing calls": (lambda m: setattr(m, "other", _new()), RIGHT),
    "Sequential.append": (lambda m: m.mid.append(_new(_linear)), RIGHT),
    "Sequential.insert": (lambda m: m.mid.insert(1, nn.Tanh()), RIGHT),
    "Sequential.insert of what needs all": (lambda m: m.mid.insert(1, nn.Softmax(-1)), "mid.1 is torch.*Softmax"),
    "Sequential without one": (lambda m: m.mid.__delitem__(1), RIGHT),
    "wrapper": (lambda m: _each(m, Wrapper), RIGHT),
    "gates": (lambda m: _each(m, Gated), RIGHT),
    "adapters": (lambda m: _each(m, Adapted), RIGHT),
    "gates of adapters": (lambda m: _each(m, lambda block: Gated(Adapted(block))), RIGHT),
    "what needs all of whole results": (lambda m: _each(m, Normed), RIGHT),
    "wrapped Sequential": (lambda m: setattr(m, "mid", Wrapper(m.mid)), RIGHT),
    "wrapped norm": (lambda m: setattr(m, "norm", Wrapper(m.norm)), RIGHT),
    "wrapped layers": (
        lambda m: (setattr(m.mid, "0", Wrapper(m.mid[0])), setattr(m.mid, "2", Wrapper(m.mid[2]))),
        RIGHT,
    ),
    "what needs all of a shard": (
        lambda m: setattr(m.blocks[0], "up", Normed(m.blocks[0].up)),
        "blocks.0.up is .*Normed",
    ),
    "gate before a column layer": (lambda m: m.mid.insert(0, Gated(m.mid.pop(0))), "mid.0 is .*"),
    "another norm": (lambda m: setattr(m, "norm", nn.LayerNorm(WIDTH).double()), "norm has been replaced or removed"),
    "weight_norm": (lambda m: parametrizations.weight_norm(m.blocks[0].up), RIGHT),
    "weight_norm of a norm": (lambda m: torch.nn.utils.weight_norm(m.norm), RIGHT),
    "parametrization": (lambda m: parametrize.register_parametrization(m.blocks[1].up, "weight", Halved()), RIGHT),
    "parametrization of a norm": (lambda m: parametrize.register_parametrization(m.norm, "weight", Halved()), RIGHT),
    "mask": (_mask, RIGHT),
    "mask of a norm": (lambda m: prune.l1_unstructured(m.norm, "weight", amount=0.3), RIGHT),
}


def _compare(model: nn.Module, sharded: nn.Module, x: Tensor) -> None:
    same_values(model, sharded, (x,))


def _models(group: Any) -> tuple[nn.Module, nn.Module, Tensor]:
    torch.manual_seed(0)
    model, x = Net().double(), torch.randn(2, 5, WIDTH, dtype=torch.float64)
    sharded = auto.apply(auto.plan(model, (x,), 2), copy.deepcopy(model), group)
    _compare(model, sharded, x)
    return model, sharded, x


@pytest.mark.parametrize("name", EDITS)
@on_ranks(2)
def test_an_edit_after_apply(group: Any, name: str) -> None:
    edit, words = EDITS[name]
    model, sharded, x = _models(group)
    edit(sharded)
    edit(model)
    if words == RIGHT:
        for given in (x, x, x[:, :3]):
            _compare(model, sharded, given)
        return
    for _ in range(2):
        with pytest.raises(RuntimeError, match=words):
            sharded(x)


@on_ranks(2)
def test_edits_of_edits_and_of_copies(group: Any) -> None:
    """Changes inside of a wrapper are seen, and a module that is taken out of it works as before."""
    model, sharded, x = _models(group)
    for each in (model, sharded):
        _each(each, Gated)
    _compare(model, sharded, x)
    for each in (model, sharded):
        each.blocks[0].inner.scale = 0.5
        each.blocks[1].double().eval()
        each.train()
    _compare(model, sharded, x)
    for each in (model, sharded):
        each.blocks[0].inner.act = nn.Tanh()
    _compare(model, sharded, x)
    for each in (model, sharded):
        _each(each, lambda block: block.inner)
    _compare(model, sharded, x)
    clone = copy.deepcopy(sharded)
    for each in (model, clone):
        _swap(each)
        each.blocks[0] = Adapted(each.blocks[0])
    _compare(model, clone, x)


class Modes(nn.Module):
    """Its code differs in train and eval mode, in a way that a plan of one mode does not show."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.up, self.down = kind, nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.norm, self.drop = nn.BatchNorm1d(WIDTH), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.up(x))
        if self.kind == f"softmax in {'train' if self.training else 'eval'}":
            h = h.softmax(-1)
        h = self.drop(h) if self.kind == "dropout" else h
        y = self.down(h)
        return self.norm(y.flatten(0, 1)).view_as(y) if self.kind == "batch norm" else y


@pytest.mark.parametrize("applied", [True, False])
@pytest.mark.parametrize("planned", [True, False])
@pytest.mark.parametrize("kind", ["dropout", "batch norm", "softmax in train", "softmax in eval"])
@pytest.mark.parametrize("prove", ["values", "shapes", False])
@on_ranks(2)
def test_a_mode_that_the_plan_does_not_show(group: Any, kind: str, prove: Any, planned: bool, applied: bool) -> None:
    torch.manual_seed(0)
    model, x = Modes(kind).double().train(planned), torch.randn(3, 5, WIDTH, dtype=torch.float64)
    plan = auto.plan(model, (x,), 2, prove=prove)
    is_refused = "up.weight" in plan.shardings and kind.startswith("softmax")
    try:
        sharded = auto.apply(plan, copy.deepcopy(model).train(applied), group)
    except ValueError as error:  # planned in one mode and applied in the other, whose shapes are others
        assert prove == "shapes" and planned != applied and "makes other calls" in str(error)
        return
    for called in (planned, not planned, planned):
        model.train(called)
        sharded.train(called)
        if is_refused and called != planned:
            with pytest.raises(RuntimeError, match=r"; up\.weight cannot be sharded then"):
                sharded(x)
        elif kind != "dropout" or not called:  # the unsharded model has other masks
            _compare(model, sharded, x)
        else:
            sharded(x).sum().backward()
