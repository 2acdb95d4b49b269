"""Modules that take the place of leaves of an unchanged model: linear layers, ``Conv1D``, embeddings and bags of these,
RMS norms."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tp_ext import _ops
from tp_ext.auto.modules.token_lengths import TokenLengths
from tp_ext.auto.record.kept import while_used
from tp_ext.auto.record.record import Record
from tp_ext.auto.record.trace import trace
from tp_ext.group import ParallelGroup
from tp_ext.model.layouts import declare_layouts
from tp_ext.model.same_input import DebugMode, check_same_input
from tp_ext.nn.forms import scattered_sum
from tp_ext.nn.linear import ColumnParallelLinear, RowParallelLinear
from tp_ext.nn.norm import RMSNorm
from tp_ext.sharding import Layout, Sharding
from tp_ext.share_sizes import Weights

CONVERSIONS = ("_to_copy", "to")
CALLS = "pow mean add rsqrt mul mul"  # of an RMS norm


class EnteredColumnLinear(ColumnParallelLinear):
    """A column-parallel linear layer whose input's gradient is summed elsewhere, once for all layers that use it.

    Shapes: x ``[.., in]`` -> ``[.., out_local]``. Communicates nothing itself.
    """

    input_gradient_is_summed_elsewhere = True

    def forward(self, x: Tensor, total_tokens: int | None = None, *, weight: Tensor | None = None) -> Tensor:
        """Computes y = x W_local^T + b_local."""
        return self.form.entered_column(self, x, weight)


class RowTokensLinear(RowParallelLinear):
    """A row-parallel linear layer whose result is sharded on a dim of tokens, while tokens are sharded.

    Shapes: x ``[.., in_local]`` -> ``[.., out]``, this rank's slice of dim ``tp_tokens_dim``; else the full one.
    Communicates: forward, one reduce-scatter of y; backward, one all-gather of dy and one all-reduce of db; else as
    its base.
    """

    tp_tokens: TokenLengths
    tp_tokens_dim: int

    # Without residual and norm: it stands for an nn.Linear
    def forward(  # type: ignore[override]
        self, x: Tensor, total_tokens: int | None = None, *, weight: Tensor | None = None
    ) -> Tensor:
        """Computes y."""
        sizes = self.tp_tokens.enter(x.shape[self.tp_tokens_dim])
        if sizes is None:
            y: Tensor = super().forward(x, weight=weight)
            return y
        return self.form.row_of_tokens(self, x, weight, self.tp_tokens_dim, sizes)


class RowConv1D(nn.Module):
    """The ``Conv1D`` of transformers with sharded input features: y = sum over ranks of x_local W_local, + b.

    Shapes: weight ``[in_local, out]``; x ``[.., in_local]`` -> y ``[.., out]``, replicated; with ``tp_tokens`` this
    rank's slice of dim ``tp_tokens_dim``.
    Communicates: forward, one all-reduce of y; with ``tp_tokens`` as :class:`RowTokensLinear`.

    Args:
        dense: the unsharded layer, whose parameters are taken.
        weight: this rank's shard of its weight.
        sharding: of the weight, on dim 0.
    """

    shares: Weights | None = None
    tp_tokens: TokenLengths | None = None
    tp_tokens_dim: int = 0

    def __init__(self, dense: nn.Module, weight: nn.Parameter, sharding: Sharding, group: ParallelGroup) -> None:
        super().__init__()
        self.nf = dense.nf
        self.weight = weight
        self.register_parameter("bias", dense._parameters.get("bias"))
        self.tp_group = group
        declare_layouts(self, {"weight": Layout((sharding, group))})

    def forward(self, x: Tensor) -> Tensor:
        """Computes y."""
        name = self.tp_group.name
        bias = self._parameters["bias"]
        sizes = None if self.tp_tokens is None else self.tp_tokens.enter(x.shape[self.tp_tokens_dim])
        if sizes is not None:
            return scattered_sum(x @ self.weight, bias, name, self.tp_tokens_dim, sizes)
        return _ops.row_parallel_linear(x, self.weight.t(), bias, name, False, None, None, 1, True)


class RowsOfTable(nn.Module):
    """A table whose rows are sharded.

    Never constructed: it becomes a base of an existing table's class, below what that class adds.
    """

    tp_group: ParallelGroup
    first_row: int
    local_rows: int
    shares: Weights | None = None
    tp_tokens: TokenLengths | None = None
    tp_tokens_dim: int = 0

    def compare(self, input: Tensor) -> None:
        """Compares the indices over the ranks, which would sum rows of others, in the debug mode."""
        if DebugMode.on:
            check_same_input("input", input, self.tp_group)

    def wrong_rows(self, weight: Tensor) -> ValueError:
        """Returns the error that the weight has not this rank's rows: another tensor has taken its place."""
        return ValueError(f"weight: {weight.size(0)} rows must be {self.local_rows}, this rank's of the table")

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class is made while the program runs: pickle would not find it by its name
        make, base = empty_of(type(self))
        return make, (base,), self.__getstate__()


class VocabLookup(RowsOfTable, nn.Embedding):
    """The look-up of an embedding whose rows are sharded: zeros for rows of other ranks, then one all-reduce."""

    def forward(self, input: Tensor) -> Tensor:
        """Returns the rows of the full table, ``[*input.shape, embedding_dim]``, or a slice of these."""
        self.compare(input)
        sizes = None if self.tp_tokens is None else self.tp_tokens.enter(input.shape[self.tp_tokens_dim])
        # Without a group the operator leaves its sum to the reduce-scatter below
        group = self.tp_group.name if sizes is None else ""
        weight = self.weight
        if weight.size(0) != self.local_rows:
            raise self.wrong_rows(weight)
        y: Tensor = _ops.vocab_parallel_embedding(
            input, weight, group, self.first_row, self.local_rows, self.num_embeddings, False, None
        )
        if self.padding_idx is not None:  # its row has no gradient
            y = torch.where((input == self.padding_idx)[..., None], y.detach(), y)
        return y if sizes is None else _ops.reduce_scatter_region(y, self.tp_group.name, self.tp_tokens_dim, sizes)


class VocabBag(RowsOfTable, nn.EmbeddingBag):
    """Sums or means of bags of rows of a table whose rows are sharded: those of this rank's rows, then one all-reduce.

    Shapes: input ``[bags, n]`` or ``[n]`` with offsets, per_sample_weights as input -> ``[bags, embedding_dim]``, or
    this rank's slice of the bags. Communicates also, for gradients of per_sample_weights, one all-reduce in backward.
    """

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """Returns the bags of the full table.

        Raises:
            IndexError: on CPU, before the first collective: an index that is no row.
        """
        self.compare(input)
        # Indices of other ranks become row 0 below, so that torch's own check would find no wrong index
        if input.device.type == "cpu" and ((input < 0) | (input >= self.num_embeddings)).any():
            raise IndexError(f"input: every index must be in [0, {self.num_embeddings})")
        if self.weight.size(0) != self.local_rows:
            raise self.wrong_rows(self.weight)
        local, kept = input - self.first_row, torch.ones_like(input, dtype=torch.bool)
        if self.padding_idx is not None:
            kept = input != self.padding_idx
        mine = kept & (local >= 0) & (local < self.local_rows)
        weights = mine.to(self.weight.dtype)
        # A rank has the gradients of the weights of its own rows, and zeros for the others
        if per_sample_weights is not None:
            weights = weights * _ops.copy_to_region(per_sample_weights, self.tp_group.name)
        y = self.bags(local.where(mine, 0), self.weight, offsets, weights)
        # The mean is over all indices of a bag, those of other ranks included. An empty bag is zero
        if self.mode == "mean":
            ones = self.weight.new_ones(1, 1)
            y = y / self.bags(input.new_zeros(input.shape), ones, offsets, kept.to(y.dtype)).clamp(min=1)
        sizes = None if self.tp_tokens is None else self.tp_tokens.enter(y.shape[self.tp_tokens_dim])
        if sizes is None:
            return _ops.reduce_from_region(y, self.tp_group.name)
        return _ops.reduce_scatter_region(y, self.tp_group.name, self.tp_tokens_dim, sizes)

    def bags(self, rows: Tensor, table: Tensor, offsets: Tensor | None, weights: Tensor) -> Tensor:
        """Weighted sums of rows of a table."""
        last = self.include_last_offset
        return F.embedding_bag(rows, table, offsets, mode="sum", per_sample_weights=weights, include_last_offset=last)


LOOKUPS: dict[type[nn.Module], type[RowsOfTable]] = {nn.Embedding: VocabLookup, nn.EmbeddingBag: VocabBag}
TABLES: dict[type[nn.Module], type[nn.Module]] = {lookup: table for table, lookup in LOOKUPS.items()}


@while_used
def with_lookup(cls: type[nn.Module]) -> type[nn.Module]:
    """The subclass of a table's class with the look-up of shards below it; one for each class."""
    lookup = next(LOOKUPS[table] for table in LOOKUPS if issubclass(cls, table))
    base = (lookup,) if cls in LOOKUPS else (cls, lookup)
    return type(cls.__name__, base, {"__module__": cls.__module__, "__qualname__": cls.__qualname__})


def empty_of(cls: type[nn.Module]) -> tuple[Callable[[Any], nn.Module], type[nn.Module]]:
    """A function and its argument, both known by name, that give a module of a class without its state."""
    return (_empty, cls.__bases__[0]) if issubclass(cls, RowsOfTable) else (_new, cls)


def _new(cls: type[nn.Module]) -> nn.Module:
    return cls.__new__(cls)


def _empty(base: type[nn.Module]) -> nn.Module:
    cls = with_lookup(TABLES.get(base, base))
    return cls.__new__(cls)


def shard_embedding(module: nn.Module, sharding: Sharding, group: ParallelGroup) -> None:
    """Makes an embedding, whose weight is a shard already, look up rows of the full table."""
    (rows,) = sharding.slices(group.rank, group.size)
    module.__class__ = with_lookup(type(module))
    module.tp_group = group  # type: ignore[assignment]
    module.first_row, module.local_rows = rows.start, rows.stop - rows.start


def fused_norm(module: nn.Module) -> RMSNorm | None:
    """The RMSNorm that computes what a module does, with its weight; None: it is none.

    Which modules are RMS norms is read from the operators that they call, not from names: x to the power of 2, its mean
    over the last dim, plus epsilon, the reciprocal root, times x, times the weight."""
    weight = module._parameters.get("weight")
    is_alone = len(module._parameters) == 1 and not module._modules and not module._buffers
    # The fused norm has one weight: a bias, a buffer or an inner module would be lost
    if not is_alone or weight is None or weight.dim() != 1 or isinstance(module, RMSNorm):
        return None
    if len(inspect.signature(module.forward).parameters) != 1:  # a gate, for example
        return None
    epsilon = epsilon_of(module, weight)
    if epsilon is None:
        return None
    norm = RMSNorm(len(weight), eps=epsilon, group=None, device="meta")
    norm._parameters["weight"] = weight
    return norm


def epsilon_of(module: nn.Module, weight: Tensor) -> float | None:
    """The epsilon of a module that computes an RMS norm of one argument; None: it computes something else."""
    record = Record()
    x = torch.empty(2, 3, len(weight), dtype=weight.dtype, device="meta")
    try:
        trace(module, (x,), record=record)
    except Exception:  # any error of the user's forward: it takes other arguments, or branches on values; no RMS norm
        return None
    if any(tensor.dtype.itemsize < weight.dtype.itemsize for step in record.steps for tensor in step.outputs):
        return None  # it computes in fp32 what is fp64
    steps = [step for step in record.steps if step.name not in CONVERSIONS]
    if " ".join(step.name for step in steps) != CALLS:
        return None

    def source(tensor: Any) -> Any:
        while id(tensor) in record.maker and record.maker[id(tensor)].name in CONVERSIONS:
            tensor = record.maker[id(tensor)].inputs[0]
        return tensor

    # The names alone do not decide: each operator must take the result of the one before it, x and the weight where the
    # formula has them
    power, mean, plus = steps[:3]
    own_x, own_weight = record.inputs[0][1], next(t for _, t in record.parameters.values())
    makes = [source(step.outputs[0]) for step in steps]
    takes = [[source(tensor) for tensor in step.inputs] for step in steps]
    follows = (
        takes[0][0] is own_x,
        takes[1][0] is makes[0],
        takes[2][0] is makes[1] and len(takes[2]) == 1,
        takes[3][0] is makes[2],
        _same_two(takes[4], own_x, makes[3]),
        _same_two(takes[5], own_weight, makes[4]),
        source(record.output) is makes[5] and record.output.dtype == weight.dtype,
        power.args[1] == 2,
        list(mean.args[1]) == [-1] and mean.args[2:3] == (True,),
        isinstance(plus.args[1], float) and len(plus.args) == 2,
    )
    return float(plus.args[1]) if all(follows) else None


def _same_two(tensors: list[Tensor], one: Tensor, other: Tensor) -> bool:
    return len(tensors) == 2 and {id(tensors[0]), id(tensors[1])} == {id(one), id(other)}
