"""Gradient norms of torch, over shards: those of the unsharded model.

A parameter is found among those of live modules by its identity, and a gradient by the memory of a parameter's
``.grad``, which its ``.data`` and ``.detach()`` share.
"""

import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from torch import Tensor

from tp_ext.model.carriers import Carriers
from tp_ext.outside.live_shards import Replaced, layouts_by_id, live_shards, memory_of, unlisted_shards
from tp_ext.parallel.grad_norm import GradientRow, gradient_terms, local_gradient, norm_of_rows
from tp_ext.sharding import Layout

_REPLICATED = Layout()


class _Unsharded:
    """Lists of parameters, by their ids, none of which is a shard: a model that is not sharded must not pay for all
    shards of the process in each step. An entry goes when one of its parameters does, all when a module got a tensor.

    Attributes:
        lists: the ids -> weak references, which remove the entry.
        changes: :attr:`Carriers.changes` at the time.
    """

    lists: ClassVar[dict[tuple[int, ...], list[Any]]] = {}
    changes: ClassVar[int] = 0

    @classmethod
    def add(cls, ids: tuple[int, ...], params: Iterable[Tensor], changes: int) -> None:
        """Adds a list; removes all others if modules have changed."""
        if changes != cls.changes:
            cls.lists.clear()
            cls.changes = changes
        cls.lists[ids] = [weakref.ref(param, lambda _: cls.lists.pop(ids, None)) for param in params]


class _Here(threading.local):
    """A flag of each thread, set while torch clips parameters without shards. ``get_total_norm``, which torch
    calls inside, then need not look for shards again."""

    unsharded = False


_here = _Here()


def clip_grad_norm_(
    torchs: Callable[..., Tensor],
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Clips by the norm of the unsharded model if one of the parameters is a shard, or has blocks of
    :func:`tp_ext.tp_invariant`, whose norm has the same bits for every number of ranks; else as torch.

    Communicates and raises as :func:`tp_ext.clip_grad_norm_`. What is no shard counts once.
    """
    params: Any = parameters
    listed: Any = parameters
    if type(parameters) is not list:
        if isinstance(parameters, Tensor):
            listed = [parameters]
        else:
            # An iterator would be used up. Torch warns of an empty generator: it gets that itself
            listed = params = list(parameters) or parameters
    ids = tuple(map(id, listed))
    padded = _counts_padding(norm_type)
    if padded or _Unsharded.changes != Carriers.changes or ids not in _Unsharded.lists:
        Replaced.refuse(listed, "parameters")
        known = layouts_by_id(listed, padded, blocked=True)
        # One shard is enough: then all are counted by our norm, which takes the others once
        unlisted = _unlisted(listed, not known.keys().isdisjoint(ids))
        if unlisted or not known.keys().isdisjoint(ids):
            rows = [(param, known.get(id(param), _REPLICATED), gradient_terms(param)) for param in listed] + unlisted
            return norm_of_rows(rows, norm_type, error_if_nonfinite, foreach, listed=len(listed), max_norm=max_norm)
        _Unsharded.add(ids, listed, Carriers.changes)
    _here.unsharded = True
    try:
        return torchs(params, max_norm, norm_type, error_if_nonfinite, foreach)
    finally:
        _here.unsharded = False


def get_total_norm(
    torchs: Callable[..., Tensor],
    tensors: Tensor | Iterable[Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Computes the norm of the unsharded model if one of the tensors is the gradient of a shard, or of a parameter with
    blocks; else as torch.

    Communicates and raises as :func:`tp_ext.grad_norm`.
    """
    if _here.unsharded:
        return torchs(tensors, norm_type, error_if_nonfinite, foreach)
    listed = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    known: dict[object, GradientRow] = {}
    for param, layout in live_shards(_counts_padding(norm_type), blocked=True):
        for grad in gradient_terms(param):
            if local_gradient(grad).numel():
                known[memory_of(grad)] = param, layout, [grad]
    unlisted = _unlisted(listed, sharded=True)
    keys = [*map(memory_of, listed)] if known or unlisted else []  # an unsharded model pays nothing for it
    # What is empty here has the groups of all shards that are: which of them it belongs to cannot be seen, nor matters
    empty = {memory_of(grad) for param, _, _ in unlisted for grad in gradient_terms(param)}
    if (known.keys() | empty).isdisjoint(keys) and (listed or not unlisted):
        return torchs(listed, norm_type, error_if_nonfinite, foreach)
    rows = [known.get(key, (tensor, _REPLICATED, [tensor])) for key, tensor in zip(keys, listed, strict=True)]
    return norm_of_rows(rows + unlisted, norm_type, error_if_nonfinite, foreach, listed=len(rows))


def _counts_padding(norm_type: float) -> bool:
    """Returns whether zeros, which fill padding, change a norm of this order."""
    return float(norm_type) < 0


def _unlisted(listed: Iterable[Tensor], sharded: bool) -> list[GradientRow]:
    """Returns rows of shards that this rank's list may lack, which add nothing but their groups: on another rank, where
    they are not empty or have a gradient, they may be listed, and its norm is a collective of all ranks."""
    listed = list(listed)
    return [] if listed and not sharded else [(param, layout, []) for param, layout in unlisted_shards(listed)]
