"""Mistakes that one rank alone would see, or none: functions that read parameters, coalesced gradients under a schedule
that splits the backward, a batch that is wrong or empty on one data rank."""

import functools
import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleZBVZeroBubble

import tp_ext
from tests.helpers import ranks
from tests.helpers.meshes import mesh_of
from tp_ext.model.census import census
from tp_ext.parallel import pipeline_stages
from tp_ext.parallel.pipeline.parts import PipelinePart, parts_of

pytestmark = pytest.mark.core


class Tied(nn.Module):
    """A head that is a function of the embedding's weight."""

    def __init__(self, way):
        super().__init__()
        torch.manual_seed(0)
        self.e = nn.Embedding(6, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.last, self.way, self.factor = nn.Linear(4, 4), way, 2.0

    def head(self, x):
        return F.linear(x, self.e.weight)

    def doubled(self, x):
        return x * self.factor

    def pipeline_parts(self):
        weight, last = self.e.weight, self.last
        head = {
            "method": self.head,
            "closure": lambda x: x @ weight.T,
            "partial": functools.partial(F.linear, weight=weight),
            "module": lambda x: last(x),
            "view": functools.partial(F.linear, weight=weight[:]),
            "none": self.doubled,
        }[self.way]
        return self.e, self.blocks, [self.last, head]


WRONG = ["method", "closure", "partial", "module", "view"]


@pytest.mark.parametrize("way", WRONG)
def test_a_function_that_reads_a_parameter_is_refused(way):
    part = PipelinePart(parts_of(census(Tied(way))).all)
    with pytest.raises(
        ValueError, match=r"model: the part .*, a function, must not read a parameter, as that of shape"
    ):
        part(torch.tensor([1, 2]))


def test_a_method_that_reads_no_parameter_is_a_part():
    model = Tied("none")
    want = model.doubled(model.last(model.blocks[1](model.blocks[0](model.e(torch.tensor([1, 2]))))))
    assert torch.equal(PipelinePart(parts_of(census(model)).all)(torch.tensor([1, 2])), want)


def _stages(group, way):
    made = pipeline_stages(Tied(way), group, schedule="GPipe", microbatches=2, loss=lambda y, t: y.sum() * 0 + t.sum())
    x = torch.arange(4)
    made.step(*((x,) if group.rank() == 0 else ()), target=x.float())


@pytest.mark.skipif(torch.__version__ < "2.15", reason="pipelines need it")
def test_it_is_refused_on_every_rank():
    """Rank 0 does not have the head."""
    ranks.run_raises(
        _stages, 2, ValueError, r"must not read a parameter, as that of shape \(6, 4\)", "method", in_turns=False
    )


def _with_loss(group, way):
    model = Tied("none")
    weight = {"another stage": model.e, "this stage": model.last}[way].weight
    view = weight[:]
    pipeline = pipeline_stages(
        model, group, schedule="GPipe", microbatches=2, loss=lambda y, t: F.linear(y, view).sum()
    )
    x = torch.arange(4)
    pipeline.step(*((x,) if group.rank() == 0 else ()), target=x)


@pytest.mark.skipif(torch.__version__ < "2.15", reason="pipelines need it")
def test_a_loss_reads_parameters_of_its_stage_alone():
    text = r"loss: must not read a parameter of another stage, .* \(6, 4\)"
    ranks.run_raises(_with_loss, 2, ValueError, text, "another stage", in_turns=False)  # rank 0 has no loss
    ranks.run(_with_loss, 2, "this stage")


@functools.cache
def _alone():
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return groups[dist.get_rank()]


def _zero_bubble(group, undo):
    """Two stages on each rank, whose pipeline is this rank alone."""
    options = {"group": group, "sequence_parallel": True}
    stages = [nn.Sequential(tp_ext.RMSNorm(4, **options), tp_ext.ParallelMLP(4, 8, **options)) for _ in range(2)]
    x = torch.randn(4, 4)
    for stage in stages:
        tp_ext.coalesce_gradients(stage)
        if undo:
            tp_ext.uncoalesce_gradients(stage)
    made = [
        PipelineStage(one, i, 2, torch.device("cpu"), input_args=(x[:2],), output_args=(x[:2],), group=_alone())
        for i, one in enumerate(stages)
    ]
    schedule = ScheduleZBVZeroBubble(made, 2, loss_fn=lambda y, target: y.square().sum())
    try:
        schedule.step(x, target=x)
    except RuntimeError as error:
        seen, one = [], error
        while one is not None:
            seen, one = [*seen, str(one)], one.__cause__
        return " | ".join(seen)
    return "ran"


@pytest.mark.skipif(torch.__version__ < "2.15", reason="gloo: Pair is not connected, to the rank itself")
def test_a_schedule_of_torch_that_splits_the_backward_is_named():
    found = ranks.run(_zero_bubble, 2, False)
    match = r"coalesce_gradients: must be undone, by tp_ext.uncoalesce_gradients\(stage\), for ScheduleZBVZeroBubble"
    assert all(re.search(match, one) for one in found), found


def _net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))


def _loss(output, target):
    return F.cross_entropy(output, target)


def _run(group, rows, microbatches):
    run = tp_ext.parallelize(_net(), mesh_of(1, 2, 1, 1), microbatches=microbatches, loss=_loss)
    begin = sum(rows[: group.rank()])
    x = torch.arange(3.0 * sum(rows)).view(-1, 3).sin()[begin : begin + rows[group.rank()]]
    target = (torch.arange(sum(rows)) % 3)[begin : begin + rows[group.rank()]]
    value = run.step(x, target)
    return value, [param.grad for param in run.parameters()]


def test_a_batch_that_one_data_rank_finds_bad_is_the_error_of_all():
    match = r"inputs\[0\]: shape \(3, 3\) must be a multiple of 2 microbatches in dim 0, on data rank 1"
    messages = ranks.run_raises(_run, 2, ValueError, match, (4, 3), 2, in_turns=False)
    assert messages[0] == messages[1]


@pytest.mark.parametrize("rows", [(3, 0), (0, 3)])
def test_an_empty_batch_counts_as_no_tokens(rows):
    model = _net()
    x, target = torch.arange(9.0).view(-1, 3).sin(), torch.arange(3)
    want = _loss(model(x), target)
    want.backward()
    for value, grads in ranks.run(_run, 2, rows, 1):
        torch.testing.assert_close(value, want.detach().double(), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(grads, [param.grad for param in model.parameters()], rtol=1e-5, atol=1e-6)
