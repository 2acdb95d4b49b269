"""A product of two matrices sharded on both dims of a (2, 2) mesh, forward and backward, on 4 ranks.

a, b and the gradient of the result are [n, n] in fp32. "dense" is torch's product in one process, while the ranks wait.
The peer is a DTensor product of the same shards, on the same mesh over gloo. Result and gradients are compared with
dense before any measurement.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

import tp_ext
from benchmarks.lib import interleave, report
from benchmarks.lib.harness import TOLERANCE
from benchmarks.lib.report import Record

X, Y = 2, 2
RANKS = X * Y


@functools.cache
def inputs(n: int) -> tuple[Tensor, ...]:
    """a, b and the gradient of the result."""
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(n, n, generator=generator) for _ in range(3))


@functools.cache
def dense(n: int) -> Callable[[], list[Tensor]]:
    a, b, grad = (t.clone().requires_grad_(i < 2) for i, t in enumerate(inputs(n)))

    def step() -> list[Tensor]:
        c = a @ b
        return [c.detach(), *torch.autograd.grad(c, [a, b], grad)]

    return step


@functools.cache
def mesh_on(backend: str) -> Any:
    """On a rank."""
    options = None if backend == "gloo" else dict.fromkeys(("x", "y"), (backend, None))
    return dist.init_device_mesh("cpu", (X, Y), mesh_dim_names=("x", "y"), backend_override=options)


def shard(full: Tensor, mesh: Any) -> Tensor:
    """This rank's block."""
    return full.chunk(X)[mesh["x"].get_local_rank()].chunk(Y, 1)[mesh["y"].get_local_rank()].contiguous()


@functools.cache
def on_rank(n: int, algorithm: str, backend: str) -> Callable[[], list[Tensor]]:
    """On a rank: a step, checked."""
    mesh = mesh_on(backend)
    a, b, grad = (shard(t, mesh) for t in inputs(n))
    if algorithm == "DTensor":
        a, b, grad = (DTensor.from_local(t, mesh, [Shard(0), Shard(1)]) for t in (a, b, grad))
    a, b = a.requires_grad_(), b.requires_grad_()

    def step() -> list[Tensor]:
        if algorithm == "DTensor":
            c = (a @ b).redistribute(mesh, [Shard(0), Shard(1)])
            found = [c.detach(), *torch.autograd.grad(c, [a, b], grad)]
            return [t.redistribute(mesh, [Shard(0), Shard(1)]).to_local() for t in found]
        c = tp_ext.matmul_2d(a, b, mesh["x"], mesh["y"], algorithm=algorithm)
        return [c.detach(), *torch.autograd.grad(c, [a, b], grad)]

    for got, want in zip(step(), dense(n)(), strict=True):
        error = ((got - shard(want, mesh)).norm() / want.norm()).item()
        assert error <= TOLERANCE[torch.float32], f"off by {error:.1e} of its norm"
    dist.barrier()
    return step


def measure(n: int, seconds: float, block: float) -> list[Record]:
    cores = interleave.cores()
    pinned = len(cores) >= RANKS
    interleave.pin_ranks(RANKS, cores, pinned)
    subjects = {"dense, 1 thread": interleave.here(dense(n), 1, cores[:1])}
    subjects["DTensor, gloo"] = interleave.on_ranks(RANKS, on_rank, n, "DTensor", "gloo")
    for backend in interleave.BACKENDS:
        for algorithm in ("gather", "summa"):
            subjects[f"{algorithm}, {backend}"] = interleave.on_ranks(RANKS, on_rank, n, algorithm, backend)
    times = interleave.take(subjects, seconds, block, turns=3 if seconds else 1)
    return interleave.rows(times, {"n": n}, lambda of, name: {"times_dtensor": of["DTensor, gloo"] / of[name]})


draw = report.bars(
    f"product of two [{{n}}, {{n}}] on {RANKS} ranks", "times_dtensor", "times as fast as DTensor over gloo, medians"
)


def main() -> None:
    report.run(__file__, __doc__, lambda quick: [64] if quick else [256, 1024], measure, draw)


if __name__ == "__main__":
    main()
