"""Pipelines: losses, gradients and training of the stages are those of the model in one process."""

import itertools
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

import tp_ext
from tests.helpers import ranks
from tests.helpers.models import RichBlock
from tp_ext.parallel import PipelineShapeWarning, pipeline_stages
from tp_ext.parallel.pipeline_split import balanced

SCHEDULES = ["GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
VOCAB, BATCH, SEQ, MICROBATCHES = 13, 8, 5, 4
CLOSE = {"rtol": 1e-11, "atol": 1e-12}


class GPT(nn.Module):
    """Embedding, blocks, norm and a head that may be tied to the embedding."""

    def __init__(self, group=None, sp=False, *, blocks=4, tied=False, dropout=0.0):
        super().__init__()
        options = {"group": group, "sequence_parallel": sp, "dtype": torch.float64}
        self.embedding = tp_ext.VocabParallelEmbedding(VOCAB, 8, **options)
        self.blocks = nn.ModuleList(
            RichBlock(group, sp, ffn=10, dropout=dropout, dtype=torch.float64) for _ in range(blocks)
        )
        for block in self.blocks:
            tp_ext.coalesce_gradients(block)
        self.last = nn.ModuleDict({"norm": tp_ext.RMSNorm(8, **options)})
        self.head = tp_ext.VocabParallelLMHead(8, VOCAB, **options)
        if tied:
            self.head.weight = self.embedding.weight

    def pipeline_parts(self):
        return [torch.flatten, self.embedding], self.blocks, [self.last["norm"], self.head]

    def forward(self, ids):
        x = self.embedding(ids.flatten())
        for block in self.blocks:
            x = block(x, len(ids), ids.numel())
        return self.head(self.last["norm"](x), ids.numel())


def model(group=None, sp=False, **options):
    torch.manual_seed(7)
    return GPT(group, sp, **options)


TOKENS = BATCH // MICROBATCHES * SEQ
KEYWORDS = {"batch_size": BATCH // MICROBATCHES, "tokens": TOKENS, "total_tokens": TOKENS}


def batch(step, data=0, batch=BATCH):
    generator = torch.Generator().manual_seed(10 * step + data)
    ids = torch.randint(VOCAB, (batch, SEQ), generator=generator)
    target = ids.roll(1, 1)
    target[0] = target[3, 1:] = -100  # unequal numbers of tokens in the microbatches
    return ids, target


def in_microbatches(tensor):
    return tensor.chunk(MICROBATCHES)


def valid(target):
    return (target != -100).sum()


def loss_of(group, reduction="sum"):
    def loss(logits, target):
        return tp_ext.vocab_parallel_cross_entropy(
            logits, target.flatten(), group, vocab_size=VOCAB, reduction=reduction
        )

    return loss


def optimizer_of(params):
    return torch.optim.AdamW(params, lr=0.01, eps=1e-4)


def _train(group, sizes, schedule, options, sp=False, fsdp=False, tied=False, blocks=4):
    mesh = tp_ext.init_mesh("cpu", **dict(zip(("pp", "dp", "tp"), sizes, strict=True)))
    one = model(blocks=blocks, tied=tied)
    made = model(mesh["tp"], sp, blocks=blocks, tied=tied)
    data = mesh["dp"].size()
    schedule = pipeline_stages(
        made,
        mesh["pp"],
        schedule=schedule,
        microbatches=MICROBATCHES,
        loss=loss_of(mesh["tp"]),
        count=valid,
        mean_over=mesh["dp"],
        fsdp=mesh["dp"] if fsdp else None,
        **options,
    )
    forwards = []
    for stage in schedule.stages:
        stage.register_forward_hook(lambda *_: forwards.append(1))
    optimizer, its = optimizer_of(schedule.parameters()), optimizer_of(one.parameters())
    for step in range(3):
        batches = [batch(step, k) for k in range(data)]
        ids, target = batches[mesh["dp"].get_local_rank()]
        schedule.step(ids, target=target, **KEYWORDS)
        every, goal = (torch.cat(both) for both in zip(*batches, strict=True))
        want = loss_of(None, "mean")(one(every), goal)
        want.backward()
        torch.testing.assert_close(schedule.loss, want.detach(), **CLOSE)
        sums = [loss_of(None)(one(i), t) for i, t in zip(*map(in_microbatches, (ids, target)), strict=True)]
        torch.testing.assert_close(schedule.losses, torch.stack(sums).detach(), **CLOSE)
        if not fsdp:
            _same_gradients(schedule, one)
        norm = tp_ext.clip_grad_norm_(schedule.stages, 0.5, mesh=mesh)
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(one.parameters(), 0.5), **CLOSE)
        for both in (optimizer, its):
            both.step()
            both.zero_grad()
    assert len(forwards) == 3 * MICROBATCHES * len(schedule.stages)
    tp_ext.debug.check(schedule.stages, mesh=mesh, optimizer=optimizer)
    state = tp_ext.full_state_dict(schedule.stages, mesh=mesh)
    assert state.keys() == one.state_dict().keys()
    for name, value in one.state_dict().items():
        torch.testing.assert_close(state[name], value, **CLOSE)


def _same_gradients(schedule, one):
    for stage in schedule.stages:
        table = dict(tp_ext.layouts(stage))
        for name, param in stage.named_parameters():
            torch.testing.assert_close(param.grad, table[name].shard(one.get_parameter(name).grad), msg=name, **CLOSE)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_training_is_that_of_one_process(schedule):
    ranks.run(_train, 2, (2, 1, 1), schedule, {})


@pytest.mark.parametrize("schedule", ["GPipe", "Interleaved1F1B", "ZBVZeroBubble", "InterleavedZeroBubble"])
def test_with_tensor_and_sequence_parallelism(schedule):
    """One KV head on two ranks and three tokens a rank less: uneven shards of every kind."""
    ranks.run(_train, 4, (2, 1, 2), schedule, {"split": "parameters"}, sp=True)


@pytest.mark.parametrize(
    ("schedule", "sizes", "fsdp"),
    [
        ("1F1B", (2, 1, 1), False),
        ("ZBVZeroBubble", (2, 1, 1), False),
        ("1F1B", (3, 1, 1), False),
        ("1F1B", (2, 2, 1), True),
        ("DualPipeV", (2, 2, 1), True),
    ],
)
def test_tied_head(schedule, sizes, fsdp):
    """Also with the first and the last stage on one rank, and sharded by FSDP2 with other tokens on each data rank."""
    ranks.run(_train, torch.Size(sizes).numel(), sizes, schedule, {}, fsdp=fsdp, tied=True)


@pytest.mark.parametrize("schedule", ["Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"])
def test_fsdp(schedule):
    ranks.run(_train, 4, (2, 2, 1), schedule, {}, fsdp=True)


def test_three_ranks():
    ranks.run(_train, 3, (3, 1, 1), "InterleavedZeroBubble", {"split": [1, 1, 1, 1, 1, 2]}, blocks=7)


def sequential(group=None):
    torch.manual_seed(7)
    options = {"group": group, "dtype": torch.float64}
    linears = [tp_ext.ParallelMLP(8, 10, **options) for _ in range(4)]
    return nn.Sequential(tp_ext.VocabParallelEmbedding(VOCAB, 8, **options), nn.Flatten(0, 1), *linears)


def square(output, target):
    return (output - target.flatten()[:, None]).square().mean()


def _sequential(group, path):
    """A mean as the loss, two steps accumulated, torch's way of passing inputs, evaluation, a checkpoint."""
    mesh = tp_ext.init_mesh("cpu", pp=2)
    one, ids, target = sequential(), *batch(0)
    schedule = pipeline_stages(sequential(), mesh["pp"], schedule="ZBVZeroBubble", microbatches=4, loss=square)
    assert isinstance(schedule, pipelining.ScheduleZBVZeroBubble)
    first = group.rank() == 0  # of a V: also the last stage
    for _ in range(2):
        seen = []
        schedule.step(*((ids,) if first else ()), target=target if first else None, losses=seen)
    want = square(one(ids), target)
    (2 * want).backward()
    _same_gradients(schedule, one)
    torch.testing.assert_close(schedule.loss, want.detach(), **CLOSE)
    torch.testing.assert_close(schedule.losses.mean(), want.detach(), **CLOSE)
    assert len(seen) == (4 if first else 0)
    result = schedule.eval(ids)
    assert result is None if not first else torch.equal(result, one(ids))
    assert schedule.next_step == 2 and 0 < schedule.bubble < 1
    tp_ext.save_checkpoint(path, schedule.stages, mesh=mesh)
    with torch.no_grad():
        for param in one.parameters():
            param.zero_()
    tp_ext.load_checkpoint(path, one, group=None)
    assert torch.equal(one[2].up.weight, sequential()[2].up.weight)


def test_sequential(tmp_path):
    ranks.run(_sequential, 2, tmp_path / "saved")


def _tied_gradients(group):
    """Gradients of several steps add up, in main_grad, too."""
    one, ids, target = model(tied=True), *batch(0)
    schedule = pipeline_stages(model(tied=True), group, microbatches=4, loss=loss_of(None), count=valid)
    (weight,) = (p for name, p in schedule.stages[0].named_parameters() if name in ("embedding.weight", "head.weight"))
    weight.main_grad = torch.zeros_like(weight)
    weight.register_post_accumulate_grad_hook(_into_main_grad)
    for _ in range(2):
        schedule.step(ids, target=target, **KEYWORDS)
        loss_of(None, "mean")(one(ids), target).backward()
    torch.testing.assert_close(weight.main_grad, one.head.weight.grad, **CLOSE)
    assert not weight.grad.any()


def _into_main_grad(param):
    param.main_grad += param.grad
    param.grad = None


def test_tied_gradients_of_several_steps():
    ranks.run(_tied_gradients, 2)


def _meta(group):
    """Stages on meta get memory, and their values from a full state; their tied weights are equal before."""
    mesh = tp_ext.init_mesh("cpu", pp=2)
    whole = model(tied=True)
    with torch.device("meta"):
        made = model(tied=True)
    schedule = pipeline_stages(made, mesh["pp"], microbatches=4, loss=loss_of(None), count=valid, init=_fill)
    assert not any(param.is_meta for param in schedule.parameters())
    assert any(param.is_meta for param in made.parameters())
    tp_ext.debug.check(schedule.stages, mesh=mesh)
    assert all(param.eq(1.0).all() for param in schedule.parameters())  # the copy is that of the first stage
    tp_ext.load_full_state_dict(schedule.stages, whole.state_dict(), mesh=mesh)
    ids, target = batch(0)
    schedule.step(ids, target=target, **KEYWORDS)
    loss = loss_of(None, "mean")(whole(ids), target)
    loss.backward()
    torch.testing.assert_close(schedule.loss, loss.detach(), **CLOSE)
    _same_gradients(schedule, whole)


def _fill(stage):
    for name, param in stage.named_parameters():
        nn.init.constant_(param, 2.0 if name == "head.weight" else 1.0)


def test_meta():
    ranks.run(_meta, 2)


def _by_name(group, schedule, sp):
    """Weights of stages on meta and masks are those of the model in one process, which sees the batch at once."""
    mesh = tp_ext.init_mesh("cpu", pp=2, dp=1, tp=-1)
    tp_ext.manual_seed(3, mesh)
    one = model(dropout=0.3)
    tp_ext.reset_parameters(one)
    with torch.device("meta"):
        made = model(mesh["tp"], sp, dropout=0.3)
    rows = BATCH // MICROBATCHES
    schedule = pipeline_stages(
        made,
        mesh["pp"],
        schedule=schedule,
        microbatches=MICROBATCHES,
        loss=loss_of(mesh["tp"]),
        count=valid,
        init=tp_ext.reset_parameters,
        context=lambda step, i: tp_ext.random.at(step, i, batch_offset=i * rows, seq=SEQ),
    )
    for step in range(2):
        ids, target = batch(step)
        schedule.step(ids, target=target, **KEYWORDS)
        with tp_ext.random.at(step, batch_offset=0, seq=SEQ):
            loss = loss_of(None, "mean")(one(ids), target)
        loss.backward()
        torch.testing.assert_close(schedule.loss, loss.detach(), **CLOSE)
        _same_gradients(schedule, one)


@pytest.mark.parametrize(("schedule", "p"), [("Interleaved1F1B", 2), ("DualPipeV", 2), ("1F1B", 4)])
def test_weights_and_masks_by_name_are_those_of_one_process(schedule, p):
    ranks.run(_by_name, p, schedule, p > 2, timeout=120)


class Sleeping(torch.autograd.Function):
    """A copy that takes a fixed time, in forward only with ``both``."""

    @staticmethod
    def forward(ctx, x, seconds, both):
        ctx.seconds = seconds
        time.sleep(seconds if both else 0)
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        time.sleep(ctx.seconds)
        return dy, None, None


class SleepingBlock(nn.Module):
    """A block whose forward, gradient of the input and gradient of the weight take the same time each."""

    def __init__(self, seconds):
        super().__init__()
        self.weight, self.seconds = nn.Parameter(torch.ones(4)), seconds

    def forward(self, x):
        x = x + 0 * self.weight  # for the first one, too, the gradient of its input is computed
        return Sleeping.apply(x, self.seconds, True) * Sleeping.apply(self.weight, self.seconds, False)


def _bubble(group, name):
    schedule = pipeline_stages(
        nn.Sequential(*(SleepingBlock(0.03) for _ in range(4))),
        group,
        schedule=name,
        microbatches=4,
        loss=lambda y, t: y.mean(),
    )
    x, found = torch.ones(4, 4), []
    schedule.step(x, target=x)
    for _ in range(3):
        dist.barrier()
        schedule.step(x, target=x)
        found.append(schedule.bubble)
    return min(found)


@pytest.mark.parametrize(("name", "ideal"), [("1F1B", 1 / 5), ("Interleaved1F1B", 1 / 9)])
def test_bubble(name, ideal):
    """(p - 1) / (m v + p - 1) of p = 2 ranks, m = 4 microbatches and v stages on each rank; more on a busy machine."""
    found = ranks.run(_bubble, 2, name)
    assert found[0] == pytest.approx(found[1], abs=1e-9)
    assert ideal - 0.01 < found[0] < ideal + 0.25


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


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, device="meta"))


def _on_meta():
    return nn.Sequential(Bare(), Bare())


def linears(number=4):
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(number)))


REFUSED = [  # schedule, model, options, message
    ("Zero", linears, {}, r"schedule: 'Zero' must be one of \['GPipe', '1F1B', 'LoopedBFS'"),
    ("1F1B", linears, {"microbatches": 1}, r"microbatches: 1 must be at least the number of stages, 2, with 1F1B"),
    ("DualPipeV", linears, {"microbatches": 3}, r"microbatches: 3 must be at least the number of stages, 4"),
    ("Interleaved1F1B", linears, {"microbatches": 5}, r"microbatches: 5 must be a multiple of 2, the number of rounds"),
    ("GPipe", linears, {"microbatches": 0}, r"microbatches: 0 must be a positive integer"),
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
    ("1F1B", linears, {"fsdp": 3}, r"fsdp: 3 must be a mesh"),
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
    pipeline_stages(make(), group, schedule=schedule, **options)


@pytest.mark.parametrize("index", range(len(REFUSED)))
def test_refused_before_anything_is_built(index):
    ranks.run_raises(_refused, 2, (ValueError, TypeError), REFUSED[index][3], index)


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
    schedule.step(*inputs, target=target, **{"mask": x} if case == "keyword" else {})


STEPS = {
    "nothing yet": r"losses: there must be a step first",
    "no input": r"inputs: must be given on the ranks of the first stage",
    "no target": r"target: must be given on the ranks of the last stage",
    "odd": r"inputs: shape \(6, 4\) must be a multiple of 4 microbatches in dim 0",
    "short": r"inputs: microbatches of \[1, 4\] float32 must be of \[2, 4\] float32, as in the first step; fill a last",
    "later": r"target: microbatches of \[2, 2\] float32 must be of \[2, 4\]",
    "keyword": r"step: 'mask' must be an argument of a part of the model",
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
