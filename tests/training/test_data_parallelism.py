"""ZeRO-0 to ZeRO-3 by torch's parts around our layers: training as in one process, and the bytes that a rank holds."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import tp_ext
from tests.helpers import ranks
from tests.helpers.dtypes import default_dtype
from tests.helpers.meshes import mesh_of
from tests.helpers.on_ranks import on_ranks

VOCAB, MICRO, STEPS = 13, 2, 2
STAGES = ("0", "1", "2", "3", "offload", "mixed")


class Model(nn.Module):
    def __init__(self, group, hidden=8, ffn=12, layers=2, vocab=VOCAB):
        super().__init__()
        self.embedding = tp_ext.VocabParallelEmbedding(vocab, hidden, group=group)
        blocks = (
            (tp_ext.RMSNorm(hidden, group=group), tp_ext.ParallelMLP(hidden, ffn, group=group)) for _ in range(layers)
        )
        self.blocks = nn.ModuleList(nn.Sequential(*block) for block in blocks)
        self.head = tp_ext.VocabParallelLMHead(hidden, vocab, group=group)

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def sharded(model, mesh, **options):
    for one in (model.embedding, *model.blocks, model.head):
        fully_shard(one, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def fused(model):
    """DTensor looks for the sharding of one operator, not of many for each shape."""
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4, fused=True)


def staged(model, stage, mesh):
    """The model and its optimizer as the page has them."""
    options = {"lr": 0.01, "eps": 1e-4}
    if stage in "01":
        group = mesh.get_group()
        model = DistributedDataParallel(model, process_group=group)
        if stage == "0":
            return model, torch.optim.AdamW(model.parameters(), **options)
        return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, process_group=group, **options)
    policy = {"reshard_after_forward": stage != "2"}
    if stage == "offload":
        policy["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    if stage == "mixed":
        policy["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64)
    model = sharded(model, mesh, **policy)
    return model, fused(model)


def batch(step, micro, part):
    """Tokens and targets of one data-parallel rank, of which the first part + micro have no loss."""
    ids = torch.randint(VOCAB, (7,), generator=torch.Generator().manual_seed(100 * step + 10 * micro + part))
    target = ids.roll(1)
    target[: part + micro] = -100
    return ids, target


def train(model, optimizer, tp, parts, over):
    """Returns the losses of the microbatches, the same on all ranks, and, for each microbatch, the number of reductions
    over the data axis."""
    losses, reduced = [], [0] * MICRO
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(MICRO):
            last = micro == MICRO - 1
            ids, target = (
                torch.cat(found) for found in zip(*(batch(step, micro, part) for part in parts), strict=True)
            )
            wait = model.no_sync() if isinstance(model, DistributedDataParallel) and not last else torch.enable_grad()
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(last)
            with wait, tp_ext.debug.count_collectives() as counts:
                options = {"vocab_size": VOCAB, "mean_over": over}
                loss = tp_ext.vocab_parallel_cross_entropy(model(ids), target, tp, **options)
                (loss / MICRO).backward()
            reduced[micro] += gradients_reduced(counts, tp)
            losses.append(loss.detach())
        optimizer.step()
    return torch.stack(losses).double(), reduced


def gradients_reduced(counts, tp):
    """All reductions but those over the tensor-parallel axis and those of the two numbers of the loss."""
    inner = tuple(dist.get_process_group_ranks(tp.get_group())) if tp is not None else ()
    kinds = ("all_reduce", "reduce_scatter")
    return sum(row.number for row in counts.rows if row.kind in kinds and row.ranks != inner and row.payload > 16)


def _seeded(group):
    torch.manual_seed(5)
    return Model(group)


def dense(parts):
    model = _seeded(None)
    losses, _ = train(model, torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4), None, parts, None)
    return losses, {name: value.detach() for name, value in model.state_dict().items()}


def _compare(make, tp, parts, mine, over, bound):
    with default_dtype(torch.float64):
        want, want_state = dense(parts)
        model, optimizer = make(_seeded(tp))
        losses, reduced = train(model, optimizer, tp, mine, over)
        state = tp_ext.full_state_dict(model)
        assert reduced[0] == 0 < reduced[1]
        torch.testing.assert_close(losses, want, rtol=bound, atol=bound)
        torch.testing.assert_close(dict(state), want_state, rtol=bound, atol=bound)


@on_ranks(4, backend="gloo")
def test_every_stage_trains_as_one_process(group):
    """Two microbatches a step, of which the first reduces nothing; the ranks have unequal numbers of tokens."""
    mesh = mesh_of(2, 2, names=("dp", "tp"))
    for stage in STAGES:
        bound = 1e-4 if stage == "mixed" else 1e-11
        own = [mesh["dp"].get_local_rank()]
        _compare(lambda m, s=stage: staged(m, s, mesh["dp"]), mesh["tp"], [0, 1], own, mesh["dp"], bound)


@on_ranks(4)
def test_hsdp_trains_as_one_process(group):
    mesh = mesh_of(2, 2, 1, names=("replicate", "shard", "tp"))
    data = mesh["replicate", "shard"]

    def make(model):
        model = sharded(model, data)
        return model, fused(model)

    _compare(make, mesh["tp"], [0, 1, 2, 3], [group.rank()], group, 1e-11)


def local_bytes(tensors):
    return sum((tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes for tensor in tensors)


def _held(dp, tp, stage):
    """Bytes of parameters, gradients and states on the first of dp x tp ranks, of which the others are imaginary."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=dp * tp)
    try:
        mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
        model = Model(mesh["tp"], hidden=64, ffn=256, layers=7, vocab=256)
        elements = sum(param.numel() for param in model.parameters())  # on a rank of tp
        model, optimizer = staged(model, stage, mesh["dp"])
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        optimizer.step()
        inner = getattr(optimizer, "optim", optimizer)
        states = [value for state in inner.state.values() for value in state.values()]
        grads = [param.grad for param in model.parameters()]
        return elements, [local_bytes(model.parameters()), local_bytes(grads), local_bytes(states)]
    finally:
        dist.destroy_process_group()


def _all_held():
    return {(dp, tp, stage): _held(dp, tp, stage) for dp in (2, 4) for tp in (1, 2) for stage in "0123"}


def test_bytes_are_those_of_the_table():
    """docs/guide/data_parallelism.md, within 1%."""
    for (dp, tp, stage), (elements, held) in ranks.run_fresh(_all_held).items():
        assert elements == pytest.approx(16 * 64 * 256 / tp, rel=0.02)
        of_params, of_states = (dp if stage in "23" else 1), (1 if stage == "0" else dp)
        want = [4 * elements / of_params, 4 * elements / of_params, 8 * elements / of_states]
        assert held == pytest.approx(want, rel=0.01), (dp, tp, stage)
