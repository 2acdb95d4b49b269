"""Constants: tensors with a sharded dim that no sharded parameter makes. Finds where each is sliced."""

from __future__ import annotations

from torch import Tensor

from tp_ext.auto.record.edits import Conversion, Factor
from tp_ext.auto.record.operators import row_of
from tp_ext.auto.record.record import Step
from tp_ext.auto.search.choose import carries, constant_atoms, sharded_dims
from tp_ext.auto.search.flow import Flow
from tp_ext.auto.search.reasons import Problem
from tp_ext.conversions import I, S
from tp_ext.sharding import Sharding


class Constants:
    """The constants of a flow, written to it: ``buffers``, ``slices``, ``local``."""

    def __init__(self, flow: Flow) -> None:
        self.flow, self.types, self.record = flow, flow.types, flow.types.record
        self.fixed = constant_atoms(self.record)

    def find(self) -> None:
        """Finds tensors with a sharded dim that are not made of sharded parameters, such as one slope per head (ALiBi).

        One that is computed outside of a module and used in it is sliced on its way in; one that is made next to
        sharded work must be local already, which the comparison of shapes proves.
        """
        record, flow, types = self.record, self.flow, self.types
        # Buffers of logits keep their full length, as the code around the head does
        kept = types.atoms - types.whole_heads
        for id_, (name, tensor) in record.buffers.items():
            if id_ in types.by_id and carries(record, tensor, kept):
                flow.buffers[name] = self.shardings(tensor)
        local = {id_ for id_, (name, _) in record.parameters.items() if name in types.cut}
        local |= {id_ for id_, (name, _) in record.buffers.items() if name in flow.buffers}
        self.is_again = True
        while self.is_again:
            self.is_again = False
            # In the order of the steps: what is made of shards is known before it is used
            for step in record.steps:
                works = any(id(t) in local for t in step.inputs) or any(id(t) in types.partial for t in step.outputs)
                if works:
                    self.constants(step, local)
                    local |= {id(t) for t in step.outputs if id(t) in types.sharded}
        flow.local = local
        types.narrow(local)

    def constants(self, step: Step, local: set[int]) -> None:
        # A parameter here has a sharded dim and no shard: `Flow.find_unsharded` reports it
        sharded = self.types.sharded - self.record.parameters.keys()
        for tensor in step.inputs:
            if id(tensor) in sharded and id(tensor) not in local:
                self.constant(step, tensor, local)

    def constant(self, step: Step, tensor: Tensor, local: set[int]) -> None:
        views, source, entered = [], tensor, None
        # A slice is taken where a module gets the tensor, of which the operator may have a view
        while entered is None:
            boundaries = (
                (c, path)
                for c, path in self.record.taken_by.get(id(source), ())
                if c.start <= step.place < c.stop and (c.module or self.record.shares_inputs)
            )
            entered = next(boundaries, None)
            maker = self.record.maker.get(id(source))
            if entered is not None or maker is None or not row_of(maker.name).view:
                break
            views.append(source)
            source = maker.inputs[0]
        # Made inside of the module: its code must use local lengths itself, and its numbers must not depend on them
        if entered is None or id(source) not in self.types.sharded:
            if varying := self.varying(tensor, local):
                blame = frozenset(atom for atom in self.types.atoms if carries(self.record, tensor, [atom]))
                text = f"{step.reason} has numbers that depend on the length of a sharded dim, by {varying}"
                self.flow.problems.append(Problem(step.module, text, blame=blame))
            local.add(id(tensor))
            maker = self.record.maker.get(id(tensor))
            if maker is not None and not varying:
                # Its operator works on shards, then, and so does what comes before and after: where(mask, zeros, -inf)
                self.constants(maker, local)
                self.is_again = True
            return
        call, path = entered
        for dim, factor in self.factors(source):
            edit = Conversion(call.module, "argument", path, I, S, dim, factor)
            if edit not in self.flow.slices:
                self.flow.slices.append(edit)
        if not call.module:  # inside of the model, which is everywhere, it is the slice
            local.add(id(source))
        # Views that are made inside of the module are views of the slice
        local |= {id(view) for view in views if self.record.maker[id(view)].place >= call.start}

    def varying(self, tensor: Tensor, local: set[int]) -> str:
        """Returns the operator that fills a tensor with numbers that vary along its dims, such as ``arange``: a shorter
        one is not its slice. "": all its numbers are equal, or come from shards."""
        left, seen = [tensor], set[int]()
        while left:
            source = left.pop()
            if id(source) in seen or id(source) in local or not carries(self.record, source, self.types.atoms):
                continue
            seen.add(id(source))
            maker = self.record.maker.get(id(source))
            if maker is None or not maker.inputs:
                name = self.record.factories.get(id(source), "a tensor made of numbers")
                if not row_of(name).uniform:
                    return name
            elif not row_of(maker.name).uniform:
                # zeros_like reads no number of its input. Any other operator may hand on numbers that vary
                left += maker.inputs
        return ""

    def factors(self, tensor: Tensor) -> list[tuple[int, Factor]]:
        """The sharded dims of an argument, whose other factors are those of a run: batch x heads."""
        factors = []
        for dim, label, decision in sharded_dims(self.record, tensor, self.types.chosen):
            factor = decision.factor(label, self.fixed)
            if factor is None:
                text = f"dim {dim} of a constant of shape {tuple(tensor.shape)} has a sharded factor between"
                self.flow.problems.append(Problem("", f"{text} lengths of the example"))
            else:
                factors.append((dim, factor))
        return factors

    def shardings(self, tensor: Tensor) -> list[Sharding]:
        shardings = []
        for dim, label, decision in sharded_dims(self.record, tensor, self.types.chosen):
            parts = decision.parts(label)
            if decision.atom in self.types.whole_heads:
                continue
            if parts is None:
                text = f"a constant of shape {tuple(tensor.shape)} has a sharded factor inside dim {dim}"
                self.flow.problems.append(Problem("", text))
            else:
                shardings.append(Sharding(dim, parts))
        return shardings
