"""Forward and backward of every family of kernels, and of a whole block, recorded once and replayed on other values.

On CUDA as a graph; on the CPU as a list of operators, which is the same promise: nothing read on the host, no shape or
seed baked in.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from tests.cuda.families import DTYPES, FAMILIES, Family, block

pytestmark = pytest.mark.core

Replay = Callable[[list[Tensor]], list[Tensor]]


def recorded(family: Family, inputs: list[Tensor]) -> Replay:
    """A step on ``inputs``; the function returned repeats it with other values in their place."""
    return _graph(family, inputs) if inputs[0].is_cuda else _trace(family, inputs)


def _trace(family: Family, inputs: list[Tensor]) -> Replay:
    traced = make_fx(family.step)(*inputs)

    def replay(values: list[Tensor]) -> list[Tensor]:
        with torch.no_grad():  # the gradients are in the trace, as in a graph
            return traced(*values)

    return replay


def _graph(family: Family, inputs: list[Tensor]) -> Replay:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # warm up, before capture
        for _ in range(3):
            family.step(*inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = family.step(*inputs)

    def replay(values: list[Tensor]) -> list[Tensor]:
        with torch.no_grad():
            for to, value in zip(inputs, values, strict=True):
                to.copy_(value)
        graph.replay()
        return [result.clone() for result in results]

    return replay


def replays(family: Family, device: torch.device, dtype: torch.dtype, width: int) -> None:
    replay = recorded(family, family.inputs(device, dtype, width))
    for seed in (3, 4):
        values = family.inputs(device, dtype, width, seed)
        torch.manual_seed(seed)
        got = replay(values)
        torch.manual_seed(seed)
        want = family.step(*values)
        # Sums of at most 128 terms in another order, over their size: 128 ulp of the largest
        for a, b in zip(got, want, strict=True):
            bound = 0 if family.exact else 128 * torch.finfo(b.dtype).eps * b.abs().max()
            assert (a - b).abs().max() <= bound


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_replays_on_other_values(name: str, dtype: torch.dtype, device: torch.device) -> None:
    for width in (64, 67):
        replays(FAMILIES[name], device, dtype, width)


def test_a_block_replays_on_other_values(device: torch.device) -> None:
    replays(block(device), device, torch.float32, 24)
