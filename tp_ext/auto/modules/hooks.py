"""Hooks at boundaries of modules: what a plan does there without a change of forward code.

They are objects of classes, no closures, so that a sharded model can be copied and pickled. Those with
``is_needed_in_stages`` change what the module computes: a pipeline must not leave the module out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tp_ext import _ops
from tp_ext.auto.modules.token_hooks import TokenLengths
from tp_ext.auto.record.edits import Conversion, LeafPath
from tp_ext.auto.search.localize import replaced, replaced_argument
from tp_ext.group import ParallelGroup
from tp_ext.sharding import CopiedRows, Sharding


@dataclass
class CopyOutput:
    """Sums the gradient of an output of the module, or of a span of one dim of it; with ``tokens`` only while they are
    sharded."""

    path: LeafPath
    span: tuple[int, int, int] | None
    group: ParallelGroup
    tokens: TokenLengths | None = None
    is_needed_in_stages = True

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        # With whole tokens every rank has the complete gradient, and a sum of it would be p times too large
        if self.tokens is not None and self.tokens.length is None:
            return output
        return replaced(output, self.path, self.copied)

    def copied(self, y: Tensor) -> Tensor:
        if self.span is None:
            return _ops.copy_to_region(y, self.group.name)
        dim, start, stop = self.span
        # Only the gradient of this part is partial as a whole. The rest has another sum, or needs none
        before, middle, after = y.split([start, stop - start, y.shape[dim] - stop], dim)
        return torch.cat([before, _ops.copy_to_region(middle, self.group.name), after], dim)


@dataclass
class CopyArguments:
    """Sums the gradients of arguments of the module; with ``tokens`` only while they are sharded."""

    paths: list[LeafPath]
    group: ParallelGroup
    tokens: TokenLengths | None = None
    is_needed_in_stages = True

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        # With whole tokens the gradients are complete, as in CopyOutput
        both = args, kwargs
        if self.tokens is not None and self.tokens.length is None:
            return both
        entered: dict[int, tuple[Tensor, Tensor]] = {}  # one sum for a tensor that is several arguments

        def enter(x: Tensor) -> Tensor:
            if id(x) not in entered:
                entered[id(x)] = x, _ops.copy_to_region(x, self.group.name)
            return entered[id(x)][1]

        for path in self.paths:
            both = replaced_argument(module, *both, path, enter)
        return both


@dataclass
class SliceArgument:
    """Takes this rank's share of an argument that is computed outside of the module."""

    slice: Conversion
    group: ParallelGroup
    is_needed_in_stages = True

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return replaced_argument(module, args, kwargs, self.slice.path, self.sliced)

    def sliced(self, x: Tensor) -> Tensor:
        dim, factor = self.slice.dim, self.slice.factor
        assert factor is not None
        divided, place = factor.divided(x, dim, factor.size)
        local = factor.sharding(place).shard(divided, self.group.rank, self.group.size)
        return local if divided is x else local.flatten(dim, dim + 1)


@dataclass
class SumOutput:
    """Sums a partial output of the module over the ranks."""

    path: LeafPath
    group: ParallelGroup
    is_needed_in_stages = True

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        return replaced(output, self.path, lambda y: _ops.reduce_from_region(y, self.group.name))


@dataclass
class GatherOutput:
    """Gathers an output of the module that has a sharded dim."""

    path: LeafPath
    sharding: Sharding
    group: ParallelGroup
    is_needed_in_stages = True

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        return replaced(output, self.path, self.gathered)

    def gathered(self, y: Tensor) -> Tensor:
        sizes, dim = self.sharding.local_sizes(self.group.size), self.sharding.dim
        # A gather appends shard after shard. The full dim has q of all ranks, then k, then v
        return self.sharding.unshard(_ops.gather_from_region(y, self.group.name, dim, sizes).split(sizes, dim))


@dataclass
class EnterParameters:
    """Parameters of the module, read through a region while its forward runs, so that their gradients are complete.

    The tensors are put into the module's ``__dict__``, which is searched before its parameters: these stay what they
    are for optimizers, FSDP2 and state dicts.

    Attributes:
        divided: name -> whether the parameter is used as 1/p of itself; the gradient is summed over all ranks. copied:
        name -> its sharded dim, and the rows along it that other ranks hold, too; the gradients of those are summed
            over the holders.
        on_tokens: names of those whose gradients are summed only while ``tokens`` are sharded.
    """

    group: ParallelGroup
    divided: dict[str, bool] = field(default_factory=dict)
    copied: dict[str, tuple[int, CopiedRows]] = field(default_factory=dict)
    on_tokens: set[str] = field(default_factory=set)
    tokens: TokenLengths | None = None
    is_needed_in_stages = True

    def __call__(self, module: nn.Module, args: Any) -> None:
        for name, divided in self.divided.items():
            if name in self.on_tokens and self.tokens is not None and self.tokens.length is None:
                continue
            entered = _ops.copy_to_region(module._parameters[name], self.group.name)  # type: ignore[arg-type]
            # Every rank adds a divided parameter to its partial sum, and the p shares make it once
            module.__dict__[name] = entered / self.group.size if divided else entered
        for name, (dim, rows) in self.copied.items():
            # The operator counts the copied rows along dim 0
            parameter = module._parameters[name].movedim(dim, 0)  # type: ignore[union-attr]
            module.__dict__[name] = _ops.copy_replicas_to_region(parameter, self.group.name, *rows).movedim(0, dim)

    @property
    def names(self) -> list[str]:
        return [*self.divided, *self.copied]


@dataclass
class LeaveParameters:
    """Undoes :class:`EnterParameters` when the forward has ended, also by an exception."""

    names: list[str]

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        for name in self.names:
            # It is not there if tokens are whole, or if another hook has raised before
            module.__dict__.pop(name, None)


def refuse_adapters(module: nn.Module, args: Any) -> None:
    """A forward pre-hook of the model: raises if PEFT has put its modules into it, which know of no shards.

    Raises:
        RuntimeError: on all ranks, before the first collective of the forward.
    """
    if "peft_config" in module.__dict__:
        raise RuntimeError("model: has adapters of PEFT, which know of no shards; use tp_ext.add_lora")
