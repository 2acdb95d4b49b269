"""Resolution of fully qualified names: the module that owns a parameter, through any wrappers, and its layout."""

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from tp_ext.group import ALONE, NOT_GIVEN, Group, ParallelGroup, parallel_group
from tp_ext.model.carriers import Carriers, is_sharded
from tp_ext.model.layouts import layouts_of
from tp_ext.model.module import ParallelModule
from tp_ext.model.stages import JoinedStages
from tp_ext.model.tied import copies_in
from tp_ext.sharding import Layout, Sharding


def layouts(model: nn.Module, *, group: Group = NOT_GIVEN) -> Iterator[tuple[str, Layout]]:
    """Yields (name, layout) of every parameter of the model, named as in ``named_parameters()``.

    Args:
        model: any module, wrapped or not.
        group: the group of modules that declare ``tp_shardings`` and have no group of their own.

    Raises:
        ValueError: see :func:`resolve_fqn`.
    """
    over = parallel_group(group)
    for name, _ in model.named_parameters():
        yield name, resolve_fqn(model, name, over).layout


def shardings(model: nn.Module) -> Iterator[tuple[str, Sharding | None]]:
    """Yields (name, sharding) of every parameter of the model, named as in ``named_parameters()``; None: replicated. Of
    a parameter that is sharded over several groups it is the first entry of its layout (:func:`layouts`).

    Raises:
        ValueError: see :func:`resolve_fqn`.
    """
    for name, layout in layouts(model):
        yield name, layout[0][0] if layout else None


def layouts_by_id(params: Iterable[Tensor], padded: bool = False) -> dict[int, Layout]:
    """Returns the layouts of all live shards by the ``id`` of the parameter (:func:`live_shards`), and those that
    ``params`` carry: their module may be gone while an optimizer holds them."""
    carried = {id(param): param.tp_layout for param in params if hasattr(param, "tp_layout")}
    found = {key: layout for key, layout in carried.items() if padded or is_sharded(layout)}
    return found | {id(param): layout for param, layout in live_shards(padded)}


def live_shards(padded: bool = False) -> Iterator[tuple[Tensor, Layout]]:
    """Yields the parameters of live modules that are shards, and their layouts; of what a parametrization or pruning
    computes, the tensors that it is computed from.

    For functions of torch that are given parameters, or an optimizer, and no model. Attributes of a parameter would not
    do: FSDP2, ``deepcopy`` and ``to_empty`` drop them.

    Args:
        padded: those that hold padding, too, at one rank.

    Raises:
        ValueError: see :func:`resolve_fqn`.
    """
    for module in [*Carriers.modules, *(Carriers.padded if padded else ())]:
        params = module._parameters
        for name, layout in layouts_of(module).items():
            if not (padded or is_sharded(layout)):
                continue
            param = params.get(name)
            if param is not None:
                yield param, layout
            elif name not in params:
                for key, stored in module.named_parameters():
                    if key.startswith(f"parametrizations.{name}.") or _unpruned(key) == name:
                        found = resolve_fqn(module, key).layout
                        if padded or is_sharded(found):
                            yield stored, found


def layout_of(module: nn.Module, name: str, group: ParallelGroup = ALONE) -> Layout:
    """Returns the layout of the module's own parameter or buffer ``name``.

    The tensors by which ``torch.nn.utils.prune`` replaces it (``weight_orig``, ``weight_mask``) have the same one. A
    module that is no :class:`ParallelModule` may declare ``tp_shardings`` over ``group`` in place of layouts.
    """
    own = module.__dict__
    if "tp_layouts" in own:
        table: dict[str, Layout] = own["tp_layouts"]
        return table.get(name) or table.get(_unpruned(name)) or Layout()
    if "tp_shardings" in own:
        declared: dict[str, Sharding | None] = own["tp_shardings"]
        sharding = declared.get(name, declared.get(_unpruned(name)))
        return Layout() if sharding is None else Layout((sharding, group))
    return Layout()


def _unpruned(name: str) -> str:
    return name.removesuffix("_orig").removesuffix("_mask")


class ResolvedParameter(NamedTuple):
    """The owner and the layout of a state-dict entry.

    Attributes:
        name: its key in the unsharded model, without the prefixes that wrappers add.
        owner: the module that holds it.
        local: its name in ``owner``.
        layout: its layout.
        copy: whether it is a declared copy of another stage's parameter, and ``name`` that of the original.
    """

    name: str
    owner: nn.Module
    local: str
    layout: Layout
    copy: bool = False


_CHECKPOINTED = "_checkpoint_wrapped_module"  # torch's CheckpointWrapper takes it out of the keys, not out of the names
_WRAPPED = ("_orig_mod", _CHECKPOINTED)  # by torch.compile, by CheckpointWrapper


def resolve_fqn(model: nn.Module, key: str, group: ParallelGroup = ALONE) -> ResolvedParameter:
    """Resolves the parameter, buffer or state-dict entry ``key`` of the model, through DDP, ``torch.compile`` and
    checkpoint wrappers. ``group`` is that of modules that declare ``tp_shardings`` and have no group of their own.

    The tensors by which a parametrization (``torch.nn.utils.parametrize``) replaces a sharded tensor are sharded like
    that tensor if they have its number of elements in the sharded dims. Single numbers that are not trained are
    replicated.

    Raises:
        ValueError: at p > 1, a parametrization of a sharded tensor that does not act on each shard alone: torch's
            ``orthogonal`` and ``spectral_norm``, or one that stores another kind of tensor. Of a norm over the sharded
            dim, for instance, each rank would have another value; the gradient of a trained number would not be
            summed over the ranks.
    """
    *path, local = key.split(".")
    owner, names = model.stage_of(key) if isinstance(model, JoinedStages) else model, []
    parametrized: tuple[nn.Module, str] | None = None
    for step, part in enumerate(path):
        if _CHECKPOINTED in owner._modules and part != _CHECKPOINTED:
            owner = owner.get_submodule(_CHECKPOINTED)
        if part not in _WRAPPED and not (part == "module" and isinstance(owner, DistributedDataParallel)):
            names.append(part)
        if part == "parametrizations" and step + 1 < len(path):
            parametrized = owner, path[step + 1]
        child = owner._modules.get(part)
        owner = owner.get_submodule(part) if child is None else child
    if _CHECKPOINTED in owner._modules:
        owner = owner.get_submodule(_CHECKPOINTED)
    layout = layout_of(owner, local, group)
    if not layout and parametrized is not None:
        layout = _layout_of_parametrization(key, *parametrized, owner, local)
    return ResolvedParameter(".".join([*names, local]), owner, local, layout)


def resolve_optimizer(
    model: nn.Module, optimizer: Optimizer, group: ParallelGroup = ALONE
) -> Iterator[tuple[Tensor, ResolvedParameter, dict[str, Any]]]:
    """Yields the parameters of the optimizer in order, each resolved, with the parameter group that holds it. One that
    has several names is resolved by the first; a declared copy of another stage's (:func:`declare_tied`) has the name
    of the original.

    Raises:
        ValueError: the optimizer holds a parameter that is not the model's; see :func:`resolve_fqn`.
    """
    keys, copies = {param: key for key, param in model.named_parameters()}, copies_in(model)
    for param_group in optimizer.param_groups:
        for param in param_group["params"]:
            if param not in keys:
                raise ValueError(
                    f"optimizer: a parameter of shape {tuple(param.shape)} must be one of the module's; "
                    "under FSDP2 optimizers are made after fully_shard"
                )
            found = resolve_fqn(model, keys[param], group)
            if id(param) in copies:
                found = found._replace(name=copies[id(param)], copy=True)
            yield param, found, param_group


OF_THE_WHOLE = {"_SpectralNorm", "_Orthogonal"}  # torch.nn.utils.parametrizations, of the whole matrix


def _layout_of_parametrization(key: str, module: nn.Module, name: str, owner: nn.Module, local: str) -> Layout:
    """Returns the layout of the tensor ``local`` of ``owner``, which is the parametrization of the tensor ``name`` of
    ``module`` or a submodule of it; see :func:`resolve_fqn`."""
    layout, value = layout_of(module, name), getattr(owner, local, None)
    if not layout or not isinstance(module, ParallelModule) or not isinstance(value, Tensor):
        return layout
    p = math.prod(layout.sizes)
    made_by = module.get_submodule(f"parametrizations.{name}")
    if p > 1 and (whole := OF_THE_WHOLE.intersection(type(m).__name__ for m in made_by.children())):
        raise ValueError(f"module: {key!r}: {min(whole)} must see all of {name}, of which a rank has a shard, p = {p}")
    if owner is made_by and local == "original":
        return layout
    same_dims = value.dim() == len(module.local_shape(name))
    for sharding, group in layout:
        lengths = sharding.local_sizes(group.size)
        # A length of 1 is ambiguous: a norm over the sharded dim has it too
        if same_dims and value.shape[sharding.dim] in lengths and (p == 1 or min(lengths) > 1):
            continue
        if p == 1 or (value.numel() == 1 and local not in owner._parameters):
            return Layout()
        raise ValueError(
            f"module: {key!r}: shape {tuple(value.shape)} must have the {lengths} elements of {name} on the ranks in "
            f"dim {sharding.dim}, which is sharded, p = {group.size}: this parametrization is not one of each shard on "
            "its own"
        )
    return layout
