"""Rows of bytes: what a layer or function sends, as in docs/reference/communication.md, and what a layer saves for
backward, as in docs/reference/memory.md. 2, 3 and 4 ranks divide the sizes."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

BATCH, SEQ = 2, 12
N, H, F, V = BATCH * SEQ, 12, 36, 48  # tokens, hidden, ffn, vocabulary
AR, AG, RS, A2A = "all_reduce", "all_gather", "reduce_scatter", "all_to_all"
SP = {"sequence_parallel": True}
Collectives = Sequence[tuple[str, int]]


class Sent(NamedTuple):
    """``name``: the public name; ``make(group)`` returns what each rank calls; forward and backward: the collectives of
    the call, with the bytes of the full tensors in fp32, or functions of p that return them."""

    name: str
    make: Callable[[Any], Callable[[], Any]]
    forward: Collectives | Callable[[int], Collectives]
    backward: Collectives | Callable[[int], Collectives] = ()


E = 4  # fp32
S = N * H * E  # an activation


def called(kind, *args, width=H, cut=False, own=False, frozen=False, **options):
    """Calls kind(*args, ..) with [N, width]: with this rank's features if cut, with its tokens if own."""

    def make(g):
        module = kind(*args, group=g, **options)
        if frozen:
            module.requires_grad_(False)
        x = torch.randn(N // g.size() if own else N, width // g.size() if cut else width, requires_grad=True)
        return lambda: module(x)

    return make


class Sizes:
    """The letters of the formulas: e bytes an element, n tokens, n_sp those of a rank between the blocks."""

    def __init__(self, p, sp, dtype, h=H, n=N):
        self.e, self.p, self.n, self.n_sp, self.h = dtype.itemsize, p, n, n // p if sp else n, h


class Saved(NamedTuple):
    """``name``: the public name; ``make(group=, sequence_parallel=, dtype=)`` makes the module; ``bytes``: the formula;
    ``takes``: "tokens", "features" (sharded), "ids" or "logits"."""

    name: str
    make: Callable[..., nn.Module]
    bytes: Callable[[Sizes], int]
    takes: str = "tokens"
    call: Callable[[Any, Tensor], Tensor] = lambda module, x: module(x)
