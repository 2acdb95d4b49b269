"""Speed of the CPU kernels relative to torch's operators, by family, from the CSV files of a run.

    python -m benchmarks.cpu_results benchmarks/results              # the table, the goals, and the rows below them
    python -m benchmarks.cpu_results benchmarks/results --markdown   # the table of docs/reference/performance.md

The rows of a file's newest commit count, the last one of each case, and the fastest of several peers. A ratio is that
of two medians in one run; a cell of the table has the median of a family's ratios and the lowest.
"""

import argparse
import csv
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path

from benchmarks.lib.harness import what
from benchmarks.lib.report import print_table, text

Row = dict[str, str]
GOAL, LIMIT = 1.5, 1.0  # for the families and passes of WANTED; for every row
WANTED = {
    "bias_act": "",
    "gated_act": "",
    "bias_dropout_residual": "",
    "norm": "residual",
    "vocab_cross_entropy": "fwd+bwd",
}


def read_rows(folder: Path) -> list[Row]:
    """The row of the fastest peer for each case, dtype and number of threads, with its family and pass."""
    rows = []
    for path in sorted(folder.glob("bench_*.csv")):
        with path.open() as file:
            found = [row for row in csv.DictReader(file) if row.get("threads") and row.get("ratio")]
        last = {
            (r["case"], r["dtype"], r["threads"], r["peer"]): r for r in found if r["commit"] == found[-1]["commit"]
        }
        fastest: dict[tuple[str, ...], Row] = {}
        for (*case, _peer), row in last.items():
            known = fastest.setdefault(tuple(case), row)
            fastest[tuple(case)] = min(known, row, key=lambda r: float(r["ratio"]))
        kernel = path.stem.removeprefix("bench_")
        rows += [r | {"family": family(kernel, r["case"]), "pass": what(r["case"])} for r in fastest.values()]
    return rows


def family(kernel: str, case: str) -> str:
    """The family of a row: a kernel; norms of a sum are separate from the others."""
    if kernel != "norm":
        return kernel
    name = "layer_norm" if case.startswith("layer_norm") else "rms_norm"
    return f"{name} residual" if "residual" in case else name


def table(rows: Iterable[Row]) -> list[dict[str, object]]:
    """A line for each family and pass: median and lowest ratio for each dtype and number of threads."""
    cells: dict[tuple[str, str], dict[str, list[float]]] = {}
    for row in rows:
        column = f"{row['dtype']}, {row['threads']} thread{'s' * (row['threads'] != '1')}"
        cells.setdefault((row["family"], row["pass"]), {}).setdefault(column, []).append(float(row["ratio"]))
    columns = sorted({column for line in cells.values() for column in line}, key=_order)
    return [
        {"kernel": name, "pass": passed} | {column: _cell(line.get(column, [])) for column in columns}
        for (name, passed), line in cells.items()
    ]


def _order(column: str) -> tuple[int, str]:
    dtype, threads = column.split(", ")
    return ["float64", "float32", "bfloat16", "float16"].index(dtype), threads


def _cell(ratios: list[float]) -> str:
    if len(ratios) < 2:
        return f"{ratios[0]:.2f}" if ratios else ""
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f})"


def below(rows: Iterable[Row], bound: float) -> list[Row]:
    """The rows below the bound, the lowest first."""
    return sorted((row for row in rows if float(row["ratio"]) < bound), key=lambda row: float(row["ratio"]))


def goals(rows: list[Row]) -> list[dict[str, object]]:
    """For each goal: its rows, how many of them reach it, and the lowest."""
    result: list[dict[str, object]] = []
    for kernel, part in WANTED.items():
        mine = [r for r in rows if kernel in r["family"] and part in r["case"]]
        result.append(_goal(f"{kernel} {part}".strip(), GOAL, mine))
    return [*result, _goal("every row", LIMIT, rows)]


def _goal(name: str, bound: float, rows: list[Row]) -> dict[str, object]:
    ratios = [float(row["ratio"]) for row in rows]
    middle, lowest = (statistics.median(ratios), min(ratios)) if ratios else (None, None)
    reached = f"{sum(ratio >= bound for ratio in ratios)} of {len(ratios)}"
    return {"goal": name, "at least": bound, "median": middle, "lowest": lowest, "rows that reach it": reached}


def markdown(lines: list[dict[str, object]]) -> str:
    head = list(lines[0])
    rows = [[text(value) for value in line.values()] for line in lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="How many times as fast as torch's operators the CPU kernels are.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--markdown", action="store_true", help="the table alone")
    args = parser.parse_args(arguments)
    rows = read_rows(args.folder)
    if not rows:
        sys.exit(f"{args.folder}: no bench_*.csv in it times a kernel on a CPU")
    if args.markdown:
        print(markdown(table(rows)))
        return
    print_table(table(rows))
    print_table(goals(rows))
    for row in below(rows, GOAL):
        print(f"{float(row['ratio']):.2f}: {row['family']}, {row['case']}, {row['dtype']}, threads: {row['threads']}")


if __name__ == "__main__":
    main()
