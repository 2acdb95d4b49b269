"""A loss that reads parameters of the model: that of the head, which forward leaves out, and those of blocks."""

import pytest
import torch
from torch import nn

import tp_ext
from tests.helpers import ranks
from tests.helpers.dtypes import default_dtype

STEPS = 2


class Headless(nn.Module):
    """A language model whose forward ends before its head."""

    def __init__(self, group):
        super().__init__()
        self.embedding = tp_ext.VocabParallelEmbedding(12, 8, group=group)
        self.blocks = nn.ModuleList([tp_ext.ParallelMLP(8, 16, group=group) for _ in range(2)])
        self.head = tp_ext.VocabParallelLMHead(8, 12, group=group)

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = x + block(x)
        return x

    def pipeline_parts(self):
        return [self.embedding], self.blocks, [self.head]


def _of_head(model, output, target):
    return model.head.loss(output, target)


def _of_block(model, output, target):
    return model.head.loss(output, target) + model.blocks[0].up.weight.square().sum()


def _of_block_alone(model, output, target):
    return output.square().sum() + model.blocks[0].up.weight.square().sum()


def _model(group):
    tp_ext.manual_seed(0)
    return Headless(group)


def _batch(step):
    ids = torch.randint(12, (8, 5), generator=torch.Generator().manual_seed(step))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def one_process():
    model = _model(None)
    optimizer, values = torch.optim.SGD(model.parameters(), lr=0.5), []
    for step in range(STEPS):
        inputs, target = _batch(step)
        loss = _of_head(model, model(inputs), target)
        loss.backward()
        values += [loss.detach(), nn.utils.clip_grad_norm_(model.parameters(), 1.0)]
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            values.append(_of_head(model, model(inputs), target))
    return torch.stack(values)


def _run(sizes, zero, loss):
    mesh = tp_ext.init_mesh("cpu", dp=sizes[0], tp=sizes[1])
    model = _model(mesh["tp"])
    run = tp_ext.parallelize(model, mesh, loss=lambda o, t: loss(model, o, t), zero=zero, microbatches=2)
    return run, run.optimizer(torch.optim.SGD, lr=0.5)


def _trained(group, sizes, zero, rows):
    """``rows``: of each data rank, out of the eight of a batch."""
    with default_dtype(torch.float64):
        run, optimizer = _run(sizes, zero, _of_head)
        values = []
        for step in range(STEPS):
            mine = [part.split(rows)[run.data_rank] for part in _batch(step)]
            values += [run.step(*mine), run.clip_grad_norm_(1.0)]
            optimizer.step()
            optimizer.zero_grad()
            values.append(run.evaluate(*mine))
        torch.testing.assert_close(torch.stack(values), one_process().double(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("sizes", "zero", "rows"),
    [
        *(((2, 1), zero, (4, 4)) for zero in (0, 1, 2, 3)),
        *(((2, 1), zero, (8, 0)) for zero in (0, 2, 3)),  # a rank without rows has gradients of the head, too
        ((2, 2), 3, (4, 4)),
    ],
)
def test_a_loss_may_read_the_head(sizes, zero, rows):
    ranks.run(_trained, sizes[0] * sizes[1], sizes, zero, rows, timeout=120)


def _refused(group, loss, rows):
    run, _ = _run((2, 1), 3, loss)
    run.step(*(part.split(rows)[run.data_rank] for part in _batch(0)))


@pytest.mark.parametrize("rows", [(4, 4), (8, 0)])
@pytest.mark.parametrize("loss", [_of_block, _of_block_alone])
def test_a_loss_must_not_read_what_has_been_freed(loss, rows):
    text = "loss: must not read a parameter of a block, which zero = 3 frees after the block's forward"
    ranks.run_raises(_refused, 2, ValueError, text, loss, rows, in_turns=False)
