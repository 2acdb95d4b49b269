"""Communication of a plan: the boundaries of modules at which partial tensors and gradients are completed.

A partial tensor is summed at an output of the module in which it became so. The gradient of a replicated tensor is
partial where sharded work uses it. It is summed where the whole gradient is partial and forward code need not change:
at a parameter, at an output of a module, or at an argument of a module all of whose uses of it are sharded. Elsewhere
partial gradients flow on to what the tensor was made of. The sums are the f and g of Megatron-LM (arXiv:1909.08053,
section 3), here derived."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import Tensor

from tp_ext.auto.record.edits import Conversion, LeafPath, gathered_output
from tp_ext.auto.record.record import tensors
from tp_ext.auto.search.choose import carries, sharded_dims
from tp_ext.auto.search.infer import InferredTypes
from tp_ext.auto.search.place import REFUSED, SumPlacement
from tp_ext.auto.search.reasons import Problem
from tp_ext.conversions import I, P
from tp_ext.sharding import Sharding


@dataclass
class Flow:
    """Communication of a plan, with the types that it follows from, and the problems that forbid it."""

    types: InferredTypes
    copies: list[Conversion] = field(default_factory=list)
    sums: list[Conversion] = field(default_factory=list)
    slices: list[Conversion] = field(default_factory=list)
    gathers: list[Conversion] = field(default_factory=list)
    calls: list[Conversion] = field(default_factory=list)
    statistics: list[tuple[Conversion, Tensor]] = field(default_factory=list)  # the sums of ``calls``
    refused_inputs: list[LeafPath] = field(default_factory=list)  # those whose gradient would stay partial
    buffers: dict[str, list[Sharding]] = field(default_factory=dict)
    local: set[int] = field(default_factory=set)  # ids of tensors whose sharded dims have local lengths
    copied: list[Tensor] = field(default_factory=list)  # the tensors of ``copies``
    # Sums of gradients by tensor and by the first and last operator of the uses
    summed: dict[int, dict[tuple[int, int], list[Conversion]]] = field(default_factory=dict)

    @property
    def problems(self) -> list[Problem]:
        return self.types.problems

    def place(self) -> None:
        """Finds the boundaries of partial tensors, of results and of gradients."""
        types = self.types
        for call in types.record.calls:
            for path, tensor in call.outputs:
                output = Conversion(call.module, "output", path, P, I)
                if types.partial.get(id(tensor)) == call.module and output not in self.sums:
                    self.sums.append(output)
        self.gather_outputs()
        self.place_sums()
        for id_, sums in self.summed.items():
            new = [copy for copies in sums.values() for copy in copies if copy not in self.copies]
            self.copies += new
            self.copied += [types.by_id[id_]] * len(new)

    def gather_outputs(self) -> None:
        """Gathers the outputs of the model that are shards, but for logits, which keep their full shape."""
        types = self.types
        for path, tensor in tensors(types.record.output):
            for dim, label, decision in sharded_dims(types.record, tensor, types.chosen):
                if decision.atom in types.whole_heads or id(tensor) not in types.sharded:
                    continue
                parts = decision.parts(label)
                if parts is None:
                    text = f"dim {dim} of the output {'.'.join(map(str, path))} has a sharded factor inside"
                    self.problems.append(Problem("", text, blame=frozenset(decision.sharded)))
                else:
                    self.gathers.append(gathered_output("", path, Sharding(dim, parts)))

    def place_sums(self) -> None:
        """Places the sums of gradients."""
        types, number = self.types, len(self.problems)
        for boundary, tokens in SumPlacement(types).solve():
            id_, key = id(boundary.tensor), (boundary.start, boundary.stop)
            if boundary.cost == REFUSED and types.inputs[id_] not in self.refused_inputs:
                self.refused_inputs.append(types.inputs[id_])
            if boundary.edits:
                edits = [replace(edit, tokens=tokens) for edit in boundary.edits]
                self.summed.setdefault(id_, {}).setdefault(key, []).extend(edits)
        if len(self.problems) == number:
            self.find_unsharded()

    def find_unsharded(self) -> None:
        """Adds a problem for each parameter that has a sharded dim and is whole, such as by a hint."""
        types = self.types
        for id_, (name, tensor) in types.record.parameters.items():
            if name not in types.cut and id_ in types.sharded:
                text = f"{name} has a sharded dim and is not sharded"
                carried = (decision for decision in types.chosen if carries(types.record, tensor, decision.sharded))
                self.problems.extend(Problem(next(iter(decision.parameters)), text) for decision in carried)
