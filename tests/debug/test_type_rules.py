"""Rules of types by numbers: the results of simulated ranks, put together by the type of a rule, are that of one rank.

``rulecheck`` of ``spmd_types`` cuts the arguments by their types, and compares. It cannot see whether a type is R or I,
which differ in gradients alone: test_type_check has those.
"""

import importlib
import inspect
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed._local_tensor import LocalTensor

from tp_ext import debug
from tp_ext._ops.binding import declarations, overload_of
from tp_ext.group import group_name

pytest.importorskip("spmd_types")
rulecheck = importlib.import_module("spmd_types.rulecheck")
RULES = importlib.import_module("tp_ext.debug.type_rules").RULES
spmd = importlib.import_module("spmd_types")
I, R, P, S = spmd.I, spmd.R, spmd.P, spmd.S  # noqa: E741

ROWS, IN, OUT, VOCAB = 4, 6, 8, 10
AXES = {"tp": 2, "x": 2}


@dataclass
class Case:
    """Arguments of an operator: those given, as for one rank; the types of its tensors, along tp or along both axes;
    and what differs by rank, a function of the rank and the number of ranks along tp and of this rank's arguments."""

    operator: str
    given: dict[str, Any]
    types: dict[str, Any]
    by_rank: Any = None
    axes: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        named = [value for value in self.given.values() if isinstance(value, str)]
        self.axes = tuple(axis for axis in AXES if axis == "tp" or axis in named)


def _x(*shape: int) -> Tensor:
    return torch.randn(shape or (ROWS, IN), generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def _ids(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).view(shape) * 7 % VOCAB


def _vocabulary(rank: int, p: int, given: dict) -> dict[str, int]:
    return {"vocab_start": rank * VOCAB // p, "vocab_local": VOCAB // p}


def _place_of_mask(rank: int, p: int, given: dict) -> dict[str, int]:
    local = given["x"].shape[-1]
    return {"local_inner": local, "offset": rank * local if local < IN else rank * given["x"].numel()}


def _copied_rows(rank: int, p: int, given: dict) -> dict[str, list[int]]:
    return {"local_starts": [0], "lengths": [ROWS // p], "full_starts": [rank * ROWS // p]}


def _to_itself(rank: int, p: int, given: dict) -> dict[str, list[int]]:
    sizes = [len(given["rows"]) if other == rank else 0 for other in range(p)]
    return {"split_sizes": sizes, "concat_sizes": sizes}


def _chunks(rank: int, p: int, given: dict) -> dict[str, Any]:
    return {"chunks": [ROWS // p] * p, "chunks_per_sequence": p}


def _own_rows(rank: int, p: int, given: dict) -> dict[str, Any]:
    return {"rows": given["rows"] - given["rows"].min(), **({"num_rows": 2 * ROWS // p} if "num_rows" in given else {})}


def _one_block_each(rank: int, p: int, given: dict) -> dict[str, list[int]]:
    return {"blocks": [1] * p}


def _segments(dim: int) -> Any:
    """The segments of two blocks of a weight's dim."""

    def by_rank(rank: int, p: int, given: dict) -> dict[str, list[int]]:
        length = given["weight"].shape[dim] * p // 2
        segments = [n for i in range(2 // p) for n in (rank + i, i * length, length)]
        return {"segments": segments, "blocks": [2 // p] * p}

    return by_rank


BLOCKS = {"blocks": [2], "segments": []}
GROUP, SP = {"group": "tp"}, {"group": "tp", "sequence_parallel": True}
LINEAR = {"x": _x(), "weight": _x(OUT, IN), "bias": _x(OUT)}
COLUMN, ROW = {"weight": S(0), "bias": S(0)}, {"weight": S(1), "bias": I}
NORM = {"x": _x(), "weight": _x(IN), "bias": _x(IN), "eps": 1e-5}
MASK = {"seed": torch.tensor(3), "p": 0.4, "local_inner": IN, "full_inner": IN, "offset": 0}
WORDS = {"group": "tp", "vocab_start": 0, "vocab_local": VOCAB, "vocab_size": VOCAB}
LOSS = WORDS | {"ignore_index": -100, "label_smoothing": 0.1, "z_loss": 0.01}
PERMUTED = torch.tensor([[1, 0], [3, 2], [5, 4], [7, 6]])
ATTENTION = {n: _x(1, ROWS, 2, 4 + i)[..., :4] for i, n in enumerate("qkv")} | {"seeds": None, "chunks": [ROWS]}
ATTENTION |= {"chunks_per_sequence": 1, "causal": False, "scale": 0.5}
PLANE = {"group": "tp", "weight_group": "x"}
ON_PLANE = {"x": {"tp": I, "x": S(0)}}


def _without(given: dict, *names: str) -> dict:
    return {name: value for name, value in given.items() if name not in names}


CASES = [
    Case("copy_to_region", {"x": _x(), **GROUP}, {"x": I}),
    Case("reduce_from_region", {"x": _x(), **GROUP}, {"x": P}),
    *(Case("scatter_to_region", {"x": _x(), **GROUP, "dim": dim}, {"x": I}) for dim in (0, -1)),
    *(Case("gather_from_region", {"x": _x(), **GROUP, "dim": dim}, {"x": S(dim)}) for dim in (0, 1)),
    *(Case("all_gather_region", {"x": _x(), **GROUP, "dim": dim}, {"x": S(dim)}) for dim in (0, 1)),
    *(Case("reduce_scatter_region", {"x": _x(), **GROUP, "dim": dim}, {"x": P}) for dim in (0, -1)),
    Case("all_to_all_region", {"x": _x(), **GROUP, "split_dim": 1, "concat_dim": 0}, {"x": S(0)}),
    *(
        Case(name, {"x": _x(), **GROUP, "full_size": ROWS, **_copied_rows(0, 1, {})}, {"x": S(0)}, _copied_rows)
        for name in ("copy_replicas_to_region", "reduce_replicas_from_region")
    ),
    Case("copy_to_region_coalesced", {"xs": _x(), **GROUP}, {"xs": I}),
    Case("column_parallel_linear", {**LINEAR, **GROUP}, {"x": I, **COLUMN}),
    Case("column_parallel_linear", {**LINEAR, **SP}, {"x": S(0), **COLUMN}),
    Case("row_parallel_linear", {**LINEAR, **GROUP}, {"x": S(1), **ROW}),
    Case("row_parallel_linear", {**LINEAR, **SP}, {"x": S(1), **ROW}),
    *(
        Case("block_column_linear", {**LINEAR, **where, **BLOCKS, "sizes": None}, {"x": x, **COLUMN}, _segments(0))
        for where, x in ((GROUP | {"sequence_parallel": False}, I), (SP, S(0)))
    ),
    *(
        Case("block_row_linear", {**LINEAR, **where, **BLOCKS}, {"x": S(1), **ROW}, _segments(1))
        for where in (GROUP | {"sequence_parallel": False}, SP)
    ),
    Case("block_copies", {"x": _x(), **GROUP, "blocks": [1]}, {"x": I}, _one_block_each),
    Case("block_sum", {"nodes": _x(1, 5), **GROUP, "blocks": [1]}, {"nodes": P}, _one_block_each),
    Case(
        "linear_2d",
        {**LINEAR, **PLANE, "weight_size": IN, "row": False, "activations": "replicated"},
        {**ON_PLANE, "weight": {"tp": S(0), "x": S(1)}, "bias": {"tp": S(0), "x": S(0)}},
    ),
    Case(
        "linear_2d",
        {**LINEAR, **PLANE, "weight_size": OUT, "row": True, "activations": "hidden"},
        {
            "x": {"tp": S(1), "x": S(0)},
            "weight": {"tp": S(1), "x": S(0)},
            "bias": {"tp": S(0), "x": S(0)},
        },
    ),
    Case("accumulate_grad_into", {"x": _x(), "main_grad": _x()}, {"x": S(1), "main_grad": S(1)}),
    Case(
        "matmul_2d",
        {"a": _x(ROWS, IN), "b": _x(IN, OUT), "rows": "tp", "columns": "x"},
        {name: {"tp": S(0), "x": S(1)} for name in "ab"},
    ),
    *(
        Case("context_attention", {**ATTENTION, **GROUP, "ring": ring}, dict.fromkeys("qkv", S(1)), _chunks)
        for ring in (False, True)
    ),
    *(
        Case(
            "attention",
            {"q": _x(2, 2, 3, 16), "k": _x(2, 2, 5, 16), "v": _x(2, 2, 5, 32)},
            dict.fromkeys("qkv", S(dim)),
        )
        for dim in (0, 1)
    ),
    *(
        Case("rope", {"x": _x(1, ROWS, 2, 4), "cos": _x(ROWS, 2), "sin": _x(ROWS, 2)}, {"x": x, "cos": c, "sin": c})
        for x, c in ((S(2), R), (S(1), S(0)))
    ),
    Case("rms_norm", _without(NORM, "bias"), {"x": S(0), "weight": R}),
    Case("layer_norm", NORM, {"x": S(0), "weight": R, "bias": R}),
    Case(
        "rms_norm_residual",
        _without(NORM, "bias") | {"residual": _x(ROWS, IN)},
        {"x": S(0), "residual": S(0), "weight": R},
    ),
    Case(
        "all_reduce_rms_norm",
        _without(NORM, "bias") | GROUP | {"residual": _x(ROWS, IN)},
        {"x": P, "residual": I, "weight": I},
    ),
    Case(
        "layer_norm_residual",
        NORM | {"residual": _x(ROWS, IN)},
        {"x": S(0), "residual": S(0), "weight": R, "bias": R},
    ),
    Case("sharded_rms_norm", {**_without(NORM, "bias"), **GROUP, "n": IN}, {"x": S(1), "weight": S(0)}),
    Case("sharded_layer_norm", {**NORM, **GROUP, "n": IN}, {"x": S(1), "weight": S(0), "bias": S(0)}),
    *(
        Case("bias_act", {"x": _x(), "bias": _x(IN), "activation": "silu"}, {"x": x, "bias": bias})
        for x, bias in ((S(0), R), (S(1), S(0)))
    ),
    # On shards of features the order of gates and values is that of the ranks: rows show the rule
    Case("gated_act", {"x": _x(), "bias": _x(IN), "activation": "swiglu"}, {"x": S(0), "bias": R}),
    *(
        Case(
            "bias_dropout_residual",
            {"x": _x(), "bias": _x(IN), "residual": _x(ROWS, IN), **MASK},
            {"x": x, "bias": bias, "residual": x, "seed": R},
            _place_of_mask,
        )
        for x, bias in ((S(1), S(0)), (S(0), R))
    ),
    *(
        Case(
            "vocab_parallel_embedding",
            {"ids": _ids(2, 4), "weight": _x(VOCAB, IN), **WORDS, "sequence_parallel": sp},
            {"ids": R, "weight": S(0)},
            _vocabulary,
        )
        for sp in (False, True)
    ),
    *(
        Case(
            "vocab_parallel_cross_entropy",
            {"logits": _x(ROWS, VOCAB), "target": _ids(ROWS), **LOSS, "reduction": how, "inplace_backward": False},
            {"logits": S(1), "target": R},
            _vocabulary,
        )
        for how in ("none", "mean")
    ),
    *(
        Case(operator, {"logits": _x(ROWS, VOCAB), **WORDS, **options}, {"logits": S(1)}, _vocabulary)
        for operator, options in (
            ("vocab_parallel_argmax", {}),
            ("vocab_parallel_sample", {"temperature": 0.0, "top_k": None, "top_p": None}),
        )
    ),
    *(
        Case(
            "linear_cross_entropy",
            {
                "x": _x(),
                "weight": _x(VOCAB, IN),
                "bias": _x(VOCAB),
                "target": _ids(ROWS),
                **LOSS,
                "reduction": "mean",
                "sequence_parallel": x is not I,
            },
            {"x": x, **COLUMN, "target": R},
            _vocabulary,
        )
        for x in (I, S(0))
    ),
    Case(
        "all_to_all_linear",
        {"rows": _x(ROWS, 2), **GROUP, "split_sizes": [ROWS], "concat_sizes": [ROWS], **_without(LINEAR, "bias")},
        {"rows": S(0), "x": S(0), "weight": R},
        _to_itself,
    ),
    Case(
        "grouped_linear",
        {"x": _x(ROWS, IN), "weight": _x(2, OUT, IN), "counts": [2, 2]},
        {"x": S(0), "weight": S(0)},
        lambda rank, p, given: {"counts": [2, 2][::p][: 2 // p]},
    ),
    Case("moe_permute", {"x": _x(), "rows": PERMUTED, "num_rows": 2 * ROWS}, {"x": S(0), "rows": S(0)}, _own_rows),
    Case(
        "moe_unpermute",
        {"y": _x(2 * ROWS, IN), "rows": PERMUTED, "weights": _x(ROWS, 2)},
        {"y": S(0), "rows": S(0), "weights": S(0)},
        _own_rows,
    ),
]


def _signature(operator: str) -> inspect.Signature:
    return inspect.signature(declarations[operator])


def _as_function(case: Case) -> type:
    """The operator as an autograd function with its rule, whose ranks are those of ``debug.simulate``."""
    many = case.operator == "copy_to_region_coalesced"  # of a list of tensors

    def forward(*args: Any) -> Any:
        given = dict(zip(_signature(case.operator).parameters, args, strict=True))
        ranks = next(value for value in args if isinstance(value, LocalTensor))._local_tensors
        p = 2 if len(ranks) > 1 else 1

        def on_rank(rank: int, mesh: Any) -> tuple[Tensor, ...]:
            own = {n: v._local_tensors[rank] if isinstance(v, LocalTensor) else v for n, v in given.items()}
            own |= case.by_rank(rank, p, own) if case.by_rank else {}
            for name, value in own.items():
                if isinstance(value, ProcessGroup):
                    own[name] = group_name(mesh[case.given[name]])
            y = overload_of(case.operator)(**(own | {"xs": [own["xs"]]} if many else own))
            return tuple(t.clone() for t in y) if isinstance(y, tuple | list) else (y.clone(),)

        results = debug.simulate(on_rank, dict.fromkeys(case.axes, p))
        found = tuple(LocalTensor(dict(enumerate(ys))) for ys in zip(*results, strict=True))
        return found if len(found) > 1 else found[0]

    forward.__signature__ = _signature(case.operator)

    def types(*, xs: Tensor, group: Any) -> Any:
        rule = RULES[case.operator]
        without = {name: () for name in inspect.signature(rule).parameters if name not in ("xs", "group")}
        return rule(xs=[xs], group=group, **without)[0]

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is saved; with it ``forward`` has no context among its parameters."""

    members = {"forward": forward, "setup_context": setup_context}

    def of_one_block(*, x: Tensor, group: Any, blocks: Any) -> Any:
        return RULES["block_copies"](x=x, group=group, blocks=[1, 1])[0]  # a block for each rank

    special = {"copy_to_region_coalesced": types, "block_copies": of_one_block}
    members["spmd_typecheck"] = special.get(case.operator, RULES[case.operator])
    statics = {name: staticmethod(value) for name, value in members.items()}
    return type(case.operator, (torch.autograd.Function,), statics)


def _check(case: Case) -> None:
    bound = _signature(case.operator).bind(**case.given)
    bound.apply_defaults()
    types = {name: held if isinstance(held, dict) else {"tp": held} for name, held in case.types.items()}
    mesh = {axis: AXES[axis] for axis in case.axes}
    rulecheck.rulecheck(_as_function(case), bound.args, types, mesh=mesh, local_tensor_mode=True)


def _name(case: Case) -> str:
    return f"{case.operator}, {' '.join(f'{name} {held!r}' for name, held in case.types.items())}"


@pytest.mark.parametrize("case", CASES, ids=_name)
def test_ranks_compute_what_the_type_says(case: Case) -> None:
    _check(case)


def test_every_rule_has_a_case() -> None:
    # Linears in float8 have no fp64, and the rules of those in high precision: tests/low_precision/test_float8_types.py
    assert {case.operator for case in CASES} == {name for name in RULES if not name.startswith("float8")}


def test_a_wrong_type_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = importlib.import_module("tp_ext.debug.type_rules").rules
    monkeypatch.setitem(RULES, "rms_norm", lambda *, x, weight: rules.einsum("...h,h->...h", x, weight))
    wrong = Case("rms_norm", _without(NORM, "bias"), {"x": S(1), "weight": S(0)})
    with pytest.raises(rulecheck.RuleCheckError, match="differs from the reference"):
        _check(wrong)
