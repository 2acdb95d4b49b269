"""Ways for numbers to leave a tensor that varies: Python values, storage, text, and lengths that depend on values.

What a function of torch returns other than tensors is refused, unless it is known to be the same on all ranks.
Lengths are the same, too, except those that an operator finds from values, such as ``nonzero`` and a mask as an index:
its results are marked, results of marked operands are marked, and no length of a marked tensor can be read.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tp_ext._ops.tags import finds_lengths_from_values

READS_NUMBERS = frozenset(
    {"item", "tolist", "numpy", "__array__", "__contains__", "is_nonzero", "equal", "allclose", "is_set_to"}
    | {"__dlpack__", "__bool__", "__int__", "__float__", "__index__", "__complex__", "apply_", "map_", "map2_"}
    | {"__reduce_ex__", "__reduce__", "_reduce_ex_internal"}
)
"""Functions that give values to Python, refused before they run."""

_LENGTHS = frozenset(
    {"shape", "size", "numel", "nelement", "__len__", "nbytes", "stride", "storage_offset", "is_contiguous"}
    | {"dim_order", "is_same_size", "_sym_numel", "sym_numel", "sym_size", "sym_stride", "sym_storage_offset"}
    | {"_fused_sdp_choice", "__sizeof__"}
)
_METADATA = _LENGTHS | frozenset(
    {"dim", "ndim", "ndimension", "type", "element_size", "itemsize", "get_device", "data_ptr", "_cdata", "_version"}
    | {"requires_grad", "is_leaf", "grad_fn", "output_nr", "retains_grad", "volatile", "name", "names", "has_names"}
    | {"_backward_hooks", "_post_accumulate_grad_hooks", "register_hook", "register_post_accumulate_grad_hook"}
    | {"is_complex", "is_floating_point", "is_signed", "is_conj", "is_neg", "is_inference", "is_pinned", "is_shared"}
    | {"is_cpu", "is_cuda", "is_ipu", "is_maia", "is_meta", "is_mkldnn", "is_mps", "is_mtia", "is_nested", "is_xla"}
    | {"is_quantized", "is_sparse", "is_sparse_csr", "is_vulkan", "is_xpu", "is_distributed", "is_coalesced"}
    | {"_is_view", "_is_zerotensor", "_python_dispatch", "_has_symbolic_sizes_strides", "_has_grad_dtype_override"}
    | {"_has_compatible_shallow_copy_type", "_use_count", "__dlpack_device__", "__hash__", "__dir__", "type_as"}
    | {"sparse_dim", "dense_dim", "cudnn_is_acceptable", "_use_cudnn_rnn_flatten_weight", "_is_alias_of"}
)
_TYPES_OF_METADATA = (type(None), type(NotImplemented), torch.dtype, torch.device, torch.layout, torch.memory_format)
# Their number of results is the length of a dim
_PARTS = frozenset({"unbind", "split", "unsafe_split"})
# In Python, of operators with the tag
_COMPOSED = frozenset({"unique", "nonzero_numpy"})
_INDEXED = frozenset({"__getitem__", "index", "_unsafe_index"})


class VaryingValueError(RuntimeError):
    """An error of a program on a mesh: a value that varies along an axis stands where it must be the same."""


def name_of(function: Callable[..., Any]) -> str:
    """Returns the name of a function of torch, of a property that is read, or of an operator without its overload."""
    name: str = getattr(function, "__name__", "")
    if name == "__get__":
        return getattr(getattr(function, "__self__", None), "__name__", name)
    return name.partition(".")[0]


def shown(x: Tensor, axes: Mapping[str, str]) -> str:
    """Returns the text of a tensor that varies, the same on all ranks: what ``print`` shows, without its values."""
    lengths: Any = "lengths that depend on values" if x.lengths else tuple(x.shape)  # type: ignore[attr-defined]
    return (
        f"{type(x).__name__}(shape={lengths}, dtype={x.dtype}, of {x.line}; its values differ "  # type: ignore[attr-defined]
        f"between ranks: all_gather it over {listed(axes)} with invariant=True to print those of all)"
    )


def listed(axes: Iterable[str]) -> str:
    """Returns names of axes for a message."""
    return ", ".join(map(repr, axes))


def refuse_read(name: str, args: tuple[Any, ...], axes: Mapping[str, str], lengths: str) -> None:
    """Raises a VaryingValueError for a function that gives values to Python, or lengths if these depend on values.

    Args:
        name: of the function.
        args: its positional arguments.
        axes: along which its arguments vary.
        lengths: the operator, with its line, that found the lengths of an argument from values; "" if none did.
    """
    if name in READS_NUMBERS:
        raise VaryingValueError(
            f"{name}: the value varies along {listed(axes)}, and a Python number would count as the same on all "
            "ranks; psum or all_gather it first, or use spmd(check=False)"
        )
    parts = name in _PARTS and not (len(args) > 1 and isinstance(args[1], list | tuple))
    if lengths and (name in _LENGTHS or parts):
        raise VaryingValueError(
            f"{name}: the lengths of the value, which come from {lengths}, may differ along {listed(axes)}, and Python "
            "numbers would count as the same on all ranks; count by a sum, as psum(torch.ones_like(x).sum()), reshape "
            "by unflatten, or use spmd(check=False)"
        )


def refuse_result(name: str, result: object, axes: Mapping[str, str], args: tuple[Any, ...], lengths: str) -> None:
    """Raises a VaryingValueError for a result that is no strided tensor and not known to be the same on all ranks."""
    for leaf in tree_leaves(result):
        if isinstance(leaf, Tensor):
            if leaf.is_nested or leaf.layout is not torch.strided:
                kind = "nested" if leaf.is_nested else str(leaf.layout)
                raise VaryingValueError(
                    f"{name}: a tensor that varies along {listed(axes)} must be strided, and would be {kind}, with "
                    "lengths that depend on values; use spmd(check=False)"
                )
        elif name not in _METADATA and not isinstance(leaf, _TYPES_OF_METADATA):
            raise VaryingValueError(
                f"{name}: the value varies along {listed(axes)}, and a {type(leaf).__name__} read from it would count "
                "as the same on all ranks; psum or all_gather it first, or use spmd(check=False)"
            )
    if lengths and name in ("chunk", "unsafe_chunk") and isinstance(args[1], int) and len(tuple(result)) != args[1]:  # type: ignore[arg-type]
        raise VaryingValueError(f"{name}: the number of chunks depends on lengths from {lengths}, which vary")


def finds_lengths(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], varies: Callable[[Any], bool]) -> bool:
    """Returns whether a function finds the lengths of its results from values that vary, by the tags of operators.

    Args:
        name, args, kwargs: the function's.
        varies: whether a tensor varies.
    """
    if name in _INDEXED:
        indices = tree_leaves(args[1:])
        return any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) and varies(i) for i in indices)
    if name == "where":
        return len(args) + len(kwargs) == 1
    if name == "repeat_interleave":
        repeats = kwargs.get("repeats", args[1] if len(args) > 1 else args[0])
        return "output_size" not in kwargs and isinstance(repeats, Tensor) and varies(repeats)
    if name == "masked_select":
        return any(varies(x) for x in (*args[1:], kwargs.get("mask")))
    if name == "one_hot":
        return max(kwargs.get("num_classes", -1), *(n for n in args[1:2]), -1) < 0
    return name in _COMPOSED or finds_lengths_from_values(name)


class NumbersRead(TorchDispatchMode):
    """Notes whether operators in the block read a tensor as a number: ``torch.arange(n)`` of a tensor n has n elements.

    Attributes:
        seen: whether one did.
    """

    seen = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs the operator."""
        self.seen = self.seen or torch.Tag.data_dependent_output in func.tags
        return func(*args, **(kwargs or {}))


def is_number(value: object) -> bool:
    """Returns whether a tensor may stand for an integer, as a length."""
    return isinstance(value, Tensor) and value.numel() == 1 and not value.is_floating_point()
