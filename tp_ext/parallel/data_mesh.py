"""The data axes of a mesh, for all parameters and for those of experts, and means of gradients over them."""

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.distributed import DeviceMesh

from tp_ext.group import Group
from tp_ext.mesh import DATA_AXES
from tp_ext.parallel.average_gradients import expert_modules
from tp_ext.parallel.gradient_sum import average_over


class DataMesh:
    """The axes of a mesh whose ranks have different tokens of a batch: ``dp``, ``ep`` and ``cp``.

    Attributes:
        size: the number of ranks with different sequences: dp x ep.
        rank: the index of this rank's sequences.
        axes: the axes of several ranks, one by one.
        whole: all axes as one, None without any: over it all parameters but the experts' are equal.
        experts: as ``whole``, without ``ep``: over it the parameters of experts are equal. It is ``whole`` where ``ep``
            has one rank.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        names = mesh.mesh_dim_names or ()
        sizes = {name: mesh[name].size() for name in DATA_AXES if name in names}
        place = {name: mesh[name].get_local_rank() for name in sizes}
        self.size = sizes.get("dp", 1) * sizes.get("ep", 1)
        self.rank = place.get("dp", 0) * sizes.get("ep", 1) + place.get("ep", 0)
        self.axes: list[Group] = [mesh[name] for name, size in sizes.items() if size > 1]
        self.shards_experts = sizes.get("ep", 1) > 1
        others = [name for name in sizes if name != "ep"]
        self.experts = _as_one(mesh, others)
        self.whole = _as_one(mesh, list(sizes)) if self.shards_experts else self.experts

    @property
    def replicates(self) -> bool:
        """True if several ranks have equal copies of a parameter."""
        return self.whole is not None and self.whole.size() > 1

    def fsdp_options(self) -> dict[str, Any]:
        """Returns the meshes of FSDP2, as ``fsdp`` of :func:`tp_ext.parallel.pipeline_stages`.

        Raises:
            ValueError: there is no axis but ``ep``.
        """
        if self.experts is None or self.whole is None:
            raise ValueError("zero: 2 and 3 need a mesh with the axis 'dp' or 'cp', of any number of ranks")
        return {"mesh": self.whole} | ({"expert_mesh": self.experts} if self.shards_experts else {})

    def average_gradients(self, modules: Iterable[nn.Module]) -> None:
        """Takes the mean of all gradients, as DDP and FSDP2 do: it leaves those of earlier steps as they are."""
        modules = list(modules)
        experts = self._expert_parameters(modules)
        own = {id(param) for param in experts}
        average_over(
            [parameter for module in modules for parameter in module.parameters() if id(parameter) not in own],
            self.whole,
        )
        average_over(experts, self.experts)

    def average_expert_gradients(self, module: nn.Module) -> None:
        """Takes the mean of the gradients of experts that ``ep`` shards, which DDP over ``whole`` ignores."""
        average_over(self._expert_parameters([module]), self.experts)

    def _expert_parameters(self, modules: Iterable[nn.Module]) -> list[nn.Parameter]:
        return [param for module in modules for one in expert_modules(module) for param in one.parameters()]


def _as_one(mesh: DeviceMesh, names: list[str]) -> DeviceMesh | None:
    """Returns the axes of these names as one."""
    if len(names) < 2:
        return mesh[names[0]] if names else None
    return mesh[tuple(names)]._flatten("_".join(names))
