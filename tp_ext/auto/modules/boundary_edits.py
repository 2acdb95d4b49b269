"""Edits of arguments, outputs and parameters: the conversions of a plan, without a change of forward code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tp_ext import _ops
from tp_ext.auto.modules.token_lengths import TokenLengths
from tp_ext.auto.record.boundary import Edit, EditPlace
from tp_ext.auto.record.edits import Conversion, LeafPath
from tp_ext.auto.search.localize import replaced, replaced_argument
from tp_ext.conversions import I, P, R, S, Type
from tp_ext.group import ParallelGroup
from tp_ext.sharding import CopiedRows


@dataclass
class Converted:
    """The function of a conversion: the tensor in front of the boundary -> that behind it."""

    edit: Conversion
    group: ParallelGroup
    tokens: TokenLengths | None = None

    def __post_init__(self) -> None:
        self.function = Converted.on_tokens if self.edit.of_tokens else _FUNCTIONS[self.edit.types]

    def __call__(self, x: Tensor) -> Tensor:
        return self.function(self, x)

    def summed(self, y: Tensor) -> Tensor:
        return _ops.reduce_from_region(y, self.group.name)

    def copied(self, y: Tensor) -> Tensor:
        # With whole tokens every rank has the complete gradient, and a sum of it would be p times too large
        if self.tokens is not None and self.tokens.length is None:
            return y
        if self.edit.span is None:
            return _ops.copy_to_region(y, self.group.name)
        dim, start, stop = self.edit.span
        # Only the gradient of this part is partial as a whole. The rest has another sum, or needs none
        before, middle, after = y.split([start, stop - start, y.shape[dim] - stop], dim)
        return torch.cat([before, _ops.copy_to_region(middle, self.group.name), after], dim)

    def sliced(self, x: Tensor) -> Tensor:
        dim, factor = self.edit.dim, self.edit.factor
        assert factor is not None
        divided, place = factor.divided(x, dim, factor.size)
        local = factor.sharding(place).shard(divided, self.group.rank, self.group.size)
        return local if divided is x else local.flatten(dim, dim + 1)

    def gathered(self, y: Tensor) -> Tensor:
        sharding = self.edit.sharding
        sizes, dim = sharding.local_sizes(self.group.size), sharding.dim
        # A gather appends shard after shard. The full dim has q of all ranks, then k, then v
        return sharding.unshard(_ops.gather_from_region(y, self.group.name, dim, sizes).split(sizes, dim))

    def of_one_rank(self, y: Tensor) -> Tensor:
        """Makes the gradient of a result partial: that of rank 0, and zeros."""
        if not (y.requires_grad and torch.is_grad_enabled()):
            return y
        # Zeros, and not none, and the same graph on every rank: each takes part in the sums of this backward
        flag = torch.full((), self.group.rank == 0, dtype=torch.bool, device=y.device)
        return torch.where(flag, y, y.detach())

    def on_tokens(self, x: Tensor) -> Tensor:
        assert self.tokens is not None
        name, dim, types = self.group.name, self.edit.dim, self.edit.types
        if types in ((P, S), (I, S)):
            # Whole tokens, here and below: the collectives are those without sequence parallelism
            sizes = self.tokens.enter(x.shape[dim])
            if types == (P, S):
                return self.summed(x) if sizes is None else _ops.reduce_scatter_region(x, name, dim, sizes)
            return x if sizes is None else _ops.scatter_to_region(x, name, dim, sizes)
        sizes = self.tokens.sizes_of(x, dim)
        if types == (S, R):
            # The gradient is partial with whole tokens, too: sharded work uses the tensor
            return _ops.copy_to_region(x, name) if sizes is None else _ops.all_gather_region(x, name, dim, sizes)
        return x if sizes is None else _ops.gather_from_region(x, name, dim, sizes)


# Of tensors whose tokens are whole
_FUNCTIONS: dict[tuple[Type, Type], Callable[[Converted, Tensor], Tensor]] = {
    (P, I): Converted.summed, (I, R): Converted.copied, (I, S): Converted.sliced, (S, I): Converted.gathered,
    (R, I): Converted.of_one_rank,
}  # fmt: skip


@dataclass
class ConvertedArgument(Edit):
    """An argument of which the module takes a shard, or all tokens."""

    converted: Converted
    is_needed_in_stages = True

    def __post_init__(self) -> None:
        self.is_of_input = self.converted.edit.of_tokens
        self.place = EditPlace.TOKENS_OF_ARGUMENT if self.is_of_input else EditPlace.SHARD_OF_ARGUMENT

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return replaced_argument(module, args, kwargs, self.converted.edit.path, self.converted)


@dataclass
class ConvertedOutput(Edit):
    """An output of the module that has another type for the code around it."""

    converted: Converted
    is_needed_in_stages = True

    def __post_init__(self) -> None:
        edit = self.converted.edit
        of_values = EditPlace.SUM if edit.types == (P, I) else EditPlace.GRADIENT_OF_OUTPUT
        self.place = EditPlace.TOKENS_OF_OUTPUT if edit.of_tokens else of_values

    def after(self, module: nn.Module, output: Any) -> Any:
        converted = self.converted
        path = converted.edit.path
        # The output itself, as of most modules, costs no further calls
        return replaced(output, path, converted) if path else converted.function(converted, output)


@dataclass
class CopiedArguments(Edit):
    """Arguments of which the gradients are summed; with ``tokens`` only while these are sharded."""

    paths: list[LeafPath]
    group: ParallelGroup
    tokens: TokenLengths | None = None
    place = EditPlace.GRADIENTS_OF_ARGUMENTS
    is_needed_in_stages = True

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        # With whole tokens the gradients are complete, as of an output
        if self.tokens is not None and self.tokens.length is None:
            return None
        entered: dict[int, tuple[Tensor, Tensor]] = {}  # one sum for a tensor that is several arguments

        def enter(x: Tensor) -> Tensor:
            if id(x) not in entered:
                entered[id(x)] = x, _ops.copy_to_region(x, self.group.name)
            return entered[id(x)][1]

        for path in self.paths:
            args, kwargs = replaced_argument(module, args, kwargs, path, enter)
        return args, kwargs


@dataclass
class EnteredParameters(Edit):
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
    place = EditPlace.PARAMETERS
    is_needed_in_stages = True

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
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

    def end(self, module: nn.Module, output: Any) -> None:
        for names in (self.divided, self.copied):
            for name in names:
                # It is not there if tokens are whole, or if a hook has raised before
                module.__dict__.pop(name, None)


class NoAdapters(Edit):
    """Refuses calls of the model once PEFT has put its modules, which know of no shards, into it."""

    place = EditPlace.ADAPTERS

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if "peft_config" in module.__dict__:  # on all ranks, before the first collective of the forward
            raise RuntimeError("model: has adapters of PEFT, which know of no shards; use tp_ext.add_lora")
