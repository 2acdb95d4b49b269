"""Model files as users write them, unchanged: most of their matrices are sharded, and they train as unsharded."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.auto.compare import BOUND, compare_model
from tests.auto.users_files import caches, llama2c
from tests.helpers.ranks import run
from tp_ext import auto
from tp_ext.auto.unchanged import unchanged

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
}


def share(plan: auto.Plan) -> float:
    """The share of the elements of matrices that is sharded."""
    sizes = {n: torch.Size(plan.shapes[n]).numel() for n in plan.bytes_of_element if len(plan.shapes[n]) > 1}
    return sum(size for name, size in sizes.items() if name in plan.shardings) / sum(sizes.values())


def _trains(group: Any, name: str) -> None:
    build, inputs = FILES[name]
    torch.manual_seed(0)
    model = build().double().eval()  # without dropout: masks are those of tp_ext, not of torch
    result = compare_model(group, name, model, inputs(), build().double().eval())
    assert not result.refused and result.error <= BOUND, (result.refused, result.where, result.error)
    assert share(model.tp_ext_plan) >= LEAST, str(model.tp_ext_plan)


@pytest.mark.parametrize(
    ("name", "p"), [(name, p) for name in FILES for p in (2, 3) if not (name == "llama2c, groups" and p == 3)]
)
def test_a_file_trains_as_unsharded(name: str, p: int) -> None:
    run(_trains, p, name)


def test_planning_leaves_nothing_in_the_model() -> None:
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


def _copies(group: Any) -> None:
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


def test_forwards_called_by_name_survive_copies_and_compilation() -> None:
    run(_copies, 2)
