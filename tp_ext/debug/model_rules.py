"""Checks of a model's structure that need neither a run nor communication.

Layers are recognised by their options, since this package imports no layer: a column linear has ``gather_output``, a
row linear ``input_is_parallel``.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.optim import Optimizer

from tp_ext.debug.replication import gradients, local_tensor
from tp_ext.model.census import Census
from tp_ext.model.module import ParallelModule


def misplaced(model: Census) -> Iterator[str]:
    """Yields a sentence for each torch dropout on sharded features, and for each pair of linears of which only one has
    ``sequence_parallel``.

    A pair is a column linear and the next row linear among the children of one module, in order of their registration:
    in ``nn.Sequential`` that is the order of the calls, elsewhere the usual one.
    """
    for prefix, module in model.modules:
        column, dropouts = "", list[str]()
        for name, child in module.named_children():
            if _is_column(child):
                column, dropouts = name, []
            elif isinstance(child, _DropoutNd) and child.p > 0:
                dropouts.append(name)
            elif _is_row(child) and column:
                yield from _wrong_pair(prefix, module, column, name, dropouts)
                column = ""


def _wrong_pair(prefix: str, module: nn.Module, column: str, row: str, dropouts: list[str]) -> Iterator[str]:
    """Yields sentences about the children ``column`` and ``row`` of a module, and the torch dropouts between them."""
    first, last = (module.get_submodule(name).sequence_parallel for name in (column, row))
    if first != last:
        yield (
            f"{_joined(prefix, column)}: sequence_parallel={first} must be that of the row linear {row}, {last}: one "
            "takes tokens for sharded that the other takes for replicated"
        )
    for name in dropouts:
        yield (
            f"{_joined(prefix, name)}: torch's dropout between column linear {column} and row linear {row} "
            "has the same mask on every shard; take tp_ext.dropout(x, p, training, group=group, dim=-1)"
        )


def _is_column(module: nn.Module) -> bool:
    return _is_sharded_linear(module) and getattr(module, "gather_output", None) is False


def _is_row(module: nn.Module) -> bool:
    return _is_sharded_linear(module) and getattr(module, "input_is_parallel", None) is True


def _is_sharded_linear(module: nn.Module) -> bool:
    linear = hasattr(module, "gather_output") or hasattr(module, "input_is_parallel")
    return linear and isinstance(module, ParallelModule) and module.tp_group.size > 1


# Of torch's elementwise functions those that round the last elements of a tensor in another way, and where
_BY_PLACE: dict[type[nn.Module], str] = {nn.Sigmoid: "fp32", nn.SiLU: "fp64", nn.GELU: "fp64, by tanh in fp32"}


def not_invariant(model: Census) -> Iterator[str]:
    """Yields sentences about a model built in tp_invariant: layers built outside of it, and activations of torch on
    shards, whose bits depend on the place of an element."""
    layers = [(name, module) for name, module in model.modules if isinstance(module, ParallelModule)]
    outside = [name for name, module in layers if module.invariant_blocks is None]
    if len(outside) == len(layers):
        return
    if outside:
        inside = next(name for name, module in layers if module.invariant_blocks is not None)
        yield (
            f"{outside[0]}: must be built in tp_invariant, as {inside}: its sums depend on the ranks"
            + (f"; {len(outside) - 1} more layers are like it" if len(outside) > 1 else "")
        )
    for prefix, module in model.modules:
        sharded = False
        for name, child in module.named_children():
            sharded = (sharded or _is_column(child)) and not _is_row(child)
            if sharded and (where := _BY_PLACE.get(type(child))) is not None:
                kind = type(child).__name__
                yield (
                    f"{_joined(prefix, name)}: nn.{kind} must not be between linears built in tp_invariant: in {where} "
                    "it rounds the last elements of a shard in another way; ParallelMLP has its own"
                )


def foreign_parameters(model: Census, optimizer: Optimizer) -> Iterator[str]:
    """Yields a sentence if the optimizer holds parameters that are not the model's, whose updates have no effect."""
    known = {id(entry.value) for entry in model.parameters.values()}
    params = [param for group in optimizer.param_groups for param in group["params"]]
    foreign = [param for param in params if id(param) not in known]
    if foreign:
        shapes = _some([str(tuple(param.shape)) for param in foreign])
        yield (
            f"optimizer: {len(foreign)} of its {len(params)} parameters, of shapes {shapes}, are not the model's; "
            "make it after layers were replaced, and after fully_shard"
        )


def not_finite(model: Census) -> Iterator[str]:
    """Yields a sentence about the first parameter or gradient of this rank that has an element that is not finite."""
    tensors: list[tuple[str, Tensor]] = [(name, entry.value) for name, entry in model.parameters.items()]
    tensors += [gradient for name, param in tensors for gradient in gradients(name, param)]
    tensors = [(name, local_tensor(tensor)) for name, tensor in tensors if not tensor.is_meta]
    suspect = [(name, tensor) for name, tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]
    infinite = [(name, where) for name, tensor in suspect if len(where := (~torch.isfinite(tensor)).nonzero())]
    if infinite:
        name, where = infinite[0]
        index = tuple(where[0].tolist())
        value = dict(suspect)[name][index].item()
        more = f"; {len(infinite) - 1} more parameters and gradients are like it" if len(infinite) > 1 else ""
        yield f"{name}: first at index {index}: {value} must be finite ({len(where)} such elements){more}"


def option_facts(optimizer: Optimizer) -> dict[str, str]:
    """Returns the options of each parameter group, and its number of parameters, as text, by a name of each."""
    return {
        f"{key} of the optimizer's parameter group {number}": _text(len(value) if key == "params" else value)
        for number, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if key != "param_names"
    }


def _text(value: object) -> str:
    if isinstance(value, Tensor):
        return repr(value.tolist())
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_text, value))})"
    return repr(value) if isinstance(value, int | float | str | None) else type(value).__name__  # no addresses


def _some(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
