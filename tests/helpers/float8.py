"""The formula of 8-bit floating point in torch's operators."""

import torch
from torch import Tensor

MAX = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def scaled(x: Tensor, amax: Tensor, format: torch.dtype) -> tuple[Tensor, Tensor]:
    """The values of x in 8 bits, and the inverse of the scale that amax gives."""
    most = MAX[format]
    scale = torch.where(amax == 0, 1, most / amax.double().clamp_min(1e-12)).float()
    wide = x.float()
    q = (wide * scale).clamp(-most, most)
    return torch.where(wide.isfinite(), q, float("nan")).to(format), 1 / scale


def rounded(x: Tensor, format: str, dim: int | None) -> Tensor:
    """Returns x ``[m, n]`` rounded to 8 bits, in fp64, with one scale, or with a scale for each slice along ``dim``."""
    dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[format]
    size = torch.where(x.isfinite(), x, 0).float().abs()
    if x.numel() == 0:
        return x.double()
    amax = size.amax([0, 1], keepdim=True) if dim is None else size.amax(dim, keepdim=True)
    values, inverse = scaled(x, amax, dtype)
    return values.double() * inverse.double()
