"""Resolution of fully qualified names: the module that owns a parameter, through any wrappers, and its sharding."""

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tp_ext.nn.module import ParallelModule
from tp_ext.sharding import Sharding


def shardings(model: nn.Module) -> Iterator[tuple[str, Sharding | None]]:
    """Yields (name, sharding) of every parameter of the model, named as in ``named_parameters()``; None: replicated.

    Raises:
        ValueError: see :func:`resolve_fqn`.
    """
    for name, _ in model.named_parameters():
        yield name, resolve_fqn(model, name).sharding


def sharding_of(module: nn.Module, name: str) -> Sharding | None:
    """Returns the sharding of the module's own parameter or buffer ``name``; None: replicated.

    The tensors by which ``torch.nn.utils.prune`` replaces it (``weight_orig``, ``weight_mask``) are sharded alike.
    """
    table: dict[str, Sharding | None] = getattr(module, "tp_shardings", {})
    return table.get(name, table.get(name.removesuffix("_orig").removesuffix("_mask")))


class ResolvedParameter(NamedTuple):
    """The owner and the sharding of a state-dict entry.

    Attributes:
        name: its key in the unsharded model, without the prefixes that wrappers add.
        owner: the module that holds it.
        local: its name in ``owner``.
        sharding: its sharding; None means replicated.
    """

    name: str
    owner: nn.Module
    local: str
    sharding: Sharding | None


_CHECKPOINTED = "_checkpoint_wrapped_module"  # torch's CheckpointWrapper takes it out of the keys, not out of the names
_WRAPPED = ("_orig_mod", _CHECKPOINTED)  # by torch.compile, by CheckpointWrapper


def resolve_fqn(model: nn.Module, key: str) -> ResolvedParameter:
    """Resolves the parameter, buffer or state-dict entry ``key`` of the model, through DDP, ``torch.compile`` and
    checkpoint wrappers.

    The tensors by which a parametrization (``torch.nn.utils.parametrize``) replaces a sharded tensor are sharded like
    that tensor if they have its number of elements in the sharded dim. Single numbers that are not trained are
    replicated.

    Raises:
        ValueError: at p > 1, a parametrization of a sharded tensor that does not act on each shard alone: torch's
            ``orthogonal`` and ``spectral_norm``, or one that stores another kind of tensor. Of a norm over the sharded
            dim, for instance, each rank would have another value; the gradient of a trained number would not be
            summed over the ranks.
    """
    *path, local = key.split(".")
    owner, names = model, []
    parametrized: tuple[nn.Module, str] | None = None
    for step, part in enumerate(path):
        if _CHECKPOINTED in owner._modules and part != _CHECKPOINTED:
            owner = owner.get_submodule(_CHECKPOINTED)
        if part not in _WRAPPED and not (part == "module" and isinstance(owner, DistributedDataParallel)):
            names.append(part)
        if part == "parametrizations" and step + 1 < len(path):
            parametrized = owner, path[step + 1]
        owner = owner.get_submodule(part)
    if _CHECKPOINTED in owner._modules:
        owner = owner.get_submodule(_CHECKPOINTED)
    if parametrized is None:
        sharding = sharding_of(owner, local)
    else:
        sharding = _sharding_of_parametrization(key, *parametrized, owner, local)
    return ResolvedParameter(".".join([*names, local]), owner, local, sharding)


_OF_THE_WHOLE = {"_SpectralNorm", "_Orthogonal"}  # torch.nn.utils.parametrizations, of the whole matrix


def _sharding_of_parametrization(
    key: str, module: nn.Module, name: str, owner: nn.Module, local: str
) -> Sharding | None:
    """Returns the sharding of the tensor ``local`` of ``owner``, which is the parametrization of the tensor ``name`` of
    ``module`` or a submodule of it; see :func:`resolve_fqn`."""
    sharding, value = sharding_of(module, name), getattr(owner, local, None)
    if sharding is None or not isinstance(module, ParallelModule) or not isinstance(value, Tensor):
        return sharding
    _, p, _ = module.tp_group
    made_by = module.get_submodule(f"parametrizations.{name}")
    if p > 1 and (whole := _OF_THE_WHOLE.intersection(type(m).__name__ for m in made_by.children())):
        raise ValueError(f"module: {key!r}: {min(whole)} must see all of {name}, of which a rank has a shard, p = {p}")
    if owner is made_by and local == "original":
        return sharding
    lengths = sharding.local_sizes(p)
    dims = len(module.local_shape(name))
    # A length of 1 is ambiguous: a norm over the sharded dim has it too
    if value.dim() == dims and value.shape[sharding.dim] in lengths and (p == 1 or min(lengths) > 1):
        return sharding
    if p == 1 or (value.numel() == 1 and local not in owner._parameters):
        return None
    raise ValueError(
        f"module: {key!r}: shape {tuple(value.shape)} must have the {lengths} elements of {name} on the ranks in dim "
        f"{sharding.dim}, which is sharded, p = {p}: this parametrization is not one of each shard on its own"
    )
