"""The values of the planner as those of the library, which predicts and searches."""

import functools
from collections.abc import Iterable
from fractions import Fraction
from typing import Any

from tp_ext._build import load
from tp_ext.planner.actions import library_schedule
from tp_ext.planner.layout import STORED, Layout
from tp_ext.planner.machine import Cluster
from tp_ext.planner.workload import Op, Workload
from tp_ext.share_sizes import Weights, split_sizes

_SAME = ("pp", "dp", "ep", "cp", "tp", "virtual", "micro_batch", "zero", "sequence_parallel", "offload", "overlap_tp")
_SIZES = ("hidden", "seq", "heads", "kv_heads", "experts", "layers", "vocab", "tied")
_EVERYWHERE = 2**62


def curve_of(cluster: Cluster, dtype: str) -> Any:
    """Returns the efficiency curve of one dtype."""
    device = cluster.device
    peak = device.flops(dtype) / device.flops("bf16") if dtype != "fp32" and "bf16" in device.peak else 1.0
    return device.curve.of(dtype, cluster.factor(f"gemm_{'bf16' if dtype == 'fp16' else dtype}"), peak)


@functools.lru_cache(maxsize=256)
def machine_of(cluster: Cluster, dtype: str) -> Any:
    """Returns the machine for a dtype of the blocks: what is not in it is in bf16, of fp32 in fp32.

    Raises:
        ValueError: the device has no peak of the dtype.
    """
    device, planner, other = cluster.device, load().planner, "fp32" if dtype == "fp32" else "bf16"
    share = device.curve.optimizer or device.curve.memory
    levels = [
        planner.Level(
            latency=link.latency,
            bandwidth=link.bandwidth * cluster.factor("outer" if i else "inner"),
            devices=link.group_size or _EVERYWHERE,
        )
        for i, link in enumerate(cluster.links)
    ]
    return planner.Machine(
        peak_blocks=device.flops(dtype),
        peak_other=device.flops(other),
        blocks=curve_of(cluster, dtype),
        other=curve_of(cluster, other),
        attention=device.curve.attention * cluster.factor("attention"),
        memory_bandwidth=device.memory_bandwidth * device.curve.memory * cluster.factor("memory"),
        optimizer_bandwidth=device.memory_bandwidth * share * cluster.factor("memory"),
        asynchronous=device.asynchronous,
        memory=device.memory - device.reserve,
        launch=device.launch,
        gather=cluster.factor("gather"),
        count=cluster.count,
        levels=levels,
    )


def machines_of(cluster: Cluster, dtype: str) -> list[Any]:
    """Returns the machine as each rank of tp has it; one if they are alike."""
    return [machine_of(of_rank, dtype) for of_rank in cluster.of_ranks]


@functools.lru_cache(maxsize=256)
def workload_of(workload: Workload) -> Any:
    """Returns the workload."""
    planner = load().planner

    def ops(rows: Iterable[Op]) -> list[Any]:
        return [planner.Op(**vars(op) | {"kind": getattr(planner.OpKind, op.kind)}) for op in rows]

    blocks = [planner.BlockOps(layers=block.layers, ops=ops(block.ops)) for block in workload.blocks]
    same = {name: getattr(workload, name) for name in _SIZES}
    return planner.Workload(**same, first=ops(workload.first), last=ops(workload.last), blocks=blocks)


def layout_of(layout: Layout) -> Any:
    """Returns a resolved layout."""
    planner, unequal = load().planner, {}
    if layout.shares and len(set(layout.shares)) > 1:
        exact = [Fraction(weight) for weight in layout.shares]
        cut = functools.partial(split_sizes, p=layout.tp, weights=layout.shares)
        unequal = {"shares": [float(weight / sum(exact)) for weight in exact], "cut": cut}
    return planner.Layout(
        **unequal,
        **{name: getattr(layout, name) for name in _SAME},
        schedule=layout.torch_schedule,
        recompute=getattr(planner.Recompute, layout.recompute or "none"),
        element=STORED.get(layout.dtype, 2),
        quantized=layout.dtype not in STORED,
        param_bytes=STORED[layout.param_dtype],
        grad_bytes=STORED[layout.grad_dtype],
        state_bytes=8 if layout.param_dtype == "fp32" else 12,  # with master weights
    )


@functools.lru_cache(maxsize=256)
def planner_of(workload: Workload, cluster: Cluster, dtypes: tuple[str, str, str], global_batch: int) -> Any:
    """Returns the predictor of the layouts of one dtype, which keeps what they share."""
    return load().planner.Planner(
        workload_of(workload), machines_of(cluster, dtypes[0]), global_batch, library_schedule
    )


def dtypes_of(layout: Layout) -> tuple[str, str, str]:
    """Returns the dtypes that the layouts of one predictor have in common."""
    return layout.dtype, layout.param_dtype, layout.grad_dtype


def layout_from(setting: Any, dtypes: tuple[str, str, str], shares: Weights | None = None) -> Layout:
    """Returns the layout of one of the library, which does not keep dtypes and shares as they were given."""
    recompute = setting.recompute.name
    return Layout(
        **{name: getattr(setting, name) for name in _SAME},
        schedule=setting.schedule,
        recompute=None if recompute == "none" else recompute,
        dtype=dtypes[0],
        param_dtype=dtypes[1],
        grad_dtype=dtypes[2],
        shares=shares,
    )
