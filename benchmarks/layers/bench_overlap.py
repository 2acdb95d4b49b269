"""Communication during GEMMs: the operations that `overlap_chunks` splits, in 1, 2, 4 and 8 chunks, on 2 ranks over
gloo and tp_shm. And the backward of a column linear, which has no chunks (the sum of dx runs during the GEMM of dw):
the noise.

The forward of a column linear under sequence parallelism (gather, GEMM), of a row linear (GEMM, sum) and of one under
sequence parallelism (GEMM, reduce-scatter), and the backward of that (gather, GEMM, GEMM): 4096 tokens, 512 x 2048,
fp32. Results in chunks are compared with those without chunks first.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import tp_ext
from benchmarks.lib import interleave, report
from benchmarks.lib.report import Record

RANKS, HIDDEN, FFN = 2, 512, 2048
CASES = ("column backward", "column sp forward", "row forward", "row sp forward", "row sp backward")
Step = Callable[[], list[Tensor]]


def step_of(case: str, tokens: int, chunks: int, group: Any) -> Step:
    torch.manual_seed(0)
    sp, p = "sp" in case, group.size()
    options: dict[str, Any] = {"group": group, "bias": False, "overlap_chunks": chunks, "sequence_parallel": sp}
    whole, own = torch.randn(tokens // p if sp else tokens, HIDDEN), torch.randn(tokens, FFN // p)
    layer: nn.Module = tp_ext.RowParallelLinear(FFN, HIDDEN, **options)
    x, dy = own, whole
    if case.startswith("column"):
        layer, x, dy = tp_ext.ColumnParallelLinear(HIDDEN, FFN, **options), whole, own
    if "forward" in case:
        return torch.no_grad()(lambda: [layer(x)])
    y = layer(x.requires_grad_())
    return lambda: list(torch.autograd.grad(y, [x, layer.weight], dy, retain_graph=True))


@functools.cache
def on_rank(case: str, tokens: int, chunks: int, backend: str) -> Step:
    steps = [step_of(case, tokens, n, interleave.group_on(backend)) for n in (chunks, 1)]
    for got, one in zip(*(step() for step in steps), strict=True):
        assert (got - one).norm() <= 1e-5 * one.norm(), case
    return steps[0]


def measure(case: tuple[str, int, str], seconds: float, block: float) -> list[Record]:
    name, tokens, backend = case
    chunks = {f"in {n}": interleave.on_ranks(RANKS, on_rank, name, tokens, n, backend) for n in (1, 2, 4, 8)}
    times = interleave.take(chunks, seconds, block, turns=3 if seconds else 1)
    return interleave.rows(times, {"of": name, "over": backend}, lambda of, n: {"to_one": of[n] / of["in 1"]})


draw = report.bars("{of}, {over}", "to_one", "time to that in one chunk, medians")


def main() -> None:
    def cases(quick: bool) -> list[tuple[str, int, str]]:
        return [(case, 128 if quick else 4096, backend) for case in CASES for backend in interleave.BACKENDS]

    report.run(__file__, __doc__, cases, measure, draw)


if __name__ == "__main__":
    main()
