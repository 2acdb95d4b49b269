"""Base class of all layers: holds the group, the parameters' shardings and their initialisers."""

import copy
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils import parametrize

from tp_ext import _ops
from tp_ext._checks import check_flag, check_int, warn_caller
from tp_ext.group import Group, ParallelGroup, check_place, layer_group, parallel_group
from tp_ext.invariance import block_sizes, blocks_in_shares, check_ranks, current_blocks, refuse_in_blocks
from tp_ext.mesh import DataAxes
from tp_ext.model.carriers import Carriers
from tp_ext.model.layer_shares import FirstCall, check_activations, meet_once, take_shares
from tp_ext.model.layouts import ShardingView, carry_attributes, hooks_of, mirror_layouts
from tp_ext.random import Init, follows_first, initialise_
from tp_ext.sharding import CopiedRows, Layout, Part, Sharding, split_sizes
from tp_ext.share_sizes import Weights


class ParallelModule(nn.Module):
    """A module some of whose parameters are shards: the base class of all layers, and of layers of your own.

    A subclass registers its parameters by :meth:`add_parameter`, given full shapes and shardings; in ``forward`` it
    reads them by :meth:`parameter`, never as ``self.weight``, and communicates by the regions
    (:mod:`tp_ext.regions`)::

        class Scale(tp_ext.ParallelModule):
            def __init__(self, features, *, group, sequence_parallel=False):
                super().__init__(group, sequence_parallel=sequence_parallel)
                self.add_parameter("weight", (features,), Constant(1.0))  # replicated; initialisers: tp_ext.random

            def forward(self, x):
                return x * self.parameter("weight")  # complete gradient, also under sequence parallelism

    Then initialisation that does not depend on p, state dicts, checkpoints, gradient norms, FSDP2 and
    ``tp_ext.debug.check`` work as for the layers of this package. ``docs/develop/add_a_layer.md`` has an example with
    its test.

    To be called by a subclass:
        :meth:`add_parameter`, :meth:`parameter`; :meth:`token_sizes`, this rank's tokens under sequence parallelism if
        p does not divide them; :meth:`copy_shards`, for a constructor from an unsharded module; :meth:`parallel_repr`,
        for ``extra_repr``; :meth:`local_shape` and :meth:`has_padding`, about one parameter.

    To be overridden:
        :meth:`after_init`, which modifies what an initialiser has drawn, such as a row of zeros. Not
        :meth:`reset_parameters`: it draws every parameter anew by its initialiser.

    Args:
        group: process group, 1-D mesh, group name or None (unsharded).
        sequence_parallel: activations outside the block are sharded on dim 0 (tokens).
        weight_group: the ranks over which parameters are sharded once more, along another dim where they have one;
            they have different rows of a batch. :meth:`parameter` all-gathers a parameter for use, and backward
            reduce-scatters its gradient, the sum over the ranks. Default: None, not sharded again.
        activations: ``"replicated"`` or ``"hidden"``: activations outside the block are sharded over ``group`` on
            their last dim, the hidden features.

    Attributes:
        tp_group: name, size p and rank in the group.
        weight_group: the same of the group over which the parameters are sharded once more.
        tp_layouts: local parameter name -> :class:`Layout`. This table, never an attribute of a parameter
            (``deepcopy``, ``to_empty`` and FSDP2 lose those), defines how a parameter is sharded; ``param.tp_layout``
            mirrors it for users.
        sequence_parallel: activations outside the block are sharded on dim 0 (tokens).
        expert_group: of a layer whose parameters are sharded over a group of data ranks: that group; None: of others.
        tp_name: the name in the unsharded model, by :func:`tp_ext.name_modules`; None before.
        invariant_blocks: the number of blocks of :func:`tp_ext.tp_invariant` in which the module was built; None: built
            outside of it.
        shares: the weights of :func:`tp_ext.shares` in which the module was built; None: built outside of it, or over a
            group of one rank.
        output_is_partial: the output is a partial sum, which another module sums; ``tp_ext.verify`` then compares sums.
        tied: names of parameters that were replaced by another layer's, as in ``head.weight = embedding.weight``;
            ``tp_ext.debug.check`` reports those that are no longer tied.
    """

    output_is_partial: bool = False
    has_blocks: bool = False  # whether the class has a form with the same bits for every p
    shares: Weights | None = None
    _compiled_call_impl: Any = FirstCall()
    token_shares: Weights | None = None  # by which tokens are cut under sequence parallelism
    tp_name: str | None = None
    expert_group: ParallelGroup | None = None
    _name_number: int | None = None
    _name_key: Tensor | None = None  # the number; in traced code an input, so that modules share the code
    operator_gathers: tuple[str, ...] = ()  # parameters that an operator gathers over weight_group itself
    reshard_after_forward: bool = True  # whether that operator gathers them again in backward

    def __init__(
        self,
        group: Group,
        *,
        sequence_parallel: bool = False,
        weight_group: Group = None,
        activations: str = "replicated",
    ) -> None:
        super().__init__()
        check_flag(sequence_parallel=sequence_parallel)
        check_activations(activations, sequence_parallel)
        self.tp_group = layer_group(group, type(self).__name__)
        self.weight_group = parallel_group(weight_group)
        if self.weight_group.size > 1 and self.weight_group.name == self.tp_group.name:
            raise ValueError(f"weight_group: {weight_group!r} must be another group than group")
        take_shares(self, activations)
        blocks = current_blocks()
        self.invariant_blocks = None if blocks is None else blocks_in_shares(blocks, self.shares)
        if self.invariant_blocks is not None:
            self._check_blocks(self.invariant_blocks, activations)
        self.activations = activations
        self.tp_layouts: dict[str, Layout] = {}
        self.sequence_parallel = sequence_parallel
        self._inits: dict[str, tuple[torch.Size, Init]] = {}
        self._copied: dict[str, CopiedRows] = {}  # by parameter with rows that other ranks hold, too
        self._gathered: dict[str, tuple[int, list[int]]] = {}  # dim and lengths over weight_group
        self.tied: set[str] = set()
        self._coalesced: dict[str, Tensor] = {}  # coalesce_gradients', during a forward: from the region that sums

    def _check_blocks(self, blocks: int, activations: str) -> None:
        if not self.has_blocks:
            raise ValueError(
                f"{type(self).__name__}: must not be built in tp_invariant: it has no form with the same bits for "
                "every number of ranks"
            )
        check_ranks(blocks, self.tp_group.size)
        weight_group = self.weight_group.size > 1 and self.weight_group.torch_name
        refuse_in_blocks(blocks, weight_group=weight_group, activations=activations == "hidden" and activations)

    @property
    def float8(self) -> Any:
        """The recipe of a linear or of experts that multiply in 8-bit floating point; None of others."""
        return getattr(self.__dict__.get("form"), "recipe", None)

    def add_parameter(
        self,
        name: str,
        full_shape: tuple[int, ...],
        init: Init,
        *,
        sharding: Sharding | Layout | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Registers this rank's shard of a parameter of ``full_shape``, initialised by ``init``.

        Args:
            sharding: over the layer's group, or a :class:`Layout` over any groups; None: replicated.

        Raises:
            ValueError: a shape that is not that of the sharding; parts with copies over another group than the layer's,
                or in a dim that is sharded twice: the layer sums the gradients of copied rows over its group.
        """
        shape = torch.Size(full_shape)
        if sharding is not None and not isinstance(sharding, Layout):
            sharding = Layout((sharding.in_shares(self.shares), self.tp_group))
        layout = sharding or Layout()
        copied = self._copied_rows_of(name, layout)
        if self.weight_group.size > 1:
            layout = sharded_again(layout, shape, self.weight_group)
            again = layout[-1][0]
            self._gathered[name] = again.dim, again.local_sizes(self.weight_group.size)
        local = layout.local_shape(shape)
        self.register_parameter(name, nn.Parameter(torch.empty(local, device=device, dtype=dtype)))
        self.tp_layouts[name] = layout
        self._inits[name] = (shape, init)
        if copied is not None:
            self._copied[name] = copied
        self.reset_parameter(name)

    def _copied_rows_of(self, name: str, layout: Layout) -> CopiedRows | None:
        """Returns the rows of a parameter of this layout that other ranks hold, too."""
        for sharding, group in layout:
            copied = sharding.copied_rows(group.rank, group.size) if group.size > 1 else None
            if copied is not None:
                alone = [other.dim for other, _ in layout].count(sharding.dim) == 1
                if group.name != self.tp_group.name or not alone:
                    raise ValueError(f"sharding: {name!r} has {layout}; copies must be over the layer's group, alone")
                return copied
        return None

    @property
    def tp_shardings(self) -> "ShardingView":
        """Deprecated, see ``tp_layouts``: local parameter name -> the first :class:`Sharding` of its layout, None for a
        replicated one; assigning one makes it the layout, over the layer's group."""
        warn_caller("tp_shardings: deprecated, take tp_layouts, which name their groups", DeprecationWarning)
        return ShardingView(self.tp_layouts, self.tp_group)

    @tp_shardings.setter
    def tp_shardings(self, shardings: Mapping[str, Sharding | None]) -> None:
        self.tp_layouts.clear()
        self.tp_shardings.update(shardings)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        registered = self._parameters.get(name)  # None while a parametrization is registered or removed
        # Only a parameter of another layer has a layout already: the two are tied
        if registered is not None and registered is not param and hasattr(param, "tp_layout"):
            self.tied.add(name)
        Carriers.changes += 1
        super().register_parameter(name, param)

    def reset_parameters(self) -> None:
        """Draws all parameters of this module anew, as after ``to_empty``; the values do not depend on p."""
        for name in self._inits:
            self.reset_parameter(name)

    @torch.no_grad()
    def reset_parameter(self, name: str, seed: int | None = None) -> None:
        """Draws one parameter anew, from a ``seed`` of its own or from torch's default generator."""
        param = getattr(self, name)
        shape, init = self._inits[name]
        computed = parametrize.is_parametrized(self, name)  # the assignment below calls right_inverse
        # FSDP2 holds a slice of this rank's shard: draw the whole shard, keep that slice
        temporary = computed or isinstance(param, DTensor)
        whole = torch.empty(param.shape, dtype=param.dtype, device=param.device) if temporary else param
        layout = self.tp_layouts[name]
        groups = dict.fromkeys([self.tp_group, self.weight_group, *(group for _, group in layout)])
        if follows_first(whole, init, seed):
            meet_once(self)
        initialise_(whole, init, layout, shape, seed=seed, groups=groups)
        self.after_init(name, whole)
        if computed:
            setattr(self, name, whole)
        elif isinstance(param, DTensor) and not param.is_meta:
            drawn = distribute_tensor(whole, param.device_mesh, param.placements, src_data_rank=None)
            param.to_local().copy_(drawn.to_local())
        mirror_layouts(self)

    def after_init(self, name: str, shard: Tensor) -> None:
        """Modifies the shard that ``init`` has just drawn. A hook for layers; does nothing here."""

    @torch.no_grad()
    def copy_shards(self, dense: nn.Module) -> None:
        """Copies this rank's shard, ``requires_grad`` and the attributes of each parameter of ``dense``, which has the
        full parameters under the same names.

        Raises:
            ValueError: one has hooks on its gradient.
        """
        for name, full in dense.named_parameters():
            if name not in self._parameters:
                raise ValueError(f"{name}: is no parameter of {type(self).__name__}")
            if problem := hooks_of(full):
                raise ValueError(f"{name}: {problem}")
            local = getattr(self, name)
            local.copy_(self.tp_layouts[name].shard(full))
            local.requires_grad_(full.requires_grad)
            carry_attributes(local, full, self.tp_layouts[name])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # Parameters may be new ones, without the attributes of the old ones
        super()._apply(fn, recurse)
        mirror_layouts(self)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        for key, value in self.__dict__.items():
            copied.__dict__[key] = copy.deepcopy(value, memo)
        # Copies of parameters have lost their attributes
        mirror_layouts(copied)
        return copied

    def local_shape(self, name: str) -> torch.Size:
        """Returns the shape of this rank's shard of the parameter."""
        return self.tp_layouts[name].local_shape(self._inits[name][0])

    def has_full_shape(self, name: str) -> bool:
        """Returns whether the layer knows the full shape; not of what another parameter was converted to."""
        return name in self._inits

    def has_padding(self, name: str) -> bool:
        """Returns whether shards of the parameter hold padding, which the full parameter does not have."""
        return self.tp_layouts[name].has_padding

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # In another job, or on another rank, the shard would be taken for that of the rank that loads it
        for group in {
            self.tp_group,
            self.weight_group,
            *(group for layout in self.tp_layouts.values() for _, group in layout),
        }:
            check_place(group)
        mirror_layouts(self)

    def parameter(self, name: str, given: Tensor | None = None, *, operator_sums: bool = False) -> Any:
        """Returns the parameter as ``forward`` has to use it: its gradient will be complete on every rank.

        The value is always ``getattr(self, name)``. What autograd does with its gradient depends on the
        parameter:

        ======================================  ========================================================
        parameter                               gradient
        ======================================  ========================================================
        sharded                                 this rank's, which is complete
        sharded, with rows that other ranks     of those rows, the sum over the ranks that hold them
        hold, too (KV replicas)
        replicated                              this rank's, which counts all tokens
        replicated, under sequence parallelism  the sum over the ranks, each of which has its own tokens
        ======================================  ========================================================

        A sum costs one collective in backward, unless :func:`tp_ext.coalesce_gradients` makes one of all those of a
        block. A parametrized parameter (``torch.nn.utils.parametrize``, pruning) is computed here.

        Args:
            name: of a parameter of this layer.
            given: used in place of the layer's own parameter, of the same local shape; None: that one.
            operator_sums: the operator that uses the parameter sums its gradient itself unless it is coalesced
                (:meth:`is_coalesced`), as ``row_parallel_linear`` does for the bias. It is returned as it is.

        Returns:
            A tensor; None if the parameter was registered as None (``bias=False``).
        """
        attributes = self.__dict__  # faster: nn.Module finds parameters only after a failed look-up of everything else
        if given is None:
            if name in attributes["_coalesced"]:
                return attributes["_coalesced"][name]
            parameters = attributes["_parameters"]
            given = parameters[name] if name in parameters else getattr(self, name)
        if given is None or operator_sums:
            return given
        group = attributes["tp_group"]
        if attributes["_gathered"]:
            given = self._all_gathered(name, given)
        if name in attributes["_copied"]:
            return _ops.copy_replicas_to_region(self._entering(name, given), group.name, *attributes["_copied"][name])
        if attributes["sequence_parallel"] and group.size > 1 and self._replicated(name):
            # A layer built in blocks sums the gradient over its tokens' blocks itself
            if attributes["invariant_blocks"] is not None:
                return given
            return _ops.copy_to_region(given, group.name)
        return given

    def _replicated(self, name: str) -> bool:
        """Returns whether all ranks of the layer's group hold the same shard of the parameter."""
        # len, since torch.compile of torch 2.11 takes an empty Layout for true
        return len(self.tp_layouts.get(name, ())) == (name in self._gathered)

    def _all_gathered(self, name: str, value: Tensor) -> Tensor:
        """Returns a shard all-gathered over ``weight_group``, unless the operator does it."""
        if name not in self._gathered or name in self.operator_gathers:
            return value
        dim, sizes = self._gathered[name]
        return _ops.all_gather_region(value, self.weight_group.name, dim, sizes)

    def is_coalesced(self, name: str) -> bool:
        """Returns whether, in this call, :func:`tp_ext.coalesce_gradients` sums the gradient of the layer's own
        parameter ``name``."""
        return name in self._coalesced

    def _entering(self, name: str, value: Tensor) -> Tensor:
        """Returns ``value`` as it enters the region that sums its gradient. A hook for layers."""
        return value

    def summed_parameters(self) -> dict[str, list[int]]:
        """Returns the parameters whose gradients the layer sums over all ranks, or over holders of copies: by name the
        rows to sum, as ``copy_to_region_coalesced`` takes them; [0] for all rows."""
        if self.tp_group.size == 1:
            return {}
        replicated = [name for name in self.tp_layouts if self._replicated(name)]
        summed = {name: [0] for name in replicated if self.sequence_parallel}
        for name, (starts, lengths, full_starts, full_size) in self._copied.items():
            rows = [n for row in zip(starts, lengths, full_starts, strict=True) for n in row]
            summed[name] = [len(lengths), full_size, *rows]
        return summed

    def entering_parameter(self, name: str) -> Tensor | None:
        """Returns the parameter as it enters the region that sums its gradient, for ``coalesce_gradients``."""
        value = getattr(self, name)
        return None if value is None else self._entering(name, self._all_gathered(name, value))

    def token_sizes(
        self, total_tokens: int | None, local: Tensor | None = None, whole: Tensor | None = None
    ) -> list[int] | None:
        """Returns each rank's number of tokens; None (equal on all ranks) if ``total_tokens`` is not given. Dim 0 of
        ``local`` must have this rank's tokens, that of ``whole`` all of them."""
        if not self.sequence_parallel or self.tp_group.size == 1:
            return None
        p, blocks = self.tp_group.size, self.invariant_blocks
        if total_tokens is None:
            if self.token_shares is not None and whole is None:
                raise ValueError(
                    f"total_tokens: None must be the number of tokens of all ranks, which have shares {self.shares}"
                )
            if blocks is None and self.token_shares is None:
                return None
            # The lengths of blocks are equal only if the number of tokens is a multiple of p
            length = next((len(x) for x in (whole, local) if x is not None and x.dim()), 0)
            total_tokens = length if whole is not None else length * p
        check_int(least=0, total_tokens=total_tokens)
        if blocks is None:
            sizes = split_sizes(total_tokens, p, self.token_shares)
        else:
            sizes = block_sizes(total_tokens, blocks, p)
        if local is not None and local.dim() and local.shape[0] != sizes[self.tp_group.rank]:
            raise ValueError(
                f"total_tokens: {total_tokens} gives the ranks {sizes}, this one {sizes[self.tp_group.rank]}, and dim "
                f"0 of its input has {local.shape[0]}"
            )
        if whole is not None and whole.dim() and whole.shape[0] != total_tokens:
            raise ValueError(f"total_tokens: {total_tokens} must be the length of dim 0 of the input, {whole.shape[0]}")
        return sizes

    def parallel_repr(self) -> str:
        """Returns the text about the shard for ``extra_repr``."""
        sp = ", sequence_parallel=True" if self.sequence_parallel else ""
        hidden = ", activations='hidden'" if self.activations == "hidden" else ""
        again = f", weight_ranks={self.weight_group.size}" if self.weight_group.size > 1 else ""
        again += "" if self.shares is None else f", shares={self.shares}"
        return f"p={self.tp_group.size}, rank={self.tp_group.rank}{sp}{hidden}{again}"


class LayerOverData(ParallelModule):
    """The base of a layer that routes the tokens of all data ranks to experts.

    Attributes:
        data_ranks: the axes of the ranks that have other tokens of the batch.
        needs_data_ranks: whether forward computes something from the tokens of all of them.
        gradient_reduction: how data parallelism combines the gradients of ranks, ``"mean"`` or ``"sum"``.
        attach_loss: None, or the factor of the layer's own losses whose gradient backward adds.
    """

    data_ranks: DataAxes
    needs_data_ranks: bool
    gradient_reduction: str
    attach_loss: float | None


def sharded_again(layout: Layout, shape: torch.Size, group: ParallelGroup) -> Layout:
    """Returns the layout with one more entry: along the first dim that no other entry shards, or that of the first,
    over ``group``."""
    from_end = bool(layout) and layout[0][0].dim < 0
    dims = range(-len(shape), 0) if from_end else range(len(shape))
    taken = [sharding.dim for sharding, _ in layout]
    dim = next((dim for dim in dims if dim not in taken), dims[0])
    return Layout(*layout, (Sharding(dim, (Part(layout.local_shape(shape)[dim]),)), group))
