"""Refusal of code that takes a shard for the whole tensor: see :func:`check_shards`."""

import sys
import warnings
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from tp_ext._checks import check_choice
from tp_ext.debug.shard_rules import KnownShard, RefusedCallError, check_call, name_of, shards_in
from tp_ext.model.carriers import is_sharded
from tp_ext.model.census import census
from tp_ext.model.layouts import layouts_of
from tp_ext.model.stages import Stages
from tp_ext.outside.live_shards import live_shards
from tp_ext.outside.optimizers import accepts_shards
from tp_ext.sharding import Layout

_CALLS_USERS = {"debug", "elastic", "huggingface", "lightning", "simulation", "verify"}  # packages that run their code
# Of tensors that they do not know they call torch's function
_PASSES_ON = {f"tp_ext.outside.{name}" for name in ("wrapped", "clipping", "initialisers")}
_COMMUNICATES = tuple(f"torch._ops.{name}" for name in ("tp_ext", "c10d", "_c10d_functional"))


@contextmanager
def check_shards(model: Stages, *, optimizer: Optimizer | None = None, action: str = "raise") -> Iterator[list[str]]:
    """Refuses what takes a shard for the whole tensor, in code of a training loop: loss, backward, hooks, clipping,
    optimizers, averages, logging::

        with tp_ext.debug.check_shards(model, optimizer=optimizer):
            step(batch)

    A parameter is an ordinary tensor that holds a shard, so ``p.grad.norm()`` is the norm of a shard, and
    ``F.linear(hidden, model.lm_head.weight)`` has a part of the logits. In this context each function of torch is asked
    before it runs, if it is called with a shard: a parameter, its gradient, or what the block has made of them.

    - What copies a tensor, or computes each element by itself, is right on shards: ``clone``, ``to``, ``lerp_``,
      ``addcmul_``, ``torch._foreach_add_``, fused optimizers; so are views of whole slices, and norms and sums along a
      dim that is not sharded.
    - Everything else raises: norms and sums, products, draws, indices, NumPy; shards of two layouts in one function.

    Layers and other functions of this package, those of torch that it makes right
    (``torch.nn.utils.clip_grad_norm_``), and ``forward`` of any module with layouts know what a shard is, and are not
    asked; nor are optimizers that :func:`tp_ext.optim.accept` was given. Compiled code runs as it is written.

    Not seen: what is made of shapes (``torch.randn(p.shape)``, ``p.numel()``); copies from before the block, until an
    elementwise function writes to them; collectives; code of ``torch.jit``, of C++, and of backwards other than hooks.

    Args:
        model: the model, on every rank; errors name its parameters. Shards of other modules are seen, too.
        optimizer: one whose states were made before the block.
        action: ``"raise"``: an error at the line, before the function has run; ``"warn"``: a warning, once for each
            line.

    Yields:
        The list of what was found, a sentence each; of ``"warn"`` with file and line.

    Communicates nothing. Raises:
        RuntimeError: in the block, the same on all ranks. ValueError: another ``action``.
    """
    check_choice(("raise", "warn"), action=action)
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") == "contextlib":
        frame = frame.f_back
    mode = _ShardCheck(frame, action)
    mode.register(model, optimizer)
    try:
        with _Uncompiled(), mode:
            yield mode.found
    finally:
        mode.leave()


class _Uncompiled:
    """Within it what is compiled runs as it is written. Simulated ranks share torch's setting, and overlap."""

    users: ClassVar[int] = 0
    stances: ClassVar[ExitStack] = ExitStack()

    def __enter__(self) -> None:
        if not _Uncompiled.users:
            self.stances.enter_context(torch.compiler.set_stance("force_eager"))
        _Uncompiled.users += 1

    def __exit__(self, *error: object) -> None:
        _Uncompiled.users -= 1
        if not _Uncompiled.users:
            self.stances.close()


class _ShardCheck(TorchFunctionMode):
    """Keeps what it knows to be a shard, and asks the table of each function that is called with one."""

    def __init__(self, block: FrameType | None, action: str) -> None:
        super().__init__()
        self.block, self.action, self.found = block, action, list[str]()
        self._params: list[Tensor] = []
        self._storages: dict[int, tuple[StorageWeakRef, torch.Size, KnownShard]] = {}
        self._known = WeakTensorKeyDictionary()
        self._lines: set[tuple[str, int, str]] = set()

    def register(self, model: Stages, optimizer: Optimizer | None) -> None:
        """Takes in the shards that are there, and the user's hooks of the model's parameters."""
        for param, layout in live_shards():
            self._add(param, layout)
        for name, entry in census(model).parameters.items():
            param = entry.value
            self._params.append(param)
            if is_sharded(entry.layout):
                self._add(param, entry.layout, repr(name))
                states = optimizer.state.get(param, {}).values() if optimizer is not None else ()
                for value in (param.grad, getattr(param, "main_grad", None), *states):
                    self.mark_like(value, param)
        for hooks, param in self._hooks():
            hooks.update({key: _AskedHook(self, hook, param) for key, hook in hooks.items()})

    def leave(self) -> None:
        """Gives the hooks back, those that were registered in the block, too."""
        self.block = None
        for hooks, _ in self._hooks():
            hooks.update({key: hook.function for key, hook in hooks.items() if isinstance(hook, _AskedHook)})

    def _hooks(self) -> Iterator[tuple[dict[int, Any], Tensor]]:
        for param in self._params:
            for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
                if (hooks := getattr(param, name, None)) is not None:
                    yield hooks, param

    def _add(self, param: Tensor, layout: Layout, name: str = "a parameter") -> None:
        self._mark(param, KnownShard.of_parameter(name, param, layout))

    def _mark(self, value: Tensor, shard: KnownShard) -> None:
        self._known[value] = shard
        if (storage := _storage(value)) is not None:
            self._storages[storage._cdata] = StorageWeakRef(storage), value.shape, shard

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook):
            return func(args[0], _AskedHook(self, kwargs.get("hook", args[-1]), args[0]))
        self._add_new([*args, *kwargs.values()])
        if not shards_in(self._known, [args, kwargs]):
            return func(*args, **kwargs)
        if func is torch.autograd.grad:
            return self._gradients(*args, **kwargs)
        if torch.compiler.is_compiling() or str(getattr(func, "__module__", "")).startswith(_COMMUNICATES):
            return func(*args, **kwargs)
        name = name_of(func)
        try:
            mark = check_call(name, args, kwargs, self._known)
        except RefusedCallError as refusal:
            if (frame := self._user_frame()) is not None:
                self._refuse(name, shards_in(self._known, [args, kwargs])[0], str(refusal), frame)
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        for value, shard in mark(result):
            # Code of this package writes shards into full tensors, and joins them to such
            if (value is result and not shard.packed) or self._user_frame() is not None:
                self._mark(value, shard)
        return result

    def _add_new(self, values: list[Any]) -> None:
        """Takes in parameters of modules that were made in the block, and what shares memory with a shard: other
        objects over it, and those of transforms, which show other dims than they have."""
        tensors = [value for entry in values for value in (entry if isinstance(entry, list | tuple) else [entry])]
        for tensor in tensors:
            if not isinstance(tensor, Tensor) or tensor in self._known:
                continue
            layout, inner = getattr(tensor, "tp_layout", None), tensor
            while torch._C._functorch.is_functorch_wrapped_tensor(inner):
                inner = torch._C._functorch.get_unwrapped(inner)
            if layout is not None and is_sharded(layout):
                self._add(tensor, layout)
            elif (storage := _storage(inner)) is not None and storage._cdata in self._storages:
                reference, shape, shard = self._storages[storage._cdata]
                if not reference.expired() and (inner is not tensor or shape == tensor.shape):
                    self._known[tensor] = shard if inner is tensor else shard._replace(packed=True)

    def _gradients(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        made = torch.autograd.grad(outputs, inputs, *args, **kwargs)
        for gradient, tensor in zip(made, [inputs] if isinstance(inputs, Tensor) else inputs, strict=True):
            self.mark_like(gradient, tensor)
        return made

    def mark_like(self, value: Any, param: Tensor) -> None:
        """Takes in a tensor that has the layout of a parameter: its gradient, a state of an optimizer."""
        if isinstance(value, Tensor) and param in self._known and value.shape == param.shape:
            self._mark(value, self._known[param])

    def _refuse(self, name: str, shard: KnownShard, instead: str, frame: FrameType) -> None:
        text = f"check_shards: {name} must not take {shard.name}, {shard.text}, for the whole: {instead}"
        if self.action == "raise":
            self.found.append(text)
            raise RuntimeError(text)
        file, line = frame.f_code.co_filename, frame.f_lineno
        if (file, line, name) not in self._lines:
            self._lines.add((file, line, name))
            self.found.append(f"{file}:{line}: {text}")
            warnings.warn_explicit(text, UserWarning, file, line)

    def _user_frame(self) -> FrameType | None:
        """Returns the frame of the code that called the function, if it may take a shard for the whole; None if it is
        called by this package, or by ``forward`` of a module that has shards."""
        # [Note: what asks knows its caller]
        frame: FrameType | None = sys._getframe(2)
        user: FrameType | None = None
        called = ""  # by this frame
        while frame is not None:
            name, function = frame.f_globals.get("__name__", ""), frame.f_code.co_name
            package, _, inner = ("torch" if name in _PASSES_ON else name).partition(".")
            if package == "tp_ext" and name != __name__:
                if user is None or inner.partition(".")[0] not in _CALLS_USERS:
                    return None
            elif name == "torch.nn.modules.module" and function == "inner":
                if user is not None and not called.endswith("forward"):
                    return user  # a hook of a module
            elif function == "_engine_run_backward":
                return user  # a hook of a tensor, or what torch itself does in backward
            elif function == "step" or function.endswith("forward"):
                caller = frame.f_locals.get(next(iter(frame.f_code.co_varnames), ""))
                if accepts_shards(caller) or (isinstance(caller, nn.Module) and layouts_of(caller)):
                    return None
            if user is None and package not in ("torch", "tp_ext"):
                user = frame
            if frame is self.block:
                break
            called, frame = function, frame.f_back
        return user or self.block


def _storage(tensor: Tensor) -> Any:
    """Returns the memory of a tensor; None of one whose class has its own, or none."""
    plain = type(tensor) in (Tensor, nn.Parameter) and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return tensor.untyped_storage() if plain and tensor.layout is torch.strided and not tensor.is_meta else None


class _AskedHook:
    """A hook of a parameter, of which each function is asked: torch runs backward without modes."""

    def __init__(self, mode: _ShardCheck, function: Any, param: Tensor) -> None:
        self._mode, self.function, self._param = weakref.ref(mode), function, weakref.ref(param)

    def __call__(self, tensor: Tensor) -> Any:
        mode, param = self._mode(), self._param()
        if mode is None or mode.block is None:
            return self.function(tensor)
        if param is not None:
            mode.mark_like(tensor, param)
        with mode:
            return self.function(tensor)
