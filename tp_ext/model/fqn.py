"""Resolution of fully qualified names: the module that holds an entry of a state dict, through any wrappers, and the
layout of the entry."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tp_ext.group import ALONE, ParallelGroup
from tp_ext.model.module import ParallelModule
from tp_ext.model.stages import JoinedStages
from tp_ext.sharding import Layout, Sharding

StateDict = dict[str, Any]


class Entry(NamedTuple):
    """An entry of a model's state dict.

    Attributes:
        name: its key in the unsharded model, without the prefixes that wrappers add.
        owner: the module that holds it.
        local: its name in ``owner``.
        layout: its layout.
        value: the live parameter or buffer; of extra state what ``owner`` returns.
        copy_of: the name of the parameter of another stage that it is a declared copy of; "" if it is none.
    """

    name: str
    owner: nn.Module
    local: str
    layout: Layout
    value: Any = None
    copy_of: str = ""

    @property
    def extra(self) -> bool:
        """True if the entry is the extra state of its module."""
        return self.local == "_extra_state"

    @property
    def shape(self) -> torch.Size:
        """Shape of the full tensor."""
        return self.layout.full_shape(self.value.shape)


class ModulePlace(NamedTuple):
    """A module in a model.

    Attributes:
        module: the module; of a checkpoint wrapper the one inside.
        name: its name in the unsharded model.
        parametrized: the module and the name of its tensor that this module, or one around it, computes.
    """

    module: nn.Module
    name: str
    parametrized: tuple[nn.Module, str] | None


class Places(dict[tuple[nn.Module, str], ModulePlace]):
    """The modules that are known by a root and their path from it."""


_CHECKPOINTED = "_checkpoint_wrapped_module"  # torch's CheckpointWrapper takes it out of the keys, not out of the names
_WRAPPED = ("_orig_mod", _CHECKPOINTED)  # by torch.compile, by CheckpointWrapper


def resolve_fqn(
    model: nn.Module,
    key: str,
    group: ParallelGroup = ALONE,
    places: Places | None = None,
    value: Any = None,
    copy_of: str = "",
) -> Entry:
    """Resolves the parameter, buffer or state-dict entry ``key`` of the model, through DDP, ``torch.compile`` and
    checkpoint wrappers.

    The tensors by which a parametrization (``torch.nn.utils.parametrize``) replaces a sharded tensor are sharded like
    that tensor if they have its number of elements in the sharded dims. Single numbers that are not trained are
    replicated.

    Args:
        group: that of modules that declare ``tp_shardings`` and have no group.
        places: the modules that are known by their paths; those that are found are added.
        value, copy_of: of the entry, where the caller knows them.

    Raises:
        ValueError: at p > 1, a parametrization of a sharded tensor that does not act on each shard alone: torch's
            ``orthogonal`` and ``spectral_norm``, or one that stores another kind of tensor. Of a norm over the sharded
            dim, for instance, each rank would have another value; the gradient of a trained number would not be
            summed over the ranks.
    """
    path, _, local = key.rpartition(".")
    root = model.stage_of(key) if isinstance(model, JoinedStages) else model
    module, name, parametrized = _place_of(root, path, Places() if places is None else places)
    layout = layout_of(module, local, group)
    # A parametrization that declares its layouts knows them
    if not layout and parametrized is not None and "tp_layouts" not in module.__dict__:
        layout = _layout_of_parametrization(key, *parametrized, module, local)
    return Entry(f"{name}.{local}" if name else local, module, local, layout, value, copy_of)


def _place_of(root: nn.Module, path: str, places: Places) -> ModulePlace:
    place = places.get((root, path))
    if place is not None:
        return place
    module, name, parametrized = root, "", None
    if path:
        above, _, part = path.rpartition(".")
        outer, name, parametrized = _place_of(root, above, places)
        if part == _CHECKPOINTED:
            module = outer  # the place above is already the module inside
        else:
            child = outer._modules.get(part)
            module = outer.get_submodule(part) if child is None else child
        if part not in _WRAPPED and not (part == "module" and isinstance(outer, DistributedDataParallel)):
            name = f"{name}.{part}" if name else part
        if above.rpartition(".")[2] == "parametrizations":
            parametrized = _place_of(root, above.rpartition(".")[0], places).module, part
    while _CHECKPOINTED in module._modules:
        module = module.get_submodule(_CHECKPOINTED)
    places[root, path] = place = ModulePlace(module, name, parametrized)
    return place


def layout_of(module: nn.Module, name: str, group: ParallelGroup = ALONE) -> Layout:
    """Returns the layout of the module's own parameter or buffer ``name``.

    The tensors by which ``torch.nn.utils.prune`` replaces it (``weight_orig``, ``weight_mask``) have the same one. A
    module that is no :class:`ParallelModule` may declare ``tp_shardings`` over ``group`` in place of layouts.
    """
    attributes = module.__dict__
    if "tp_layouts" in attributes:
        table: dict[str, Layout] = attributes["tp_layouts"]
        return table.get(name) or table.get(unpruned(name)) or Layout()
    if "tp_shardings" in attributes:
        declared: dict[str, Sharding | None] = attributes["tp_shardings"]
        sharding = declared.get(name, declared.get(unpruned(name)))
        return Layout() if sharding is None else Layout((sharding, group))
    return Layout()


def unpruned(name: str) -> str:
    """Returns the name of the tensor that ``torch.nn.utils.prune`` has replaced by the one of this name."""
    return name.removesuffix("_orig").removesuffix("_mask")


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
    # One tensor that takes the place of the other: its elements are sharded as they were
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
