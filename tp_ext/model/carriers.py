"""The modules that have layouts. Wrappers of torch's functions read them at each call, so little is imported here."""

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from torch import nn

if TYPE_CHECKING:
    from tp_ext.sharding import Layout


class Carriers:
    """The live modules of this process some of whose tensors are shards. What torch gives a function of parameters
    (clipping, a scaler, an initialiser) does not lead to the module: FSDP2 and ``deepcopy`` drop attributes.

    Attributes:
        modules: these modules.
        padded: those without a shard that hold padding, which is not in the full tensor either.
        blocked: those without a shard that have blocks of :func:`tp_ext.tp_invariant`: what is summed over their
            tensors on one rank is summed as on several.
        exist: whether there ever was one. A bool, which traced code can read.
        changes: how often such a module has got a layout or a parameter, as far as they say so.
        at_each: is called when a module has been added.
    """

    modules: ClassVar["weakref.WeakSet[nn.Module]"] = weakref.WeakSet()
    padded: ClassVar["weakref.WeakSet[nn.Module]"] = weakref.WeakSet()
    blocked: ClassVar["weakref.WeakSet[nn.Module]"] = weakref.WeakSet()
    exist: ClassVar[bool] = False
    changes: ClassVar[int] = 0
    at_each: ClassVar[Callable[[], None] | None] = None

    @classmethod
    def add(cls, module: nn.Module, table: "dict[str, Layout]") -> None:
        """Adds a module with its table of layouts, unless all groups are of one rank and nothing is padded."""
        layouts = table.values()
        if any(map(is_sharded, layouts)):
            cls.modules.add(module)
        else:
            padded = any(layout.has_padding for layout in layouts)
            blocked = any(layout.blocks for layout in layouts)
            if padded:
                cls.padded.add(module)
            if blocked:
                cls.blocked.add(module)
            if not (padded or blocked):
                return
        cls.changes += 1
        cls.exist = True
        if cls.at_each is not None:
            cls.at_each()


def is_sharded(layout: "Layout") -> bool:
    """Returns whether several ranks hold the tensor."""
    for _, group in layout:  # noqa: SIM110, any() is slower, and a wrapped function asks for all shards of a process
        if group.size > 1:
            return True
    return False
