"""A call of a model as a graph whose inputs and outputs are lists of tensors."""

import inspect
import linecache
import re
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from tp_ext.export.manifest import TensorSpec, dtype_name

_SIZE = r"L\['tensors'\]\[(\d+)\]\.size\(\)\[(\d+)\]"
_LENGTH, _EQUAL = re.compile(_SIZE), re.compile(f"{_SIZE} == {_SIZE}")
Example = Tensor | Sequence[Any] | Mapping[str, Any]


class TracedCall(nn.Module):
    """The call of a model with an example's arguments, as a module that takes a list of its tensors."""

    def __init__(self, model: nn.Module, example: Example) -> None:
        super().__init__()
        self.model = model
        args, kwargs = ((), dict(example)) if isinstance(example, Mapping) else (_as_tuple(example), {})
        bound = inspect.signature(model.forward).bind(*args, **kwargs)
        self.arguments = bound.arguments
        paths, self.spec = pytree.tree_flatten_with_path((bound.args, bound.kwargs))
        # What is no tensor is a constant of the graph
        self.leaves = [None if isinstance(leaf, Tensor) else leaf for _, leaf in paths]
        self.places = [i for i, (_, leaf) in enumerate(paths) if isinstance(leaf, Tensor)]
        self.tensors: list[Tensor] = [paths[i][1] for i in self.places]
        positional = list(bound.signature.parameters)
        named = [(_argument_name(path, positional), leaf) for path, leaf in paths]
        self.names = [named[i][0] for i in self.places]
        # A caller may pass constants again, whose texts are compared
        self.texts = {name: None if isinstance(leaf, Tensor) else repr(leaf) for name, leaf in named}
        self.output_names: list[str] = []

    def forward(self, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return self._tensors_of(self.model(*args, **kwargs))

    def _tensors_of(self, output: Any) -> tuple[Tensor, ...]:
        if isinstance(output, Mapping):  # of transformers, which leaves out what is None
            output = dict(output)
        paths, _ = pytree.tree_flatten_with_path(output)
        for path, leaf in paths:
            if not isinstance(leaf, Tensor):
                where = pytree.keystr(path) or "the output"
                hint = "; pass use_cache=False" if "past_key_values" in where else ""
                raise TypeError(f"model: {where} of its output is a {type(leaf).__name__}, and must be a tensor{hint}")
        self.output_names = [_dotted(path) or "output" for path, _ in paths]
        return tuple(leaf for _, leaf in paths)

    def dynamic_shapes(self, shapes: Any) -> list[Any]:
        """Returns torch.export's description of each tensor's dynamic dims from that of the arguments.

        Raises:
            ValueError: it has another structure than the arguments.
        """
        if shapes is None:
            return [None] * len(self.tensors)
        names = list(self.arguments)
        if not isinstance(shapes, Mapping):
            shapes = dict(zip(names, _as_tuple(shapes), strict=False))
        if unknown := [name for name in shapes if name not in names]:
            raise ValueError(f"dynamic_shapes: {unknown[0]!r} must be an argument of the example, {names}")
        return [leaf for name in names for leaf in _shapes_of(name, self.arguments[name], shapes.get(name))]


def _as_tuple(example: Any) -> tuple[Any, ...]:
    return (example,) if isinstance(example, Tensor) else tuple(example)


def _shapes_of(name: str, value: Any, shapes: Any) -> list[Any]:
    """Returns the dynamic dims of each tensor in the argument ``value``."""
    if isinstance(value, Tensor):
        return [shapes]
    children, _ = pytree.tree_flatten(value, is_leaf=lambda part: part is not value)
    if not children or (len(children) == 1 and children[0] is value):
        return []
    parts: list[Any] = [None] * len(children)
    if shapes is not None:
        parts, _ = pytree.tree_flatten(shapes, is_leaf=lambda part: part is not shapes)
        if len(parts) != len(children):
            raise ValueError(f"dynamic_shapes: {name!r} must have {len(children)} parts, as the example")
    return [leaf for child, part in zip(children, parts, strict=True) for leaf in _shapes_of(name, child, part)]


def _argument_name(path: tuple[Any, ...], positional: list[str]) -> str:
    group, first, *rest = path
    name = positional[first.idx] if group.idx == 0 else first.key
    return ".".join(filter(None, [name, _dotted(tuple(rest))]))


def _dotted(path: tuple[Any, ...]) -> str:
    return ".".join(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path)


def trace(call: nn.Module, tensors: list[Tensor], shapes: list[Any]) -> ExportedProgram:
    """Returns the graph of ``call(tensors)``.

    Raises:
        ValueError: it cannot be traced; with the module, the line and the operator at fault.
    """
    try:
        return torch.export.export(call, (tensors,), dynamic_shapes={"tensors": shapes}, strict=False)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ValueError(f"model: cannot be exported: {_place(call, error)}{reason}") from error


def _place(call: nn.Module, error: BaseException) -> str:
    """Returns the innermost module in whose forward an error was raised, with the line."""
    paths = {id(module): path for path, module in call.named_modules()}
    place = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        module = frame.f_locals.get("self")
        if frame.f_code.co_name != "_call_impl" and id(module) in paths and isinstance(module, nn.Module):
            path = paths[id(module)].removeprefix("model").removeprefix(".")
            text = linecache.getline(frame.f_code.co_filename, line).strip()
            place = f"module {path!r} ({type(module).__name__}), at `{text}`: "
    return place


def specs(
    program: ExportedProgram, names: list[str], output_names: list[str]
) -> tuple[list[TensorSpec], list[TensorSpec], dict[str, list[int | None]]]:
    """Returns inputs, outputs and the bounds of the dynamic dims of a graph.

    Raises:
        ValueError: a length depends on another in another way than by being equal, or the graph on several.
    """
    # A loaded graph compares each length with its bounds and with equal ones, and not what several tell together
    for guard in getattr(program, "_guards_code", []):
        if not _EQUAL.fullmatch(guard):
            condition = _LENGTH.sub(lambda match: f"{names[int(match[1])]}.shape[{match[2]}]", guard)
            raise ValueError(
                f"dynamic_shapes: the model takes another path where not {condition}, and an export has one: open "
                "fewer dims, or bound them"
            )
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    signature = program.graph_signature
    inputs = [values[name] for name in signature.user_inputs if isinstance(name, str)]
    outputs = [values[name] for name in signature.user_outputs if isinstance(name, str)]
    dims: dict[str, list[int | None]] = {}
    for value in inputs:
        for length in value.shape:
            if isinstance(length, torch.SymInt) and not length.node.expr.is_Symbol:
                raise ValueError(
                    f"dynamic_shapes: a length is {length.node.expr}, and must be independent of the others"
                )
    for symbol, bounds in program.range_constraints.items():
        # Without a bound it is an infinity of torch's own, whose is_finite is True
        lower, upper = (int(bound) if bound.is_Integer else None for bound in (bounds.lower, bounds.upper))
        dims[str(symbol)] = [max(1, lower or 1), upper]
    described = [
        [
            TensorSpec(name, dtype_name(v.dtype), [_length(n) for n in v.shape])
            for name, v in zip(labels, tensors, strict=True)
        ]
        for labels, tensors in ((names, inputs), (output_names, outputs))
    ]
    return described[0], described[1], {dim: dims[dim] for dim in _dims_of(described[0])}


def _length(length: int | torch.SymInt) -> int | str:
    return length if isinstance(length, int) else str(length.node.expr)


def _dims_of(inputs: list[TensorSpec]) -> list[str]:
    return list(dict.fromkeys(n for spec in inputs for n in spec.shape if isinstance(n, str)))
