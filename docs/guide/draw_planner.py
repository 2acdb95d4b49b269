"""Draws the pictures of docs/guide/planner.md and docs/reference/planner.md: predicted against published steps, the
step time over the number of devices with the best layout, and a predicted step.

Run it after a change: python docs/guide/draw_planner.py
"""

import sys
from pathlib import Path

from matplotlib import pyplot

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))  # the published steps are among the tests

from tests.planner import published  # noqa: E402
from tp_ext import planner  # noqa: E402

COLORS = {"A": "tab:blue", "C": "tab:green", "D": "tab:orange", "E": "tab:red"}
LLAMA_70B = {"layers": 80, "hidden": 8192, "heads": 64, "kv_heads": 8, "ffn": 28672, "vocab": 128256, "seq": 8192}


def draw_published():
    figure, axes = pyplot.subplots(figsize=(6, 5))
    for row, got, _ in published.compared():
        marker = {"fit": "o", "test": "x", "reported": "."}[row.use]
        color = "lightgray" if row.use == "reported" else COLORS[row.table]
        filled = {"facecolors": "none", "edgecolors": color} if row.use == "fit" else {"color": color}
        axes.scatter(row.seconds, got.step_time, marker=marker, s=30, **filled)
    axes.plot([1, 300], [1, 300], color="black", linewidth=0.6)
    axes.fill_between([1, 300], [0.9, 270], [1.1, 330], color="black", alpha=0.06)
    for table, color in COLORS.items():
        axes.scatter([], [], color=color, marker="x", label=f"table {table}")
    axes.scatter([], [], facecolors="none", edgecolors="black", label="calibrates")
    axes.scatter([], [], color="lightgray", marker=".", label="reported: recipe not known")
    axes.set(xscale="log", yscale="log", xlabel="published step, s", ylabel="predicted step, s")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(HERE / "planner_published.png", dpi=120)


def draw_scaling():
    model, counts = planner.transformer(**LLAMA_70B), [2**k for k in range(6, 13)]
    figure, axes = pyplot.subplots(figsize=(8, 4.2))
    best = []
    for count in counts:
        fixed = {"param_dtype": "bf16"}
        best.append(planner.search(model, planner.cluster("h100-sxm", count), 2048, fixed=fixed, top=1)[0])
    axes.plot(counts, [one.step_time for one in best], "o-", label="best layout")
    ideal = [best[0].step_time * counts[0] / count for count in counts]
    axes.plot(counts, ideal, "--", color="gray", label="ideal from the first")
    for count, one in zip(counts, best, strict=True):
        layout = one.layout
        text = f"pp {layout.pp} tp {layout.tp} cp {layout.cp}\nZeRO {layout.zero}, MFU {one.mfu:.0%}"
        axes.annotate(text, (count, one.step_time), fontsize=6, xytext=(4, 6), textcoords="offset points")
    axes.set(
        xscale="log", yscale="log", xlabel="H100", ylabel="predicted step, s", title="Llama-3 70B, batch 2048 x 8192"
    )
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.minorticks_off()
    axes.margins(x=0.12, y=0.15)
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(HERE / "planner_scaling.png", dpi=120)


def draw_step():
    layout = planner.Layout(pp=4, tp=8, virtual=2, zero=1, recompute="selective", param_dtype="bf16")
    planner.predict(planner.transformer(**LLAMA_70B), planner.cluster("h100-sxm", 64), layout, 32).draw(
        HERE / "planner_step.png"
    )


if __name__ == "__main__":
    draw_published()
    draw_scaling()
    draw_step()
