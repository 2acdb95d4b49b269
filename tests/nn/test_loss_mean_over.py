"""vocab_parallel_cross_entropy(mean_over=): the mean over the valid rows of all data-parallel ranks."""

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

import tp_ext
from tests.helpers import ranks
from tests.helpers.meshes import mesh_of
from tests.helpers.on_ranks import on_ranks

pytestmark = pytest.mark.core

VOCAB, HIDDEN, ROWS, IGNORED = 7, 4, 6, -100


def _batches(number, valid):
    """Inputs and targets of each data-parallel rank; the first `valid[i]` rows of rank i count."""
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(number, ROWS, HIDDEN, dtype=torch.float64, generator=generator)
    target = torch.randint(VOCAB, (number, ROWS), generator=generator)
    for row, count in zip(target, valid, strict=True):
        row[count:] = IGNORED
    return x, target


def _train(group, shape, valid, how):
    mesh = mesh_of(*shape, names=("dp", "cp", "tp"))
    index = mesh["dp"].get_local_rank() * shape[1] + mesh["cp"].get_local_rank()
    x, target = (one[index] for one in _batches(shape[0] * shape[1], valid))
    torch.manual_seed(1)
    head = tp_ext.VocabParallelLMHead(HIDDEN, VOCAB, group=mesh["tp"], dtype=torch.float64)
    if how == "fsdp":
        fully_shard(head, mesh=mesh["dp"])
        loss = tp_ext.vocab_parallel_cross_entropy(
            head(x), target, mesh["tp"], vocab_size=VOCAB, mean_over=mesh["dp"], z_loss=0.1
        )
    elif how == "module":
        options = {"mean_over": mesh, "gradient_reduction": "sum", "z_loss": 0.1}
        loss = tp_ext.VocabParallelCrossEntropy(group=mesh["tp"], vocab_size=VOCAB, **options)(head(x), target)
    else:
        loss = head.loss(x, target, mean_over=[mesh["dp"], mesh["cp"]], gradient_reduction="sum", z_loss=0.1)
    loss.backward()
    grad = head.weight.grad.full_tensor() if how == "fsdp" else head.weight.grad
    if how != "fsdp":
        for axis in ("dp", "cp"):
            grad = tp_ext.reduce_from_region(grad, mesh[axis])
    return loss.detach(), grad, head.tp_shardings["weight"]


CASES = [
    ((2, 1, 1), [6, 1], "fsdp"),
    ((2, 1, 2), [3, 5], "fsdp"),
    ((2, 2, 1), [6, 0, 2, 5], "module"),
    ((1, 2, 2), [0, 4], "head"),
    ((3, 1, 1), [0, 0, 0], "head"),
    ((1, 1, 1), [5], "module"),
]


@pytest.mark.parametrize(("shape", "valid", "how"), CASES)
def test_the_loss_and_gradient_of_one_process(shape, valid, how):
    x, target = _batches(len(valid), valid)
    torch.manual_seed(1)
    weight = tp_ext.VocabParallelLMHead(HIDDEN, VOCAB, dtype=torch.float64).weight
    logits = F.linear(x.flatten(0, 1), weight)
    counted = target.flatten() != IGNORED
    want = (
        F.cross_entropy(logits, target.flatten(), reduction="sum") + 0.1 * logits.logsumexp(-1)[counted].square().sum()
    )
    want = want / counted.sum().clamp(min=1)
    want.backward()
    p = shape[2]
    results = ranks.run(_train, len(valid) * p, shape, valid, how)
    sharding = results[0][2]
    for index, (loss, grad, _) in enumerate(results):
        torch.testing.assert_close(loss, want.detach(), rtol=1e-13, atol=0)
        own = sharding.shard(weight.grad, index % p, p)
        torch.testing.assert_close(grad, own, rtol=1e-12, atol=1e-14)
    assert len({float(loss) for loss, *_ in results}) == 1  # to the last bit


@on_ranks(2)
def test_two_numbers_are_communicated(group):
    with tp_ext.debug.count_collectives() as counts:
        tp_ext.vocab_parallel_cross_entropy(torch.randn(3, VOCAB), torch.zeros(3).long(), None, mean_over=group)
    assert [(row.kind, row.payload) for row in counts.rows] == [("all_reduce", 16)]
