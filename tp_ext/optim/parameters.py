"""The layouts of an optimizer's parameters, the ranks that hold them, and the choice of parameters for Muon."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.modules.conv import _ConvNd

from tp_ext.checkpoint.gather import ranks_of
from tp_ext.group import ALONE, NOT_GIVEN, Group, parallel_group
from tp_ext.mesh import DataAxes, mesh_axes
from tp_ext.model.census import Census, census
from tp_ext.model.stages import Stages
from tp_ext.nn.embedding import VocabParallelEmbedding, VocabParallelLMHead
from tp_ext.sharding import Layout

_NOT_HIDDEN = (nn.Embedding, nn.EmbeddingBag, VocabParallelEmbedding, VocabParallelLMHead, _ConvNd)


class Placed:
    """The parameters of an optimizer with their layouts.

    Args:
        model: the model, or the stages of this rank; None: the layouts are those that the parameters carry.
        group, mesh: as for :func:`tp_ext.full_state_dict`.
    """

    def __init__(self, model: Stages | None, group: Group, mesh: DeviceMesh | None) -> None:
        self._group, self._mesh = group, mesh
        self.model: nn.Module | None = None
        self._known: dict[Tensor, tuple[str, Layout]] = {}
        if model is not None:
            known = census(model, mesh_axes(group, mesh))
            ranks_of(known)  # raises here, not in the first step
            self.model = known.model
            if known.default is ALONE:
                self._group = NOT_GIVEN  # of which this call has warned
            self._known = {entry.value: (name, entry.layout) for name, entry in known.parameters.items()}

    def layout(self, param: Tensor, number: int) -> tuple[str, Layout]:
        """Returns the name and the layout of a parameter of the optimizer, its ``number`` in it.

        Raises:
            ValueError: it is not the model's; or there is no model, and it is a DTensor, or a shard whose group is not
                known.
        """
        shape = tuple(param.shape)
        if self.model is not None:
            if param not in self._known:
                raise ValueError(
                    f"params: parameter {number}, of shape {shape}, must be one of the model's; under FSDP2 optimizers "
                    "are made after fully_shard"
                )
            return self._known[param]
        layout, name = getattr(param, "tp_layout", None), f"parameter {number}"
        if isinstance(param, DTensor) and layout is None:
            raise ValueError(
                f"model: must be given for parameter {number}, a DTensor of shape {shape}: FSDP2 does not keep "
                "the layouts on its parameters"
            )
        # tp_sharding alone says how a dim is cut, not over which ranks
        if layout is None and (sharding := getattr(param, "tp_sharding", None)) is not None:
            if self._group is NOT_GIVEN:
                raise ValueError(
                    f"group: must be given for parameter {number}, of shape {shape}, which carries tp_sharding alone"
                )
            layout = Layout((sharding, parallel_group(self._group)))
        return name, layout or Layout()

    def ranks(self, params: Iterable[Tensor], layouts: Iterable[Layout]) -> tuple[DataAxes, torch.device]:
        """Returns the axes of the ranks that hold these parameters, and the device on which they communicate."""
        if self.model is not None:
            return _axes(census(self.model, mesh_axes(self._group, self._mesh)))
        # A census needs a module: this one has the parameters and layouts that the optimizer was given
        carrier = nn.Module()
        carrier.tp_layouts = {str(i): layout for i, layout in enumerate(layouts)}  # type: ignore[assignment]
        for index, param in enumerate(params):
            carrier.register_parameter(str(index), nn.Parameter(param, requires_grad=False))
        return _axes(census(carrier, mesh_axes(NOT_GIVEN, self._mesh)))


def _axes(model: Census) -> tuple[DataAxes, torch.device]:
    """Returns the largest axes: a data axis may span the expert group."""
    ranks = ranks_of(model)
    members = [set(dist.get_process_group_ranks(group)) for group in ranks.stage_axes]
    groups = [
        group
        for group, members_of_axis in zip(ranks.stage_axes, members, strict=True)
        # A group within a data axis would count the ranks of that axis twice
        if len(members_of_axis) > 1 and not any(members_of_axis < other for other in members)
    ]
    return DataAxes(tuple(map(parallel_group, reversed(groups)))), ranks.device


def split_parameters(model: Stages) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Returns the parameters that Muon is meant for, and the others: ``matrices, others = split_parameters(model)``.

    The first are the matrices of hidden layers and stacks of them (experts, 3-D). The others are vectors, parameters of
    embeddings, heads and convolutions, and what is tied to one. A head is a :class:`VocabParallelLMHead`, or what
    ``model.get_output_embeddings()`` returns, as in ``transformers``; another linear as a head is to be moved by hand.
    Frozen parameters are in neither.

    Args:
        model: a module, wrapped or not, or the stages of a pipeline that this rank holds.

    Communicates nothing.

    Raises:
        TypeError: neither a module nor a list of modules.
    """
    stages = model if isinstance(model, list | tuple) else [model]
    if not stages or not all(isinstance(stage, nn.Module) for stage in stages):
        raise TypeError(f"model: {model!r} must be a module, or a list of the stages that this rank holds")
    whole = census(model)
    outside: set[Tensor] = set()
    # By identity: a weight that is tied to an embedding or a head is none of a hidden layer
    for _, module in whole.modules:
        heads: list[nn.Module] = [module] if isinstance(module, _NOT_HIDDEN) else []
        if callable(find := getattr(module, "get_output_embeddings", None)):
            heads += [head] if isinstance(head := find(), nn.Module) else []
        outside.update(param for head in heads for param in head.parameters())
    params = [entry.value for entry in whole.parameters.values() if entry.value.requires_grad]
    hidden = [param for param in params if param.dim() in (2, 3) and param not in outside]
    chosen = set(hidden)
    return hidden, [param for param in params if param not in chosen]
