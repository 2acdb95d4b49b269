"""Errors of pipelines, raised on every rank; the balance of stages; models that cannot be called on fake tensors."""

import itertools

import pytest
import torch
from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from tests.helpers import ranks
from tests.parallel.pipeline.test_stages import model, square
from tp_ext.parallel import PipelineShapeWarning, pipeline_stages
from tp_ext.parallel.pipeline.split import balanced


class Compiled(nn.Sequential):
    def __init__(self, *blocks):
        super().__init__(*(torch.compile(block, backend="eager") for block in blocks))


def _checkpointed_in_forward():
    class Block(nn.Linear):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)

    return nn.Sequential(*(Block(4, 4) for _ in range(4)))


def _hooked():
    net = linears()
    net[1].weight.register_post_accumulate_grad_hook(lambda param: None)
    return net


def _with_a_parameter_in_no_part():
    net = model()
    net.scale = nn.Parameter(torch.ones(1))
    return net


def _with_a_shared_module():
    shared = nn.Linear(4, 4)
    return nn.Sequential(nn.Sequential(shared), *linears(2), nn.Sequential(shared))


def _tied_blocks():
    net = linears()
    net[1].weight = net[0].weight
    return net


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, device="meta"))


def _on_meta():
    return nn.Sequential(Bare(), Bare())


def linears(number=4):
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(number)))


REFUSED = [  # schedule, model, options, message
    ("Zero", linears, {}, r"schedule: 'Zero' must be one of GPipe, 1F1B, LoopedBFS"),
    ("1F1B", linears, {"microbatches": 1}, r"microbatches: 1 must be at least the number of stages, 2, with 1F1B"),
    ("DualPipeV", linears, {"microbatches": 3}, r"microbatches: 3 must be at least the number of stages, 4"),
    ("Interleaved1F1B", linears, {"microbatches": 5}, r"microbatches: 5 must be a multiple of 2, the number of rounds"),
    ("GPipe", linears, {"microbatches": 0}, r"microbatches: 0 must be an integer of at least 1"),
    ("Interleaved1F1B", lambda: linears(3), {}, r"model: 3 blocks must be at least the number of stages, 4"),
    ("1F1B", linears, {"stages_per_rank": 2}, r"stages_per_rank: 2 must be 1 with 1F1B"),
    ("1F1B", linears, {"split": [1, 1]}, r"split: \[1, 1\] must be None, 'parameters', 2 positive numbers of blocks"),
    ("1F1B", lambda: nn.Linear(2, 2), {}, r"model: Linear must have pipeline_parts\(\)"),
    ("1F1B", _with_a_parameter_in_no_part, {}, r"model: 'scale' must be in one of the parts"),
    (
        "1F1B",
        _with_a_shared_module,
        {},
        r"model: the module '3.0' must be in one stage, but it is used in the stages 0",
    ),
    ("1F1B", linears, {"loss": None}, r"loss: None must be a function"),
    ("1F1B", linears, {"mean_over": "world"}, r"mean_over: must be given with count"),
    ("1F1B", linears, {"gradient_reduction": "max"}, r"gradient_reduction: 'max' must be one of"),
    ("1F1B", linears, {"gradient_reduction": "sum"}, r"gradient_reduction: 'sum' must be given with count"),
    ("1F1B", _tied_blocks, {"fsdp": "world"}, r"fsdp: the parameter '1.weight' must not be '0.weight', too"),
    ("1F1B", linears, {"fsdp": 3}, r"fsdp: 3 must be a mesh"),
    ("1F1B", linears, {"fsdp": "world"}, r"fsdp: .* must be a data-parallel axis, not that of the pipeline"),
    (["1F1B"], linears, {}, r"schedule: \['1F1B'\] must be a name, one of GPipe"),
    ("1F1B", linears, {"context": 3}, r"context: 3 must be a function of the step and the microbatch, or None"),
    ("1F1B", linears, {"init": 3}, r"init: 3 must be a function of a module, or None"),
    ("1F1B", linears, {"split": 3}, r"split: 3 must be None, 'parameters', or a list"),
    ("1F1B", _on_meta, {}, r"init: must be given for a model on meta in which Bare has parameters or buffers, but no"),
    ("ZBVZeroBubble", lambda: Compiled(*linears()), {}, r"model: .* is compiled, and must not with ZBVZeroBubble"),
    ("ZBVZeroBubble", lambda: nn.Sequential(*map(checkpoint_wrapper, linears())), {}, r"recomputes its activations"),
    ("ZBVZeroBubble", _hooked, {}, r"model: the parameter 'weight' has a post-accumulate-grad hook"),
]


def _refused(group, index):
    schedule, make, options, _ = REFUSED[index]
    options = {"microbatches": 4, "loss": square} | options
    if options.get("mean_over"):
        options["mean_over"] = group
    if options.get("fsdp") == "world":
        options["fsdp"] = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",))
    pipeline_stages(make(), group, schedule=schedule, **options)


@pytest.mark.parametrize("index", range(len(REFUSED)))
def test_refused_before_anything_is_built(index):
    ranks.run_raises(_refused, 2, (ValueError, TypeError), REFUSED[index][3], index)


def _made_twice(group):
    net = linears()
    for _ in range(2):
        pipeline_stages(net, group, microbatches=2, loss=square)


def test_a_model_has_stages_once():
    match = "model: Sequential must not have been parallelized before, by parallelize or pipeline_stages"
    ranks.run_raises(_made_twice, 2, ValueError, match, in_turns=False)


def _steps(group, case):
    schedule = pipeline_stages(
        _checkpointed_in_forward() if case == "checkpoint" else linears(),
        group,
        schedule="ZBVZeroBubble",
        microbatches=4,
        loss=lambda y, t: y.mean(),
    )
    x = torch.ones(8, 4)
    if case == "nothing yet":
        return schedule.losses
    if case in ("short", "later"):
        schedule.step(x, target=x)
    if case == "hook":
        schedule.stages[0].register_parameter("bias", nn.Parameter(torch.ones(1)))
        schedule.stages[0].bias.register_post_accumulate_grad_hook(print)
    inputs = {"no input": (), "odd": (torch.ones(6, 4),), "short": (torch.ones(4, 4),)}.get(case, (x,))
    target = {"no target": None, "short": torch.ones(4, 4), "later": torch.ones(8, 2)}.get(case, x)
    if case == "keyword of a microbatch":
        schedule.step(arg_mbs=[(x,)] * 4, kwarg_mbs=[{"mask": x}] * 4, target_mbs=[x] * 4)
    schedule.step(*inputs, target=target, **{"mask": x} if case == "keyword" else {})


STEPS = {
    "nothing yet": r"losses: there must be a step first",
    "no input": r"inputs: must be given on the ranks of the first stage",
    "no target": r"target: must be given on the ranks of the last stage",
    "odd": r"inputs: shape \(6, 4\) must be a multiple of 4 microbatches in dim 0",
    "short": r"inputs: microbatches of \[1, 4\] float32 must be of \[2, 4\] float32, as in the first step; fill a last",
    "later": r"target: microbatches of \[2, 2\] float32 must be of \[2, 4\]",
    "keyword": r"step: 'mask' must be an argument of a part of the model",
    "keyword of a microbatch": r"step: 'mask' must be an argument of a part of the model",
    "checkpoint": r"model: '.*Block.forward' recomputes its activations .* must not with ZBVZeroBubble",
    "hook": r"model: the parameter 'bias' has a post-accumulate-grad hook",
}


@pytest.mark.parametrize("case", STEPS)
def test_refused_by_step(case):
    errors = (ValueError, TypeError, RuntimeError)
    ranks.run_raises(_steps, 2, errors, STEPS[case], case, in_turns=False)


@pytest.mark.parametrize(
    ("costs", "stages", "want"),
    [
        ([0, 1, 1, 1, 1, 0], 2, [2, 2]),
        ([0.1, 1, 1, 1, 1, 1, 0.1], 3, [1, 2, 2]),
        ([3, 1, 1, 1, 1, 1, 1, 0], 3, [1, 2, 3]),
        ([0, 5, 1, 1, 1, 1, 4], 3, [1, 3, 1]),
        ([0, 1, 1, 1, 0], 3, [1, 1, 1]),
    ],
)
def test_balance(costs, stages, want):
    found = balanced(costs, stages)
    blocks = [costs[0] + costs[1], *costs[2:-2], costs[-2] + costs[-1]]
    begins = [sum(found[:index]) for index in range(stages)]
    assert max(sum(blocks[b : b + n]) for b, n in zip(begins, found, strict=True)) == _least(blocks, stages)
    assert found == want


def _least(blocks, stages):
    """The cost of the costliest stage at best, over all splits."""
    cuts = itertools.combinations(range(1, len(blocks)), stages - 1)
    return min(max(sum(blocks[a:b]) for a, b in itertools.pairwise([0, *cut, len(blocks)])) for cut in cuts)


class Unshaped(nn.Linear):
    """A module whose forward needs data."""

    def forward(self, x):
        return super().forward(x) * float(x.sum() * 0 + 2)


def _unshaped(group):
    schedule = pipeline_stages(nn.Sequential(*(Unshaped(4, 4) for _ in range(2))), group, microbatches=2, loss=square)
    x = torch.ones(4, 4)
    with pytest.warns(PipelineShapeWarning, match="cannot be computed without running the model"):
        schedule.step(x, target=x[:, 0])
    return schedule.losses


def test_shapes_that_need_data():
    first, second = ranks.run(_unshaped, 2)
    assert torch.equal(first, second) and first.isfinite().all()
