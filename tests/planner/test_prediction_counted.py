"""Predicted collectives and bytes against counted ones, of trainings of random layouts on simulated ranks."""

import random
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import tp_ext
from tests.helpers.planned_model import Model
from tp_ext import planner
from tp_ext.parallel.schedules import SCHEDULES
from tp_ext.planner import Layout, predict

SIZES = {"layers": 4, "hidden": 32, "heads": 8, "ffn": 64, "vocab": 64, "seq": 16}
EXPERTS = {"experts": 4, "top_k": 2, "expert_ffn": 64}
EVERY = 200
SMALL = 16  # bytes: numbers of tokens, losses, whether all ranks have valid batches


def drawn(seed):
    """A layout of at most 8 ranks, the KV heads of its model, and a batch."""
    r = random.Random(f"counted {seed}")
    while True:
        pp, dp, cp, tp = (r.choice((1, 1, 2, 4)) for _ in range(4))
        if not 1 < pp * dp * cp * tp <= 8:
            continue
        # Every second has experts, over some of the data ranks
        ep = r.choice([n for n in (2, 4) if dp % n == 0] or [1]) if seed % 2 else 1
        schedule = SCHEDULES[r.choice(("GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble"))] if pp > 1 else None
        virtual = 2 if schedule and (schedule.looped or schedule.v) else 1
        if pp * virtual > SIZES["layers"]:
            continue
        split = schedule is not None and schedule.splits
        layout = Layout(
            pp=pp,
            dp=dp // ep,
            ep=ep,
            cp=cp,
            tp=tp,
            virtual=virtual,
            schedule=schedule.name if schedule else "1F1B",
            micro_batch=r.choice((1, 2)),
            zero=r.randrange(4),
            sequence_parallel=r.random() < 0.5,
            recompute=None if split else r.choice((None, "full", "selective")),
            dtype="fp32",
        )
        if ep > 1 and (
            layout.zero == 1 or (layout.zero > 1 and layout.recompute == "selective")
        ):  # parallelize refuses
            continue
        return layout, r.choice((2, 4, 8)), dp * layout.micro_batch * pp * r.choice((1, 2))


def trained(layout, sizes, batch):
    """Returns the calls of a step on each rank, (axis, kind) -> (number, bytes), and the bytes of its tensors."""
    microbatches = layout.microbatches(batch)
    axes = {name: getattr(layout, name) for name in ("pp", "dp", "ep", "cp", "tp")}

    def run(rank, mesh):
        with torch.device("meta"):
            model = Model(sizes, mesh, layout.sequence_parallel)
        run = tp_ext.parallelize(model, mesh, loss=model.loss, **layout.arguments(batch))
        optimizer = run.optimizer(torch.optim.AdamW)
        tokens = tp_ext.ContextLayout(batch=layout.micro_batch, seq=SIZES["seq"], group=mesh["cp"])
        ids = torch.randint(SIZES["vocab"], (layout.micro_batch * microbatches, SIZES["seq"]))
        shard = tokens.shard(ids, 1)
        for _ in range(3):  # the first two also make groups, and buckets of DDP
            optimizer.zero_grad()
            with tp_ext.debug.count_collectives() as counts:
                run.step(shard, shard, layout=tokens)
                optimizer.step()
        parameters = list(run.parameters())
        names = {tuple(dist.get_process_group_ranks(mesh[name].get_group())): name for name in axes if axes[name] > 1}
        totals = Counter()
        stacks = [parameter for parameter in parameters if parameter.dim() == 3]  # of experts, summed over other ranks
        flags = {16 * len(parameters), 16 * len(stacks), 16 * (len(parameters) - len(stacks))}
        for row in counts.rows:
            axis = names.get(row.ranks, "dp")
            counted = (
                row.kind == "all_gather" and row.payload == 8 * EXPERTS["experts"] * layout.ep
            )  # tokens of experts
            axis = (
                "dp" if axis in ("cp", "ep") and row.kind != "all_to_all" and not (axis == "ep" and counted) else axis
            )
            tiny = row.payload <= SMALL or (axis == "dp" and row.kind == "all_reduce" and row.payload in flags)
            setup = row.kind == "broadcast" and layout.zero != 1
            if not tiny and not setup:
                totals[axis, row.kind, "number"] += row.number
                totals[axis, row.kind, "bytes"] += row.payload_bytes
        inner = getattr(optimizer, "optim", optimizer)
        states = [state for kept in inner.state.values() for state in kept.values() if state.dim()]
        byte_counts = [_bytes(parameters), _bytes([p.grad for p in parameters]), _bytes(states)]
        return totals, byte_counts, mesh["pp"].get_local_rank()

    return tp_ext.debug.simulate(run, axes)


def _bytes(tensors):
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors if t is not None]
    return sum(t.nbytes for t in local)


@pytest.mark.parametrize(
    "seed",
    [pytest.param(seed, marks=[] if seed in (0, 1, 2, 3, 4, 6) else [pytest.mark.exhaustive]) for seed in range(EVERY)],
)
def test_collectives_and_bytes_are_those_counted(seed):
    """Number and bytes of each kind along each axis. Of the sums of norms' gradients the bytes alone, since a block's
    are one call; so those of gradients, whose buckets torch chooses. Of exchanges over ep the
    number alone: a prediction takes even routing."""
    layout, kv_heads, batch = drawn(seed)
    sizes = SIZES | {"kv_heads": kv_heads} | (EXPERTS if seed % 2 else {})
    model = planner.transformer(**sizes)
    got = predict(model, planner.cluster("cpu", layout.ranks), layout, batch)
    ranks = trained(layout, sizes, batch)
    for totals, _, stage in ranks:
        want = Counter()
        for row in got.collectives[stage]:
            want[row.axis, row.kind, "number"] += row.number
            want[row.axis, row.kind, "bytes"] += row.payload_bytes
        for (axis, kind, what), number in want.items():
            if (axis, kind, what) == ("ep", "all_to_all", "bytes"):
                continue
            if what == "bytes" or kind != "all_reduce":
                assert totals[axis, kind, what] == pytest.approx(number), (axis, kind, what, layout)
        assert {key[:2] for key in totals} <= {key[:2] for key in want}, layout
    for stage, memory in enumerate(got.memory):
        # Of the rank that has most: of fewer experts than shards not each has one
        most = [
            max(of_ranks)
            for of_ranks in zip(*(byte_counts for _, byte_counts, of in ranks if of == stage), strict=True)
        ]
        # FSDP2 keeps a shard between steps, of as many bytes as the gradient's
        kept = memory.gradients if layout.zero == 2 else memory.parameters
        assert most[0] == pytest.approx(kept) and most[1] == pytest.approx(memory.gradients)
        if layout.zero != 1:  # whole parameters to ranks
            assert most[2] == pytest.approx(memory.states)


LARGER = SIZES | {"layers": 2, "hidden": 256, "ffn": 512, "seq": 64}  # of which numbers of a token are a small part
SAVED = {
    "heads": ({}, {}),
    "KV heads": ({}, {"kv_heads": 2}),
    "tensors": ({"tp": 2}, {"kv_heads": 4}),
    "no SP": ({"tp": 2, "sequence_parallel": False}, {}),
    "copied KV heads": ({"tp": 4}, {"kv_heads": 2}),
    "context": ({"tp": 2, "cp": 2}, {}),
    "experts": ({}, EXPERTS | {"expert_ffn": 512}),
    "tensors of experts": ({"tp": 2}, EXPERTS | {"expert_ffn": 512}),
    "experts, no SP": ({"tp": 2, "sequence_parallel": False}, EXPERTS | {"expert_ffn": 512}),
}


@pytest.mark.parametrize("name", SAVED)
def test_saved_bytes_are_those_kept(name):
    """The forward pass of one microbatch, without the loss. Each storage that autograd keeps counts once; storages of
    parameters do not count."""
    axes, more = SAVED[name]
    layout = Layout(dp=1, micro_batch=2, dtype="fp32", **axes)
    sizes = {"kv_heads": SIZES["heads"]} | LARGER | more

    def run(rank, mesh):
        model = Model(sizes, mesh, layout.sequence_parallel)
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        kept = {}

        def pack(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        tokens = tp_ext.ContextLayout(batch=layout.micro_batch, seq=sizes["seq"], group=mesh["cp"])
        ids = tokens.shard(torch.randint(sizes["vocab"], (layout.micro_batch, sizes["seq"])), 1)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = model(ids, layout=tokens if layout.cp > 1 else None)
        return sum(kept.values()), y  # whose graph lives until all have counted

    got = predict(planner.transformer(**sizes), planner.cluster("cpu", layout.ranks), layout, 2)
    counted = tp_ext.debug.simulate(run, {axis: getattr(layout, axis) for axis in ("pp", "dp", "ep", "cp", "tp")})
    assert [saved for saved, _ in counted] == [got.memory[0].activations] * layout.ranks
