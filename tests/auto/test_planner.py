"""Plans: what is derived without an annotation, hints, constraints, rules of one's own, and what is refused with which
words."""

import itertools
import random
import sys
from types import FrameType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.auto.architectures import build
from tp_ext import P, Part, Sharding, auto
from tp_ext.auto.record.dims import atoms
from tp_ext.auto.search.choose import heaviest

WIDTH, HEADS, INNER, VOCAB = 64, 4, 112, 96


class Block(nn.Module):
    """Attention with fused q, k, v and an MLP, as in nanoGPT; its heads are an integer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.width = HEADS, WIDTH
        self.ln = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (
            part.view(b, t, self.heads, -1).transpose(1, 2) for part in self.qkv(self.ln(x)).split(self.width, -1)
        )
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(b, t, self.width))
        hidden = self.up(x)
        if self.spec is not None:
            hidden = auto.constraint(hidden, self.spec)
        return x + self.down(F.gelu(hidden))

    spec: P | None = None


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


EXAMPLE = {"ids": torch.zeros(3, 5, dtype=torch.long), "labels": torch.zeros(3, 5, dtype=torch.long)}


def _meta() -> Model:
    with torch.device("meta"):
        return Model()


def test_megatrons_plan_is_derived() -> None:
    plan = auto.plan(_meta(), EXAMPLE, 2)
    qkv = Sharding(0, [Part(WIDTH, unit=WIDTH // HEADS)] * 3)
    vocab = Sharding(0, [VOCAB])
    for i in range(2):
        assert plan.shardings[f"blocks.{i}.qkv.weight"] == qkv == plan.shardings[f"blocks.{i}.qkv.bias"]
        assert plan.shardings[f"blocks.{i}.out.weight"] == Sharding(1, [Part(WIDTH, unit=WIDTH // HEADS)])
        assert plan.shardings[f"blocks.{i}.up.bias"] == Sharding(0, [INNER])
        assert plan.patches[f"blocks.{i}"] == {"width": (64, 32), "heads": (4, 2)}
    assert plan.shardings["table.weight"] == vocab == plan.shardings["head.weight"]
    assert plan.tied == [["table.weight", "head.weight"]] and plan.heads == ["head"]
    assert plan.roles["table"] == "vocab" and plan.roles["blocks.0.down"] == "row"
    kinds = [(one.direction, one.kind) for one in plan.collectives]
    # 2 per block, the table, numbers of each row of the loss; 2 per block, the input of the head
    assert kinds.count(("forward", "all-reduce")) == 5 and kinds.count(("forward", "all-gather")) == 1
    assert kinds.count(("backward", "all-reduce")) == 5
    assert plan.collectives[0].bytes == 3 * 5 * WIDTH * 4


def test_uneven_heads_are_patched_by_rank() -> None:
    plan = auto.plan(_meta(), EXAMPLE, 3)
    assert plan.patches["blocks.0"] == {"width": (64, (32, 16, 16)), "heads": (4, (2, 1, 1))}


def test_what_is_whole_says_why() -> None:
    plan = auto.plan(_meta(), EXAMPLE, 2)
    assert "pinned by native_layer_norm in blocks.0.ln (test_planner.py:" in plan.whole["blocks.1.out.bias"]
    assert "is whole: dim 0 (64)" in plan.why("norm.weight")
    assert "is sharded on dim 0, in 64 by 16, 64 by 16, 64 by 16: 96 per rank (column)" in plan.why(
        "blocks.0.qkv.weight"
    )
    with pytest.raises(ValueError, match="name: 'nothing' must be a parameter"):
        plan.why("nothing")


def test_the_table_folds_equal_layers() -> None:
    text = str(auto.plan(_meta(), EXAMPLE, 2))
    assert "blocks.*.qkv.weight (x2)" in text and "column" in text
    assert "6 forward" in text and "5 backward" in text and "patched in blocks.*: heads 4 -> 2, width 64 -> 32" in text


def test_a_plan_is_the_same_in_every_process_and_survives_json(tmp_path: Any) -> None:
    plan = auto.plan(_meta(), EXAMPLE, 3)
    plan.save(tmp_path / "plan.json")
    loaded = auto.Plan.load(tmp_path / "plan.json")
    assert loaded == plan and loaded.fingerprint == plan.fingerprint == auto.plan(Model(), EXAMPLE, 3).fingerprint
    assert auto.plan(_meta(), EXAMPLE, 2).fingerprint != plan.fingerprint
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match="must be a plan of version"):
        auto.Plan.load(tmp_path / "other.json")


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3_text", "mixtral"])
def test_the_plan_is_that_of_transformers_where_it_has_one(name: str) -> None:
    model, inputs = build(name)
    differences = auto.plan(model, inputs, 2).compare(model.config.base_model_tp_plan)
    # theirs shards neither the table nor the head; the norms of q and k need no entry here
    left = [line for line in differences if not line.startswith(("model.embed_tokens", "lm_head"))]
    assert all("experts" in line or "_norm" in line for line in left), differences


def test_hints() -> None:
    plan = auto.plan(_meta(), EXAMPLE, 2, hints={"blocks.0.up.weight": "whole", "blocks.*.qkv": "sharded"})
    assert not any(name.startswith(("blocks.0.up", "blocks.0.down")) for name in plan.shardings)
    assert "blocks.1.up.weight" in plan.shardings and plan.whole["blocks.0.up.weight"] == "dim 0: hints; dim 1: hints"
    assert (
        auto.plan(_meta(), EXAMPLE, 2, hints={"*": "whole", "head.weight": P("tp")}).roles == {}
    )  # tied: "whole" wins
    for hints, words in {
        "blocks.0.ln": "blocks.0.ln.weight cannot be sharded: dim 0 .64. is pinned by native_layer_norm",
        "layers.*": "must fit a parameter",
    }.items():
        with pytest.raises(ValueError, match=words):
            auto.plan(_meta(), EXAMPLE, 2, hints={hints: "sharded"})
    with pytest.raises(ValueError, match="'head' is 'half' and must be 'whole', 'sharded' or a P"):
        auto.plan(_meta(), EXAMPLE, 2, hints={"head": "half"})
    with pytest.raises(ValueError, match="must name one axis at most"):
        auto.plan(_meta(), EXAMPLE, 2, hints={"head": P("x", "y")})


def test_a_partition_spec_as_a_hint() -> None:
    wide = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16), nn.LayerNorm(16))
    x = (torch.zeros(3, 8),)
    assert auto.plan(wide, x, 2).shardings["2.weight"].dim == 0  # 2 and 4 are the most bytes
    plan = auto.plan(wide, x, 2, hints={"2.weight": P(None, "tp")})
    assert plan.shardings["2.weight"].dim == 1 and "0.weight" in plan.shardings
    assert plan.shardings["4.weight"].dim == 0  # its norm sums over the ranks
    assert "2.bias" in plan.whole  # its dim is that of the weight's other dim


def test_constraints_hold_or_say_what_conflicts() -> None:
    def with_spec(spec: P) -> Model:
        model = _meta()
        for block in model.blocks:
            block.spec = spec
        return model

    assert auto.plan(with_spec(P(None, None, "tp")), EXAMPLE, 2) == auto.plan(_meta(), EXAMPLE, 2)
    plan = auto.plan(with_spec(P()), EXAMPLE, 2)
    assert "constraint P() in blocks.0 (test_planner.py:" in plan.whole["blocks.0.up.weight"]
    with pytest.raises(
        ValueError, match=r"constraint P\('tp'\) in blocks.0 .*: a dim of 3 .*pinned by a dim of the input"
    ):
        auto.plan(with_spec(P("tp")), EXAMPLE, 2)
    x = torch.zeros(2, 3)
    assert auto.constraint(x, P("tp")) is x
    for spec, words in ((P(None, None, "tp"), "at most the 2 dims"), (P("x", "y"), "one axis at most")):
        with pytest.raises(ValueError, match=words):
            auto.constraint(x, spec)
    with pytest.raises(TypeError, match="must be a P"):
        auto.constraint(x, ("tp",))  # type: ignore[arg-type]


def test_memory_budget() -> None:
    layers = [
        nn.Embedding(8, 64),
        nn.LayerNorm(64),
        nn.Linear(64, 2048),
        nn.ReLU(),
        nn.Linear(2048, 64),
        nn.LayerNorm(64),
    ]
    model, ids = nn.Sequential(*layers), (torch.zeros(3, dtype=torch.long),)
    plan = auto.plan(model, ids, 2)
    assert "0.weight" in plan.whole  # a small table: its all-reduce costs more than its bytes are worth
    assert "0.weight" in auto.plan(model, ids, 2, memory_budget=plan.parameter_bytes(0) - 1).shardings
    with pytest.raises(ValueError, match="memory_budget: 100 bytes must be at least"):
        auto.plan(model, ids, 2, memory_budget=100)


def test_strict() -> None:
    pinned = nn.Sequential(nn.Softmax(-1), nn.Linear(256, 256), nn.Softmax(-1))
    x = (torch.zeros(3, 256),)
    assert not auto.plan(pinned, x, 2).shardings
    with pytest.raises(
        ValueError, match=r"strict: 1.weight, 100% of all parameter bytes, stays whole: dim 0 .256. is pinned"
    ):
        auto.plan(pinned, x, 2, strict=True)


@torch.library.custom_op("tp_ext_tests::scaled", mutates_args=())
def scaled(x: Tensor, w: Tensor) -> Tensor:
    return x * w


@scaled.register_fake
def _(x: Tensor, w: Tensor) -> Tensor:
    return torch.empty_like(x)


class WithOwnOperator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.scale = nn.Linear(8, 16), nn.Parameter(torch.ones(16))
        self.down, self.norm = nn.Linear(16, 8), nn.Softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.down(scaled(self.up(x), self.scale)))


def test_rules_of_ones_own() -> None:
    x = (torch.zeros(3, 8),)
    plan = auto.plan(WithOwnOperator(), x, 2)
    assert not plan.shardings
    assert "by no rule for tp_ext_tests::scaled (rules= takes one) (test_planner.py:" in plan.whole["up.weight"]
    plan = auto.plan(WithOwnOperator(), x, 2, rules={"tp_ext_tests::scaled": "* h, h -> * h"})
    assert set(plan.shardings) == {"up.weight", "up.bias", "scale", "down.weight"}
    with pytest.raises(ValueError, match="rules: 'a b -> a b' must fit tp_ext_tests::scaled"):
        auto.plan(WithOwnOperator(), x, 2, rules={"tp_ext_tests::scaled": "a b -> a b"})
    with pytest.raises(ValueError, match="must have one '->'"):
        auto.plan(WithOwnOperator(), x, 2, rules={"tp_ext_tests::scaled": "a b"})


class Branching(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() > 0 else x


def test_refusals() -> None:
    with pytest.raises(ValueError, match="forward branches on values of tensors"):
        auto.plan(nn.Sequential(nn.Linear(4, 4), Branching(4, 4)), (torch.zeros(3, 4),), 2)
    with pytest.raises(TypeError, match="example: Tensor must be a dict of keyword arguments or a tuple"):
        auto.plan(nn.Linear(4, 4), torch.zeros(3, 4), 2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="p: 0 must be an integer of at least 1"):
        auto.plan(nn.Linear(4, 4), (torch.zeros(3, 4),), 0)


def test_sizes_taken_from_replicated_inputs_are_changed_in_the_calls() -> None:
    class FromInput(Block):
        def forward(self, x: Tensor) -> Tensor:
            b, t, width = x.shape
            heads = (part.view(b, t, self.heads, -1).transpose(1, 2) for part in self.qkv(self.ln(x)).split(width, -1))
            a = F.scaled_dot_product_attention(*heads)
            return x + self.out(a.transpose(1, 2).reshape(b, t, width))

    plan = auto.plan(FromInput(), (torch.zeros(3, 5, WIDTH),), 2)
    assert not plan.patches and [call.name for call in plan.sizes[""][0]] == [
        "split",
        "view",
        "view",
        "view",
        "reshape",
    ]
    assert plan.sizes[""][0][1].changes == ((2, HEADS, HEADS // 2),)
    assert "sizes of views changed in each call of the model" in str(plan)


def test_the_model_is_not_changed() -> None:
    model = Model()
    before = {name: p.clone() for name, p in model.named_parameters()}
    auto.plan(model, EXAMPLE, 2)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert model.blocks[0].heads == HEADS and not atoms([])


def test_the_chosen_set_is_the_heaviest() -> None:
    """Against all subsets, on random graphs; a star of light leaves outweighs its heavy centre."""
    star: dict[int, set[int]] = {0: set(range(1, 20)), **{i: {0} for i in range(1, 20)}}
    assert heaviest(list(range(20)), star, [5.0] + [1.0] * 19) == list(range(1, 20))
    draw = random.Random(0)
    for _ in range(50):
        n = draw.randint(2, 9)
        excluded: dict[int, set[int]] = {i: set() for i in range(n)}
        for a, b in itertools.combinations(range(n), 2):
            if draw.random() < 0.4:
                excluded[a].add(b)
                excluded[b].add(a)
        weight = sorted((float(draw.randint(1, 9)) for _ in range(n)), reverse=True)
        subsets = itertools.chain.from_iterable(itertools.combinations(range(n), size) for size in range(n + 1))
        apart = [s for s in subsets if all(not excluded[i].intersection(s) for i in s)]
        chosen = heaviest(list(range(n)), excluded, weight)
        assert tuple(chosen) in apart
        assert sum(weight[i] for i in chosen) == max(sum(weight[i] for i in s) for s in apart)


class Joined(nn.Module):
    """A layer on features of which some are another layer's and the rest of the input."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        layer: Any = nn.Linear if kind != "convolution" else lambda i, o: nn.Conv1d(i, o, 1)
        self.up, self.down, self.kind = layer(4, 16), layer(20, 8), kind

    def forward(self, x: Tensor) -> Tensor:
        dim = -1 if self.kind != "convolution" else 1
        joined = torch.cat((self.up(x).relu(), x), dim)
        return F.linear(joined, self.down.weight * 2) if self.kind == "function" else self.down(joined)


@pytest.mark.parametrize("kind", ["linear", "function", "convolution"])
def test_a_sum_of_sharded_and_replicated_features_is_never_sharded(kind: str) -> None:
    """The sum over the ranks would count the replicated features p times; the layer is sharded by its outputs."""
    x = torch.randn(3, 4, 4)
    plan = auto.plan(Joined(kind), (x,), 2, prove="shapes")
    assert {name: plan.shardings[name].dim for name in plan.shardings if name.endswith("weight")} == {"down.weight": 0}


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.drop = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(torch.relu(self.up(self.norm(x)))))


def _calls_of_planning(layers: int) -> int:
    """The calls of functions of the planner while it plans a stack of equal blocks."""
    model, example, calls = nn.Sequential(*(_Block() for _ in range(layers))), (torch.randn(2, 8),), 0

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls
        calls += event == "call" and "/tp_ext/auto/" in frame.f_code.co_filename

    auto.plan(model, example, 2, prove="shapes")  # fills what is kept for the next plan
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        auto.plan(model, example, 2, prove="shapes")
    finally:
        sys.setprofile(before)
    return calls


def test_the_work_of_planning_grows_with_the_number_of_layers_and_not_faster():
    # 4.1 times for 4 times the layers; each tensor compared with the atoms of all layers would make it 8
    assert _calls_of_planning(32) < 4.5 * _calls_of_planning(8)
