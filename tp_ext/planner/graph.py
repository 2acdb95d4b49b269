"""The operators of a recorded run as a graph: what each reads and writes once views are taken away, which of them are
linears, look-ups and attention, and which of the others run as one kernel."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator
from typing import Any

from torch import Tensor

from tp_ext.auto.record.dims import Atom, majors
from tp_ext.auto.record.operators import row_of
from tp_ext.auto.record.record import Record, Step


@dataclasses.dataclass(eq=False)
class TensorValue:
    """A tensor that an operator made, or that there was before; ``step`` is None for the latter."""

    tensor: Tensor
    step: Step | None = None
    parameter: str = ""
    depends: bool = False  # on parameters or inputs: it has a gradient
    per_token: bool = False  # on inputs, too: it is no function of parameters alone

    @property
    def size(self) -> int:
        return self.tensor.numel()


@dataclasses.dataclass(eq=False)
class Node:
    """An operator with the values that it reads and those that it makes. ``parts``: id of a value that it reads ->
    id of what it reads of it, a slice or all of it -> elements."""

    step: Step
    reads: list[TensorValue]
    makes: list[TensorValue]
    parts: dict[int, dict[int, int]]
    weight: TensorValue | None = None  # of a linear, or a table
    flipped: bool = False  # the weight was transposed for the product
    bias: TensorValue | None = None
    kind: str = ""  # linear, experts, look_up, attention; "": any other
    core: tuple[Tensor, ...] = ()  # q, transposed k, and v of attention that is not fused

    @property
    def module(self) -> str:
        return self.step.module or "the model"


class Graph:
    """The graph of a record."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.values: dict[int, TensorValue] = {}  # id of a tensor with memory of its own -> what it holds now
        self.nodes: list[Node] = []
        self.readers: dict[int, list[Node]] = {}  # id of a value -> those that read it
        self.maker: dict[int, Node] = {}
        self._passed: dict[int, Tensor] = {}  # id of a result -> the input that it equals
        inputs = {id(t) for _, t in record.inputs if t.is_floating_point()}
        for id_, (name, tensor) in record.parameters.items():
            self.values[id_] = TensorValue(tensor, parameter=name, depends=True)
        for step in record.steps:
            self._add(step, inputs)
        for node in [node for node in self.nodes if node.step.name == "_softmax"]:
            self._unfused(node)

    def root(self, tensor: Tensor) -> Tensor:
        """Returns the tensor of which this one is a view, or that it equals."""
        while True:
            maker = self.record.maker.get(id(tensor))
            if id(tensor) in self._passed:
                tensor = self._passed[id(tensor)]
            elif maker is not None and _is_view(maker) and maker.inputs:
                tensor = maker.inputs[0]
            else:
                return tensor

    def _part(self, tensor: Tensor) -> Tensor:
        """Returns the slice of a root that contains a view and is cut from it first, or the root."""
        part = root = self.root(tensor)
        while tensor is not root:
            part = tensor if tensor.numel() < root.numel() else part
            maker = self.record.maker.get(id(tensor))
            tensor = self._passed[id(tensor)] if id(tensor) in self._passed or maker is None else maker.inputs[0]
        return part

    def value(self, tensor: Tensor, inputs: Collection[int] = ()) -> TensorValue:
        root = self.root(tensor)
        if id(root) not in self.values:
            of_input = id(root) in inputs
            self.values[id(root)] = TensorValue(root, depends=of_input, per_token=of_input)
        return self.values[id(root)]

    def _add(self, step: Step, inputs: set[int]) -> None:
        if _is_view(step):
            return
        read = [t for t in step.inputs if t.numel()]
        if step.name == "cat" and len(read) == 1:  # with what an empty cache holds
            self._passed[id(step.outputs[0])] = read[0]
            return
        # Fused attention writes its result in the order of tokens
        if step.name == "clone" and (maker := self.maker.get(id(self.value(read[0])))) and maker.kind == "attention":
            self._passed[id(step.outputs[0])] = read[0]
            return
        if step.name == "dropout" and not _drops(step):
            self._passed[id(step.outputs[0])] = read[0]
            return
        node = Node(step, [], [], {})
        for tensor in read:
            value, part = self.value(tensor, inputs), self._part(tensor)
            if id(value) not in node.parts:
                node.reads.append(value)
            node.parts.setdefault(id(value), {})[id(part)] = part.numel()
        if row_of(step.name).looks_up:
            self._look_up(node)
        elif row_of(step.name).product:
            self._product(node, read)
        elif step.name in ("scaled_dot_product_attention", "multi_head_attention"):
            node.kind = "attention"
        elif step.name == "add" and len(node.reads) == 2 and self._is_bias(node):
            self._passed[id(step.outputs[0])] = next(t for t in read if not self.value(t).parameter)
            return
        sources = node.reads
        depends = any(value.depends for value in sources)
        # The rows that a look-up takes are those of tokens
        per_token = any(value.per_token for value in sources) or node.kind == "look_up"
        for tensor in step.outputs:
            real = tensor.is_floating_point() and tensor.numel() > 0
            value = TensorValue(tensor, step, depends=depends and real, per_token=per_token and real)
            self.values[id(self.root(tensor))] = value
            self.maker[id(value)] = node
            node.makes.append(value)
        for value in sources:
            self.readers.setdefault(id(value), []).append(node)
        self.nodes.append(node)

    def _look_up(self, node: Node) -> None:
        node.weight = next((value for value in node.reads if value.parameter), None)
        node.kind = "look_up" if node.weight is not None else ""

    def _product(self, node: Node, read: list[Tensor]) -> None:
        """A linear is a product with a parameter of two dims, or a stack of them where rows are grouped."""
        weights = [t for t in read if self.value(t).parameter and self.value(t).tensor.dim() > 1]
        if len(weights) != 1 or len(weights) == len(read):
            return
        node.weight = self.value(weights[0])
        node.kind = "experts" if node.step.name == "_grouped_mm" else "linear"
        # F.linear has the outputs first, as the projection that the rule of multi_head_attention adds has them
        node.flipped = self._flips(weights[0]) or node.step.name in ("linear", "convolution") or not node.step.args
        bias = next((v for v in node.reads if v.parameter and v.tensor.dim() == 1), None)
        node.bias = bias

    def _flips(self, tensor: Tensor) -> bool:
        flips = 0
        while (maker := self.record.maker.get(id(tensor))) is not None and _is_view(maker) and maker.inputs:
            flips += maker.name in ("t", "transpose", "permute")
            tensor = maker.inputs[0]
        return bool(flips % 2)

    def _is_bias(self, node: Node) -> bool:
        """Returns whether an operator adds a vector to the result of a linear without a bias: a product of three dims
        has none."""
        vector = next((v for v in node.reads if v.parameter and v.tensor.dim() == 1), None)
        product = next((self.maker.get(id(v)) for v in node.reads if not v.parameter), None)
        if vector is None or product is None or product.kind != "linear" or product.bias is not None:
            return False
        if product.step.outputs[0].shape[-1] != vector.size or id(product.makes[0]) in self.readers:
            return False
        product.bias = vector
        return True

    def _unfused(self, softmax: Node) -> None:
        """Makes one attention of a softmax between two products of activations, and what lies between them."""
        scores, between = self._product_before(softmax)
        value = softmax.makes[0]
        while len(readers := self.readers.get(id(value), [])) == 1 and not readers[0].kind:
            node = readers[0]
            if row_of(node.step.name).product:
                break
            between.append(node)
            value = node.makes[0]
        if scores is None or len(readers) != 1 or not row_of(readers[0].step.name).product or readers[0].kind:
            return
        mixed = readers[0]
        gone = {id(scores), id(softmax), *map(id, between)}
        mixed.kind = "attention"
        mixed.core = *scores.step.inputs[-2:], mixed.step.inputs[-1]
        values = [self.value(t) for t in (*scores.step.inputs[-2:], mixed.step.inputs[-1])]
        mixed.reads = list({id(value): value for value in values}.values())
        mixed.parts = {id(value): scores.parts.get(id(value), mixed.parts.get(id(value), {})) for value in values}
        for value in values:
            self.readers[id(value)] = [*self.readers.get(id(value), ()), mixed]
        self.nodes = [node for node in self.nodes if id(node) not in gone]
        for id_, nodes in self.readers.items():
            self.readers[id_] = [node for node in dict.fromkeys(nodes) if id(node) not in gone]

    def _product_before(self, node: Node) -> tuple[Node | None, list[Node]]:
        """Returns the product of activations whose result a softmax reads, and the scales and masks in between."""
        between: list[Node] = []
        while True:
            sources = [value for value in node.reads if value.per_token and value.depends and id(value) in self.maker]
            if len(sources) != 1:
                return None, between
            node = self.maker[id(sources[0])]
            if row_of(node.step.name).product:
                return (None if node.kind else node), between
            if node.kind:
                return None, between
            between.append(node)

    def sharded_atom(self, weight: TensorValue, dim: int) -> Atom | None:
        """Returns the slowest factor of a dim of a weight, if nothing needs it whole."""
        slowest = list(majors(self.record.dims_of(weight.tensor)[dim]))
        return None if not slowest or any(major.atom.pinned for major in slowest) else slowest[0].atom

    def linears_of(self, value: TensorValue) -> set[Node]:
        """Returns the linears from whose results a value is made without another linear or attention."""
        node = self.maker.get(id(value))
        if node is None:
            return set()
        if node.kind in ("linear", "attention", "experts"):
            return {node} if node.kind == "linear" else set()
        linears: set[Node] = set()
        for source in node.reads:
            linears |= self.linears_of(source) if source.per_token else set()
        return linears

    def kernels(self, nodes: list[Node]) -> Iterator[list[Node]]:
        """The groups of memory-bound operators that run as one kernel: an operator joins the only group that reads its
        results, as compilers fuse and as libraries have norms and activations."""
        group_of: dict[int, list[Node]] = {}
        groups: list[list[Node]] = []
        for node in reversed([node for node in nodes if not node.kind]):
            readers = [reader for value in node.makes for reader in self.readers.get(id(value), ())]
            groups_of_readers = {id(group_of.get(id(reader))) for reader in readers}
            group = group_of.get(id(readers[0])) if readers else None
            if group is None or len(groups_of_readers) > 1:
                group = []
                groups.append(group)
            group.insert(0, node)
            group_of[id(node)] = group
        yield from groups


def _drops(step: Step) -> bool:
    args, kwargs = list(step.args), step.kwargs
    share: Any = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
    return bool(share) and bool(args[2] if len(args) > 2 else kwargs.get("training", True))


def _is_view(step: Step) -> bool:
    row = row_of(step.name)
    return row.shares_memory or row.free
