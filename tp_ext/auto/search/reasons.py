"""Reasons: what forbids a sharding, why a parameter stays whole, why a forward fails on fake tensors."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from traceback import extract_tb
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from tp_ext.auto.record.dims import Atom, Major, atoms_in, majors
from tp_ext.auto.record.numbers import CHANGES, Change
from tp_ext.auto.record.record import Record
from tp_ext.auto.record.rules import Rule
from tp_ext.auto.record.trace import trace
from tp_ext.auto.search.choose import Decision
from tp_ext.share_sizes import Weights, split_sizes

OWN = str(Path(__file__).parents[1])
TOKEN_SUMS = "tokens"  # no name of a parameter: the key of differences that sums over tokens make


@dataclass
class Problem:
    """A reason that modules or parameters must stay whole.

    Attributes:
        name: a module or a parameter. blame: the sharded atoms that cause it, if known: these alone are given up.
        steps: operators on shards of tokens that cause it.
    """

    name: str
    text: str
    steps: tuple[int, ...] = ()
    blame: frozenset[Atom] = frozenset()


def kind_of(name: str) -> str:
    """A parameter's name without the numbers of layers."""
    return re.sub(r"\d+", "*", name)


def reason_of(
    record: Record,
    name: str,
    p: int,
    may_shard: Callable[[str, int], bool],
    candidates: Callable[[], list[Decision]],
    sharded: Container[str] = (),
    why: Mapping[str, str] | None = None,
    shares: Weights | None = None,
) -> str:
    """Returns why a parameter stays whole: for each dim the operator that pins it, the lengths that p exceeds, or the
    parameter that it goes with.

    Args:
        candidates: of all parameters; only some reasons need them, which cost as much as a round.
        sharded: names of the parameters that are sharded. why: reasons of those that were left whole before.
    """
    tensor = next(t for n, t in record.parameters.values() if n == name)
    reasons = []
    for dim, label in enumerate(record.dims_of(tensor)):
        what = f"dim {dim} ({tensor.shape[dim]})"
        slowest = list(majors(label))
        if not may_shard(name, dim):
            reasons.append(f"dim {dim}: hints")
        elif pinned := next((major.atom.pinned for major in slowest if major.atom.pinned), None):
            reasons.append(f"{what} is pinned by {pinned}")
        elif slowest and shares is not None and not all(split_sizes(min(m.atom.size for m in slowest), p, shares)):
            reasons.append(f"{what} is {_product(slowest)}: by shares {list(shares)} a rank would have none")
        elif slowest and (short := _too_short(record, slowest, p)):
            reasons.append(f"{what} is {_product(slowest)}: p = {p} must be {short}")
        elif slowest:
            reasons.append(f"{what}: {_not_chosen(record, name, slowest, candidates(), sharded, why or {})}")
    return "; ".join(reasons) or "it has one element"


def _not_chosen(
    record: Record,
    name: str,
    slowest: list[Major],
    candidates: list[Decision],
    sharded: Container[str],
    why: Mapping[str, str],
) -> str:
    """Returns why an unpinned dim is whole."""
    atoms_of_dim = {major.atom for major in slowest}
    for decision in candidates:
        if not atoms_of_dim.isdisjoint(decision.slowest) and name in decision.parameters:
            taken = next((other for other in decision.parameters if other in sharded), None)
            # Only small tables are left out where no other decision has taken their parameters
            if taken is None:
                return "it is a table below 1 % of all parameters, and its all-reduce would cost more than its bytes"
            return f"sharding {taken} on another dim leaves fewer bytes on a rank"
    for other, tensor in record.parameters.values():
        if other != name and not all(atoms_in(label).isdisjoint(atoms_of_dim) for label in record.dims_of(tensor)):
            # A round left the other parameter whole, and its reason is the cause here, too
            if other in why:
                return f"it goes with {other}, which is whole: {why[other]}"
            return f"its factor is in {other}, too, where it cannot be sharded, or only in part"
    return "its factor is in several dims, or most of it would be on every rank"


def _too_short(record: Record, slowest: list[Major], p: int) -> str:
    """Returns the numbers of ranks over which a dim can be sharded, or "" if p is one of them."""
    # All parts of a dim are sharded over the same ranks, so that the shortest decides
    atom = min((major.atom for major in slowest), key=lambda candidate: candidate.size)
    if atom.size >= p:
        return ""
    groups = 1
    for _, tensor in record.parameters.values():
        for major in (
            label_major for label in record.dims_of(tensor) for label_major in majors(label) if label_major.atom is atom
        ):
            if len(major.inner) > 1 and not major.inner[0].pinned:  # query heads of a KV head, then their features
                groups = max(groups, major.inner[0].size)
    allowed = f"at most {atom.size}"
    # More ranks than units need a group that is sharded further: the query heads of a KV head
    if atom.size == 1 or groups == 1:
        return allowed
    most = atom.size * groups
    return "" if p % atom.size == 0 and p <= most else f"{allowed}, or a multiple of {atom.size} up to {most}"


def _product(slowest: list[Major]) -> str:
    """The product of a dim, or of each of its parts."""
    texts = [f"{major.atom.size} x {major.unit}" for major in slowest]
    if len(texts) == 1 or len(set(texts)) > 1:
        return " | ".join(texts)
    return f"{len(texts)} parts of {texts[0]}"


def traced(model: nn.Module, example: Any, rules: Mapping[str, Rule], shares_inputs: bool = False) -> Record:
    """Returns the record of a model, as :func:`~tp_ext.auto.record.trace.trace`.

    Raises:
        ValueError: its forward branches on values of tensors, or fails.
    """
    record = Record()
    try:
        trace(model, example, rules=rules, record=record, shares_inputs=shares_inputs)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        kind = "branches on" if isinstance(error, DataDependentOutputException) else "computes lengths from"
        must = "it must not: pass arguments with which that code does not run, or rewrite it"
        if record.without_values:
            names = ", ".join(dict.fromkeys(record.without_values))
            must = f"pass an example in which these arguments have their values, not on meta: {names}"
        raise ValueError(
            f"model: forward {kind} values of tensors, by {error.func} in {record.modules[-1] or 'the model'}"
            f"{line_of(error)}; {must}"
        ) from error
    except Exception as error:
        # Errors of rules, hints and constraints say already what to do
        if _is_own(error):
            raise
        where = record.modules[-1] or "the model"
        raise ValueError(f"example: forward fails on fake tensors like it, in {where}: {failure_of(error)}") from error
    if record.numbers and any(map(functools.partial(_branches, model, example, record), CHANGES)):
        lines = ", ".join(dict.fromkeys(record.numbers))
        raise ValueError(
            f"model: forward branches on numbers that it reads from parameters or buffers, at {lines}, or computes "
            "lengths from them; it must not: make them attributes, or rewrite that code"
        )
    return record


def _branches(model: nn.Module, example: Any, record: Record, change: Change) -> bool:
    """True if a forward makes other calls, or calls of other shapes, when the numbers that it reads are others."""
    try:
        other = trace(model, example, operators=False, change=change)
    except ArithmeticError:  # a logarithm of a number of another sign
        return False
    except ValueError as error:
        # math.log of a changed number raises it, too, which is no branch of the code
        return "math domain" not in str(error)
    except Exception:
        # The true numbers do not lead to this error, so that the code depends on them
        return True
    calls = ([(*call[:2], [t.shape for t in call[2]]) for call in of.python_calls] for of in (record, other))
    return next(calls) != next(calls)


def _is_own(error: Exception) -> bool:
    """True if the last of the Python code that raised an exception is of this package: rules, hints, constraints."""
    last = extract_tb(error.__traceback__)[-1].filename
    # All operators of the user's code run in the modes of trace.py: what C++ raises there is the user's error
    return last.startswith(OWN) and not last.endswith("trace.py")


def line_of(error: Exception) -> str:
    """The line of the user's code at which a forward raised an exception, with a space before it."""
    outside = [frame for frame in extract_tb(error.__traceback__) if not _is_of_torch(frame.filename)]
    return f" at {outside[-1].filename.rpartition('/')[2]}:{outside[-1].lineno}" if outside else ""


def _is_of_torch(file: str) -> bool:
    return "/torch/" in file or file.startswith((OWN, "<"))


def failure_of(error: Exception) -> str:
    """The exception that a forward raised, and its line."""
    first = next(iter(str(error).splitlines()), "")[:300]
    return f"{type(error).__name__}{line_of(error)}: {first}"
