"""Calls of a sharded model's modules by other code than its forward: whole tensors in and out, complete gradients."""

import copy
import io
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint

import tp_ext
from tests.helpers.on_ranks import on_ranks
from tests.helpers.same_values import same_values
from tests.helpers.simulated import run
from tp_ext import auto

WIDTH, HEADS, VOCAB = 16, 4, 40
close = {"rtol": 1e-11, "atol": 1e-12}  # ranks sum in another order


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 36), nn.Linear(36, 4)
        self.back, self.out = nn.Linear(4, 36), nn.Linear(36, WIDTH)

    def encode(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.norm(x))))

    def decode(self, z: Tensor) -> Tensor:
        return self.out(F.gelu(self.back(z)))

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.norm, self.qkv, self.o = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.ModuleDict(
            {"norm": nn.LayerNorm(WIDTH), "up": nn.Linear(WIDTH, 36), "down": nn.Linear(36, WIDTH)}
        )

    def attend(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (y.view(b, t, self.heads, WIDTH // HEADS).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm(x))
        return x + self.mlp["down"](F.gelu(self.mlp["up"](self.mlp["norm"](x))))


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(VOCAB, WIDTH), nn.Sequential(Block(), Block())
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def body(self, tokens: Tensor) -> Tensor:
        return self.norm(self.blocks(self.embedding(tokens)))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(tokens))


class Terms(nn.Module):
    """A module with weights of its own, whose hook sums its result: it needs a partial gradient of that."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(shape) / 4) for shape in ((WIDTH, 36), (36, WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x @ self.up) @ self.down


class Chained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Terms(), Terms()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.first(x))


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 12, 3, padding=1), nn.Conv2d(12, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x.unflatten(-1, (4, 4)).transpose(1, 2)).relu())


class Switch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 36), nn.Linear(36, WIDTH)

    def forward(self, x: Tensor, hidden: bool = False, number: int = 0) -> Any:
        h = self.up(x).relu()
        return h if hidden or number == 1 else (self.down(h), h) if number == 2 else self.down(h)


class Switched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Switch()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class SharedDropout(nn.Module):
    """A dropout that masks features of a rank, and those of all."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(WIDTH, 36), nn.Linear(36, WIDTH), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.down(self.dropout(F.gelu(self.up(x)))))


def tokens() -> Tensor:
    return torch.arange(12).view(2, 6) % VOCAB


CALLS: dict[str, tuple[type[nn.Module], Callable[[Any, Tensor], Tensor]]] = {
    "a method that runs layers as forward does": (Autoencoder, lambda m, x: m.encode(x)),
    "its second half": (Autoencoder, lambda m, x: m.decode(x[..., :4])),
    "features of a column layer": (Autoencoder, lambda m, x: m.up(x).softmax(-1)),
    "features for a row layer": (Autoencoder, lambda m, x: m.down(x.repeat(1, 1, 3)[..., :36])),
    "a norm whose gradient forward sums": (Autoencoder, lambda m, x: m.norm(x)),
    "forward and other code": (Autoencoder, lambda m, x: m(m(x)) + m.up(x).softmax(-1)[..., :WIDTH]),
    "a block": (LanguageModel, lambda m, x: m.blocks[0](x)),
    "blocks": (LanguageModel, lambda m, x: m.blocks(x)),
    "the body alone": (LanguageModel, lambda m, x: m.body(tokens()) + x),
    "the body, then the head": (LanguageModel, lambda m, x: m.head(m.body(tokens()) + x)),
    "a head alone": (LanguageModel, lambda m, x: m.head(x)[..., 3:9]),
    "an embedding": (LanguageModel, lambda m, x: m.embedding(tokens()) * x),
    "a norm before two layers": (LanguageModel, lambda m, x: m.blocks[1].norm(x)),
    "a module that sums its result": (Chained, lambda m, x: m.first(x)),
    "by name, past its hooks": (Chained, lambda m, x: m.second.forward(m.first.forward(x))),
    "the model by name": (Chained, lambda m, x: m.forward(x)),
    "fewer dims": (Autoencoder, lambda m, x: m.down(m.up(x[0]).relu()) + m.down(m.up(x[0, 0]).relu())),
    "more dims": (Autoencoder, lambda m, x: m.down(m.up(x[None]).relu())),
    "a convolution": (Images, lambda m, x: m.first(x.unflatten(-1, (4, 4)).transpose(1, 2))),
    "recomputed": (LanguageModel, lambda m, x: checkpoint(m.blocks[0], x, use_reentrant=False)),
    "recomputed, reentrant": (LanguageModel, lambda m, x: checkpoint(m.blocks[0], x, use_reentrant=True)),
    "compiled": (Autoencoder, lambda m, x: torch.compile(m.encode, backend="aot_eager")(x)),
    "a copy": (Autoencoder, lambda m, x: m.encode(x) + copy.deepcopy(m).encode(x.detach())),
}
REFUSED: dict[str, tuple[type[nn.Module], Callable[[Any, Tensor], Tensor]]] = {
    "a method that reads heads of a rank": (LanguageModel, lambda m, x: m.blocks[0].attend(x)),
    "a layer next to heads of a rank": (LanguageModel, lambda m, x: m.blocks[0].qkv(x)),
    "a module that forward calls in two ways": (SharedDropout, lambda m, x: m.dropout(x)),
    "a switch that forward does not pass": (Switched, lambda m, x: m.inner(x, hidden=True)),
    "a result of another length": (Switched, lambda m, x: m.inner(x, number=1)),
    "a result that forward does not get": (Switched, lambda m, x: m.inner(x, number=2)[1]),
    "a convolution of one image": (Images, lambda m, x: m.first(x[0].view(4, 6, 4))),
    "in a checkpoint": (Autoencoder, lambda m, x: checkpoint(m.up, x, use_reentrant=False)),
    "in a reentrant checkpoint": (Autoencoder, lambda m, x: checkpoint(m.up, x, use_reentrant=True)),
}


def _compare(group: Any, made: type[nn.Module], call: Callable[[Any, Tensor], Tensor], tokens_too: bool | str) -> None:
    torch.manual_seed(0)
    model, x = made().double(), torch.randn(2, 6, WIDTH, dtype=torch.float64)
    plan = auto.plan(model, (tokens() if made is LanguageModel else x,), group.size(), sequence_parallel=tokens_too)
    assert plan.shardings
    sharded = auto.apply(plan, copy.deepcopy(model), group)
    same_values(model, sharded, (x,), call=call)


def _compare_named(group: Any, name: str, tokens_too: bool | str) -> None:
    _compare(group, *{**CALLS, **REFUSED}[name], tokens_too)


@pytest.mark.parametrize(
    ("name", "tokens_too"),
    [*((name, False) for name in CALLS), *((n, "auto") for n, (made, _) in CALLS.items() if made is LanguageModel)],
)  # no tokens of the others are sharded
def test_whole_tensors_and_complete_gradients(name: str, tokens_too: bool | str):
    if tokens_too and name.startswith("recomputed"):
        with pytest.raises(RuntimeError, match="it is inside of torch"):
            run(_compare_named, 2, name, tokens_too)
        return
    run(_compare_named, 2 if tokens_too else 3, name, tokens_too)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_converted_is_refused(name: str):
    with pytest.raises(RuntimeError, match=r"cannot be called so by other code than the forward .*Let forward call it"):
        run(_compare_named, 2, name, False)


class Recomputed(nn.Module):
    """Column and row layers that backward calls again, next to each other in the model."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.gate = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 36), nn.Linear(WIDTH, 36)
        self.down = nn.Linear(36, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(self.norm, x, use_reentrant=False)
        up, gate = (checkpoint(layer, h, use_reentrant=False) for layer in (self.up, self.gate))
        return checkpoint(self.down, F.silu(gate) * up, use_reentrant=False)


def test_recomputation_inside_of_forward():
    run(_compare, 2, Recomputed, Recomputed.__call__, False)


@on_ranks(2)
def test_an_exception_ends_forward(group: Any) -> None:
    torch.manual_seed(0)
    model, x = Autoencoder().double(), torch.randn(3, WIDTH, dtype=torch.float64)
    sharded = auto.apply(auto.plan(model, (x,), 2), copy.deepcopy(model), group)
    with pytest.raises(RuntimeError):
        sharded(x[:, :3])  # fails inside of forward: what comes next is not inside of it
    torch.testing.assert_close(sharded.up(x), model.up(x))
    with mock.patch.object(F, "gelu", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        sharded(x)
    torch.testing.assert_close(sharded.up(x), model.up(x))


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Autoencoder() for _ in range(10))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _compiles_layers(group: Any) -> int:
    torch.manual_seed(0)
    model, x = Layers(), torch.randn(2, 3, WIDTH)
    sharded = auto.apply(auto.plan(model, (x,), 2), model, group)
    graphs = CompileCounter()
    torch.compiler.reset()
    for layer in sharded.layers:
        layer.compile(backend=graphs)
    sharded(x)
    return graphs.frame_count


def test_equal_layers_share_what_is_compiled():
    """Dynamo gives up after eight compilations of a function: its guards must hold for every layer."""
    assert max(run(_compiles_layers, 2)) <= 2


@on_ranks(2)
def test_copies_and_files_of_a_model_convert(group: Any) -> None:
    torch.manual_seed(0)
    model = LanguageModel().double()
    sharded = auto.apply(auto.plan(model, (tokens(),), 2), copy.deepcopy(model), group)
    file = io.BytesIO()
    torch.save(sharded, file)
    file.seek(0)
    x = torch.randn(2, 6, WIDTH, dtype=torch.float64)
    for other in (copy.deepcopy(sharded), torch.load(file, weights_only=False)):
        assert type(other).__name__ == "LanguageModel" and isinstance(other.embedding, nn.Embedding)
        with torch.no_grad():
            other.head.weight.zero_()  # of its own
            torch.testing.assert_close(other.blocks[0](x), model.blocks[0](x), **close)
            torch.testing.assert_close(other.embedding(tokens()), model.embedding(tokens()), **close)
        with pytest.raises(RuntimeError, match="cannot be called so by other code"):
            other.blocks[0].attend(x)
        assert other(tokens()).abs().sum() == 0 and sharded(tokens()).abs().sum() > 0


@on_ranks(2)
def test_layers_of_its_class_and_modules_without_hooks_convert_nothing(group: Any) -> None:
    torch.manual_seed(0)
    sharded = auto.apply(auto.plan(LanguageModel(), (tokens(),), 2), LanguageModel(), group)
    down = sharded.blocks[0].mlp["down"]
    x = torch.randn(3, down.weight.shape[1])
    anew = type(down)(down.in_features, down.out_features, group=group)
    anew.load_state_dict(down.state_dict())
    # A shard as in forward, where the model's own layer takes whole tensors
    torch.testing.assert_close(anew(x), tp_ext.reduce_from_region(x @ down.weight.T, group) + down.bias)
    for module in sharded.modules():  # as in the copies by which a pipeline finds the shapes of its stages
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    sharded(tokens())


class Kinds(nn.Module):
    """Calls a module once for each of its kinds, in the order of a set."""

    def __init__(self, kinds: tuple[str, ...]) -> None:
        super().__init__()
        self.mlp, self.last = MlpOfKind(), nn.Linear(WIDTH, WIDTH)
        self.kinds = kinds

    def forward(self, x: Tensor) -> Tensor:
        results = {kind: self.mlp(x, kind) for kind in self.kinds}
        return self.last(results["wide"] + results["narrow"])


class MlpOfKind(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 36), nn.Linear(36, WIDTH)

    def forward(self, x: Tensor, kind: str) -> Tensor:
        y = self.down(F.gelu(self.up(x)))
        return y * 2 if kind == "wide" else y


def test_the_order_of_calls_with_other_options_is_no_part_of_a_plan() -> None:
    plans = [auto.plan(Kinds(kinds), (torch.randn(3, WIDTH),), 2) for kinds in (("wide", "narrow"), ("narrow", "wide"))]
    assert plans[0].shardings and plans[0].fingerprint == plans[1].fingerprint
