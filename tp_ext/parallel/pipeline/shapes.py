"""The shapes of the activations between the stages of a pipeline, computed without running the model: its parts are
called once on fake tensors, which have shape, dtype and ``requires_grad`` but no data, and whose collectives do
nothing.
"""

import gc
import inspect
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map_only

_COPIED = (dict, list, set, OrderedDict)  # attributes that a forward may fill, as a cache of tables


class Shape(NamedTuple):
    """Shape, strides, dtype and ``requires_grad`` of a tensor."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> "Shape":
        return cls(tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad)

    def empty(self, device: torch.device) -> Tensor:
        """Returns a tensor of this shape; its elements are not initialised."""
        tensor = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)
        return tensor.requires_grad_(self.requires_grad)


class Precision(NamedTuple):
    """FSDP2's mixed precision: the dtypes of parameters and inputs, and of outputs; ids of parameters it ignores."""

    param: torch.dtype | None = None
    output: torch.dtype | None = None
    ignored: frozenset[int] = frozenset()


class StageShapes(NamedTuple):
    """The shapes of the inputs and outputs of a stage, for one microbatch."""

    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]


class ShapeModel:
    """The stages of a whole model, without data: copies of the modules that share nothing with them but constants.

    Args:
        stages: the modules of all stages of the model, before FSDP2 shards them.
        device: the device of the activations.
        precision: see :class:`Precision`.
    """

    def __init__(self, stages: Sequence[nn.Module], device: torch.device, precision: Precision) -> None:
        # A module may hold tensors that are neither parameters nor buffers, such as tables: they stay real
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._device, self._precision = device, precision
        memo: dict[int, Any] = {}
        with self._mode:
            self._stages = [self._module(stage, memo) for stage in stages]

    def run(self, inputs: Sequence[Shape], keywords: Mapping[str, Any]) -> list[StageShapes]:
        """Returns the shapes of all stages, for inputs of the first stage.

        Args:
            inputs: the positional arguments of the first stage, for one microbatch.
            keywords: the keyword arguments of one microbatch.
        """
        found = []
        # Inputs as tensors of the mode; draws on fake tensors leave the generators alone, those of constants do not
        with torch.random.fork_rng(devices=[]), self._mode, torch.enable_grad():
            given = tree_map_only(Tensor, lambda tensor: Shape.of(tensor).empty(self._device), dict(keywords))
            values = [shape.empty(self._device) for shape in inputs]
            for stage in self._stages:
                begin = tuple(map(Shape.of, values))
                # A new graph, as behind a send; float inputs of FSDP2's modules are cast as its parameters are
                leaves = [
                    _cast(value.detach().requires_grad_(value.requires_grad), self._precision.param) for value in values
                ]
                result = stage(*leaves, **given)
                results = result if isinstance(result, tuple) else (result,)
                values = [_cast(one, self._precision.output) for one in results if isinstance(one, Tensor)]
                found.append(StageShapes(begin, tuple(map(Shape.of, values))))
        return found

    def close(self) -> bool:
        """Drops the copies. Returns whether fake tensors are left, as in a cache outside of the modules."""
        self._stages = []
        # Its casts of the fake parameters are no cache of the user's
        torch.clear_autocast_cache()
        # Else fake tensors in cycles that nothing refers to would count as left
        gc.collect()
        return any(type(one) is FakeTensor and one.fake_mode is self._mode for one in gc.get_objects())

    def _module(self, module: nn.Module, memo: dict[int, Any]) -> nn.Module:
        """Returns a copy of a module and its submodules, without hooks and without compiled code."""
        if isinstance(module, torch._dynamo.OptimizedModule):
            return self._module(module._orig_mod, memo)
        if id(module) in memo:
            copy: nn.Module = memo[id(module)]
            return copy
        # Not by copy.deepcopy: [Note: a pipeline's schedule is torch's own, made a subclass]
        copy = module.__class__.__new__(module.__class__)
        memo[id(module)] = copy
        for name, value in module.__dict__.items():
            # Hooks may act on what is outside of the module, such as FSDP2's and a user's log
            hooks = name.startswith(("_forward_", "_backward_", "_non_full_backward")) and isinstance(value, dict)
            copy.__dict__[name] = type(value)() if hooks else value.copy() if type(value) in _COPIED else value
        copy.__dict__["_parameters"] = {name: self._tensor(one, memo) for name, one in module._parameters.items()}
        copy.__dict__["_buffers"] = {name: self._tensor(one, memo) for name, one in module._buffers.items()}
        copy.__dict__["_modules"] = {
            name: None if child is None else self._module(child, memo) for name, child in module._modules.items()
        }
        # It is bound to the original module
        copy.__dict__["_compiled_call_impl"] = None
        return copy

    def _tensor(self, tensor: Tensor | None, memo: dict[int, Any]) -> Tensor | None:
        if tensor is None:
            return None
        if id(tensor) not in memo:
            shape = Shape.of(tensor)
            cast = self._precision.param if id(tensor) not in self._precision.ignored else None
            if isinstance(tensor, nn.Parameter) and cast is not None and tensor.is_floating_point():
                shape = shape._replace(dtype=cast)
            fake = shape._replace(requires_grad=False).empty(self._device)
            if isinstance(tensor, nn.Parameter):
                fake = nn.Parameter(fake, tensor.requires_grad)
                main = getattr(tensor, "main_grad", None)  # may be set later: before the first step
                fake.main_grad = torch.empty_like(  # type: ignore[attr-defined]
                    fake, dtype=main.dtype if isinstance(main, Tensor) else None, requires_grad=False
                )
            memo[id(tensor)] = fake
        known: Tensor = memo[id(tensor)]
        return known


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)


@contextmanager
def calls_of_checkpoint() -> Iterator[list[str]]:
    """Collects the calls of ``torch.utils.checkpoint.checkpoint`` in this thread, by the name of the calling
    function.
    """
    called: list[str] = []
    code = inspect.unwrap(torch.utils.checkpoint.checkpoint).__code__
    before = sys.getprofile()

    def see(frame: Any, event: str, argument: Any) -> None:
        # By its code: modules may have imported the function under any name before
        if event == "call" and frame.f_code is code:
            caller = frame.f_back
            while caller is not None and caller.f_code.co_filename.startswith(torch.__path__[0]):
                caller = caller.f_back
            called.append("?" if caller is None else caller.f_code.co_qualname)

    sys.setprofile(see)
    try:
        yield called
    finally:
        sys.setprofile(before)
