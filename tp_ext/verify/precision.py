"""The lowest precision in which a model computes."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary


class LowestPrecision(TorchFunctionMode):
    """The lowest precision in which values that depend on parameters are computed: it bounds what two orders of a sum
    have in common.

    Also within functions of autograd and without gradients, whose results require none: what depends on parameters is
    followed from function to function, and the formats count that a kernel gets as an argument (FP8).

    Attributes:
        dtype: the floating dtype of the least precision.
        dependent: the tensors that depend on parameters. constant: those that depend on buffers alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.dtype = torch.float64
        self.dependent: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self.constant: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def add(self, model: nn.Module) -> None:
        """Takes the parameters, frozen ones, too, and the buffers of a model."""
        self.dependent.update((param, True) for param in model.parameters())
        self.constant.update((buffer, True) for buffer in model.buffers())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name.startswith("new_") or name.endswith("_like") or not isinstance(result, Tensor | tuple | list):
            return result  # it has no values of its arguments
        given = tree_leaves((args, kwargs))
        sources = [x for x in given if isinstance(x, Tensor) and x.is_floating_point()]
        tensors = [x for x in tree_leaves(result) if isinstance(x, Tensor) and x.is_floating_point()]
        dtypes = [x.dtype for x in tensors] + [x for x in given if isinstance(x, torch.dtype) and x.is_floating_point]
        if torch._C._current_graph_task_id() != -1:
            # No gradient says on what it depends, but new constants in fp32 come from none in fp64
            if all(x in self.constant for x in sources):
                self.constant.update((x, True) for x in tensors)
            else:
                self._add(*(dtype for dtype in dtypes if any(_eps(dtype) > _eps(x.dtype) for x in sources)))
        elif tensors and any(x.requires_grad or x in self.dependent for x in sources):
            self._add(*dtypes)
            self.dependent.update((x, True) for x in tensors)
        return result

    def _add(self, *dtypes: torch.dtype) -> None:
        self.dtype = max((self.dtype, *dtypes), key=_eps)


def _eps(dtype: torch.dtype) -> float:
    # torch has no finfo of the packed format of 4 bits
    return 1.0 if dtype == torch.float4_e2m1fn_x2 else torch.finfo(dtype).eps
