"""Functions of torch called by the names of their arguments: what intercepts calls reads them as those by place."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tp_ext
from tests.helpers.simulated import run
from tp_ext.auto.modules.logits import LogitsInShards, ShardedLogits
from tp_ext.auto.record.keywords import by_place
from tp_ext.group import parallel_group

# The same by place and by name: of h, features [3, 5, 16] that are 4 heads
FEATURES = [
    ("h.reshape(3, 5, 4, 4).sin().flatten(2)", "h.reshape(shape=(3, 5, 4, 4)).sin().flatten(start_dim=2)"),
    ("torch.reshape(h, (3, 5, 4, 4)).sin().flatten(2)",
     "torch.reshape(input=h, shape=(3, 5, 4, 4)).sin().flatten(start_dim=2, end_dim=-1)"),
    ("h.view(3, 5, 4, 4).sin().view(3, 5, 16)", "h.view(size=(3, 5, 4, 4)).sin().view(size=(3, 5, 16))"),
    ("h.unflatten(-1, (4, 4)).sin().flatten(2)", "torch.unflatten(input=h, dim=-1, sizes=(4, 4)).sin().flatten(2)"),
    ("h.view(3, 5, 4, 4).transpose(1, 2).sin().transpose(1, 2).reshape(3, 5, 16)",
     "h.view(size=[3, 5, 4, 4]).transpose(dim0=1, dim1=2).sin().transpose(dim1=1, dim0=2).reshape(shape=[3, 5, 16])"),
    ("h.view(3, 5, 4, 4).permute(0, 2, 1, 3).sin().transpose(1, 2).flatten(2)",
     "torch.permute(input=h.view(3, 5, 4, 4), dims=(0, 2, 1, 3)).sin().transpose(1, 2).flatten(2)"),
    ("torch.cat([h, h.sin()], 1)[:, 2:7]", "torch.cat(tensors=[h, h.sin()], dim=1)[:, 2:7]"),
    ("h.view(3, 5, 4, 4).mean(1, True).expand(3, 5, 4, 4).flatten(2)",
     "h.view(3, 5, 4, 4).mean(axis=1, keepdims=True).expand(size=(3, 5, 4, 4)).flatten(2)"),
    ("h.split([2, 3], 1)[1]", "h.split(split_size=[2, 3], dim=1)[1]"),
    ("torch.split(h.view(3, 5, 4, 4), 2, -1)[0].repeat(1, 1, 1, 2).flatten(2)",
     "torch.split(tensor=h.view(3, 5, 4, 4), split_size_or_sections=2, dim=-1)[0].repeat(1, 1, 1, 2).flatten(2)"),
    ("F.dropout(h, 0.3, m.training)", "F.dropout(input=h, p=0.3, training=m.training)"),
    ("attended(h, lambda q: SDPA(q, q, q, None, 0.0, True))",
     "attended(h, lambda q: SDPA(query=q, key=q, value=q, is_causal=True))"),
    ("F.layer_norm(h.view(3, 5, 4, 4), (4,)).flatten(2)",
     "F.layer_norm(input=h.view(3, 5, 4, 4), normalized_shape=(4,)).flatten(2)"),
    ("F.softmax(h.view(3, 5, 4, 4), -1).flatten(2)", "F.softmax(input=h.view(3, 5, 4, 4), dim=-1).flatten(2)"),
    ("torch.where(h > 0, h, 0.1 * h)", "torch.where(condition=h > 0, input=h, other=0.1 * h)"),
    ("F.linear(h, m.weight).sin()", "F.linear(input=h, weight=m.weight, bias=None).sin()"),
    ("F.embedding(IDS, m.weight) * h", "F.embedding(input=IDS, weight=m.weight) * h"),
    ("torch.einsum('bth,oh->bto', h, m.weight)", "torch.einsum('bth,oh->bto', [h, m.weight])"),
]  # fmt: skip
# Of y, logits [3, 5, 16] of which each rank has half of the columns
LOGITS = [
    ("y.reshape(-1, 5, 2, 2, 4)", "y.reshape(shape=(-1, 5, 2, 2, 4))"),
    ("y.reshape(-1, 16)", "torch.reshape(input=y, shape=(-1, 16))"),
    ("y.view(15, 16)", "y.view(size=(15, 16))"),
    ("y.flatten(0, 1)", "y.flatten(start_dim=0, end_dim=1)"),
    ("F.cross_entropy(y.flatten(0, 1), T)", "F.cross_entropy(input=y.flatten(end_dim=1), target=T)"),
    ("F.cross_entropy(y.view(15, 16), T, None, None, 3, None, 'sum')",
     "F.cross_entropy(y.view(15, 16), target=T, reduction='sum', ignore_index=3)"),
    ("y.argmax(-1)", "torch.argmax(input=y, dim=-1)"),
    ("y.argmax(-1, True)", "y.argmax(dim=-1, keepdim=True)"),
    ("y.sum() * y.size(-1)", "torch.sum(input=y) * y.size(dim=-1)"),
    ("torch.mul(y, 2)", "torch.mul(input=y, other=2)"),
    ("y.to(torch.float32)", "y.to(dtype=torch.float32)"),
    ("F.softmax(y, -1)", "F.softmax(input=y, dim=-1)"),
    ("torch.cat([y, y], 1)", "torch.cat(tensors=[y, y], dim=1)"),
    ("y * torch.is_floating_point(y)", "y * torch.is_floating_point(input=y)"),
]  # fmt: skip
T, IDS = torch.arange(15) % 16, torch.arange(15).view(3, 5)
SDPA = F.scaled_dot_product_attention


def attended(h: Tensor, attention: Any) -> Tensor:
    return attention(h.view(3, 5, 4, 4).transpose(1, 2)).transpose(1, 2).flatten(2)


class _Model(nn.Module):
    def __init__(self, code: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.m, self.b = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 6)
        self.code = code

    def forward(self, x: Tensor) -> Tensor:
        function: Any = eval(f"lambda h, m: {self.code}", globals())
        return self.b(function(self.a(x), self.m)).sin()


def _result(group: Any, plan: Any, code: str) -> list[Tensor]:
    model = _Model(code).double()
    x = torch.randn(3, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    tp_ext.auto.apply(plan, model, group)
    tp_ext.manual_seed(1)
    y = model(x)
    y.pow(2).sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad]


@pytest.mark.parametrize("code, by_name", FEATURES)
def test_features(code, by_name):
    x = torch.randn(3, 5, 6, dtype=torch.float64)
    plan, whole = (tp_ext.auto.plan(_Model(by_name).double(), (x,), p) for p in (2, 1))
    assert plan.shardings == tp_ext.auto.plan(_Model(code).double(), (x,), 2).shardings
    assert plan.proof == "values" and "b.weight" in plan.shardings
    expected = run(_result, 1, whole, code)[0]
    for results in run(_result, 2, plan, by_name):
        torch.testing.assert_close(results, expected, rtol=1e-9, atol=1e-9)


def _of_logits(group: Any, codes: tuple[str, str]) -> list[tuple[Tensor, bool]]:
    """The results of both, and whether they are sharded."""
    parallel, results = parallel_group(group), []
    full = torch.randn(3, 5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for code in codes:
        function = eval(f"lambda y: {code}", globals())
        result = function(LogitsInShards(parallel, (8, 8)).after(nn.Identity(), full.chunk(2, -1)[parallel.rank]))
        is_sharded = isinstance(result, ShardedLogits)
        results.append((result.full() if is_sharded else result, is_sharded))
        torch.testing.assert_close(results[-1][0], function(full))
    return results


@pytest.mark.parametrize("codes", LOGITS)
def test_logits(codes):
    for of_place, of_name in run(_of_logits, 2, codes):
        assert torch.equal(of_place[0], of_name[0]) and of_place[1] == of_name[1]


def test_places_of_arguments():
    x = torch.zeros(2, 3)
    assert by_place(Tensor.mean, (x,), {"axis": 1, "keepdims": True}) == ((x, 1, True), {})
    assert by_place(Tensor.sum, (x,), {"dim": 1, "dtype": torch.float64}) == ((x, 1), {"dtype": torch.float64})
    assert by_place(Tensor.flatten, (x,), {"end_dim": 1}) == ((x, 0, 1), {})
    assert by_place(torch.add, (), {"input": x, "other": x, "alpha": 2}) == ((x, x), {"alpha": 2})
    # Unknown names are torch's to refuse
    assert by_place(Tensor.mean, (x,), {"dims": 1}) == ((x,), {"dims": 1})
