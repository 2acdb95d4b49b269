"""A linear of 2048 x 2048 in few bits, in one process on one thread: next to torch's, torchao's and bitsandbytes'.

Frozen weights: forward alone, of 1 and of 256 tokens. "int8", "int4" are ``quantize_``'s; torchao's are of its
weight-only configuration, bitsandbytes' (where it is installed) ``Linear8bitLt`` and ``Linear4bit`` (nf4). float8:
forward and backward of 256 tokens. Results are compared with those of full precision before they are measured.
"""

import copy
import dataclasses
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.lib import interleave, report
from benchmarks.lib.report import Record
from tp_ext.low_precision import Float8, float8, quantize_

FEATURES = 2048
Layers = Iterator[tuple[str, nn.Module]]


def frozen(dense: nn.Linear) -> Layers:
    yield "torch", dense
    for weights in ("int8", "int4"):
        layer = copy.deepcopy(dense)
        quantize_(layer, weights)
        yield weights, layer
    torchao: Any = importlib.import_module("torchao.quantization")
    layer = nn.Sequential(copy.deepcopy(dense))
    torchao.quantize_(layer, torchao.Int8WeightOnlyConfig())
    yield "torchao, int8", layer
    if importlib.util.find_spec("bitsandbytes"):
        library: Any = importlib.import_module("bitsandbytes").nn
        dtype = dense.weight.dtype
        eight = library.Linear8bitLt(FEATURES, FEATURES, bias=False, has_fp16_weights=False)
        four = library.Linear4bit(FEATURES, FEATURES, bias=False, compute_dtype=dtype, quant_type="nf4")
        for name, layer in (("int8", eight), ("nf4", four)):
            layer.load_state_dict(dense.state_dict())
            yield f"bitsandbytes, {name}", layer.to("cpu")


def in_float8(dense: nn.Linear) -> Layers:
    yield "torch", dense
    for scaling in ("tensor", "row"):
        layer = copy.deepcopy(dense)
        float8(layer, Float8(scaling))
        yield f"float8, {scaling}", layer
    torchao: Any = importlib.import_module("torchao.float8")
    of_rows = dataclasses.replace(
        torchao.Float8LinearConfig.from_recipe_name("rowwise"), round_scales_to_power_of_2=False
    )
    for scaling, config in (("tensor", torchao.Float8LinearConfig()), ("row", of_rows)):
        yield (
            f"torchao, {scaling}",
            torchao.convert_to_float8_training(nn.Sequential(copy.deepcopy(dense)), config=config),
        )


def step(layer: nn.Module, x: Tensor, dy: Tensor | None) -> Tensor:
    if dy is None:
        with torch.no_grad():
            y: Tensor = layer(x)
        return y
    own = x.detach().requires_grad_()
    layer.zero_grad()
    layer(own).backward(dy)
    assert own.grad is not None
    return own.grad


def subjects(kind: str, tokens: int, dtype: torch.dtype) -> dict[str, Callable[[], Tensor]]:
    torch.manual_seed(0)
    dense = nn.Linear(FEATURES, FEATURES, bias=False, dtype=dtype)
    x, dy = torch.randn(2, tokens, FEATURES).to(dtype)
    trained = kind == "float8"
    calls = {}
    for name, layer in (in_float8 if trained else frozen)(dense):
        call = calls[name] = partial(step, layer, x, dy if trained else None)
        found, expected = call().float(), calls["torch"]().float()
        assert (found - expected).norm() < 0.15 * expected.norm(), name  # 4 bits are a tenth off
    return calls


def measure(case: tuple[str, int, torch.dtype], seconds: float, block: float) -> list[Record]:
    cores = interleave.cores()[:1]
    times = interleave.take(
        {name: interleave.here(call, 1, cores) for name, call in subjects(*case).items()}, seconds, block
    )
    kind, tokens, dtype = case
    return interleave.rows(
        times,
        {"linear": f"{kind}, {tokens} tokens, {str(dtype).removeprefix('torch.')}"},
        lambda of, name: {"of torch": of[name] / of["torch"]},
    )


draw = report.bars("{linear}", "median_ms", "ms, medians", None)


def cases(quick: bool) -> list[tuple[str, int, torch.dtype]]:
    if quick:
        return [("frozen", 1, torch.float32), ("float8", 4, torch.float32)]
    dtypes = torch.float32, torch.bfloat16
    return [("frozen", tokens, dtype) for tokens in (1, 256) for dtype in dtypes] + [
        ("float8", 256, dtype) for dtype in dtypes
    ]


def main() -> None:
    report.run(__file__, __doc__, cases, measure, draw)


if __name__ == "__main__":
    main()
