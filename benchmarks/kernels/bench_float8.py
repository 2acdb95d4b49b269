"""8-bit floating point next to torch._scaled_mm called by hand and to torchao: quantisation, a linear, its training.

The peer "_scaled_mm alone" has its operands in 8 bits beforehand: what is left of the linear when quantisation is free.
"""

import importlib
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.lib.harness import Case, inference, main, makeable, torch_peers, trained
from tp_ext import _ops

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MOST = 448.0
BOUND = 0.06  # e4m3 keeps 4 bits: 2^-4 at most, less on average, of each of two operands


def quantised(x: Tensor, dim: int | None) -> tuple[Tensor, Tensor]:
    """x in e4m3 and the inverse of its scale, per tensor or per row, in torch's operators."""
    amax = (x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)).float().clamp_min(1e-12)
    return (x.float() * (MOST / amax)).clamp(-MOST, MOST).to(E4M3), amax / MOST


def product(x: tuple[Tensor, Tensor], weight: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    (a, of_a), (b, of_b) = x, weight
    return torch._scaled_mm(a, b.t(), of_a, of_b.t() if of_b.dim() else of_b, out_dtype=dtype)


def scaled_mm(x: Tensor, weight: Tensor, dim: int | None) -> Tensor:
    return product(quantised(x, dim), quantised(weight, dim), x.dtype)


def ours(x: Tensor, weight: Tensor, dim: int | None) -> Tensor:
    return _ops.float8_column_linear(x, weight, None, "", False, None, dim is not None, E4M3, E5M2, True)


def torchao(weight: Tensor, dim: int | None, device: str) -> dict[str, Any]:
    """Its linear with this weight, if it is installed; on a GPU also compiled, as it is meant to be used."""
    if importlib.util.find_spec("torchao") is None:
        return {}

    def make() -> nn.Module:
        library: Any = importlib.import_module("torchao.float8")
        config = library.Float8LinearConfig.from_recipe_name("tensorwise" if dim is None else "rowwise")
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        linear.weight = nn.Parameter(weight.detach())
        model: nn.Module = library.convert_to_float8_training(nn.Sequential(linear), config=config)
        return model

    peers: dict[str, Any] = makeable({"torchao": make})
    if device == "cuda" and peers:
        peers["torchao, compiled"] = torch.compile(peers["torchao"], dynamic=False)
    return peers


def near(call: Callable[[], Any], exact: Callable[[], Any]) -> None:
    """Raises unless ours has the values of full precision but for the rounding to 8 bits."""
    got, want = call(), exact()
    for a, b in zip(*([t] if isinstance(t, Tensor) else t for t in (got, want)), strict=True):
        error = ((a.float() - b.float()).norm() / b.float().norm()).item()
        assert error <= BOUND, f"off by {error:.3f} of the norm"


def cases(device: str, dtype: torch.dtype, size: int) -> list[Case]:
    torch.manual_seed(0)
    n = 4096 if size >= 64 << 20 else 256
    x = torch.randn(size // dtype.itemsize // n, n, dtype=dtype, device=device)
    weight = (torch.randn(n, n, device=device) / n**0.5).to(dtype)
    grad = torch.randn_like(x)
    result = []
    for name, dim in (("tensor", None), ("row", 1)):
        amax = _ops.finite_amax(x, dim)
        peers = torch_peers(partial(quantised, x, dim), device)
        check = partial(_same_codes, x, amax, dim)
        moved = x.numel() * (2 * dtype.itemsize + 1)  # amax reads x once more
        call = partial(_amax_and_codes, x, dim)
        result.append(Case(f"quantize, {name}", call, peers, check, moved, None, tuple(x.shape)))

        ao = torchao(weight, dim, device)
        operands = quantised(x, dim), quantised(weight, dim)
        peers = torch_peers(partial(scaled_mm, x, weight, dim), device)
        peers |= {
            "_scaled_mm alone": partial(product, *operands, dtype),
            "without float8": partial(F.linear, x, weight),
        }
        call = partial(inference, partial(ours, x, weight, dim))
        check = partial(near, call, partial(F.linear, x, weight))
        others = {peer: partial(inference, p) for peer, p in peers.items()}
        others |= {peer: partial(inference, partial(f, x)) for peer, f in ao.items()}
        result.append(Case(f"linear, {name}", call, others, check, 0, None, tuple(x.shape)))

        inputs = [t.clone().requires_grad_() for t in (x, weight)]
        training = partial(trained, partial(ours, *inputs, dim), grad, inputs)
        dense = partial(trained, partial(F.linear, *inputs), grad, inputs)
        others = {"without float8": dense}
        for peer, model in ao.items():
            mine = [inputs[0], *model.parameters()]
            others[peer] = partial(trained, partial(model, inputs[0]), grad, mine)
        result.append(
            Case(f"linear, {name}, trained", training, others, partial(near, training, dense), 0, None, tuple(x.shape))
        )
    return result


def _amax_and_codes(x: Tensor, dim: int | None) -> tuple[Tensor, Tensor]:
    return _ops.float8_quantize(x, _ops.finite_amax(x, dim), E4M3)


def _same_codes(x: Tensor, amax: Tensor, dim: int | None) -> None:
    codes, inverse = _ops.float8_quantize(x, amax, E4M3)
    near(lambda: codes.float() * inverse, lambda: x)
    near(lambda: codes.float(), lambda: quantised(x, dim)[0].float())


if __name__ == "__main__":
    main(cases)
