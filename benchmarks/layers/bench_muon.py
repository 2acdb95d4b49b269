"""A step of Muon for the linears of 2 decoder blocks, on two ranks and in one process; ours and ``torch.optim.Muon``.

Blocks of hidden h: fused q, k, v, an output projection, a SwiGLU MLP of 8 h / 3; given gradients, one
thread. "torch" is ``torch.optim.Muon`` over the same matrices, q, k, v, gate and up as parameters of their own, in one
process; it computes in bf16, ours in bf16 or fp32 (``ns_dtype``). "2 ranks": the layers sharded over them, ``auto``
sending Gram matrices where they are fewer bytes, ``gather`` matrices. The weights after two steps are compared with one
process before any measurement. ``to_one`` is the time against ours in one process and the same dtype, from turns;
``cpu_to_one`` that of the processor, of the rank that uses most: it does not grow when other programs use the cores.
"""

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import tp_ext
from benchmarks.lib import interleave, report
from benchmarks.lib.report import Record
from tests.helpers import ranks
from tp_ext.optim import Muon

RANKS, BLOCKS = 2, 2
LARGEST_BF16 = 128  # on a CPU without bf16 instructions a GEMM takes 17 times as long as in fp32
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
TOLERANCE = {"bf16": 0.1, "fp32": 1e-3}  # of the norm of an update


def blocks_of(h: int, group: Any) -> nn.Module:
    ffn = -(-8 * h // 3 // 64) * 64
    tp_ext.manual_seed(0)
    options: dict[str, Any] = {"group": group, "bias": False}
    layers = []
    for _ in range(BLOCKS):
        attention = tp_ext.ParallelAttention(h, h // 64, **options)
        layers += [attention, tp_ext.ParallelMLP(h, ffn, activation="swiglu", **options)]
    return nn.ModuleList(layers)


def give_gradients(model: nn.Module) -> None:
    table = dict(tp_ext.layouts(model))
    for number, (name, param) in enumerate(model.named_parameters()):
        generator = torch.Generator().manual_seed(number)
        param.grad = table[name].shard(torch.randn(table[name].full_shape(param.shape), generator=generator))


@functools.cache
def ours(h: int, dtype: str, backend: str, form: str) -> Callable[[], None]:
    """A step on a rank, or with backend "" in this process."""
    model = blocks_of(h, interleave.group_on(backend) if backend else None)
    give_gradients(model)
    optimizer = Muon(model.parameters(), lr=0.02, ns_dtype=DTYPES[dtype], form=form)
    for _ in range(2):
        optimizer.step()
    step: Any = lambda: optimizer.step()  # noqa: E731, with attributes
    step.state = tp_ext.full_state_dict(model)
    return step


@functools.cache
def with_torch(h: int) -> Callable[[], None]:
    """A step of ``torch.optim.Muon``, in this process."""
    model = blocks_of(h, None)
    give_gradients(model)
    params: list[nn.Parameter] = []
    for name, layout in tp_ext.layouts(model):
        param = model.get_parameter(name)
        sharding, _ = layout[0]
        sizes = [part.size for part in sharding.parts]
        assert param.grad is not None
        for value, grad in zip(param.split(sizes, sharding.dim), param.grad.split(sizes, sharding.dim), strict=True):
            params.append(nn.Parameter(value.detach().clone()))
            params[-1].grad = grad.clone()
    optimizer = torch.optim.Muon(params, lr=0.02)
    return lambda: optimizer.step()


def state_on_rank(_: Any, *case: Any) -> dict[str, torch.Tensor]:
    return ours(*case).state  # type: ignore[attr-defined, no-any-return]


def check(h: int, case: tuple) -> None:
    """Raises if a rank's weights after two steps are not those of one process."""
    before, one = blocks_of(h, None).state_dict(), ours(h, case[1], "", "auto").state  # type: ignore[attr-defined]
    for state in ranks.run(state_on_rank, RANKS, *case):
        for name, value in state.items():
            apart = float((value - one[name]).norm() / (one[name] - before[name]).norm())
            assert apart <= TOLERANCE[case[1]], f"{case}: the update of {name} differs by {apart:.1e} of its norm"


def cpu_seconds(group: Any, *case: Any) -> float:
    """The processor's seconds of a step, on a rank or, without a group, here."""
    step = ours(*case)
    if group is not None:
        dist.barrier()
    start = time.process_time()
    step()
    return time.process_time() - start


def measure(h: int, seconds: float, block: float) -> list[Record]:
    cores = interleave.cores()
    interleave.pin_ranks(RANKS, cores, len(cores) >= RANKS)
    subjects: dict[str, interleave.Block] = {}
    base: dict[str, str] = {}
    cases: dict[str, tuple] = {}
    processor: dict[str, list[float]] = {}
    if h <= LARGEST_BF16:
        subjects["torch, bf16"], base["torch, bf16"] = interleave.here(with_torch(h), 1, cores[:1]), "ours, bf16"
    for dtype in DTYPES if h <= LARGEST_BF16 else ["fp32"]:
        one = f"ours, {dtype}"
        subjects[one], base[one] = interleave.here(ours(h, dtype, "", "auto"), 1, cores[:1]), one
        for form, backend in (("auto", "tp_shm"), ("gather", "tp_shm"), ("auto", "gloo")):
            case = (h, dtype, backend, form)
            check(h, case)
            name = f"2 ranks, {dtype}, {form}, {backend}"
            cases[name] = case
            subjects[name], base[name] = interleave.on_ranks(RANKS, ours, *case), one
    times = interleave.take(subjects, seconds, block, turns=3 if seconds else 1)
    for _ in range(3):
        for name, case in cases.items():
            one_process = cpu_seconds(None, h, case[1], "", "auto")
            processor.setdefault(name, []).append(max(ranks.run(cpu_seconds, RANKS, *case)) / one_process)
    return interleave.rows(
        times,
        {"hidden": h},
        lambda of, name: {
            "to_one": of[name] / of[base[name]],
            "cpu_to_one": statistics.median(processor[name]) if name in processor else None,
        },
    )


draw = report.bars(f"{BLOCKS} blocks of {{hidden}} features", "to_one", "time to that of ours in one process, medians")


def main() -> None:
    report.run(__file__, __doc__, lambda quick: [128] if quick else [128, 512], measure, draw)


if __name__ == "__main__":
    main()
