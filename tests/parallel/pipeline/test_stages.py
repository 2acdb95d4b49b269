"""Pipelines: losses, gradients and training of the stages are those of the model in one process."""

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining

import tp_ext
from tests.helpers import ranks
from tests.helpers.meshes import mesh_of
from tests.helpers.models import GPT, RichBlock
from tests.helpers.on_ranks import on_ranks
from tp_ext.parallel import pipeline_stages

VOCAB, BATCH, SEQ, MICROBATCHES, STEPS = 13, 8, 5, 4, 2
CLOSE = {"rtol": 1e-11, "atol": 1e-12}


def model(group=None, sp=False, *, blocks=4, tied=False, dropout=0.0):
    def block():
        made = RichBlock(group, sp, ffn=10, dropout=dropout, dtype=torch.float64)
        tp_ext.coalesce_gradients(made)
        return made

    torch.manual_seed(7)
    options = {"group": group, "sequence_parallel": sp, "dtype": torch.float64}
    return GPT(VOCAB, 8, block, blocks, tied=tied, **options)


TOKENS = BATCH // MICROBATCHES * SEQ
KEYWORDS = {"batch_size": BATCH // MICROBATCHES, "total_tokens": TOKENS}


def in_one_process(model, ids):
    return model(ids, batch_size=len(ids), total_tokens=ids.numel())


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


def optimizer_of(params, fused=False):
    """Fused: DTensor looks for the sharding of one operator, not of many for each shape."""
    return torch.optim.AdamW(params, lr=0.01, eps=1e-4, fused=fused)


def staged(made, mesh, schedule, **options):
    options = {"microbatches": MICROBATCHES, "loss": loss_of(mesh["tp"]), "count": valid} | options
    return pipeline_stages(made, mesh["pp"], schedule=schedule, **options)


def _train(group, sizes, schedule, options, sp=False, fsdp=False, tied=False, blocks=4):
    pp, dp, tp = sizes
    mesh = mesh_of(pp, dp, 1, tp)
    one = model(blocks=blocks, tied=tied)
    made = model(mesh["tp"], sp, blocks=blocks, tied=tied)
    data = mesh["dp"].size()
    sharded = mesh["dp"] if fsdp else None
    schedule = staged(made, mesh, schedule, mean_over=mesh["dp"], fsdp=sharded, **options)
    forwards = []
    for stage in schedule.stages:
        stage.register_forward_hook(lambda *_: forwards.append(1))
    optimizer, its = optimizer_of(schedule.parameters(), fsdp), optimizer_of(one.parameters())
    for step in range(STEPS):
        batches = [batch(step, k) for k in range(data)]
        ids, target = batches[mesh["dp"].get_local_rank()]
        schedule.step(ids, target=target, **KEYWORDS)
        every, goal = (torch.cat(both) for both in zip(*batches, strict=True))
        logits = in_one_process(one, every)
        want = loss_of(None, "mean")(logits, goal)
        want.backward()
        torch.testing.assert_close(schedule.loss, want.detach(), **CLOSE)
        own = in_microbatches(logits.detach().chunk(data)[mesh["dp"].get_local_rank()])
        sums = [loss_of(None)(some, t) for some, t in zip(own, in_microbatches(target), strict=True)]
        torch.testing.assert_close(schedule.losses, torch.stack(sums), **CLOSE)
        if not fsdp:
            _same_gradients(schedule, one)
        norm = tp_ext.clip_grad_norm_(schedule.stages, 0.5, mesh=mesh)
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(one.parameters(), 0.5), **CLOSE)
        for both in (optimizer, its):
            both.step()
            both.zero_grad()
    assert len(forwards) == STEPS * MICROBATCHES * len(schedule.stages)
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


def chosen(name, *others):
    """The others run in ``make test-all`` only: each schedule runs by itself."""
    return [name, *(pytest.param(other, marks=pytest.mark.exhaustive) for other in others)]


@pytest.mark.parametrize(
    ("schedule", "blocks"),
    [
        ("GPipe", 2),
        ("LoopedBFS", 4),
        ("InterleavedZeroBubble", 4),
        ("DualPipeV", 4),
        *(
            pytest.param(name, 4, marks=pytest.mark.exhaustive)  # by default in test_three_ranks and test_tied_head
            for name in ("GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble")
        ),
    ],
)
def test_training_is_that_of_one_process(schedule, blocks):
    ranks.run(_train, 2, (2, 1, 1), schedule, {}, blocks=blocks)


@pytest.mark.parametrize("schedule", chosen("ZBVZeroBubble", "GPipe", "Interleaved1F1B", "InterleavedZeroBubble"))
def test_with_tensor_and_sequence_parallelism(schedule):
    """One KV head on two ranks and three tokens a rank less: uneven shards of every kind."""
    ranks.run(_train, 4, (2, 1, 2), schedule, {"split": "parameters"}, sp=True)


@pytest.mark.parametrize(
    ("schedule", "sizes", "fsdp", "blocks"),
    [
        ("ZBVZeroBubble", (2, 1, 1), False, 4),
        ("1F1B", (3, 1, 1), False, 4),
        ("Interleaved1F1B", (2, 2, 1), True, 4),
        pytest.param("1F1B", (2, 1, 1), False, 4, marks=pytest.mark.exhaustive),
        pytest.param("1F1B", (2, 2, 1), True, 4, marks=pytest.mark.exhaustive),
        pytest.param("DualPipeV", (2, 2, 1), True, 4, marks=pytest.mark.exhaustive),
    ],
)
def test_tied_head(schedule, sizes, fsdp, blocks):
    """Also with the first and the last stage on one rank, and sharded by FSDP2 with other tokens on each data rank."""
    ranks.run(_train, torch.Size(sizes).numel(), sizes, schedule, {}, fsdp=fsdp, tied=True, blocks=blocks)


@pytest.mark.exhaustive
@pytest.mark.parametrize("schedule", ["Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"])
def test_fsdp(schedule):
    """By default with a tied head, in test_tied_head."""
    ranks.run(_train, 4, (2, 2, 1), schedule, {}, fsdp=True)


@pytest.mark.parametrize(
    ("schedule", "split"),
    [
        ("1F1B", [1, 1, 3]),
        pytest.param("InterleavedZeroBubble", [1, 1, 1, 1, 1, 2], marks=pytest.mark.exhaustive),
    ],
)
def test_three_ranks(schedule, split):
    ranks.run(_train, 3, (3, 1, 1), schedule, {"split": split}, blocks=sum(split))


def sequential(group=None):
    torch.manual_seed(7)
    options = {"group": group, "dtype": torch.float64}
    linears = [tp_ext.ParallelMLP(8, 10, **options) for _ in range(4)]
    return nn.Sequential(tp_ext.VocabParallelEmbedding(VOCAB, 8, **options), nn.Flatten(0, 1), *linears)


def square(output, target):
    return (output - target.flatten()[:, None]).square().mean()


@on_ranks(2)
def test_sequential(group, tmp_path):
    """A mean as the loss, two steps accumulated, torch's way of passing inputs, evaluation, a checkpoint."""
    path = tmp_path / "saved"
    mesh = mesh_of(2, 1, 1, 1)
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
    tp_ext.load_checkpoint(path, one)
    assert torch.equal(one[2].up.weight, sequential()[2].up.weight)


def _into_main_grad(param):
    param.main_grad += param.grad
    param.grad = None


@on_ranks(2, backend="gloo")
def test_tied_gradients_of_several_steps(group):
    """Gradients of several steps add up, in main_grad, too."""
    one, ids, target = model(tied=True), *batch(0)
    schedule = pipeline_stages(model(tied=True), group, microbatches=4, loss=loss_of(None), count=valid)
    (weight,) = (p for name, p in schedule.stages[0].named_parameters() if name in ("embedding.weight", "head.weight"))
    weight.main_grad = torch.zeros_like(weight)
    weight.register_post_accumulate_grad_hook(_into_main_grad)
    for _ in range(2):
        schedule.step(ids, target=target, **KEYWORDS)
        loss_of(None, "mean")(in_one_process(one, ids), target).backward()
    torch.testing.assert_close(weight.main_grad, one.head.weight.grad, **CLOSE)
    assert weight.grad is None


def _fill(stage):
    for name, param in stage.named_parameters():
        nn.init.constant_(param, 2.0 if name == "head.weight" else 1.0)


@on_ranks(2, backend="gloo")
def test_meta(group):
    """Stages on meta get memory, and their values from a full state; their tied weights are equal before."""
    mesh = mesh_of(2, 1, 1, 1)
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
    loss = loss_of(None, "mean")(in_one_process(whole, ids), target)
    loss.backward()
    torch.testing.assert_close(schedule.loss, loss.detach(), **CLOSE)
    _same_gradients(schedule, whole)


@pytest.mark.parametrize(
    ("schedule", "p", "meta"),
    [
        ("Interleaved1F1B", 2, True),
        ("1F1B", 2, False),
        *(pytest.param(name, p, True, marks=pytest.mark.exhaustive) for name, p in (("DualPipeV", 2), ("1F1B", 4))),
    ],
)
@on_ranks()
def test_weights_and_masks_by_name_are_those_of_one_process(group, schedule, p, meta):
    """Weights of stages on meta and masks are those of the model in one process, which sees the batch at once."""
    mesh = mesh_of(2, 1, 1, group.size() // 2)
    tp_ext.manual_seed(3, mesh)
    one = model(dropout=0.3)
    tp_ext.reset_parameters(one)
    with torch.device("meta" if meta else "cpu"):
        made = model(mesh["tp"], p > 2, dropout=0.3)
    if not meta:  # it has no names yet
        made.load_state_dict(one.state_dict())
    rows = BATCH // MICROBATCHES

    def context(step, i):
        return tp_ext.random.at(step, i, batch_offset=i * rows, seq=SEQ)

    init = tp_ext.reset_parameters if meta else None
    schedule = staged(made, mesh, schedule, init=init, context=context)
    for step in range(2):
        ids, target = batch(step)
        schedule.step(ids, target=target, **KEYWORDS)
        with tp_ext.random.at(step, batch_offset=0, seq=SEQ):
            loss = loss_of(None, "mean")(in_one_process(one, ids), target)
        loss.backward()
        torch.testing.assert_close(schedule.loss, loss.detach(), **CLOSE)
        _same_gradients(schedule, one)


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
