"""Seeds of masks by name, for traced code. These operators are Python's, since the tables that they read are: they are
registered here, with their fakes, in a library of their own, and implemented by :mod:`tp_ext.random_scope`, which their
first call imports.

The name comes first and is a tensor of the CPU, as is the result: where traced code recomputes a random operator, torch
saves the generator of the first tensor's device, and the CPU's is the one that stands for a step and a microbatch. A
tensor, so that compiled code serves all modules of one kind. x is read for its shape and device alone; that a later
call depends on the result of an earlier one keeps their order.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tp_ext._imports import import_now

_library = torch.library.Library("tp_ext_python", "DEF")  # kept for the life of the process
_tags = [torch.Tag.pt2_compliant_tag, torch.Tag.nondeterministic_seeded, torch.Tag.cudagraph_unsafe]

_library.define(
    "draw_rows_seed(Tensor name, Tensor x, SymInt each, SymInt start, SymInt full, bool tokens, bool table) -> Tensor",
    tags=_tags,
)
_library.define(
    "draw_sequence_seeds(Tensor name, Tensor like, SymInt[] starts, SymInt unit) -> Tensor",
    tags=_tags,
)


@torch.library.register_fake("tp_ext_python::draw_rows_seed")
def _rows_seed(name: Tensor, x: Tensor, each: int, start: int, full: int, tokens: bool, table: bool) -> Tensor:
    rows = table_rows(x, tokens) if table else 1
    return torch.empty(1 + rows, dtype=torch.int64, device="cpu")


@torch.library.register_fake("tp_ext_python::draw_sequence_seeds")
def _sequence_seeds(name: Tensor, like: Tensor, starts: Sequence[int], unit: int) -> Tensor:
    return torch.empty(len(starts), 2, dtype=torch.int64, device="cpu")


def table_rows(x: Tensor, tokens: bool) -> int:
    """Returns the number of tokens of x: of dim 0, or if that does not count ``tokens`` of the first two dims."""
    return x.shape[0] if tokens else x.shape[0] * x.shape[1]


draw_rows_seed: Callable[..., Tensor] = torch.ops.tp_ext_python.draw_rows_seed.default
draw_sequence_seeds: Callable[..., Tensor] = torch.ops.tp_ext_python.draw_sequence_seeds.default


def _implement(name: str) -> None:
    def call(*args: Any) -> Tensor:
        mask: Tensor = getattr(import_now("tp_ext.random_scope"), f"{name}_of_name")(*args)
        return mask

    for device in ("CPU", "CUDA"):
        _library.impl(name, call, device)


_implement("draw_rows_seed")
_implement("draw_sequence_seeds")
