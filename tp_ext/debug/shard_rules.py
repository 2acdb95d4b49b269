"""What a function of torch may do with a shard that it takes for a tensor like any other: the table of
:func:`tp_ext.debug.check_shards`, by the name of the function.

Nothing here communicates. What is decided depends on layouts and arguments, not on the length of this rank's shard: all
ranks refuse the same call.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tp_ext._ops.tags import has_tag
from tp_ext.sharding import Layout


class KnownShard(NamedTuple):
    """What is known of a tensor whose elements are those of a shard.

    Attributes:
        name: of the parameter.
        text: its layout and the shape of the full tensor, in words.
        cuts: the parts and groups of its sharded dims: equal for shards that hold the same places of full tensors.
        dims: the sharded dims, from the end.
        packed: whether it holds several tensors, one behind the other.
        home: the shape and the ``dims`` of the tensor that it is a view of, in another shape.
    """

    name: str
    text: str
    cuts: tuple[Any, ...]
    dims: tuple[int, ...]
    packed: bool = False
    home: tuple[torch.Size, tuple[int, ...]] | None = None

    @classmethod
    def of_parameter(cls, name: str, param: Tensor, layout: Layout) -> "KnownShard":
        entries = [(sharding, group) for sharding, group in layout if group.size > 1]
        dims = tuple(dict.fromkeys(sharding.dim - param.dim() * (sharding.dim >= 0) for sharding, _ in entries))
        where = " and ".join(f"dim {dim + param.dim()}" for dim in dims)
        text = f"sharded on {where} of shape {tuple(layout.full_shape(param.shape))}"
        return cls(name, text, tuple((sharding.parts, group.name) for sharding, group in entries), dims)

    def meets(self, other: "KnownShard") -> bool:
        """Returns whether elements of the same index belong to the same place of their full tensors."""
        return self.packed or other.packed or (self.cuts, self.dims) == (other.cuts, other.dims)


class RefusedCallError(Exception):
    """A call that would take a shard for the whole; the text says what to call instead."""


KnownShards = Mapping[Tensor, KnownShard]
Marked = Iterator[tuple[Tensor, KnownShard]]
Marker = Callable[[Any], Marked]
"""Given the result of a call, yields the tensors that now hold elements of shards."""

_WHOLE = (
    "compute with the full tensors of tp_ext.full_state_dict(model), and take layout.shard(result), for name, layout "
    "in tp_ext.layouts(model)"
)
_NORM = (
    "the result would be that of the shard: take tp_ext.grad_norm(model) or torch.nn.utils.clip_grad_norm_ for "
    "gradients, tp_ext.full_state_dict(model) for weights"
)
_PRODUCT = (
    "call the layer itself; in place of a loss that takes a head's weight, the model's own, or loss(hidden, targets) "
    "of tp_ext.VocabParallelLMHead"
)
_DRAW = (
    "ranks would not draw the numbers of the full tensor: take init= of the layer, torch.nn.init, or "
    "layout.shard(torch.randn(layout.full_shape(shard.shape))), for name, layout in tp_ext.layouts(model)"
)
_PLACE = f"it takes elements by their place in the shard: {_WHOLE}"
_MEETS = f"the other tensor has another layout, or more elements: {_WHOLE}"
_LEAVES = "what is computed outside of torch cannot be checked: take tp_ext.full_state_dict(model)"


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Sizes, kinds and addresses, and what shows or stores a tensor as it is
_QUERIES = _names(
    "attribute size stride dim ndimension numel nelement element_size storage_offset data_ptr is_contiguous is_complex "
    "is_floating_point is_signed is_same_size is_pinned is_shared is_conj is_neg _is_view get_device result_type "
    "__len__ __hash__ __repr__ __format__ __reduce_ex__ __set__ storage untyped_storage _typed_storage retain_grad "
    "backward requires_grad_ register_hook register_post_accumulate_grad_hook record_stream new_empty new_zeros "
    "new_ones new_full new_tensor set_ is_set_to module_load _has_compatible_shallow_copy_type"
)
_COPIES = _names(
    "data clone detach detach_ contiguous to type float double half bfloat16 type_as cpu cuda pin_memory share_memory_ "
    "zeros_like ones_like full_like empty_like conj resolve_conj resolve_neg tensor as_tensor __deepcopy__ grad"
)
# Of single elements, without aten's tag of such functions
_ELEMENTWISE = _names(
    "copy fill zero masked_fill isfinite isnan isinf nan_to_num clip clamp square where relu true_divide floor_divide "
    "subtract multiply divide greater less not_equal greater_equal less_equal float_power negative absolute isclose "
    "logsigmoid"
)
_OPERATORS = _names("add sub mul div truediv floordiv mod pow and or xor eq ne lt le gt ge pos neg abs invert")
_ORDERED = _names("view reshape flatten ravel unflatten view_as reshape_as")  # take sizes of the shard
_PLACED = _names(
    "T mT H mH t transpose permute movedim swapaxes unsqueeze unsqueeze_ squeeze select narrow chunk split "
    "tensor_split unbind split_with_sizes expand __getitem__"
)
# With the position of the dims among the arguments
_ALONG_DIMS = dict.fromkeys(_names("norm linalg_vector_norm normalize"), 2) | dict.fromkeys(
    _names(
        "sum nansum mean nanmean amax amin max min std var prod all any logsumexp median argmax argmin softmax "
        "log_softmax cumsum count_nonzero"
    ),
    1,
)
_HINTS = {
    _NORM: _names(
        "_foreach_norm _foreach_max linalg_norm equal allclose dot vdot dist std_mean var_mean quantile histc"
    )
    | _ALONG_DIMS.keys(),
    _PRODUCT: _names("linear matmul __rmatmul__ mm bmm addmm mv einsum tensordot bilinear embedding conv1d conv2d"),
    _LEAVES: _names("numpy tolist item __array__ __dlpack__ __bool__ __float__ __int__ __index__"),
}


def name_of(function: Any) -> str:
    """Returns the name of a function without its overload; of a getter that of the attribute."""
    name = str(getattr(function, "__name__", function))
    if name == "__get__":
        attribute = str(getattr(function.__self__, "__name__", ""))
        return attribute if attribute in _COPIES | _PLACED else "attribute"
    return name.partition(".")[0]


def _is_elementwise(name: str) -> bool:
    if name.startswith("__"):
        operator = name.strip("_")
        return operator in _OPERATORS or (operator[0] in "ri" and operator[1:] in _OPERATORS)
    base = name.removeprefix("_foreach_").rstrip("_")
    return base in _ELEMENTWISE or has_tag(base, torch.Tag.pointwise) or base.startswith("_fused_")


def shards_in(known: KnownShards, values: Any) -> list[KnownShard]:
    """Returns what is known of the tensors among arguments, and in lists and dicts of them."""
    if isinstance(values, Tensor):
        return [known[values]] if values in known else []
    entries = values.values() if isinstance(values, dict) else values if isinstance(values, list | tuple) else ()
    return [shard for value in entries for shard in shards_in(known, value)]


def check_call(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], known: KnownShards) -> Marker:
    """Returns what marks the results of a function that is called with shards; raises RefusedCallError if it must not
    be called."""
    args = args or [kwargs.get("input", kwargs.get("self", kwargs.get("tensors")))]
    shard = known.get(args[0]) if isinstance(args[0], Tensor) else None
    if name in _QUERIES or (shard is None and name in _ORDERED):  # of a shard the sizes alone
        return lambda _: iter(())
    if name in _COPIES:
        return lambda made: ((made, shard) for _ in [0] if shard and getattr(made, "shape", None) == args[0].shape)
    if has_tag(name, torch.Tag.nondeterministic_seeded):
        raise RefusedCallError(_DRAW)
    if name in ("cat", "stack", "flatten_dense_tensors"):
        return lambda made: iter([(made, _joined(name, args, kwargs, known, made))])
    if name == "unflatten_dense_tensors":
        return lambda made: ((view, known[like]) for view, like in zip(made, args[1], strict=True) if like in known)
    if name == "__setitem__":
        return _assigned(shard, args, known)
    if shard is not None and (name in _ORDERED or (shard.packed and name in _PLACED)):
        return lambda made: ((view, _ordered(shard, args[0], view)) for view in _tensors(made))
    if shard is not None and name in _PLACED:
        views = _placed(name, shard, args, kwargs)
        return lambda made: zip(_tensors(made), views, strict=True)
    if shard is not None and name in _ALONG_DIMS and (dims := _dims_argument(name, args, kwargs)):
        dims = [dim - args[0].dim() * (dim >= 0) for dim in dims]
        if not shard.packed and not set(dims) & set(shard.dims):
            return lambda made: ((value, _reduced(shard, args[0], dims, value)) for value in _tensors(made))
    hint = next((hint for hint, names in _HINTS.items() if name in names), "")
    # Of two tensors max and min are elementwise
    if name == "where" and len(args) == 1:  # the indices of a mask
        raise RefusedCallError(_PLACE)
    if (name in ("max", "min") and len(args) > 1 and isinstance(args[1], Tensor)) or (
        not hint and _is_elementwise(name)
    ):
        return _elementwise(name, args, kwargs, known)
    raise RefusedCallError(hint or _WHOLE)


def _tensors(made: Any) -> list[Tensor]:
    return [value for value in (made if isinstance(made, tuple | list) else [made]) if isinstance(value, Tensor)]


def _elementwise(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], known: KnownShards) -> Marker:
    values = [*args, *kwargs.values()]
    lists = [value for value in values if isinstance(value, list | tuple) and any(isinstance(x, Tensor) for x in value)]
    single = [value for value in values if isinstance(value, Tensor)]
    # Of a foreach function the tensors meet that have the same place in its lists
    meetings = [[*single, *_tensors(column)] for column in (itertools.zip_longest(*lists) if lists else [()])]
    shards = [_meeting(operands, known) for operands in meetings]

    def mark(made: Any) -> Marked:
        outputs = args[0] if name.endswith("_") and not name.endswith("__") else kwargs.get("out", made)
        for value, shard in zip(outputs if isinstance(outputs, list | tuple) else [outputs], shards, strict=False):
            if shard is not None and isinstance(value, Tensor) and value.dim() and value not in known:
                yield value, shard

    return mark


def _meeting(operands: list[Tensor], known: KnownShards) -> KnownShard | None:
    """Returns what the result of an elementwise function is; raises RefusedCallError if places do not go together."""
    shards = sorted(
        ((tensor, known[tensor]) for tensor in operands if tensor in known), key=lambda pair: pair[1].packed
    )
    if not shards:
        return None
    first, ndim = shards[0][1], max(tensor.dim() for tensor, _ in shards)
    # A number may have any number of dims
    larger = any(tensor.dim() > ndim and tensor.numel() != 1 for tensor in operands if tensor not in known)
    if larger or not all(first.meets(shard) for _, shard in shards):
        raise RefusedCallError(_MEETS)
    return first


def _assigned(shard: KnownShard | None, args: Sequence[Any], known: KnownShards) -> Marker:
    target, index, value = args[:3]
    if shard is None:  # a place of another tensor, which the caller has chosen by this rank's sizes
        raise RefusedCallError(_PLACE)
    is_mask = isinstance(index, Tensor) and index.dtype is torch.bool and index.shape == target.shape
    if not is_mask and not shard.packed:
        _placed("__getitem__", shard, [target, index], {})
    if isinstance(value, Tensor) and value.dim():
        _meeting([target, value], known)
    return lambda _: iter(())


def _ordered(shard: KnownShard, tensor: Tensor, view: Tensor) -> KnownShard:
    """Returns what a view is that keeps the order of the elements."""
    if shard.packed or view.shape == tensor.shape:
        return shard
    home = shard.home or (tensor.shape, shard.dims)
    # In another shape any of the dims may have elements of several places
    same, mixed = shard._replace(dims=home[1], home=None), tuple(range(-view.dim(), 0))
    return same if view.shape == home[0] else shard._replace(dims=mixed, home=home)


# [Note: views of shards are found by running them]
_LENGTH = 1009  # in place of a sharded dim's length, which differs over the ranks; larger than what is asked of a part


def _placed(name: str, shard: KnownShard, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[KnownShard]:
    """Returns what the views of a shard are whose sharded dims are whole; raises RefusedCallError of all others."""
    whole = torch.empty(
        [_LENGTH if i - args[0].dim() in shard.dims else n for i, n in enumerate(args[0].shape)], device="meta"
    )
    strides = whole.stride()  # a view in place changes them
    try:
        member = getattr(whole, name)
        views = _tensors(member if isinstance(member, Tensor) else member(*args[1:], **kwargs))
    except (RuntimeError, IndexError, TypeError, ValueError):
        raise RefusedCallError(_PLACE) from None
    known = []
    for view in views:
        places = {(view.size(i), view.stride(i)): i - view.dim() for i in range(view.dim())}
        dims = [places.get((_LENGTH, strides[dim])) for dim in shard.dims]
        if None in dims:
            raise RefusedCallError(_PLACE)
        known.append(shard._replace(dims=tuple(dim for dim in dims if dim is not None), home=None))
    return known


def _joined(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], known: KnownShards, made: Tensor) -> KnownShard:
    """Returns what a tensor of several is: of like shards, along another dim than theirs, such a shard."""
    shards, dim = shards_in(known, args[0]), kwargs.get("dim", args[1] if len(args) > 1 else 0)
    first = shards[0]
    if len(shards) == len(args[0]) and name != "flatten_dense_tensors" and not any(other.packed for other in shards):
        dim -= made.dim() * (dim >= 0)
        dims = tuple(other - (name == "stack" and other <= dim) for other in first.dims)
        if dim not in dims and all(first.meets(other) for other in shards):
            return first._replace(dims=dims, home=None)
    return first._replace(packed=True)


def _reduced(shard: KnownShard, tensor: Tensor, dims: list[int], made: Tensor) -> KnownShard:
    removed = dims if made.dim() < tensor.dim() else []
    return shard._replace(dims=tuple(dim + sum(other > dim for other in removed) for dim in shard.dims), home=None)


def _dims_argument(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[int]:
    """Returns the dims that a function runs along; empty: all of them."""
    position = _ALONG_DIMS[name]
    dim = kwargs.get("dim", kwargs.get("axis", args[position] if len(args) > position else None))
    dims = [dim] if isinstance(dim, int) and not isinstance(dim, bool) else dim
    return [*dims] if isinstance(dims, list | tuple) and all(isinstance(entry, int) for entry in dims) else []
