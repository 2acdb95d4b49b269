"""Gradients in blocks of 8-bit codes: compression, sum of four ranks, decoding; next to torch's operators."""

from functools import partial

import torch
from torch import Tensor

from benchmarks.lib.harness import Case, main, torch_peers
from tests.helpers.compression import decoded_blocks
from tp_ext import _ops

BLOCK, RANKS = 256, 4
SCALE = 4  # bytes


def codes_by_torch(x: Tensor, residual: Tensor, float8: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and rounding errors, of whole blocks."""
    values = (x.float() + residual).view(-1, BLOCK)
    most = 448.0 if float8 else 127.0
    scale = (values.abs().amax(1, keepdim=True) / most).clamp_min(1e-30)
    q = (values / scale).clamp(-most, most)
    codes = q.to(torch.float8_e4m3fn) if float8 else q.round().to(torch.int8)
    return codes, scale, values - codes.float() * scale


def sum_by_torch(codes: Tensor, scales: Tensor, residual: Tensor, float8: bool) -> tuple[Tensor, Tensor, Tensor]:
    return codes_by_torch((codes.float() * scales).sum(0).flatten(), residual, float8)


def decoded_by_torch(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return (codes.float() * scales / RANKS).to(dtype).flatten()


def cases(device: str, dtype: torch.dtype, size: int) -> list[Case]:
    torch.manual_seed(0)
    n = size // dtype.itemsize // BLOCK * BLOCK
    x, residual = torch.randn(n, dtype=dtype, device=device), torch.randn(n, device=device) / 100
    wire_bytes = n + n // BLOCK * SCALE
    places = torch.tensor([[0, n, 0]] + [[n, 0, wire_bytes]] * (RANKS - 1), device=device)
    result = []
    for name, float8 in (("int8", False), ("float8", True)):
        form = (BLOCK, float8)
        wire = torch.empty(wire_bytes, dtype=torch.uint8, device=device)
        kept, out = residual.clone(), torch.empty_like(x)
        compress = partial(_ops.compress_blocks_, x, kept, wire, places, *form)
        decode = partial(_ops.decompress_blocks_, wire, out, places, *form)
        right = partial(_check, x, residual, kept, wire, out, places, float8)
        peers = torch_peers(partial(codes_by_torch, x, residual, float8), device)
        shape, moved = (n,), n * (dtype.itemsize + 8) + wire_bytes
        result.append(Case(f"{name}, compress", compress, peers, right, moved, None, shape))

        codes, scales, _ = codes_by_torch(x, residual, float8)
        peers = torch_peers(partial(decoded_by_torch, codes, scales, dtype), device)
        result.append(Case(f"{name}, decompress", decode, peers, right, wire_bytes + x.nbytes, None, shape))

        received = torch.empty(RANKS, wire_bytes, dtype=torch.uint8, device=device)
        for row in received:
            _ops.compress_blocks_(x, None, row, places, *form)
        total, errors = torch.empty_like(wire), residual.clone()
        add = partial(_ops.sum_compressed_blocks_, received, errors, total, 0, n, *form)
        stacked = codes.expand(RANKS, -1, -1).contiguous(), scales.expand(RANKS, -1, -1).contiguous()
        peers = torch_peers(partial(sum_by_torch, *stacked, residual, float8), device)
        moved = received.nbytes + wire_bytes + 8 * n
        result.append(Case(f"{name}, sum of {RANKS}", add, peers, right, moved, None, shape))
    return result


def _check(x: Tensor, residual: Tensor, kept: Tensor, wire: Tensor, out: Tensor, places: Tensor, float8: bool) -> None:
    """The first blocks by the formula, bit by bit: it walks over blocks."""
    kept.copy_(residual)
    _ops.compress_blocks_(x, kept, wire, places, BLOCK, float8)
    _ops.decompress_blocks_(wire, out, places, BLOCK, float8)
    first = 64 * BLOCK
    values = x[:first].cpu().float() + residual[:first].cpu()
    expected = decoded_blocks(values.clone(), BLOCK, float8)
    assert torch.equal(kept[:first].cpu(), values - expected)
    assert torch.equal(out[:first].cpu(), (expected / RANKS).to(x.dtype))


if __name__ == "__main__":
    main(cases)
