"""The workload of any model: the operators of one forward on fake tensors, without weights and without a device."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tp_ext._checks import check_int
from tp_ext.auto.argument_checks import check_example, check_planned_model
from tp_ext.auto.search.reasons import traced
from tp_ext.model.module import ParallelModule
from tp_ext.planner.graph import Graph, Node
from tp_ext.planner.operators import Operators
from tp_ext.planner.workload import Block, Op, Workload

REAL = 2  # blocks that run of those that are equal


def trace(
    model: nn.Module,
    example: Mapping[str, Any] | tuple[Any, ...],
    tokens: int | None = None,
    *,
    causal: bool | None = None,
    name: str | None = None,
) -> Workload:
    """Returns the workload of a model as it runs, from one forward on fake tensors by the tracer of ``tp_ext.auto``.

    Its repeated blocks are the children of one container: the one that holds most parameters. Of blocks that are built
    alike two run. Linears are sharded as :func:`tp_ext.auto.plan` would: on outputs that nothing needs whole, and on
    the inputs that follow from them; linears of one input are one. Memory-bound operators whose results one of them
    alone reads are one kernel. Tables that all blocks read, such as angles and masks, count nothing. All parameters are
    taken to be trained.

    Args:
        model: any module, also on meta; it is not changed.
        example: arguments of forward, a dict by name or a tuple, of any batch; its sequences have the length of the
            workload's. Tensors may be on meta.
        tokens: of the example, batch times sequence; None: as many as the activation between the blocks has.
        causal: whether half of the scores count; None: as each call of attention says, whose mask counts as full.
        name: for tables; None: the name of the model's class.

    Communicates nothing.

    Raises:
        TypeError: arguments of other types. ValueError: a forward that fails, or that branches on data; a model without
            repeated blocks, or whose blocks run more than once; an operator or a parameter that no kind of
            :class:`Op` describes; ``tokens`` that are not those of the example.
    """
    check_planned_model(model)
    check_example(example)
    check_int(least=1, or_none=True, tokens=tokens)
    if causal is not None and not isinstance(causal, bool):
        raise TypeError(f"causal: {causal!r} must be True, False or None")
    if name is not None and not isinstance(name, str):
        raise TypeError(f"name: {name!r} must be text or None")
    for path, module in model.named_modules():
        if isinstance(module, ParallelModule):
            raise ValueError(
                f"model: {path or 'the model'} is a {type(module).__name__}, whose operators are of this library: "
                "give the plain model from which it is made, or use planner.transformer"
            )
    names, alike = _blocks(model)
    with _stand_ins(model, names, alike) as fits:
        record = traced(model, example, {})
    if not all(fits):  # they are called in other ways
        alike = list(range(len(names)))
        record = traced(model, example, {})
    return _Reader(Graph(record), names, alike, causal).workload(name or type(model).__name__, tokens)


def _blocks(model: nn.Module) -> tuple[list[str], list[int]]:
    """Returns the names of the repeated blocks, and for each the number of the one whose operators it has."""
    best: tuple[int, str, list[str]] = (0, "", [])
    for path, container in model.named_modules():
        children = [(key, child) for key, child in container.named_children() if any(True for _ in child.parameters())]
        if not isinstance(container, nn.ModuleList | nn.Sequential | nn.ModuleDict):
            continue
        sizes: dict[type, tuple[int, int]] = {}
        for _, child in children:
            number, size = sizes.get(type(child), (0, 0))
            sizes[type(child)] = number + 1, size + sum(p.numel() for p in child.parameters())
        repeated = {kind: size for kind, (number, size) in sizes.items() if number > 1}
        if not repeated:
            continue
        kind = max(repeated, key=repeated.__getitem__)
        if repeated[kind] > best[0]:
            places = [i for i, (_, child) in enumerate(children) if type(child) is kind]
            keys = [key for key, _ in children[places[0] : places[-1] + 1]]
            best = repeated[kind], path, [f"{path}.{key}" if path else key for key in keys]
    if not best[2]:
        raise ValueError(
            f"model: {type(model).__name__} has no repeated block: an nn.ModuleList, nn.Sequential or nn.ModuleDict "
            "must hold at least two modules of one class"
        )
    names = best[2]
    signatures = [_signature(model.get_submodule(name)) for name in names]
    plain = [{key: value for _, _, values, _ in signature for key, value in values} for signature in signatures]
    # What is the place of every block is its number, by which blocks differ that run alike
    numbers = {
        key
        for key in plain[0]
        if all(type(values.get(key, i)) is int and values.get(key, i) == i for i, values in enumerate(plain))
    }
    signatures = [
        [(*kind, [row for row in values if row[0] not in numbers], tensors) for *kind, values, tensors in signature]
        for signature in signatures
    ]
    runs = [len(list(run)) for _, run in itertools.groupby(signatures)]
    starts = [0, *itertools.accumulate(runs)]
    return names, [start + min(i, REAL - 1) for start, run in zip(starts, runs, strict=False) for i in range(run)]


def _signature(block: nn.Module) -> list[Any]:
    """Returns what equal blocks have in common: name, class, plain attributes and shapes of each module."""
    signature: list[Any] = []
    for name, module in block.named_modules():
        plain = [
            ((name, key), value)
            for key, value in vars(module).items()
            if isinstance(value, bool | int | float | str | None)
        ]
        tensors = [
            (key, tuple(t.shape), t.dtype, t.requires_grad)
            for key, t in (*module._parameters.items(), *module._buffers.items())
            if t is not None
        ]
        signature.append((name, type(module), plain, tensors))
    return signature


@contextlib.contextmanager
def _stand_ins(model: nn.Module, names: list[str], alike: list[int]) -> Iterator[list[bool]]:
    """Replaces the forward of repeated blocks by the recorded result of the first. Yields, per block, whether it was
    called like the first."""
    fits: list[bool] = []
    changed: list[tuple[nn.Module, Any]] = []
    calls: dict[int, tuple[Any, Any]] = {}

    def install(number: int, stands_for: int) -> None:
        block = model.get_submodule(names[number])
        own_forward = vars(block).get("forward")
        forward = block.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            if stands_for == number:
                result = forward(*args, **kwargs)
                calls[number] = _kinds((args, kwargs)), result
                return result
            fits.append(stands_for in calls and calls[stands_for][0] == _kinds((args, kwargs)))
            return calls[stands_for][1] if fits[-1] else forward(*args, **kwargs)

        block.forward = run
        changed.append((block, own_forward))

    for number, stands_for in enumerate(alike):
        if stands_for != number or number in alike[number + 1 :]:
            install(number, stands_for)
    try:
        yield fits
    finally:
        for block, own_forward in changed:
            if own_forward is None:
                del block.forward
            else:
                block.forward = own_forward


def _kinds(call: Any) -> list[Any]:
    """Returns the arguments of a call as far as equal blocks have them in common."""
    leaves = tree_leaves(call)
    return [
        (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf)
        for leaf in leaves
        if isinstance(leaf, Tensor | bool | float | str | None)
    ]


class _Reader:
    """Reads a graph as a workload."""

    def __init__(self, graph: Graph, names: list[str], alike: list[int], causal: bool | None) -> None:
        self.graph, self.names, self.alike, self.causal = graph, names, alike, causal
        self.record = graph.record

    def workload(self, name: str, expected: int | None) -> Workload:
        """Returns the workload.

        Raises:
            ValueError: see :func:`trace`.
        """
        ranges = self._ranges()
        between = [(start, stop) for start, stop in ranges if stop > start] or [(0, 0)]
        inside = [node for node in self.graph.nodes if between[0][0] <= node.step.place < between[-1][1]]
        hidden, tokens = self._stream()
        if expected not in (None, tokens):
            raise ValueError(f"tokens: {expected} must be those of the example, {tokens}")
        seq = self._seq(inside, tokens, hidden)
        operators = Operators(self.graph, tokens, seq, self.causal)
        before, after = ranges[0][0], ranges[-1][1]
        table = self._table(before)
        head = self._head(after)
        end = math.inf if head is None else head.step.place + 1
        first = operators.of([n for n in self.graph.nodes if n.step.place < before and n is not table], "first")
        # Blocks that are alike have the operators of the first of them that ran
        ops_of_block: dict[int, tuple[Op, ...]] = {}
        for number in sorted(set(self.alike)):
            start, stop = ranges[number]
            nodes = [node for node in self.graph.nodes if start <= node.step.place < stop]
            ops_of_block[number] = operators.of(nodes, self.names[number])
        last = operators.of([n for n in self.graph.nodes if after <= n.step.place < end], "last", head)
        # The table's parameters are priced as an embedding, not as a kernel that reads them
        vocab = 0
        if table is not None and table.weight is not None:
            operators.part = "first"
            operators.use(table.weight)
            vocab, features = table.weight.tensor.shape
            first = (Op("embedding", vocab, features, units=vocab), *first)
        if head is not None:
            classes = head.makes[0].tensor.shape[-1]
            last = (*last, Op("loss", classes, units=classes))
        tied = head is not None and table is not None and head.weight is table.weight
        blocks = [
            Block(len(list(run)), ops) for ops, run in itertools.groupby(ops_of_block[number] for number in self.alike)
        ]
        # Without attention the narrowest column linear limits the number of ranks
        cores = [op for block in blocks for op in block.ops if op.kind == "attention"]
        widths = [op.units for block in blocks for op in block.ops if op.kind == "column"]
        work = Workload(
            name=name,
            hidden=hidden,
            seq=seq,
            heads=min((op.heads for op in cores), default=min(widths, default=1)),
            kv_heads=min((op.kv_heads for op in cores), default=min(widths, default=1)),
            vocab=vocab,
            first=first,
            blocks=tuple(blocks),
            last=last,
            experts=max((op.experts for block in blocks for op in block.ops), default=0),
            tied=tied,
        )
        self._check_parameters(work, operators.used, tied)
        return work

    def _ranges(self) -> list[tuple[int, int]]:
        """Returns the operators of each block, with those up to the next one."""
        ranges = []
        for name in self.names:
            calls = [call for call in self.record.calls if call.module == name]
            if len(calls) != 1:
                raise ValueError(f"model: the block {name} runs {len(calls)} times with the example; it must run once")
            ranges.append((calls[0].start, calls[0].stop))
        if any(after[0] < before[1] for before, after in itertools.pairwise(ranges)):
            raise ValueError(f"model: the blocks {self.names[0]} to {self.names[-1]} must run in their order")
        stops = [after[0] for after in ranges[1:]] + [ranges[-1][1]]
        return [(start, stop) for (start, _), stop in zip(ranges, stops, strict=True)]

    def _stream(self) -> tuple[int, int]:
        """Returns the features of the activation between blocks, and the tokens of the example."""
        call = next(call for call in self.record.calls if call.module == self.names[0])
        tensors = [t for _, t in call.inputs if t.is_floating_point() and self.graph.value(t).per_token]
        if not tensors:
            raise ValueError(f"model: the block {self.names[0]} must take an activation")
        hidden = int(tensors[0].shape[-1])
        return hidden, tensors[0].numel() // hidden

    def _seq(self, nodes: list[Node], tokens: int, hidden: int) -> int:
        core = next((node for node in nodes if node.kind == "attention"), None)
        if core is not None:
            step = core.step
            shape = step.outputs[1].shape if step.name == "multi_head_attention" else step.inputs[0].shape
            return int(shape[-2])
        call = next(call for call in self.record.calls if call.module == self.names[0])
        shape = next(t.shape for _, t in call.inputs if t.is_floating_point() and t.shape[-1] == hidden)
        return int(shape[-2]) if len(shape) > 1 else tokens

    def _table(self, before: int) -> Node | None:
        """Returns the look-up of the vocabulary: the largest table before the blocks. Others are positions and
        types, whose tables every rank has."""
        look_ups = [node for node in self.graph.nodes if node.kind == "look_up"]
        earlier = [node for node in look_ups if node.step.place < before]
        table = max(earlier, key=lambda node: node.weight.size if node.weight else 0, default=None)
        for node in look_ups:
            if node is not table:
                node.kind = ""
        return table

    def _head(self, after: int) -> Node | None:
        """Returns the last linear after the blocks; what follows it is the loss."""
        return next((n for n in reversed(self.graph.nodes) if n.step.place >= after and n.kind == "linear"), None)

    def _check_parameters(self, work: Workload, used: dict[str, set[str]], tied: bool) -> None:
        """Each parameter must be one of an operator; those of blocks that stand-ins replace are counted by them."""
        real = {self.names[number] for number in self.alike}
        skipped = [name for name in self.names if name not in real]
        for parameter, parts in used.items():
            if len(parts) > 1 and not (tied and parts == {"first", "last"}):
                raise ValueError(
                    f"model: {parameter} is shared by {' and '.join(sorted(parts))}, which is not modelled"
                )
        for name, _ in self.record.parameters.values():
            if name not in used and not any(name.startswith(f"{block}.") for block in skipped):
                raise ValueError(f"model: the parameter {name} is of no operator that planner.trace knows, or not used")
        count = sum(tensor.numel() for _, tensor in self.record.parameters.values())
        if work.parameters != count:
            raise ValueError(f"model: its operators have {work.parameters} parameters, and the model has {count}")
