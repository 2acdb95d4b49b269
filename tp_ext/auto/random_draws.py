"""Dropout of unchanged code: masks are a function of the index in the full tensor, hence those of one process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tp_ext.auto.edits import Draw
from tp_ext.auto.token_hooks import TokenLengths
from tp_ext.group import ParallelGroup
from tp_ext.nn.dropout import dropout


class _Masks(TorchFunctionMode):
    """Replaces the random calls of one forward, in order."""

    def __init__(self, draws: list[Draw], group: ParallelGroup, tokens: TokenLengths | None) -> None:
        super().__init__()
        self.draws, self.group, self.tokens, self.next = draws, group, tokens, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout:
            return self.drop(self.take("dropout"), *args, **kwargs)
        if func is F.scaled_dot_product_attention:
            draw = self.take("scaled_dot_product_attention")
            if args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0):
                return self.attention(draw, *args, **kwargs)
        return func(*args, **kwargs)

    def take(self, call: str) -> Draw:
        draw = self.draws[self.next] if self.next < len(self.draws) else None
        if draw is None or draw.call != call:
            expected = "nothing" if draw is None else draw.call
            module = self.draws[0].module
            raise RuntimeError(f"{module}: forward calls F.{call} where its plan has {expected}; plan in train mode")
        self.next += 1
        return draw

    def drop(self, draw: Draw, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        dim, sizes = draw.dim, None if draw.sizes is None else list(draw.sizes)
        if draw.tokens and self.tokens is not None and dim is not None:
            sizes = self.tokens.sizes_of(input, dim)
            dim = None if sizes is None else dim
        return dropout(input, p, training, group=self.group.name, dim=dim, sizes=sizes)

    def attention(
        self,
        draw: Draw,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """softmax(q k^T scale + mask) v with dropout of the weights, as the documentation of torch computes it."""
        if enable_gqa:
            groups = query.shape[-3] // key.shape[-3]
            key, value = (t.repeat_interleave(groups, -3) for t in (key, value))
        scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(later, -torch.inf)
        if attn_mask is not None:
            is_mask = attn_mask.dtype == torch.bool
            scores = scores.masked_fill(~attn_mask, -torch.inf) if is_mask else scores + attn_mask
        weights = dropout(scores.softmax(-1), dropout_p, True, group=self.group.name, dim=draw.dim, sizes=draw.sizes)
        return weights @ value


@dataclass
class BeginDraws:
    """A forward pre-hook: random calls of a module in training are replaced while its forward runs."""

    draws: list[Draw]
    group: ParallelGroup
    tokens: TokenLengths | None = None
    running: list[_Masks] = field(default_factory=list)
    is_needed_in_stages = True

    def __call__(self, module: nn.Module, args: Any) -> None:
        if module.training:
            mode = _Masks(self.draws, self.group, self.tokens)
            mode.__enter__()
            self.running.append(mode)


@dataclass
class EndDraws:
    """The forward hook that ends :class:`BeginDraws`, also after an exception."""

    begun: BeginDraws

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.begun.running:
            self.begun.running.pop().__exit__(None, None, None)
