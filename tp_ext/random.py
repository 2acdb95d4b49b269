"""Random numbers by global index: every draw is a pure function of (seed, index of the element in the full tensor), by
counter-based Philox4x32-10 (Salmon et al., SC'11). A rank draws exactly its slice, so initial weights and dropout masks
are bit-identical for every number of ranks, and no full tensor is ever made.

The seed of each draw comes from torch's default generator: of the states that it has on the ranks of a tensor-parallel
group that of rank 0 counts (:mod:`tp_ext.common_generator`).
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed import DeviceMesh

from tp_ext import _ops
from tp_ext._checks import check_int, check_type
from tp_ext.chunks import mesh_position
from tp_ext.common_generator import default_generator, follow_first
from tp_ext.group import ParallelGroup
from tp_ext.mesh import AXES
from tp_ext.random_scope import at as at
from tp_ext.random_scope import base
from tp_ext.sharding import Layout, Sharding


def manual_seed(seed: int, mesh: DeviceMesh | None = None, tp_axis: str = "tp") -> None:
    """Seeds torch's generators: the same along ``tp_axis``, different along every other axis of ``mesh``.

    Dropout masks differ along those axes. Initial weights of the layers of this package do not: they are drawn from
    generators of their own, seeded by ``seed`` on every rank, until torch is seeded again. So replicas
    start with the weights of one process, under FSDP2, too. Modules of torch draw their weights from torch's
    generators: build a model that has such modules after ``manual_seed(seed)``, and call this function afterwards.

    Args:
        seed: any integer, the same on all ranks.
        mesh: the whole mesh, with named axes; without it all ranks are seeded alike.
        tp_axis: the axis whose ranks share their random numbers. A mesh of axes of :func:`tp_ext.init_mesh` may lack
            ``tp``.

    It is also the seed of the numbers that are drawn by name: masks in :func:`at`, and the weights of
    :func:`tp_ext.reset_parameters`. These are the same along every axis, but for masks along the data axes where
    :func:`at` is not given the place in the batch.

    Raises:
        ValueError: ``mesh`` has no axis names, or none called ``tp_axis``.
        TypeError: ``seed`` is no integer, ``mesh`` no mesh.
    """
    check_int(seed=seed)
    if mesh is not None:
        check_type(DeviceMesh, "a DeviceMesh with named axes, or None", mesh=mesh)
    replica, pipeline, context_size = 0, 0, 1
    if mesh is not None:
        names = mesh.mesh_dim_names
        without = tp_axis == "tp" and names is not None and set(names) <= set(AXES)  # no tensor parallelism
        if names is None or (tp_axis not in names and not without):
            raise ValueError(f"tp_axis: {tp_axis!r} must be an axis of the mesh, which has {names}")
        coordinate = mesh_position(mesh)
        if coordinate is None:
            raise ValueError("mesh: this rank must be a member of the mesh")
        position, positions = 0, 1
        # position: among all ranks but those of tp, for torch's generators; replica: among the data ranks, for masks by
        # name
        for name, length, index in zip(names, mesh.shape, coordinate, strict=True):
            if name != tp_axis:
                position, positions = position * length + index, positions * length
            if name not in (tp_axis, "pp", "cp"):
                replica = replica * length + index
            if name == "pp":
                pipeline = index
            if name == "cp":
                context_size = length
        # Far apart, so that no position has the seed + 1 of another; nor the seed itself, by which a later
        # torch.manual_seed(seed) is known
        seed_here = (seed + (position + 1) * 0x9E3779B97F4A7C15) % (1 << 63) if positions > 1 else seed % (1 << 63)
    else:
        seed_here, positions = seed % (1 << 63), 1
    torch.manual_seed(seed_here)
    base.seed, base.position, base.pipeline, base.context_size = seed, replica, pipeline, context_size
    _WeightDraws.seeds = None if positions == 1 else (seed_here, seed % (1 << 63))
    _WeightDraws.states.clear()


# [Note: seeds are drawn, counters are computed]
def draw_seed(device: torch.device) -> Tensor:
    """Draws a fresh seed, a 0-d int64 tensor on ``device``, from the device's default generator.

    It is a torch draw, so activation checkpointing and CUDA graphs replay it like any other.
    """
    return torch.randint(0, 1 << 62, (), dtype=torch.int64, device=device)


class _WeightDraws:
    """A context in which torch draws initial weights, by generators of the CPU and of ``device`` for them alone, if
    ``manual_seed(seed, mesh)`` seeded torch last.

    Attributes:
        seeds: of torch's generators on this rank, and of weights; None without a mesh.
        states: the state of the weights' generator of a device, once it has been used.
    """

    seeds: ClassVar[tuple[int, int] | None] = None
    states: ClassVar[dict[torch.device, Tensor]] = {}

    def __init__(self, device: torch.device) -> None:
        in_force = self.seeds is not None and self.seeds[0] == torch.initial_seed()
        self._devices = [torch.device("cpu")] if in_force else []
        if in_force and device.type == "cuda":
            self._devices.append(
                torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
            )
        self._outside: list[Tensor] = []

    def __enter__(self) -> None:
        for device in self._devices:
            generator = default_generator(device)
            self._outside.append(generator.get_state())
            if device in self.states:
                generator.set_state(self.states[device])
            else:
                assert self.seeds is not None
                generator.manual_seed(self.seeds[1])

    def __exit__(self, *error: Any) -> None:
        for device, outside in zip(self._devices, self._outside, strict=True):
            generator = default_generator(device)
            self.states[device] = generator.get_state()
            generator.set_state(outside)


class OwnRandomNumbers:
    """A context in which this rank draws its own random numbers, seeded by rank and one seed common to all ranks, which
    is drawn unless it is given.

    Seeds the generators of the CPU and of ``device``, and no other; afterwards they continue as before, or as after
    one draw.
    """

    def __init__(self, rank: int, device: torch.device, seed: int | None = None) -> None:
        seed = int(draw_seed(torch.device("cpu"))) if seed is None else seed
        self._fork = torch.random.fork_rng([device] if device.type == "cuda" else [])
        self._device = device
        self._seed = seed + rank

    def __enter__(self) -> None:
        self._fork.__enter__()
        torch.default_generator.manual_seed(self._seed)
        if self._device.type == "cuda":
            with torch.cuda.device(self._device):
                torch.cuda.manual_seed(self._seed)

    def __exit__(self, *error: Any) -> None:
        self._fork.__exit__(*error)


@dataclass(frozen=True)
class Uniform:
    """Initialiser: uniform on [low, high)."""

    low: float
    high: float

    def fill(self, local: Tensor, seed: Tensor, index: tuple[int, int, int]) -> None:
        _ops.philox_uniform_(local, seed, self.low, self.high, *index)


@dataclass(frozen=True)
class Normal:
    """Initialiser: normal with ``mean`` and standard deviation ``std``."""

    mean: float = 0.0
    std: float = 1.0

    def fill(self, local: Tensor, seed: Tensor, index: tuple[int, int, int]) -> None:
        _ops.philox_normal_(local, seed, self.mean, self.std, *index)


@dataclass(frozen=True)
class TruncatedNormal:
    """Initialiser: normal with ``mean`` and standard deviation ``std``, given that it lies within [``low``, ``high``].

    The bounds are values, as ``a`` and ``b`` of ``torch.nn.init.trunc_normal_``, not multiples of ``std``; either may
    be infinite. No element is outside of them, in any dtype: a value that rounding would move out becomes the nearest
    value of the dtype inside. Drawn by the inverse of the distribution function, as accurate in the tails as in the
    middle.

    Raises:
        ValueError: ``std`` is not positive and finite, ``mean`` not finite, ``low`` not below ``high``; at a draw,
            no value of the tensor's dtype lies between the bounds.
    """

    mean: float = 0.0
    std: float = 1.0
    low: float = -2.0
    high: float = 2.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.mean):
            raise ValueError(f"mean: {self.mean} must be finite")
        if not 0 < self.std < math.inf:
            raise ValueError(f"std: {self.std} must be positive and finite")
        if not self.low < self.high:
            raise ValueError(f"low: {self.low} must be below high = {self.high}")

    def fill(self, local: Tensor, seed: Tensor, index: tuple[int, int, int]) -> None:
        _ops.philox_truncated_normal_(local, seed, self.mean, self.std, self.low, self.high, *index)


@dataclass(frozen=True)
class Constant:
    """Initialiser: one value; draws nothing."""

    value: float

    def fill(self, local: Tensor, seed: Tensor, index: tuple[int, int, int]) -> None:
        local.fill_(self.value)


Init = Uniform | Normal | TruncatedNormal | Constant | Callable[[Tensor], object]
"""An initialiser of this module, or any in-place callable (as in ``torch.nn.init``), which runs on the full tensor, on
CPU and on every rank, before the shard is sliced from it."""


def torch_linear_init(fan_in: int) -> Uniform:
    """Returns the default of ``nn.Linear``, weight and bias: uniform within 1 / sqrt(fan_in) of zero."""
    bound = 1 / math.sqrt(fan_in) if fan_in > 0 else 0.0
    return Uniform(-bound, bound)


def follows_first(local: Tensor, init: Init, seed: int | None) -> bool:
    """Returns whether :func:`initialise_` draws from the default generator, that of the first rank."""
    return seed is None and not isinstance(init, Constant) and not local.is_meta


@torch.no_grad()
def initialise_(
    local: Tensor,
    init: Init,
    sharding: Sharding | Layout | None,
    full_shape: torch.Size,
    rank: int = 0,
    p: int = 1,
    *,
    seed: int | None = None,
    groups: Iterable[ParallelGroup] = (),
) -> None:
    """Fills ``local`` with its chunks of the full tensor that ``init`` would make, and padding with zeros.

    ``sharding`` is a :class:`Layout`; or a :class:`Sharding` over p ranks, of which ``local`` is the shard of ``rank``;
    or None for a full tensor. Draws one seed from torch's default generator for any layout, rank and shape
    (:class:`Constant` draws none; on ``meta`` nothing is drawn or filled). With ``seed`` it draws none, and a callable
    runs with generators seeded by it. The generator is that of the first rank of ``groups``, which must all call this.
    """
    if isinstance(sharding, Sharding):
        sharding = Layout((sharding, ParallelGroup("", p, rank)))
    draws = _WeightDraws(local.device) if seed is None else OwnRandomNumbers(0, local.device, seed)
    with draws:
        if follows_first(local, init, seed):
            is_ours = isinstance(init, Uniform | Normal | TruncatedNormal)
            follow_first(groups, local.device if is_ours else torch.device("cpu"))
        seed_tensor = None if seed is None else torch.full((), seed, dtype=torch.int64, device=local.device)
        _draw_weights(local, init, sharding or Layout(), full_shape, seed_tensor)


def _draw_weights(
    local: Tensor, init: Init, layout: Layout, full_shape: torch.Size, seed: Tensor | None = None
) -> None:
    if not isinstance(init, Uniform | Normal | TruncatedNormal | Constant):
        if local.is_meta:
            return
        full = torch.empty(full_shape, dtype=local.dtype)
        init(full)
        local.copy_(layout.shard(full))
        return
    if seed is None:
        seed = local if isinstance(init, Constant) else draw_seed(local.device)
    if local.is_meta:
        return
    if not layout:
        init.fill(local, seed, (max(local.numel(), 1), max(local.numel(), 1), 0))
        return
    local.zero_()
    for offsets, chunk, _ in layout.local_chunks(local)[1]:
        dense = chunk if chunk.is_contiguous() else torch.empty_like(chunk, memory_format=torch.contiguous_format)
        for block, index in _strided_blocks(dense, offsets, full_shape):
            init.fill(block, seed, index)
        if dense is not chunk:
            chunk.copy_(dense)


def _strided_blocks(
    chunk: Tensor, offsets: tuple[int, ...], full_shape: torch.Size
) -> Iterator[tuple[Tensor, tuple[int, int, int]]]:
    """Yields the chunk in blocks of rows that lie at one distance in the full tensor, each with (length of a row,
    distance, index of the first element). A chunk of a tensor that is sharded in several dims is more than one block if
    dims before the last but one of them have several elements."""
    dims = [d for d, (size, full) in enumerate(zip(chunk.shape, full_shape, strict=True)) if size < full]
    last, outer = (dims or [0])[-1], dims[-2] if len(dims) > 1 else 0
    inner = math.prod(full_shape[last + 1 :])
    for position in itertools.product(*map(range, chunk.shape[:outer])):
        first = 0
        for d, (offset, full) in enumerate(zip(offsets, full_shape, strict=True)):
            first = first * full + offset + (position[d] if d < outer else 0)
        yield chunk[position], (chunk.shape[last] * inner, full_shape[last] * inner, first)
