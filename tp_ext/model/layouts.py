"""The table of layouts of a module: local parameter name -> :class:`Layout`."""

import copy
import weakref
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tp_ext.group import ParallelGroup
from tp_ext.model.carriers import Carriers
from tp_ext.sharding import Layout, Sharding

MIRRORED = "tp_layout", "tp_sharding"
"""Attributes of parameters that mirror the layouts of their module."""


class ShardingView(MutableMapping[str, Sharding | None]):
    """A view of a module's layouts as shardings over one group: the first entry of each."""

    def __init__(self, layouts: dict[str, Layout], group: ParallelGroup) -> None:
        self._layouts, self._group = layouts, group

    def __getitem__(self, name: str) -> Sharding | None:
        layout = self._layouts[name]
        return layout[0][0] if layout else None

    def __setitem__(self, name: str, sharding: Sharding | None) -> None:
        self._layouts[name] = Layout() if sharding is None else Layout((sharding, self._group))

    def __delitem__(self, name: str) -> None:
        del self._layouts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._layouts)

    def __len__(self) -> int:
        return len(self._layouts)

    def __repr__(self) -> str:
        return repr(dict(self))


def layouts_of(module: nn.Module) -> dict[str, Layout]:
    """Returns the layouts of the module's own parameters, by local name; none for a module that declares none."""
    layouts: dict[str, Layout] = module.__dict__.get("tp_layouts", {})
    return layouts


class _DeclaredLayouts(dict[str, Layout]):
    """The table of a module that is no :class:`ParallelModule`. Copied with its module, it adds the copy to
    :class:`Carriers`: such a module's class is not ours, and has no ``__deepcopy__`` that could."""

    module: "weakref.ref[nn.Module] | None" = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "_DeclaredLayouts":
        copied = _DeclaredLayouts({name: copy.deepcopy(layout, memo) for name, layout in self.items()})
        module = memo.get(id(self.module and self.module()))  # deepcopy notes the new module before its attributes
        if isinstance(module, nn.Module):
            copied.module = weakref.ref(module)
            Carriers.add(module, copied)
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        # A plain dict: in another process the reference to the module would mean nothing
        return dict, (dict(self),)


def mirror_layouts(module: nn.Module) -> None:
    """Sets ``tp_layout`` and ``tp_sharding`` on the module's parameters, for users who inspect them, and adds the
    module to :class:`Carriers`."""
    Carriers.add(module, layouts_of(module))
    for name, layout in layouts_of(module).items():
        param = module._parameters.get(name)  # not getattr, which computes a parametrized one
        if param is not None:
            param.tp_layout = layout  # type: ignore[attr-defined]
            param.tp_sharding = layout[0][0] if layout else None  # type: ignore[attr-defined]


def carry_attributes(new: Tensor, old: Tensor, layout: Layout) -> None:
    """Gives a shard the attributes that users have put on the full parameter, such as tags for groups of an optimizer.
    Tensors of the shape of the full parameter are sharded as it is."""
    values = {name: value for name, value in old.__dict__.items() if name not in MIRRORED}
    for name, value in values.items():
        is_elementwise = isinstance(value, Tensor) and value.shape == old.shape
        new.__dict__[name] = layout.shard(value) if is_elementwise else value


def refuse_computed(where: str, module: nn.Module, *names: str) -> None:
    """Raises a ValueError if a weight of a layer that is to be converted is none of its parameters."""
    for name in names:
        if name not in module._parameters and (name == "weight" or getattr(module, name, None) is not None):
            raise ValueError(
                f"{where}.{name}: must be a parameter, and is computed (weight_norm, pruning, a parametrization) or "
                "quantised"
            )


def carry_gradient(new: Tensor, old: Tensor, layout: Layout) -> None:
    """Gives the shard of a parameter that it replaces in its model the shard of the gradient. A layer that copies the
    weights of another, such as ``from_linear``, begins without one."""
    if (grad_dtype := getattr(old, "grad_dtype", new.dtype)) != new.dtype:  # before the gradient, which has it
        new.grad_dtype = grad_dtype
    if old.is_leaf and old.grad is not None:
        new.grad = layout.shard(old.grad.detach()) if layout else old.grad.detach().clone()


def refuse_wrapped(model: nn.Module, what: str) -> None:
    """Raises a ValueError if DDP, which keeps a list of parameters, is inside of a model whose parameters change."""
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise ValueError(f"model: has DistributedDataParallel inside, which knows its parameters; {what} before it")


def hooks_of(param: Tensor) -> str:
    """Returns why hooks of users on the gradient of a parameter cannot be those of a shard; "": it has none."""
    if not (param._backward_hooks or getattr(param, "_post_accumulate_grad_hooks", None)):
        return ""
    return "has hooks on its gradient, which would get that of a shard; register them after it is sharded"


def uncarried(param: Tensor) -> str:
    """Returns what of a parameter cannot be that of a shard, hooks of users or a sparse gradient; "": nothing."""
    if param.is_leaf and param.grad is not None and param.grad.layout != torch.strided:
        return "has a sparse gradient, of which there are no shards; clear it before, by zero_grad()"
    return hooks_of(param)


def declare_layouts(module: nn.Module, layouts: Mapping[str, Layout]) -> None:
    """Declares how parameters and buffers of a module that is no :class:`ParallelModule` are sharded, so that state
    dicts, checkpoints, gradient norms and checks of the whole model treat them like those of our layers.

    The module itself computes with its local tensors and communicates as it sees fit; nothing of it is changed but the
    table ``module.tp_layouts``, which ``deepcopy`` and ``to_empty`` keep. ``param.tp_layout`` mirrors it. Parameters
    without a layout are replicated.

    Args:
        module: the module that holds the parameters itself.
        layouts: name of a parameter or buffer -> :class:`Layout`; added to those declared before.

    Communicates nothing.

    Raises:
        ValueError: the module has no such parameter or buffer, or it has another shape than the layout gives this rank.
        TypeError: a value that is no :class:`Layout`.
    """
    for name, layout in layouts.items():
        if not isinstance(layout, Layout):
            raise TypeError(f"layouts: {name!r} is {type(layout).__name__} and must be a Layout")
        tensor = module._parameters.get(name, module._buffers.get(name))
        if tensor is None:
            known = [*module._parameters, *module._buffers]
            raise ValueError(f"layouts: {name!r} must be a parameter or buffer of the module itself, one of {known}")
        # Raises for a tensor of another shape, before anything is declared
        layout.local_chunks(tensor)
    table = _DeclaredLayouts({**layouts_of(module), **layouts})
    table.module = weakref.ref(module)
    module.tp_layouts = table  # type: ignore[assignment]
    mirror_layouts(module)
