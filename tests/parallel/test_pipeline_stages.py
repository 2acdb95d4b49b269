"""Pipelines: losses, gradients and training of the stages are those of the model in one process."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

import tp_ext
from tests.helpers import ranks
from tests.helpers.models import RichBlock
from tp_ext.parallel import pipeline_stages

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
    with torch.device("meta") if options.pop("meta", False) else nullcontext():
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
