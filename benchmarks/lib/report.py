"""Output of benchmarks: tables, CSV rows with the run's stamp, and a PNG plot next to the CSV."""

import argparse
import csv
import datetime
import importlib.util
import os
import platform
import subprocess
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import tp_ext

Record = dict[str, object]
RESULTS = Path(__file__).parents[1] / "results"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that every benchmark has: --quick or --full, --csv."""
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="as little as shows that it runs: no figures to quote")
    size.add_argument("--full", action="store_true", help="everything, and longer; default: part of it, or shorter")
    parser.add_argument(
        "--csv",
        type=Path,
        nargs="?",
        const=RESULTS,
        metavar="FOLDER",
        help="append to FOLDER/<script>.csv and draw FOLDER/<script>.png; without FOLDER: benchmarks/results",
    )


def run(
    script: str,
    description: str | None,
    cases: Callable[[bool], Sequence[Any]],
    measure: Callable[[Any, float, float], list[Record]],
    draw: Callable[[Any, list[Record]], None],
    *packages: str,
    full: Sequence[Any] | None = None,
) -> None:
    """Runs a benchmark of subjects that take turns: reads the options, prints a table for each of ``cases(quick)``,
    which ``measure(case, seconds, block)`` measures, and writes CSV and PNG. ``full``: the cases of ``--full``, if they
    are others."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    args = parser.parse_args()
    seconds, block = (0.0, 0.0) if args.quick else (60.0, 0.5) if args.full else (16.0, 0.25)
    circumstances = stamp("cpu", *packages)
    print(", ".join(f"{key} {value}" for key, value in circumstances.items()))
    records: list[Record] = []
    for case in full if args.full and full is not None else cases(args.quick):
        rows = measure(case, seconds, block)
        print_table(rows)
        records += rows
    if args.csv:
        write(args.csv, Path(script).stem, circumstances, records, lambda figure: draw(figure, records))


def stamp(device: str, *packages: str) -> Record:
    """The circumstances of a row: commit ("+": edited; TP_EXT_COMMIT where there is no git), device, versions, date."""

    def git(*args: str) -> str:
        cwd = Path(__file__).parent
        try:
            done = subprocess.run(["git", *args], cwd=cwd, capture_output=True, text=True, check=False)
        except OSError:  # no git
            return ""
        return done.stdout.strip()

    if device == "cuda":
        name = torch.cuda.get_device_name()
    else:
        info = Path("/proc/cpuinfo")
        lines = info.read_text().splitlines() if info.exists() else []
        name = next((line.split(":")[1].strip() for line in lines if "model name" in line), platform.machine())
    edited = "+" if git("status", "--porcelain", "-uno") else ""
    commit = git("rev-parse", "--short", "HEAD") + edited or os.environ.get("TP_EXT_COMMIT", "unknown")
    versions = {package: _version(package) for package in packages}
    environment = {"commit": commit, "device": name, "torch": torch.__version__, **versions, "date": _today()}
    if device == "cpu":
        environment["products"] = tp_ext.build_info()["products"].partition(", as measured")[0]
    return environment


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def _today() -> str:
    return str(datetime.date.today())


def line(cells: Mapping[str, object], widths: Mapping[str, int]) -> str:
    """One line of a table; a negative width aligns to the left, the default is the length of the column's name."""
    texts = [text(value) for value in cells.values()]
    pads = [widths.get(key, len(key)) for key in cells]
    return " ".join(text.ljust(-pad) if pad < 0 else text.rjust(pad) for text, pad in zip(texts, pads, strict=True))


def text(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def print_table(records: Sequence[Record]) -> None:
    """Prints columns of sufficient width, words aligned to the left."""
    widths = {}
    for key in records[0]:
        width = max(len(key), *(len(text(record[key])) for record in records))
        widths[key] = -width if isinstance(records[0][key], str) else width
    for cells in [{key: key for key in records[0]}, *records]:
        print(line(cells, widths).rstrip(), flush=True)


def write(folder: Path, script: str, run: Record, records: Sequence[Record], draw: Callable[[Any], None]) -> None:
    """Appends the records, each with the stamp ``run``, to the CSV and draws the PNG of this run, ``draw(figure)``."""
    append(folder, script, run, records)
    print(f"{len(records)} rows added to {folder / f'{script}.csv'}")
    plot(folder, script, run, draw)


def append(folder: Path, script: str, run: Record, records: Sequence[Record]) -> None:
    """Appends the records, each with the stamp ``run``, to the CSV."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [run | record for record in records]
    path = folder / f"{script}.csv"
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        if file.tell() == 0:
            writer.writeheader()
        writer.writerows({k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows)


def plot(folder: Path, script: str, run: Record, draw: Callable[[Any], None]) -> None:
    """Draws the PNG of this run, ``draw(figure)``."""
    if importlib.util.find_spec("matplotlib") is None:
        print("no plot: matplotlib is not installed")
        return
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    draw(figure)
    figure.text(0, -0.02, ", ".join(f"{key} {value}" for key, value in run.items()), fontsize=6, va="top")
    figure.savefig(folder / f"{script}.png", dpi=110, bbox_inches="tight")
    print(f"drawn: {folder / f'{script}.png'}")


def draw_bars(figure: Any, panels: Mapping[str, Mapping[str, float]], unit: str, mark: float | None = None) -> None:
    """One panel of horizontal bars for each name, a line at ``mark``."""
    rows = max(len(bars) for bars in panels.values())
    figure.set_size_inches(6.5 * len(panels), 1.2 + 0.32 * rows)
    for axes, (title, bars) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        drawn = axes.barh(list(bars), list(bars.values()), height=0.7)
        axes.bar_label(drawn, fmt=lambda v: f"{v:,.0f}" if v >= 100 else f"{v:.3g}", padding=3, fontsize=8)
        axes.set(title=title, xlabel=unit)
        axes.invert_yaxis()
        axes.margins(x=0.15)
        axes.tick_params(labelsize=8)
        if mark is not None:
            axes.axvline(mark, color="black", linewidth=0.8)


def bars(title: str, value: str, unit: str, mark: float | None = 1.0) -> Callable[[Any, Sequence[Record]], None]:
    """Returns what draws records: a panel for each title, which names columns in braces, with a bar for each case."""

    def draw(figure: Any, records: Sequence[Record]) -> None:
        panels: dict[str, dict[str, Any]] = {}
        for record in records:
            panels.setdefault(title.format(**record), {})[str(record["case"])] = record[value]
        draw_bars(figure, panels, unit, mark)

    return draw
