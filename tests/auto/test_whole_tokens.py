"""Calls of a model whose plan shards tokens that its example does not show: these have all tokens where they cannot be
split, and are right."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tp_ext
from tests.auto.test_execute import close
from tests.auto.test_sequence_parallel import Gpt, _inputs, _sharded
from tests.helpers.on_ranks import on_ranks
from tests.helpers.same_values import same_values
from tests.helpers.simulated import run


class Options(Gpt):
    """Keywords that lead to code which needs all tokens."""

    def forward(
        self, ids: Tensor, labels: Tensor | None = None, mask: Tensor | None = None, hidden: bool = False
    ) -> Any:
        x = self.drop(self.table(ids) + self.positions(torch.arange(ids.shape[1])))
        if mask is not None:
            x = x * mask[:, : x.shape[1], None] - torch.arange(x.shape[1])[:, None] / 7
        states = []
        for layer in self.layers:
            x = layer(x) if self.recompute is None else self.recomputed(layer, x)
            states.append(x)
        logits = self.head(self.norm(x))
        loss = logits if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return (loss, *states) if hidden else loss

    def recomputed(self, layer: Any, x: Tensor) -> Tensor:
        result: Tensor = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=self.recompute)
        return result


def _few(tokens: int, *names: str, **more: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {**{name: _inputs(tokens)[name] for name in names or ("ids", "labels")}, **more}


def _mask(tokens: int, *names: str) -> Callable[[], dict[str, Any]]:
    mask = torch.ones(3, tokens, dtype=torch.float64)
    mask[0, tokens // 2 :] = 0
    return _few(tokens, *names, mask=mask)


# the arguments; whether tokens are sharded in training, of 2 and of 3 ranks
CALLS: dict[str, tuple[Callable[[], dict[str, Any]], tuple[bool, bool]]] = {
    "another length": (_few(7), (True, True)),
    "without labels": (_few(5, "ids"), (True, True)),
    "one token": (_few(1), (False, False)),
    "one token without labels": (_few(1, "ids"), (False, False)),
    "two tokens without labels": (_few(2, "ids"), (True, False)),
    "mask": (_mask(5), (False, False)),
    "mask without labels": (_mask(5, "ids"), (False, False)),
    "mask of one token": (_mask(1, "ids"), (False, False)),
    "mask of two tokens": (_mask(2, "ids"), (False, False)),
    "states of layers": (_few(5, hidden=True), (False, False)),
    "states without labels": (_few(4, "ids", hidden=True), (False, False)),
}


def _compare(dense: Any, sharded: Any, given: dict[str, Any], recompute: Any = None) -> dict[str, int]:
    """Compares outputs and all gradients; returns the collectives of the second forward."""
    with tp_ext.debug.count_collectives() as counts:
        for model in (dense, sharded):
            model.recompute = recompute if model is sharded else None
            model.zero_grad()
        same_values(dense, sharded, (), given, seed=3, backward=torch.is_grad_enabled())
    return counts.by_kind()


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("p", [2, 3])
@on_ranks()
def test_calls_that_the_example_does_not_show(group: Any, gradients: bool) -> None:
    torch.manual_seed(0)
    dense = Options().double().eval()
    sharded = _sharded(group, dense)
    for name, (given, sharded_tokens) in CALLS.items():
        with torch.set_grad_enabled(gradients):
            for _ in range(2):  # proven, and known
                counts = _compare(dense, sharded, given())
        assert ("reduce_scatter" in counts) == (gradients and sharded_tokens[group.size() - 2]), (name, counts)
        assert "reduce_scatter" in _compare(dense, sharded, _inputs(5))


@on_ranks(3)
def test_few_tokens_prove_nothing_for_many(group: Any) -> None:
    """A proof with few tokens, which stay whole, does not serve a call with many, which are split."""
    torch.manual_seed(0)
    dense = Options().double().eval()
    sharded = _sharded(group, dense)
    for tokens in (1, 2, 5, 4):
        _compare(dense, sharded, _mask(tokens, "ids")())


@pytest.mark.parametrize("reentrant", [True, False])
@on_ranks(2)
def test_recomputation_of_a_call_with_all_tokens(group: Any, reentrant: bool) -> None:
    torch.manual_seed(0)
    dense = Options().double().eval()
    sharded = _sharded(group, dense)
    for given in (_mask(5)(), _inputs(5), _few(5, hidden=True)(), _inputs(7)):
        _compare(dense, sharded, given, reentrant)


def _dropped(group: Any) -> list[Tensor]:
    torch.manual_seed(0)
    sharded = _sharded(group, Options().double())
    found = []
    for given in (_mask(5)(), _few(1, "ids")(), _inputs(5), _few(4, "ids", hidden=True)()):
        for gradients in (True, False):
            tp_ext.manual_seed(7)
            with torch.set_grad_enabled(gradients):
                output = sharded(**given)
            found.append(output[0] if isinstance(output, tuple) else output)
    return [t.detach() for t in found]


def test_masks_of_dropout_are_those_of_one_process() -> None:
    two, three = run(_dropped, 2), run(_dropped, 3)
    for results in (*two, *three):
        for expected, found in zip(two[0], results, strict=True):
            torch.testing.assert_close(found, expected, **close)
    for with_gradients, without in zip(two[0][::2], two[0][1::2], strict=True):
        torch.testing.assert_close(with_gradients, without, **close)


@on_ranks(2)
def test_a_plan_that_was_proven_by_shapes(group: Any) -> None:
    """Without a proof by values the boundaries must be those of the plan, on whole tokens."""
    torch.manual_seed(0)
    dense = Options().double().eval()
    sharded = _sharded(group, dense, prove="shapes")
    with torch.no_grad():
        _compare(dense, sharded, _few(1, "ids")())
        _compare(dense, sharded, _mask(5)())
    _compare(dense, sharded, _mask(5)())


@on_ranks(2)
def test_copies_know_which_calls_have_all_tokens(group: Any) -> None:
    torch.manual_seed(0)
    dense = Options().double().eval()
    sharded = _sharded(group, dense)
    _compare(dense, sharded, _mask(5)())
    file = io.BytesIO()
    torch.save(sharded, file)
    file.seek(0)
    for model in (copy.deepcopy(sharded), torch.load(file, weights_only=False)):
        _compare(dense, model, _mask(5)())
        _compare(dense, model, _inputs(5))
