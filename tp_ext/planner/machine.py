"""The machine that the planner prices: its devices, the links between them, and what a measured step corrects."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tp_ext._build import load
from tp_ext._checks import check_bool, check_choice, check_int, check_number
from tp_ext.planner.values import FixedDict, Value

CLASSES = {"fp32": "fp32", "fp16": "bf16", "bf16": "bf16", "fp8": "fp8", "mxfp8": "fp8", "nvfp4": "fp4"}
"""Maps each dtype of a layout to its key in :attr:`Device.peak`."""
_PEAKS = tuple(dict.fromkeys(CLASSES.values()))
CONSTANTS = (
    *(f"gemm_{dtype}" for dtype in CLASSES if dtype != "fp16"),
    "attention",
    "memory",
    "inner",
    "outer",
    "gather",
)
"""Names of the constants of a cluster: factors of what its numbers promise."""


@dataclass(frozen=True)
class EfficiencyCurve(Value):
    """The share of the peak that a GEMM of m x k by k x n reaches.

    By formula: ``share q k / (k + half_k)``, where q is the part of the tiles' work that is of the matrix, by the whole
    tiles and waves of ``units`` tiles in which the device computes::

        waves = ceil(m / tile_m) ceil(n / tile_n) / units, q = m n / ((waves + idle) units tile_m tile_n), at most 1

    idle is what is missing to a first wave, and half of what is missing to the last of several;

    and by tiles of a quarter where these are better. A measured table comes first, of rows ``(m, n, k, dtype, share)``:
    the mean of those with the dtype, each with the weight 1 / distance^4, where distances are between logarithms.

    Attributes:
        share: of each class of :attr:`Device.peak` the share of a large GEMM, at most 1; a class that is not there has
            0.7.
        tile: rows and columns of a tile. units: tiles that are computed at once, the multiprocessors. half_k: the k
            at which half of ``share`` is reached in bf16; of another dtype by its peak times more, since what a tile
            waits for takes equally long.
        attention: share of the bf16 peak of fused attention.
        memory: share of the memory bandwidth that kernels reach. optimizer: that of the optimizer; None: ``memory``.
    """

    # The defaults are assumed: tiles as libraries of GEMMs have them for large products; for `memory` see presets.py
    share: Mapping[str, float] = field(default_factory=FixedDict)
    tile: tuple[int, int] = (128, 256)
    units: int = 1
    half_k: float = 128.0
    attention: float = 0.5
    memory: float = 0.85
    optimizer: float | None = None
    table: tuple[tuple[int, int, int, str, float], ...] = ()

    def __post_init__(self) -> None:
        check_int(least=1, units=self.units)
        check_number(least=0, half_k=self.half_k)
        check_number(above=0, attention=self.attention, memory=self.memory)
        if self.optimizer is not None:
            check_number(above=0, optimizer=self.optimizer)
        _check_numbers("share", self.share, _PEAKS)
        for kind, value in self.share.items():
            if value > 1:
                raise ValueError(f"share[{kind!r}]: {value!r} must be at most 1")
        if not isinstance(self.tile, tuple | list) or len(self.tile) != 2 or not _are_sizes(self.tile):
            raise ValueError(f"tile: {self.tile!r} must be two integers of at least 1")
        if not isinstance(self.table, tuple | list):
            raise TypeError(f"table: {self.table!r} must be a tuple of rows")
        for row in self.table:
            if not isinstance(row, tuple | list) or len(row) != 5 or not _are_sizes(row[:3]):
                raise ValueError(f"table: {row!r} must be (m, n, k, dtype, share), three integers of at least 1 first")
            check_choice(CLASSES, **{f"dtype of table row {row[:3]}": row[3]})
            check_number(above=0, **_named(f"share of table row {row[:3]}", row[4]))
        self._set("share", FixedDict(self.share))
        self._set("tile", tuple(self.tile))
        self._set("table", tuple(tuple(row) for row in self.table))

    def share_of(self, dtype: str) -> float:
        """Returns the share of a large GEMM of a dtype of a layout."""
        return float(self.share.get(CLASSES.get(dtype, dtype), 0.7))  # assumed

    def __call__(self, m: int, n: int, k: int, dtype: str = "bf16") -> float:
        """Returns the share of the peak of ``dtype``, with ``half_k`` as it is."""
        check_int(least=1, m=m, n=n, k=k)
        check_choice(CLASSES, dtype=dtype)
        return float(self.of(dtype).at(m, n, k))

    def of(self, dtype: str, factor: float = 1.0, peak: float = 1.0) -> Any:
        """Returns the curve of the library: the shares times a factor, at a peak in units of that of bf16."""
        return load().planner.Curve(
            share=self.share_of(dtype) * factor,
            tile_m=self.tile[0],
            tile_n=self.tile[1],
            units=self.units,
            half_k=self.half_k * peak,
            table=[(*row[:3], row[4] * factor) for row in self.table if row[3] == dtype],
        )


@dataclass(frozen=True)
class Device(Value):
    """One device.

    Attributes:
        peak: FLOP/s of ``fp32``, ``bf16`` (also for fp16), ``fp8`` (also for mxfp8) and ``fp4`` (for nvfp4), dense.
        memory_bandwidth: bytes/s. memory: bytes. reserve: bytes of it that are never ours: context, NCCL, allocator.
        launch: seconds from one kernel to the next; of a device that is not asynchronous, what the host adds to each.
        asynchronous: kernels run while the host works, and collectives during kernels. False: a CPU, which does it all.
        gemm: the share of the peak that a GEMM reaches.
    """

    name: str
    peak: Mapping[str, float] = field(kw_only=True)
    memory_bandwidth: float = field(kw_only=True)
    memory: float = field(kw_only=True)
    reserve: float = field(default=0, kw_only=True)
    launch: float = field(default=2e-6, kw_only=True)  # assumed
    asynchronous: bool = field(default=True, kw_only=True)
    gemm: EfficiencyCurve | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"name: {self.name!r} must be a string")
        _check_numbers("peak", self.peak, _PEAKS)
        if not self.peak:
            raise ValueError(f"peak: {self.peak!r} must have the FLOP/s of at least one of {', '.join(_PEAKS)}")
        check_number(above=0, memory_bandwidth=self.memory_bandwidth, memory=self.memory)
        check_number(least=0, reserve=self.reserve, launch=self.launch)
        if self.reserve >= self.memory:
            raise ValueError(f"reserve: {self.reserve!r} must be below memory, {self.memory!r}")
        check_bool(asynchronous=self.asynchronous)
        if self.gemm is not None and not isinstance(self.gemm, EfficiencyCurve):
            raise TypeError(f"gemm: {self.gemm!r} must be an EfficiencyCurve or None")
        self._set("peak", FixedDict(self.peak))

    def flops(self, dtype: str) -> float:
        """Returns the peak of a dtype of a layout, in FLOP/s.

        Raises:
            ValueError: no such dtype, or the device has no peak of its class.
        """
        kind = CLASSES.get(dtype)
        if kind is None or kind not in self.peak:
            raise ValueError(f"dtype: {dtype!r} needs the peak of {kind!r}, and {self.name} has {', '.join(self.peak)}")
        return float(self.peak[kind])

    @property
    def curve(self) -> EfficiencyCurve:
        """``gemm``, or its default."""
        return self.gemm or EfficiencyCurve()


@dataclass(frozen=True)
class Link(Value):
    """A level of links. latency: seconds of a message. bandwidth: bytes/s of a device in each direction. group_size:
    number of devices that share the level; None: all."""

    latency: float
    bandwidth: float
    group_size: int | None = None

    def __post_init__(self) -> None:
        check_number(least=0, latency=self.latency)
        check_number(above=0, bandwidth=self.bandwidth)
        check_int(least=1, or_none=True, group_size=self.group_size)


@dataclass(frozen=True)
class Cluster(Value):
    """Devices and the levels of links between them, the innermost first; the last one holds all devices.

    Attributes:
        device, count: the devices, and their number.
        devices: in place of ``device``: those of the ranks of a tensor-parallel group, as many as ``Layout.tp``; then
            ``device`` is the first of them, and ``count``, their number by default, a multiple of it.
        constants: factors by name, of :func:`calibrate`: ``gemm_<dtype>``, ``attention``, ``memory`` of the speed of
            kernels, ``inner`` and ``outer`` of the bandwidth of the first and the other levels, ``gather`` of that of
            the collectives of ZeRO 2 and 3. Those that are not there are 1.
        fit_error, cross_error: of :func:`calibrate`, relative; None without.
    """

    device: Device = None  # type: ignore[assignment]  # set by devices
    count: int = 0
    links: tuple[Link, ...] = ()
    constants: Mapping[str, float] = field(default_factory=FixedDict)
    fit_error: float | None = None
    cross_error: float | None = None
    devices: tuple[Device, ...] | None = None

    def __post_init__(self) -> None:
        if self.devices is not None:
            self._take_devices(self.devices)
        if not isinstance(self.device, Device):
            raise TypeError(f"device: {self.device!r} must be a Device")
        check_int(least=1, count=self.count)
        links: Any = self.links
        if not isinstance(links, Sequence) or not links or not all(isinstance(link, Link) for link in links):
            raise TypeError(f"links: {links!r} must be a list of at least one Link")
        sizes = [link.group_size for link in links]
        if sizes[-1] is not None and sizes[-1] < self.count:
            raise ValueError(f"links: group_size of the last one, {sizes[-1]}, must be None or at least {self.count}")
        inner = sizes[:-1]
        if None in inner or any(a % b for a, b in zip(inner[1:], inner, strict=False)):
            raise ValueError(f"links: group_size {sizes} must be multiples of those before, and None only at the end")
        _check_numbers("constants", self.constants, CONSTANTS)
        check_number(least=0, or_none=True, fit_error=self.fit_error, cross_error=self.cross_error)
        self._set("links", tuple(links))
        self._set("constants", FixedDict(self.constants))

    def _take_devices(self, devices: Any) -> None:
        if not isinstance(devices, Sequence) or not devices or not all(isinstance(each, Device) for each in devices):
            raise TypeError(f"devices: {devices!r} must be a list of at least one Device")
        if self.device not in (None, devices[0]):
            raise ValueError(f"device: {self.device!r} must not be given with devices")
        if isinstance(self.count, int) and self.count % len(devices):
            raise ValueError(f"count: {self.count} must be a multiple of the number of devices, {len(devices)}")
        self._set("devices", tuple(devices))
        self._set("device", devices[0])
        self._set("count", self.count or len(devices))

    @property
    def of_ranks(self) -> tuple["Cluster", ...]:
        """The cluster as each rank of a tensor-parallel group has it, with one device; one of all if they are alike."""
        kinds = self.devices if self.devices and len(set(self.devices)) > 1 else (self.device,)
        return tuple(dataclasses.replace(self, device=kind, devices=None) for kind in kinds)

    def with_constants(self, constants: Mapping[str, float]) -> "Cluster":
        """Returns the cluster with other factors."""
        return dataclasses.replace(self, constants=constants, fit_error=None, cross_error=None)

    def factor(self, name: str) -> float:
        """Returns a constant, 1 if it is not there."""
        return float(self.constants.get(name, 1.0))


def _check_numbers(name: str, values: Any, keys: Sequence[str]) -> None:
    if not isinstance(values, Mapping):
        raise TypeError(f"{name}: {values!r} must be a dict of numbers")
    for key, value in values.items():
        if key not in keys:
            raise ValueError(f"{name}: {key!r} must be one of {', '.join(keys)}")
        check_number(above=0, **_named(f"{name}[{key!r}]", value))


def _named(name: str, value: Any) -> dict[str, Any]:
    return {name: value}


def _are_sizes(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int) and not isinstance(value, bool) and value >= 1 for value in values)
