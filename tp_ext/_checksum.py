"""A checksum of a tensor's bits, equal on two ranks only if the tensors are, up to one chance in 2^64."""

import torch
from torch import Tensor


def bits_of(tensor: Tensor) -> Tensor:
    """Returns the tensor flattened, its bits as integers."""
    flat = tensor.contiguous().reshape(-1)
    size = flat.element_size()
    return flat.view({1: torch.int8, 2: torch.int16, 4: torch.int32}.get(size, torch.int64))


def checksum(bits: Tensor) -> Tensor:
    """Returns [sum of mix(bits, index) modulo 2^64, 1 if not all elements are alike]; mix: splitmix64's finaliser."""
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    length = 1 << (16 if bits.device.type == "cpu" else 24)  # CPU: fits a core's cache; GPU: few launches
    step = torch.arange(1, min(length, bits.numel()) + 1, device=bits.device) * -0x61C8864680B583EB
    for number, chunk in enumerate(bits.split(length)):
        mixed = step[: chunk.numel()] + ((number * 0x632BE59BD9B4E019 + (1 << 63)) % (1 << 64) - (1 << 63))
        mixed += chunk
        for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
            mixed ^= mixed >> shift
            mixed *= factor
        total += mixed.sum()
    varied = (bits != bits[:1]).any().long()
    return torch.stack([total, varied])
