"""Rules that relate the dims of the tensors of an operator: by its name in torch, by ``ns::name``, or by the name that
its row has for the rule of several operators.

A rule is a line of notation or a function of an :class:`OperatorCall`. Notation: the dims of each tensor, tensors
separated by commas, inputs left of ``->``, results right. A name is a dim, equal names are the same dim; ``(h d)`` is
a product, slowest first; a leading ``*`` stands for any number of dims, unified from the right. ``^`` after a name
pins it: it stays whole. ``+`` after a name that no result has: the operator sums over it, so that the result of a
sharded one is partial. An operator without a rule pins all its dims, one that torch marks as pointwise unifies them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from tp_ext.auto.record.dims import Atom, Dim, Reason, length, pin, unify
from tp_ext.auto.record.operators import SUMMED_CALLS, row_of


class Labels(Protocol):
    """The dims of tensors, by identity."""

    def dims_of(self, tensor: Tensor) -> list[Dim]: ...

    def put(self, tensor: Tensor, dims: list[Dim]) -> None: ...


class OperatorCall:
    """One call of an operator: its tensors, its arguments, and the dims of the tensors."""

    def __init__(
        self,
        name: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        inputs: list[Tensor],
        outputs: list[Tensor],
        labels: Labels,
        reason: Reason,
        function: Any = None,
        schema: Any = None,
    ) -> None:
        self.name, self.args, self.kwargs = name, args, kwargs
        self.inputs, self.outputs = inputs, outputs
        self.labels, self.reason = labels, reason
        self.function, self.schema = function, schema  # that code called; that of the operator
        self.contracted: Dim = []  # the atoms over which the operator sums

    def argument(self, place: int, name: str, default: Any = None) -> Any:
        return self.args[place] if len(self.args) > place else self.kwargs.get(name, default)

    def dims(self, place: int = 0) -> list[Dim]:
        """The dims of an input."""
        return self.labels.dims_of(self.inputs[place])

    def dims_of(self, tensor: Tensor) -> list[Dim]:
        return self.labels.dims_of(tensor)

    def give(self, dims: list[Dim], place: int = 0) -> None:
        """Sets the dims of an output; one that was written in place keeps its own."""
        if not any(self.outputs[place] is tensor for tensor in self.inputs):
            self.labels.put(self.outputs[place], dims)

    def fresh(self, place: int = 0) -> list[Dim]:
        return [[Atom(n)] for n in self.outputs[place].shape]

    def unify(self, one: Dim, other: Dim) -> None:
        unify(one, other, self.reason)

    def pin(self, *dims: Dim) -> None:
        for dim in dims:
            pin(dim, self.reason)

    def sum_over(self, *dims: Dim) -> None:
        """Pins dims over which the operator sums; in a call of :data:`SUMMED_CALLS` such that they may be sharded."""
        if self.function in SUMMED_CALLS:
            self.contracted = [atom for dim in dims for atom in dim]
            pin(self.contracted, replace(self.reason, is_sum=True))
        else:
            self.pin(*dims)

    def broadcast(self, tensors: Sequence[Tensor], result: list[Dim], shape: Sequence[int]) -> None:
        """Unifies dims from the right where lengths are equal, and pins those of any other length but 1."""
        for tensor in tensors:
            for i, dim in enumerate(reversed(self.dims_of(tensor)), 1):
                if i <= len(shape) and tensor.shape[-i] == shape[-i]:
                    self.unify(dim, result[-i])
                elif tensor.shape[-i] != 1:
                    self.pin(dim)


Rule = Callable[[OperatorCall], None]
RULES: dict[str, Rule] = {}  # of operators, and of several by the name that their rows give it


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Registers a function as the rule of operators."""

    def registered(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return registered


@rule("pointwise")
def pointwise(op: OperatorCall) -> None:
    """All tensors have the same dims, broadcast."""
    if op.outputs:
        op.broadcast(op.inputs, op.dims_of(op.outputs[0]), op.outputs[0].shape)


def no_rule(op: OperatorCall) -> None:
    """Pins every dim of all tensors."""
    advice = " (rules= takes one)" if "::" in op.reason.what else ""
    reason = op.reason = Reason(f"no rule for {op.reason.what}{advice}", op.reason.module, op.reason.line)
    for tensor in [*op.inputs, *op.outputs]:
        for dim in op.dims_of(tensor):
            pin(dim, reason)


def draws_random_numbers(function: Any) -> bool:
    """True if an operator of torch draws from torch's generator."""
    return torch.Tag.nondeterministic_seeded in function.tags


def draws(op: OperatorCall) -> None:
    """Pins every dim of all tensors: the generators of the ranks have the same state, and know of no shard."""
    what = f"{op.reason.what} (draws random numbers of its own: every rank would draw the same ones for its shard)"
    op.reason = Reason(what, op.reason.module, op.reason.line)
    for tensor in [*op.inputs, *op.outputs]:
        op.pin(*op.dims_of(tensor))


# ---------------------------------------------------------------- notation

Word = str  # "name", "(a b)" or "*", with marks


def parsed(notation: str) -> tuple[list[list[Word]], list[list[Word]]]:
    """Returns the words of each input and of each result.

    Raises:
        ValueError: it is no line of notation.
    """
    sides = notation.split("->")
    if len(sides) != 2:
        raise ValueError(f"rules: {notation!r} must have one '->' between inputs and results")
    tensors_by_side: list[list[list[Word]]] = []
    for side in sides:
        tensors = []
        for text in side.split(","):
            words = re.findall(r"\([A-Za-z_][\w ]*\)[\^+]?|[A-Za-z_]\w*[\^+]?|\*", text)
            # findall skips text that is no word: what it has skipped is a mistake in the line
            if re.sub(r"\s", "", "".join(words)) != re.sub(r"\s", "", text) or "*" in words[1:]:
                raise ValueError(
                    f"rules: {text.strip()!r} in {notation!r} must be names, products (h d), marks ^ or + after "
                    "them, and at most one * at the start"
                )
            tensors.append(words)
        tensors_by_side.append(tensors)
    return tensors_by_side[0], tensors_by_side[1]


def from_notation(notation: str) -> Rule:
    """Returns the rule that a line of notation means.

    Raises:
        ValueError: it is no line of notation.
    """
    inputs, results = parsed(notation)

    def apply(op: OperatorCall) -> None:
        _Notation(op, notation).apply(inputs, results)

    apply.__doc__ = notation
    return apply


class _Notation:
    """A line of notation, applied to one call."""

    def __init__(self, op: OperatorCall, notation: str) -> None:
        self.op, self.notation = op, notation
        self.known: dict[str, Dim] = {}
        self.leading: list[Dim] = []

    def apply(self, inputs: list[list[Word]], results: list[list[Word]]) -> None:
        op = self.op
        # Fewer inputs are right: a call may leave out optional tensors at the end
        if len(op.inputs) > len(inputs) or len(op.outputs) != len(results):
            self.refuse(f"{len(op.inputs)} tensors in and {len(op.outputs)} out")
        pairs = list(zip(inputs, op.inputs, strict=False))
        for products in (False, True):  # names first: they give the lengths of factors
            for words, tensor in pairs:
                self.read(words, op.dims_of(tensor), products)
        for words, tensor, place in zip(results, op.outputs, range(len(op.outputs)), strict=True):
            self.write(words, tensor, place)

    def refuse(self, what: str) -> None:
        raise ValueError(f"rules: {self.notation!r} must fit {self.op.reason}, which has {what}")

    def read(self, words: list[Word], dims: list[Dim], products: bool) -> None:
        starred = words[:1] == ["*"]
        names = words[1:] if starred else words
        if len(names) > len(dims) or (len(names) < len(dims) and not starred):
            self.refuse(f"a tensor of {len(dims)} dims")
        if starred and not products:
            lead = dims[: len(dims) - len(names)]
            for one, other in zip(reversed(lead), reversed(self.leading), strict=False):
                if length(one) == length(other):
                    self.op.unify(one, other)
            # The longest, to which tensors with fewer leading dims are broadcast
            self.leading = max(self.leading, lead, key=len)
        for word, dim in zip(names, dims[len(dims) - len(names) :], strict=True):
            name = word.rstrip("^+")
            if (name[0] == "(") != products:
                continue
            self.same(name, dim)
            if word[-1] == "^":
                self.op.pin(dim)
            if word[-1] == "+":
                self.op.contracted = [*self.op.contracted, *dim]

    def same(self, name: str, dim: Dim) -> None:
        if name[0] == "(":
            factors = name[1:-1].split()
            unknown = [factor for factor in factors if factor not in self.known]
            if len(unknown) == 1:
                others = length([atom for factor in factors for atom in self.known.get(factor, [])])
                if length(dim) % others:
                    self.refuse(f"a dim of {length(dim)} for {name}, whose other factors are {others}")
                self.known[unknown[0]] = [Atom(length(dim) // others)]
            if len(unknown) <= 1:
                product = [atom for factor in factors for atom in self.known[factor]]
                if length(product) != length(dim):
                    self.refuse(f"a dim of {length(dim)} for {name}, of {length(product)}")
                self.op.unify(dim, product)
                return
        # A product with two unknown factors cannot be divided: it is known by its text, as a name is
        seen = self.known.setdefault(name, dim)
        if length(seen) != length(dim):
            self.refuse(f"dims of {length(seen)} and {length(dim)} for {name}")
        self.op.unify(seen, dim)

    def write(self, words: list[Word], tensor: Tensor, place: int) -> None:
        starred = words[:1] == ["*"]
        dims: list[Dim] = list(self.leading) if starred else []
        for word in words[1:] if starred else words:
            name = word.rstrip("^+")
            factors = name[1:-1].split() if name[0] == "(" and name not in self.known else [name]
            size = tensor.shape[len(dims)] if len(dims) < tensor.dim() else 1
            dims.append([atom for factor in factors for atom in self.known.setdefault(factor, [Atom(size)])])
            if word[-1] == "^":
                self.op.pin(dims[-1])
        if [length(dim) for dim in dims] != list(tensor.shape):
            self.refuse(f"a result of shape {tuple(tensor.shape)}")
        self.op.give(dims, place)


RULES["transformers::grouped_mm_fallback"] = from_notation("t^ k+, g^ k+ n, * -> t^ n")


def rule_of(function: Any, extra: Mapping[str, Rule]) -> Rule:
    """Returns the rule of an operator of torch: the user's, by torch's tags that of random numbers or that of its name
    or pointwise, or none."""
    namespace, name = function._schema.name.split("::")
    # First: a user may replace a rule of this package
    user_rule = extra.get(f"{namespace}::{name}")
    if user_rule is not None:
        return user_rule
    # Before the tag pointwise, which rrelu has, too: shards would get the same numbers on every rank
    if draws_random_numbers(function):
        return draws
    of_torch = namespace in ("aten", "prims")
    # A final underscore names a form in place by the convention of torch alone
    for known in (name, name.removesuffix("_")) if of_torch else (f"{namespace}::{name}",):
        dims = row_of(known).dims
        if known in RULES or dims in RULES:
            return RULES.get(known) or RULES[dims]
        if dims:
            return RULES.setdefault(known, from_notation(dims))
    return pointwise if torch.Tag.pointwise in function.tags else no_rule
