"""Parameters and buffers that a model's code reads as numbers: ``self.scale.item()``, ``float(self.temperature)``.

Fakes have no values. Those of the model's own tensors are constants of a forward, so a number stands for each: the true
one where the model has it. A forward that gives the same record with other numbers does not branch on them; what a plan
proves then holds for any. Values of activations, which differ from batch to batch, stay an error, and so are truth
values, which nothing but a branch reads."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from tp_ext.auto.record.record import Record, source_line

Change = Callable[[float], float]

CHANGES: tuple[Change, ...] = (lambda x: 2 * x + math.copysign(1, x), lambda x: -x - 1)  # the second: to another sign
READ = "aten::_local_scalar_dense"


class Numbers(TorchDispatchMode):
    """Answers reads of numbers while a model runs on fakes.

    Args:
        originals: id of the fake of a parameter or buffer -> that tensor.
        change: makes another number of each.
    """

    def __init__(self, record: Record, originals: Mapping[int, Tensor], change: Change | None) -> None:
        super().__init__()
        self.record, self.originals, self.change = record, originals, change
        self.made: dict[int, tuple[Tensor, Callable[[], Tensor]]] = {}  # of constants alone: kept alive, with the value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.name == READ and self.is_constant(args[0]) and args[0].dtype != torch.bool:
            return self.number(args[0])
        result = func(*args, **kwargs)
        operands = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if operands and all(map(self.is_constant, operands)):
            for i, tensor in enumerate(tree_leaves(result)):
                if isinstance(tensor, Tensor):
                    self.made[id(tensor)] = tensor, functools.partial(self.again, func, args, kwargs, i)
        return result

    def again(self, func: Any, args: Any, kwargs: Any, number: int) -> Tensor:
        """One of the results of an operator on true tensors."""
        results = tree_leaves(func(*tree_map(self.value, args), **tree_map(self.value, kwargs)))
        result: Tensor = results[number]
        return result

    def is_constant(self, tensor: Tensor) -> bool:
        return id(tensor) in self.originals or id(tensor) in self.made

    def value(self, x: Any) -> Any:
        """The true tensor of a fake one, on meta if a parameter is."""
        if not isinstance(x, Tensor):
            return x
        original = self.originals.get(id(x))
        return self.made[id(x)][1]() if original is None else original.detach()

    def number(self, tensor: Tensor) -> complex:
        self.record.numbers.append(source_line())
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
            true = self.value(tensor)
            number = 1 if true.device.type == "meta" or isinstance(true, FakeTensor) else true.item()
        if self.change is not None and not isinstance(number, complex):
            number = self.change(number)
        return number if tensor.is_floating_point() or tensor.is_complex() else int(number)
