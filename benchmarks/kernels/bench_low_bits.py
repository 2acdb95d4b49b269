"""Products with frozen weights of 8 and 4 bits, 1 and 8 tokens, next to torch's, torchao's and those of full precision.

The bandwidth is that of the weight alone, which is nearly all that a product of few tokens reads.
"""

import importlib
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.lib.harness import TOLERANCE, Case, inference, main, makeable, torch_peers
from tp_ext import _ops

BLOCK = 32
ZERO = 8  # the code of 0 in four bits
TILES = 8  # of torch's layout of four bits on a GPU
Peer = Callable[[Tensor], Tensor]


def packed_by_torch(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Peer:
    """torch's product of the same four bits: w = (q - 8) scale + zero."""
    scales = torch.stack([scale, torch.zeros_like(scale)], -1).transpose(0, 1).contiguous().to(torch.bfloat16)
    if packed.is_cuda:  # it wants input 2j in the high bits
        layout = torch._convert_weight_to_int4pack(packed << 4 | packed >> 4, TILES)
        return lambda x: torch._weight_int4pack_mm(x.bfloat16(), layout, BLOCK, scales).to(dtype)
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(1).int()
    layout = torch._convert_weight_to_int4pack_for_cpu(codes, TILES)
    return lambda x: torch._weight_int4pack_mm_for_cpu(x.bfloat16(), layout, BLOCK, scales).to(dtype)


def torchao(weight: Tensor, bits: int) -> Peer:
    library: Any = importlib.import_module("torchao.quantization")
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight)
    model = nn.Sequential(linear)
    library.quantize_(model, library.Int8WeightOnlyConfig() if bits == 8 else library.Int4WeightOnlyConfig(BLOCK))
    return model


def peers_of(weight: Tensor, packed: Tensor, scale: Tensor, bits: int) -> dict[str, Peer]:
    dtype = weight.dtype
    by_torch = partial(packed_by_torch, packed, scale, dtype)
    makers: dict[str, Callable[[], Peer]] = {
        f"torch int{bits}": by_torch if bits == 4 else lambda: partial(_int8_by_torch, packed, scale.to(dtype)),
        "without low bits": lambda: lambda x: F.linear(x, weight),
    }
    if importlib.util.find_spec("torchao"):
        makers["torchao"] = partial(torchao, weight, bits)
    return makeable(makers)


def _int8_by_torch(packed: Tensor, scale: Tensor, x: Tensor) -> Tensor:
    return torch._weight_int8pack_mm(x, packed, scale)


def check(call: Callable[[], Tensor], x: Tensor, exact: Tensor) -> None:
    want = x.double() @ exact.double().t()
    error = ((call().double() - want).norm() / want.norm()).item()
    assert error <= TOLERANCE[x.dtype], f"off by {error:.2e} of the norm"


def unpacked(packed: Tensor, scale: Tensor, bits: int) -> Tensor:
    if bits == 8:
        return packed.float() * scale[:, None]
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(1).float() - ZERO
    return codes * scale.repeat_interleave(BLOCK, 1)


def cases(device: str, dtype: torch.dtype, size: int) -> list[Case]:
    torch.manual_seed(0)
    n = 8192 if size >= 64 << 20 else 256
    result = []
    for bits in (8, 4):
        if bits == 8:
            packed = torch.randint(-127, 128, (n, n), dtype=torch.int8, device=device)
            scale = torch.rand(n, device=device) / 1e3
        else:
            packed = torch.randint(0, 256, (n, n // 2), dtype=torch.uint8, device=device)
            scale = (torch.rand(n, n // BLOCK, device=device) / 1e2).bfloat16().float()
        block = BLOCK if bits == 4 else None
        exact = unpacked(packed, scale, bits)
        weight, read = exact.to(dtype), packed.nbytes + scale.nbytes
        others = peers_of(weight, packed, scale, bits)
        for tokens in (1, 8):
            x = torch.randn(tokens, n, dtype=dtype, device=device)
            call = partial(inference, partial(_ops.low_bits_product, x, packed, scale, block))
            peers = {name: partial(inference, partial(peer, x)) for name, peer in others.items()}
            right = partial(check, call, x, exact)
            result.append(Case(f"int{bits}, {tokens} tokens", call, peers, right, read, None, (tokens, n, n)))
        call = partial(_ops.dequantize_low_bits, packed, scale, block)
        peers = torch_peers(partial(unpacked, packed, scale, bits), device)
        result.append(Case(f"int{bits}, unpacked", call, peers, None, read + 4 * n * n, None, (n, n)))
    return result


if __name__ == "__main__":
    main(cases)
