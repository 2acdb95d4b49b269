"""Published steps as rows of the planner: published_steps.csv, of which each row has its source."""

import csv
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tp_ext import planner
from tp_ext.planner import Layout

FILE = Path(__file__).parent / "published_steps.csv"
MACHINES = {"GB300": "gb300", "GB200": "gb200", "H100": "h100-sxm", "A100-80": "a100-80"}
DTYPES = {"FP8": "fp8", "FP8-CS": "fp8", "": "fp8", "MXFP8": "mxfp8", "NVFP4": "nvfp4", "fp16": "bf16", "bf16": "bf16"}
DTYPES |= {"fp8": "fp8", "fp8 tensorwise": "fp8", "fp8 rowwise": "fp8"}
RECOMPUTE = {"": None, "full": "full", "sac": "half", "selective+sp": "attention"}


class Row(NamedTuple):
    """A row: what calibrates or is compared, and what was measured."""

    use: str
    table: str
    machine: str
    release: str
    model: str
    devices: int
    batch: int
    seconds: float
    workload: planner.Workload
    layout: Layout
    columns: dict


def _row(read):
    hidden, layers, heads, kv, ffn, vocab = map(int, read["hidden/layers/heads/kv/ffn/vocab"].split("/"))
    number = {name: int(read[name] or 1) for name in ("pp", "tp", "cp", "ep", "virtual", "micro_batch")}
    devices, batch, seq, table = int(read["devices"]), int(read["global_batch"]), int(read["seq"]), read["table"]
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv, "ffn": ffn, "vocab": vocab, "seq": seq}
    old = table in "CE"
    # Between these: fp16 as bf16, blocks of GPT without flash attention; Megatron's distributed optimizer is ZeRO 1
    workload = _workload(tuple(sizes.items()), old)
    sharded = int(read["fsdp"] or 0) > 1 or read["kind"] == "zero3" or table == "D"  # torchtitan: over cp, too
    zero = 3 if sharded else 1 if table == "A" else 0
    layout = Layout(
        **number,
        schedule="Interleaved1F1B" if number["virtual"] > 1 and number["pp"] > 1 else "1F1B",
        zero=zero,
        recompute=RECOMPUTE[read["recompute"]],
        overlap_tp=table == "A" or "async_tp" in read["extra"],
        sequence_parallel=not old or "sp" in read["recompute"],
        dtype=DTYPES[read["precision"]],
        param_dtype="fp32" if table == "D" else "bf16",
    )
    tokens = batch * seq
    if read["seconds_per_step"]:
        seconds = float(read["seconds_per_step"])
    elif read["tokens_per_second_per_device"]:
        seconds = tokens / (float(read["tokens_per_second_per_device"]) * devices)
    else:  # with the recomputed forward: Narayanan et al., arXiv:2104.04473, section 5.1
        flops = 96 * tokens * layers * hidden**2 * (1 + seq / (6 * hidden) + vocab / (16 * layers * hidden))
        seconds = flops / (float(read["tflops_per_device"]) * 1e12 * devices)
    return Row(
        read["use"],
        table,
        MACHINES[read["device"]],
        read["release"],
        read["model"],
        devices,
        batch,
        seconds,
        workload,
        layout,
        read,
    )


@cache
def _workload(sizes, old):
    options = {"gated": False, "bias": True, "fused_attention": False, "positions": True} if old else {}
    return planner.transformer(**dict(sizes), **options)


@cache
def rows():
    """All rows whose model and layout are known."""
    with FILE.open() as file:
        known = (
            read for read in csv.DictReader(file) if read["hidden/layers/heads/kv/ffn/vocab"] and read["micro_batch"]
        )
        return [_row(read) for read in known]


def groups():
    """Yields the rows of each table, machine and release that has rows for the calibration."""
    groups = {}
    for row in rows():
        groups.setdefault((row.table, row.machine, row.release), []).append(row)
    yield from (of_one for of_one in groups.values() if any(row.use == "fit" for row in of_one))


def calibrated(of_one):
    """The cluster of a group, with constants of its ``fit`` rows alone."""
    fits = [(row.workload, row.layout, row.batch, row.seconds, row.devices) for row in of_one if row.use == "fit"]
    return planner.calibrate(planner.cluster(of_one[0].machine, 4096), fits)


def compared():
    """Yields (row, predicted seconds, constants) of all rows."""
    for of_one in groups():
        cluster = calibrated(of_one)
        for row in of_one:
            sized = planner.cluster(row.machine, row.devices).with_constants(cluster.constants)
            yield row, planner.predict(row.workload, sized, row.layout, row.batch), cluster
