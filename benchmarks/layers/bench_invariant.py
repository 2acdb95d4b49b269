"""A transformer block built in tp_invariant on two ranks, forward and backward, next to the ordinary one.

Norm, attention (16 heads of hidden / 16, 4 KV heads), norm and SwiGLU MLP (ffn 4 hidden) with 1024 tokens in fp32, on
one process and on two ranks of one thread each. Both run with MKL_CBWR=AVX512,STRICT. Before any measurement the bits
of output and gradient on the ranks are compared with those of one process, and the values with the ordinary block.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import tp_ext
from benchmarks.lib import interleave, report
from benchmarks.lib.report import Record
from tests.helpers import ranks
from tp_ext.invariance import using_blocks

TOKENS, RANKS, HEADS = 1024, 2, 16


class Block(nn.Module):
    def __init__(self, hidden: int, group: Any) -> None:
        super().__init__()
        self.norms = nn.ModuleList(tp_ext.RMSNorm(hidden, group=group) for _ in range(2))
        self.attention = tp_ext.ParallelAttention(
            hidden, HEADS, num_kv_heads=HEADS // 4, bias=False, rope=1e4, group=group
        )
        self.mlp = tp_ext.ParallelMLP(hidden, 4 * hidden, activation="swiglu", bias=False, group=group)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x), batch_size=2)
        y: Tensor = x + self.mlp(self.norms[1](x))
        return y


@functools.cache
def step_of(hidden: int, blocks: int | None, backend: str | None) -> Callable[[], list[Tensor]]:
    """Forward and backward: the output, and the gradient of the input."""
    group = interleave.group_on(backend) if backend else None
    torch.manual_seed(0)
    with using_blocks(blocks):
        block = Block(hidden, group)
    x = torch.randn(TOKENS, hidden, generator=torch.Generator().manual_seed(1)).requires_grad_()

    def step() -> list[Tensor]:
        y = block(x)
        grads = torch.autograd.grad(y.square().mean(), [x, *block.parameters()])
        return [y.detach(), grads[0]]

    return step


def on_rank(hidden: int, blocks: int | None, backend: str) -> Callable[[], list[Tensor]]:
    """On a rank: a checked step."""
    step = step_of(hidden, blocks, backend)
    expected, alone = step_of(hidden, None, None)(), step_of(hidden, 8, None)()
    for found, value, same in zip(step(), expected, alone, strict=True):
        assert (found - value).norm() <= 1e-4 * value.norm()
        assert blocks is None or found.equal(same), "other bits than on one process"
    return step


def measure(hidden: int, seconds: float, block: float) -> list[Record]:
    subjects: dict[str, interleave.Block] = {}
    for name, blocks in (("ordinary", None), ("tp_invariant", 8)):
        subjects[f"{name}, 1 process"] = interleave.on_ranks(1, on_rank, hidden, blocks, "")
        for backend in interleave.BACKENDS:
            subjects[f"{name}, {backend}"] = interleave.on_ranks(RANKS, on_rank, hidden, blocks, backend)
    times = interleave.take(subjects, seconds, block, turns=3 if seconds else 1)
    return interleave.rows(
        times,
        {"hidden": hidden},
        lambda of, name: {"ratio": of[name] / of["ordinary, " + name.partition(", ")[2]]},
    )


draw = report.bars("hidden {hidden}", "ratio", "time of a step, as a multiple of the ordinary one's, medians")


def main() -> None:
    ranks._ENVIRONMENT.update(ranks.STRICT)  # of the processes that compute
    report.run(__file__, __doc__, lambda quick: [64] if quick else [256, 1024], measure, draw)


if __name__ == "__main__":
    main()
