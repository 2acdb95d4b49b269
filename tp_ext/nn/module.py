"""Base class of all layers: holds the group, the parameters' shardings and their initialisers."""

import copy
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils import parametrize

from tp_ext import _ops
from tp_ext.group import NOT_GIVEN, Group, check_place, global_ranks, group_name, layer_group
from tp_ext.random import Init, initialise_
from tp_ext.sharding import CopiedRows, Sharding, split_sizes


class ParallelModule(nn.Module):
    """A module some of whose parameters are shards.

    Attributes:
        tp_group: name, size p and rank in the group.
        tp_shardings: local parameter name -> :class:`Sharding`, or None for a replicated one. This table, never an
            attribute of a parameter (``deepcopy``, ``to_empty`` and FSDP2 lose those), defines how a parameter is
            sharded; ``param.tp_sharding`` mirrors it for users.
        sequence_parallel: activations outside the block are sharded on dim 0 (tokens).
        tied: names of parameters that were replaced by another layer's, as in ``head.weight = embedding.weight``;
            ``tp_ext.debug.check`` reports those that are no longer tied.
    """

    def __init__(self, group: Group, *, sequence_parallel: bool = False) -> None:
        super().__init__()
        check_flags(sequence_parallel=sequence_parallel)
        self.tp_group = layer_group(group, type(self).__name__)
        self.tp_shardings: dict[str, Sharding | None] = {}
        self.sequence_parallel = sequence_parallel
        self._inits: dict[str, tuple[torch.Size, Init]] = {}
        self._copied: dict[str, CopiedRows] = {}  # by parameter with rows that other ranks hold, too
        self.tied: set[str] = set()
        self.entered: dict[str, Tensor] = {}  # during a forward: parameters that coalesce_gradients sums

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
        """Registers this rank's shard of a parameter of ``full_shape``, initialised by ``init``."""
        _, p, rank = self.tp_group
        shape = torch.Size(full_shape)
        local = shape if sharding is None else sharding.local_shape(shape, rank, p)
        self.register_parameter(name, nn.Parameter(torch.empty(local, device=device, dtype=dtype)))
        self.tp_shardings[name] = sharding
        self._inits[name] = (shape, init)
        copied = sharding.copied_pieces(rank, p) if sharding is not None and p > 1 else None
        if copied is not None:
            self._copied[name] = copied
        self._reset(name)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        own = self._parameters.get(name)  # None while a parametrization is registered or removed
        if own is not None and own is not param and hasattr(param, "tp_sharding"):
            self.tied.add(name)
        super().register_parameter(name, param)

    def reset_parameters(self) -> None:
        """Draws all parameters of this module anew, as after ``to_empty``; the values do not depend on p."""
        for name in self._inits:
            self._reset(name)

    @torch.no_grad()
    def _reset(self, name: str) -> None:
        param = getattr(self, name)
        shape, init = self._inits[name]
        _, p, rank = self.tp_group
        computed = parametrize.is_parametrized(self, name)  # the assignment below calls right_inverse
        # FSDP2 holds a slice of this rank's shard: draw the whole shard, keep that slice
        temporary = computed or isinstance(param, DTensor)
        whole = torch.empty(param.shape, dtype=param.dtype, device=param.device) if temporary else param
        initialise_(whole, init, self.tp_shardings[name], shape, rank, p)
        self.after_init(name, whole)
        if computed:
            setattr(self, name, whole)
        elif isinstance(param, DTensor) and not param.is_meta:
            drawn = distribute_tensor(whole, param.device_mesh, param.placements, src_data_rank=None)
            param.to_local().copy_(drawn.to_local())
        self.mirror_shardings()

    def after_init(self, name: str, shard: Tensor) -> None:
        """Modifies the shard that ``init`` has just drawn. A hook for layers; does nothing here."""

    @torch.no_grad()
    def copy_shards(self, dense: nn.Module) -> None:
        """Copies this rank's shard and ``requires_grad`` of each parameter of ``dense``, which has the full parameters
        under the same names."""
        _, p, rank = self.tp_group
        for name, full in dense.named_parameters():
            sharding, local = self.tp_shardings[name], getattr(self, name)
            local.copy_(full if sharding is None else sharding.shard(full, rank, p))
            local.requires_grad_(full.requires_grad)

    def mirror_shardings(self) -> None:
        """Sets ``tp_sharding`` on the parameters, for users who inspect them."""
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
        """Returns the shape of this rank's shard of the parameter."""
        shape, sharding = self._inits[name][0], self.tp_shardings[name]
        return shape if sharding is None else sharding.local_shape(shape, self.tp_group.rank, self.tp_group.size)

    def has_padding(self, name: str) -> bool:
        """Returns whether shards of the parameter hold padding, which the full parameter does not have."""
        sharding = self.tp_shardings[name]
        return sharding is not None and any(part.padding for part in sharding.parts)

    def parameter_of_call(self, name: str) -> Tensor | None:
        """Returns ``getattr(self, name)``, in half the time for a parameter without parametrization: ``nn.Module``
        finds parameters only after a failed look-up of everything else."""
        own = self._parameters
        return own[name] if name in own else getattr(self, name)

    def sharded_parameter(self, name: str) -> Tensor | None:
        """Returns the parameter for sharded work: gradients of copied rows are summed over the ranks that hold them."""
        if name in self.entered:
            return self.entered[name]
        param = self.parameter_of_call(name)
        return param if param is None or name not in self._copied else self.summed_over_copies(name, param)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        check_place(self.tp_group)

    def summed_over_copies(self, name: str, value: Tensor) -> Tensor:
        """Returns ``value``, used in place of the parameter; gradients of copied rows are summed over their ranks."""
        return _ops.copy_pieces_to_region(value, self.tp_group.name, *self._copied[name])

    def replicated_parameter(self, name: str) -> Tensor | None:
        """Returns the parameter for sharded tokens: under sequence parallelism its gradient is summed over ranks."""
        if name in self.entered:
            return self.entered[name]
        param = self.parameter_of_call(name)
        if param is None or not self.sequence_parallel or self.tp_group.size == 1:
            return param
        return _ops.copy_to_region(param, self.tp_group.name)

    def summed_parameters(self) -> list[str]:
        """Returns the names of parameters whose gradients the layer sums over all ranks, or over holders of copies."""
        if self.tp_group.size == 1:
            return []
        whole = [n for n, sharding in self.tp_shardings.items() if sharding is None and self.sequence_parallel]
        return whole + list(self._copied)

    def entering_parameter(self, name: str) -> Tensor | None:
        """Returns the parameter as it enters the region that sums its gradient."""
        param: Tensor | None = getattr(self, name)
        return param

    def copied_rows(self, name: str) -> list[int]:
        """Returns the rows of the parameter to sum, as ``copy_to_region_coalesced`` takes them: [0] for all."""
        if name not in self._copied:
            return [0]
        starts, lengths, full_starts, full_size = self._copied[name]
        rows = [n for row in zip(starts, lengths, full_starts, strict=True) for n in row]
        return [len(lengths), full_size, *rows]

    def token_sizes(self, total_tokens: int | None) -> list[int] | None:
        """Returns each rank's number of tokens; None (equal on all ranks) if ``total_tokens`` is not given."""
        if total_tokens is None or not self.sequence_parallel or self.tp_group.size == 1:
            return None
        if not isinstance(total_tokens, int) or total_tokens < 0:
            raise ValueError(f"total_tokens: {total_tokens!r} must be an integer of at least 0")
        return split_sizes(total_tokens, self.tp_group.size)

    def parallel_repr(self) -> str:
        """Returns the text about the shard for ``extra_repr``."""
        sp = ", sequence_parallel=True" if self.sequence_parallel else ""
        return f"p={self.tp_group.size}, rank={self.tp_group.rank}{sp}"


def refuse_group(**values: object) -> None:
    """Raises a TypeError that names the first of ``values`` that is a group, passed by position as in Megatron-LM."""
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
    """Returns the name of the group of the model's layers; ``group``, if given, must be the same.

    Raises:
        ValueError: ``group`` has other ranks than the layers' group; or it is not given, and the layers have several.
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
