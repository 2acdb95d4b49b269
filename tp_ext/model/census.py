"""The census of a model: its modules, parameters, layouts and groups as one value, which a call of a function of whole
models makes once and hands on."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from tp_ext._checks import warn_caller
from tp_ext.group import ALONE, NOT_GIVEN, Group, ParallelGroup, global_ranks, parallel_group
from tp_ext.mesh import MeshAxes
from tp_ext.model.fqn import Entry, Places, StateDict, resolve_fqn
from tp_ext.model.layouts import layouts_of
from tp_ext.model.model_groups import ModelGroups, axes_of_groups
from tp_ext.model.module import LayerOverData, ParallelModule
from tp_ext.model.stages import Stages, joined
from tp_ext.sharding import Layout, Sharding

Modules = tuple[tuple[str, nn.Module], ...]


class OptimizedParameter(NamedTuple):
    """A parameter of an optimizer.

    Attributes:
        name: its name in the unsharded model; of a declared copy of another stage's that of the original.
        layout: its layout.
        options: the parameter group that holds it.
        copy: whether it is a declared copy.
    """

    name: str
    param: Tensor
    layout: Layout
    options: StateDict
    copy: bool


# [Note: one census for each call]
@dataclass(frozen=True, eq=False)
class Census:
    """The parts of a model at one moment; :func:`census` makes it.

    Attributes:
        model: the module, or the stages of this rank as one.
        axes: the axes of the mesh that the function was given.
        modules: the modules with their paths, as ``named_modules()`` gives them.
        tensors: the parameters and buffers.
        copies: the parameters that are declared copies (:func:`declare_tied`), by id: the name of the original of each.
        default: the group of modules that declare ``tp_shardings``, which name none.
    """

    model: nn.Module
    axes: MeshAxes
    modules: Modules
    tensors: list[Tensor]
    copies: dict[int, str]
    default: ParallelGroup
    _places: Places

    # Selections of the modules and tensors: made when they are first read, since a norm in each step reads few of them
    @cached_property
    def paths(self) -> dict[nn.Module, str]:
        """The path of each module."""
        return {module: path for path, module in self.modules}

    @property
    def has_groups(self) -> bool:
        """Whether a layer was given a group, of one rank maybe."""
        return any(layer.tp_group.name for layer in self.layers.values())

    @cached_property
    def layers(self) -> dict[str, ParallelModule]:
        """The layers of this package, by path."""
        return {path: module for path, module in self.modules if isinstance(module, ParallelModule)}

    @cached_property
    def experts(self) -> dict[str, ParallelModule]:
        """The layers of experts that are sharded over several ranks, by path."""
        return {path: layer for path, layer in self.layers.items() if holds_experts(layer)}

    @cached_property
    def routing_layers(self) -> dict[str, LayerOverData]:
        """The layers that route tokens to experts, by path."""
        return {path: layer for path, layer in self.layers.items() if isinstance(layer, LayerOverData)}

    @cached_property
    def wrappers(self) -> dict[str, DistributedDataParallel]:
        """The wrappers of DDP, by path."""
        return {path: module for path, module in self.modules if isinstance(module, DistributedDataParallel)}

    @cached_property
    def meshes(self) -> list[DeviceMesh]:
        """The meshes over which FSDP2 has sharded the tensors."""
        return list(dict.fromkeys(tensor.device_mesh for tensor in self.tensors if isinstance(tensor, DTensor)))

    @cached_property
    def groups(self) -> ModelGroups:
        """The groups of the layers and of all layouts. The tensor-parallel one of ``axes``, if it is known, must be one
        of them; a model without any has that one.

        Raises:
            ValueError: that group has other ranks than each of the model's groups, but those of experts; two groups
                overlap and are no axes of one mesh.
        """
        groups = axes_of_groups(self.groups_in_use())
        if self.axes.tp is NOT_GIVEN:
            return groups
        group, argument = parallel_group(self.axes.tp), self.axes.argument
        ranks = tuple(group.ranks)
        # Experts are sharded over data ranks, which say nothing about the tensor-parallel axis
        layer_ranks = {tuple(global_ranks(name)) for name in groups.within} - {tuple(self.axes.ep.ranks)}
        if layer_ranks and ranks not in layer_ranks:
            names = " or ".join(_shown(members) for members in sorted(layer_ranks))
            raise ValueError(
                f"{argument}: {_shown(ranks)} must be that of the model's layers, {names}; without "
                f"{argument.split('[')[0]}= it is taken from them"
            )
        if not layer_ranks and len(ranks) > 1 and any(any(layer.tp_layouts.values()) for layer in self.layers.values()):
            raise ValueError(
                f"{argument}: {_shown(ranks)} must be that of the model's layers, which were made without one"
            )
        return groups if layer_ranks else axes_of_groups([group, *self.groups_in_use()])

    def groups_in_use(self) -> Iterator[ParallelGroup]:
        """Yields the group of each layer and those of all layouts, in the order of the modules, some repeatedly."""
        return _groups_in_use(self.modules)

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """The blocks: those of ``pipeline_parts()``, the modules of an ``nn.Sequential``, or the model itself."""
        model = self.model
        if hasattr(model, "pipeline_parts"):
            blocks = cast(Any, model).pipeline_parts()[1]
            return list(blocks.values() if isinstance(blocks, nn.ModuleDict) else blocks)
        return list(model) if isinstance(model, nn.Sequential) else [model]

    @property
    def sharded_over(self) -> dict[tuple[int, ...], str]:
        """The ranks of each group over which parameters are sharded -> the name of the first of them."""
        names: dict[tuple[int, ...], str] = {}
        for name, entry in self.parameters.items():
            for _, group in entry.layout:
                if group.size > 1:
                    names.setdefault(tuple(group.ranks), name)
        return names

    @cached_property
    def parameters(self) -> dict[str, Entry]:
        """The parameters, each once, by their names in ``named_parameters()``.

        Raises:
            ValueError: a layout cannot be resolved (:func:`resolve_fqn`).
        """
        return {key: self.resolve(key, param) for key, param in self.model.named_parameters()}

    def resolve(self, key: str, value: Any = None) -> Entry:
        """Returns :func:`resolve_fqn` of the model, for an entry of this value."""
        copy_of = self.copies.get(id(value), "") if self.copies else ""
        return resolve_fqn(self.model, key, self.default, self._places, value, copy_of)

    @cached_property
    def state_dict(self) -> StateDict:
        """The state dict of the live values, of which hooks may make it with collectives."""
        return self.model.state_dict(keep_vars=True)

    def state(self) -> dict[str, Entry]:
        """Returns the entries of the state dict, with the keys of the unwrapped, unsharded model. Tied ones have one
        value.

        Raises:
            ValueError: an entry is on the meta device; its layout cannot be resolved (:func:`resolve_fqn`).
        """
        entries = {}
        for key, value in self.state_dict.items():
            entry = self.resolve(key, value)
            if isinstance(value, Tensor) and value.is_meta:
                raise ValueError(f"module: {entry.name!r} is on the meta device and must have values; see to_empty")
            entries[entry.name] = entry
        return entries

    def optimized(self, optimizer: Optimizer) -> list[OptimizedParameter]:
        """Returns the parameters of the optimizer, in order. One that has several names is listed under the first.

        Raises:
            ValueError: the optimizer holds a parameter that is not the model's.
        """
        entries = {entry.value: entry for entry in self.parameters.values()}
        params = []
        for options in optimizer.param_groups:
            for param in options["params"]:
                if param not in entries:
                    raise ValueError(
                        f"optimizer: a parameter of shape {tuple(param.shape)} must be one of the module's; "
                        "under FSDP2 optimizers are made after fully_shard"
                    )
                entry = entries[param]
                name = entry.copy_of or entry.name
                params.append(OptimizedParameter(name, param, entry.layout, options, bool(entry.copy_of)))
        return params


def census(model: Stages, axes: MeshAxes | None = None, *, assumed: ParallelGroup = ALONE) -> Census:
    """Makes the census of a model. It serves one call of a function: parameters may get values, FSDP2 or other modules
    before the next one. Communicates nothing.

    Args:
        model: a module, or the stages of a pipeline that this rank holds.
        axes: what the function was given as ``mesh``, or as the deprecated ``group``.
        assumed: the group of modules that declare ``tp_shardings``, if the model has no group.

    Raises:
        TypeError: neither a module nor a list of modules; a group that is none of the accepted kinds.
        ValueError: a declared copy that is no parameter any more; see also :class:`tp_ext.model.stages.JoinedStages`.

    Warns:
        DeprecationWarning: a ``group`` that is not needed; modules that declare ``tp_shardings``.
    """
    model, axes = joined(model), axes or MeshAxes()
    parallel_group(axes.tp)  # raises if it is no group
    modules = tuple(model.named_modules())
    tables = (table for _, module in modules for table in (module._parameters, module._buffers))
    tensors = [tensor for table in tables for tensor in table.values() if tensor is not None]
    copies = copies_in([module for _, module in modules])
    # Layouts name their groups. Only shardings without layouts need a group from elsewhere: the one that was given, or
    # the only one of the model
    default = ALONE
    if any(declares_shardings_alone(module) for _, module in modules):
        default = _default_group(modules, axes, assumed)
    elif axes.tp is not NOT_GIVEN and axes.argument == "group":
        warn_unneeded_group()
    return Census(model, axes, modules, tensors, copies, default, Places())


def declares_shardings_alone(module: nn.Module) -> bool:
    """Returns whether the module has ``tp_shardings``, which name no group, in place of layouts."""
    return "tp_shardings" in module.__dict__ and "tp_layouts" not in module.__dict__


def _groups_in_use(modules: Modules) -> Iterator[ParallelGroup]:
    for _, module in modules:
        if isinstance(module, ParallelModule):
            yield module.tp_group
        for layout in layouts_of(module).values():
            yield from (group for _, group in layout)


def _default_group(modules: Modules, axes: MeshAxes, assumed: ParallelGroup) -> ParallelGroup:
    """Returns the group of modules that declare ``tp_shardings``: the one that is given, or the model's only one."""
    warn_caller(
        "tp_shardings: deprecated, since they name no group; declare layouts by tp_ext.declare_layouts",
        DeprecationWarning,
    )
    if axes.tp is not NOT_GIVEN:
        return parallel_group(axes.tp)
    in_use = axes_of_groups(_groups_in_use(modules)).axes
    return in_use[0] if len(in_use) == 1 else assumed


def copies_in(modules: Sequence[nn.Module]) -> dict[int, str]:
    """Returns the parameters that are declared copies, by id: the name of the original of each.

    Raises:
        ValueError: a module no longer has a parameter that was declared, for example since it is parametrized.
    """
    originals: dict[int, str] = {}
    for module in modules:
        for local, original in module.__dict__.get("tp_copies", {}).items():
            param = module._parameters.get(local)
            if param is None:
                raise ValueError(f"module: {local!r}, a copy of {original!r}, must still be a parameter of its module")
            originals[id(param)] = original
    for module in modules if originals else ():
        for local, param in module._parameters.items():
            if param is not None and local not in module.__dict__.get("tp_copies", ()):
                originals.pop(id(param), None)  # the original itself
    return originals


def holds_experts(module: nn.Module) -> bool:
    """Returns whether the module holds experts that are sharded over several ranks."""
    return isinstance(module, ParallelModule) and module.expert_group is not None and module.expert_group.size > 1


def warn_unneeded_group() -> None:
    """Warns of a ``group`` that a function of a whole model was given and does not need."""
    warn_caller(
        "group: deprecated and not needed, since layouts name their groups; leave it out, or pass mesh= for the stages "
        "and replicas of a whole mesh",
        DeprecationWarning,
    )


def layouts(model: nn.Module, *, group: Group = NOT_GIVEN) -> Iterator[tuple[str, Layout]]:
    """Yields (name, layout) of every parameter of the model, named as in ``named_parameters()``.

    Args:
        model: any module, wrapped or not.
        group: deprecated: the group of modules that declare ``tp_shardings`` and have no group.

    Raises:
        ValueError: a parametrization of a sharded tensor that does not act on each shard alone, at p > 1.
    """
    for name, entry in census(model, MeshAxes(group)).parameters.items():
        yield name, entry.layout


def shardings(model: nn.Module) -> Iterator[tuple[str, Sharding | None]]:
    """Yields (name, sharding) of every parameter of the model, named as in ``named_parameters()``; None: replicated. Of
    a parameter that is sharded over several groups it is the first entry of its layout (:func:`layouts`).

    Raises:
        ValueError: see :func:`layouts`.
    """
    for name, layout in layouts(model):
        yield name, layout[0][0] if layout else None


def device_of(tensor: Tensor) -> torch.device:
    """Returns the device on which the tensor is communicated: for one that FSDP2 offloads to the CPU, its mesh's."""
    return torch.device(tensor.device_mesh.device_type) if isinstance(tensor, DTensor) else tensor.device


def _shown(ranks: tuple[int, ...]) -> str:
    if not ranks:
        return "None"
    return f"the group of ranks {list(ranks)}" if len(ranks) <= 16 else f"a group of {len(ranks)} ranks"
