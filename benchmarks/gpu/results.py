"""Results of ``benchmarks.gpu.check``: the rows of its benchmarks, the goals, the table and the plot.

python -m benchmarks.gpu.results runs/gpu_check/results.json                             # the table and the goals
python -m benchmarks.gpu.results runs/gpu_check/results.json --into benchmarks/results   # gpu_check.json and .png
"""

import argparse
import csv
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.lib.harness import what
from benchmarks.lib.report import draw_bars, print_table

Row = dict[str, Any]
FLOATS = {"ours_ms": "ms", "gb_per_s": "gb_per_s", "copy_ms": "copy_ms", "share_of_copy": "share_of_copy"}
SMALL = 64 << 20  # bytes: below, a kernel's start and end weigh too much for a share of the bandwidth to say anything
FAMILIES = {"bias_act", "bias_dropout_residual", "gated_act", "norm", "rope", "vocab_cross_entropy", "vocab_embedding"}
LARGE_LOSS = "in place 8192 x 131072 fwd+bwd"


def read_rows(folder: Path) -> list[Row]:
    """One row for each case of the harness's CSV files, with the times of its peers."""
    rows: dict[tuple[str, ...], Row] = {}
    for path in sorted(folder.glob("bench_*.csv")):
        kernel = path.stem.removeprefix("bench_")
        with path.open() as file:
            for record in csv.DictReader(file):
                if None in record.values():  # cut off in the middle
                    continue
                row = rows.setdefault((kernel, record["case"], record["dtype"]), {"kernel": kernel})
                row |= {"case": record["case"], "pass": what(record["case"]), "shape": record["shape"]}
                row |= {"dtype": record["dtype"], "bytes": int(record["bytes"])}
                row |= {to: float(record[key]) if record[key] else None for key, to in FLOATS.items()}
                row["extra_bytes"] = int(record["extra_bytes"]) if record["extra_bytes"] else None
                peers = row.setdefault("peers_ms", {})
                if record["peer"]:
                    peers[record["peer"]] = float(record["peer_ms"])
    return list(rows.values())


def write(path: Path, results: Row) -> None:
    """Writes the file of results at once, each row and command a line."""
    lines = {key: json.dumps(value) for key, value in results.items()}
    lines |= {k: "[\n  " + ",\n  ".join(map(json.dumps, v)) + "\n ]" for k, v in results.items() if isinstance(v, list)}
    new = path.with_suffix(".new")
    new.write_text("{\n" + ",\n".join(f' "{key}": {line}' for key, line in lines.items()) + "\n}\n")
    os.replace(new, path)


def goals(rows: Iterable[Row]) -> list[Row]:
    """Every goal with the value reached by the worst of its cases; `met` is None if nothing was measured."""
    rows, result = list(rows), list[Row]()

    def goal(name: str, sign: str, target: float, found: list[tuple[float, str]], case: str = "") -> None:
        value, case = min(found, default=(None, case))
        met = None if value is None else value >= target if sign == ">=" else value <= target
        result.append({"goal": name, "target": f"{sign} {target}", "value": value, "case": case, "met": met})

    def shares(name: str, target: float, kernel: str, passed: str, residual: bool | None = None) -> None:
        of = [row for row in rows if (row["kernel"], row["pass"]) == (kernel, passed) and row["bytes"] >= SMALL]
        of = [row for row in of if residual in (None, "residual" in row["case"]) and row["share_of_copy"] is not None]
        goal(f"{name}, share of a copy", ">=", target, [(row["share_of_copy"], row["case"]) for row in of])

    moved = {(row["kernel"], row["pass"]) for row in rows if row["bytes"]}  # GEMMs have no bandwidth to reach
    for kernel in sorted(FAMILIES | {kernel for kernel, _ in moved}):
        for passed, words, target in (("fwd", "forward", 0.95), ("bwd", "backward", 0.90)):
            if kernel in FAMILIES or (kernel, passed) in moved:
                residual = False if (kernel, passed) == ("norm", "bwd") else None
                shares(f"{kernel}: {words}", target, kernel, passed, residual)
    shares("norm + residual: backward", 0.80, "norm", "bwd", True)
    large = [row for row in rows if row["case"] == LARGE_LOSS and row["dtype"] == "bfloat16"]
    peaks = [1 + row["extra_bytes"] / (8192 * 131072 * 2) for row in large if row["extra_bytes"] is not None]
    goal(f"{LARGE_LOSS}: ms", "<=", 1.66, [(row["ms"], LARGE_LOSS) for row in large], LARGE_LOSS)
    goal(f"{LARGE_LOSS}: peak memory over the logits", "<=", 1.02, [(peak, LARGE_LOSS) for peak in peaks], LARGE_LOSS)
    return result


def print_report(results: Row) -> None:
    """A line for each row, and for each goal."""
    if results.get("rows"):
        keys = ("kernel", "case", "dtype", "ms", "gb_per_s", "share_of_copy")
        peers = sorted({peer for row in results["rows"] for peer in row["peers_ms"]})
        print_table([{k: row[k] for k in keys} | {p: row["peers_ms"].get(p) for p in peers} for row in results["rows"]])
    for goal in results.get("goals", []):
        met = {True: "met", False: "NOT met", None: "not measured"}[goal["met"]]
        value = "" if goal["value"] is None else f"{goal['value']:.3f} {goal['target']} ({goal['case']})"
        print(f"{met}: {goal['goal']} {value}".rstrip())


def draw(results: Row, path: Path) -> None:
    """Shares of a copy's bandwidth, a panel for each pass."""
    from matplotlib.figure import Figure

    panels: dict[str, dict[str, float]] = {}
    for row in results["rows"]:
        if row["share_of_copy"]:
            label = f"{row['kernel']}, {row['case'].removesuffix(row['pass']).strip()}"
            panels.setdefault(row["pass"] or "other", {})[label] = row["share_of_copy"]
    figure = Figure(layout="constrained")
    if panels:
        draw_bars(figure, panels, "share of the bandwidth of a copy", mark=1.0)
    title = ", ".join(str(results[key]) for key in ("gpu", "torch", "commit", "date"))
    figure.text(0, -0.02, title, fontsize=6, va="top")
    figure.savefig(path, dpi=50, bbox_inches="tight")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="The table, the goals and the plot of a results.json.")
    parser.add_argument("results", type=Path)
    parser.add_argument("--into", type=Path, metavar="FOLDER", help="put the file and its plot there")
    args = parser.parse_args(arguments)
    results = json.loads(args.results.read_text())
    if args.into and not results["gpu"]:
        sys.exit(f"{args.results} is of a dry run without a GPU: it has no figures to show")
    print_report(results)
    if args.into:
        write(args.into / "gpu_check.json", results)
        draw(results, args.into / "gpu_check.png")


if __name__ == "__main__":
    main()
