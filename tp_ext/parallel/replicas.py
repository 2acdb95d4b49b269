"""Equal copies of parameters along the data axes: the meshes over which they are equal, means of their gradients,
checks of the groups of a model, and equal weights to begin with."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor

from tp_ext.group import Group, global_ranks, parallel_group, process_group
from tp_ext.mesh import DATA_AXES
from tp_ext.model.census import Census, holds_experts
from tp_ext.parallel.gradient_sum import average_over, check_over_axes


class Replicas(NamedTuple):
    """The data axes of a mesh as one, over which parameters are equal copies; None without any.

    Attributes:
        whole: for all parameters but those of experts.
        experts: for those, without the axis that shards them; ``whole`` where that has one rank.
    """

    whole: DeviceMesh | None
    experts: DeviceMesh | None

    @property
    def exist(self) -> bool:
        """True if several ranks have equal copies of a parameter."""
        return self.whole is not None and self.whole.size() > 1

    @property
    def shards_experts(self) -> bool:
        """True if experts are equal over other ranks than the other parameters."""
        return self.experts is not self.whole

    def fsdp_options(self) -> dict[str, Any]:
        """Returns the meshes of FSDP2, as ``fsdp`` of :func:`tp_ext.parallel.pipeline_stages`.

        Raises:
            ValueError: there is no axis but ``ep``.
        """
        # With ep alone there is no axis left along which FSDP2 could shard experts
        if self.experts is None or self.whole is None:
            raise ValueError("zero: 2 and 3 need a mesh with the axis 'dp' or 'cp', of any number of ranks")
        return {"mesh": self.whole} | ({"expert_mesh": self.experts} if self.shards_experts else {})

    def average_gradients(self, stages: Sequence[nn.Module]) -> None:
        """Takes the mean of all gradients, as DDP and FSDP2 do: it leaves those of earlier steps as they are."""
        experts = _expert_parameters(stages)
        others = dict.fromkeys(param for stage in stages for param in stage.parameters())
        means = [([param for param in others if param not in experts], self.whole), (experts, self.experts)]
        check_over_axes(means)
        for params, axes in means:
            average_over(params, axes)

    def average_expert_gradients(self, model: nn.Module) -> None:
        """Takes the mean of the gradients of experts that ``ep`` shards, which DDP over ``whole`` ignores."""
        average_over(_expert_parameters([model]), self.experts)


def replicas_of(mesh: DeviceMesh) -> Replicas:
    """Returns the meshes of the replicas along the data axes of a mesh. Communicates: the creation of groups."""
    names = [name for name in DATA_AXES if name in (mesh.mesh_dim_names or ())]
    experts = _as_one(mesh, [name for name in names if name != "ep"])
    shards_experts = "ep" in names and mesh["ep"].size() > 1
    # The same object where ep shards nothing: shards_experts compares by identity
    return Replicas(_as_one(mesh, names) if shards_experts else experts, experts)


def _as_one(mesh: DeviceMesh, names: list[str]) -> DeviceMesh | None:
    """Returns the axes of these names as one."""
    if len(names) < 2:
        return mesh[names[0]] if names else None
    return mesh[tuple(names)]._flatten("_".join(names))


def _expert_parameters(stages: Sequence[nn.Module]) -> dict[nn.Parameter, None]:
    experts = (module for stage in stages for module in stage.modules() if holds_experts(module))
    return dict.fromkeys(param for module in experts for param in module.parameters())


def check_layers(model: Census, tensor_group: Group, data_group: Group) -> None:
    """Raises ValueError unless each parameter is sharded over the tensor-parallel ranks, or experts over the data
    ranks, and some parameter is sharded if these are several; and unless all are on one device. Communicates
    nothing."""
    tensor_ranks, data = tuple(global_ranks(tensor_group)), tuple(global_ranks(data_group))
    sharded_over = model.sharded_over
    for ranks, name in sharded_over.items():
        if ranks != tensor_ranks and (ranks != data or len(tensor_ranks) == 1):
            raise ValueError(
                f"model: {name!r} is sharded over ranks {list(ranks)} and must be over the tensor-parallel ranks "
                f"{list(tensor_ranks)}: build its layers with the group of that axis of the mesh"
            )
    if len(tensor_ranks) > 1 and tensor_ranks not in sharded_over:
        raise ValueError(
            f"model: {type(model.model).__name__} has no parameter that is sharded over the tensor-parallel ranks "
            f"{list(tensor_ranks)}: build its layers with the group of that axis of the mesh"
        )
    devices = {str(entry.value.device): name for name, entry in model.parameters.items()}
    if len(devices) > 1:
        places = ", ".join(f"{name!r} on {device}" for device, name in devices.items())
        raise ValueError(f"model: its parameters must be on one device, and are on several: {places}")


@torch.no_grad()
def copy_from_first(model: Census, data_group: Group) -> None:
    """Gives all ranks of a data axis the parameters and buffers of its first rank, but those that this axis shards:
    experts, and what FSDP2 has sharded.

    Communicates: one broadcast of each tensor.
    """
    if parallel_group(data_group).size == 1:
        return
    group, ranks = process_group(data_group), global_ranks(data_group)
    tensors: list[Tensor] = [
        entry.value for entry in model.parameters.values() if all(axis.ranks != ranks for _, axis in entry.layout)
    ]
    for tensor in (*tensors, *model.model.buffers()):
        if not isinstance(tensor, DTensor):
            dist.broadcast(tensor, ranks[0], group=group)
