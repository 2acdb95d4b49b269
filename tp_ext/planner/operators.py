"""Operators of a graph as those of the planner: linears by how they are sharded, attention, memory-bound kernels with
what they move and keep."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from typing import Any

from tp_ext.auto.record.dims import Atom, contains
from tp_ext.auto.record.multi_head import SIGNATURE
from tp_ext.auto.record.operators import row_of
from tp_ext.planner.graph import Graph, Node, TensorValue
from tp_ext.planner.workload import Op

ADDITIONS = {"add", "sub"}


@dataclasses.dataclass(eq=False)
class Kernel:
    """A kernel of memory-bound operators: its values, and what makes an :class:`Op` of it."""

    nodes: list[Node]
    inside: set[int]
    results: list[TensorValue]
    op: Op = dataclasses.field(default_factory=lambda: Op("pointwise"))
    vectors: Counter[int] = dataclasses.field(default_factory=Counter)


class Operators:
    """The operators of one model.

    Attributes:
        tokens: of the example. seq: of a sequence. causal: of attention, None: as its calls say.
        units: atom of a dim that is sharded -> number of groups of features that are not cut.
        used: name of a parameter -> the parts of the model that have it.
    """

    def __init__(self, graph: Graph, tokens: int, seq: int, causal: bool | None) -> None:
        self.graph, self.tokens, self.seq, self.causal = graph, tokens, seq, causal
        self.units: dict[Atom, int] = {}
        self.used: dict[str, set[str]] = {}

    def of(self, nodes: list[Node], part: str, head: Node | None = None) -> tuple[Op, ...]:
        """Returns the operators of a part of the model, in the order in which they run.

        Raises:
            ValueError: an operator that the planner has no kind for.
        """
        self.part, self.kept, self.top_k = part, set[int](), 0
        placed: list[tuple[float, Op]] = []
        linears = [node for node in nodes if node.kind == "linear"]
        attention = [node for node in nodes if node.kind == "attention"]
        for node in attention:
            if node.step.name == "multi_head_attention":
                self._cut_heads(node)
        sharding = {id(node): self._sharding(node) for node in linears}
        merged = self._merged(linears, attention, sharding)
        cores = {id(node): self._attention(node, placed) for node in attention}
        rows = []
        for group, core in merged:
            kind = sharding[id(group[0])]
            if kind == "row":
                rows.append(group[0])
            op = self._linear(group, kind, cores.get(id(core)), head)
            placed.append((group[0].step.place, op))
        routed = self._experts([node for node in nodes if node.kind == "experts"], placed)
        rows += [node for node in routed if id(self._input(node)) not in self.kept]
        kernels = [self._kernel(group) for group in self.graph.kernels(nodes)]
        self._kept_by_rows(rows, kernels, placed)
        for kernel in self._joined([kernel for kernel in kernels if kernel is not None], routed):
            # A kernel runs when the last of its operators does
            place = kernel.nodes[-1].step.place
            placed += [(place, op) for op in self._with_vectors(kernel)]
        placed.sort(key=lambda row: row[0])
        ops = [op for _, op in placed]
        if routed:
            first = next(i for i, op in enumerate(ops) if op.top_k)
            ops.insert(first, Op("dispatch", self._features(routed[0]), experts=self.experts, top_k=self.top_k))
        return tuple(ops)

    def use(self, value: TensorValue | None) -> None:
        """Notes that this part of the model has a parameter."""
        if value is not None and value.parameter:
            self.used.setdefault(value.parameter, set()).add(self.part)

    def per_token(self, elements: float) -> float:
        number = elements / self.tokens
        return int(number) if number == int(number) else number

    # ------------------------------------------------------------ linears

    def _shape(self, node: Node) -> tuple[int, int]:
        """Returns the inputs and outputs of a linear."""
        assert node.weight is not None
        shape = node.weight.tensor.shape
        outputs = shape[0] if node.flipped else math.prod(shape[1:])
        inputs = node.weight.size // outputs
        if node.makes[0].size % outputs or (node.step.name != "convolution" and inputs != self._features(node)):
            raise ValueError(f"model: {node.module} has {node.step.name} of a weight from the left, which is no linear")
        return inputs, outputs

    def _input(self, node: Node) -> TensorValue:
        return next(value for value in node.reads if value is not node.weight and value is not node.bias)

    def _features(self, node: Node) -> int:
        source = self._input(node)
        tensors = [t for t in node.step.inputs if self.graph.value(t) is source]
        return int(tensors[0].shape[-1])

    def _sharding(self, node: Node) -> str:
        """A linear with inputs that an earlier linear has sharded is a row; a linear with outputs that may be sharded
        is a column."""
        assert node.weight is not None
        rows = node.makes[0].size / self._shape(node)[1]
        if rows != self.tokens and self.part not in ("first", "last"):
            raise ValueError(f"model: {node.module} is a linear of {rows:g} rows, and there are {self.tokens} tokens")
        if node.weight.tensor.dim() != 2:
            return "replicated"
        out, into = (self.graph.sharded_atom(node.weight, dim) for dim in ((0, 1) if node.flipped else (1, 0)))
        if into in self.units:
            return "row"
        if out is None:
            return "replicated"
        self.units.setdefault(out, out.size)
        return "column"

    def _merged(
        self, linears: list[Node], attention: list[Node], sharding: dict[int, str]
    ) -> list[tuple[list[Node], Node | None]]:
        """Linears of one input are one, as the layers of this library are, with the attention that reads q, k, v."""
        feeds = {id(projection): core for core in attention for projection in self._projections(core)}
        groups: dict[tuple[Any, ...], tuple[list[Node], Node | None]] = {}
        for node in linears:
            core, kind = feeds.get(id(node)), sharding[id(node)]
            alone = kind == "row" or (kind == "replicated" and core is None)
            key = (id(node),) if alone else (id(self._input(node)), id(core), node.bias is None)
            groups.setdefault(key, ([], core))[0].append(node)
        # Where some may be sharded all are: the only key of many query heads is on every rank
        for group, _ in groups.values():
            if any(sharding[id(node)] == "column" for node in group):
                sharding.update((id(node), "column") for node in group)
        return list(groups.values())

    def _projections(self, core: Node) -> set[Node]:
        projections: set[Node] = set()
        for tensor in core.core or core.step.inputs[:3]:
            projections |= self.graph.linears_of(self.graph.value(tensor))
        return projections

    def _linear(self, group: list[Node], kind: str, core: Op | None, head: Node | None) -> Op:
        inputs, outputs = self._shape(group[0])[0], sum(self._shape(node)[1] for node in group)
        for node in group:
            self.use(node.weight)
            self.use(node.bias)
        options: dict[str, Any] = {"bias": group[0].bias is not None}
        dims = (0, 1) if group[0].flipped else (1, 0)
        assert group[0].weight is not None
        if kind != "replicated":
            atoms = [self.graph.sharded_atom(node.weight, dims[kind == "row"]) for node in group if node.weight]
            options["units"] = min((self.units[atom] for atom in atoms if atom in self.units), default=1)
        if core is not None and kind == "column":
            width = core.heads * core.key_features + core.kv_heads * (core.key_features + core.value_features)
            if width == outputs:
                names = ("heads", "kv_heads", "key_features", "value_features")
                options |= {name: getattr(core, name) for name in names} | {"units": core.kv_heads}
        if kind != "row":
            options["saved"] = self._keep(self._input(group[0]), group[0])
        # The head is not in the dtype of the blocks
        return Op(kind, inputs, outputs, low_precision=head not in group, **options)

    def _keep(self, value: TensorValue, node: Node) -> float:
        """Returns the elements of a token that a value adds to those kept for backward."""
        if id(value) in self.kept or not value.depends:
            return 0
        self.kept.add(id(value))
        return self.per_token(_elements(value, [node]))

    def _kept_by_rows(self, rows: list[Node], kernels: list[Kernel | None], placed: list[tuple[float, Op]]) -> None:
        """The input of a row is kept; it counts where it is made."""
        for node in rows:
            value = self._input(node)
            kernel = next(
                (candidate for candidate in kernels if candidate is not None and id(value) in candidate.inside), None
            )
            saved = self._keep(value, node)
            if kernel is not None:
                kernel.op = dataclasses.replace(kernel.op, saved=kernel.op.saved + saved)
                continue
            if saved:  # by another linear: nothing lies between
                place = next(i for i, (at, _) in enumerate(placed) if at == node.step.place)
                placed[place] = node.step.place, dataclasses.replace(placed[place][1], saved=saved, sharded=True)

    # ------------------------------------------------------------ attention and experts

    def _attention(self, node: Node, placed: list[tuple[float, Op]]) -> Op:
        step = node.step
        if step.name == "multi_head_attention":
            call = SIGNATURE.bind(*step.args, **step.kwargs).arguments
            width, scores = step.outputs[0].shape[-1], step.outputs[1]
            heads = kv_heads = int(scores.shape[-3])
            key = value = width // heads
            keys, fused = scores.shape[-1], not call.get("need_weights", True)
            causal = bool(call.get("is_causal", False))
        else:
            query, keyed, valued = node.core or step.inputs[:3]
            key, value, keys = int(query.shape[-1]), int(valued.shape[-1]), int(valued.shape[-2])
            heads, fused = query.numel() // (self.tokens * key), step.name == "scaled_dot_product_attention"
            causal = bool(step.args[5] if len(step.args) > 5 else step.kwargs.get("is_causal", False))
            kv_heads = self._kv_heads(heads, key, value, query, keyed)
        if keys != self.seq or heads * self.tokens * value != step.outputs[0].numel():
            raise ValueError(
                f"model: {node.module} has attention of {self.seq} tokens to {keys}; it must be to as many"
            )
        each: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "key_features": key, "value_features": value}
        causal = causal if self.causal is None else self.causal
        op = Op("attention", fused=fused, causal=causal, **each)
        placed.append((step.place, op))
        # The core keeps q, k, v and its result
        self.kept |= {id(value) for value in (*node.reads, *node.makes)}
        for atom in list(self.units):
            if any(contains(dim, atom) for dim in self.graph.record.dims_of(step.outputs[0])):
                self.units[atom] = heads
        if step.name == "multi_head_attention":
            placed.append((step.place - 0.5, self._in_projection(node, each)))
        return op

    def _cut_heads(self, node: Node) -> None:
        for value in node.reads:
            if value.parameter and (atom := self.graph.sharded_atom(value, 0)) is not None:
                self.units[atom] = int(node.step.outputs[1].shape[-3])

    def _in_projection(self, node: Node, each: dict[str, Any]) -> Op:
        """Returns the linear of q, k and v inside of ``nn.MultiheadAttention``."""
        weights = [value for value in node.reads if value.parameter and value.tensor.dim() == 2]
        biases = [value for value in node.reads if value.parameter and value.tensor.dim() == 1]
        for value in (*weights, *biases):
            self.use(value)
        source = next(value for value in node.reads if not value.parameter)
        self.kept.discard(id(source))
        inputs, outputs = weights[0].tensor.shape[1], sum(value.tensor.shape[0] for value in weights)
        saved = self._keep(source, node)
        return Op("column", inputs, outputs, units=each["heads"], bias=bool(biases), saved=saved, **each)

    def _kv_heads(self, heads: int, key: int, value: int, query: Any, keyed: Any) -> int:
        """Heads of the linears of k, which code may repeat for the query heads that share them."""
        of_query, of_key = (self.graph.linears_of(self.graph.value(t)) for t in (query, keyed))
        if len(of_key) != 1:
            return heads
        outputs = self._shape(next(iter(of_key)))[1]
        left, each = (outputs - heads * key, key + value) if of_key <= of_query else (outputs, key)
        count = left // each if left > 0 and left % each == 0 else heads
        return count if 0 < count <= heads and heads % count == 0 else heads

    def _experts(self, nodes: list[Node], placed: list[tuple[float, Op]]) -> list[Node]:
        for node in nodes:
            assert node.weight is not None
            shape = node.weight.tensor.shape
            inputs, outputs = (shape[2], shape[1]) if node.flipped else (shape[1], shape[2])
            out, into = (self.graph.sharded_atom(node.weight, dim) for dim in ((1, 2) if node.flipped else (2, 1)))
            kind = "row" if into in self.units else "column"
            if kind == "column" and out is not None:
                self.units.setdefault(out, out.size)
            self.experts, self.top_k = shape[0], node.makes[0].size // (outputs * self.tokens)
            self.use(node.weight)
            units = self.units.get(into if kind == "row" else out, 1)  # type: ignore[arg-type]
            routed: dict[str, Any] = {"experts": self.experts, "top_k": self.top_k}
            saved = inputs if kind == "column" else 0
            if kind == "column":
                self.kept.add(id(self._input(node)))
            op = Op(kind, inputs, outputs, units=units, saved=saved, sharded=kind == "column", **routed)
            placed.append((node.step.place, op))
        return nodes

    # ------------------------------------------------------------ kernels

    def _kernel(self, nodes: list[Node]) -> Kernel | None:
        """Returns a kernel, or None for one of tables that all tokens share, such as angles and masks."""
        inside = {id(value) for node in nodes for value in node.makes}
        values = [value for node in nodes for value in node.makes if value.per_token and value.depends]
        ends = {id(node) for node in nodes}
        results = [v for v in values if any(id(reader) not in ends for reader in self.graph.readers.get(id(v), ()))]
        # Nothing reads the last operator of the forward: its value is the result
        results = results or [v for v in values[:1] if v is nodes[-1].makes[0]]
        kernel = Kernel(nodes, inside, results)
        for value in {id(v): v for node in nodes for v in node.reads if v.parameter}.values():
            self.use(value)
            kernel.vectors[value.size] += 1
        # Without a result of tokens only parameters that it reads count
        if not results:
            return kernel if kernel.vectors else None
        # Products of activations are attention, which was found before; one that is left has no price here
        for node in nodes:
            if node.step.name in ("bmm", "baddbmm") and all(not value.parameter for value in node.reads):
                raise ValueError(
                    f"model: {node.module} multiplies activations by {node.step.name}, which is no attention that "
                    "planner.trace knows: use F.scaled_dot_product_attention"
                )
        self._price(kernel)
        return kernel

    def _price(self, kernel: Kernel) -> None:
        nodes, inside = kernel.nodes, kernel.inside
        read = {id(v): v for node in nodes for v in node.reads if id(v) not in inside and v.depends and v.per_token}
        elements = {key: _elements(value, nodes) for key, value in read.items()}
        looked_up = sum(node.makes[0].size for node in nodes if node.step.name == "embedding")
        written = sum(value.size for value in kernel.results)
        masks = sum(node.makes[0].size for node in nodes if node.step.name == "dropout")
        needed, numbers = self._needed(kernel)
        direct = self._direct(kernel)
        others = sum(n for key, n in elements.items() if key not in direct) + looked_up
        backward = (written + others if others else 0) + (written if direct else 0)
        backward += sum(elements[key] for key in needed)
        sharding = self._atom_of(kernel.results)
        new = {key for key in needed if key not in self.kept}
        self.kept |= new
        kernel.op = Op(
            "pointwise",
            units=1 if sharding is None else self.units[sharding],
            moved_forward=self.per_token(sum(elements.values()) + looked_up + written),
            moved_backward=self.per_token(backward),
            saved=self.per_token(sum(elements[key] for key in new)),
            saved_bytes=self.per_token(4 * numbers + masks),
            sharded=sharding is not None,
        )

    def _atom_of(self, values: list[TensorValue]) -> Atom | None:
        dims = [dim for value in values for dim in self.graph.record.dims_of(value.tensor)]
        return next((atom for atom in self.units if any(contains(dim, atom) for dim in dims)), None)

    def _needed(self, kernel: Kernel) -> tuple[set[int], int]:
        """Ids of what a kernel reads and keeps for its backward, and the elements of small results, such as those of a
        norm, that it keeps as well; larger ones it computes again."""
        largest = max(value.size for node in kernel.nodes for value in node.makes)
        external: set[int] = set()
        small: dict[int, int] = {}
        seen: set[int] = set()

        def need(value: TensorValue) -> None:
            if id(value) in seen or not value.depends or not value.per_token:
                return
            seen.add(id(value))
            if id(value) not in kernel.inside:
                external.add(id(value))
            elif 8 * value.size <= largest:
                small[id(value)] = value.size
            else:
                for source in self.graph.maker[id(value)].reads:
                    need(source)

        for node in kernel.nodes:
            for value in _read_by_backward(node):
                need(value)
        return external, sum(small.values())

    def _direct(self, kernel: Kernel) -> set[int]:
        """Ids of what reaches a result by additions alone: its gradient is that of the result."""
        direct: set[int] = set()
        waiting = list(kernel.results)
        while waiting:
            value = waiting.pop()
            if id(value) not in kernel.inside:
                direct.add(id(value))
            elif (maker := self.graph.maker[id(value)]).step.name.rstrip("_") in ADDITIONS:
                waiting += [source for source in maker.reads if source.depends and source.per_token]
        return direct

    def _joined(self, kernels: list[Kernel], routed: list[Node]) -> list[Kernel]:
        """Kernels that prepare q, k and v of one attention are one; those of experts have copies of tokens."""
        rest, of_attention = [], dict[int, Kernel]()
        for kernel in kernels:
            readers = {
                id(reader): reader for value in kernel.results for reader in self.graph.readers.get(id(value), ())
            }
            core = next(iter(readers.values())) if len(readers) == 1 else None
            if core is None or core.kind != "attention":
                rest.append(kernel if not routed else self._of_experts(kernel, list(readers.values())))
            elif id(core) not in of_attention:
                of_attention[id(core)] = kernel
                rest.append(kernel)
            else:
                first = of_attention[id(core)]
                names = ("moved_forward", "moved_backward", "saved", "saved_bytes")
                sums = {name: getattr(first.op, name) + getattr(kernel.op, name) for name in names}
                first.op = dataclasses.replace(first.op, **sums)
                first.vectors += kernel.vectors
        return rest

    def _of_experts(self, kernel: Kernel, readers: list[Node]) -> Kernel:
        makers = [self.graph.maker.get(id(value)) for node in kernel.nodes for value in node.reads]
        before = any(reader.kind == "experts" for reader in readers)
        if before or any(maker is not None and maker.kind == "experts" for maker in makers):
            names = ("moved_forward", "moved_backward", "saved", "saved_bytes")
            each = {name: getattr(kernel.op, name) / self.top_k for name in names}
            kernel.op = dataclasses.replace(kernel.op, sharded=True, top_k=self.top_k, **each)
        return kernel

    def _with_vectors(self, kernel: Kernel) -> list[Op]:
        sizes = sorted(kernel.vectors.items())
        if not sizes:
            return [kernel.op]
        size, number = sizes[0]
        ops = [dataclasses.replace(kernel.op, inputs=size, vectors=number)]
        return ops + [Op("pointwise", size, vectors=number) for size, number in sizes[1:]]


def _elements(value: TensorValue, nodes: list[Node]) -> int:
    """Returns the elements of a value that operators read, each once."""
    parts: dict[int, int] = {}
    copies = 0
    for node in nodes:
        if row_of(node.step.name).reads_rows and id(value) in node.parts:
            copies = max(copies, node.makes[0].size)
        else:
            parts |= node.parts.get(id(value), {})
    return max(copies, min(value.size, sum(parts.values())))


def _read_by_backward(node: Node) -> list[TensorValue]:
    name = node.step.name.rstrip("_")
    sources = [value for value in node.reads if value.depends]
    reads = row_of(name).backward_reads
    if reads == "nothing" or not sources:
        return []
    if reads == "result":
        return node.makes[:1]
    if name in ("mul", "div", "addcmul"):
        # By a number, or by what has no gradient: that alone
        tensors = node.step.inputs
        return sources if len(sources) > 1 or (len(tensors) > 1 and len(node.reads) == 1) else []
    # Operators such as norms have more results that backward reads
    return sources + node.makes[1:]
