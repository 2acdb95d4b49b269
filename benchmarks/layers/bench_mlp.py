"""An MLP on two ranks, forward and backward with the input's gradient: ours, the peers, and one process.

y = gelu(x W^T + b) V^T + c with hidden 512, ffn 2048 and 512 tokens in fp32. "half" is the ceiling: each rank runs an
MLP of half the width without communication. "dense" is plain torch in one process while the ranks wait. Output, input
gradient and all weights' gradients are compared with dense before any measurement. "pinned": all threads of a rank on
one core of its own (dense with 1 thread: on one, with 2: on all). "memory kept": of all, by ``tp_ext.keep_memory``.
"""

import functools
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import tp_ext
from benchmarks.lib import interleave, report
from benchmarks.lib.harness import TOLERANCE
from benchmarks.lib.report import Record
from benchmarks.peers import layers as peers

HIDDEN, FFN, TOKENS, RANKS = 512, 2048, 512, 2
Results = list[Tensor]


@functools.cache
def weights() -> tuple[Tensor, ...]:
    """up.weight, up.bias, down.weight, down.bias of the full MLP, then x and the gradient of y."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(FFN, HIDDEN), (FFN,), (HIDDEN, FFN), (HIDDEN,), (TOKENS, HIDDEN), (TOKENS, HIDDEN)]
    scales = [HIDDEN**-0.5, 0.1, FFN**-0.5, 0.1, 1.0, 1.0]
    return tuple(torch.randn(shape, generator=generator) * scale for shape, scale in zip(shapes, scales, strict=True))


def step_of(mlp: Callable[[Tensor], Tensor], parameters: list[Tensor]) -> Callable[[], Results]:
    """Forward and backward: y, dx, and the gradients of the parameters."""
    x, grad = weights()[4].clone().requires_grad_(), weights()[5]

    def step() -> Results:
        y = mlp(x)
        return [y.detach(), *torch.autograd.grad(y, [x, *parameters], grad)]

    return step


def from_peer(peer: peers.Plain, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor) -> Any:
    column, row = peer.column(up, up_bias), peer.row(down, down_bias)
    return step_of(lambda x: row(F.gelu(column(x))), [*column.parameters(), *row.parameters()])


@functools.cache
def dense() -> Callable[[], Results]:
    return from_peer(peers.Plain(), *weights()[:4])


def own_slices(full: Results) -> Results:
    """The part of each of dense's results that a rank holds."""
    rank, p = dist.get_rank(), dist.get_world_size()
    y, dx, up, up_bias, down, down_bias = full
    return [y, dx, up.chunk(p)[rank], up_bias.chunk(p)[rank], down.chunk(p, 1)[rank], down_bias]


def check(results: Results) -> None:
    """This rank's results against those of the dense MLP."""
    names = ("y", "dx", "up.weight", "up.bias", "down.weight", "down.bias")
    for name, got, want in zip(names, results, own_slices(dense()()), strict=True):
        error = ((peers.local(got) - want).norm() / want.norm()).item()
        assert error <= TOLERANCE[torch.float32], f"{name} is off by {error:.1e} of its norm"


@functools.cache
def ours(backend: str) -> Callable[[], Results]:
    group = interleave.group_on(backend)
    mlp = tp_ext.ParallelMLP(HIDDEN, FFN, group=group)
    full = dict(zip(("up.weight", "up.bias", "down.weight", "down.bias"), weights(), strict=False))
    tp_ext.load_full_state_dict(mlp, full)
    parameters = [mlp.up.weight, mlp.up.bias, mlp.down.weight, mlp.down.bias]
    return step_of(mlp, parameters)


PEERS = {"python": peers.InPython, "megatron-core": peers.WithMegatron, "DTensor": peers.WithDTensor}


@functools.cache
def on_rank(name: str, backend: str) -> Callable[[], Results]:
    """On a rank: a step of "half", "ours" or a peer, checked."""
    if name == "half":
        up, up_bias, down, down_bias = weights()[:4]
        return from_peer(peers.Plain(), up.chunk(2)[0], up_bias.chunk(2)[0], down.chunk(2, 1)[0], down_bias)
    step = ours(backend) if name == "ours" else from_peer(PEERS[name](interleave.group_on(backend)), *weights()[:4])
    check(step())
    return step


def subjects(cores: list[int], pinned: bool) -> dict[str, interleave.Block]:
    result = {
        "dense, 1 thread": interleave.here(dense(), 1, cores[:1] if pinned else cores),
        "dense, 2 threads": interleave.here(dense(), 2, cores),
    }
    ways = [("half", ""), ("python", "gloo"), ("megatron-core", "gloo"), ("DTensor", "gloo")]
    ways += [("python", "tp_shm"), ("DTensor", "tp_shm")]
    ways += [("ours", backend) for backend in interleave.BACKENDS]
    for name, backend in ways:
        result[f"{name}, {backend or 'sends nothing'}"] = interleave.on_ranks(RANKS, on_rank, name, backend)
    return result


def measure(way: tuple[bool, bool], seconds: float, block: float) -> list[Record]:
    cores = interleave.cores()
    pinned, kept = way
    interleave.pin_ranks(RANKS, cores, pinned)
    interleave.keep_memory(RANKS, kept)
    times = interleave.take(subjects(cores, pinned), seconds, block, turns=3 if seconds else 1)
    medians = {name: statistics.median(values) for name, values in times.items()}
    minima = {name: min(values) for name, values in times.items()}
    return [
        {
            "case": name,
            **interleave.described(pinned, kept),
            "median_ms": medians[name] * 1e3,
            "min_ms": minima[name] * 1e3,
            "speedup": medians["dense, 1 thread"] / medians[name],
            "min_speedup": minima["dense, 1 thread"] / minima[name],
            "share_of_ceiling": medians["half, sends nothing"] / medians[name],
            "steps": len(times[name]),
        }
        for name in times
    ]


draw = report.bars(
    f"MLP on {RANKS} ranks, {{pinned}}, memory {{memory}}", "speedup", "times as fast as dense with 1 thread, medians"
)


def main() -> None:
    def ways(quick: bool) -> list[tuple[bool, bool]]:
        return interleave.ways_of_processes(RANKS, quick)

    report.run(__file__, __doc__, ways, measure, draw, "megatron-core")


if __name__ == "__main__":
    main()
