"""The command ``python -m tp_ext.planner --model config.json --gpus 64 --device h100-sxm --global-batch 256``, which
prints the ten best layouts; ends with 0, with 1 if nothing fits, with 2 for wrong arguments."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NoReturn

from tp_ext.planner.config import from_config
from tp_ext.planner.layout import Layout
from tp_ext.planner.machine import Cluster
from tp_ext.planner.prediction import GIB, Prediction, predict
from tp_ext.planner.presets import SOURCES, cluster, device
from tp_ext.planner.search import Found, search
from tp_ext.planner.workload import Workload

# Names of arguments -> options
_OPTIONS = {field.name: f"--layout: {field.name}" for field in fields(Layout)} | {
    "config": "--model",
    "count": "--gpus",
    "device_name": "--device",
    "name": "--devices",
    "devices": "--devices",
    "global_batch": "--global-batch",
    "seq": "--seq",
    "fixed": "--layout",
    "objective": "--objective",
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message.removeprefix("argument "))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    parser = _Parser(
        prog="python -m tp_ext.planner",
        description="Ranks the layouts of a training by their predicted step time, or predicts the step of one.",
        epilog="exit code: 0, 1 if nothing fits the memory, 2 for wrong arguments",
    )
    parser.add_argument("--model", required=True, help="config.json of transformers, or its folder")
    parser.add_argument("--gpus", type=int, required=True, help="number of devices")
    kinds = parser.add_mutually_exclusive_group(required=True)
    kinds.add_argument("--device", help=f"one of {', '.join(SOURCES)}")
    kinds.add_argument("--devices", nargs="+", metavar="DEVICE", help="of the ranks of a tensor-parallel group")
    parser.add_argument("--global-batch", type=int, required=True, help="sequences of a step")
    parser.add_argument("--seq", type=int, help="tokens of a sequence (default: the longest of the model)")
    parser.add_argument(
        "--layout",
        default="",
        help="names of tp_ext.planner.Layout and their values, tp=8,pp=8; with several values, tp=4|8, all are tried",
    )
    parser.add_argument("--objective", default="step_time", help="step_time or memory (default: step_time)")
    parser.add_argument("--draw", metavar="PATH", help="picture of the step of the best layout, such as step.png")
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    try:
        options = parser.parse_args(arguments)
        if options.draw:
            _check_writable(options.draw)
        workload = from_config(options.model, seq=options.seq)
        machine = _machine(options.device, options.devices, options.gpus)
        fixed = _fixed(options.layout)
        layouts = search(workload, machine, options.global_batch, fixed=fixed, objective=options.objective)
        if not layouts.count:
            raise ValueError(f"--layout: {options.layout!r} must leave a legal layout of {options.gpus} devices")
        if layouts and options.draw:
            layouts[0].draw(options.draw)
    except (TypeError, ValueError, OSError, ImportError) as error:
        name, colon, rest = str(error).partition(":")
        text = " ".join(f"{_OPTIONS.get(name, name)}{colon}{rest}".split())  # a line
        print(f"python -m tp_ext.planner: {text}", file=sys.stderr)
        return 2
    print(_json(layouts) if options.json else _table(workload, layouts, stages=bool(fixed)))
    return 0 if layouts else 1


def _machine(name: str | None, names: list[str] | None, count: int) -> Cluster:
    if names is None:
        return cluster(name or "", count)
    devices = tuple(device(each) for each in names)
    return replace(cluster(names[0], count), devices=devices)


def _check_writable(path: str) -> None:
    """Raises ValueError if no file can be written there; leaves none."""
    there = Path(path).exists()
    try:
        with open(path, "ab"):
            pass
    except OSError as error:
        raise ValueError(f"--draw: {path!r} must be a file that can be written: {error}") from error
    if not there:
        Path(path).unlink()


def _fixed(text: str) -> dict[str, Any]:
    """Returns the values of ``"tp=4|8,recompute=full"``.

    Raises:
        ValueError: no such name, one that is given twice, or a part of another form.
    """
    fixed: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        name, equals, values = part.partition("=")
        name = name.strip()
        if not equals or not values:
            raise ValueError(f"--layout: {part!r} must be of the form name=value")
        if name in fixed:
            raise ValueError(f"--layout: {name!r} must be given once; several values are {name}=4|8")
        fixed[name] = [_value(text.strip()) for text in values.split("|")]
    return fixed


def _value(text: str) -> Any:
    words = {"None": None, "none": None, "True": True, "true": True, "False": False, "false": False}
    return words[text] if text in words else int(text) if text.lstrip("-").isdecimal() else text


def _table(workload: Workload, layouts: Found, stages: bool) -> str:
    """Returns the ranking; with ``stages`` also the step of the best layout, and the memory of each of its stages."""
    lines = [f"{workload.name}, {workload.parameters / 1e9:.2f} billion parameters; {layouts.count:,} layouts"]
    if layouts:
        lines.append(f"{'s a step':>10} {'tokens/s':>12} {'MFU':>6} {'GiB':>6} {'bubble':>7}  layout")
        lines += [_line(prediction) for prediction in layouts]
    if layouts.rejected:
        layout, reason = next(iter(layouts.rejected.items()))
        lines.append(f"nearest of those that do not fit: {reason}: {layout}")
        if not layouts:
            nearest = predict(workload, layouts.cluster, layout, layouts.global_batch)
            lines += [f"nothing fits; the nearest is {nearest.why()}", str(nearest)]
    if layouts and stages:
        lines += ["", f"the best: {layouts[0]}"]
    return "\n".join(lines)


def _line(prediction: Prediction) -> str:
    peak = max(memory.peak for stage in prediction.memory_of_ranks for memory in stage) / GIB
    bubble = prediction.breakdown["bubble"] / prediction.step_time
    return (
        f"{prediction.step_time:10.4g} {prediction.tokens_per_second:12,.0f} {prediction.mfu:6.1%} {peak:6.1f} "
        f"{bubble:7.1%}  {prediction.layout}"
    )


def _json(layouts: Found) -> str:
    rows = [
        {
            "layout": json.loads(prediction.layout.to_json()),
            "step_time": prediction.step_time,
            "tokens_per_second": prediction.tokens_per_second,
            "mfu": prediction.mfu,
            "breakdown": prediction.breakdown,
            "memory": [memory._asdict() for stage in prediction.memory_of_ranks for memory in stage],
        }
        for prediction in layouts
    ]
    rejected = [{"layout": json.loads(layout.to_json()), "reason": why} for layout, why in layouts.rejected.items()]
    return json.dumps({"count": layouts.count, "best": rows, "rejected": rejected[:10]}, indent=1)


if __name__ == "__main__":
    sys.exit(main())
