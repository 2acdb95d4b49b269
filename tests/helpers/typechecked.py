"""Runs every call of a layer under the type checker of ``tp_ext.debug.typecheck``, whatever test makes it:
``TP_EXT_TYPECHECK=<file> pytest tests/nn`` fails where a call has a type error, and adds a line to the file for each
call that was checked.

The inputs have the types that a layer's documentation gives them, and so must its result.
"""

import functools
import inspect
import os
from typing import Any

import spmd_types as spmd
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

import tp_ext

PUBLIC = [getattr(tp_ext, name) for name in tp_ext.__all__]
MODULES = [each for each in PUBLIC if inspect.isclass(each) and issubclass(each, nn.Module)]
LAYERS = [layer for layer in MODULES if layer.forward is not nn.Module.forward]
_entered: list[nn.Module] = []


def install(log: str) -> None:
    """Wraps ``forward`` of each layer of the package."""
    for layer in LAYERS:
        layer.forward = _checked(layer.forward, log)


def _checked(forward: Any, log: str) -> Any:
    @functools.wraps(forward)
    def called(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or _entered:
            return forward(self, *args, **kwargs)
        bound = inspect.signature(forward).bind(self, *args, **kwargs)
        groups = _groups(self)
        tensors = [*tree_leaves((args, kwargs)), *self.parameters(), *self.buffers()]
        tensors = [one for one in tensors if isinstance(one, Tensor)]
        elsewhere = any(vars(part).get("_coalesced") for part in self.modules())  # by a hook of the block around it
        modes = torch.utils._python_dispatch._len_torch_dispatch_stack()  # such as torch's CommDebugMode
        traced = modes > 0 or torch._C._functorch.peek_interpreter_stack() is not None
        if not groups or elsewhere or traced or not all(map(_plain, tensors)):
            return forward(self, *args, **kwargs)
        _entered.append(self)
        try:
            y = _called(self, forward, bound, groups, tensors)
        finally:
            _entered.pop()
            _forget(tensors)
        with open(log, "a") as file:
            file.write(f"{type(self).__name__} {len(groups)} {os.environ.get('PYTEST_CURRENT_TEST', '')}\n")
        return y

    return called


def _plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and not isinstance(tensor, DTensor)


def _groups(layer: nn.Module) -> dict[str, str]:
    """The groups of more than one rank that a layer communicates over: name -> role."""
    found: dict[str, str] = {}
    for part in layer.modules():
        for role in ("tp_group", "weight_group", "context_group"):
            group = getattr(part, role, None)
            if group is not None and group.size > 1:
                found[group.name] = role
        for axis in part.data_ranks.axes if isinstance(part, tp_ext.ParallelMoE) else ():
            found.setdefault(axis.name, f"data {axis.name}")
    return found


def _called(
    layer: nn.Module, forward: Any, bound: inspect.BoundArguments, groups: dict[str, str], tensors: list[Tensor]
) -> Any:
    axes = {role: tp_ext.group.process_group(name) for name, role in groups.items()}
    tp = axes.get("tp_group")
    stream = _stream(layer)

    def give(tensor: Any, held: Any, rows: Any) -> None:
        if isinstance(tensor, Tensor) and not spmd.has_local_type(tensor):
            held = spmd.R if held is spmd.I and not tensor.requires_grad else held
            spmd.assert_type(tensor, {axis: held if role == "tp_group" else rows for role, axis in axes.items()})

    given = dict(bound.arguments)
    given.pop("self")
    with spmd.set_current_mesh(list(axes.values())), tp_ext.debug.typecheck(layer, None):
        for name, value in given.items():
            for one in tree_leaves(value):
                if name in ("x", "residual", "logits_local"):
                    give(one, _input(layer, stream), spmd.V)
                elif name == "weight":
                    give(one, spmd.V, spmd.V)
                elif isinstance(one, tp_ext.LatentKVCache):
                    for held in one.buffers():  # all ranks hold the latents
                        give(held, spmd.R, spmd.R)
                        tensors.append(held)
                elif isinstance(one, tp_ext.KVCache):
                    for held in one.buffers():
                        give(held, spmd.V if held.is_floating_point() else spmd.R, spmd.R)
                        tensors.append(held)
                else:
                    give(one, spmd.I, spmd.V if name in ("ids", "target") else spmd.R)
        y = forward(*bound.args, **bound.kwargs)
        if tp is not None:
            first = next(one for one in tree_leaves(y) if isinstance(one, Tensor))
            want, found = _result(layer, stream), spmd.get_axis_local_type(first, tp)
            assert found is want or ({found, want} == {spmd.I, spmd.R} and not first.requires_grad), (found, want)
    _forget([one for one in tree_leaves(y) if isinstance(one, Tensor)])
    return y


def _stream(layer: nn.Module) -> Any:
    """The type of a layer's activations outside of the block."""
    sharded = getattr(layer, "sequence_parallel", False) or getattr(layer, "activations", "") == "hidden"
    return spmd.V if sharded else spmd.I


def _input(layer: nn.Module, stream: Any) -> Any:
    scatters = getattr(layer, "scatters", not getattr(layer, "input_is_parallel", True))
    layer = getattr(layer, "base_layer", layer)
    parallel = isinstance(layer, tp_ext.RowParallelLinear) and not scatters
    return spmd.V if parallel or isinstance(layer, tp_ext.VocabParallelCrossEntropy) else stream


def _result(layer: nn.Module, stream: Any) -> Any:
    gathers = getattr(layer, "gathers", getattr(layer, "gather_output", False))
    layer = getattr(layer, "base_layer", layer)
    if isinstance(layer, tp_ext.VocabParallelCrossEntropy):
        return spmd.I
    if isinstance(layer, tp_ext.ColumnParallelLinear | tp_ext.VocabParallelLMHead):
        return spmd.I if gathers else spmd.V
    return stream


def _forget(tensors: list[Tensor]) -> None:
    """Removes the types: a test may use its tensors otherwise next."""
    for tensor in tensors:
        for name in {"_local_type", "_partition_spec"} & vars(tensor).keys():
            delattr(tensor, name)
