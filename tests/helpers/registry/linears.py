"""Linears, and blocks of them: of a column and a row linear, and of regions alone."""

from torch import nn
from torch.nn import functional

import tp_ext
from tests.helpers.registry.bytes import AG, AR, RS, SP, E, F, H, N, S, Saved, Sent, called
from tests.helpers.registry.entries import FFN, HIDDEN, Case, Kind
from tp_ext.sharding import split_sizes

CASES = {
    "column": Case("ColumnParallelLinear", (HIDDEN, FFN), gives="features", collectives=(1, 1)),
    "row": Case("RowParallelLinear", (FFN, HIDDEN), takes="features", collectives=(1, 2)),
}


ERRORS = [
    ("Column(4, 0, group=g)", ValueError, "out_features: 0 must be an integer of at least 1"),
    ("Column(4.5, 4, group=g)", ValueError, "in_features: 4.5 must be an integer"),
    ("Column(4, 8, parts=(4, 5), group=g)", ValueError, r"parts: .*must sum to out_features = 8"),
    ("Column(4, 8, parts=(), group=g)", ValueError, r"parts: \(\) must hold at least one"),
    ("Column(4, 8, unit=3, group=g)", ValueError, "size: 8 .*whole units of 3"),
    ("Column(4, 8, unit=2, parts=(8,), group=g)", ValueError, "unit: 2 must be given in each Part"),
    ("Column(4, 6, parts=(Part(6, copies=3),), group=g)", ValueError, "copies: 3 .*p = 2"),
    ("Column(4, 4, skip_bias_add=True, gather_output=True, group=g)", ValueError, "skip_bias_add: .*gather_output"),
    ("Column(4, 4, group=g)(ones(3, 5))", ValueError, r"x: shape \[3, 5\] must end in the 4"),
    ("Column(4, 4, group=g)(ones(()))", ValueError, r"x: shape \[\] must end in"),
    ("Column(4, 4, group=g)(ones(3, 4).double())", TypeError, "x: dtype Double must be that of weight, Float"),
    ("Column(4, 4, group=g)(ids)", TypeError, "x: dtype Long must be a floating"),
    ("Column(4, 4, group=g, **sp)(ones(4))", ValueError, r"x: shape \[4\] must have a dim of tokens"),
    ("Column(4, 4, group=g, **sp)(ones(3, 4), total_tokens=9)", ValueError, "total_tokens: 9 gives .* 3"),
    ("Column(4, 4, group=g, **sp)(ones(3, 4), total_tokens=-1)", ValueError, "total_tokens: -1 must be"),
    ("Column.from_linear(nn.Conv1d(1, 1, 1), group=g)", TypeError, "linear: Conv1d must be an nn.Linear"),
    ("Row(4, 4, input_is_parallel=False, **sp, group=g)", ValueError, "input_is_parallel: .*sequence_parallel"),
    ("Row(4, 4, parts=(Part(4, copies=2),), group=g)", ValueError, "parts: .*must not have copies"),
    (
        "Row(4, 4, group=g)(ones(3, 4))",
        ValueError,
        r"x: shape \[3, 4\] must end in the 2.*needs input_is_parallel=False",
    ),
    ("Row(4, 4, group=g)(ones(3, 1))", ValueError, r"x: shape \[3, 1\] must end in the 2 .* on this rank$"),
    ("Row(4, 4, input_is_parallel=False, group=g)(ones(3, 2))", ValueError, r"x: shape \(3, 2\) .*in_features = 4"),
    ("Row(4, 4, **sp, group=g)(ones(6, 2), total_tokens=5)", ValueError, "total_tokens: 5 must .*, 6"),
]


def _column(*args, **options):
    return called(tp_ext.ColumnParallelLinear, H, F, *args, **options)


def _row(*args, **options):
    options = {"width": F, "cut": True} | options
    return called(tp_ext.RowParallelLinear, F, H, *args, **options)


_COLUMN, _ROW = "ColumnParallelLinear", "RowParallelLinear"
SENT = {
    "column": Sent(_COLUMN, _column(), [], [(AR, S)]),
    "column frozen": Sent(_COLUMN, _column(frozen=True), [], [(AR, S)]),
    "column gather_output": Sent(_COLUMN, _column(gather_output=True), [(AG, N * F * E)], [(AR, S)]),
    "column sp": Sent(_COLUMN, _column(own=True, **SP), [(AG, S)], [(AG, S), (RS, S)]),
    "column sp frozen": Sent(_COLUMN, _column(own=True, frozen=True, **SP), [(AG, S)], [(RS, S)]),
    "row": Sent(_ROW, _row(), [(AR, S)]),
    "row input not parallel": Sent(_ROW, _row(cut=False, input_is_parallel=False), [(AR, S)], [(AG, N * F * E)]),
    "row sp": Sent(_ROW, _row(**SP), [(RS, S)], [(AG, S), (AR, H * E)]),
    "row sp no bias": Sent(_ROW, _row(False, **SP), [(RS, S)], [(AG, S)]),
}
SAVED = {
    "column": Saved(_COLUMN, lambda **o: tp_ext.ColumnParallelLinear(H, F, **o), lambda z: z.n_sp * z.h * z.e),
    "row": Saved(_ROW, lambda **o: tp_ext.RowParallelLinear(F, H, **o), lambda z: z.n * F // z.p * z.e, "features"),
}


class ColumnParallelLinear(nn.Linear):
    def __init__(self, n, m, bias=True, *, skip_bias_add=False, dtype=None, device=None, **_cut):
        super().__init__(n, m, bias, dtype=dtype, device=device)
        self.skip_bias_add = skip_bias_add

    def forward(self, x, total_tokens=None, weight=None):
        weight = self.weight if weight is None else weight
        return (
            (functional.linear(x, weight), self.bias) if self.skip_bias_add else functional.linear(x, weight, self.bias)
        )


PLAIN = {"ColumnParallelLinear": ColumnParallelLinear, "RowParallelLinear": ColumnParallelLinear}


def _unit_parts(r, p, copies):
    """Parts, each of whole units; with groups, copies and padding where they may be."""
    parts = []
    for _ in range(r.randint(1, 3)):
        unit, part = r.choice((1, 1, 2, 3)), {}
        if p > 1 and r.random() < 0.3:
            part["groups"] = r.choice([g for g in range(1, p + 1) if p % g == 0])
        elif copies and p > 1 and r.random() < 0.4:
            part["copies"] = r.choice([c for c in range(1, p + 1) if p % c == 0])
        whole = unit * part.get("groups", 1)
        parts.append({"size": whole * r.randint(1, 4), "unit": unit, **part})
        if copies and r.random() < 0.2:
            parts[-1]["padding"] = whole * r.randint(1, 3)
    return parts


def _linears(r, p, copies):
    parts = _unit_parts(r, p, copies) if r.random() < 0.5 else None
    unit = 1 if parts else r.choice((1, 1, 2, 3))
    inner = sum(part["size"] for part in parts) if parts else unit * r.randint(1, 6)
    flags = {"column_bias": r.random() < 0.6, "row_bias": r.random() < 0.6, "twice": r.random() < 0.2}
    return {"inner": inner, "parts": parts, "unit": unit, **flags}


def _pair(r, p, dropout):
    return _linears(r, p, copies=False) | {f"{name}_skip": r.random() < 0.4 for name in ("column", "row")}


def _gathered(r, p, dropout):
    options = _linears(r, p, copies=True)
    cut = r.randint(0, options["inner"])
    row_parts = [{"size": size} for size in (cut, options["inner"] - cut) if size] if r.random() < 0.5 else None
    if row_parts and r.random() < 0.3:
        row_parts[0]["padding"] = r.randint(1, 5)
    return options | {"row_parts": row_parts}


def _parts(place, given):
    """The reference model has no shards: groups, copies and padding belong to p ranks."""
    if given is None:
        return None
    names = ("size", "unit") if place.group is None else ("size", "unit", "copies", "groups", "padding")
    return [place.kit.Part(**{name: part[name] for name in names if name in part}) for part in given]


def _given(layer, twice):
    """The weight at a call, if it is not the layer's own."""
    return {"weight": 2 * layer.weight} if twice else {}


class Pair(nn.Module):
    """Column, sine, row. The bias of each may be skipped; then it is added here, or goes on to the dropout."""

    def __init__(self, options, config, place):
        super().__init__()
        o, kit, self.tell, self.twice = options, place.kit, place.tell, options["twice"]
        parts, inner = _parts(place, o["parts"]), o["inner"]
        more = {"parts": parts, "unit": o["unit"], **place.linear}
        hidden = config["hidden"]
        self.column = kit.ColumnParallelLinear(hidden, inner, o["column_bias"], skip_bias_add=o["column_skip"], **more)
        self.row = kit.RowParallelLinear(inner, hidden, o["row_bias"], skip_bias_add=o["row_skip"], **more)

    def forward(self, x):
        h = self.column(x, **self.tell, **_given(self.column, self.twice))
        if isinstance(h, tuple):
            h = h[0] if h[1] is None else h[0] + h[1]
        y = self.row(h.sin(), **self.tell, **_given(self.row, self.twice))
        return y if isinstance(y, tuple) else (y, None)


class Gathered(nn.Module):
    """Column with gather_output, sine, row with input_is_parallel=False: features whole in between, and all tokens."""

    def __init__(self, options, config, place):
        super().__init__()
        o, kit, hidden, self.place, self.twice = options, place.kit, config["hidden"], place, options["twice"]
        parts, inner = _parts(place, o["parts"]), o["inner"]
        more = {"parts": parts, "unit": o["unit"]}
        self.column = kit.ColumnParallelLinear(
            hidden, inner, o["column_bias"], gather_output=True, **more, **place.linear
        )
        more = place.linear | {"sequence_parallel": False, "parts": _parts(place, o["row_parts"])}
        self.row = kit.RowParallelLinear(inner, hidden, o["row_bias"], input_is_parallel=False, **more)

    def forward(self, x):
        place = self.place
        h = self.column(x, **place.tell, **_given(self.column, self.twice))
        y = self.row(h.sin(), **_given(self.row, self.twice))
        return (place.kit.scatter_to_region(y, place.group, 0) if place.sp else y), None


class Exchange(nn.Module):
    """A sine with the features cut, by regions alone."""

    def __init__(self, options, config, place):
        super().__init__()
        self.place, p = place, place.p
        self.features, self.tokens = split_sizes(config["hidden"], p), split_sizes(place.total, p)

    def forward(self, x):
        kit, group = self.place.kit, self.place.group
        if not self.place.sp:
            return kit.gather_from_region(kit.scatter_to_region(x, group).sin(), group, -1, self.features), None
        y = kit.all_to_all_region(x, group, -1, 0, None, self.tokens).sin()
        return kit.all_to_all_region(y, group, 0, -1, self.tokens, self.features), None


def _valid(options, p, config):
    if options["twice"] and config["main_grad"]:
        return False  # such a weight has no main_grad
    if [] in (options["parts"], options.get("row_parts")):
        return False
    inner, parts = options["inner"], options["parts"]
    for each in (parts or [{"size": inner, "unit": options["unit"]}], options.get("row_parts") or [{"size": inner}]):
        sharding = tp_ext.Sharding(0, [tp_ext.Part(**part) for part in each])
        if sharding.size != inner or (parts and options["unit"] != 1):
            return False
        sharding.local_sizes(p)
    return True


KINDS = {
    "pair": Kind(_pair, Pair, _valid),
    "gathered": Kind(_gathered, Gathered, _valid),
    "exchange": Kind(lambda r, p, dropout: {}, Exchange),
}
OFF = {
    "column_bias": False, "row_bias": False, "column_skip": False, "row_skip": False, "parts": None, "row_parts": None,
    "copies": 1, "groups": 1, "padding": 0, "twice": False,
}  # fmt: skip
