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
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from tp_ext.group import global_ranks
from tp_ext.model.fqn import layouts
from tp_ext.model.module import ParallelModule
from tp_ext.sharding import Layout


def find_mixed_wrappers(model: nn.Module) -> Iterator[str]:
    """Yields a sentence for each DDP module and each parameter under FSDP2 that spans ranks with different shards.

    Communicates nothing.
    """
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel):
            ignored = set(module.parameters_to_ignore)
            sentence = _describe_mixed(module.module, dist.get_process_group_ranks(module.process_group), ignored)
            if sentence:
                yield f"{name or 'model'}: DistributedDataParallel over {sentence}"
    for name, layout, param in _sharded_parameters(model):
        if isinstance(param, DTensor):
            ranks = mesh_ranks(param)
            if shared := _shared_tp_ranks(ranks, layout):
                yield (
                    f"{name}: FSDP2's mesh of ranks {ranks} holds the tensor-parallel ranks {shared}, "
                    "whose shards differ; pass fully_shard the data axis, as in fully_shard(model, mesh=mesh['dp'])"
                )


def mesh_ranks(tensor: DTensor) -> list[int]:
    """Returns the ranks over which FSDP2 has sharded the tensor."""
    ranks: list[int] = tensor.device_mesh.mesh.flatten().tolist()
    return ranks


def check_axes(model: nn.Module, mesh: DeviceMesh) -> None:
    """Raises ValueError if layers are sharded along an axis of the mesh whose ranks hold equal copies or other
    stages: ``dp``, ``ep``, ``cp`` or ``pp``. Communicates nothing."""
    axes = {name: dist.get_process_group_ranks(mesh[name].get_group()) for name in mesh.mesh_dim_names or ()}
    own = axes.get("tp", [])
    for path, module in model.named_modules():
        if isinstance(module, ParallelModule) and module.tp_group.size > 1:
            ranks = global_ranks(module.tp_group.name)
            for name, others in axes.items():
                if ranks == others and ranks != own:
                    raise ValueError(
                        f"model: the group of {path!r} is mesh[{name!r}], and must be mesh['tp']; along {name!r} "
                        "weights are not sharded"
                    )


def refuse_mixed_ddp(module: nn.Module, name: str, child: nn.Module | None) -> None:
    """Raises, as a global hook, when ``child`` becomes the model of a DDP module that would mix its shards.

    Parameters that DDP ignores (``_ddp_params_and_buffers_to_ignore``) are not checked.

    Raises:
        ValueError: on every rank of the group of ``module``, before any communication.
    """
    if name != "module" or not isinstance(module, DistributedDataParallel) or child is None:
        return
    sentence = _describe_mixed(
        child, dist.get_process_group_ranks(module.process_group), set(module.parameters_to_ignore)
    )
    if sentence:
        raise ValueError(f"process_group: DistributedDataParallel over {sentence}")


# [Note: one global hook of torch.nn]
register_module_module_registration_hook(refuse_mixed_ddp)


def _describe_mixed(model: nn.Module, ranks: list[int], ignored: set[str]) -> str:
    for name, layout, _ in _sharded_parameters(model):
        shared = _shared_tp_ranks(ranks, layout)
        if shared and name not in ignored:
            return (
                f"ranks {ranks} would overwrite and average {name}, of which the tensor-parallel ranks "
                f"{shared} hold different shards; pass DDP the data axis, as in process_group=mesh['dp'].get_group()"
            )
    return ""


def layers_by_tensor_id(model: nn.Module) -> dict[int, ParallelModule]:
    """Returns the layer of each parameter and buffer by the tensor's id, through any wrappers."""
    layers: dict[int, ParallelModule] = {}
    for module in model.modules():  # inner ones come later
        if isinstance(module, ParallelModule):
            layers |= dict.fromkeys(map(id, (*module.parameters(), *module.buffers())), module)
    return layers


def _sharded_parameters(model: nn.Module) -> Iterator[tuple[str, Layout, Tensor]]:
    params = dict(model.named_parameters())
    for name, layout in layouts(model):
        if any(group.size > 1 for _, group in layout):
            yield name, layout, params[name]


def _shared_tp_ranks(ranks: list[int], layout: Layout) -> list[int]:
    """Returns the ranks of a group of the layout that are in ``ranks``, if there are several."""
    for _, group in layout:
        shared = [rank for rank in global_ranks(group.name) if rank in ranks]
        if len(shared) > 1:
            return shared
    return []
