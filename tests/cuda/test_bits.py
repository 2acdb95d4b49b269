"""What the bits of a result may depend on: neither the number of threads nor where in the batch a row stands."""

from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.cuda import families
from tests.cuda.families import DTYPES, FAMILIES
from tp_ext import _ops

pytestmark = pytest.mark.core

WIDTH = 259  # vectors and a tail
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture
def many_rows() -> Iterator[None]:
    """Enough for several threads, also in what adds up rows in chunks of 32."""
    with mock.patch.object(families, "ROWS", 400):
        yield


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@every_dtype
@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.exact])
def test_threads_do_not_matter(name: str, dtype: torch.dtype, many_rows: None, threads: Callable[[int], None]) -> None:
    family, runs = FAMILIES[name], []
    inputs = family.inputs("cpu", dtype, WIDTH)
    for count in (1, 2, 3, 1):
        threads(count)
        torch.manual_seed(3)
        runs.append(family.step(*inputs))
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


# Batch position: functions of (first row, rows in all, inputs), the first `own` of which have a row each


def _dropped(first: int, rows: int, x: Tensor, residual: Tensor, bias: Tensor) -> Tensor:
    n, seed = x.shape[1], torch.tensor(11, device=x.device)
    return _ops.bias_dropout_residual(x, bias, residual, seed, 0.25, x.numel(), rows * n, first * n)


def _loss(first: int, rows: int, logits: Tensor, target: Tensor) -> Tensor:
    n = logits.shape[-1]
    return _ops.vocab_parallel_cross_entropy(logits, target, "", 0, n, n, -100, 0.1, 0.01, "none", False)


def _of(name: str) -> Callable[..., Tensor]:
    return lambda first, rows, *inputs: FAMILIES[name].call(*inputs)


ROWWISE: dict[str, tuple[int, Callable[..., Tensor]]] = {
    **{name: (1, _of(name)) for name in ("gelu", "gelu_tanh", "relu", "silu", "swiglu", "geglu")},
    **{name: (1, _of(name)) for name in ("rms_norm", "layer_norm")},
    **{name: (3, _of(name)) for name in ("rope half", "rope interleaved")},
    "vocab_embedding": (1, _of("vocab_embedding")),
    "vocab_cross_entropy": (2, _loss),
    "bias_dropout_residual": (2, _dropped),
}


@every_dtype
@pytest.mark.parametrize("name", ROWWISE)
def test_a_row_has_the_same_bits_at_every_place(
    name: str, dtype: torch.dtype, device: torch.device, many_rows: None
) -> None:
    """Alone, in a small batch or a large one: output and gradient, which parameters' sums over the rows are not."""
    own, call = ROWWISE[name]
    # A row that begins off a 16-byte boundary is added up in other portions on a GPU
    inputs = FAMILIES[name].inputs(device, dtype, WIDTH if device.type == "cpu" else 256)
    if name == "bias_dropout_residual":
        inputs = [inputs[0], inputs[2], inputs[1]]

    def step(first: int, last: int) -> list[Tensor]:
        parts = [t.detach()[first:last].clone() for t in inputs[:own]]
        parts = [t.requires_grad_(t.is_floating_point()) for t in parts]
        y = call(first, families.ROWS, *parts, *inputs[own:])
        wanted = [t for t in parts if t.requires_grad]
        return [y.detach(), *(torch.autograd.grad(y, wanted, y.detach().cos()) if wanted else ())]

    whole = step(0, families.ROWS)
    for first, last in ((0, 1), (17, 18), (5, 131), (399, 400), (1, 400)):
        for a, b in zip(step(first, last), whole, strict=True):
            assert torch.equal(a, b[first:last]), (first, last)
