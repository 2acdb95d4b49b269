"""Sequence parallelism of unchanged models: what is sharded on its tokens, with which collectives, that training is
that of the unsharded model, and what is refused."""

import copy
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tp_ext
from tests.auto.architectures import build
from tests.auto.compare import EXACT, compare_model, loss_or_squares, only_doubles
from tests.auto.test_execute import close
from tests.auto.test_planner import EXAMPLE, Model
from tests.helpers.on_ranks import on_ranks
from tests.helpers.ranks import run_raises
from tests.helpers.same_values import same_gradients
from tests.helpers.simulated import run
from tp_ext import auto
from tp_ext.conversions import I, P, R, S
from tp_ext.group import parallel_group

VOCAB, WIDTH, HEADS, INNER = 96, 64, 4, 112


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads, self.width = HEADS, WIDTH
        self.qkv, self.out, self.drop = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(x).split(self.width, -1))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1 if self.training else 0.0)
        return self.drop(self.out(a.transpose(1, 2).reshape(b, t, self.width)))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.down(F.gelu(self.up(x))), 0.2, self.training)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln1, self.attn, self.ln2, self.mlp = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH), Mlp()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.scale * self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class Gpt(nn.Module):
    """As nanoGPT: learned positions, dropout, attention in a module of its own; its table is the head's."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.positions, self.drop = nn.Embedding(VOCAB, WIDTH), nn.Embedding(16, WIDTH), nn.Dropout(0.1)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.table.weight
        self.recompute: Any = None

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.drop(self.table(ids) + self.positions(torch.arange(ids.shape[1])))
        for layer in self.layers:
            x = layer(x) if self.recompute is None else checkpoint(layer, x, use_reentrant=self.recompute)
        logits = self.head(self.norm(x))
        return logits if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _inputs(tokens: int = 5) -> dict[str, Tensor]:
    ids = torch.randint(VOCAB, (3, tokens), generator=torch.Generator().manual_seed(tokens))
    return {"ids": ids, "labels": ids.roll(1)}


def _sharded(group: Any, dense: nn.Module, tokens: int = 5, **options: Any) -> nn.Module:
    options.setdefault("sequence_parallel", True)
    plan = auto.plan(dense, _inputs(tokens), parallel_group(group).size, **options)
    return auto.apply(plan, copy.deepcopy(dense), group)


# ---------------------------------------------------------------- plans


def test_what_is_sharded_on_its_tokens() -> None:
    plan = auto.plan(Gpt(), _inputs(), 2, sequence_parallel=True)
    found = {(edit.types, edit.module, edit.at, edit.dim) for edit in plan.tokens if edit.types != (S, S)}
    layers = {
        (types, f"layers.{i}.{name}", "output", 1)
        for i in range(2)
        for types, name in (((P, S), "attn.out"), ((P, S), "mlp.down"), ((S, R), "ln1"), ((S, R), "ln2"))
    }  # fmt: skip
    assert found == layers | {
        ((P, S), "table", "output", 1),
        ((I, S), "positions", "output", 0),
        ((S, R), "norm", "output", 1),
    }
    assert [(one.module, one.dim, one.tokens) for one in plan.draws if one.tokens][:2] == [
        ("drop", 1, True), ("layers.0.attn.drop", 1, True),
    ]  # fmt: skip
    parameters = {f"{one.module}.{one.path[0]}" for one in plan.copies if one.tokens}
    assert {"layers.0.ln1.weight", "layers.1.scale", "norm.bias"} <= parameters
    assert "sequence parallel: reduce-scatter after" in str(plan) and "layers.*.attn.out" in str(plan)
    assert plan.why("layers.0.attn.out") == "the result of layers.0.attn.out is sharded on its tokens"
    assert {one.state for one in plan.outputs if one.module in ("layers.0", "drop", "layers.1.ln2")} == {
        "sharded", "replicated",
    }  # fmt: skip


def test_a_plan_survives_json_and_shows_its_boundaries(tmp_path: Any) -> None:
    plan = auto.plan(Gpt(), _inputs(), 2, sequence_parallel=True)
    plan.save(tmp_path / "plan.json")
    assert auto.Plan.load(tmp_path / "plan.json") == plan
    assert plan.fingerprint != auto.plan(Gpt(), _inputs(), 2).fingerprint
    plan.draw(tmp_path / "layer.svg", "layers.0")
    text = (tmp_path / "layer.svg").read_text()
    assert text.count("reduce-scatter of the sum over tokens") == 2 and text.count("all-gather of the tokens") == 2
    assert "all-reduce of the sum" not in text


def test_auto_shards_where_no_more_is_communicated() -> None:
    assert auto.plan(Gpt(), _inputs(), 2, sequence_parallel="auto").tokens
    one = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8), nn.LayerNorm(8))
    x = (torch.zeros(3, 5, 8),)
    forced, plan = (auto.plan(one, x, 2, sequence_parallel=how) for how in (True, "auto"))
    # the model returns what is sharded: the gather comes on top of the two halves of the all-reduce
    assert forced.tokens and {edit.types for edit in forced.tokens if edit.types != (S, S)} == {(P, S), (S, I)}
    assert plan.tokens == [] and plan.collectives == auto.plan(one, x, 2).collectives
    assert "would grow from" in plan.why("the model") and "all tokens in the result of the model" in str(plan)


def test_what_cannot_be_sharded_says_why() -> None:
    words = r"after table: it is used whole at once: the code needs all tokens: blocks\.0: "
    with pytest.raises(ValueError, match="sequence_parallel: True must be possible somewhere, and is not: " + words):
        auto.plan(Model(), EXAMPLE, 2, sequence_parallel=True)
    plan = auto.plan(Model(), EXAMPLE, 2, sequence_parallel="auto")
    assert plan.tokens == [] and "has all tokens" in plan.why("blocks.0.out")
    assert plan.collectives == auto.plan(Model(), EXAMPLE, 2).collectives
    with pytest.raises(ValueError, match=r"has no dim of 8 or more tokens"):
        auto.plan(Gpt(), _inputs(), 8, sequence_parallel=True)
    with pytest.raises(ValueError, match="sequence_parallel: 'yes' must be False, True or 'auto'"):
        auto.plan(Gpt(), _inputs(), 2, sequence_parallel="yes")
    assert auto.plan(Gpt(), _inputs(), 1, sequence_parallel=True).tokens == []


def test_code_that_reads_the_length_of_shards_moves_the_boundary() -> None:
    model, inputs = build("llama")
    plan = auto.plan(model, inputs, 2, sequence_parallel=True)
    assert "arange" in plan.why("model.embed_tokens") and "model.embed_tokens" in plan.whole_tokens
    assert ((I, S), "model.layers.0", "argument") in {(edit.types, edit.module, edit.at) for edit in plan.tokens}
    assert ((I, S), "model.layers.1", "argument") not in {(edit.types, edit.module, edit.at) for edit in plan.tokens}
    assert {edit.module for edit in plan.tokens if edit.types == (S, R)} >= {"lm_head"}


# ---------------------------------------------------------------- training


def _trains(group: Any, name: str) -> tuple[float, str]:
    torch.manual_seed(0)
    model, inputs = (Gpt().eval(), _inputs()) if name == "own" else build(name)
    result = compare_model(group, name, model.double(), inputs, sequence_parallel=True)
    return result.error, result.status


@pytest.mark.parametrize(
    ("name", "p"),
    [
        ("own", 2),
        ("own", 4),
        ("t5", 2),
        pytest.param("t5", 4, marks=pytest.mark.exhaustive),
        ("llama", 4),
        ("gpt2", 2),
        ("qwen3", 2),
        ("bert-mlm", 2),
        ("vit", 2),
    ],
)
def test_it_trains_as_unsharded(name: str, p: int) -> None:
    with only_doubles():  # 5 tokens on 2 and on 4 ranks: uneven shards
        for error, status in run(_trains, p, name):
            assert error <= EXACT and status.startswith("works"), status


@on_ranks(4)
def test_lengths_are_those_of_the_run(group: Any) -> None:
    dense = Gpt().double().eval()
    sharded = _sharded(group, dense)
    for tokens in (6, 9, 3, 2, 1):  # 4 ranks: fewer than 4 tokens stay whole
        for model in (dense, sharded):
            model.zero_grad()
        with tp_ext.debug.count_collectives() as counts:
            expected, found = dense(**_inputs(tokens)), sharded(**_inputs(tokens))
        assert ("reduce_scatter" in counts.by_kind()) == (tokens >= 4)
        torch.testing.assert_close(found, expected, **close)
        expected.backward()
        found.backward()
        same_gradients(dense, sharded, **close)
    with torch.no_grad(), tp_ext.debug.count_collectives() as counts:  # as it generates
        torch.testing.assert_close(sharded(_inputs(7)["ids"]), dense(_inputs(7)["ids"]), **close)
    assert "reduce_scatter" not in counts.by_kind()


def _dropped(group: Any, sequence_parallel: bool) -> Any:
    torch.manual_seed(0)
    sharded = _sharded(group, Gpt().double(), sequence_parallel=sequence_parallel)
    tp_ext.manual_seed(7)
    loss = sharded(**_inputs())
    loss.backward()
    state = {name: p.grad for name, p in sharded.named_parameters()}
    return loss.item(), state["layers.0.ln1.weight"], state["layers.1.scale"], state["positions.weight"]


def test_dropout_has_the_masks_of_one_process() -> None:
    whole, two, three = run(_dropped, 2, False)[0], run(_dropped, 2, True), run(_dropped, 3, True)
    for found in (*two, *three):
        for one, other in zip(whole, found, strict=True):
            torch.testing.assert_close(one, other, **close)


def _counted(group: Any, name: str) -> tuple[list[tuple[str, int, int]], list[tuple[str, int, int]]]:
    torch.manual_seed(0)
    model, inputs = (Gpt().eval(), _inputs(6)) if name == "own" else build(name)
    inputs = {key: torch.cat([value, value], 1) if name != "own" else value for key, value in inputs.items()}
    plan = auto.plan(model, inputs, parallel_group(group).size, sequence_parallel=True)
    sharded = auto.apply(plan, model, group)
    sharded(**inputs)  # the first compares the ids of the ranks
    with tp_ext.debug.count_collectives() as forward:
        found = sharded(**inputs)
    with tp_ext.debug.count_collectives() as backward:
        (found if isinstance(found, Tensor) else found.loss).backward()
    counted, planned = [], []
    for direction, counts in (("forward", forward), ("backward", backward)):
        counted += [(f"{direction} {row.kind}", row.payload) for row in counts.rows for _ in range(row.number)]
        planned += [
            (f"{direction} {one.kind.replace('-', '_')}", one.bytes)
            for one in plan.collectives
            if one.direction == direction
        ]
    return sorted(counted), sorted(planned)


@pytest.mark.parametrize("name", ["own", "llama", "gpt2"])
def test_collectives_are_those_of_the_plan_to_the_byte(name: str) -> None:
    counted, planned = run(_counted, 2, name)[0]
    assert counted == planned
    assert sum(kind == "forward reduce_scatter" for kind, _ in counted) >= 4


def _saved(group: Any, sequence_parallel: bool) -> int:
    sharded = _sharded(group, Gpt(), 8, sequence_parallel=sequence_parallel)
    saved: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return x

    kept = {p.untyped_storage().data_ptr() for p in sharded.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = sharded(**_inputs(8))
    assert loss.requires_grad
    return sum(size for pointer, size in saved.items() if pointer not in kept)


def test_fewer_bytes_are_saved_for_backward() -> None:
    without, with_ = run(_saved, 2, False)[0], run(_saved, 2, True)[0]
    assert with_ < 0.85 * without, (without, with_)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "compile", "checkpoint", "reentrant checkpoint"])
@on_ranks(2)
def test_copies_and_wrappers(group: Any, how: str) -> None:
    dense = Gpt().double().eval()
    sharded = _sharded(group, dense)
    if how == "deepcopy":
        sharded = copy.deepcopy(sharded)
    elif how == "pickle":
        file = io.BytesIO()
        torch.save(sharded, file)
        file.seek(0)
        sharded = torch.load(file, weights_only=False)
    elif how == "compile":
        for layer in sharded.layers:
            layer.compile(backend="aot_eager")
    else:
        sharded.recompute = how == "reentrant checkpoint"
    # Two lengths before backward: a recomputation must not take that of the last forward
    (dense(**_inputs(5)) + dense(**_inputs(7)) + dense(**_inputs(1))).backward()
    (sharded(**_inputs(5)) + sharded(**_inputs(7)) + sharded(**_inputs(1))).backward()
    same_gradients(dense, sharded, **close)


def _recomputes_compiled(group: Any) -> None:
    sharded = _sharded(group, Gpt().eval())
    sharded.recompute = False
    for layer in sharded.layers:
        layer.compile(backend="aot_eager")
    sharded(**_inputs()).backward()


def test_recomputation_of_compiled_blocks_is_refused() -> None:
    words = "recomputed in backward from arguments that its forward did not have"
    run_raises(_recomputes_compiled, 2, RuntimeError, words, in_turns=False)


@on_ranks(2)
def test_parts_of_a_model_have_all_tokens(group: Any) -> None:
    dense = Gpt().double().eval()
    sharded = _sharded(group, dense)
    x = torch.randn(3, 5, WIDTH, dtype=torch.float64)
    for _ in range(2):  # a part that is called by itself has all tokens, also after a forward
        torch.testing.assert_close(sharded.layers[1](x), dense.layers[1](x), **close)
        sharded(**_inputs()).backward()


@on_ranks(2)
def test_verify_and_hints(group: Any) -> None:
    dense = Gpt().double()
    plan = auto.plan(dense, _inputs(), 2, sequence_parallel=True, hints={"layers.0.mlp": "whole"})
    assert "layers.0.mlp.down" not in {edit.module for edit in plan.tokens if edit.types == (P, S)}
    auto.apply(plan, dense.eval(), group, verify=True, example=_inputs())


class Adapted(nn.Module):
    """A linear layer and its adapter, in plain torch."""

    def __init__(self, base: nn.Module, r: int, scaling: float) -> None:
        super().__init__()
        self.base_layer, self.scaling = base.requires_grad_(False), scaling
        self.lora_A = nn.Linear(base.in_features, r, bias=False)
        self.lora_B = nn.Linear(r, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.scaling * self.lora_B(self.lora_A(x))


def _adapters(group: Any, name: str, targets: list[str]) -> None:
    torch.manual_seed(0)
    dense, inputs = (Gpt().eval(), _inputs()) if name == "own" else build(name)
    dense = dense.double()
    plan = auto.plan(dense, inputs, parallel_group(group).size, sequence_parallel=True)
    sharded = auto.apply(plan, copy.deepcopy(dense), group)
    for layer in tp_ext.add_lora(sharded, r=3, alpha=6, targets=targets, freeze=False):
        dense.set_submodule(layer, Adapted(dense.get_submodule(layer), 3, 2.0))
    layouts = dict(tp_ext.layouts(sharded))
    for parameter_name, parameter in sharded.named_parameters():
        if "lora_B" in parameter_name:  # zeros would hide errors
            layout = layouts[parameter_name] or tp_ext.Layout()
            full = torch.randn(layout.full_shape(parameter.shape), dtype=torch.float64)
            parameter.data = layout.shard(full)
    dense.double().load_state_dict(tp_ext.full_state_dict(sharded, group=group))
    for length in (5, 1) if name == "own" else (5,):  # one token stays whole; transformers' loss is of the next one
        given = inputs if length == 5 else _inputs(length)
        with tp_ext.debug.count_collectives() as counts:
            losses = [loss_or_squares(model(**given)) for model in (dense, sharded)]
        assert ("reduce_scatter" in counts.by_kind()) == (length > 1)
        torch.testing.assert_close(*losses, **close)
        for loss in losses:
            loss.backward()
    same_gradients(dense, sharded, **close)
    tp_ext.merge_lora(sharded)
    torch.testing.assert_close(
        loss_or_squares(sharded(**inputs)),
        loss_or_squares(dense(**inputs)),
        **close,
    )


@pytest.mark.parametrize(
    ("name", "p", "targets"),
    [("own", 3, ["qkv", "out", "up", "down"]), ("llama", 2, ["?_proj", "up_proj", "down_proj"])],
)
def test_adapters(name: str, p: int, targets: list[str]) -> None:
    with only_doubles():
        run(_adapters, p, name, targets)


def _adapter_of_a_head(group: Any) -> None:
    model, inputs = build("llama")
    sharded = auto.apply(auto.plan(model, inputs, 2, sequence_parallel=True), model, group)
    tp_ext.add_lora(sharded, r=2, alpha=1, targets="lm_head")


def test_an_adapter_of_a_layer_that_gathers_tokens_is_refused() -> None:
    words = "lm_head: gathers tokens itself, by a plan; plan with sequence_parallel=False for its adapter"
    run_raises(_adapter_of_a_head, 2, ValueError, words, in_turns=False)
