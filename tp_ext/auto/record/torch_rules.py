"""Rules of the operators of torch that are not a line of notation."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from tp_ext.auto.record.dims import Atom, Dim, atoms, concatenate, divide, length, split_off
from tp_ext.auto.record.operators import row_of
from tp_ext.auto.record.rules import OperatorCall, no_rule, pointwise, rule


@rule("view", "_unsafe_view", "reshape", "_reshape_alias")
def view(op: OperatorCall) -> None:
    """The atoms in order make the new dims; one is divided where a new dim ends inside of it."""
    left = atoms([atom for dim in op.dims() for atom in dim])
    sizes = list(op.outputs[0].shape)
    result: list[Dim] = []
    while len(result) < len(sizes):
        size = sizes[len(result)]
        dim: Dim = []
        while length(dim) < size and left:
            atom, need = left[0], size // length(dim)
            # The new dim ends at no factor of this atom: without this check a view of ProphetNet never ended
            if size % length(dim) or (atom.size > need and atom.size % need):
                break
            left.pop(0)
            if atom.size <= need:
                dim.append(atom)
            elif atom.parts is None:
                divide(atom, need, op.reason)
                left = atoms([atom]) + left
            elif _equal_parts(atom, need):
                _divide_parts(op, atom, need)
                left = atoms([atom]) + left
            else:
                # Parts of unequal length are no product: the rows of the view would mix them
                op.pin([atom])
                dim.append(Atom(need, op.reason))
                left.insert(0, Atom(atom.size // need, op.reason))
        if length(dim) == size:
            result.append(dim)
        else:
            result += _unfactored(op, dim, left, sizes[len(result) :])
    op.pin(left)
    op.give(result)


def _unfactored(op: OperatorCall, taken: Dim, left: Dim, sizes: list[int]) -> list[Dim]:
    """The next new dims, up to one that ends where an atom ends; pinned, as are these atoms, which leave ``left``."""
    op.pin(taken)
    before, number = length(taken), 1
    after = sizes[0]
    while before != after:
        if before < after and left:
            op.pin(left[:1])
            before *= left.pop(0).size
        elif number < len(sizes):
            after *= sizes[number]
            number += 1
        else:
            break
    return [[Atom(size, op.reason)] for size in sizes[:number]]


def _equal_parts(atom: Atom, number: int) -> bool:
    return atom.parts is not None and len(atom.parts) == number and len(set(map(length, atom.parts))) == 1


def _divide_parts(op: OperatorCall, atom: Atom, number: int) -> None:
    """q | k | v seen as [3, h d]: the three parts are one dim."""
    assert atom.parts is not None
    first, *others = atom.parts
    for part in others:
        op.unify(first, part)
    atom.parts = None
    atom.same = [Atom(number, op.reason), *first]


@rule("t", "numpy_T")
def transpose_all(op: OperatorCall) -> None:
    op.give(op.dims()[::-1])


@rule("transpose", "swapaxes")
def transpose(op: OperatorCall) -> None:
    dims = list(op.dims())
    i, j = op.args[1], op.args[2]
    dims[i], dims[j] = dims[j], dims[i]
    op.give(dims)


@rule("permute")
def permute(op: OperatorCall) -> None:
    op.give([op.dims()[i] for i in op.args[1]])


@rule("unsqueeze")
def unsqueeze(op: OperatorCall) -> None:
    dims = list(op.dims())
    dims.insert(op.args[1] % op.outputs[0].dim(), [])
    op.give(dims)


@rule("squeeze")
def squeeze(op: OperatorCall) -> None:
    x = op.inputs[0]
    which = op.argument(1, "dim")
    dropped = range(x.dim()) if which is None else [which] if isinstance(which, int) else which
    gone = {i % x.dim() for i in dropped if x.shape[i] == 1}
    op.give([dim for i, dim in enumerate(op.dims()) if i not in gone])


@rule("expand")
def expand(op: OperatorCall) -> None:
    x, shape = op.inputs[0], op.outputs[0].shape
    new = len(shape) - x.dim()
    # A dim that is repeated gets a new atom: nothing relates it to the element that it repeats
    op.give([op.dims()[i - new] if i >= new and x.shape[i - new] == n else [Atom(n)] for i, n in enumerate(shape)])


@rule("repeat")
def repeat(op: OperatorCall) -> None:
    x, shape = op.inputs[0], op.outputs[0].shape
    new = len(shape) - x.dim()
    result: list[Dim] = [[Atom(n)] for n in shape[:new]]
    for dim, size, n in zip(op.dims(), x.shape, shape[new:], strict=True):
        # The copies follow each other, so that their number is the slower factor: a rank has all copies of its shard
        result.append(dim if size == n else [Atom(n // size, op.reason), *dim])
    op.give(result)


@rule("split", "split_with_sizes", "chunk", "unsafe_split")
def split_tensor(op: OperatorCall) -> None:
    axis = op.argument(2, "dim", 0) % op.inputs[0].dim()
    ends = list(itertools.accumulate(t.shape[axis] for t in op.outputs))
    _spans(op, axis, list(zip([0, *ends[:-1]], ends, strict=True)))


@rule("slice")
def slice_(op: OperatorCall) -> None:
    x, y = op.inputs[0], op.outputs[0]
    axis = op.argument(1, "dim", 0) % x.dim()
    start, step = op.argument(2, "start") or 0, op.argument(4, "step", 1)
    start = max(0, start + x.shape[axis]) if start < 0 else start
    if step == 1:
        _spans(op, axis, [(start, start + y.shape[axis])])
        return
    dims = list(op.dims())
    # Only a step that divides the dim makes the slice a column of [n / step, step]
    halves = split_off(dims[axis], step, op.reason) if y.shape[axis] * step == x.shape[axis] else None
    if halves is None:
        op.pin(dims[axis])
        dims[axis] = [Atom(y.shape[axis], op.reason)]
    else:  # every step-th of a dim of interleaved parts
        op.pin(halves[1])
        dims[axis] = halves[0]
    op.give(dims)


def _spans(op: OperatorCall, axis: int, spans: Sequence[tuple[int, int]]) -> None:
    """The outputs are these spans of one dim, which becomes the concatenation of them."""
    dims, full = op.dims(), op.inputs[0].shape[axis]
    # A concatenation of a single part would hide the factors of the dim
    if spans == [(0, full)]:
        op.give(dims)
        return
    concatenate(dims[axis], sorted({end for span in spans for end in span} - {0, full}), op.reason)
    now = atoms(dims[axis])
    for place, (start, stop) in enumerate(spans):
        part = span_of(now, start, stop) or [Atom(stop - start, op.reason)]
        op.give([*dims[:axis], part, *dims[axis + 1 :]], place)


def span_of(dim: Dim, start: int, stop: int) -> Dim | None:
    """The parts of a concatenation from one edge to another; None if these are no edges."""
    # There are no edges: concatenate has pinned the dim in place of making parts
    if not dim or dim[0].parts is None:
        return None
    rest, parts, at = dim[1:], [], 0
    for part in dim[0].parts:
        size = length(part) * length(rest)
        if start <= at and at + size <= stop:
            parts.append(part)
        at += size
    if len(parts) == 1:
        return [*parts[0], *rest]
    # Several parts together, such as q and k of q | k | v, are a concatenation of their own
    whole = Atom(sum(map(length, parts)))
    whole.parts = parts
    return [whole, *rest] if parts and whole.size * length(rest) == stop - start else None


@rule("select", "unbind")
def select(op: OperatorCall) -> None:
    axis = op.argument(1, "dim", 0) % op.inputs[0].dim()
    dims = op.dims()
    # The same position of a shard is another element on each rank
    op.pin(dims[axis])
    for place in range(len(op.outputs)):
        op.give(dims[:axis] + dims[axis + 1 :], place)


@rule("cat")
def cat(op: OperatorCall) -> None:
    axis = op.argument(1, "dim", 0) % op.outputs[0].dim()
    result = op.fresh()
    inputs = [t for t in op.inputs if t.numel()] or op.inputs  # cat drops empty ones
    if len(inputs) > 1:
        result[axis][0].parts = [op.dims_of(t)[axis] for t in inputs]
    for tensor in inputs:
        for i, dim in enumerate(op.dims_of(tensor)):
            if i != axis or len(inputs) == 1:
                op.unify(dim, result[i])
    op.give(result)


@rule("stack")
def stack(op: OperatorCall) -> None:
    axis = op.argument(1, "dim", 0) % op.outputs[0].dim()
    result = op.fresh()
    op.pin(result[axis])
    for tensor in op.inputs:
        for i, dim in enumerate(op.dims_of(tensor)):
            op.unify(dim, result[i + (i >= axis)])
    op.give(result)


@rule("index", "_unsafe_index")
def index(op: OperatorCall) -> None:
    """x[i, j]: the indexed dims are whole, the others stay."""
    indices = op.args[1]
    at = [i for i, t in enumerate(indices) if t is not None]
    # A mask selects by its values, so that the length of the result is data
    if any(indices[i].dtype == torch.bool for i in at):
        return no_rule(op)
    dims = op.dims()
    op.pin(*(dims[i] for i in at))
    # As torch: the dims of indices that are not next to each other come first
    together = at == list(range(at[0], at[0] + len(at)))
    lead, size = at[0] if together else 0, max(indices[i].dim() for i in at)
    rest = [dim for i, dim in enumerate(dims) if i not in at]
    op.give([*rest[:lead], *op.fresh()[lead : lead + size], *rest[lead:]])


@rule("gather")
def gather(op: OperatorCall) -> None:
    axis = op.argument(1, "dim") % op.inputs[0].dim()
    dims, wanted = op.dims(), op.dims(1)
    op.pin(dims[axis])
    for i, dim in enumerate(dims):
        if i != axis:
            # A shorter index reads the first positions of the full dim, which only the first ranks have
            op.unify(dim, wanted[i]) if op.inputs[0].shape[i] == op.inputs[1].shape[i] else op.pin(dim, wanted[i])
    op.give(wanted)


@rule("native_layer_norm", "_fused_rms_norm", "rms_norm")
def norm(op: OperatorCall) -> None:
    dims = op.dims()
    normalized = dims[-len(op.args[1]) :]
    op.sum_over(*normalized) if len(normalized) == 1 else op.pin(*normalized)
    for tensor in op.inputs[1:]:
        for one, other in zip(op.dims_of(tensor), normalized, strict=True):
            op.unify(one, other)
    op.give(dims)
    for place in range(1, len(op.outputs)):  # mean and reciprocal deviation
        op.give([*dims[: -len(normalized)], *([] for _ in normalized)], place)


@rule("reduction")
def reduction(op: OperatorCall) -> None:
    """The dims that an operator reduces, sorts or scans are whole; the others stay."""
    x = op.inputs[0]
    # An overload without such an argument reduces all dims
    arguments = [(i, a) for i, a in enumerate(op.schema.arguments) if a.name in ("dim", "dims")]
    which = op.argument(arguments[0][0], arguments[0][1].name, arguments[0][1].default_value) if arguments else None
    # max(x, y) is elementwise
    if isinstance(which, Tensor) or (op.name in ("max", "min") and len(op.inputs) > 1):
        return pointwise(op)
    # As torch: an empty list of dims means all
    reduced = range(x.dim()) if which is None or which == [] else [which] if isinstance(which, int) else which
    at = {i % x.dim() for i in reduced} if x.dim() else set()
    dims = op.dims()
    (op.sum_over if row_of(op.name).is_sum else op.pin)(*(dims[i] for i in sorted(at)))
    for place, result in enumerate(op.outputs):
        if result.dim() != x.dim():
            op.give([dim for i, dim in enumerate(dims) if i not in at], place)
            continue
        # A dim of another length (topk) has other elements
        sizes = zip(dims, x.shape, result.shape, strict=True)
        op.give([dim if n == m else [Atom(m, op.reason)] for dim, n, m in sizes], place)


@rule("zeros_like", "ones_like", "empty_like", "full_like")
def filled_like(op: OperatorCall) -> None:
    op.give(op.dims())


@rule("new_empty", "new_zeros", "new_full", "new_ones", "new_empty_strided", "new_tensor")
def new(op: OperatorCall) -> None:
    op.give(op.fresh())


@rule("constant_pad_nd")
def pad(op: OperatorCall) -> None:
    dims = op.dims()
    for i, (n, m) in enumerate(zip(op.inputs[0].shape, op.outputs[0].shape, strict=True)):
        # The padding is at the ends of the full dim, which only the first and the last rank have
        if n != m:
            op.pin(dims[i])
            dims = [*dims[:i], [Atom(m, op.reason)], *dims[i + 1 :]]
    op.give(dims)


@rule("addmm", "baddbmm", "addbmm")
def matmul_and_add(op: OperatorCall) -> None:
    left, right = op.dims(1), op.dims(2)
    op.unify(left[-1], right[-2])
    if len(left) == 3:
        op.unify(left[0], right[0])
    op.contracted = left[-1]
    result = [*(left if op.outputs[0].dim() == len(left) else left[1:])[:-1], right[-1]]
    op.give(result)
    # After the product: the added tensor may be a vector, which gets its dim from the result
    op.broadcast(op.inputs[:1], result, op.outputs[0].shape)


@rule("index_select")
def index_select(op: OperatorCall) -> None:
    axis = op.args[1] % op.inputs[0].dim()
    dims = list(op.dims())
    op.pin(dims[axis])
    dims[axis] = [Atom(op.outputs[0].shape[axis])]
    op.give(dims)


@rule("written by index")
def scatter(op: OperatorCall) -> None:
    """The dim that is indexed is whole, in all tensors; the others are the same in the source and in indices of all
    dims."""
    x, source = op.inputs[0], op.inputs[-1]
    dims = op.dims()
    axis = op.args[1] % x.dim() if len(op.args) > 1 and isinstance(op.args[1], int) else 0
    op.pin(dims[axis])
    op.give(dims)
    for tensor in op.inputs[1:]:
        # An index of fewer dims, as of index_add, has the positions of the whole dim alone
        if tensor.dim() != x.dim() or (tensor is not source and tensor.dtype != torch.int64):
            continue
        for i, dim in enumerate(op.dims_of(tensor)):
            if i != axis and tensor.shape[i] == x.shape[i]:
                op.unify(dim, dims[i])
            else:
                op.pin(dim, dims[i])


@rule("index_put", "index_put_", "_index_put_impl_")
def index_put(op: OperatorCall) -> None:
    indices, values = op.args[1], op.args[2]
    at = [i for i, t in enumerate(indices) if t is not None]
    if any(indices[i].dtype == torch.bool for i in at):
        return no_rule(op)
    dims, value_dims = op.dims(), op.dims_of(values)
    op.pin(*(dims[i] for i in at))
    op.give(dims)
    rest = [dim for i, dim in enumerate(dims) if i not in at]
    op.pin(*value_dims[: max(0, len(value_dims) - len(rest))])  # a value for each index
    for dim, value_dim, size in zip(reversed(rest), reversed(value_dims), reversed(values.shape), strict=False):
        if length(dim) == size:
            op.unify(dim, value_dim)
        else:
            op.pin(value_dim)


@rule("view_as_real")
def view_as_real(op: OperatorCall) -> None:
    op.give([*op.dims(), [Atom(2, op.reason)]])


@rule("unfold")
def unfold(op: OperatorCall) -> None:
    axis, result = op.args[1] % op.inputs[0].dim(), op.outputs[0]
    dims = list(op.dims())
    # A window at the end of a shard needs elements of the next rank
    op.pin(dims[axis])
    dims[axis] = [Atom(result.shape[axis], op.reason)]
    op.give([*dims, [Atom(result.shape[-1], op.reason)]])


@rule("diagonal")
def diagonal(op: OperatorCall) -> None:
    # The diagonal of a shard begins at the first row of that shard, at another element than that of the full tensor
    op.pin(*op.dims())
    op.give(op.fresh())


@rule("where")
def where(op: OperatorCall) -> None:
    if len(op.inputs) > 1:
        return pointwise(op)
    no_rule(op)  # the places of true elements: lengths are data
