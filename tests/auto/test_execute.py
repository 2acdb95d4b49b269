"""Sharded models next to unsharded ones: losses, every gradient, state dicts, copies, compilation, dropout, bad
input."""

import copy
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tp_ext
from tests.auto.test_planner import EXAMPLE, VOCAB, WIDTH, Block, Model
from tests.auto.traps.run import TRAPS
from tests.helpers import ranks
from tests.helpers.on_ranks import on_ranks
from tests.helpers.ranks import run_raises
from tests.helpers.same_values import same_gradients, same_values
from tests.helpers.simulated import run
from tp_ext import auto
from tp_ext.auto.modules.logits import ShardedLogits
from tp_ext.group import parallel_group

close = {"rtol": 1e-11, "atol": 1e-12}


def _inputs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCAB, (3, 5), generator=generator)
    return {"ids": ids, "labels": ids.roll(1)}


def _pair(group: Any, model: nn.Module, example: Any, **options: Any) -> tuple[nn.Module, nn.Module]:
    """An unsharded model, and a sharded copy of it."""
    model = model.double()
    plan = auto.plan(model, example, parallel_group(group).size, **options)
    return model, auto.apply(plan, copy.deepcopy(model), group)


def _trains(group: Any) -> None:
    dense, sharded = _pair(group, Model(), EXAMPLE)
    expected, found = dense(**_inputs()), sharded(**_inputs())
    torch.testing.assert_close(found, expected, **close)
    expected.backward()
    found.backward()
    same_gradients(dense, sharded, **close)
    state = tp_ext.full_state_dict(sharded, group=group)
    assert list(sharded.state_dict()) == list(dense.state_dict())
    assert all(torch.equal(state[name], value) for name, value in dense.state_dict().items())
    assert sharded.head.weight is sharded.table.weight


@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_a_model_trains_as_unsharded(p: int) -> None:
    (ranks.run if p == 2 else run)(_trains, p)


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.up = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.attention(x, x, x, need_weights=False)[0])))


def _halve(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


@pytest.mark.parametrize(
    "attach",
    [
        pytest.param(lambda bias: bias.register_hook(torch.sign), id="on a gradient"),
        pytest.param(lambda bias: bias.register_post_accumulate_grad_hook(_halve), id="after it"),
    ],
)
@pytest.mark.parametrize("name", ["down", "attention.out_proj"])
def test_whole_biases_of_sharded_layers_keep_their_hooks(name: str, attach: Any) -> None:
    torch.manual_seed(0)
    dense, x = Pooled().double(), torch.randn(3, 4, 8, dtype=torch.float64)
    state = copy.deepcopy(dense.state_dict())
    attach(dense.get_submodule(name).bias)
    dense(x).square().sum().backward()

    def trained(group: Any) -> None:
        model = Pooled().double()
        model.load_state_dict(state)
        attach(model.get_submodule(name).bias)
        plan = auto.plan(model, (x,), 2)
        assert f"{name}.weight" in plan.shardings and f"{name}.bias" not in plan.shardings
        auto.apply(plan, model, group)(x).square().sum().backward()
        same_gradients(dense, model, **close)

    run(trained, 2)


def _layers(group: Any) -> list[str]:
    _, sharded = _pair(group, Model(), EXAMPLE)
    gathers = ShardedLogits.gathers
    with tp_ext.debug.count_collectives() as forward:
        loss = sharded(**_inputs())
    with tp_ext.debug.count_collectives() as backward:
        loss.backward()
    assert ShardedLogits.gathers == gathers
    # table, 2 per block, the loss; 2 per block, the input of the head
    return [
        f"{forward.number} {backward.number}",
        *(type(sharded.get_submodule(n)).__name__ for n in ("blocks.0.qkv", "blocks.0.down")),
    ]


def test_layers_and_collectives_are_those_of_the_plan() -> None:
    plan = auto.plan(Model(), EXAMPLE, 2)
    forward = sum(one.direction == "forward" for one in plan.collectives)
    assert run(_layers, 2)[0] == [
        f"{forward} {len(plan.collectives) - forward}",
        "EnteredColumnLinear",
        "RowParallelLinear",
    ]


def _survives(group: Any, how: str) -> None:
    dense, sharded = _pair(group, Model(), EXAMPLE)
    if how == "deepcopy":
        sharded = copy.deepcopy(sharded)
    elif how == "pickle":
        file = io.BytesIO()
        torch.save(sharded, file)
        file.seek(0)
        sharded = torch.load(file, weights_only=False)
    elif how == "compile":
        for block in sharded.blocks:
            block.compile(backend="aot_eager")
    elif how == "checkpoint":
        for block in sharded.blocks:
            plain = block.forward
            block.forward = lambda x, plain=plain: checkpoint(plain, x, use_reentrant=False)
    for model in (dense, sharded):
        model(**_inputs()).backward()
    same_gradients(dense, sharded, **close)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "compile", "checkpoint"])
def test_copies_and_wrappers_of_a_sharded_model(how: str) -> None:
    (ranks.run if how == "compile" else run)(_survives, 2, how)


class Logits(nn.Module):
    """A model whose output is logits, and code that uses them in ways that need, or do not need, all columns."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, x: Tensor, use: str = "") -> Any:
        y = self.head(self.norm(x))
        assert y.shape == (3, 5, VOCAB) == y.size() and y.numel() == 15 * VOCAB and len(y) == 3
        if use == "soft cap":
            y = 30 * torch.tanh(y.float() / 30)
        if use == "loss":
            return F.cross_entropy(y[:, :-1].reshape(-1, VOCAB), torch.arange(12) % VOCAB, ignore_index=3)
        if use == "sum":
            return F.cross_entropy(y.flatten(0, 1), torch.arange(15), reduction="sum", label_smoothing=0.1)
        if use == "argmax":
            return y.argmax(-1)
        if use == "softmax":  # pins the vocabulary: the head is whole
            return y.softmax(-1)
        if use == "unplanned":
            return y.topk(2, -1).values
        return y


def _uses(group: Any, use: str) -> int:
    x = torch.randn(3, 5, WIDTH, dtype=torch.float64)
    dense, sharded = _pair(group, Logits(), {"x": x, "use": "" if use == "unplanned" else use})
    gathers = ShardedLogits.gathers
    expected, found = dense(x, use), sharded(x, use)
    assert type(found) is Tensor
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)  # .float() inside
    if expected.is_floating_point():
        (expected.double().pow(2).mean()).backward()
        found.double().pow(2).mean().backward()
        for a, b in zip(tp_ext.full_state_dict(sharded, group=group).items(), dense.state_dict().items(), strict=True):
            assert a[0] == b[0] and torch.equal(a[1], b[1])
        same_gradients(dense, sharded, rtol=1e-5, atol=1e-6)
    return ShardedLogits.gathers - gathers


@pytest.mark.parametrize(
    ("use", "gathers"),
    [("", 1), ("soft cap", 1), ("loss", 0), ("sum", 0), ("argmax", 0), ("softmax", 0), ("unplanned", 1)],
)
def test_logits_are_gathered_only_where_a_use_needs_all_columns(use: str, gathers: int) -> None:
    assert ranks.run(_uses, 3, use) == [gathers] * 3  # a number of the process


class Dropping(Block):
    """Dropout of a module, of a function, and of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (
            part.view(b, t, self.heads, -1).transpose(1, 2) for part in self.qkv(self.ln(x)).split(self.width, -1)
        )
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.2 if self.training else 0.0)
        x = x + self.drop(self.out(a.transpose(1, 2).reshape(b, t, self.width)))
        return x + self.down(F.dropout(F.gelu(self.up(x)), 0.4, self.training))


def _dropped(group: Any) -> Any:
    torch.manual_seed(0)
    model = Dropping().double()
    x = torch.randn(3, 5, WIDTH, dtype=torch.float64)
    sharded = auto.apply(auto.plan(model, (x,), parallel_group(group).size), model, group)
    tp_ext.manual_seed(7)
    y = sharded(x)
    y.pow(2).mean().backward()
    return y.detach(), tp_ext.full_state_dict(sharded, group=group)["up.weight"], sharded.ln.weight.grad


def test_dropout_has_the_masks_of_one_process() -> None:
    model, x = Dropping(), torch.randn(3, 5, WIDTH)
    draws = auto.plan(model, (x,), 2).draws
    assert [(one.module, one.call, one.dim) for one in draws] == [
        ("", "scaled_dot_product_attention", 1), ("", "dropout", 2), ("drop", "dropout", None),
    ]  # fmt: skip
    two, three, alone = run(_dropped, 2), run(_dropped, 3), run(_dropped, 1)
    for other in (three[1], alone[0]):
        for first, found in zip(two[0], other, strict=True):
            torch.testing.assert_close(first, found, **close)
    assert (two[0][0] == two[1][0]).all() and two[0][0].std() > 0.5


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 3 * super().forward(x)


class ScaledTable(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return 2 * super().forward(ids)


class OwnLookup(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


class Unusual(nn.Module):
    """Subclasses with forwards of their own, and one layer under two names, of which the second is called."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = ScaledTable(VOCAB, WIDTH, padding_idx=3), nn.LayerNorm(WIDTH)
        self.up, self.down = Scaled(WIDTH, 24), Scaled(24, WIDTH)
        self.first = nn.Linear(WIDTH, 48)
        self.second = self.first
        self.last, self.end = nn.Linear(48, WIDTH), nn.LayerNorm(WIDTH)
        self.own, self.positions = OwnLookup(VOCAB, WIDTH), nn.Parameter(torch.randn(8, WIDTH))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.table(ids) + self.own(ids) + self.positions[: ids.shape[1]])
        x = x + self.down(F.relu(self.up(x)))
        return self.end(x + self.last(F.relu(self.second(x))))


def _unusual(group: Any) -> list[str]:
    ids = _inputs()["ids"]
    dense, sharded = _pair(group, Unusual(), (ids,))
    for model in (dense, sharded):
        (model(ids) ** 3).mean().backward()
    same_gradients(dense, sharded, **close)
    assert sharded.first is sharded.second
    found = [sharded.up, sharded.down, sharded.first, sharded.table, sharded.own]
    return [f"{type(module).__name__} {tuple(module.weight.shape)}" for module in found]


def test_forwards_of_subclasses_are_kept() -> None:
    kinds = [
        "Scaled (12, 64)",
        "Scaled (64, 12)",
        "ColumnParallelLinear (24, 64)",
        "ScaledTable (48, 64)",
        "OwnLookup (96, 64)",
    ]
    assert run(_unusual, 2) == [kinds] * 2


@on_ranks(2)
def test_verify_passes_a_right_plan(group: Any) -> None:
    model = Model().double()
    plan = auto.plan(model, EXAMPLE, 2)
    auto.apply(plan, model, group, verify=True, example=_inputs())
    assert model.head.weight.grad is None


def _refused(group: Any, how: str) -> None:
    model = Model()
    plan = auto.plan(model, EXAMPLE, 3 if how == "ranks" else 2)
    if how == "plan differs" and parallel_group(group).rank:
        plan = auto.plan(model, EXAMPLE, 2, hints={"blocks.0": "whole"})
    if how == "model differs" and parallel_group(group).rank:
        model.blocks[0].qkv.weight.requires_grad_(False)
    if how == "shape" or (how == "shape of rank 1" and parallel_group(group).rank):
        model.blocks[1].up = nn.Linear(WIDTH, 5)
    if how == "name":
        model.more = nn.Linear(2, 2)
    if how == "twice":
        auto.apply(plan, model, group)
    auto.apply(plan, model, group, verify=how == "example")


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("ranks", "plan: is for p = 3 and must be for the 2 ranks"),
        ("plan differs", "plan: that of rank 1 differs from that of rank 0"),
        ("model differs", "model: that of rank 1 differs from that of rank 0"),
        ("shape", r"model: blocks.1.up.weight has shape \(5, 64\) and must have \(112, 64\)"),
        ("shape of rank 1", r"model: blocks.1.up.weight has shape \(5, 64\)"),
        ("twice", "model: Model is sharded by a plan and must not be sharded again"),
        ("name", "model: more.bias is no parameter of the planned model"),
        ("example", "example: None must be the arguments of forward"),
    ],
)
def test_refusals_are_the_same_on_all_ranks(how: str, words: str) -> None:
    run_raises(_refused, 2, ValueError, words, how, in_turns=False)


class Patches(nn.Module):
    """A linear layer over patches of images; a convolution wants its input in the type of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.up = nn.Conv1d(3, WIDTH, 4, 4), nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.patches(x).transpose(1, 2))))


def _converted(group: Any, plan: auto.Plan, dtype: torch.dtype, applied_first: bool) -> None:
    model = Patches() if applied_first else Patches().to(dtype)
    dense = copy.deepcopy(model).to(dtype)
    sharded = auto.apply(plan, model, group).to(dtype)
    for batch in (3, 1):  # the second is new to the plan: its code is compared, on fakes of these types
        x = torch.randn(batch, 3, 20, dtype=dtype)
        expected = dense(x)
        bound = 4 * torch.finfo(dtype).eps * float(expected.abs().max())  # sums have another order
        torch.testing.assert_close(sharded(x), expected, rtol=0, atol=bound)


@pytest.mark.parametrize("applied_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_planned_model_can_be_converted(dtype: torch.dtype, applied_first: bool) -> None:
    """Its floating-point inputs are then of the new type, in all that is run on fakes."""
    plan = auto.plan(Patches(), {"x": torch.randn(3, 3, 20)}, 2)
    run(_converted, 2, plan, dtype, applied_first)


def _called(group: Any, plan: auto.Plan, by_name: bool) -> None:
    dense = Patches().double()
    sharded = auto.apply(plan, copy.deepcopy(dense), group)
    for batch in (3, 1):
        x = torch.randn(batch, 3, 20, dtype=torch.float64)
        same_values(dense, sharded, () if by_name else (x,), {"x": x} if by_name else {})


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("planned_by_name", [False, True])
def test_arguments_by_position_and_by_name(planned_by_name: bool, by_name: bool) -> None:
    """The gradient of the model's input is summed however the argument is passed."""
    x = torch.randn(3, 3, 20, dtype=torch.float64, requires_grad=True)
    plan = auto.plan(Patches().double(), {"x": x} if planned_by_name else (x,), 2)
    assert any(edit.at == "argument" and not edit.module for edit in plan.copies)
    run(_called, 2, plan, by_name)


def _evaluates(group: Any, plan: auto.Plan, planned: bool) -> None:
    dense = TRAPS["written_ResNet"].make().double().train(not planned)
    sharded = auto.apply(plan, copy.deepcopy(dense), group)
    assert [module.training for module in sharded.modules()] == [module.training for module in dense.modules()]
    for mode in (sharded.training, not sharded.training):
        x = torch.randn(4, 3, 8, 8, dtype=torch.float64)
        torch.testing.assert_close(sharded.train(mode)(x), dense.train(mode)(x), **close)


@pytest.mark.parametrize("planned", [False, True])
def test_a_plan_of_one_mode_serves_the_other(planned: bool) -> None:
    """Batch norms make other calls in eval mode; the proof by values ran both."""
    plan = auto.plan(TRAPS["written_ResNet"].make().double().train(planned), (torch.randn(3, 3, 8, 8).double(),), 2)
    assert plan.shardings
    run(_evaluates, 2, plan, planned)


@on_ranks(2)
def test_a_model_on_meta_stays_there(group: Any) -> None:
    with torch.device("meta"):
        model = Model()
    sharded = auto.apply(auto.plan(model, EXAMPLE, 2), model, group)
    assert all(p.is_meta for p in sharded.parameters())
    assert sharded.blocks[0].qkv.weight.shape == (3 * WIDTH // 2, WIDTH)
    dense = Model()
    sharded.to_empty(device="cpu")
    sharded.head.weight = sharded.table.weight  # to_empty unties, as in torch
    tp_ext.load_full_state_dict(sharded, dense.state_dict(), group=group)
    torch.testing.assert_close(sharded(**_inputs()), dense(**_inputs()))
