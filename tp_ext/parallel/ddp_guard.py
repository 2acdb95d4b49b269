"""What wraps a model for data parallelism, DDP and FSDP2, must not run over tensor-parallel ranks: it takes the shards
of different ranks for copies of one tensor. ``DDP(model)`` without a group does just that: it overwrites them with
rank 0's, silently and at construction, and shapes cannot reveal it afterwards.

So importing tp_ext registers one global hook of ``torch.nn`` (:func:`refuse_mixing_ddp`), which sees the model become
the child of a DDP module, before anything is sent. It costs every registration of a child module one call and one
comparison (under a microsecond), none of forward or backward; nothing else in torch comes before the broadcast. FSDP2
has no such moment: :func:`mixing_wraps`, of which ``tp_ext.debug.check`` is made, finds both.
"""

from collections.abc import Iterator

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from tp_ext.group import global_ranks
from tp_ext.nn.module import ParallelModule, shardings


def mixing_wraps(model: nn.Module) -> Iterator[str]:
    """One sentence for each DDP module and each parameter under FSDP2 that runs over ranks with different shards.

    Communicates nothing.
    """
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel):
            ignored = set(module.parameters_to_ignore)
            sentence = _mixing(module.module, dist.get_process_group_ranks(module.process_group), ignored)
            if sentence:
                yield f"{name or 'model'}: DistributedDataParallel over {sentence}"
    for name, layer, param in _sharded_parameters(model):
        if isinstance(param, DTensor):
            ranks = mesh_ranks(param)
            if shared := _shared(ranks, layer):
                yield (
                    f"{name}: FSDP2's mesh of ranks {ranks} holds the tensor-parallel ranks {shared}, "
                    "whose shards differ; pass fully_shard the data axis, as in fully_shard(model, mesh=mesh['dp'])"
                )


def mesh_ranks(tensor: DTensor) -> list[int]:
    """The ranks over which FSDP2 has dealt the tensor."""
    ranks: list[int] = tensor.device_mesh.mesh.flatten().tolist()
    return ranks


def refuse_mixing_ddp(module: nn.Module, name: str, child: nn.Module | None) -> None:
    """Global hook: raises when ``child`` becomes the model of a DDP module that would mix its shards.

    Parameters that DDP is told to ignore (``_ddp_params_and_buffers_to_ignore``) are no concern of it.

    Raises:
        ValueError: on every rank of the group of ``module``, before it sends anything.
    """
    if name != "module" or not isinstance(module, DistributedDataParallel) or child is None:
        return
    sentence = _mixing(child, dist.get_process_group_ranks(module.process_group), set(module.parameters_to_ignore))
    if sentence:
        raise ValueError(f"process_group: DistributedDataParallel over {sentence}")


register_module_module_registration_hook(refuse_mixing_ddp)


def _mixing(model: nn.Module, ranks: list[int], ignored: set[str]) -> str:
    for name, layer, _ in _sharded_parameters(model):
        shared = _shared(ranks, layer)
        if shared and name not in ignored:
            return (
                f"ranks {ranks} would overwrite and average {name}, of which the tensor-parallel ranks "
                f"{shared} hold different shards; pass DDP the data axis, as in process_group=mesh['dp'].get_group()"
            )
    return ""


def layers_of(model: nn.Module) -> dict[int, ParallelModule]:
    """By the id of each parameter and buffer the layer that it belongs to, through whatever wraps either."""
    layers: dict[int, ParallelModule] = {}
    for module in model.modules():  # inner ones come later
        if isinstance(module, ParallelModule):
            layers |= dict.fromkeys(map(id, (*module.parameters(), *module.buffers())), module)
    return layers


def _sharded_parameters(model: nn.Module) -> Iterator[tuple[str, ParallelModule, Tensor]]:
    layers, params = layers_of(model), dict(model.named_parameters())
    for name, sharding in shardings(model):
        layer = layers.get(id(params[name]))
        if sharding is not None and layer is not None and layer.tp_group.size > 1:
            yield name, layer, params[name]


def _shared(ranks: list[int], layer: ParallelModule) -> list[int]:
    """The tensor-parallel ranks of the layer among ``ranks``, if they are several."""
    shared = [rank for rank in global_ranks(layer.tp_group.name) if rank in ranks]
    return shared if len(shared) > 1 else []
