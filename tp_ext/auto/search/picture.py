"""Draws a layer as a plan shards it: its modules in the order of their calls, with the collectives between them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from tp_ext.auto.record.edits import Conversion, Output
from tp_ext.auto.search.choose import local_length
from tp_ext.auto.search.direct_calls import with_parents
from tp_ext.auto.search.flow import Flow
from tp_ext.conversions import I, P, R, S
from tp_ext.sharding import Sharding

COLOURS = {"sharded": "#8ecae6", "partial": "#ffb703", "replicated": "#e5e5e5"}
COLLECTIVE = "#c1121f"
TOKEN_BOUNDARIES = {
    (P, S): "reduce-scatter of the sum over tokens, forward; all-gather, backward",
    (I, S): "slice of the tokens, forward; all-gather of its gradient, backward",
    (S, R): "all-gather of the tokens, forward; reduce-scatter of its gradient, backward",
    (S, I): "all-gather of the tokens, forward; slice of its gradient, backward",
}
WIDTHS = {"parameter": 3.4, "module": 3.2, "output": 3.4}
ROW = 0.62  # inches


class ShownPlan(Protocol):
    """The attributes of a :class:`tp_ext.auto.Plan` that a picture shows."""

    p: int
    shapes: dict[str, tuple[int, ...]]
    shardings: dict[str, Sharding]
    conversions: list[Conversion]
    outputs: list[Output]


def outputs_of(
    flow: Flow, modules: Mapping[str, nn.Module], heads: Sequence[str], token_sizes: Callable[[int], list[int]]
) -> list[Output]:
    """The results of the modules, in the order of their first calls.

    Args:
        heads: modules whose result is sharded though the model's code sees its full shape.
        token_sizes: the lengths of tokens on the ranks.
    """
    types, record = flow.types, flow.types.record
    summed = {edit.module for edit in flow.sums} | {name for name, role in types.roles.items() if role != "column"}
    sizes = {atom: size for decision in types.chosen for atom, size in decision.sizes(0).items()}
    calls = {name: first for name, (first, *_) in record.calls_of.items()}
    around = {parent for name in calls for parent in with_parents(name)[:-1]}
    outputs = []
    for call in sorted(calls.values(), key=lambda called: (called.start, -called.stop)):
        tensors = [tensor for _, tensor in call.outputs]
        if not call.module or not tensors:
            continue
        tensor, name = tensors[0], call.module
        # A result that is summed is partial, whatever else it is: its module's own sum makes it whole
        is_local = id(tensor) in flow.local or name in heads
        lengths = [local_length(dim, sizes) for dim in record.dims_of(tensor)] if is_local else tensor.shape
        state = "partial" if name in summed else "sharded" if is_local else "replicated"
        is_leaf = name not in around
        kind = type(modules[name]).__name__
        output = Output(name, kind, is_leaf, tuple(tensor.shape), tuple(lengths), state)
        outputs.append(output if types.tokens is None else types.tokens.shown(record, output, token_sizes))
    return outputs


def layer_of(plan: ShownPlan) -> str:
    """The first of the largest group of modules that are called in turn, ``model.layers.0``; else the model, ``""``."""
    lists: dict[str, set[str]] = {}
    for output in plan.outputs:
        parts = output.module.split(".")
        for i, part in enumerate(parts[:-1]):
            if part.isdigit():
                lists.setdefault(".".join(parts[:i]), set()).add(part)
    if not lists:
        return ""
    # Of lists of equal length the shortest name, which is the nearest to the model: layers, not experts in a layer
    around = max(lists, key=lambda name: (len(lists[name]), -len(name)))
    first = min(lists[around], key=int)
    return f"{around}.{first}" if around else first


def draw(plan: ShownPlan, path: str | Path, module: str | None) -> None:
    """See :meth:`tp_ext.auto.Plan.draw`."""
    path = Path(path)
    if path.suffix not in (".png", ".svg"):
        raise ValueError(f"path: {str(path)!r} must end in .png or .svg")
    name = layer_of(plan) if module is None else module
    inside = [
        output for output in plan.outputs if not name or output.module == name or output.module.startswith(name + ".")
    ]
    if not inside:
        raise ValueError(f"module: {name!r} must be a module that the plan's example calls")
    # By name, and here: matplotlib is needed for nothing else, and a plan must be made without it
    try:
        matplotlib = importlib.import_module("matplotlib")
        figures = importlib.import_module("matplotlib.figure")
        patches = importlib.import_module("matplotlib.patches")
    except ImportError as error:
        raise ImportError("draw: matplotlib must be installed: pip install matplotlib") from error
    rows = _rows(plan, inside)
    width = sum(WIDTHS.values()) + 0.6
    # Without pyplot, which would choose a backend for the whole process; 2.6 rows are the headings and the legend
    figure = figures.Figure(figsize=(width, ROW * (len(rows) + 2.6)))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width)
    axes.set_ylim(-(len(rows) + 1.2), 1.4)
    axes.axis("off")
    depth = name.count(".") + 1 if name else 0
    title = f"{name or 'the model'} on p = {plan.p} ranks: full size -> size on a rank"
    axes.text(0.2, 0.95, title, fontsize=11, weight="bold", va="center")
    left = 0.2
    for heading, column in zip(("parameters", "modules, in order of calls", "results"), WIDTHS.values(), strict=True):
        axes.text(left + 0.05, 0.3, heading, fontsize=9, style="italic", va="center")
        left += column
    for number, row in enumerate(rows):
        _draw_row(axes, patches, row, -number - 0.5, depth, name)
    for number, (state, colour) in enumerate(COLOURS.items()):
        left, bottom = 0.2 + number * 2.2, -(len(rows) + 0.9)
        axes.add_patch(patches.Rectangle((left, bottom), 0.3, 0.4, facecolor=colour, edgecolor="black", lw=0.6))
        axes.text(left + 0.4, bottom + 0.2, state, fontsize=9, va="center")
    axes.text(6.8, -(len(rows) + 0.7), "communication", color=COLLECTIVE, fontsize=9, va="center")
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "tp_ext"}):  # the same file each time
        figure.savefig(path, dpi=130, metadata={"Date": None} if path.suffix == ".svg" else None)


def _rows(plan: ShownPlan, outputs: Sequence[Output]) -> list[dict[str, Any]]:
    """Modules with their parameters, and the collectives before and after them."""
    rows: list[dict[str, Any]] = []
    open_: list[Output] = []

    def close(until: str) -> None:
        while open_ and not until.startswith(open_[-1].module + "."):
            after(open_.pop())

    def boundaries(output: Output, at: str) -> None:
        for edit in plan.conversions:
            if edit.of_tokens and (edit.module, edit.at) == (output.module, at) and edit.types in TOKEN_BOUNDARIES:
                rows.append({"text": f"{TOKEN_BOUNDARIES[edit.types]}: {_name(output.module)}"})

    def after(output: Output) -> None:
        boundaries(output, "output")
        if output.state == "partial" and output.module not in scattered:
            rows.append({"text": f"all-reduce of the sum over ranks, forward: {_name(output.module)}"})
        if ("output", output.module) in copied:
            rows.append({"text": f"all-reduce of its gradient, backward: {_name(output.module)}"})

    # A module comes before those inside it, so its collectives are drawn when the first module outside of it comes. A
    # reduce-scatter stands in place of the all-reduce
    scattered = {edit.module for edit in plan.conversions if edit.types == (P, S)}
    copied = {(edit.at, edit.module) for edit in plan.conversions if edit.types == (I, R)}
    for output in outputs:
        close(output.module)
        boundaries(output, "argument")
        if ("argument", output.module) in copied:
            rows.append({"text": f"all-reduce of the input's gradient, backward: {_name(output.module)}"})
        names = [name for name in plan.shapes if name.rpartition(".")[0] == output.module]
        rows.append({"output": output, "parameters": [_parameter(plan, name) for name in names]})
        open_.append(output)
    close("")
    return rows


def _name(module: str) -> str:
    return module.rpartition(".")[2]


def _parameter(plan: ShownPlan, name: str) -> tuple[str, str]:
    """A line about a parameter, and its state."""
    shape, sharding = plan.shapes[name], plan.shardings.get(name)
    text = f"{_name(name)} {_size(shape)}"
    if sharding is None:
        return text, "replicated"
    return f"{text} -> {_size(tuple(sharding.local_shape(shape, 0, plan.p)))}", "sharded"


def _size(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "1"


def _draw_row(axes: Any, patches: Any, row: dict[str, Any], y: float, depth: int, layer: str) -> None:
    def cell(column: str, text: str, state: str, indent: float = 0.0) -> None:
        left = 0.2 + sum(width for name, width in list(WIDTHS.items())[: list(WIDTHS).index(column)])
        place = (left + indent, y - 0.36)
        width = WIDTHS[column] - 0.2 - indent
        axes.add_patch(patches.Rectangle(place, width, 0.72, facecolor=COLOURS[state], edgecolor="black", lw=0.6))
        axes.text(left + indent + width / 2, y, text, fontsize=8, ha="center", va="center")

    if "text" in row:
        end = sum(WIDTHS.values()) + 0.2
        axes.plot([0.2, end], [y, y], color=COLLECTIVE, lw=1.2, zorder=0)
        axes.text(
            end / 2, y, row["text"], fontsize=8, color=COLLECTIVE, ha="center", va="center",
            bbox={"facecolor": "white", "edgecolor": COLLECTIVE, "boxstyle": "round,pad=0.25"},
        )  # fmt: skip
        return
    output: Output = row["output"]
    level = output.module.count(".") + 1 - depth if output.module != layer else 0
    left = 0.2 + WIDTHS["parameter"]
    label = output.module.removeprefix(layer).removeprefix(".") or _name(output.module)
    axes.text(
        left + 0.05 + 0.12 * max(0, level - 1), y, f"{_name(label)}: {output.kind}", fontsize=8, va="center",
        weight="normal" if output.is_leaf else "bold",
    )  # fmt: skip
    if row["parameters"]:
        texts, states = zip(*row["parameters"], strict=True)
        cell("parameter", "\n".join(texts[:2]), "sharded" if "sharded" in states else "replicated")
    if output.is_leaf:
        local = "" if output.local == output.shape else f" -> {_size(output.local)}"
        cell("output", _size(output.shape) + local, output.state)
