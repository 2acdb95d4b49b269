"""A guard against DDP and FSDP2 over tensor-parallel ranks: they would treat the different shards of those ranks as
replicas of one tensor. ``DDP(model)`` without a group does so: at construction it silently overwrites the shards with
rank 0's, and shapes cannot reveal it afterwards.

So importing tp_ext registers one global hook of ``torch.nn`` (:func:`refuse_mixed_ddp`), which is called when the model
becomes the child of a DDP module, before any communication. It costs one call and one comparison (under a microsecond)
per registration of a child module, and nothing in forward or backward; torch offers no other hook before the broadcast.
FSDP2 has no such hook: :func:`find_mixed_wrappers`, which ``tp_ext.debug.check`` uses, finds both.
"""

from collections.abc import Iterator

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from tp_ext.model.census import Census, census
from tp_ext.sharding import Layout


def find_mixed_wrappers(model: Census) -> Iterator[str]:
    """Yields a sentence for each DDP module and each parameter under FSDP2 that spans ranks with different shards.

    Communicates nothing.
    """
    for path, wrapper in model.wrappers.items():
        sentence = _describe_mixed(wrapper, wrapper.module)
        if sentence:
            yield f"{path or 'model'}: DistributedDataParallel over {sentence}"
    for name, entry in model.parameters.items():
        if isinstance(entry.value, DTensor):
            ranks = mesh_ranks(entry.value)
            if shared := _shared_tp_ranks(ranks, entry.layout):
                yield (
                    f"{name}: FSDP2's mesh of ranks {ranks} holds the tensor-parallel ranks {shared}, "
                    "whose shards differ; pass fully_shard the data axis, as in fully_shard(model, mesh=mesh['dp'])"
                )


def mesh_ranks(tensor: DTensor) -> list[int]:
    """Returns the ranks over which FSDP2 has sharded the tensor."""
    ranks: list[int] = tensor.device_mesh.mesh.flatten().tolist()
    return ranks


def refuse_mixed_ddp(module: nn.Module, name: str, child: nn.Module | None) -> None:
    """Raises, as a global hook, when ``child`` becomes the model of a DDP module that would mix its shards.

    Parameters that DDP ignores (``_ddp_params_and_buffers_to_ignore``) are not checked.

    Raises:
        ValueError: on every rank of the group of ``module``, before any communication.
    """
    if name != "module" or not isinstance(module, DistributedDataParallel) or child is None:
        return
    sentence = _describe_mixed(module, child)
    if sentence:
        raise ValueError(f"process_group: DistributedDataParallel over {sentence}")


# [Note: one global hook of torch.nn]
register_module_module_registration_hook(refuse_mixed_ddp)


def _describe_mixed(wrapper: DistributedDataParallel, model: nn.Module) -> str:
    ranks = dist.get_process_group_ranks(wrapper.process_group)
    for name, entry in census(model).parameters.items():
        shared = _shared_tp_ranks(ranks, entry.layout)
        # Ignored are experts, for example, which differ along a data axis on purpose: see ignore_experts
        if shared and name not in wrapper.parameters_to_ignore:
            return (
                f"ranks {ranks} would overwrite and average {name}, of which the tensor-parallel ranks "
                f"{shared} hold different shards; pass DDP the data axis, as in process_group=mesh['dp'].get_group()"
            )
    return ""


def _shared_tp_ranks(ranks: list[int], layout: Layout) -> list[int]:
    """Returns the ranks of a group of the layout that are in ``ranks``, if there are several."""
    for _, group in layout:
        shared = [rank for rank in group.ranks if rank in ranks]
        # One common rank is this rank, in which the axes of a mesh cross
        if len(shared) > 1:
            return shared
    return []
