"""The norm of the full gradient, and clipping by it."""

import functools
import inspect
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.tensor import DTensor

from tp_ext import _ops
from tp_ext._build import load
from tp_ext.group import NOT_GIVEN, Group, global_ranks, group_name, layer_group, parallel_group
from tp_ext.invariance import one_thread
from tp_ext.mesh import MeshAxes, mesh_axes
from tp_ext.model.census import census, warn_unneeded_group
from tp_ext.model.model_groups import ModelGroups, axes_of_groups
from tp_ext.model.stages import Stages
from tp_ext.sharding import Layout

# A parameter, its layout, and the terms of its gradient: .grad, main_grad, or both, for a weight tied to another
# layer's. There may be thousands: hence plain tuples, and loops without calls.
GradientRow = tuple[Tensor, Layout, list[Tensor]]
Given = Stages | Iterable[Tensor] | Tensor
Groups = Group | Sequence[Group]

_DTYPES = {torch.float64, torch.float32, torch.bfloat16, torch.float16}  # supported by our kernels; their devices below
_DEVICES = {"cpu", "cuda"} if load().build_info()["cuda"] else {"cpu"}
_WIDER = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # to which a norm is rounded
_RANKS = 2**13  # more than a group has: the ranks of four dtypes are counted exactly in one number of fp64
_UNKNOWN: Any = object()


@torch.no_grad()
def clip_grad_norm_(
    parameters_or_module: Given,
    max_norm: float,
    norm_type: float = 2.0,
    *,
    group: Group = NOT_GIVEN,
    mesh: DeviceMesh | None = None,
    extra_groups: Groups = (),
    exclude: Iterable[Tensor] = (),
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Clips as ``torch.nn.utils.clip_grad_norm_`` of the unsharded model: gradients times
    min(1, max_norm / (norm + 1e-6)), with the norm of :func:`grad_norm`.

    Args:
        max_norm: as torch.
        parameters_or_module, norm_type, group, mesh, extra_groups, exclude, error_if_nonfinite, foreach: as
            :func:`grad_norm`; the gradients of ``exclude`` are scaled, too.

    Returns:
        The norm before clipping, the same on all ranks.

    Communicates and raises as :func:`grad_norm`. ValueError: a negative max_norm.
    """
    max_norm = _checked_max(max_norm)
    exact, dtypes, table = _exact_norm(parameters_or_module, norm_type, group, mesh, extra_groups, exclude, foreach)
    return _clipped(exact, dtypes, table, max_norm, norm_type, error_if_nonfinite, foreach)


def _checked_max(max_norm: float) -> float:
    max_norm = float(max_norm)  # as torch, "inf" too
    if not max_norm >= 0:
        raise ValueError(f"max_norm: {max_norm} must be at least 0")
    return max_norm


def _clipped(
    exact: Tensor,
    dtypes: set[torch.dtype],
    table: Sequence[GradientRow],
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
    foreach: bool | None,
) -> Tensor:
    """Scales the gradients of the rows, and returns the norm in its final dtype."""
    total = _checked(exact, dtypes, norm_type, error_if_nonfinite)
    # Each only once, even if given twice: the kernel processes all at the same time
    stored = {id(grad): grad for _, _, terms in table for grad in terms}
    _clip([*map(local_gradient, stored.values())], max_norm, exact if foreach is not False else total, foreach)
    return total


@torch.no_grad()
def norm_of_rows(
    rows: Sequence[GradientRow],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    listed: int | None = None,
    max_norm: float | None = None,
) -> Tensor:
    """Computes :func:`grad_norm` of parameters whose layouts are given, and with ``max_norm`` clips as
    :func:`clip_grad_norm_`; communicates and raises as these.

    Args:
        rows: a parameter, its layout, empty for one that is no shard, and the terms of its gradient.
        listed: how many of them the caller has listed, None: all; later ones have no terms.
    """
    if max_norm is not None:
        max_norm = _checked_max(max_norm)
    # In one order of axes, whatever the order of a rank's rows: a sum over two axes is of sums over the first one
    of_rows = {group.name: group for _, layout, _ in rows for _, group in layout}
    groups = axes_of_groups(sorted(of_rows.values(), key=lambda group: [rank - group.ranks[0] for rank in group.ranks]))
    _refuse_tangents(rows)
    dtypes = _dtypes(rows)
    exact = _norm(rows if norm_type else rows[:listed], float(norm_type), groups, (), set(), foreach, dtypes)
    if max_norm is None:
        return _checked(exact, dtypes, norm_type, error_if_nonfinite)
    return _clipped(exact, dtypes, rows, max_norm, norm_type, error_if_nonfinite, foreach)


@torch.no_grad()
def grad_norm(
    parameters_or_module: Given,
    norm_type: float = 2.0,
    *,
    group: Group = NOT_GIVEN,
    mesh: DeviceMesh | None = None,
    extra_groups: Groups = (),
    exclude: Iterable[Tensor] = (),
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Computes the norm of the unsharded model's gradient as one vector. Every element counts once: shards on their
    rank, replicated gradients on the first of the ranks that hold them, of copied KV heads the first copy, padding
    never, tied weights once. Layers and parameters may be sharded over different groups (:class:`Layout`). Under FSDP2
    every rank counts the elements that it stores; replicas along a data axis (DDP, HSDP) count once.

    Args:
        parameters_or_module: the module; or a list of the stages of a pipeline that this rank holds; or parameters that
            still carry ``tp_layout``. The gradient of a parameter is
            its ``.grad`` plus its ``main_grad``, if it has one (``grad_accumulation_fusion``).
        norm_type: any order of torch, negative and infinite ones, too; 0: the number of parameters whose gradient is
            not zero, as torch has it.
        group: deprecated: the groups of the module's layers and of the layouts of parameters are known. If given, it
            must be one of them. Parameters that carry ``tp_sharding`` alone need it.
        mesh: in place of ``group`` and ``extra_groups``: a mesh with axes as of :func:`tp_ext.init_mesh`. The
            norm is that over the stages of all ranks of ``pp``; along ``dp``, ``ep`` and ``cp`` gradients are equal,
            unless FSDP2 or their layouts shard them.
        extra_groups: one or several other groups whose ranks hold different parameters, such as a pipeline's,
            ``mesh["pp"]``. FSDP2's data axes are known from its parameters; do not list DDP's.
        exclude: parameters that this rank does not count, since a rank of ``extra_groups`` counts them: those of the
            second of two stages that hold copies of one tied weight, with the same gradient. Copies that
            :func:`declare_tied` has declared are excluded by themselves.
        error_if_nonfinite: as torch.
        foreach: None or True: the squares of all tensors are added in one pass, in fp64, whatever their dtypes
            (``norm_type=2``; other orders as torch). False: tensor by tensor, as torch.

    Returns:
        The norm, the same on all ranks, in the widest dtype of the gradients. The one-pass norm is rounded
        once to that dtype, is finite where squares overflow in it, and is the same for any number of threads.

    Communicates: one all-reduce over every group, every axis of FSDP2's mesh and every extra group: of one number, of
    two over an extra group, whose ranks may have gradients of other dtypes, or none.

    Raises:
        ValueError: a bare parameter without ``tp_layout`` (pass the module), or a shard whose group is not known; a
            group that is not one of the module's; a norm_type that is NaN; a mesh with other axes.
        TypeError: an element that is no parameter; ``mesh`` together with ``group`` or ``extra_groups``.
        RuntimeError: ``error_if_nonfinite`` and the norm is not finite.
        NotImplementedError: a gradient has a tangent (forward-mode AD).
    """
    exact, dtypes, _ = _exact_norm(parameters_or_module, norm_type, group, mesh, extra_groups, exclude, foreach)
    return _checked(exact, dtypes, norm_type, error_if_nonfinite)


def _exact_norm(
    given: Given,
    norm_type: float,
    group: Group,
    mesh: DeviceMesh | None,
    extra_groups: Groups,
    exclude: Iterable[Tensor],
    foreach: bool | None,
) -> tuple[Tensor, set[torch.dtype], list[GradientRow]]:
    """Returns the norm in fp64 and the dtypes of the gradients, the same on all ranks, and the rows of this rank."""
    if mesh is not None and extra_groups != ():
        raise TypeError("extra_groups: must not be given together with mesh, whose axis 'pp' is known")
    axes = mesh_axes(group, mesh)
    groups, table, copies = _table(given, axes)
    _refuse_tangents(table)
    skipped, dtypes = {*copies, *map(id, exclude)}, _dtypes(table)
    extra_groups = extra_groups if mesh is None else axes.pp.name
    return _norm(table, float(norm_type), groups, extra_groups, skipped, foreach, dtypes), dtypes, table


def _dtypes(table: Sequence[GradientRow]) -> set[torch.dtype]:
    return {grad.dtype for _, _, terms in table for grad in terms}


def _norm(
    table: Sequence[GradientRow],
    norm_type: float,
    groups: ModelGroups,
    extra_groups: Groups,
    skipped: set[int],
    foreach: bool | None,
    dtypes: set[torch.dtype],
) -> Tensor:
    """Returns the fp64 norm, equal on all ranks; ``skipped``: ids of parameters that do not count; ``dtypes``: of this
    rank's gradients; the dtypes on other ranks are added."""
    if math.isnan(norm_type):
        raise ValueError(f"norm_type: {norm_type} must be a number")
    if norm_type == 0:
        by_ranks = _axes([axis.name for axis in groups.axes])
        for of_param in {param.device_mesh for param, _, _ in table if isinstance(param, DTensor)}:
            by_ranks = _axes(of_param.get_all_groups()) | by_ranks
        others = [name for ranks, name in _axes(_listed(extra_groups)).items() if ranks not in by_ranks]
        device = _device([param for param, _, _ in table[:1]])
        return _nonzero_gradients(
            table, skipped, [by_ranks[ranks] for ranks in sorted(by_ranks)], others, device, dtypes
        )
    blocks = next((layout.blocks for _, layout, _ in table if layout.blocks), 0)
    if blocks and not math.isinf(norm_type):  # the order of a maximum does not matter
        summed, extra = (
            _axes(names).values() for names in ([axis.name for axis in groups.axes], _listed(extra_groups))
        )
        return _norm_in_blocks(table, norm_type, groups, skipped, blocks, summed, extra, dtypes)
    tp = _axes([axis.name for axis in groups.axes])
    # By ranks: an axis that is listed although layouts name it must not be summed twice
    last = tp | _axes(_listed(extra_groups))  # over which the total is reduced at the end
    # What one mesh of FSDP2 shards is summed over its axes first: other parameters are whole there, and count once
    axes: dict[DeviceMesh | None, dict[tuple[int, ...], str]] = {None: {}}
    owned: dict[DeviceMesh | None, list[Tensor]] = {None: []}
    for param, layout, terms in table:
        mesh = param.device_mesh if isinstance(param, DTensor) else None
        # Before gradients are looked at: a rank without any under this mesh takes part in its collectives, too
        if mesh is not None and mesh not in axes:
            axes[mesh] = _axes(mesh.get_all_groups())
            owned[mesh] = []
        if not terms or (skipped and id(param) in skipped):
            continue
        # The norm of a sum is not a function of the norms of its terms
        grad = terms[0] if len(terms) == 1 else terms[0] + terms[1]
        if not layout and not isinstance(grad, DTensor):
            # The same value on all ranks: one of them counts it
            if groups.first:
                owned[mesh].append(grad)
            continue
        # A DTensor over an axis of its own layout determines alone which rank counts which elements
        if mesh is not None and not _axes([group.name for _, group in layout]).keys().isdisjoint(axes[mesh]):
            owned[mesh] += Layout(*((sharding, None) for sharding, _ in layout)).owned(grad)
        elif groups.counts(layout, grad):
            owned[mesh] += [grad] if _is_owned_whole(grad, layout) else layout.owned(grad)
    # A rank without gradients communicates, too, so the device is that of a parameter
    device = _device([param for param, _, _ in table[:1]])
    norms = []
    for mesh, counted in owned.items():
        # fp64, since powers of it are summed over the axes, which overflow in half types
        norm = _norm_of(counted, norm_type, foreach).to(device, torch.float64)
        for members, axis in axes[mesh].items():
            # An axis of the mesh that is one of the model's groups, too, is summed below, once
            norm = norm if members in last else _over(axis, norm, norm_type)
        spanned = groups.spanned(mesh) if mesh is not None else []
        if any(axis.rank for axis in spanned if tuple(axis.ranks) not in axes[mesh]):
            # already summed over that axis, over which the total is summed below
            norm = torch.full_like(norm, _norm_of_none(norm_type))
        norms.append(norm)
    total = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), norm_type)
    for members, axis in last.items():
        total = _over(axis, total, norm_type, None if members in tp else dtypes)
    if norm_type < 0 and not dtypes:
        return torch.zeros_like(total)  # as torch without gradients
    return total


# [Note: one tree of blocks]
def _norm_in_blocks(
    table: Sequence[GradientRow],
    norm_type: float,
    groups: ModelGroups,
    skipped: set[int],
    blocks: int,
    axes: Iterable[str],
    extra_axes: Iterable[str],
    dtypes: set[torch.dtype],
) -> Tensor:
    """Returns the fp64 norm of a model built in :func:`tp_ext.tp_invariant`. Powers are summed for each parameter and
    block, and these sums in one order, whatever the number of ranks.

    Args:
        table: the parameters, the same on all ranks. norm_type: its order, finite. groups: of the model.
        skipped: ids of parameters not to count.
        blocks: of the model. axes: the groups of its layouts. extra_axes: groups of ranks with other parameters.
        dtypes: as of :func:`_norm`.

    Communicates: one all-reduce of ``8 blocks`` bytes per parameter over each axis; an all-gather of each gradient that
    FSDP2 shards.
    """
    leaves = torch.zeros(len(table), blocks, dtype=torch.float64, device=table[0][0].device)

    def power(part: Tensor) -> Tensor:
        if norm_type == 2:
            return _ops.multi_tensor_squared_norm([part.contiguous()])
        with one_thread():  # the order of torch's sum depends on the threads
            return part.contiguous().double().abs().pow(norm_type).sum()

    for row, (param, layout, terms) in zip(leaves, table, strict=True):
        if not terms or id(param) in skipped:
            continue
        grad = sum(terms[1:], terms[0])
        if isinstance(grad, DTensor):
            grad = grad.full_tensor()  # the shards of FSDP2 are no blocks: squares of a block may lie on two ranks
        if not layout:
            # All ranks have it: one counts it
            if groups.first:
                row[0] = power(grad)
        elif groups.counts(layout, grad):
            sharding, (_, p, rank) = next((entry for entry in layout if entry[0].blocks), layout[0])
            if not sharding.blocks or any(group.size > 1 and other is not sharding for other, group in layout):
                # Of a cut without blocks, or over two groups: right, but the order of its sum is that of the cut
                row[0] = sum(map(power, layout.owned(grad)), row[0])
                continue
            flat = iter(sharding.segments(rank, p))
            for block, start, length in zip(flat, flat, flat, strict=True):
                # Below 0: copies of KV heads that another rank counts
                if block >= 0 and length:
                    row[block] += power(grad.narrow(sharding.dim, start, length))
    # Each number is not zero on one rank at most: the order of these sums does not matter
    for axis in axes:
        leaves = _ops.reduce_from_region(leaves, axis)
    total = _ops.column_sums(leaves.reshape(-1, 1), [1])[0]
    for axis in extra_axes:
        total = _over(axis, total, 1.0, dtypes)
    return total.sqrt() if norm_type == 2 else total.pow(1 / norm_type)


def _nonzero_gradients(
    table: Sequence[GradientRow],
    skipped: set[int],
    axes: Sequence[str],
    extra_axes: Iterable[str],
    device: torch.device,
    dtypes: set[torch.dtype],
) -> Tensor:
    """Returns torch's norm of order 0, of the norms of all gradients: the number of gradients that are not zero.

    Args:
        table: the parameters, the same on all ranks.
        skipped: ids of parameters not to count.
        axes: the groups whose ranks have the rows. extra_axes: groups of ranks with other parameters.
        dtypes: as of :func:`_norm`.

    Communicates: an all-gather of two numbers, and an all-reduce of 8 bytes per row, over each group.

    Raises:
        ValueError: the tables have other lengths, on all ranks.
    """
    number = torch.tensor([[len(table), -len(table)]], dtype=torch.float64, device=device)
    for axis in axes:
        number = _ops.all_gather_region(number, axis, 0, None).amax(0, keepdim=True)
    most, least = number.abs()[0].tolist()
    if most != least:
        raise ValueError(
            f"norm_type: with 0 the gradients that are not zero are counted one by one, so every rank must list all of "
            f"them, and lists {least:g} to {most:g}; list empty shards, too"
        )
    counts = torch.zeros(len(table), dtype=torch.float64, device=device)
    for index, (param, layout, terms) in enumerate(table):
        if terms and id(param) not in skipped:
            grad = sum(terms[1:], terms[0])
            parts = [grad.to_local()] if isinstance(grad, DTensor) else layout.owned(grad) if layout else [grad]
            counts[index] = sum(part.count_nonzero() for part in parts)
    for axis in axes:  # what several ranks count is not zero all the same
        counts = _ops.reduce_from_region(counts, axis)
    total = counts.count_nonzero().to(torch.float64)
    for axis in extra_axes:
        total = _over(axis, total, 1.0, dtypes)
    return total


def _norm_of_none(norm_type: float) -> float:
    """Returns the norm that adds nothing to a norm of this order."""
    return math.inf if norm_type < 0 else 0.0


def _checked(total: Tensor, dtypes: set[torch.dtype], norm_type: float, error_if_nonfinite: bool) -> Tensor:
    """Returns the norm in its final dtype, after the check for finiteness. The dtype is the widest over all gradients,
    since a rank that owns none has no dtype of its own."""
    total = total.to(functools.reduce(torch.promote_types, dtypes) if dtypes else torch.float32)
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(
            f"error_if_nonfinite: the norm of order {float(norm_type)} of the gradients is {float(total)} and must "
            "be finite"
        )
    return total


def _is_owned_whole(grad: Tensor, layout: Layout) -> bool:
    """Returns whether a shard has neither padding nor copies, as most; False, too, if its shape is wrong."""
    if isinstance(grad, DTensor) or len(layout) > 1:
        return False
    (sharding, (_, p, rank)), shape = layout[0], grad.shape
    fits = -len(shape) <= sharding.dim < len(shape) and shape[sharding.dim] == sharding.local_size(rank, p)
    return fits and all(part.padding == 0 and not part.has_copies for part in sharding.parts)


def _is_full(param: Tensor, layout: Layout) -> bool:
    """Returns whether the parameter is the full tensor, as without parallelism."""
    return all(
        all(not part.has_copies for part in sharding.parts) and param.shape[sharding.dim] == sharding.local_size(0, 1)
        for sharding, _ in layout
    )


def _by_device(tensors: Sequence[Tensor]) -> dict[torch.device, list[Tensor]] | None:
    """Returns the tensors of each device, or None if our kernels do not support all of them."""
    # By type, not isinstance: the kernels read memory, which of a subclass need not be its value
    if not {Tensor}.issuperset(map(type, tensors)) or not _DTYPES.issuperset([tensor.dtype for tensor in tensors]):
        return None
    devices = {tensor.device for tensor in tensors}
    if not _DEVICES.issuperset(device.type for device in devices):
        return None
    return {
        device: [tensor for tensor in tensors if len(devices) == 1 or tensor.device == device] for device in devices
    }


def _norm_of(tensors: list[Tensor], norm_type: float, foreach: bool | None) -> Tensor:
    devices = _by_device(tensors) if norm_type == 2 and tensors and foreach is not False else None
    if devices is None:  # torch fails on the largest element of an empty tensor
        # Torch's own function: that of tp_ext/outside knows gradients of parameters, and would sum over the ranks
        torchs = inspect.unwrap(torch.nn.utils.get_total_norm)
        tensors = [tensor for tensor in tensors if tensor.numel()]
        return torchs(tensors, norm_type, foreach=foreach) if tensors else torch.tensor(_norm_of_none(norm_type))
    squares = [_ops.multi_tensor_squared_norm(there) for there in devices.values()]
    return sum((square.to(squares[0].device) for square in squares[1:]), squares[0]).sqrt()


def _clip(tensors: list[Tensor], max_norm: float, total: Tensor, foreach: bool | None) -> None:
    devices = _by_device(tensors) if foreach is not False else None
    if devices is None:
        stored = [_Stored(tensor) for tensor in tensors]
        return torch.nn.utils.clip_grads_with_norm_(stored, max_norm, total, foreach)  # type: ignore[arg-type]
    # The formula of torch's clip_grads_with_norm_; a tensor, so that the host does not wait for a GPU
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for device, there in devices.items():
        _ops.multi_tensor_scale_(there, scale.to(device))
    return None


class _Stored(NamedTuple):
    """A stand-in for a parameter in torch's clipping: ``grad`` is the locally stored gradient."""

    grad: Tensor


def gradient_terms(param: Tensor) -> list[Tensor]:
    """Returns the tensors whose sum is the gradient of a parameter: ``.grad``, ``main_grad``, both or none."""
    grad, main_grad = param.grad, getattr(param, "main_grad", None)
    # A program may set .grad to main_grad for the optimizer: one gradient, not two terms
    if main_grad is None or main_grad is grad:
        return [] if grad is None else [grad]
    return [main_grad] if grad is None else [grad, main_grad]


def local_gradient(grad: Tensor) -> Tensor:
    """Returns the part of a gradient that this rank stores: under FSDP2 its shard."""
    return grad.to_local() if isinstance(grad, DTensor) else grad


def _device(params: Sequence[Tensor]) -> torch.device:
    """Returns the device for communication: for a parameter that FSDP2 offloads to the CPU, that of its mesh."""
    for param in params:
        return torch.device(param.device_mesh.device_type) if isinstance(param, DTensor) else param.device
    return torch.device("cpu")


def _listed(groups: Groups) -> Sequence[Group]:
    return [groups] if groups is None or isinstance(groups, str | ProcessGroup | DeviceMesh) else groups


# [Note: the norm needs no list of axes]
def _axes(groups: Sequence[Group]) -> dict[tuple[int, ...], str]:
    """Returns the groups' names by their ranks: groups of the same ranks are one axis, and a single rank is none."""
    names = [group_name(group) for group in groups]
    return {tuple(global_ranks(name)): name for name in names if parallel_group(name).size > 1}


def _over(axis: str, norm: Tensor, norm_type: float, dtypes: set[torch.dtype] | None = None) -> Tensor:
    """Returns the norm of all ranks' elements from the norm of each rank's; adds all ranks' dtypes to ``dtypes``."""
    power = norm if math.isinf(norm_type) else norm**norm_type
    row = power.reshape(1)
    if dtypes is not None:
        # Digits of a number: how many ranks have gradients of each dtype, in the same message
        digits = sum(_RANKS**i for i, dtype in enumerate(_WIDER) if dtype in dtypes)
        row = torch.stack([power, torch.full_like(power, digits)])
    # The regions only sum, so the maximum is taken of the gathered numbers
    if math.isinf(norm_type):
        gathered = _ops.all_gather_region(row[None], axis, 0, None)
        total = gathered[:, 0].amax() if norm_type > 0 else gathered[:, 0].amin()
        row = gathered.sum(0)
    else:
        row = _ops.reduce_from_region(row, axis)
        total = row[0] ** (1 / norm_type)
    if dtypes is not None:
        dtypes |= {dtype for i, dtype in enumerate(_WIDER) if int(row[1]) // _RANKS**i % _RANKS}
    return total


def _refuse_tangents(table: Sequence[GradientRow]) -> None:
    """Raises if a gradient has a tangent, which the kernels would drop."""
    # No dual level is entered, so no tensor has a tangent: one comparison in place of a call per gradient
    if forward_ad._current_level < 0:
        return
    if any(forward_ad.unpack_dual(grad).tangent is not None for _, _, terms in table for grad in terms):
        raise NotImplementedError("tp_ext: grad_norm has no forward-mode derivative; use reverse mode")


def _table(given: Given, axes: MeshAxes) -> tuple[ModelGroups, list[GradientRow], Iterable[int]]:
    """Returns the groups that ``given`` is sharded over, the rows, and the ids of copies of another stage's."""
    stages = isinstance(given, list | tuple) and any(isinstance(one, nn.Module) for one in given)
    if isinstance(given, nn.Module) or stages:  # its layers know how they are sharded
        model = census(cast(Stages, given), axes)  # refuses a list that mixes stages with parameters
        groups = model.groups
        entries = model.parameters.values()
        rows: list[GradientRow] = [(entry.value, entry.layout, gradient_terms(entry.value)) for entry in entries]
        return groups, rows, model.copies
    group = axes.tp
    over = parallel_group(group)
    # Bare parameters, as torch.nn.utils.clip_grad_norm_ takes them, know only what they carry
    params = [given] if isinstance(given, Tensor) else list(cast(Iterable[Tensor], given))
    for param in params:
        if not isinstance(param, Tensor):
            raise TypeError(f"parameters_or_module: {param!r} must be a module, a parameter or several")
    if group is not NOT_GIVEN and params and all(hasattr(param, "tp_layout") for param in params):
        warn_unneeded_group()
    known = [_layout_of_bare(param, group) for param in params]
    groups = axes_of_groups([over, *(axis for layout in known for _, axis in layout or ())])
    for param, known_layout in zip(params, known, strict=True):
        # A shard would count as replicated: a norm too small, on no rank an error
        if known_layout is None and groups.axes:
            raise ValueError(
                f"parameters_or_module: a bare parameter of shape {tuple(param.shape)} must carry tp_sharding or "
                "tp_layout; pass the module instead"
            )
    if None in known:  # all are whole, unless the group was forgotten
        layer_group(group, "grad_norm of parameters")  # for its warning
    rows = [
        (param, known_layout or Layout(), gradient_terms(param))
        for param, known_layout in zip(params, known, strict=True)
    ]
    return groups, rows, ()


def _layout_of_bare(param: Tensor, group: Group) -> Layout | None:
    """Returns the layout that a parameter without its module carries; None if it carries none."""
    layout = getattr(param, "tp_layout", None)
    if layout is not None:
        return cast(Layout, layout)
    sharding = getattr(param, "tp_sharding", _UNKNOWN)
    if sharding is _UNKNOWN:
        return None
    if sharding is None:
        return Layout()
    layout = Layout((sharding, parallel_group(group)))
    # A full parameter is one of an unsharded model, which has no group
    if group is NOT_GIVEN and not _is_full(param, layout):
        raise ValueError(
            f"group: must be given with parameters that carry tp_sharding alone: one of shape {tuple(param.shape)} is "
            f"a shard of {sharding.size} elements in dim {sharding.dim}; pass group=, or the module, whose layers have "
            "it"
        )
    return layout
