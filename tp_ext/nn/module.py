"""What all layers share: the group, and parameters that know how they are cut."""

import copy
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize

from tp_ext import _ops
from tp_ext.group import NOT_GIVEN, Group, check_place, global_ranks, group_name, layer_group
from tp_ext.random import Init, initialise_
from tp_ext.sharding import Pieces, Sharding, split_sizes


class ParallelModule(nn.Module):
    """A module some of whose parameters are shards.

    Attributes:
        tp_group: name, size p and own rank of the group.
        tp_shardings: local parameter name -> :class:`Sharding`, or None for a replicated one. This, never an attribute
            of a parameter (those get lost in ``deepcopy``, ``to_empty``, FSDP2), says how a parameter is cut;
            ``param.tp_sharding`` mirrors it for people.
        sequence_parallel: activations outside the block are sharded on dim 0 (tokens).
        tied: names of parameters in whose place another layer's was put, as in ``head.weight = embedding.weight``;
            ``tp_ext.debug.check`` tells if they came apart.
    """

    def __init__(self, group: Group, *, sequence_parallel: bool = False) -> None:
        super().__init__()
        check_flags(sequence_parallel=sequence_parallel)
        self.tp_group = layer_group(group, type(self).__name__)
        self.tp_shardings: dict[str, Sharding | None] = {}
        self.sequence_parallel = sequence_parallel
        self._inits: dict[str, tuple[torch.Size, Init]] = {}
        self._copied: dict[str, Pieces] = {}  # of the parameters that have rows which other ranks hold too
        self.tied: set[str] = set()
        self.entered: dict[str, Tensor] = {}  # parameters that coalesce_gradients will sum, during a forward

    def add_parameter(
        self,
        name: str,
        full_shape: tuple[int, ...],
        init: Init,
        *,
        sharding: Sharding | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Registers the own shard of a parameter of ``full_shape``, initialised by ``init``."""
        _, p, rank = self.tp_group
        shape = torch.Size(full_shape)
        local = shape if sharding is None else sharding.local_shape(shape, rank, p)
        self.register_parameter(name, nn.Parameter(torch.empty(local, device=device, dtype=dtype)))
        self.tp_shardings[name] = sharding
        self._inits[name] = (shape, init)
        pieces = sharding.copied_pieces(rank, p) if sharding is not None and p > 1 else None
        if pieces is not None:
            self._copied[name] = pieces
        self._reset(name)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        own = self._parameters.get(name)  # None while a parametrization is put on or taken off
        if own is not None and own is not param and hasattr(param, "tp_sharding"):
            self.tied.add(name)
        super().register_parameter(name, param)

    def reset_parameters(self) -> None:
        """Draws all parameters of this module anew; after ``to_empty``, say. The same for every p."""
        for name in self._inits:
            self._reset(name)

    @torch.no_grad()
    def _reset(self, name: str) -> None:
        param = getattr(self, name)
        shape, init = self._inits[name]
        _, p, rank = self.tp_group
        computed = parametrize.is_parametrized(self, name)  # from what the assignment below inverts
        dealt = isinstance(param, DTensor)  # by FSDP2: a slice of the shard, that of what the shard would be
        whole = torch.empty(param.shape, dtype=param.dtype, device=param.device) if computed or dealt else param
        initialise_(whole, init, self.tp_shardings[name], shape, rank, p)
        self.after_init(name, whole)
        if computed:
            setattr(self, name, whole)
        elif isinstance(param, DTensor) and not param.is_meta:
            own = distribute_tensor(whole, param.device_mesh, param.placements, src_data_rank=None)
            param.to_local().copy_(own.to_local())
        self.mirror_shardings()

    def after_init(self, name: str, shard: Tensor) -> None:
        """Changes the shard that ``init`` has just drawn. A hook for layers; here it does nothing."""

    @torch.no_grad()
    def copy_shards(self, dense: nn.Module) -> None:
        """Takes this rank's shard of each parameter of ``dense``, which has the full ones under the same names, and its
        ``requires_grad``."""
        _, p, rank = self.tp_group
        for name, full in dense.named_parameters():
            sharding, local = self.tp_shardings[name], getattr(self, name)
            local.copy_(full if sharding is None else sharding.shard(full, rank, p))
            local.requires_grad_(full.requires_grad)

    def mirror_shardings(self) -> None:
        """Sets ``tp_sharding`` on the parameters, for people who look at them."""
        for name, sharding in self.tp_shardings.items():
            param = self._parameters.get(name)  # not getattr, which computes a parametrized one
            if param is not None:
                param.tp_sharding = sharding  # type: ignore[attr-defined]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self.mirror_shardings()
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        for key, value in self.__dict__.items():
            copied.__dict__[key] = copy.deepcopy(value, memo)
        copied.mirror_shardings()
        return copied

    def local_shape(self, name: str) -> torch.Size:
        """Shape of this rank's shard of the parameter."""
        shape, sharding = self._inits[name][0], self.tp_shardings[name]
        return shape if sharding is None else sharding.local_shape(shape, self.tp_group.rank, self.tp_group.size)

    def has_padding(self, name: str) -> bool:
        """Whether shards of the parameter hold elements that the full one has not."""
        sharding = self.tp_shardings[name]
        return sharding is not None and any(part.padding for part in sharding.parts)

    def parameter_of_call(self, name: str) -> Tensor | None:
        """``getattr(self, name)``, in half the time for a parameter that nothing computes, as a parametrization does:
        ``nn.Module`` finds those only after a failed look-up of everything else."""
        own = self._parameters
        return own[name] if name in own else getattr(self, name)

    def sharded_parameter(self, name: str) -> Tensor | None:
        """The parameter as sharded work uses it: the gradient of rows that other ranks hold too is summed over them."""
        if name in self.entered:
            return self.entered[name]
        param = self.parameter_of_call(name)
        return param if param is None or name not in self._copied else self.summed_over_copies(name, param)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        check_place(self.tp_group)

    def summed_over_copies(self, name: str, value: Tensor) -> Tensor:
        """``value`` in place of the parameter, some rows of which other ranks hold too: their gradients are summed."""
        return _ops.copy_pieces_to_region(value, self.tp_group.name, *self._copied[name])

    def replicated_parameter(self, name: str) -> Tensor | None:
        """The parameter as sharded tokens use it: under sequence parallelism its gradient is summed over the ranks."""
        if name in self.entered:
            return self.entered[name]
        param = self.parameter_of_call(name)
        if param is None or not self.sequence_parallel or self.tp_group.size == 1:
            return param
        return _ops.copy_to_region(param, self.tp_group.name)

    def summed_parameters(self) -> list[str]:
        """Names of the parameters whose gradients the layer sums over the ranks, or over those that hold copies."""
        if self.tp_group.size == 1:
            return []
        whole = [n for n, sharding in self.tp_shardings.items() if sharding is None and self.sequence_parallel]
        return whole + list(self._copied)

    def entering_parameter(self, name: str) -> Tensor | None:
        """The parameter before the region that sums its gradient."""
        param: Tensor | None = getattr(self, name)
        return param

    def copied_rows(self, name: str) -> list[int]:
        """Which rows of the parameter are summed, as ``copy_to_region_coalesced`` wants to know: [0] for all."""
        if name not in self._copied:
            return [0]
        starts, lengths, full_starts, full_size = self._copied[name]
        rows = [n for row in zip(starts, lengths, full_starts, strict=True) for n in row]
        return [len(lengths), full_size, *rows]

    def token_sizes(self, total_tokens: int | None) -> list[int] | None:
        """Each rank's tokens of ``total_tokens``; None (all ranks alike) if it is not told."""
        if total_tokens is None or not self.sequence_parallel or self.tp_group.size == 1:
            return None
        if not isinstance(total_tokens, int) or total_tokens < 0:
            raise ValueError(f"total_tokens: {total_tokens!r} must be an integer of at least 0")
        return split_sizes(total_tokens, self.tp_group.size)

    def parallel_repr(self) -> str:
        """For ``extra_repr``: what a reader of ``print(model)`` must know about the shard."""
        sp = ", sequence_parallel=True" if self.sequence_parallel else ""
        return f"p={self.tp_group.size}, rank={self.tp_group.rank}{sp}"


def refuse_group(**values: object) -> None:
    """Raises a TypeError that names the first of ``values`` that is a group, given by position as in Megatron-LM."""
    for name, value in values.items():
        if isinstance(value, ProcessGroup | DeviceMesh):
            raise TypeError(f"{name}: a {type(value).__name__} must not stand here; pass group= by keyword")


def check_positive(**numbers: int) -> None:
    """Raises a ValueError that names the first of ``numbers`` that is not an integer of at least 1."""
    for name, value in numbers.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            refuse_group(**{name: value})
            raise ValueError(f"{name}: {value!r} must be an integer of at least 1")


def check_flags(**flags: bool) -> None:
    """Raises a TypeError that names the first of ``flags`` that is not True or False, or 1 or 0."""
    for name, value in flags.items():
        if not isinstance(value, int) or value not in (0, 1):  # a bool is an int
            refuse_group(**{name: value})
            raise TypeError(f"{name}: {value!r} must be True or False")


def check_epsilon(eps: float) -> None:
    """Raises a TypeError unless ``eps`` is a number."""
    if not isinstance(eps, int | float) or isinstance(eps, bool):
        refuse_group(eps=eps)
        raise TypeError(f"eps: {eps!r} must be a number")


def model_group(model: nn.Module, group: Group = NOT_GIVEN) -> str:
    """Name of the group over which the model is sharded: that of its layers. ``group``, if given, must be the same.

    Raises:
        ValueError: ``group`` has other ranks than the layers' group; or it is not given, and the layers are of several.
        TypeError: ``group`` is none of the accepted kinds.
    """
    layers = [module for module in model.modules() if isinstance(module, ParallelModule)]
    names = dict.fromkeys(layer.tp_group.plain().name for layer in layers if layer.tp_group.size > 1)
    by_ranks = {tuple(global_ranks(name)): name for name in names}
    if group is NOT_GIVEN:
        if len(by_ranks) > 1:
            sizes = sorted(len(ranks) for ranks in by_ranks)
            raise ValueError(
                f"group: must be given, for the layers of the model are of several groups, of {sizes} ranks"
            )
        return next(iter(by_ranks.values()), "")
    given = group_name(group)
    ranks = tuple(global_ranks(given))
    if by_ranks and ranks not in by_ranks:
        theirs = " or ".join(_shown(one) for one in by_ranks)
        raise ValueError(
            f"group: {_shown(ranks)} must be that of the model's layers, {theirs}; without group= it is taken from them"
        )
    if not by_ranks and len(ranks) > 1 and any(s is not None for one in layers for s in one.tp_shardings.values()):
        raise ValueError(f"group: {_shown(ranks)} must be that of the model's layers, which were made without one")
    return given


def _shown(ranks: tuple[int, ...]) -> str:
    if not ranks:
        return "None"
    return f"the group of ranks {list(ranks)}" if len(ranks) <= 16 else f"a group of {len(ranks)} ranks"


def shardings(model: nn.Module) -> Iterator[tuple[str, Sharding | None]]:
    """(name, sharding) of every parameter of the model, named as in ``named_parameters()``; None means replicated.

    Raises:
        ValueError: see :func:`locate`.
    """
    for name, _ in model.named_parameters():
        yield name, locate(model, name).sharding


def sharding_of(module: nn.Module, name: str) -> Sharding | None:
    """How the module's own parameter (or buffer) ``name`` is cut; None means replicated. What ``torch.nn.utils.prune``
    makes of it (``weight_orig``, ``weight_mask``) is cut alike."""
    table: dict[str, Sharding | None] = getattr(module, "tp_shardings", {})
    return table.get(name, table.get(name.removesuffix("_orig").removesuffix("_mask")))


class Place(NamedTuple):
    """Where an entry of a state dict belongs.

    Attributes:
        name: its key in the unsharded model, without what wrappers add.
        owner: the module that holds it.
        local: its name there.
        sharding: how it is cut; None means replicated.
    """

    name: str
    owner: nn.Module
    local: str
    sharding: Sharding | None


_CHECKPOINTED = "_checkpoint_wrapped_module"  # torch's CheckpointWrapper takes it out of the keys, not out of the names
_WRAPPED = ("_orig_mod", _CHECKPOINTED)  # by torch.compile, by CheckpointWrapper


def locate(model: nn.Module, key: str) -> Place:
    """Where the parameter, buffer or state-dict entry ``key`` of the model belongs, through DDP, ``torch.compile`` and
    checkpoint wrappers.

    What a parametrization (``torch.nn.utils.parametrize``) makes a sharded tensor of is cut as that tensor is, where it
    has the tensor's elements in the sharded dim; single numbers that are not trained are replicated.

    Raises:
        ValueError: at p > 1, a parametrization of a sharded tensor that is no function of each shard on its own:
            torch's ``orthogonal`` and ``spectral_norm``, or one that keeps something else, such as a norm over the
            sharded dim, of which each rank would have another, or a trained number, whose gradient nobody would sum.
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
    sharding = sharding_of(owner, local) if parametrized is None else _parametrized(key, *parametrized, owner, local)
    return Place(".".join([*names, local]), owner, local, sharding)


_OF_THE_WHOLE = {"_SpectralNorm", "_Orthogonal"}  # torch.nn.utils.parametrizations, of the whole matrix


def _parametrized(key: str, module: nn.Module, name: str, owner: nn.Module, local: str) -> Sharding | None:
    """How what ``owner``, the parametrization of the tensor ``name`` of ``module`` or a part of it, calls ``local`` is
    cut; see :func:`locate`."""
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
    # A length of 1 tells nothing: a norm over the sharded dim has it too
    if value.dim() == dims and value.shape[sharding.dim] in lengths and (p == 1 or min(lengths) > 1):
        return sharding
    if p == 1 or (value.numel() == 1 and local not in owner._parameters):
        return None
    raise ValueError(
        f"module: {key!r}: shape {tuple(value.shape)} must have the {lengths} elements of {name} on the ranks in dim "
        f"{sharding.dim}, which is sharded, p = {p}: this parametrization is not one of each shard on its own"
    )
