"""Logits in columns, one shard on each rank, with the full shape for a model's own code."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tp_ext import _ops
from tp_ext.auto.record.boundary import Edit, EditPlace
from tp_ext.auto.record.keywords import by_place
from tp_ext.auto.record.record import tensors
from tp_ext.auto.search.localize import replaced
from tp_ext.group import ParallelGroup
from tp_ext.invariance import refuse_compiled, using_blocks
from tp_ext.nn.loss import vocab_parallel_cross_entropy
from tp_ext.nn.sampling import vocab_parallel_argmax
from tp_ext.share_sizes import split_sizes

SAME_COLUMNS = {
    "to", "float", "double", "half", "bfloat16", "contiguous", "clone", "detach", "type", "cuda", "cpu", "neg", "tanh",
    "type_as",
}  # fmt: skip
POINTWISE = {
    "mul", "div", "add", "sub", "__mul__", "__truediv__", "__add__", "__sub__", "__rmul__", "true_divide",
    "__radd__", "__rsub__",
}  # fmt: skip
IN_PLACE = {
    f"__i{name.strip('_')}__" if name.startswith("_") else f"{name}_": getattr(Tensor, name)
    for name in POINTWISE
    if not name.startswith("__r")
}
LOCAL = {
    "dim", "ndimension", "element_size", "is_floating_point", "is_complex", "requires_grad_", "is_contiguous",
    "get_device", "register_hook", "retain_grad", "backward", "data_ptr", "storage_offset", "stride",
    "untyped_storage", "is_inference", "is_conj", "is_neg", "is_pinned", "is_shared", "as_subclass",
}  # fmt: skip


WRITING_OPERATORS = {f"__i{name}__" for name in ("floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")}


class ShardedLogits(Tensor):
    """This rank's columns of logits, with the shapes of the full logits.

    Cross entropy and arg-max over the vocabulary use the columns of all ranks without gathering them; pointwise
    functions, conversions and slices of other dims stay sharded. Any other function gathers the logits first, which
    :attr:`gathers` counts.
    """

    group: ParallelGroup
    sizes: tuple[int, ...]  # columns of each rank
    blocks: int | None = None  # of tp_invariant
    gathers = 0

    @property
    def vocab_size(self) -> int:
        return sum(self.sizes)

    def full(self) -> Tensor:
        """Returns the logits with all columns, all-gathered; its gradient is that of this rank's columns."""
        ShardedLogits.gathers += 1
        return _ops.gather_from_region(local(self), self.group.name, -1, list(self.sizes))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        x = next(t for _, t in tensors([list(args), kwargs]) if isinstance(t, ShardedLogits))
        with torch._C.DisableTorchFunctionSubclass():
            # Code builds views, targets and masks from the shape, which must be that of the full logits
            if name == "__get__":
                value = func(local(x))
                return torch.Size([*value[:-1], cls._vocab()]) if isinstance(value, torch.Size) else value
            placed, named = by_place(func, args, kwargs)
            # The answer does not depend on the columns of other ranks: a gather for it would be of no use
            if name in LOCAL or (name.startswith("_") and not name.startswith("__")):
                return func(local(x), *placed[1:], **named)
            handler = _HANDLERS.get(func, _HANDLERS.get(name))
            handled = handler(cls, func, x, placed, named) if handler is not None else NotImplemented
        if handled is not NotImplemented:
            return handled
        full, written = x.full(), bool(placed) and placed[0] is x and _writes(name)
        # One gather of x, however often it is an argument
        args = [full if a is x else _gathered(a) for a in args]
        result = func(*args, **{key: full if value is x else _gathered(value) for key, value in kwargs.items()})
        if not written:
            return result
        torch.utils.swap_tensors(x, full)  # the caller's object has all columns from now on
        return x if result is full else result

    @classmethod
    def _vocab(cls) -> int:
        return sum(cls.sizes)

    @classmethod
    def _unequal(cls) -> list[int] | None:
        """The sizes where they are not those that functions of the vocabulary know."""
        known = cls.blocks is not None or list(cls.sizes) == split_sizes(cls._vocab(), cls.group.size)
        return None if known else list(cls.sizes)


@functools.lru_cache(maxsize=1024)  # simulations have names of their own
def logits_type(group: ParallelGroup, sizes: tuple[int, ...], blocks: int | None = None) -> type[ShardedLogits]:
    """The subclass for a group, lengths and blocks: a tensor keeps no attributes of its own through views."""
    return type("ShardedLogits", (ShardedLogits,), {"group": group, "sizes": sizes, "blocks": blocks})


def local(x: Any) -> Any:
    """The plain tensor of this rank's columns."""
    return x.as_subclass(Tensor) if isinstance(x, ShardedLogits) else x


def _writes(name: str) -> bool:
    """True if a function of this name writes into its first argument."""
    return (name.endswith("_") and not name.endswith("__")) or name == "__setitem__" or name in WRITING_OPERATORS


def _gathered(value: Any) -> Any:
    if isinstance(value, ShardedLogits):
        return value.full()
    # torch.cat and torch.stack take a list of tensors
    if isinstance(value, list | tuple) and any(isinstance(inner, ShardedLogits) for inner in value):
        return type(value)([_gathered(inner) for inner in value])
    return value


Args = Sequence[Any]
Kwargs = Mapping[str, Any]
Cls = type[ShardedLogits]


def _size(cls: Cls, func: Any, x: ShardedLogits, args: Args, kwargs: Kwargs) -> Any:
    size = torch.Size([*local(x).shape[:-1], cls._vocab()])
    dim = args[1] if len(args) > 1 else None
    return size if dim is None else size[dim]


def _numel(cls: Cls, func: Any, x: ShardedLogits, args: Args, kwargs: Kwargs) -> Any:
    return _size(cls, func, x, (x,), {}).numel()


def _length(cls: Cls, func: Any, x: ShardedLogits, args: Args, kwargs: Kwargs) -> Any:
    return local(x).shape[0]


def _text(cls: Cls, func: Any, x: ShardedLogits, args: Args, kwargs: Kwargs) -> Any:
    return f"ShardedLogits({local(x)}, of {cls._vocab()} columns, rank {cls.group.rank} of {cls.group.size})"


def _cross_entropy(cls: Cls, func: Any, x: ShardedLogits, args: Args, kwargs: Kwargs) -> Any:
    names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    arguments: dict[str, Any] = dict(zip(names, args, strict=False))
    target, plain = arguments["target"], local(x)
    unusual = [arguments.get(name) for name in ("weight", "size_average", "reduce")]
    # Classes in another dim than the last, targets of probabilities and weights of classes need the full logits
    if plain.shape[:-1] != target.shape or target.is_floating_point() or any(value is not None for value in unusual):
        return NotImplemented
    ignored, reduction = arguments.get("ignore_index", -100), arguments.get("reduction", "mean")
    with using_blocks(cls.blocks):
        loss = vocab_parallel_cross_entropy(
            plain.contiguous(),
            target,
            cls.group.name or None,
            vocab_size=cls._vocab(),
            ignore_index=ignored,
            label_smoothing=arguments.get("label_smoothing", 0.0),
            reduction=reduction,
            sizes=cls._unequal(),
        )
    # The mean of no rows is NaN in torch, without a gradient, and 0 in our function
    return loss.masked_fill((target == ignored).all(), torch.nan) if reduction == "mean" else loss


def _argmax(cls: Cls, func: Any, x: ShardedLogits, args: Args, kwargs: Kwargs) -> Any:
    dim = args[1] if len(args) > 1 else None
    # Only the position over the vocabulary, as a tensor without that dim, has a sharded form
    if dim not in (-1, x.dim() - 1) or any(args[2:]):
        return NotImplemented
    with using_blocks(cls.blocks):
        options: dict[str, Any] = {"vocab_size": cls._vocab(), "sizes": cls._unequal()}
        return vocab_parallel_argmax(local(x).contiguous(), cls.group.name or None, **options)


def _view(cls: Cls, func: Any, x: ShardedLogits, args: Args, kwargs: Kwargs) -> Any:
    shape = list(args[1]) if isinstance(args[1], list | tuple) else list(args[1:])
    plain = local(x)
    # Only a view that leaves all columns in a dim of their own has a local form
    last = bool(shape) and (shape[-1] == cls._vocab() or (shape[-1] == -1 and shape[:-1] == list(plain.shape[:-1])))
    return plain.reshape(*shape[:-1], plain.shape[-1]).as_subclass(cls) if last else NotImplemented


def _flatten(cls: Cls, func: Any, x: ShardedLogits, args: Args, kwargs: Kwargs) -> Any:
    end = args[2] if len(args) > 2 else -1
    return NotImplemented if end in (-1, local(x).dim() - 1) else func(local(x), *args[1:], **kwargs).as_subclass(cls)


def _same(cls: Cls, func: Any, x: ShardedLogits, args: Args, kwargs: Kwargs) -> Any:
    # y.type_as(x) has the shape of y, of which nothing is sharded
    if args[0] is not x:
        return NotImplemented
    return func(*[local(a) for a in args], **kwargs).as_subclass(cls)


def _pointwise(cls: Cls, func: Any, x: ShardedLogits, args: Args, kwargs: Kwargs) -> Any:
    # With a factor their last elements are rounded otherwise in bf16, at another place on each number of ranks
    if cls.blocks is not None and kwargs.get("alpha", 1) != 1:
        return NotImplemented
    start, plain = sum(cls.sizes[: cls.group.rank]), local(x)

    def columns(value: Any) -> Any:
        if not isinstance(value, Tensor) or isinstance(value, ShardedLogits):
            return local(value)
        # A bias or a mask of the vocabulary has all columns, a scalar none
        return value if value.dim() == 0 or value.shape[-1] == 1 else value.narrow(-1, start, plain.shape[-1])

    named = {key: columns(value) for key, value in kwargs.items()}
    return func(*map(columns, args), **named).as_subclass(cls)


def _item(cls: Cls, func: Any, x: ShardedLogits, args: Args, kwargs: Kwargs) -> Any:
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    # A new dim or a mask may move the columns, or select among them
    if any(entry is None or isinstance(entry, Tensor) for entry in index):
        return NotImplemented
    has_ellipsis = any(entry is Ellipsis for entry in index)
    reaches_last = (has_ellipsis and index[-1] is not Ellipsis) or len(index) == x.dim()
    # An index of the last dim counts the columns of the full logits
    if reaches_last and not (isinstance(index[-1], slice) and index[-1] == slice(None)):
        return NotImplemented
    return func(local(x), args[1]).as_subclass(cls)


def _in_place(cls: Cls, func: Any, x: ShardedLogits, args: Args, kwargs: Kwargs) -> Any:
    """Puts a new tensor into the object: autograd cannot write through two aliases, the object and its plain tensor."""
    if args[0] is not x:
        return NotImplemented
    torch.utils.swap_tensors(x, _pointwise(cls, IN_PLACE[func.__name__], x, args, kwargs))
    return x


_Handler = Callable[[Cls, Any, ShardedLogits, Args, Kwargs], Any]
_HANDLERS: dict[Any, _Handler] = {
    F.cross_entropy: _cross_entropy,
    "argmax": _argmax,
    "size": _size,
    "numel": _numel,
    "nelement": _numel,
    "__len__": _length,
    "__repr__": _text,
    "__str__": _text,
    "__format__": _text,
    "view": _view,
    "reshape": _view,
    "flatten": _flatten,
    "__getitem__": _item,
    **dict.fromkeys(SAME_COLUMNS, _same),
    **dict.fromkeys(POINTWISE, _pointwise),
    **dict.fromkeys(IN_PLACE, _in_place),
}


@dataclass
class LogitsInShards(Edit):
    """Returns the output of a head, this rank's columns, as :class:`ShardedLogits`.

    Where ``torch.compile`` traces the code around the head, as it does for the whole model, it gathers all columns:
    compiled code would take the shape of such a tensor for that of its memory.
    """

    group: ParallelGroup
    sizes: tuple[int, ...]
    blocks: int | None = None
    place = EditPlace.LOGITS

    def after(self, module: nn.Module, output: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            if self.blocks is not None:
                refuse_compiled()
            return _ops.gather_from_region(output, self.group.name, -1, list(self.sizes))
        return output.as_subclass(logits_type(self.group, self.sizes, self.blocks))


class FullLogits(Edit):
    """Returns the model's logits as plain tensors of all columns, where no loss came with them.

    A training step that has its loss needs no logits: they stay sharded there, and nothing is gathered.
    """

    place = EditPlace.FULL_LOGITS

    def after(self, module: nn.Module, output: Any) -> Any:
        if torch.is_grad_enabled() and getattr(output, "loss", None) is not None:
            return output
        for path, tensor in list(tensors(output)):
            if isinstance(tensor, ShardedLogits):
                output = replaced(output, path, ShardedLogits.full)  # type: ignore[arg-type]
        return output
