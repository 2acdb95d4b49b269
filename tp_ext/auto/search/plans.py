"""A plan: the sharding of each parameter, the collectives with their places, and the reasons of whole parameters."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import reprlib
from collections.abc import Container
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from tp_ext._checks import check_int
from tp_ext.auto.record.edits import (
    OTHER,
    Collective,
    Conversion,
    DirectCall,
    Draw,
    LeafPath,
    Output,
    SizeCall,
)
from tp_ext.auto.record.numbers import ReadNumbers, read_ids
from tp_ext.auto.record.trace import Arguments, arguments
from tp_ext.auto.search import picture
from tp_ext.checkpoint.files.plain_values import read_json
from tp_ext.checkpoint.files.typed_values import value_of
from tp_ext.conversions import I, P, R, S, Type
from tp_ext.sharding import Part, Sharding
from tp_ext.share_sizes import Weights

VERSION = 8
UNKNOWN = {"unknown": True}  # the description of an example that JSON does not hold
DIGEST = "sha256"  # of the rest of the file, which is so the plan that was proven


@dataclass
class Plan:
    """The sharding of a model over p ranks: plain data, the same on every rank, made by :func:`tp_ext.auto.plan`.

    Attributes:
        p: number of ranks. shardings: name of a parameter -> :class:`~tp_ext.Sharding`; each name of a tied one. whole:
        name of a parameter that is not sharded -> the reason, with operator, module and line of source. collectives:
        those of one forward and backward at the sizes of the example, :class:`~tp_ext.auto.Collective`. patches: module
        -> {attribute: (old, new)}, integers that its code reads; ``config.x`` is one of its own copy of a
            config; new is a tuple with one for each rank where ranks differ.
        roles: module that is replaced by a layer -> ``"column"``, ``"row"`` or ``"vocab"``.
        heads: the modules among them whose output is sharded over the vocabulary.
        tied: the names of each sharded parameter that has several.
        conversions: tensors at boundaries of modules that have another type on either side, and so all communication
            but that of replaced layers (:class:`tp_ext.auto.Conversion`).
        draws: calls that draw random masks. buffers: shardings of buffers.
        shapes: name of a parameter -> its full shape.
        example: the example's structure, tensors as shape and dtype, with the values of those of which code reads
            numbers; ``UNKNOWN`` if it holds other objects; None: calls are not compared with it.
        proof: ``"values"``: the sharded model was run and compared; ``"shapes"``: only its shapes are proven, with the
            reason.
        refused_inputs: arguments whose gradient would be a rank's part: they must not require one.
        rules: those given to :func:`tp_ext.auto.plan`.
        proofs: for each rank, a hash of the calls of the local model on fakes, with their shapes.
        bytes_of_element: name of a parameter -> bytes of an element, once for tied ones.
        outputs: the results of the modules, in the order of their first calls.
        whole_tokens: module whose sum over the ranks stays an all-reduce under sequence parallelism -> the reason.
        sizes: module -> its calls with sizes as arguments, of which some are changed while it runs
            (:class:`~tp_ext.auto.record.edits.SizeCall`): one list for all ranks, or one for each.
        direct: modules whose ``forward`` the model's code calls by name; the hooks of the plan run then, too.
        direct_calls: the conversions of calls of modules by other code than the model's forward.
        invariant_blocks: those of :func:`tp_ext.tp_invariant` into which sharded dims are cut; None: not cut so.
        functions: with blocks: modules in whose calls functions of torch are replaced by some whose result does not
            depend on the shard.
        shares: the weights of the ranks (:func:`tp_ext.shares`); None: equal shares.
    """

    p: int
    shardings: dict[str, Sharding]
    tied: list[list[str]]
    roles: dict[str, str]
    heads: list[str]
    buffers: dict[str, list[Sharding]]
    conversions: list[Conversion]
    draws: list[Draw]
    patches: dict[str, dict[str, tuple[int, int | tuple[int, ...]]]]
    whole: dict[str, str]
    collectives: list[Collective]
    shapes: dict[str, tuple[int, ...]]
    example: Any = None
    proof: str = "shapes"
    refused_inputs: list[LeafPath] = field(default_factory=list)
    rules: dict[str, str] = field(default_factory=dict)
    proofs: list[str] = field(default_factory=list)
    bytes_of_element: dict[str, int] = field(default_factory=dict)
    outputs: list[Output] = field(default_factory=list)
    whole_tokens: dict[str, str] = field(default_factory=dict)
    direct: list[str] = field(default_factory=list)
    sizes: dict[str, list[list[SizeCall]]] = field(default_factory=dict)
    direct_calls: list[DirectCall] = field(default_factory=list)
    invariant_blocks: int | None = None
    functions: list[str] = field(default_factory=list)
    shares: Weights | None = None

    @property
    def fingerprint(self) -> str:
        """A hash of all that the plan does; ranks compare it before they carry it out."""
        return _digest(self._content())

    def _content(self) -> dict[str, Any]:
        content = {"version": VERSION, **dataclasses.asdict(self)}
        if self.shares is None:  # as files had it before there were shares
            del content["shares"]
        return content

    def save(self, path: str | Path) -> None:
        """Writes the plan as JSON, with the SHA-256 of its content."""
        content = self._content()
        Path(path).write_text(json.dumps({DIGEST: _digest(content), **content}, indent=1))

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Reads a plan that :meth:`save` wrote.

        Raises:
            ValueError: the file is no plan, one of another version, or has been changed. OSError: it cannot be read.
        """
        content = read_json(path)
        again = "plan again by tp_ext.auto.plan, and save it"
        if content.get("version") != VERSION:
            raise ValueError(f"path: {str(path)!r} must be a plan of version {VERSION}; {again}")
        if content.pop(DIGEST, None) != _digest(content):
            raise ValueError(f"path: {str(path)!r} must be a plan as it was saved, and has another content; {again}")
        del content["version"]
        try:
            plan: Plan = value_of(cls, content, "plan")
            plan._check()
        except (TypeError, ValueError) as error:
            raise ValueError(f"path: {str(path)!r} must be a plan: {error}; {again}") from error
        return plan

    def _check(self) -> None:
        """Raises ValueError for values of the right types that no plan has."""
        check_int(least=1, p=self.p)
        check_int(least=1, or_none=True, invariant_blocks=self.invariant_blocks)
        if any(part.shares != self.shares for sharding in self.shardings.values() for part in sharding.parts):
            raise ValueError(f"shares: {self.shares} must be those of all shardings")
        for name, shape in self.shapes.items():
            if any(n < 0 for n in shape):
                raise ValueError(f"shapes: {shape} of {name!r} must have no negative number")
        for name, sharding in self.shardings.items():
            if name not in self.shapes or not 0 <= sharding.dim < len(self.shapes[name]):
                raise ValueError(f"shardings: {name!r} must have a shape with dim {sharding.dim}")
            sharding.local_shape(self.shapes[name], 0, self.p)
        if has_example(self):
            try:
                undescribed(self.example)
            except Exception as error:  # whatever torch and Python say of a value of another form
                raise ValueError(f"example: {reprlib.repr(self.example)} must describe arguments") from error

    def local(self) -> list[str]:
        """Returns the names of the modules that have integers, parameters or buffers of a shard."""
        owners = (name.rpartition(".")[0] for name in (*self.shardings, *self.buffers))
        return list(dict.fromkeys((*self.patches, *self.sizes, *owners)))

    @property
    def copies(self) -> list[Conversion]:
        """Replicated tensors whose gradients are partial, or that are terms of a sum themselves."""
        return [edit for edit in self.conversions if edit.types in ((I, R), (I, P))]

    @property
    def sums(self) -> list[Conversion]:
        """Partial outputs that are summed."""
        return [edit for edit in self.conversions if edit.types == (P, I) and edit.at == "output"]

    @property
    def slices(self) -> list[Conversion]:
        """Arguments that are computed outside of their module, and of which it takes a shard."""
        return [edit for edit in self.conversions if edit.types == (I, S) and not edit.tokens]

    @property
    def gathers(self) -> list[Conversion]:
        """Outputs of the model that have a sharded dim."""
        return [edit for edit in self.conversions if edit.types == (S, I) and not edit.tokens]

    @property
    def tokens(self) -> list[Conversion]:
        """Boundaries at which tensors become sharded on their tokens, stay so, or are whole again; empty without
        sequence parallelism."""
        return [edit for edit in self.conversions if edit.of_tokens]

    @property
    def masks(self) -> list[Draw]:
        """The draws whose calls are replaced."""
        return [draw for draw in self.draws if draw.call != OTHER]

    def edited(self) -> set[str]:
        """Returns the names of the modules that the plan changes, or their boundaries."""
        edits: tuple[Conversion | Draw, ...] = (*self.conversions, *self.masks)
        return {*self.roles, *self.local(), *(edit.module for edit in edits)}

    def why(self, name: str) -> str:
        """Returns why a parameter is sharded as it is, or whole; or, of a module that sums over the ranks, whether its
        result is sharded on its tokens.

        Raises:
            ValueError: there is no such parameter, and no such module.
        """
        # Names of modules and of parameters differ, so that any order of these tests is right
        if name in self.whole_tokens:
            return f"the result of {name} has all tokens: {self.whole_tokens[name]}"
        if any(edit.types == (P, S) and edit.module == name for edit in self.conversions):
            return f"the result of {name} is sharded on its tokens"
        if name in self.whole:
            return f"{name} is whole: {self.whole[name]}"
        if name not in self.shardings:
            raise ValueError(f"name: {name!r} must be a parameter of the planned model")
        sharding = self.shardings[name]
        local = sharding.local_sizes(self.p)
        lengths = str(local[0]) if len(set(local)) == 1 else str(local)
        parts = ", ".join(_part_text(part) for part in sharding.parts)
        role = self.roles.get(name.rpartition(".")[0], "sharded in place")
        return f"{name} {self.shapes[name]} is sharded on dim {sharding.dim}, in {parts}: {lengths} per rank ({role})"

    def compare(self, tp_plan: dict[str, str]) -> list[str]:
        """Returns the differences to a ``tp_plan`` of transformers: patterns of modules -> ``"colwise"``,
        ``"rowwise"``, ...

        A pattern of either that has no counterpart in the other is a difference, too; names are compared without the
        prefix of the base model.

        Raises:
            TypeError: no dict.
        """
        if not isinstance(tp_plan, dict):
            raise TypeError(f"tp_plan: {tp_plan!r} must be a dict; this model may have none")
        mine = {_folded(name): role for name, role in self.roles.items()}
        differences, styles = [], {"colwise": "column", "embedding": "vocab", "rowwise": "row"}
        for pattern, style in tp_plan.items():
            role = next((role for part, role in styles.items() if part in style), None)
            # transformers names modules from the base model on, ours may have its prefix
            role_here = next((mine[name] for name in mine if name == pattern or name.endswith("." + pattern)), None)
            if role is not None and role_here != role:
                differences.append(f"{pattern}: {style} there, {role_here or 'whole'} here")
        for name, role in mine.items():
            if not any(name == pattern or name.endswith("." + pattern) for pattern in tp_plan):
                differences.append(f"{name}: not in the other, {role} here")
        return differences

    def _tokens_text(self) -> str:
        names: dict[tuple[Type, Type], dict[str, None]] = {}
        for edit in self.tokens:
            names.setdefault(edit.types, {})[_folded(edit.module) or "the model"] = None
        what = {
            (P, S): "reduce-scatter after", (I, S): "slice at", (S, R): "all-gather at",
            (S, I): "all-gather for replicated work at",
        }  # fmt: skip
        texts = [f"{text} {', '.join(names[types])}" for types, text in what.items() if types in names]
        return "sequence parallel: " + ("; ".join(texts) or "nothing")

    def draw(self, path: str | Path, module: str | None = None) -> None:
        """Draws a module: its parameters, its modules in the order of their calls with their results, each sharded,
        partial or replicated by colour, and the collectives between them.

        Args:
            path: a file ``*.png`` or ``*.svg``. Needs matplotlib.
            module: name of a module; default: the first of the largest list of layers, else the model.

        Raises:
            ValueError: another suffix; a module that the example does not call. ImportError: no matplotlib.
        """
        picture.draw(self, path, module)

    def parameter_bytes(self, rank: int | None = None) -> int:
        """Returns the bytes of all parameters, of the full model or of a rank."""
        total = 0
        # Not by shapes, which have a tied parameter under each of its names
        for name, size in self.bytes_of_element.items():
            shape = self.shapes[name]
            if rank is not None and name in self.shardings:
                shape = tuple(self.shardings[name].local_shape(shape, rank, self.p))
            for n in shape:
                size *= n
            total += size
        return total

    def __str__(self) -> str:
        """The table: one row for equal parameters of all layers, then the totals."""
        rows = [("parameter", "shape", "sharded", "per rank", "layer", "reason")]
        folded: dict[str, list[str]] = {}
        for name in self.shapes:
            folded.setdefault(_folded(name), []).append(name)
        # Parameters whose names differ in the numbers of layers alone share a row
        for pattern, names in folded.items():
            name = names[0]
            times = f" (x{len(names)})" if len(names) > 1 else ""
            sharding = self.shardings.get(name)
            shape = " x ".join(map(str, self.shapes[name]))
            if sharding is None:
                rows.append((pattern + times, shape, "-", shape, "", self.whole[name]))
                continue
            local_shape: list[Any] = [*sharding.local_shape(self.shapes[name], 0, self.p)]
            if self.shares is not None:
                local_shape[sharding.dim] = sharding.local_sizes(self.p)
            local = " x ".join(map(str, local_shape))
            parts = " | ".join(_part_text(part) for part in sharding.parts)
            rows.append(
                (
                    pattern + times,
                    shape,
                    f"dim {sharding.dim}: {parts}",
                    local,
                    self.roles.get(name.rpartition(".")[0], ""),
                    "",
                )
            )
        # Reasons are last, and long: they get no width
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        lines = [
            "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[5]]) for row in rows
        ]
        forward = [collective for collective in self.collectives if collective.direction == "forward"]
        backward = [collective for collective in self.collectives if collective.direction == "backward"]
        lines.append("")
        ranks = range(1 if self.shares is None else self.p)
        per_rank = ", ".join(_size(self.parameter_bytes(rank)) for rank in ranks)
        shares = "" if self.shares is None else f", shares {list(self.shares)}"
        lines.append(
            f"p = {self.p}{shares}: parameters {_size(self.parameter_bytes())} -> {per_rank} per rank; "
            f"collectives at the sizes of the example: {len(forward)} forward "
            f"({_size(sum(c.bytes for c in forward))}), "
            f"{len(backward)} backward ({_size(sum(c.bytes for c in backward))})"
        )
        if self.shardings:
            lines.append(f"proven by {self.proof}")
        if self.tokens or self.whole_tokens:
            lines.append(self._tokens_text())
        for text, names in _by_text({_folded(name): why for name, why in self.whole_tokens.items()}).items():
            lines.append(f"all tokens in the result of {', '.join(names)}: {text}")
        for module, changes in {_folded(name): changes for name, changes in self.patches.items()}.items():
            lines.append(
                f"patched in {module}: " + ", ".join(f"{a} {old} -> {new}" for a, (old, new) in changes.items())
            )
        if self.sizes:
            sized = dict.fromkeys(_folded(name) or "the model" for name in self.sizes)
            lines.append(f"sizes of views changed in each call of {', '.join(sized)}")
        return "\n".join(line.rstrip() for line in lines)


def _by_text(reasons: dict[str, str]) -> dict[str, list[str]]:
    names_of: dict[str, list[str]] = {}
    for name, text in reasons.items():
        names_of.setdefault(text, []).append(name)
    return names_of


def described(example: Any, read: ReadNumbers | None = None) -> Any:
    """An example as JSON holds it, with the values of tensors that are read; ``UNKNOWN`` if it has other objects than
    tensors, numbers and text in dicts, lists and tuples."""
    if isinstance(example, Arguments):  # of a call that the guard proves: no plan that is saved has it
        return UNKNOWN
    given = example if isinstance(example, tuple) else dict(example)
    return _described(given, read_ids(read, arguments(example))) or UNKNOWN


def has_example(plan: Plan) -> bool:
    """True if a plan keeps the example that it was made with."""
    return plan.example not in (None, UNKNOWN)


def _described(example: Any, read: Container[int]) -> Any:
    if isinstance(example, Tensor):
        values = {"values": example.tolist()} if id(example) in read else {}
        # JSON has no NaN
        if example.layout != torch.strided or (values and bool(example.ne(example).any())):
            return None
        return {"shape": list(example.shape), "dtype": str(example.dtype).removeprefix("torch."), **values}
    if type(example) is dict:
        items = {key: _described(value, read) for key, value in example.items()}
        return None if None in items.values() else {"dict": items}
    if type(example) in (list, tuple):
        items_of = [_described(value, read) for value in example]
        return None if None in items_of else {type(example).__name__: items_of}
    # A value of None is described, too: a description of None means that there is none
    return {"value": example} if example is None or type(example) in (int, float, str, bool) else None


def undescribed(data: Any) -> Any:
    """The example of a description, its tensors on meta if it does not have their values."""
    # Each kind has keys of its own, so that any order of these tests is right
    if "shape" in data:
        dtype = getattr(torch, data["dtype"])
        if "values" in data:
            return torch.tensor(data["values"], dtype=dtype, device="cpu").reshape(data["shape"])
        return torch.empty(data["shape"], dtype=dtype, device="meta")
    if "dict" in data:
        return {key: undescribed(value) for key, value in data["dict"].items()}
    if "list" in data or "tuple" in data:
        items = [undescribed(value) for value in data.get("list", data.get("tuple"))]
        return items if "list" in data else tuple(items)
    return data["value"]


def example_for(plan: Plan, model: nn.Module) -> Any:
    """The plan's example, on meta but for tensors of which code reads numbers; its floating-point tensors have the
    type that the model's parameters have now.

    A model is often converted after it was planned, and its images or features with it.
    """
    example, planned = undescribed(plan.example), plan.bytes_of_element
    types = [(planned[n], p.dtype) for n, p in model.named_parameters() if p.is_floating_point() and n in planned]
    if not types:
        return example
    # Tensors of another width than the planned parameters, such as times in fp32, were not of the model's type before
    size, now = types[0]

    def convert(x: Any) -> Any:
        return x.to(now) if isinstance(x, Tensor) and x.is_floating_point() and x.itemsize == size else x

    return tree_map(convert, example)


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, indent=1).encode()).hexdigest()


def _part_text(part: Part) -> str:
    text = str(part.size) if part.unit == 1 else f"{part.size} by {part.unit}"
    text += f", each on {part.copies} ranks" if part.copies > 1 else ""
    return text + (f", in {part.groups} groups" if part.groups > 1 else "")


def _folded(name: str) -> str:
    """A name with its numbers as ``*``: that of the same parameter in every layer."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _size(number: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if number < 1000 or unit == "GB":
            return f"{number:.3g} {unit}"
        number /= 1000
    raise AssertionError
