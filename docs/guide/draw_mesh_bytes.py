"""Draws docs/guide/mesh_bytes.png: the bytes that a device sends for a network on one axis and on two.

Run it after a change: python docs/guide/draw_mesh_bytes.py
"""

from pathlib import Path

from matplotlib import pyplot

HIDDEN, FFN, BYTES = 4096, 16384, 2
DEVICES = [2**k for k in range(1, 11)]


def on_one_axis(p: int, tokens: int) -> float:
    return 4 * (p - 1) / p * tokens * HIDDEN * BYTES


def on_two_axes(p: int, tokens: int) -> float:
    """Returns the bytes for the best x and y."""
    shapes = [(x, p // x) for x in range(1, p + 1) if p % x == 0]
    sums = ((y - 1) * tokens * (HIDDEN + FFN) + (x - 1) * 2 * HIDDEN * FFN for x, y in shapes)
    return 2 * min(sums) / p * BYTES


pyplot.rcParams["svg.hashsalt"] = "tp_ext"  # the same file each time
figure, axes = pyplot.subplots(figsize=(7, 3.6))
for tokens, color in ((4096, "tab:blue"), (16384, "tab:orange"), (65536, "tab:green")):
    axes.plot(DEVICES, [on_one_axis(p, tokens) / 2**30 for p in DEVICES], "--", color=color)
    axes.plot(DEVICES, [on_two_axes(p, tokens) / 2**30 for p in DEVICES], color=color, label=f"{tokens:,} tokens")
axes.plot([], [], "--", color="gray", label="one axis")
axes.plot([], [], color="gray", label="two axes, best x and y")
axes.set(xscale="log", yscale="log", xlabel="devices", ylabel="GiB sent by a device")
axes.set_xticks(DEVICES, [str(p) for p in DEVICES])
axes.minorticks_off()
axes.grid(alpha=0.3)
axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1))
figure.tight_layout()
figure.savefig(Path(__file__).parent / "mesh_bytes.png", dpi=120)
for tokens in (4096, 16384, 65536):
    wins = next(p for p in DEVICES if on_two_axes(p, tokens) < on_one_axis(p, tokens))
    print(f"{tokens} tokens: two axes send less from {wins} devices on")
