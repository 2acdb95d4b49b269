"""Models of `auto` with the same bits for every number of ranks: loss, gradient norm, weights and states of AdamW;
their values; what is refused by name."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tp_ext
from tests.helpers.ranks import run, run_fresh
from tp_ext import auto

pytestmark = pytest.mark.core

VOCAB, WIDTH, HEADS, HEAD_DIM, FEATURES = 101, 48, 8, 8, 100


class Attention(nn.Module):
    def __init__(self, kv_heads: int = 4, explicit: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.explicit, self.dropout = HEADS, kv_heads, explicit, dropout
        self.q, self.k = nn.Linear(WIDTH, HEADS * HEAD_DIM), nn.Linear(WIDTH, kv_heads * HEAD_DIM, bias=False)
        self.v, self.out = nn.Linear(WIDTH, kv_heads * HEAD_DIM), nn.Linear(HEADS * HEAD_DIM, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for f in (self.q, self.k, self.v))
        if self.explicit:
            k, v = (t[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2) for t in (k, v))
            y = ((q @ k.transpose(2, 3)) * HEAD_DIM**-0.5).softmax(-1) @ v
        else:
            drop = self.dropout if self.training else 0.0
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=drop, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, activation: str = "silu") -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, FEATURES, bias=False), nn.Linear(WIDTH, FEATURES)
        self.down, self.activation = nn.Linear(FEATURES, WIDTH), activation

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = (
            torch.sigmoid(self.gate(x)) if self.activation == "sigmoid" else getattr(F, self.activation)(self.gate(x))
        )
        return self.down(h * self.up(x))


class Model(nn.Module):
    def __init__(self, activation: str = "silu", **attention: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, WIDTH)
        self.norm1, self.norm2, self.norm = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.mlp = Attention(**attention), FeedForward(activation)
        self.dropout, self.head = nn.Dropout(attention.get("dropout", 0.0)), nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.table(ids)
        x = x + self.dropout(self.attention(self.norm1(x)))
        x = x + self.dropout(self.mlp(self.norm2(x)))
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def _batches(steps: int) -> Any:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCAB, (2, 2, 13), generator=generator) for _ in range(steps)]


def _model(dtype: torch.dtype = torch.float32, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return Model(**options).to(dtype)


def _plan(model: nn.Module, p: int, **options: Any) -> auto.Plan:
    ids = torch.zeros(3, 5, dtype=torch.long)
    return auto.plan(model, (ids, ids), p, **{"invariant_blocks": 8, "prove": "shapes", **options})


def _trained(
    group: Any, plan: auto.Plan, steps: int = 2, threads: int = 1, blocks: int | None = None, **options: Any
) -> Any:
    torch.set_num_threads(threads)
    tp_ext.manual_seed(3)
    model = auto.apply(plan, _model(**options), group, invariant_blocks=blocks)
    optimizer, numbers = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for ids, labels in _batches(steps):
        loss = model(ids, labels)
        loss.backward()
        norm = tp_ext.clip_grad_norm_(model, 0.5)
        numbers += [loss.item().hex(), norm.item().hex()]
        optimizer.step()
        optimizer.zero_grad()
    return numbers, tp_ext.debug.sha256(model, optimizer)


CASES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16, explicit attention": {"dtype": torch.bfloat16, "explicit": True, "activation": "gelu"},
    "fp64, dropout": {"dtype": torch.float64, "dropout": 0.1, "activation": "sigmoid", "kv_heads": 8},
}


def _same_bits(options: dict[str, Any]) -> None:
    expected = _trained(None, _plan(_model(**options), 1), **options)
    for p in (2, 3, 4):
        plan = _plan(_model(**options), p)
        found = tp_ext.debug.simulate(lambda rank, group, plan=plan: _trained(group, plan, **options), p)
        assert found == [expected] * p, p
    assert _trained(None, _plan(_model(**options), 1), threads=2, **options) == expected, "two threads"


@pytest.mark.parametrize("case", CASES)
def test_the_same_bits_for_every_number_of_ranks(case: str) -> None:
    run_fresh(_same_bits, CASES[case])


def _on_ranks(group: Any, of_plan: int | None, of_apply: int | None) -> Any:
    plan = _plan(_model(), tp_ext.group.parallel_group(group).size, invariant_blocks=of_plan)
    return _trained(group, plan, blocks=of_apply)


def test_on_processes_by_a_plan_with_blocks_and_one_without() -> None:
    assert run(_on_ranks, 2, None, 8) == [run_fresh(_on_ranks, None, 8, None)] * 2


def _values() -> None:
    """Loss and gradients are those of the unsharded model."""
    dense = _model(torch.float64)
    (ids, labels), (again, _) = _batches(2)
    expected = dense(ids, labels)
    expected.backward()

    def differences(rank: int, group: Any, p: int) -> None:
        model = auto.apply(_plan(copy.deepcopy(dense).cpu(), p), _model(torch.float64), group)
        loss = model(ids, labels)
        loss.backward()
        torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-10)
        full = tp_ext.full_state_dict(model, group=group)
        grads = {name: parameter.grad for name, parameter in model.named_parameters()}
        for name, parameter in dense.named_parameters():
            layout = model.tp_ext_plan.shardings.get(name)
            wanted = parameter.grad if layout is None else layout.shard(parameter.grad, rank, p)
            torch.testing.assert_close(grads[name], wanted, rtol=1e-10, atol=1e-10, msg=name)
            assert torch.equal(full[name], parameter)
        with torch.no_grad():  # another kind of call is proven when it comes
            assert model(again, labels).isfinite()

    differences(0, None, 1)
    tp_ext.debug.simulate(differences, 3, 3)


def test_values_are_those_of_the_unsharded_model() -> None:
    run_fresh(_values)


class Body(nn.Module):
    """An up and a down projection with a function of their shards between them."""

    def __init__(self, function: Any, parameter: bool = False) -> None:
        super().__init__()
        self.up, self.down, self.function = nn.Linear(16, 64), nn.Linear(64, 16), function
        self.scale = nn.Parameter(torch.ones(8)) if parameter else None

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.function(self, self.up(x)))


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x, need_weights=False)[0]


def _by_heads(h: Tensor) -> Tensor:
    return h.unflatten(-1, (-1, 8))


def _norm_of_heads(body: Body, h: Tensor) -> Tensor:
    return (_by_heads(h) * body.scale).flatten(-2)


def _mixed(body: Body, h: Tensor) -> Tensor:
    heads = _by_heads(h).transpose(1, 2)
    return torch.einsum("bhij,bhjk->bhik", heads @ heads.mT, heads).transpose(1, 2).flatten(-2)


REFUSED = {
    "elu": (Body(lambda body, h: F.elu(h)), r"'?up|the model computes elu .* on shards: its bits would depend"),
    "alpha": (Body(lambda body, h: h.relu().add(h, alpha=0.3)), "the model computes add .* with alpha"),
    "powers": (Body(lambda body, h: h.abs() ** 1.5), "the model computes pow .* on shards"),
    "norms": (Body(lambda body, h: F.layer_norm(_by_heads(h), (8,)).flatten(-2)), "computes native_layer_norm"),
    "parameter": (Body(_norm_of_heads, True), "scale has a gradient that is a sum of one term of each rank"),
    "broadcast": (Body(lambda body, h: h * h[:, :1]), "the model broadcasts a tensor in mul .* on shards"),
    "einsum": (Body(_mixed), "computes bmm .* on shards by einsum"),
    "attention": (nn.Sequential(Attends()), "0.inner is a sharded MultiheadAttention"),
}


@pytest.mark.thinned(1)
@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("p", [3, 1])
def test_what_depends_on_the_ranks_is_refused(case: str, p: int) -> None:
    model, message = REFUSED[case]
    with pytest.raises(ValueError, match=f"invariant_blocks: .*{message}.*; hints={{'.*weight': 'whole'}}"):
        auto.plan(model, (torch.zeros(2, 5, 16),), p, invariant_blocks=8, prove="shapes")


def test_a_hint_leaves_it_whole() -> None:
    model = Body(lambda body, h: F.elu(h))
    options: dict[str, Any] = {"invariant_blocks": 8, "prove": "shapes", "hints": {"up": "whole", "down": "whole"}}
    assert not auto.plan(model, (torch.zeros(2, 5, 16),), 2, **options).shardings


def test_arguments() -> None:
    model = _model(kv_heads=2)
    with pytest.raises(
        ValueError, match=r"2 units of 32 in 8 blocks, and rank 2 of 3 would have none; hints=.*'whole'"
    ):
        _plan(model, 3)
    with pytest.raises(ValueError, match="blocks: 8 of tp_invariant must be at least the number of ranks, p = 9"):
        _plan(model, 9)
    with pytest.raises(ValueError, match="sequence_parallel: True must be False with invariant_blocks = 8"):
        _plan(model, 2, sequence_parallel=True)
    with pytest.raises(ValueError, match="invariant_blocks: 0 "):
        _plan(model, 2, invariant_blocks=0)
    plan = _plan(model, 1)
    with pytest.raises(ValueError, match="invariant_blocks: 4 must be that of the plan"):
        auto.apply(plan, model, None, invariant_blocks=4)
    with pytest.raises(RuntimeError, match="MKL_CBWR"):  # which this process does not have
        auto.apply(plan, model, None)


def test_a_plan_in_a_file(tmp_path: Any) -> None:
    plan = _plan(_model(), 2)
    plan.save(tmp_path / "plan.json")
    assert auto.Plan.load(tmp_path / "plan.json") == plan
    assert plan.invariant_blocks == 8 and plan.functions == ["attention", "dropout", "mlp"]


class Recomputes(Model):
    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.table(ids)
        x = x + checkpoint(self.attention, self.norm1(x), use_reentrant=False)  # a module: it has its hooks
        return F.cross_entropy(self.head(self.norm(x + self.mlp(x))).flatten(0, 1), labels.flatten())


class RecomputesInside(FeedForward):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(checkpoint(lambda h: F.silu(h), self.gate(x) * self.up(x), use_reentrant=False))


def _calls() -> None:
    ((ids, labels),) = _batches(1)
    model: Any = Recomputes()
    auto.apply(_plan(model, 1), model, None)
    model(ids, labels).backward()
    with pytest.raises(RuntimeError, match=r"down: cannot be called so .* one term of each rank"):
        model.mlp.down(torch.zeros(2, FEATURES))
    inner: Any = Model()
    inner.mlp = RecomputesInside()
    auto.apply(_plan(inner, 1), inner, None)
    with pytest.raises(RuntimeError, match="checkpoint inside of the forward of RecomputesInside cannot be followed"):
        inner(ids, labels)


def test_recomputation_and_direct_calls() -> None:
    run_fresh(_calls)
