"""The shards of live modules, for functions of torch that are given parameters, or an optimizer, and no model."""

from collections.abc import Iterable, Iterator
from typing import ClassVar

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from tp_ext.model.carriers import Carriers, is_sharded
from tp_ext.model.fqn import resolve_fqn, unpruned
from tp_ext.model.layouts import layouts_of
from tp_ext.sharding import Layout


class Replaced:
    """Parameters whose place in their model a shard has taken: what was made of them before looks at tensors that no
    forward uses.

    Attributes:
        count: of calls that have added some.
    """

    parameters: ClassVar[WeakTensorKeyDictionary] = WeakTensorKeyDictionary()
    count: ClassVar[int] = 0

    @classmethod
    def add(cls, parameters: Iterable[Tensor]) -> None:
        """Notes parameters that have been replaced."""
        cls.parameters.update(dict.fromkeys(parameters))
        cls.count += 1

    @classmethod
    def refuse(cls, parameters: Iterable[Tensor], what: str) -> None:
        """Raises ValueError if one of the parameters has been replaced."""
        gone = next((param for param in parameters if param in cls.parameters), None)
        if gone is not None:
            raise ValueError(
                f"{what}: a parameter of shape {tuple(gone.shape)} is no longer the model's, which has a shard in its "
                "place since tp_ext.auto.apply: take model.parameters() afterwards"
            )


def layouts_by_id(params: Iterable[Tensor], padded: bool = False, blocked: bool = False) -> dict[int, Layout]:
    """Returns the layouts of all live shards by the ``id`` of the parameter (:func:`live_shards`), and those that
    ``params`` carry: their module may be gone while an optimizer holds them."""
    carried = {id(param): param.tp_layout for param in params if hasattr(param, "tp_layout")}
    layouts = {key: layout for key, layout in carried.items() if padded or _counts(layout, blocked)}
    return layouts | {id(param): layout for param, layout in live_shards(padded, blocked)}


def _counts(layout: Layout, blocked: bool) -> bool:
    return is_sharded(layout) or (blocked and layout.blocks > 0)


def live_shards(padded: bool = False, blocked: bool = False) -> Iterator[tuple[Tensor, Layout]]:
    """Yields the parameters of live modules that are shards, and their layouts; of what a parametrization or pruning
    computes, the tensors that it is computed from.

    Attributes of a parameter would not do: FSDP2, ``deepcopy`` and ``to_empty`` drop them.

    Args:
        padded: those that hold padding, too, at one rank.
        blocked: those that have blocks of :func:`tp_ext.tp_invariant`, too, at one rank.

    Raises:
        ValueError: see :func:`resolve_fqn`.
    """
    at_one_rank = [*(Carriers.padded if padded else ()), *(Carriers.blocked if blocked else ())]
    for module in [*Carriers.modules, *at_one_rank]:
        params = module._parameters
        for name, layout in layouts_of(module).items():
            if not (padded or _counts(layout, blocked)):
                continue
            param = params.get(name)
            if param is not None:
                yield param, layout
            elif name not in params:
                # Computed, by a parametrization or pruning: what is trained are the tensors that it is computed from
                for key, stored in module.named_parameters():
                    if key.startswith(f"parametrizations.{name}.") or unpruned(key) == name:
                        resolved = resolve_fqn(module, key).layout
                        if padded or _counts(resolved, blocked):
                            yield stored, resolved


def memory_of(tensor: Tensor) -> object:
    """Returns what is equal for two live tensors only if they are the same elements: a tensor and its ``.data``."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    # Subclasses may have no memory
    if type(local) not in (Tensor, nn.Parameter) or local.is_meta:
        return id(tensor)
    # Tensors without elements have no address: of one shape and dtype all are the same
    return local.data_ptr(), local.shape, local.stride(), None if local.numel() else local.dtype


def unlisted_shards(listed: Iterable[Tensor]) -> Iterator[tuple[Tensor, Layout]]:
    """Yields live shards that a list of parameters or gradients may lack on this rank alone, for a caller that
    communicates over their groups: those without elements here, of an empty list also those without a gradient."""
    known, names = {id(tensor) for tensor in listed}, _groups_of_rank()
    for param, layout in live_shards():
        local = param._local_tensor if isinstance(param, DTensor) else param
        if not param.requires_grad or id(param) in known or not all(group.torch_name in names for _, group in layout):
            continue
        if not local.numel() or (not known and param.grad is None):
            yield param, layout


def _groups_of_rank() -> set[str]:
    """Returns the names of the groups of this rank that have not been destroyed: simulated ranks share a process, and
    a simulation may run in one that has groups."""
    names = [group.group_name for group in c10d._world.pg_names if isinstance(group, dist.ProcessGroup)]
    here = _simulated_rank(dist.group.WORLD.group_name) if dist.group.WORLD is not None else ""
    return {name for name in names if _simulated_rank(name) == here}


def _simulated_rank(name: str) -> str:
    return name.rpartition(":")[0] if name.startswith("simulation") else ""
