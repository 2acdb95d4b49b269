"""Model files as users write them, unchanged: most of their matrices are sharded, and they train as unsharded."""

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

from tests.auto.compare import EXACT, compare_model
from tests.auto.users_files import caches, llama2c, mingpt, nanogpt, widths
from tests.helpers.on_ranks import on_ranks
from tests.helpers.simulated import run
from tp_ext import auto
from tp_ext.auto.record.unchanged import unchanged

LEAST = 0.9  # of the elements of matrices


def _ids(vocab: int = 64) -> dict[str, Tensor]:
    ids = torch.randint(vocab, (3, 6), generator=torch.Generator().manual_seed(1))
    return {"idx": ids, "targets": ids.roll(1)}


def _tokens() -> dict[str, Tensor]:
    return {"tokens": _ids()["idx"], "targets": _ids()["targets"]}


def _rows(features: int = 16) -> dict[str, Tensor]:
    return {"x": torch.randn(3, 6, features, generator=torch.Generator().manual_seed(1), dtype=torch.float64)}


FILES: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Tensor]]]] = {
    "caches": (caches.Net, _rows),
    "llama2c": (llama2c.Transformer, _tokens),
    "llama2c, groups": (lambda: llama2c.Transformer(n_kv_heads=2), _tokens),
    "mingpt": (mingpt.GPT, _ids),
    "nanogpt": (nanogpt.GPT, _ids),
    "a product of integers": (lambda: widths.Net(widths.Grouped(48, 6, 3)), lambda: _rows(48)),
    "products and heads": (lambda: widths.Net(widths.Explicit(48, 6, 3)), lambda: _rows(48)),
    "as many heads as features of one": (lambda: widths.Net(widths.Interleaved(36, 6, 6), 36), lambda: _rows(36)),
    "as many groups as features": (lambda: widths.Net(widths.Interleaved(36, 12, 3), 36), lambda: _rows(36)),
    "a dict of lengths": (lambda: widths.Net(widths.Dicts(48, 6)), lambda: _rows(48)),
    "numbers": (lambda: widths.Net(widths.Numbers()), lambda: _rows(48)),
    "a class at two widths": (widths.Hierarchical, lambda: _rows(48)),
}
PATCHED = {
    "a class at two widths": {
        "a": {"heads": (6, (4, 2)), "kv": (3, (2, 1))},
        "b": {"heads": (12, 6), "kv": (6, 3)},
    },
    "a product of integers": {"attention": {"heads": (6, (4, 2)), "kv": (3, (2, 1))}},
    "as many heads as features of one": {"attention": {"config.n_head": (6, 3), "config.n_query_groups": (6, 3)}},
    "nanogpt": {},
    "numbers": {},
}


def share(plan: auto.Plan) -> float:
    """The share of the elements of matrices that is sharded."""
    sizes = {n: torch.Size(plan.shapes[n]).numel() for n in plan.bytes_of_element if len(plan.shapes[n]) > 1}
    return sum(size for name, size in sizes.items() if name in plan.shardings) / sum(sizes.values())


def _trains(group: Any, names: list[str]) -> None:
    for name in names:
        build, inputs = FILES[name]
        torch.manual_seed(0)
        model = build().double().eval()  # without dropout: masks are those of tp_ext, not of torch
        result = compare_model(group, name, model, inputs(), build().double().eval())
        plan = model.tp_ext_plan
        assert not result.refused and result.error <= EXACT, (name, result.refused, result.where, result.error)
        assert share(plan) >= LEAST, (name, str(plan))
        assert plan.p != 2 or plan.patches == PATCHED.get(name, plan.patches), (name, plan.patches)


@pytest.mark.parametrize("p", [pytest.param(2, marks=pytest.mark.exhaustive), 3])
def test_files_train_as_unsharded(p: int) -> None:
    run(_trains, p, [name for name in FILES if not (name == "llama2c, groups" and p == 3)])


def test_planning_leaves_nothing_in_the_model() -> None:
    caches.SEEN.clear()  # what the ranks of other tests left
    for model in (caches.Net(), caches.Failing()):
        before = [dict(vars(module)) for module in model.modules()]
        with unchanged(model):
            pass
        try:
            auto.plan(model, _rows(), 2)
        except ValueError as error:
            assert "after torch.Size" in str(error)
        for module, kept in zip(model.modules(), before, strict=True):
            assert vars(module) == kept
        rotary = model.rotary
        assert rotary.table.sin is None and not rotary.seen and not rotary._buffers and not caches.SEEN
        assert type(caches.positions(6)) is Tensor
        assert all(not hook for m in model.modules() for hook in (m._forward_hooks, m._forward_pre_hooks))


@on_ranks(2, backend="gloo")  # simulated ranks would share the state of dynamo
def test_forwards_called_by_name_survive_copies_and_compilation(group: Any) -> None:
    model = llama2c.Transformer().double().eval()
    plan = auto.plan(model, _tokens(), 2)
    assert sorted(plan.direct) == [f"layers.{i}.{name}" for i in range(2) for name in ("attention", "feed_forward")]
    auto.apply(plan, model, group)
    with torch.no_grad():  # a loss with a graph, kept by the file, cannot be copied
        wanted = model(**_tokens())
    pickled = io.BytesIO()
    torch.save(model, pickled)
    pickled.seek(0)
    assert set(model.state_dict()) == set(llama2c.Transformer().state_dict())
    for other in (copy.deepcopy(model), torch.load(pickled, weights_only=False)):
        with torch.no_grad():
            other.layers[0].attention.wq.weight.zero_()
        assert not torch.equal(other(**_tokens()), wanted) and torch.equal(model(**_tokens()), wanted)
    hidden = model.tok_embeddings(_tokens()["tokens"])
    layer = torch.compile(model.layers[0], fullgraph=True, backend="eager")
    rotary = model.freqs_cos[:6], model.freqs_sin[:6]
    torch.testing.assert_close(layer(hidden, *rotary), model.layers[0](hidden, *rotary))


@on_ranks(2)
def test_changed_sizes_hold_in_copies_and_for_other_lengths(group: Any) -> None:
    torch.manual_seed(0)
    model = nanogpt.GPT().double().eval()
    dense = copy.deepcopy(model)
    plan = auto.plan(model, {"idx": _ids()["idx"]}, 2, prove="shapes")
    assert [call.name for call in plan.sizes["transformer.h.0.attn"][0]] == ["split", "view", "view", "view", "view"]
    auto.apply(plan, model, group)
    pickled = io.BytesIO()
    torch.save(model, pickled)
    pickled.seek(0)
    start = _ids()["idx"][:2, :3]
    for one in (model, copy.deepcopy(model), torch.load(pickled, weights_only=False)):
        assert torch.equal(one.generate(start, 7), dense.generate(start, 7))  # other batches and lengths


@on_ranks(2, backend="gloo")  # it changes a class
def test_changed_sizes_hold_under_checkpoints_and_compilation(group: Any) -> None:
    torch.manual_seed(0)
    model = nanogpt.GPT().double().eval()
    dense = copy.deepcopy(model)
    plan = auto.plan(model, _ids(), 2, prove="shapes")
    auto.apply(plan, model, group)
    ids = {key: value[:1, :5] for key, value in _ids().items()}
    wanted = dense(**ids)[1]
    wanted.backward()
    for i, kind in enumerate((CheckpointImpl.NO_REENTRANT, CheckpointImpl.REENTRANT)):
        model.transformer.h[i] = checkpoint_wrapper(model.transformer.h[i], kind)
    found = model(**ids)[1]
    found.backward()
    torch.testing.assert_close(found, wanted)
    for i in range(2):
        attention = model.transformer.h[i]._checkpoint_wrapped_module.attn
        sharding = plan.shardings[f"transformer.h.{i}.attn.c_attn.weight"]
        gradient = dense.transformer.h[i].attn.c_attn.weight.grad
        torch.testing.assert_close(attention.c_attn.weight.grad, sharding.shard(gradient, group.rank(), 2))
    x = torch.randn(2, 4, 48, dtype=torch.float64)
    block = model.transformer.h[0]._checkpoint_wrapped_module
    compiled = torch.compile(block, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), block(x))
    torch.testing.assert_close(compiled(x[:1]), block(x[:1]))
    original = type(block.attn).forward
    try:
        type(block.attn).forward = lambda self, x: original(self, x).view(*x.shape)
        with pytest.raises(RuntimeError, match="attn: forward calls view where its plan has no such call; sizes"):
            block(x)
        type(block.attn).forward = lambda self, x: self.c_proj(self.c_attn(x).split(self.n_embd, dim=2)[0])
        with pytest.raises(RuntimeError, match="attn: forward calls nothing where its plan has view"):
            block(x)
    finally:
        type(block.attn).forward = original
    torch.testing.assert_close(compiled(x), block(x))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.r, self.out = nn.GRU(16, 24, batch_first=True), nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.r(x)[0])


def _warnings(group: Any, hints: dict[str, str], model: str) -> list[str]:
    net = {"whole": Recurrent, "sharded": caches.Net}[model]()
    plan = auto.plan(net, {"x": torch.zeros(3, 6, 16)}, 2, prove="shapes", hints=hints)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        auto.apply(plan, net, group)
    return [str(one.message) for one in seen if "stay whole" in str(one.message)]


def test_rank_0_warns_of_matrices_that_stay_whole() -> None:
    (text,), others = run(_warnings, 2, {}, "whole")
    assert not others
    for words in (" of the bytes of its matrices stay whole", "plan.why('r.weight_", "its factor is in r.weight_"):
        assert words in text, text
    assert run(_warnings, 2, {"*": "whole"}, "whole") == run(_warnings, 2, {}, "sharded") == [[], []]


def test_code_that_branches_on_lengths_is_named_with_its_line() -> None:
    class Branching(nn.Module):
        def __init__(self, other: Callable[[Tensor], Tensor]) -> None:
            super().__init__()
            self.up, self.down, self.other = nn.Linear(8, 16), nn.Linear(16, 8), other

        def forward(self, x: Tensor) -> Tensor:
            h = self.up(x)
            return self.down(h.sigmoid() if h.shape[-1] > 8 else self.other(h))

    for other, words in (
        (torch.tanh, "but tanh in the model; code that branches on a length"),
        (lambda h: h, "branch"),
    ):
        plan = auto.plan(Branching(other), (torch.zeros(2, 8),), 2, prove="shapes")
        assert "sigmoid (test_users_files.py:" in plan.why("up.weight") and words in plan.why("up.weight")
