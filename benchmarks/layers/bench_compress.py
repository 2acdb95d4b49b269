"""Means of gradients over data ranks: compressed to 8 bits, and as they are; on 2 ranks, gloo and tp_shm.

Linears of 1024 features and 64 features without bias. "int8" and "float8" are ``handle.average()`` of
``compress_gradients`` with feedback; "all-reduce" is ``tp_ext.parallel.average_gradients``; "bf16" is the same of
gradients in bf16, half of the bytes; "kernels" are the CPU's parts of int8, without the exchange. MiB are those of the
gradients in fp32. Means are compared with those of fp32 before they are measured. All keep the memory of freed tensors
(``keep_memory``).
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

import tp_ext
from benchmarks.lib import interleave, report
from benchmarks.lib.report import Record
from tp_ext import _ops
from tp_ext.low_precision import compress_gradients
from tp_ext.parallel import average_gradients

WAYS = ("all-reduce", "bf16", "int8", "float8", "kernels")
BLOCK = 64


@functools.cache
def on_rank(way: str, layers: int, features: int, backend: str) -> Callable[[], object]:
    """On a rank: the call that is measured."""
    tp_ext.keep_memory()
    group = interleave.group_on(backend)
    dtype = torch.bfloat16 if way == "bf16" else torch.float32
    model = nn.ModuleList(nn.Linear(features, features, bias=False) for _ in range(layers)).to(dtype)
    params = list(model.parameters())

    def drawn(number: int, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * number + rank)
        return torch.randn(features, features, generator=generator)

    for number, param in enumerate(params):
        param.grad = drawn(number, group.rank()).to(dtype)
    if way == "kernels":
        return kernels([param.grad for param in params if param.grad is not None], group.size())
    if way in ("all-reduce", "bf16"):
        call: Callable[[], object] = functools.partial(average_gradients, model, group)
    else:
        call = compress_gradients(model, way, block=BLOCK, group=group).average
    call()
    for number, param in enumerate(params):
        mean = torch.stack([drawn(number, rank) for rank in range(group.size())]).mean(0)
        assert param.grad is not None and (param.grad.float() - mean).norm() < 0.05 * mean.norm(), way
    return call


def kernels(grads: list[Tensor], ranks: int) -> Callable[[], object]:
    """Returns a call of what a rank computes in an exchange."""
    numel = grads[0].numel()
    half = numel // ranks
    size = half + half // BLOCK * 4
    places = torch.tensor([[rank * half, half, rank * size] for rank in range(ranks)])
    errors = [torch.zeros(numel) for _ in grads]
    wire = torch.empty(ranks * size, dtype=torch.uint8)

    def call() -> None:
        for grad, error in zip(grads, errors, strict=True):
            _ops.compress_blocks_(grad.view(-1), error, wire, places, BLOCK, False)
            _ops.sum_compressed_blocks_(wire.view(ranks, -1), error[:half], wire[:size], 0, half, BLOCK, False)
            _ops.decompress_blocks_(wire, grad.view(-1), places, BLOCK, False)

    return call


def measure(case: tuple[int, int], seconds: float, block: float) -> list[Record]:
    subjects = {
        f"{way}, {backend}": interleave.on_ranks(2, on_rank, way, *case, backend)
        for way in WAYS
        for backend in interleave.BACKENDS
        if way != "kernels" or backend == "tp_shm"
    }
    times = interleave.take(subjects, seconds, block)
    layers, features = case
    return interleave.rows(
        times,
        {"parameters": f"{layers} of {features} x {features}", "MiB": 4 * layers * features**2 / 2**20},
        lambda of, name: {"of all-reduce": of[name] / of[f"all-reduce, {name.partition(', ')[2]}"]},
    )


draw = report.bars("{parameters}", "median_ms", "ms, medians", None)


def main() -> None:
    report.run(__file__, __doc__, lambda quick: [(2, 64)] if quick else [(16, 1024), (200, 64)], measure, draw)


if __name__ == "__main__":
    main()
