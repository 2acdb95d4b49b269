"""Weights that torch computes from others, over shards: right where each row or column of the sharded dim is computed
on its own, as by anything elementwise, and refused elsewhere.

Which of both holds is found by running: the same parametrization, or mask, of rows alone, and of these rows behind as
many others, must agree, for numbers of several magnitudes, in train mode and in eval mode. It is run again before a
forward when a buffer or a number that it holds has changed: it may be a switch. Nothing of the caller's, nor the state
of torch's generators, changes.
"""

import copy
import functools
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.nn.utils.parametrize import ParametrizationList

from tp_ext.model.carriers import Carriers, is_sharded
from tp_ext.model.fqn import OF_THE_WHOLE, layout_of
from tp_ext.model.layouts import layouts_of
from tp_ext.sharding import Layout, Sharding

_ELEMENTS = 1 << 20  # of a trial; of a larger shard fewer rows are tried
_SCALES = (1.0, -0.01, 100.0)  # of the numbers of a trial: what clips by a norm only clips large ones


def make_parametrization_list(
    torchs: Callable[..., None],
    maps: ParametrizationList,
    modules: Iterable[nn.Module],
    original: Tensor,
    unsafe: bool = False,
) -> None:
    """Constructs the list that ``register_parametrization`` puts in the place of a tensor, as torch does.

    Raises:
        ValueError: the tensor is a shard, and the parametrization is not one of each shard on its own; or it is of a
            layer built in :func:`tp_ext.tp_invariant`, on one rank too.
    """
    places = list(_places(original))
    for name, layout in places:
        _refuse_blocks(name, layout)
        _check_parametrization(torchs, list(modules), original, name, layout)
    torchs(maps, modules, original, unsafe)
    if places:
        maps._tp_judged = _switches(maps)  # type: ignore[assignment]
        maps.register_forward_pre_hook(_judge_again)


def append_parametrization(
    torchs: Callable[..., nn.ModuleList], maps: nn.ModuleList, module: nn.Module
) -> nn.ModuleList:
    """Appends one more parametrization to such a list, as torch does.

    Raises:
        ValueError: as :func:`make_parametrization_list`.
    """
    if isinstance(maps, ParametrizationList) and len(maps):
        for name, layout in _places_of_list(maps):
            _check_parametrization(ParametrizationList.__init__, [module], maps().detach(), name, layout)
    return torchs(maps, module)


def _places_of_list(maps: ParametrizationList) -> Iterator[tuple[str, Layout]]:
    """Yields the name and the layout of the shard that the list computes. It does not know its module, which has it."""
    for carrier in list(Carriers.modules):
        lists: Any = carrier._modules.get("parametrizations")
        for name in (name for name, entry in (lists.items() if lists is not None else ()) if entry is maps):
            layout = layouts_of(carrier).get(name)
            if layout is not None and is_sharded(layout):
                yield name, layout


def _judge_again(maps: ParametrizationList, args: Any) -> None:
    """Raises, as a forward pre-hook, if the parametrization has become one that is not of each shard on its own."""
    if torch.compiler.is_compiling() or (switches := _switches(maps)) == maps._tp_judged:
        return
    for name, layout in _places_of_list(maps):
        _check_parametrization(ParametrizationList.__init__, list(maps), maps.forward().detach(), name, layout)
    maps._tp_judged = switches  # type: ignore[assignment]


def _switches(maps: ParametrizationList) -> list[Any]:
    """Returns what a parametrization may branch on: its buffers, as they were written last, numbers and strings."""
    switches: list[Any] = []
    for module in itertools.chain.from_iterable(entry.modules() for entry in maps):
        switches += [(id(buffer), buffer._version) for buffer in module._buffers.values() if buffer is not None]
        switches += [
            (name, value)
            for name, value in vars(module).items()
            if name != "training" and isinstance(value, bool | int | float | str | None)
        ]
    return switches


def apply_pruning(
    torchs: Callable[..., Any], cls: type[Any], module: nn.Module, name: str, *args: Any, **kwargs: Any
) -> Any:
    """Prunes a tensor as ``BasePruningMethod.apply``, which all functions of ``torch.nn.utils.prune`` call.

    Raises:
        ValueError: the tensor is a shard, and the mask of a row depends on others; or a given mask has another shape.
    """
    layout = layout_of(module, name)
    if is_sharded(layout):
        _check_pruning(cls, getattr(module, name), name, layout, args, kwargs)
    return torchs(cls, module, name, *args, **kwargs)


def apply_old_norm(torchs: Callable[..., Any], module: nn.Module, name: str, *args: Any, **kwargs: Any) -> Any:
    """Applies ``torch.nn.utils.weight_norm`` or ``spectral_norm`` as torch does.

    Raises:
        ValueError: the tensor is a shard: the tensors that take its place would have no layout.
    """
    layout = layout_of(module, name)
    _refuse_blocks(name, layout)
    if is_sharded(layout):
        raise ValueError(
            f"name: {name!r} is a shard, {_over(layout)}; torch.nn.utils.weight_norm and spectral_norm take it for the "
            "whole; use torch.nn.utils.parametrizations.weight_norm along a dim that is not sharded"
        )
    return torchs(module, name, *args, **kwargs)


def _places(tensor: Tensor) -> Iterator[tuple[str, Layout]]:
    """Yields the name and the layout of the shard, or of the tensor with blocks, that the tensor is, if it is one."""
    for module in [*Carriers.modules, *Carriers.blocked]:
        for name, layout in layouts_of(module).items():
            if (is_sharded(layout) or layout.blocks) and tensor is module._parameters.get(
                name, module._buffers.get(name)
            ):
                yield name, layout
                return


def _refuse_blocks(name: str, layout: Layout) -> None:
    if layout.blocks:
        raise ValueError(
            f"{name}: of a layer built in tp_invariant must not be computed from other tensors: bits of torch's "
            "functions depend on where a shard ends"
        )


def _over(layout: Layout) -> str:
    return f"p = {', '.join(str(size) for size in layout.sizes if size > 1)}"


def _check_parametrization(
    make: Callable[..., None], modules: list[nn.Module], original: Tensor, name: str, layout: Layout
) -> None:
    """Raises unless the parametrization by ``modules`` is one of each shard on its own, or declares its layouts."""
    if all("tp_layouts" in module.__dict__ for module in modules):
        return
    if whole := OF_THE_WHOLE.intersection(type(module).__name__ for module in modules):
        raise ValueError(
            f"module: 'parametrizations.{name}.original': {min(whole)} must see all of {name}, of which a rank has a "
            f"shard, {_over(layout)}"
        )
    for sharding, group in layout:
        if group.size > 1:
            lengths = sharding.local_sizes(group.size)
            local = _found_beyond_a_shard(make, modules, original, sharding.dim % original.dim(), min(lengths))
            if local:
                raise ValueError(
                    f"module: 'parametrizations.{name}.{local}' must have the {lengths} elements of {name} on the "
                    f"ranks in dim {sharding.dim}, which is sharded, and depend on these alone, p = {group.size}: this "
                    "parametrization is not one of each shard on its own"
                )


def _found_beyond_a_shard(
    make: Callable[..., None], modules: list[nn.Module], original: Tensor, dim: int, shortest: int
) -> str:
    """Returns the name of a tensor of the parametrization that is no shard along ``dim``, "original" if the result
    depends on other shards; empty if there is none.

    Args:
        shortest: the smallest length along ``dim`` on any rank, so that all ranks try the same.
    """
    return next(
        (name for scale in _SCALES if (name := _found_at(scale, make, modules, original, dim, shortest))),
        "",
    )


def _found_at(
    scale: float,
    make: Callable[..., None],
    modules: list[nn.Module],
    original: Tensor,
    dim: int,
    shortest: int,
) -> str:
    """Returns what :func:`_found_beyond_a_shard` does, for numbers of this magnitude."""
    rows, both = _rows_and_twice(original, dim, shortest, scale)
    try:
        alone, behind = (_trial(make, modules, one, original.shape[dim], dim, rows.shape[dim]) for one in (rows, both))
        trained = dict(behind.named_parameters())
        for (local, one), (_, two) in zip(_tensors(alone), _tensors(behind), strict=True):
            if one.dim() == rows.dim() and one.shape[dim] == rows.shape[dim] and two.shape[dim] == both.shape[dim]:
                # Other numbers in each row, lest a result that mixes up rows be right by chance
                one.data = one * _spread(one)
                two.data = torch.cat([_others(one), one], dim)
            elif two.shape != one.shape or one.numel() > 1 or local in trained:
                return local  # its gradient would need a sum over the ranks, or it is computed from the whole
            else:
                two.data = one.clone()
        with torch.no_grad():
            same = all(
                _is_second_half(_seeded(behind.train(mode), rows), _seeded(alone.train(mode), rows), dim)
                for mode in (True, False)
            )
    except (RuntimeError, ValueError, IndexError):  # it takes this number of elements only
        same = False
    return "" if same else "original"


def _rows_and_twice(tensor: Tensor, dim: int, shortest: int, scale: float) -> tuple[Tensor, Tensor]:
    """Returns a tensor like rows of this one along ``dim``, and it behind as many others. Numbers are made up: a tensor
    on meta has none, and ranks with other numbers might not agree.

    Args:
        shortest: the smallest number of rows on any rank; as many are tried, of a large tensor fewer.
        scale: the numbers' largest magnitude, with their sign.
    """
    of_a_row = max(1, tensor.numel() // max(1, tensor.shape[dim]))
    shape = list(tensor.shape)
    shape[dim] = max(1, min(shortest, _ELEMENTS // of_a_row))
    rows = _spread(torch.empty(shape, dtype=tensor.dtype, device="cpu" if tensor.is_meta else tensor.device))
    return (rows * scale).to(rows.dtype), (torch.cat([_others(rows), rows], dim) * scale).to(rows.dtype)


def _trial(
    make: Callable[..., None], modules: list[nn.Module], original: Tensor, length: int, dim: int, tried: int
) -> ParametrizationList:
    """Builds a ``ParametrizationList`` of copied modules over a made-up ``original``. ``length``: size of the tensor,
    and of the per-row state of the modules, along ``dim``; ``tried`` of its rows are taken."""
    copied = [copy.deepcopy(module).train() for module in modules]
    for module in copied:
        for _, stored in _tensors(module):
            if stored.is_meta:
                module.to_empty(device="cpu")
                break
        for _, stored in _tensors(module):
            if stored.dim() == original.dim() and stored.shape[dim] == length and length > 1:
                # What a module holds per row, such as a mask, is made as long as the trial
                part = stored.data.narrow(dim, 0, tried)
                stored.data = torch.cat([part] * (original.shape[dim] // part.shape[dim]), dim)
    trial = ParametrizationList.__new__(ParametrizationList)
    parameter = nn.Parameter(original.clone(), requires_grad=original.is_floating_point())
    _seeded(lambda: make(trial, copied, parameter, unsafe=True), original)
    return trial


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _spread(like: Tensor) -> Tensor:
    """Returns factors in [0.5, 1), all different, without a random number."""
    count = torch.arange(like.numel(), device=like.device, dtype=torch.float64)
    return (0.5 + 0.5 * (count * 0.6180339887 % 1)).reshape(like.shape).to(like.dtype)


def _others(rows: Tensor) -> Tensor:
    """Returns other numbers of the shape, some of them smaller, some larger, so that no order or extreme stays."""
    return torch.where(_spread(rows) > 0.75, rows / 8, 4 - 3 * rows).to(rows.dtype)


def _seeded(call: Callable[[], Any], like: Tensor) -> Any:
    with torch.random.fork_rng([like.device] if like.is_cuda else []):
        torch.manual_seed(0)
        return call()


def _is_second_half(both: Any, rows: Tensor, dim: int) -> bool:
    length = rows.shape[dim]
    if not isinstance(both, Tensor) or both.shape[dim] != 2 * length:
        return False
    atol = 1e-6 * float(rows.abs().nan_to_num(0.0, 0.0, 0.0).max()) if rows.numel() else 0.0
    return torch.allclose(both.narrow(dim, length, length), rows, rtol=1e-3, atol=atol, equal_nan=True)


def _check_pruning(
    cls: type[Any], tensor: Tensor, name: str, layout: Layout, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Raises unless the mask of a shard is the shard of the mask."""
    advice = (
        f"name: {cls.__name__} must see all of {name!r}, which is a shard, {_over(layout)}; make the mask of the full "
        f"tensor, and call prune.custom_from_mask(layer, {name!r}, mask=layer.tp_layouts[{name!r}].shard(mask))"
    )
    if cls is prune.CustomFromMask:
        if _prunes_all_tensors():
            raise ValueError(advice.replace(cls.__name__, "global_unstructured"))
        mask = kwargs["mask"] if "mask" in kwargs else args[0]
        if mask.shape != tensor.shape:
            raise ValueError(
                f"mask: shape {tuple(mask.shape)} must be {tuple(tensor.shape)}, that of this rank's shard of {name!r}"
            )
        return
    options = {key: value for key, value in kwargs.items() if key != "importance_scores"}  # the trial has its own
    for sharding, group in layout:
        if group.size > 1 and not _masks_each_shard(cls, tensor, sharding, group.size, args, options):
            raise ValueError(advice)


def _masks_each_shard(
    cls: type[Any], tensor: Tensor, sharding: Sharding, p: int, args: tuple[Any, ...], options: dict[str, Any]
) -> bool:
    """Returns whether the mask of some rows is the same behind others."""
    dim, shortest = sharding.dim % tensor.dim(), min(sharding.local_sizes(p))
    for scale in _SCALES:
        masks = []
        for values in _rows_and_twice(tensor, dim, shortest, scale):
            try:
                method = cls(*copy.deepcopy(args), **copy.deepcopy(options))
                masks.append(_seeded(functools.partial(method.compute_mask, values, torch.ones_like(values)), values))
            except (RuntimeError, ValueError, IndexError):  # it takes this number of elements only
                return False
        if not _is_second_half(masks[1], masks[0], dim):
            return False
    return True


def _prunes_all_tensors() -> bool:
    """Returns whether ``global_unstructured`` is pruning: it compares the elements of several tensors, and applies the
    result as a given mask, which does not show it."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code is prune.global_unstructured.__code__:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
