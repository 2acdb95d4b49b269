"""The formula of compressed gradients in torch's operators."""

import torch
from torch import Tensor


def decoded_blocks(values: Tensor, block: int, float8: bool) -> Tensor:
    """Returns a flat fp32 tensor after it was quantised and dequantised by blocks."""
    most = 448 if float8 else 127
    parts: list[Tensor] = []
    for part in values.split(block) if values.numel() else ():
        scale = part.abs().amax() / most
        scale = torch.where(scale == 0, torch.ones_like(scale), scale)
        q = (part / scale).clamp(-most, most)
        whole = q.to(torch.float8_e4m3fn).float() if float8 else q.round()
        parts.append(whole * scale if part.isfinite().all() else part.fill_(float("nan")))
    return torch.cat(parts) if parts else values


class Exchange:
    """The exchange of one gradient by all ranks, with the residuals of all: the mean that each rank gets."""

    def __init__(self, ranks: int, block: int, float8: bool, feedback: bool) -> None:
        self.format, self.feedback = (block, float8), feedback
        self.errors: list[Tensor] | None = None
        self.ranks = ranks
        self.share_error: Tensor | None = None

    def __call__(self, grads: list[Tensor]) -> Tensor:
        values = [grad.float().reshape(-1) for grad in grads]
        if self.ranks == 1:
            return grads[0]
        if self.errors is None or self.share_error is None:
            self.errors, self.share_error = [torch.zeros_like(value) for value in values], torch.zeros_like(values[0])
        values = [value + error for value, error in zip(values, self.errors, strict=True)]
        sent = [decoded_blocks(value.clone(), *self.format) for value in values]
        total = sent[0]
        for decoded in sent[1:]:
            total = total + decoded
        total = total + self.share_error
        result = decoded_blocks(total.clone(), *self.format)
        if self.feedback:
            self.errors = [value - decoded for value, decoded in zip(values, sent, strict=True)]
            self.share_error = total - result
        return (result / self.ranks).to(grads[0].dtype).view(grads[0].shape)
