"""Models whose code reads numbers from arguments that all ranks have alike: masks, lengths, positions."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers.same_gradients import same_gradients
from tests.helpers.simulated import run
from tp_ext import auto

WIDTH, HIDDEN, LENGTH = 8, 24, 5


Forward = Callable[[Any, Tensor, Tensor], Tensor]


class Reads(nn.Module):
    """Two MLPs, of which a member's forward uses one or both, by what it reads."""

    def __init__(self, member: str) -> None:
        super().__init__()
        self.member = member
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.second = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, WIDTH))

    def mlp(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))

    def forward(self, x: Tensor, values: Tensor) -> Tensor:
        return MEMBERS[self.member][0](self, x, values)


def any_of_mask(model: Reads, x: Tensor, mask: Tensor) -> Tensor:
    if not mask.any():
        return model.mlp(x)
    return model.second(model.mlp(x).masked_fill(mask[..., None], 0.0))


def longest(model: Reads, x: Tensor, lengths: Tensor) -> Tensor:
    return model.mlp(x[:, : lengths.max()])


def mask_of_lengths(model: Reads, x: Tensor, lengths: Tensor) -> Tensor:
    valid = torch.arange(int(lengths.max().item()), device=x.device)[None] < lengths[:, None]
    return model.mlp(x)[:, : valid.shape[1]] * valid[..., None]


def first_length(model: Reads, x: Tensor, lengths: Tensor) -> Tensor:
    n = int(lengths[0])
    return torch.cat([model.mlp(x[:, :n]), model.second(x[:, n:])], 1)


def listed(model: Reads, x: Tensor, lengths: Tensor) -> Tensor:
    return torch.stack([model.mlp(x[i, :n]).mean(0) for i, n in enumerate(lengths.tolist())])


def split_by_lengths(model: Reads, x: Tensor, lengths: Tensor) -> Tensor:
    rows = model.mlp(x.flatten(0, 1)[: int(lengths.sum())])
    return torch.stack([part.sum(0) for part in rows.split(lengths.tolist())])


def mean_of_lengths(model: Reads, x: Tensor, lengths: Tensor) -> Tensor:
    return model.mlp(x) / lengths.double().mean().item()


def picked(model: Reads, x: Tensor, mask: Tensor) -> Tensor:
    places = mask.flatten().nonzero().squeeze(1)
    rows = x.flatten(0, 1)
    return rows.index_copy(0, places, model.mlp(rows.index_select(0, places))).view_as(x)


def indexed(model: Reads, x: Tensor, mask: Tensor) -> Tensor:
    return model.mlp(x[mask])


def indexed_inside(model: Reads, x: Tensor, mask: Tensor) -> Tensor:
    return model.second(model.mlp(x)[mask])


def scattered(model: Reads, x: Tensor, mask: Tensor) -> Tensor:
    y = model.mlp(x)
    result = torch.zeros_like(y)
    result[mask] = model.second(y[mask])
    return result


def selected(model: Reads, x: Tensor, mask: Tensor) -> Tensor:
    return model.mlp(x).masked_select(mask[..., None]).view(-1, WIDTH)


def where(model: Reads, x: Tensor, mask: Tensor) -> Tensor:
    rows, columns = torch.where(mask)
    return model.mlp(x[rows, columns])


def repeated(model: Reads, x: Tensor, lengths: Tensor) -> Tensor:
    return model.mlp(x.repeat_interleave(lengths, dim=0))


def written(model: Reads, x: Tensor, lengths: Tensor) -> Tensor:
    mask = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
    mask[:, 1:][lengths > 2] = True
    first = mask[:, 0].any()
    mask.logical_not_()
    y = model.second(x) if mask.all() or first else x
    return model.mlp(y)[mask]


def equal(model: Reads, x: Tensor, mask: Tensor) -> Tensor:
    return model.mlp(x) if torch.equal(mask, torch.ones_like(mask)) else model.second(x)


def experts(model: Reads, x: Tensor, ids: Tensor) -> Tensor:
    result = torch.zeros_like(x)
    for i, expert in enumerate((model.mlp, model.second)):
        rows, columns = torch.where(ids % 2 == i)
        if len(rows):
            result = result.index_put((rows, columns), expert(x[rows, columns]))
    return result


MASK = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 0, 0, 0, 0]]).bool()
OTHER_MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 1, 0, 1, 0]]).bool()
ALL, NONE = torch.ones_like(MASK), torch.zeros_like(MASK)
LENGTHS, SHORTER = torch.tensor([3, 5, 2]), torch.tensor([2, 4, 4])
# forward, the example's values, those of other calls
MEMBERS: dict[str, tuple[Forward, Tensor, list[Tensor]]] = {
    "any": (any_of_mask, MASK, [NONE, OTHER_MASK]),
    "none": (any_of_mask, NONE, [MASK]),
    "longest": (longest, LENGTHS, [SHORTER]),
    "mask_of_lengths": (mask_of_lengths, LENGTHS, [SHORTER]),
    "first_length": (first_length, LENGTHS, [SHORTER]),
    "listed": (listed, LENGTHS, [SHORTER]),
    "split": (split_by_lengths, LENGTHS, [SHORTER]),
    "mean": (mean_of_lengths, LENGTHS, [SHORTER]),
    "picked": (picked, MASK, [OTHER_MASK, ALL]),
    "indexed": (indexed, MASK, [OTHER_MASK, ALL]),
    "indexed_inside": (indexed_inside, MASK, [OTHER_MASK]),
    "scattered": (scattered, MASK, [OTHER_MASK]),
    "selected": (selected, MASK, [OTHER_MASK]),
    "where": (where, MASK, [OTHER_MASK]),
    "repeated": (repeated, LENGTHS, [SHORTER]),
    "written": (written, LENGTHS, [SHORTER, torch.tensor([1, 1, 2])]),
    "equal": (equal, ALL, [MASK, ALL]),
    "experts": (experts, torch.arange(15).view(3, 5), [torch.arange(15).view(3, 5) * 2, torch.zeros(3, 5).long()]),
}


def _x(seed: int) -> Tensor:
    return torch.randn(3, LENGTH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _compare(group: Any, member: str) -> list[str]:
    _, values, others = MEMBERS[member]
    torch.manual_seed(0)
    model = Reads(member).double()
    plan = auto.plan(model, (_x(0), values), group.size())
    assert plan.proof == "values"
    sharded = auto.apply(plan, copy.deepcopy(model), group)
    for seed, given in enumerate([values, *others, values]):
        for each in (model, sharded):
            each.zero_grad()
        pairs = [(each, _x(seed).requires_grad_()) for each in (model, sharded)]
        outputs = [each(x, given.clone()) for each, x in pairs]
        torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-12, atol=1e-12)
        for output in outputs:
            (output**2).sum().backward()
        torch.testing.assert_close(pairs[1][1].grad, pairs[0][1].grad, rtol=1e-11, atol=1e-12)
        same_gradients(model, sharded, rtol=1e-11, atol=1e-12)
    return sorted(plan.shardings)


@pytest.mark.parametrize("p", [2, 3])
@pytest.mark.parametrize("member", MEMBERS)
def test_what_code_reads_from_arguments(member: str, p: int):
    shardings = run(_compare, p, member)[0]
    assert {"up.weight", "down.weight"} <= {*shardings}
