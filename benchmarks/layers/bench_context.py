"""Attention over a context group of two ranks, forward and backward: each way to exchange, contiguous and balanced.

q [1, seq, 8, 64], k and v [1, seq, 2, 64] in fp32, causal. "dense" is torch's attention of the whole sequence in one
process, while the ranks wait; half the time with one thread is the ceiling of two ranks with one thread each. Output
and gradients are compared with dense before any measurement.
"""

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import tp_ext
from benchmarks.lib import interleave, report
from benchmarks.lib.harness import TOLERANCE
from benchmarks.lib.report import Record
from tp_ext.nn.attention.context_attention import CONTEXTS, context_attention

RANKS = 2


@functools.cache
def inputs(seq: int) -> tuple[Tensor, ...]:
    """q, k, v and the gradient of the result."""
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn((1, seq, heads, 64), generator=generator) for heads in (8, 2, 2, 8))


@functools.cache
def dense(seq: int) -> Callable[[], list[Tensor]]:
    *tensors, grad = inputs(seq)
    q, k, v = (t.clone().requires_grad_() for t in tensors)

    def step() -> list[Tensor]:
        parts = (t.transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True).transpose(1, 2)
        return [y.detach(), *torch.autograd.grad(y, [q, k, v], grad)]

    return step


@functools.cache
def on_rank(seq: int, context: str, balance: bool, backend: str) -> Callable[[], list[Tensor]]:
    """On a rank: a step, checked."""
    layout = tp_ext.ContextLayout(batch=1, seq=seq, group=interleave.group_on(backend), balance=balance)
    *tensors, grad = (layout.shard(t, 1) for t in inputs(seq))
    q, k, v = (t.requires_grad_() for t in tensors)

    def step() -> list[Tensor]:
        y = context_attention(q, k, v, layout, context)
        return [y.detach(), *torch.autograd.grad(y, [q, k, v], grad)]

    for got, want in zip(step(), dense(seq)(), strict=True):
        error = ((got - layout.shard(want, 1)).norm() / want.norm()).item()
        assert error <= TOLERANCE[torch.float32], f"off by {error:.1e} of its norm"
    dist.barrier()
    return step


def measure(seq: int, seconds: float, block: float) -> list[Record]:
    cores = interleave.cores()
    pinned = len(cores) >= RANKS
    interleave.pin_ranks(RANKS, cores, pinned)
    subjects = {"dense, 1 thread": interleave.here(dense(seq), 1, cores[:1] if pinned else cores)}
    subjects[f"dense, {RANKS} threads"] = interleave.here(dense(seq), RANKS, cores)
    for backend in interleave.BACKENDS:
        for context in CONTEXTS:
            for balance in (True, False):
                name = f"{context}, {'balanced' if balance else 'contiguous'}, {backend}"
                subjects[name] = interleave.on_ranks(RANKS, on_rank, seq, context, balance, backend)
    times = interleave.take(subjects, seconds, block, turns=3 if seconds else 1)
    return interleave.rows(times, {"seq": seq}, lambda of, name: {"speedup": of["dense, 1 thread"] / of[name]})


draw = report.bars(
    f"attention of {{seq}} tokens on {RANKS} ranks", "speedup", "times as fast as dense with 1 thread, medians"
)


def main() -> None:
    report.run(__file__, __doc__, lambda quick: [256] if quick else [512, 4096], measure, draw)


if __name__ == "__main__":
    main()
