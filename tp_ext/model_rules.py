"""Mistakes in how a model is put together that show without running it and without communication.

Layers are recognised by their options, since composition imports no layer: a column linear has ``gather_output``, a row
linear ``input_is_parallel``.
"""

from collections.abc import Iterable, Iterator

from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from torch.optim import Optimizer

from tp_ext.module import ParallelModule


def misplaced(model: nn.Module) -> Iterator[str]:
    """One sentence for each torch dropout on sharded features, and one if sequence parallelism is on in some linears
    only."""
    for name, module in model.named_modules():
        yield from _dropouts_between(name, module)
    yield from _mixed_sequence_parallel(model)


def _dropouts_between(prefix: str, module: nn.Module) -> Iterator[str]:
    """Among the children of a module in order of their registration: dropout after a column linear and before the row
    linear that takes its shards. In ``nn.Sequential`` that is the order of the calls, elsewhere the usual one."""
    column, found = "", list[str]()
    for name, child in module.named_children():
        if _is_column(child):
            column, found = name, []
        elif isinstance(child, _DropoutNd) and child.p > 0 and column:
            found.append(name)
        elif _is_row(child):
            for dropout in found if column else ():
                yield (
                    f"{_joined(prefix, dropout)}: torch's dropout between column linear {column} and row linear {name} "
                    "has the same mask on every shard; take tp_ext.dropout(x, p, training, group=group, dim=-1)"
                )
            column, found = "", []


def _is_column(module: nn.Module) -> bool:
    return _is_sharded_linear(module) and getattr(module, "gather_output", None) is False


def _is_row(module: nn.Module) -> bool:
    return _is_sharded_linear(module) and getattr(module, "input_is_parallel", None) is True


def _is_sharded_linear(module: nn.Module) -> bool:
    linear = hasattr(module, "gather_output") or hasattr(module, "input_is_parallel")
    return linear and isinstance(module, ParallelModule) and module.tp_group.size > 1


def _mixed_sequence_parallel(model: nn.Module) -> Iterator[str]:
    names: dict[bool, list[str]] = {True: [], False: []}
    for name, module in model.named_modules():
        if isinstance(module, ParallelModule) and _is_sharded_linear(module):
            names[module.sequence_parallel].append(name or "model")
    if names[True] and names[False]:
        yield (
            f"sequence_parallel: True in {_some(names[True])} and False in {_some(names[False])}; one takes tokens for "
            "sharded that the other takes for replicated"
        )


def foreign_parameters(model: nn.Module, optimizer: Optimizer) -> Iterator[str]:
    """A sentence if the optimizer holds parameters that are not the model's, whose steps change nothing."""
    known = {id(param) for param in model.parameters()}
    params = [param for group in optimizer.param_groups for param in group["params"]]
    foreign = [param for param in params if id(param) not in known]
    if foreign:
        shapes = _some([str(tuple(param.shape)) for param in foreign])
        yield (
            f"optimizer: {len(foreign)} of its {len(params)} parameters, of shapes {shapes}, are not the model's; "
            "make it after layers were replaced, and after fully_shard"
        )


def _some(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
