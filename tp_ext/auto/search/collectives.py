"""The collectives of one step of a plan, with their bytes at the sizes of the example."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from tp_ext.auto.record.dims import contains
from tp_ext.auto.record.edits import Collective
from tp_ext.auto.record.record import Record, tensors
from tp_ext.auto.search.choose import carries
from tp_ext.auto.search.flow import Flow
from tp_ext.auto.search.infer import InferredTypes
from tp_ext.conversions import CONVERSIONS, WIRE, I, P, R, Region


def collectives_of(flow: Flow, p: int, heads: Sequence[str], activations: bool = False) -> list[Collective]:
    """Returns the collectives of one forward and backward at the sizes of the example, in the order of the record; with
    ``activations`` only those of activations."""
    if p == 1:
        return []
    types, record = flow.types, flow.types.record
    collectives: list[Collective] = []
    summed = {(partial.module, partial.path) for partial in flow.sums}
    scattered = types.tokens.sources if types.tokens else {}
    # Sums of row layers and look-ups, and of modules whose output is partial; a scattered sum is listed with its
    # tokens
    for call in record.calls:
        for path, tensor in call.outputs:
            if call.module in scattered:
                continue
            if types.roles.get(call.module) in ("row", "vocab", "attention") or (call.module, path) in summed:
                collectives += _of(CONVERSIONS[P, I], call.module, tensor, record)
    for step in record.steps:
        if step.is_loss and any(contains(step.contracted, atom) for atom in types.whole_heads):
            # The numbers of a loss are in fp32, for logits in fp64 in fp64
            size = 8 if step.inputs[0].element_size() == 8 else 4
            rows = step.inputs[0].numel() // max(1, step.inputs[0].shape[1 if step.inputs[0].dim() > 1 else 0])
            # of each rank: four numbers of each row, and of all rows together
            collectives.append(Collective("all-gather", step.module, "forward", p * 4 * (rows + 1) * size))
    # Without a loss the model returns logits of all columns
    if not any(step.is_loss for step in record.steps):
        for _, tensor in tensors(record.output):
            if carries(record, tensor, types.whole_heads):
                collectives.append(Collective("all-gather", heads[0] if heads else "", "forward", _bytes(tensor)))
    for edit, tensor in flow.statistics:
        for region in [(P, I), (I, R)] if edit.after is R else [(P, I)]:
            collectives += _of(CONVERSIONS[region], edit.module, tensor, record)
    outputs = dict(tensors(record.output))
    for gather in flow.gathers:
        collectives += _of(CONVERSIONS[gather.types], "", outputs[gather.path], record)
    entered = set()  # a tensor that is several arguments of a module is summed once
    for copy, tensor in zip(flow.copies, flow.copied, strict=True):
        if copy.at == "argument" and (copy.module, id(tensor)) in entered:
            continue
        entered.add((copy.module, id(tensor)))
        if not (activations and copy.at == "parameter"):
            collectives += _of(CONVERSIONS[I, R], copy.module, tensor, record)
    return collectives + collectives_of_tokens(types, activations)


def collectives_of_tokens(types: InferredTypes, activations: bool) -> list[Collective]:
    collectives, record = list[Collective](), types.record
    for edit, tensor in types.tokens.calls() if types.tokens else ():
        if edit.types in CONVERSIONS:
            collectives += _of(CONVERSIONS[edit.types], edit.module, tensor, record)
    biases = {name: t for name, t in record.parameters.values() if name.endswith(".bias")}
    for module in [] if activations or types.tokens is None else sorted(types.tokens.sources):
        bias = biases.get(f"{module}.bias")
        # A row layer adds its bias to the rank's tokens alone, so that the gradient of the bias is partial
        if bias is not None and types.roles.get(module) == "row":
            collectives += _of(CONVERSIONS[I, R], module, bias, record)
    return collectives


def on_the_wire(collectives: Sequence[Collective]) -> int:
    """The bytes that a rank sends, in units of (p - 1) / p."""
    return sum(collective.bytes * WIRE[collective.kind.replace("-", "_")] for collective in collectives)


def _of(region: Region, module: str, tensor: Tensor, record: Record) -> Iterator[Collective]:
    """Yields the collectives of a region; the backward one only if the tensor has a gradient."""
    if region.forward:
        yield Collective(region.forward.replace("_", "-"), module, "forward", _bytes(tensor))
    if region.backward and id(tensor) in record.differentiable:
        yield Collective(region.backward.replace("_", "-"), module, "backward", _bytes(tensor))


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
