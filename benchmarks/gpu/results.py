"""Results of ``benchmarks.gpu.check``: the rows of its benchmarks, the goals, the table and plot of the docs.

    python -m benchmarks.gpu.results runs/gpu_check/results.json                             # the table and the goals
    python -m benchmarks.gpu.results runs/gpu_check/results.json --into benchmarks/results   # and the table of the docs

The second command copies the file there as gpu_check.json, draws gpu_check.png next to it and prints the table of
docs/reference/performance.md in Markdown.
"""

import argparse
import csv
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.lib.harness import what
from benchmarks.lib.report import draw_bars, print_table

Row = dict[str, Any]
FLOATS = {"ours_ms": "ms", "gb_per_s": "gb_per_s", "copy_ms": "copy_ms", "share_of_copy": "share_of_copy"}
SMALL = 64 << 20  # bytes: below, a kernel's start and end weigh too much for a share of the bandwidth to say anything
FAMILIES = ("bias_act", "bias_dropout_residual", "gated_act", "norm", "rope", "vocab_cross_entropy", "vocab_embedding")
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


def goals(rows: Iterable[Row]) -> list[Row]:
    """Every goal with the value reached by the worst of its cases; `met` is None if nothing was measured."""
    rows = list(rows)
    result = []

    def shares(kernel: str, passed: str, residual: bool | None = None) -> list[tuple[float, str]]:
        return [
            (row["share_of_copy"], row["case"])
            for row in rows
            if (row["kernel"], row["pass"]) == (kernel, passed)
            and row["share_of_copy"] is not None
            and row["bytes"] >= SMALL
            and residual in (None, "residual" in row["case"])
        ]

    def at_least(goal: str, target: float, found: list[tuple[float, str]]) -> None:
        value, case = min(found, default=(None, ""))
        met = None if value is None else value >= target
        result.append({"goal": goal, "target": f">= {target}", "value": value, "case": case, "met": met})

    moved = {(row["kernel"], row["pass"]) for row in rows if row["bytes"]}  # GEMMs have no bandwidth to reach
    for kernel in sorted({*FAMILIES, *(kernel for kernel, _ in moved)}):
        for passed, words, target in (("fwd", "forward", 0.95), ("bwd", "backward", 0.90)):
            if kernel in FAMILIES or (kernel, passed) in moved:
                residual = False if (kernel, passed) == ("norm", "bwd") else None
                at_least(f"{kernel}: {words}, share of a copy", target, shares(kernel, passed, residual))
    at_least("norm + residual: backward, share of a copy", 0.80, shares("norm", "bwd", True))
    large = next((row for row in rows if row["case"] == LARGE_LOSS and row["dtype"] == "bfloat16"), None)
    ms = None if large is None else large["ms"]
    logits = 8192 * 131072 * 2
    peak = None if large is None or large["extra_bytes"] is None else 1 + large["extra_bytes"] / logits
    for goal, target, value in (("ms", 1.66, ms), ("peak memory over the logits", 1.02, peak)):
        met = None if value is None else value <= target
        case = f"{LARGE_LOSS}: {goal}"
        result.append({"goal": case, "target": f"<= {target}", "value": value, "case": LARGE_LOSS, "met": met})
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


def markdown(results: Row) -> str:
    """The table of docs/reference/performance.md, and the machine: of cases that are measured forward, backward and in
    both, the last."""
    both = {(row["kernel"], row["case"].removesuffix("fwd+bwd")) for row in results["rows"] if row["pass"] == "fwd+bwd"}
    rows = [
        row
        for row in results["rows"]
        if row["pass"] == "fwd+bwd" or (row["kernel"], row["case"].removesuffix(row["pass"])) not in both
    ]
    peers = ["torch eager", "torch.compile"]
    titles = ["kernel", "ms", "of a copy", *(f"{peer}, ms" for peer in peers), "others, ms"]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for row in rows:
        share = f"{row['share_of_copy']:.0%}" if row["share_of_copy"] else ""
        cells = [f"{row['kernel']}, {row['case']}", f"{row['ms']:.3f}", share]
        cells += [f"{row['peers_ms'][peer]:.3f}" if peer in row["peers_ms"] else "" for peer in peers]
        cells += [", ".join(f"{peer} {ms:.3f}" for peer, ms in row["peers_ms"].items() if peer not in peers)]
        lines.append(f"| {' | '.join(cells)} |")
    stamp = f"{results['gpu']}, driver {results['driver']}, CUDA {results['cuda']}, torch {results['torch']}"
    lines += ["", f"{stamp}, commit {results['commit']}, {results['date'][:10]}: `make gpu-check`."]
    return "\n".join(lines)


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
    if not args.into:
        print_report(results)
        return
    if not results["gpu"]:
        sys.exit(f"{args.results} is of a dry run without a GPU: it has no figures to show")
    (args.into / "gpu_check.json").write_text(args.results.read_text())
    draw(results, args.into / "gpu_check.png")
    print(markdown(results))


if __name__ == "__main__":
    main()
