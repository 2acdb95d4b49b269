"""Published steps as rows of the planner: published_steps.csv, of which each row has its source.

``python -m tests.planner.published`` prints all of them next to what is predicted.
"""

import csv
import json
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tp_ext import planner
from tp_ext.planner import Layout

FILE = Path(__file__).parent / "published_steps.csv"
MACHINES = {"GB300": "gb300", "GB200": "gb200", "B300": "b300", "B200": "b200", "H100": "h100-sxm"}
MACHINES |= {"A100-80": "a100-80"}
DTYPES = {"FP8": "fp8", "FP8-CS": "fp8", "": "fp8", "MXFP8": "mxfp8", "NVFP4": "nvfp4", "fp16": "bf16", "bf16": "bf16"}
DTYPES |= {"BF16": "bf16", "fp8": "fp8", "fp8 tensorwise": "fp8", "fp8 rowwise": "fp8"}
MLA = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
# Mixtures of experts of table B, whose row has no sizes: those of their configurations
_DEEPSEEK = {"layers": 61, "hidden": 7168, "ffn": 18432, "top_k": 8, "expert_ffn": 2048, "shared": 1, "mla": MLA}
_QWEN = {"kv_heads": 4, "head_dim": 128, "vocab": 151936, "experts": 128, "top_k": 8}
MIXTURES = {
    "DeepSeekV3": _DEEPSEEK | {"heads": 128, "vocab": 129280, "experts": 256, "dense_layers": 3},
    "Kimi_K2": _DEEPSEEK | {"heads": 64, "vocab": 163840, "experts": 384, "dense_layers": 1},
    "Qwen3_30B_a3B": _QWEN | {"layers": 48, "hidden": 2048, "heads": 32, "expert_ffn": 768},
    "Qwen3_235B_a22B": _QWEN | {"layers": 94, "hidden": 4096, "heads": 64, "expert_ffn": 1536},
    "GPT OSS 120B": {"layers": 36, "hidden": 2880, "heads": 64, "kv_heads": 8, "head_dim": 64, "vocab": 201088}
    | {"experts": 128, "top_k": 4, "expert_ffn": 2880},
}
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
    names = ("hidden", "layers", "heads", "kv_heads", "ffn", "vocab")
    written = read["hidden/layers/heads/kv/ffn/vocab"]
    sizes = dict(zip(names, map(int, written.split("/")), strict=True)) if written else dict(MIXTURES[read["model"]])
    number = {name: int(read[name] or 1) for name in ("pp", "tp", "cp", "ep", "virtual", "micro_batch")}
    devices, batch, seq, table = int(read["devices"]), int(read["global_batch"]), int(read["seq"]), read["table"]
    sizes["seq"] = seq
    old = table in "CE"
    # Between these: fp16 as bf16, blocks of GPT without flash attention; Megatron's distributed optimizer is ZeRO 1
    workload = _workload(json.dumps(sizes), old)
    sharded = int(read["fsdp"] or 0) > 1 or read["kind"] == "zero3" or table == "D"  # torchtitan: over cp, too
    zero = 3 if sharded else 1 if table in "AB" else 0
    layout = Layout(
        **number,
        schedule="Interleaved1F1B" if number["virtual"] > 1 and number["pp"] > 1 else "1F1B",
        zero=zero,
        recompute=RECOMPUTE[read["recompute"]],
        overlap_tp=table in "AB" or "async_tp" in read["extra"],
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
        hidden, layers, vocab = (sizes[name] for name in ("hidden", "layers", "vocab"))
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
    return planner.transformer(**json.loads(sizes), **options)


@cache
def rows():
    """The rows that a layout can say; a microbatch that is not known, of two that are only reported, is one sequence.
    One of B shares the experts over tp, too."""
    with FILE.open() as file:
        read = [_row(read) for read in csv.DictReader(file)]
    return [row for row in read if row.devices % (row.layout.pp * row.layout.ep * row.layout.cp * row.layout.tp) == 0]


def groups():
    """Yields the rows of each table, machine and release."""
    groups = {}
    for row in rows():
        groups.setdefault((row.table, row.machine, row.release), []).append(row)
    yield from groups.values()


def calibrated(of_one):
    """The cluster of a group, with constants of its ``fit`` rows alone; without any with those of the preset."""
    fits = [(row.workload, row.layout, row.batch, row.seconds, row.devices) for row in of_one if row.use == "fit"]
    cluster = planner.cluster(of_one[0].machine, 4096)
    return planner.calibrate(cluster, fits) if fits else cluster


def compared():
    """Yields (row, predicted seconds, constants) of all rows."""
    for of_one in groups():
        cluster = calibrated(of_one)
        for row in of_one:
            sized = planner.cluster(row.machine, row.devices).with_constants(cluster.constants)
            yield row, planner.predict(row.workload, sized, row.layout, row.batch), cluster


def main():
    for row, got, _ in compared():
        # Of what does not fit the recipe is another: states in bf16, recomputation, rows of experts that are dropped
        error, note = got.step_time / row.seconds - 1, "" if got.fits else f"  {got.why()}"
        what = f"{row.table} {row.use:8} {row.model:16} {row.devices:5} {row.machine:8} {row.columns['precision']:8}"
        print(f"{what} {row.seconds:8.2f} s, predicted {got.step_time:8.2f} s, {100 * error:+6.1f} %{note}")


if __name__ == "__main__":
    main()
