"""Direct calls: of a model's modules by other code than its forward, such as ``encode`` of an autoencoder.

Inside of forward a module may take and return shards, leave the gradient of an argument partial, and expect that of a
result to be: the modules around it complete them. Other code has whole tensors and complete gradients, so a direct call
converts them at the boundary of the module."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable
from dataclasses import replace

from torch import Tensor

from tp_ext.auto.record.dims import Atom, atoms, atoms_in
from tp_ext.auto.record.edits import Conversion, DirectCall, Factor, gathered_output, leaf_name
from tp_ext.auto.record.record import ModuleCall, Record
from tp_ext.auto.search.choose import constant_atoms
from tp_ext.auto.search.flow import Flow
from tp_ext.auto.search.infer import COMPLETE, PARTIAL
from tp_ext.auto.search.tokens import TokenGather
from tp_ext.conversions import I, P, R, S
from tp_ext.sharding import Sharding


class _NoConversionError(Exception):
    """A tensor at the boundary of a module cannot be converted."""


def direct_calls(flow: Flow, edited: Iterable[str], local: Iterable[str]) -> list[DirectCall]:
    """Returns the conversions of a direct call, for each module that a plan edits and those around them.

    Args:
        flow: of the plan.
        edited: names of the modules that the plan edits: any other computes on whole tensors as without a plan.
        local: names of the modules whose own code reads integers, parameters or buffers of a shard.
    """
    around = {name for module in edited for name in with_parents(module)}
    local = set(local)
    conversions: dict[str, DirectCall] = {}
    constant = constant_atoms(flow.types.record)
    for call in flow.types.record.calls:
        if call.module and call.module in around:
            new = _Boundary(flow, call).conversions()
            common = _common(conversions.setdefault(call.module, new), new)
            conversions[call.module] = _with_call(common, flow.types.record, call, constant)
    return [_refused_in(direct, local) if direct.has_shards else direct for direct in conversions.values()]


def with_parents(module: str) -> list[str]:
    """The names of the modules around a module, from the outermost on, and its own; not that of the model."""
    return list(itertools.accumulate(module.split("."), "{}.{}".format))


def _with_call(direct: DirectCall, record: Record, call: ModuleCall, constant: set[Atom]) -> DirectCall:
    """A direct call that may have the options and the results of a call in forward, too: no others are proven."""
    for name, value in call.options.items():
        # Sorted: forward may call it for each of a set, of which each rank's process has another order
        direct.options[name] = sorted({*direct.options.get(name, ()), value})
    results: dict[str, list[int]] = {}
    for path, tensor in call.outputs:
        labels = [set(atoms(label)) for label in record.dims_of(tensor)]  # empty: of length 1, as a batch may be
        lengths = [n if of_dim and of_dim <= constant else 0 for n, of_dim in zip(tensor.shape, labels, strict=True)]
        results[leaf_name(path)] = lengths
    if results not in direct.results:
        direct.results.append(results)
    return direct


def _refused_in(direct: DirectCall, local: set[str]) -> DirectCall:
    """A direct call, refused if another method around it could combine its whole tensors with sizes of a shard."""
    for name in ("", *with_parents(direct.module)[:-1]):
        if name in local:
            text = f"{name or 'the model'} has sizes or parameters of a shard, and this module takes or returns shards"
            return direct.without(text)
    return direct


def _common(one: DirectCall, other: DirectCall) -> DirectCall:
    """The conversions for two calls of a module in forward: where they differ, a direct call could be either."""
    if one.refused or other.refused or one.values != other.values:
        why = one.refused or "its calls in forward take or return other shards"
        return DirectCall(one.module, options=one.options, results=one.results, refused=why)
    if one.refused_gradients or other.refused_gradients or one.gradients != other.gradients:
        why = one.refused_gradients or "its calls in forward complete other gradients"
        return replace(one, gradients=(), refused_gradients=why)
    return one


class _Boundary:
    """The boundary of one call of a module."""

    def __init__(self, flow: Flow, call: ModuleCall) -> None:
        self.flow, self.types, self.call = flow, flow.types, call

    def conversions(self) -> DirectCall:
        try:
            direct = self.of_values()
        except _NoConversionError as error:
            return DirectCall(self.call.module, refused=str(error))
        try:
            return self.of_gradients(direct)
        except _NoConversionError as error:
            return replace(direct, refused_gradients=str(error))

    def of_values(self) -> DirectCall:
        module, edits, dims = self.call.module, list[Conversion](), list[int]()
        for path, tensor in self.call.inputs:
            for sharding in self.shardings(tensor):
                factor = Factor(tuple(sharding.parts))
                edits.append(Conversion(module, "argument", path, I, S, sharding.dim, factor))
                dims.append(tensor.dim())
        for path, tensor in self.call.outputs:
            edits += [gathered_output(module, path, sharding) for sharding in self.shardings(tensor)]
            if self.is_partial(tensor):
                edits.append(Conversion(module, "output", path, P, I))
        return DirectCall(module, tuple(edits), dims=tuple(dims))

    def of_gradients(self, direct: DirectCall) -> DirectCall:
        module, inputs = self.call.module, self.call.inputs
        copies = [path for path, tensor in inputs if PARTIAL in self.gradients(tensor, inside=True)]
        # A partial result that this module sums itself has a gradient as any other
        whole = [
            (path, t) for path, t in self.call.outputs if id(t) not in self.types.sharded and not self.is_partial(t)
        ]
        partial = [path for path, tensor in whole if self.expects_partial(tensor)]
        edits = [Conversion(module, "argument", path, I, R) for path in copies]
        edits += [Conversion(module, "output", path, R, I) for path in partial]
        return replace(direct, gradients=tuple(edits))

    def shardings(self, tensor: Tensor) -> list[Sharding]:
        """Returns the shardings of the dims of a tensor that is sharded over the ranks.

        Raises:
            _NoConversionError: a dim has a sharded factor with others before it, such as heads after a batch.
        """
        types, shardings = self.types, list[Sharding]()
        for dim, label in enumerate(types.record.dims_of(tensor) if id(tensor) in self.flow.local else ()):
            inside = atoms_in(label)
            for decision in types.chosen:
                # Logits have their full shape for any code
                if decision.atom in types.whole_heads or inside.isdisjoint(decision.sharded):
                    continue
                parts = decision.parts(label)
                if parts is None:
                    raise _NoConversionError(f"it takes or returns a tensor whose dim {dim} has a sharded factor")
                shardings.append(Sharding(dim, parts))
        return shardings

    def is_partial(self, tensor: Tensor) -> bool:
        """True if a result is summed by a module around this one."""
        module = self.types.partial.get(id(tensor))
        if module is None or self.is_inside(module):
            return False
        if any(id(given) in self.types.partial for _, given in self.call.inputs):
            raise _NoConversionError("it takes and returns terms of a sum over the ranks")
        return True

    def is_inside(self, module: str) -> bool:
        return module == self.call.module or module.startswith(f"{self.call.module}.")

    def gradients(self, tensor: Tensor, inside: bool) -> set[str]:
        """The types of the gradients that a tensor gets from its uses in this call, or from those after it, without
        sums at arguments there. Those of sharded tokens are complete: a direct call has all tokens."""
        call, tokens, types = self.call, self.types.tokens, set[str]()
        first, stop = (call.start, call.stop) if inside else (call.stop, sys.maxsize)
        sums = [(begin, end) for begin, end in self.flow.summed.get(id(tensor), ()) if end < sys.maxsize]
        for place, of_use in self.types.used.get(id(tensor), ()):
            if not first <= place < stop:
                continue
            gather = tokens.gather_at(tensor, place) if tokens is not None else None
            if gather is not None and gather.whole is R:  # with all tokens it is a sum, backward
                is_summed, of_use = self.is_beyond(gather, inside), frozenset({PARTIAL})
            else:
                is_summed = any(begin <= place < end and first <= begin and end <= stop for begin, end in sums)
            types |= {COMPLETE} if is_summed else of_use
        return types

    def is_beyond(self, gather: TokenGather, inside: bool) -> bool:
        """True if a sum at a boundary of tokens is, seen from the boundary of this call, on the side of the uses."""
        call = gather.call
        if inside:
            return call is not None and (call is self.call or self.call.around(call))
        return call is None or not (gather.after and (call is self.call or self.call.around(call)))

    def expects_partial(self, tensor: Tensor) -> bool:
        """True if the gradient of a result is partial where this module gets it.

        Raises:
            _NoConversionError: it is partial in some of its elements or uses.
        """
        sums = [c for copies in self.flow.summed.get(id(tensor), {}).values() for c in copies if c.at == "output"]
        if any(not self.is_inside(copy.module) for copy in sums):
            return False  # a module around this one completes it
        returned = {call.module for call, _ in self.types.record.returned_by.get(id(tensor), ())}
        if any(copy.span is not None and copy.module in returned for copy in self.flow.copies):
            raise _NoConversionError("the gradient of a part of its result is summed")
        types = self.gradients(tensor, inside=False) | ({COMPLETE} if id(tensor) in self.types.outputs else set())
        if {PARTIAL, COMPLETE} <= types:
            raise _NoConversionError("the gradients of its result are summed in some of its uses")
        return PARTIAL in types
