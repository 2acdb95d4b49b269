"""The experts of a model under ``parallelize``: checks of their groups, and the losses of their routers."""

from collections.abc import Iterator

import torch.distributed as dist
from torch import nn
from torch.distributed import DeviceMesh

from tp_ext.group import NOT_GIVEN, ParallelGroup, global_ranks
from tp_ext.mesh import mesh_axes
from tp_ext.model.data_ranks import LayerOverData
from tp_ext.parallel.average_gradients import expert_modules


def check_experts(model: nn.Module, mesh: DeviceMesh, zero: int, recompute: str | None) -> None:
    """Checks the groups of the model's experts against the mesh. Communicates nothing.

    Raises:
        ValueError: experts are sharded over another group than ``mesh["ep"]``; losses, capacities or correction biases
            over other ranks than all data axes of the mesh; gradients are combined as a sum; ``zero`` = 1, or 2 and 3
            with ``recompute="selective"``.
    """
    ep = dist.get_process_group_ranks(mesh["ep"].get_group()) if "ep" in (mesh.mesh_dim_names or ()) else None
    names = {id(module): name for name, module in model.named_modules()}
    for module in expert_modules(model):
        group = module.expert_group
        assert isinstance(group, ParallelGroup)
        ranks = global_ranks(group.name)
        if ranks != ep:
            raise ValueError(f"model: expert_group of {names[id(module)]!r}, ranks {ranks}, must be mesh['ep']")
        if zero == 1:
            raise ValueError("zero: 1 must be 0, 2 or 3 for a model whose experts are sharded over several ranks")
        if zero > 1 and recompute == "selective":
            # FSDP2's hooks of the experts are in the block, and selective checkpointing counts their operators
            raise ValueError(
                f"recompute: 'selective' must be None or 'full' with zero = {zero} for a model whose experts are "
                "sharded over several ranks"
            )
    axes = {tuple(global_ranks(axis.name)) for axis in mesh_axes(NOT_GIVEN, mesh).data}
    for name, layer in _expert_layers(model):
        if layer.gradient_reduction != "mean":
            raise ValueError(f"model: gradient_reduction of {name!r}, 'sum', must be 'mean'")
        theirs = {tuple(global_ranks(axis.name)) for axis in layer.data_ranks.axes}
        if layer.needs_data_ranks and theirs != axes:
            raise ValueError(
                f"model: data_groups and expert_group of {name!r} are the ranks {sorted(map(list, theirs))}, and must "
                f"be the data axes of the mesh, {sorted(map(list, axes))}"
            )


def attach_router_losses(model: nn.Module, microbatches: int) -> None:
    """Has backward add the gradient of the routers' losses, as the mean over microbatches, in layers that do not attach
    them already."""
    for _, layer in _expert_layers(model):
        if layer.attach_loss is None:
            layer.attach_loss = 1 / microbatches


def _expert_layers(model: nn.Module) -> Iterator[tuple[str, LayerOverData]]:
    for name, module in model.named_modules():
        if isinstance(module, LayerOverData):
            yield name, module
