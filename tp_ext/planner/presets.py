"""Devices and clusters of public data sheets.

Peaks are dense, without sparsity. A gigabyte of memory is 2^30 bytes, as devices report it within 1 %: nvidia-smi has
143,771 MiB for an H200's 141 GB, 183,359 for a B200's 180, 189,471 for a GB200's 186, 275,040 for a B300's 270, 284,208
for a GB300's 279.

Bandwidths of links are for one direction: 0.8 of the data sheet's for NVLink, chosen by published steps
(docs/reference/planner.md), 0.9 for networks, assumed. Latencies are assumed, of the order of those by which NCCL
chooses its algorithms (src/graph/tuning.cc: 2.5 to 5.7 us a step of a ring over NVLink and PCIe, 2.5 to 6.6 us over a
network). Shares of the peak are priors, which :func:`tp_ext.planner.calibrate` corrects: 0.8 of it for a GEMM of bf16
is assumed; of the memory's bandwidth fused kernels reach 0.85 to 0.9 on an H200 (docs/reference/performance.md), those
of other libraries less, and published steps chose 0.7.
"""

from typing import NamedTuple

from tp_ext._checks import check_choice, check_int
from tp_ext.planner.machine import Cluster, Device, EfficiencyCurve, Link

GIB = 2**30


class _Preset(NamedTuple):
    """A data sheet: its link, the device, multiprocessors, and the levels of links as (latency, bytes/s, devices); the
    share of the peak and ``half_k`` of :class:`EfficiencyCurve`."""

    source: str
    peak: dict[str, float]
    memory_bandwidth: float
    memory: float
    units: int
    inner: tuple[float, float, int]
    outer: tuple[float, float]
    share: float = 0.8  # assumed
    half_k: float = 128  # assumed


_NVIDIA = "https://www.nvidia.com/en-us/data-center/"
# 600, 900 and 1800 GB/s in both directions
_NVLINK3, _NVLINK4, _NVLINK5 = (3e-6, 240e9, 8), (3e-6, 360e9, 8), (3e-6, 720e9, 8)
_RACK = (3e-6, 720e9, 64)  # of the 72 devices of a rack a power of two
# 200, 400 and 800 Gbit/s, a card for each device
_IB200, _IB400, _IB800 = (8e-6, 22.5e9), (8e-6, 45e9), (8e-6, 90e9)
_AMPERE = {"fp32": 19.5e12, "bf16": 312e12}
_HOPPER = {"fp32": 67e12, "bf16": 989e12, "fp8": 1979e12}
# half_k of the A100 is chosen by published steps, docs/reference/planner.md
_PRESETS = {
    "a100-40": _Preset(f"{_NVIDIA}a100/", _AMPERE, 1.555e12, 40 * GIB, 108, _NVLINK3, _IB200, half_k=192),
    "a100-80": _Preset(f"{_NVIDIA}a100/", _AMPERE, 2.039e12, 80 * GIB, 108, _NVLINK3, _IB200, half_k=192),
    "h100-sxm": _Preset(f"{_NVIDIA}h100/", _HOPPER, 3.35e12, 80 * GIB, 132, _NVLINK4, _IB400),
    "h100-pcie": _Preset(
        "https://www.nvidia.com/content/dam/en-zz/Solutions/gtcs22/data-center/h100/PB-11133-001_v01.pdf",
        {"fp32": 51e12, "bf16": 756e12, "fp8": 1513e12},
        2.0e12,
        80 * GIB,
        114,
        (6e-6, 51e9, 8),  # 0.8 of PCIe 5.0 x16
        _IB200,
    ),
    "h200": _Preset(f"{_NVIDIA}h200/", _HOPPER, 4.8e12, 141 * GIB, 132, _NVLINK4, _IB400),
    "b200": _Preset(
        f"{_NVIDIA}dgx-b200/",
        {"fp32": 75e12, "bf16": 2250e12, "fp8": 4500e12, "fp4": 9000e12},
        8e12,
        180 * GIB,  # 1,440 GB of eight
        148,
        _NVLINK5,
        _IB400,
    ),
    "b300": _Preset(
        f"{_NVIDIA}dgx-b300/",
        {"fp32": 75e12, "bf16": 2250e12, "fp8": 4500e12, "fp4": 13500e12},
        8e12,
        270 * GIB,
        148,
        _NVLINK5,
        _IB800,
    ),
    "gb200": _Preset(
        f"{_NVIDIA}gb200-nvl72/",
        {"fp32": 80e12, "bf16": 2500e12, "fp8": 5000e12, "fp4": 10000e12},
        8e12,
        186 * GIB,  # 13.4 TB of 72
        148,
        _RACK,
        _IB400,
    ),
    "gb300": _Preset(
        f"{_NVIDIA}gb300-nvl72/",
        {"fp32": 80e12, "bf16": 2500e12, "fp8": 5000e12, "fp4": 15000e12},
        8e12,
        279 * GIB,
        148,
        _RACK,
        _IB800,
    ),
    "mi300x": _Preset(
        "https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html",
        {"fp32": 163.4e12, "bf16": 1307e12, "fp8": 2615e12},
        5.3e12,
        192 * GIB,
        304,
        (5e-6, 358e9, 8),  # 0.8 of seven links of 64 GB/s
        _IB400,
        0.5,  # assumed
    ),
    "l40s": _Preset(
        f"{_NVIDIA}l40s/",
        {"fp32": 91.6e12, "bf16": 362e12, "fp8": 733e12},
        864e9,
        48 * GIB,
        142,
        (8e-6, 26e9, 8),  # 0.8 of PCIe 4.0 x16
        _IB200,
    ),
    "cpu": _Preset(
        "assumed, for two cores with AVX-512: no data sheet has these numbers, and planner.measure has a machine's own",
        {"fp32": 180e9, "bf16": 410e9},
        20e9,
        8 * GIB,
        1,
        (20e-6, 4e9, 8),
        (100e-6, 1e9),
    ),
}
SOURCES = {name: preset.source for name, preset in _PRESETS.items()}
"""The data sheet of each preset; of ``cpu`` a sentence that says that there is none."""


def device(name: str) -> Device:
    """Returns the device of a public data sheet (:data:`SOURCES`), with 2 GiB of a GPU reserved.

    Args:
        name: one of ``a100-40``, ``a100-80``, ``h100-sxm``, ``h100-pcie``, ``h200``, ``b200``, ``b300``, ``gb200``,
            ``gb300``, ``mi300x``, ``l40s``, ``cpu`` (two cores).

    Raises:
        ValueError: another name.
    """
    check_choice(_PRESETS, name=name)
    preset, host = _PRESETS[name], name == "cpu"
    low = 0.85 * preset.share  # assumed: what is reached of the peaks below 16 bits is less
    # Those of a CPU are assumed; of a GPU attention is the lower end of what FlashAttention-2 reaches of an A100
    # (arXiv:2307.08691: 0.5 to 0.73), and tiles are those of libraries for large products
    curve = EfficiencyCurve(
        share={"fp32": preset.share, "bf16": preset.share, "fp8": low, "fp4": low},
        tile=(8, 8) if host else (128, 256),
        units=preset.units,
        half_k=64 if host else preset.half_k,
        attention=0.3 if host else 0.5,
        memory=0.7,
    )
    return Device(
        name,
        peak=preset.peak,
        memory_bandwidth=preset.memory_bandwidth,
        memory=preset.memory,
        reserve=0 if host else 2 * GIB,
        asynchronous=not host,
        gemm=curve,
    )


def cluster(device_name: str, count: int) -> Cluster:
    """Returns a cluster of devices in nodes of 8, of GB200 and GB300 in racks of 64, with a network card of 200 to 800
    Gbit/s for each device.

    Args:
        device_name: of :func:`device`. count: number of devices.

    Raises:
        ValueError: another name, or no integer of at least 1.
    """
    check_choice(_PRESETS, device_name=device_name)
    kind = device(device_name)
    check_int(least=1, count=count)
    preset = _PRESETS[device_name]
    inner = Link(*preset.inner)
    links = (inner,) if count <= preset.inner[2] else (inner, Link(*preset.outer, None))
    return Cluster(kind, count, links)
