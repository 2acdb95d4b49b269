"""Rules of operators over channels: convolutions, norms over batches and groups, pooling, resampling; of the norm of a
weight; of products and tables with options."""

from __future__ import annotations

import math
import re

from tp_ext.auto.record.dims import Atom, Dim, Reason, atoms, concatenate, length
from tp_ext.auto.record.rules import OperatorCall, no_rule, rule
from tp_ext.auto.record.torch_rules import span_of


def _places(op: OperatorCall, number: int, result: int = 0) -> list[Dim]:
    """The last dims of a result, new and whole: places of an image."""
    return [[Atom(n, op.reason)] for n in op.outputs[result].shape[-number:]]


@rule("convolution")
def convolution(op: OperatorCall) -> None:
    """Input channels are summed over, within their group; groups pass, places are whole."""
    x, weight, groups, transposed = op.dims(0), op.dims(1), op.args[8], op.args[6]
    spatial = op.inputs[1].dim() - 2
    # A window reads places of its neighbours, which would be on another rank
    op.pin(*x[-spatial:], *weight[2:])
    into, out = (weight[0], weight[1]) if transposed else (weight[1], weight[0])
    if groups == 1:
        op.unify(x[-spatial - 1], into)
        op.contracted = into
    else:
        by_group = [
            Atom(groups)
        ]  # those of x and of the weight's dim 0 are the same; the other dim has those of one group
        inputs = op.inputs[0].shape[-spatial - 1] // groups
        outputs = op.outputs[0].shape[-spatial - 1] // groups
        # A group is whole on a rank: each of its outputs sums over all of its channels
        op.pin(weight[1])
        op.unify(x[-spatial - 1], [*by_group, Atom(inputs, op.reason)])
        op.unify(weight[0], [*by_group, Atom(inputs if transposed else outputs, op.reason)])
        out = [*by_group, Atom(outputs, op.reason)]
    op.give([*x[: -spatial - 1], out, *_places(op, spatial)])
    if len(op.inputs) > 2:
        op.unify(op.dims(2)[0], out)


@rule("batch norm")
def batch_norm(op: OperatorCall) -> None:
    """Each channel is normalized by itself, over all other dims."""
    batch, channels, *places = op.dims()
    # The mean of a rank's part of the batch or of the places is another mean
    op.pin(batch, *places)
    for tensor in op.inputs[1:]:
        op.unify(op.dims_of(tensor)[0], channels)
    op.give(op.dims())
    for place, result in enumerate(op.outputs[1:], 1):  # mean and reciprocal deviation; what a backend keeps
        # cuDNN also returns a reserve of bytes, which has no channels
        if tuple(result.shape) == (length(channels),):
            op.give([channels], place)


def group_norm(op: OperatorCall, groups: int) -> None:
    """Groups of channels pass; what a group normalizes is whole. A second result has the statistics of each group."""
    batch, channels, *places = op.dims()
    by_group = [Atom(groups)]
    # A part of a group would be normalized by its own mean
    op.unify(channels, [*by_group, Atom(length(channels) // groups, op.reason)])
    op.pin(*places)
    for tensor in op.inputs[1:]:
        op.unify(op.dims_of(tensor)[0], channels)
    op.give(op.dims())
    for place in range(1, len(op.outputs)):
        op.give([batch, by_group], place)


@rule("native_group_norm")
def native_group_norm(op: OperatorCall) -> None:
    group_norm(op, op.args[6])


@rule("resampled")
def resampled(op: OperatorCall) -> None:
    """Places are whole; channels and what is before them pass."""
    spatial = int(re.findall(r"(\d)d", op.name)[0])
    op.pin(*op.dims()[-spatial:])
    for result in range(len(op.outputs)):  # indices, too
        op.give([*op.dims()[:-spatial], *_places(op, spatial, result)], result)


@rule("pixel_shuffle", "pixel_unshuffle")
def pixel_shuffle(op: OperatorCall) -> None:
    """[C r r, H, W] and [C, H r, W r], in either direction."""
    factor = op.args[1]
    *lead, channels, height, width = op.dims()
    # The factors become places, of which a rank needs all: whole blocks of r x r channels are sharded
    inside = [Atom(factor, op.reason), Atom(factor, op.reason)]
    op.pin(height, width)
    if op.name == "pixel_shuffle":
        of_result: Dim = [Atom(op.outputs[0].shape[-3])]
        op.unify(channels, [*of_result, *inside])
    else:
        of_result = [*channels, *inside]
    op.give([*lead, of_result, *_places(op, 2)])


@rule("im2col", "col2im")
def unfolded_image(op: OperatorCall) -> None:
    """[.., C, H, W] and [.., C k k, places], in either direction."""
    kernel = math.prod(op.args[1] if op.name == "im2col" else op.args[2])
    inside = [Atom(kernel, op.reason)]
    if op.name == "im2col":
        *lead, channels, height, width = op.dims()
        op.pin(height, width)
        op.give([*lead, [*channels, *inside], *_places(op, 1)])
    else:
        *lead, channels, places = op.dims()
        of_result: Dim = [Atom(op.outputs[0].shape[-3])]
        op.pin(places)
        op.unify(channels, [*of_result, *inside])
        op.give([*lead, of_result, *_places(op, 2)])


@rule("_fft_r2c", "_fft_c2c", "_fft_c2r")
def fourier(op: OperatorCall) -> None:
    dims = list(op.dims())
    for axis in op.args[1]:
        # Each frequency is a sum over the whole dim
        op.pin(dims[axis])
        dims[axis] = [Atom(op.outputs[0].shape[axis], op.reason)]
    op.give(dims)


@rule("log_sigmoid_forward")
def log_sigmoid(op: OperatorCall) -> None:
    for place, result in enumerate(op.outputs):  # the second is for backward, empty on some devices
        if result.shape == op.inputs[0].shape:
            op.give(op.dims(), place)


@rule("glu")
def glu(op: OperatorCall) -> None:
    """The two halves of a dim are parts, each with the dim of the result."""
    dims = list(op.dims())
    axis = op.argument(1, "dim", -1) % len(dims)
    half = op.outputs[0].shape[axis]
    concatenate(dims[axis], [half], op.reason)
    now = atoms(dims[axis])
    first, second = span_of(now, 0, half), span_of(now, half, 2 * half)
    # An edge in the middle may cut an inner factor. Then the dim has no two halves that a rank could shard alike
    if first is None or second is None:
        op.pin(dims[axis])
        dims[axis] = [Atom(half, op.reason)]
    else:
        # An element is multiplied by that of the other half: a rank needs the same shard of both halves
        op.unify(first, second)
        dims[axis] = first
    op.give(dims)


@rule("_trilinear")
def trilinear(op: OperatorCall) -> None:
    """A product of three tensors, each with new dims of one element at places of its own, summed over some dims."""
    number = op.inputs[0].dim() + len(op.args[3])
    full: list[Dim | None] = [None] * number
    for tensor, new in zip(op.inputs, op.args[3:6], strict=True):
        dims = iter(op.dims_of(tensor))
        for i in range(number):
            if i in new:
                continue
            dim = next(dims)
            known = full[i]
            # A dim of one element is broadcast: another tensor gives the dim of the result
            if known is None or length(known) == 1:
                full[i] = dim
            elif length(dim) == length(known):
                op.unify(known, dim)
    known_dims = [dim or [] for dim in full]
    op.contracted = [atom for i in op.args[6] for atom in known_dims[i]]
    op.give([dim for i, dim in enumerate(known_dims) if i not in op.args[6]])


@rule("_weight_norm_interface")
def weight_norm(op: OperatorCall) -> None:
    """v g / |v|: the norm is over all dims but one, that of g."""
    axis = op.argument(2, "dim", 0) % op.inputs[0].dim()
    v, g = op.dims(0), op.dims(1)
    op.pin(*(dim for i, dim in enumerate(v) if i != axis))
    op.unify(v[axis], g[axis])
    op.give(v)
    op.give(g, 1)


def _named(op: OperatorCall, option: str) -> Reason:
    """The reason that an option of an operator keeps dims whole."""
    return Reason(f"{option} of {op.name.strip('_')}", op.reason.module, op.reason.line)


@rule("embedding")
def embedding(op: OperatorCall) -> None:
    """Rows are summed over, as each rank has others; the features pass."""
    (rows, features), ids = op.dims(0), op.dims(1)
    op.contracted = rows
    # The look-up of shards has neither option. It would drop them without an error
    for place, option in ((3, "scale_grad_by_freq"), (4, "sparse")):
        if op.argument(place, option, False):
            op.reason = _named(op, f"{option}=True")
            op.pin(rows)
    op.give([*ids, features])


@rule("embedding_renorm_")
def renorm(op: OperatorCall) -> None:
    """Rows whose norm exceeds ``max_norm`` are written by the forward: a table stays whole."""
    op.reason = Reason("max_norm of embedding", op.reason.module, op.reason.line)
    op.pin(*op.dims())


BAGS = ("sum", "mean", "max")  # by the number that torch gives the mode


@rule("_embedding_bag", "_embedding_bag_forward_only")
def embedding_bag(op: OperatorCall) -> None:
    """Rows are summed over, unless the largest is taken or an option needs all of them; the features pass."""
    rows, features = op.dims(0)
    options = ((3, "scale_grad_by_freq"), (5, "sparse"))
    named = [f"{name}=True" for place, name in options if op.argument(place, name, False)]
    if BAGS[op.argument(4, "mode", 0)] == "max":
        named.append("mode='max'")
    for option in named:
        op.reason = Reason(f"{option} of embedding_bag", op.reason.module, op.reason.line)
        op.pin(rows)
    op.contracted = rows
    # Any index may be a row of any rank, so that all ranks need all indices, offsets and weights
    op.pin(*(dim for tensor in op.inputs[1:] for dim in op.dims_of(tensor)))
    op.give([[Atom(op.outputs[0].shape[0], op.reason)], features])
    for place, result in enumerate(op.outputs[1:], 1):  # bags of indices, their sizes, the indices of the largest
        last: Dim = features if result.dim() == 2 and result.shape[1] == length(features) else []
        op.give([[Atom(n, op.reason)] for n in result.shape[:1]] + [last] * (result.dim() - 1), place)


@rule("_grouped_mm")
def grouped_mm(op: OperatorCall) -> None:
    """Rows by groups, ``t k, g k n -> t n``: features are sharded in units of 16 bytes, which its rows need."""
    # With two 2-D operands the groups divide the summed dim, with 3-D ones they are a batch: this rule fits neither
    if [t.dim() for t in op.inputs[:2]] != [2, 3]:
        return no_rule(op)
    (tokens, into), (groups, k, n) = op.dims(0), op.dims(1)
    op.unify(into, k)
    aligned = 16 // op.inputs[0].element_size()
    unit = Reason(f"rows of {aligned} elements (16 bytes) of _grouped_mm", op.reason.module, op.reason.line)
    for dim in (k, n):
        size = length(dim)
        if size % aligned == 0:
            op.unify(dim, [Atom(size // aligned), Atom(aligned, unit)])
    op.pin(tokens, groups, *(dim for tensor in op.inputs[2:] for dim in op.dims_of(tensor)))
    op.contracted = k
    op.give([tokens, n])
