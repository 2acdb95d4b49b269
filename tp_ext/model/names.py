"""Names of modules in the unsharded model, and initial weights by name."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrize import ParametrizationList

from tp_ext.model.census import copies_in
from tp_ext.model.module import ParallelModule
from tp_ext.model.stages import JoinedStages, Stages, joined
from tp_ext.random import OwnRandomNumbers
from tp_ext.random_scope import base_seed, number_of

_WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def name_modules(model: Stages, *, prefix: str = "", rename: bool = False) -> None:
    """Gives every module its name in the unsharded model, by which it draws masks in :func:`tp_ext.random.at` and
    weights in :func:`tp_ext.reset_parameters`.

    The names are those of ``named_modules()`` without the prefixes that DDP, ``torch.compile`` and checkpoint wrappers
    add. A module with several names has the first one. A module that has a name keeps it, also when it is part of
    another model or used alone, so the whole model is named before its parts; but a copy of a named module within the
    model is named by its own place.

    Args:
        model: a module, or the stages of a pipeline that this rank holds, whose submodules have the names of the whole
            model.
        prefix: the name of ``model`` itself, for a layer that is built alone: all of it is named anew.
        rename: names all modules anew, by their present places, as after blocks were removed or added.

    Communicates nothing.

    Raises:
        TypeError: neither a module nor a list of modules; ``prefix`` is no string.
        ValueError: a new module has the place by which another one was named.
    """
    if not isinstance(prefix, str):
        raise TypeError(f"prefix: {prefix!r} must be a string")
    name_joined(joined(model), prefix, rename=rename)


def name_joined(model: nn.Module, prefix: str = "", *, rename: bool = False) -> None:
    """Does :func:`name_modules` for a module, or for stages that are joined, as in a census."""
    named: list[tuple[str, nn.Module]] = []
    drawing: dict[str, nn.Module] = {}  # wrappers do not draw, and have the name of what they wrap
    for path, module in _paths(model, prefix, set()):
        name = None if prefix or rename else module.__dict__.get("tp_name")
        if name is None or drawing.get(name, module) is not module:
            name = path
        draws = isinstance(module, ParallelModule) or module._parameters
        if draws and drawing.setdefault(name, module) is not module:
            raise ValueError(
                f"module: two modules would have the name {name!r}, by which they would draw the same numbers; the "
                "model has changed since it was named: pass rename=True"
            )
        named.append((name, module))
    for name, module in named:
        module.__dict__["tp_name"] = name
        if isinstance(module, ParallelModule):
            module._name_number = number_of("name", name)
            module._name_key = torch.tensor(module._name_number, device="cpu")


def _paths(
    module: nn.Module, path: str, seen: set[int], children_first: bool = False
) -> Iterator[tuple[str, nn.Module]]:
    """Yields the modules with their names in the unsharded model, each once."""
    if id(module) in seen:
        return
    seen.add(id(module))
    if isinstance(module, JoinedStages):
        for stage in module.stages:
            yield from _paths(stage, path, seen, children_first)
        return
    if not children_first:
        yield path, module
    for local, child in module._modules.items():
        if child is not None:
            wraps = local in _WRAPPED or (local == "module" and isinstance(module, DistributedDataParallel))
            yield from _paths(child, path if wraps else f"{path}.{local}".lstrip("."), seen, children_first)
    if children_first:
        yield path, module


@torch.no_grad()
def reset_parameters(model: Stages) -> None:
    """Draws all parameters of a model anew, each as a function of the seed of :func:`tp_ext.manual_seed`, of its name
    and of the index in the full tensor.

    So the weights are those of one process for every p, every stage, every replica, for a layer that is built alone or
    on ``meta`` and then on a device (``to_empty``), and in any order of construction. Calls :func:`name_modules` first.
    A layer of this package draws each parameter by its initialiser, the same bits on every device; any other module
    with parameters or buffers calls its ``reset_parameters`` with torch's generators seeded by its name, under FSDP2
    for the full tensors, on their device. A parameter of several modules is drawn by the first; a declared copy of
    another stage's (:func:`declare_tied`) has the seed of the original. The generators are afterwards as before.

    A part of a model is named before (``name_modules(model)``, or ``prefix``); else its names begin at the part, and
    equal parts have equal weights. Buffers of a module without ``reset_parameters`` stay as they are.

    Communicates nothing.

    Raises:
        RuntimeError: no ``tp_ext.manual_seed``. ValueError: a parameter is on ``meta``, or belongs to a module without
            ``reset_parameters`` or to a layer of this package without an initialiser; before anything is drawn; see
            also :func:`name_modules`.
    """
    seed = base_seed("tp_ext.reset_parameters")
    whole = joined(model)
    name_joined(whole)
    # As constructors do: nn.MultiheadAttention has zeros where its linear has drawn a bias
    owners = [module for _, module in _paths(whole, "", set(), children_first=True) if _draws(module)]
    # Before anything is drawn: an error in the middle would leave half of the weights new
    for module in owners:
        for local, param in module._parameters.items():
            if param is not None and param.is_meta:
                raise ValueError(f"module: {_full(module, local)!r} is on meta; call to_empty(device=) before")
    copies, drawn = copies_in(list(whole.modules())), dict[int, Tensor]()
    for module in owners:
        if isinstance(module, ParallelModule):
            for local in module._inits:
                param = getattr(module, local)
                name = copies.get(id(param), _full(module, local))
                if id(param) not in drawn:
                    module.reset_parameter(local, number_of("weight", seed, name))
        else:
            _reset_by(module, number_of("weights", seed, module.__dict__["tp_name"]), drawn)
        drawn |= {id(param): param for param in module._parameters.values() if param is not None}


def _full(module: nn.Module, local: str) -> str:
    name: str = module.__dict__["tp_name"]
    return f"{name}.{local}".lstrip(".")


def _draws(module: nn.Module) -> bool:
    """Returns whether the module has parameters or buffers that it draws itself."""
    names = [local for local, param in module._parameters.items() if param is not None]
    if isinstance(module, ParametrizationList):
        return False  # its module draws what is parametrized
    if isinstance(module, ParallelModule):
        if added := sorted(set(names) - set(module._inits)):
            raise ValueError(
                f"module: {_full(module, added[0])!r} has no initialiser; add it to {type(module).__name__} by "
                "add_parameter()"
            )
        return bool(module._inits)
    if callable(getattr(module, "reset_parameters", None)) or callable(getattr(module, "_reset_parameters", None)):
        return bool(names or module._buffers)
    if names:
        raise ValueError(
            f"module: {_full(module, names[0])!r} belongs to a {type(module).__name__}, which must have "
            "reset_parameters()"
        )
    return False


def _reset_by(module: Any, seed: int, drawn: dict[int, Tensor]) -> None:
    """Calls ``reset_parameters`` of a module that is not ours, and leaves what is ``drawn`` already."""
    params = {local: param for local, param in module._parameters.items() if param is not None}
    # A weight that is tied to a layer's was drawn as that layer's, and reset_parameters draws all of them
    kept = {local: param.detach().clone() for local, param in params.items() if id(param) in drawn}
    for local, param in params.items():
        if isinstance(param, DTensor):  # drawn in full, as in one process; of that this rank keeps its slice
            module._parameters[local] = nn.Parameter(torch.empty(param.shape, dtype=param.dtype, device=param.device))
    tensors = [*params.values(), *(b for b in module._buffers.values() if b is not None)]
    device = tensors[0].device if tensors else torch.device("cpu")
    try:
        with OwnRandomNumbers(0, device, seed):
            (getattr(module, "reset_parameters", None) or module._reset_parameters)()
        full = {local: param.detach() for local, param in module._parameters.items() if param is not None}
    finally:
        # Also after an error, which must not leave full tensors in the place of FSDP2's
        module._parameters.update(params)
    for local, param in params.items():
        if local in kept:
            param.copy_(kept[local])
        elif isinstance(param, DTensor):
            # Every rank has drawn the same full tensor, so nothing is sent
            part = distribute_tensor(full[local], param.device_mesh, param.placements, src_data_rank=None)
            param.to_local().copy_(part.to_local())
