"""Dims of tensors as products of atoms, and their unification.

A dim is a list of atoms, slowest varying first; its length is the product of their sizes. An atom is a length that
nothing has divided yet, or the concatenation of consecutive parts, each again a product. Two dims that an operator
treats as one are unified: their atoms become the same ones, divided where one dim has several atoms for another's
one. ``view(b, s, h, d)`` of a dim of ``h d`` elements thus divides its atom into ``h x d``, in every tensor that has
it. What an operator needs whole is pinned: it cannot be sharded. The factors of Shardy (openxla/shardy,
docs/propagation.md), solved like the types of a functional language."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Reason:
    """The reason that an atom is whole: an operator in a module, at a line of the user's source."""

    what: str
    module: str = ""
    line: str = ""
    pinned: list[Atom] = field(default_factory=list, compare=False, repr=False)  # for it, also those pinned before
    is_sum: bool = False  # a call sums over the atom: it may be sharded, at the price of an all-reduce of the sum

    def __str__(self) -> str:
        where = f" in {self.module}" if self.module else ""
        return f"{self.what}{where}" + (f" ({self.line})" if self.line else "")


class Atom:
    """A factor of dims: undivided, a concatenation (``parts``), or the same as a product of others (``same``)."""

    __slots__ = ("parts", "pinned", "same", "size")

    def __init__(self, size: int, pinned: Reason | None = None) -> None:
        self.size = size
        self.pinned = pinned
        self.parts: list[Dim] | None = None
        self.same: Dim | None = None

    def __repr__(self) -> str:
        inner = "" if self.parts is None else "[" + " | ".join(map(str, self.parts)) + "]"
        return f"{self.size}{inner}{'!' if self.pinned else ''}"


Dim = list[Atom]


def atoms(dim: Iterable[Atom]) -> Dim:
    """Returns the current atoms of a dim, without atoms of size 1."""
    current: Dim = []
    for atom in dim:
        if atom.same is None:
            # An atom of size 1 cannot be sharded, and would hide the slowest factor of its dim
            if atom.size != 1:
                current.append(atom)
        else:
            atom.same = atoms(atom.same)  # so that long chains are walked once
            current += atom.same
    return current


def length(dim: Iterable[Atom]) -> int:
    return math.prod(atom.size for atom in dim)


def pin(dim: Iterable[Atom], reason: Reason) -> None:
    """Pins all atoms of a dim, and of its parts: they stay whole. The first reason stays."""
    pinned = atoms(dim)
    # Also atoms that are pinned already: sequence parallelism asks each operator which atoms it needs whole
    reason.pinned.extend(pinned)
    for atom in pinned:
        if atom.pinned is None or (atom.pinned.is_sum and not reason.is_sum):
            atom.pinned = reason
        for part in atom.parts or ():
            pin(part, reason)


def contains(dim: Iterable[Atom], atom: Atom) -> bool:
    return atom in atoms_in(dim)


def atoms_in(dim: Iterable[Atom]) -> set[Atom]:
    """Returns the atoms of a dim and of all its parts."""
    members = set[Atom]()
    for member in atoms(dim):
        members.add(member)
        for part in member.parts or ():
            members |= atoms_in(part)
    return members


def by_atom(dims: Iterable[Dim]) -> dict[Atom, list[Dim]]:
    """Returns, for each atom, the dims that have it, or a part with it; equal ones once."""
    containing: dict[Atom, list[Dim]] = {}
    for dim in {tuple(map(id, current)): current for current in map(atoms, dims)}.values():
        for atom in atoms_in(dim):
            containing.setdefault(atom, []).append(dim)
    return containing


def divide(atom: Atom, major: int, reason: Reason) -> bool:
    """Makes an undivided atom a product ``major x rest``; pins it and returns False if that is not possible."""
    # A factor of a concatenation would cross the edges between parts, which are sharded separately
    if atom.parts is not None or atom.size % major:
        pin([atom], reason)
        return False
    _become(atom, [Atom(major), Atom(atom.size // major)])
    return True


def _become(atom: Atom, dim: Dim) -> None:
    # What an operator needs whole stays whole under its new factors, in every tensor that has them
    if atom.pinned:
        pin(dim, atom.pinned)
    atom.same = dim


def edges(atom: Atom) -> list[int]:
    """Ends of the parts of a concatenation, but for the last."""
    assert atom.parts is not None
    return list(itertools.accumulate(length(part) for part in atom.parts))[:-1]


def concatenate(dim: Dim, ends: Sequence[int], reason: Reason) -> None:
    """Makes a dim a concatenation with edges at ``ends`` at least; pins it where the edges do not fit its factors."""
    dim = atoms(dim)
    if not ends or not dim:
        return
    first, rest = dim[0], length(dim[1:])
    if rest > 1:
        # An edge between two steps of the slowest factor is its edge. Any other edge cuts a unit, such as a head
        if all(end % rest == 0 for end in ends):
            concatenate([first], [end // rest for end in ends], reason)
        else:
            pin(dim, reason)
        return
    if first.parts is None:
        bounds = sorted({0, first.size, *ends})
        first.parts = [[Atom(stop - start)] for start, stop in itertools.pairwise(bounds)]
        # A split takes the parts out of the concatenation, so that they need the pin themselves
        if first.pinned:
            pin(dim, first.pinned)
        return
    parts: list[Dim] = []
    start = 0
    for part in first.parts:
        stop = start + length(part)
        if inner := [end - start for end in ends if start < end < stop]:
            concatenate(part, inner, reason)
            now = atoms(part)
            # Flat: unification compares the edges of the outermost level alone
            parts += now[0].parts if len(now) == 1 and now[0].parts is not None else [part]
        else:
            parts.append(part)
        start = stop
    first.parts = parts


def unify(one: Dim, other: Dim, reason: Reason) -> None:
    """Makes two dims of equal length the same; pins what does not fit."""
    left, right = atoms(one), atoms(other)
    while left and right:
        a, b = left[0], right[0]
        # First: an atom contains itself, and would be pinned as a part of itself
        if a is b:
            left, right = left[1:], right[1:]
        elif a.size == b.size:
            _unify_equal(a, b, reason)
            # Read again: unification may have divided atoms that follow
            left, right = atoms(left[1:]), atoms(right[1:])
        elif divide(a, b.size, reason) if a.size > b.size else divide(b, a.size, reason):
            left, right = atoms(left), atoms(right)
        else:
            break
    pin(left + right, reason)


def _unify_equal(a: Atom, b: Atom, reason: Reason) -> None:
    if a.parts is not None and b.parts is None:
        a, b = b, a
    if a.parts is None:
        # A dim that is a part of itself has no finite form (the occurs check of type inference)
        if contains([b], a):
            pin([a, b], reason)
        else:
            _become(a, [b])
        return
    edges_a, edges_b = edges(a), edges(b)
    if edges_a != edges_b:
        # Both get the edges of both, so that each part has a counterpart
        concatenate([a], edges_b, reason)
        concatenate([b], edges_a, reason)
    # An edge inside of a product makes no part: concatenate has pinned it instead
    if edges(a) != edges(b):
        pin([a, b], reason)
        return
    for mine, yours in zip(a.parts, b.parts or (), strict=True):
        unify(mine, yours, reason)
    # Only the parts are unified. The concatenations stay two atoms, which do not share a pin by themselves
    for pinned in (a.pinned, b.pinned):
        if pinned:
            pin([a, b], pinned)


def split_off(dim: Dim, minor: int, reason: Reason) -> tuple[Dim, Dim] | None:
    """A dim as (major, minor), the second of this length, dividing an atom for it; None if its factors do not allow
    it."""
    head = atoms(dim)
    tail: Dim = []
    while head and minor > 1:
        last = head[-1]
        if minor % last.size == 0:
            tail.insert(0, last)
            minor //= last.size
            head.pop()
        elif last.parts is None and last.size % minor == 0:
            divide(last, last.size // minor, reason)
            major, rest = atoms([last])[:-1], atoms([last])[-1:]
            head[-1:], tail = major, rest + tail
            minor = 1
        else:
            return None
    return (head, tail) if minor == 1 else None


MAX_EQUAL_PARTS = 64  # of a pinned slowest atom: beyond, shards would be many short slices


@dataclass(frozen=True)
class Major:
    """The slowest atom of a part of a dim: each step of it has ``unit`` elements."""

    atom: Atom
    unit: int
    inner: tuple[Atom, ...]  # the atoms after it; the first may be sharded further: the query heads of a KV head


def majors(dim: Iterable[Atom], sums: bool = False) -> Iterator[Major]:
    """The slowest atom of each part of a dim, in order. A dim ``3 x h x d`` whose 3 is pinned has three equal parts;
    ``sums``: an atom over which calls sum is not taken for pinned."""
    factors = atoms(dim)
    if not factors:
        return
    first, rest = factors[0], factors[1:]
    if first.parts is None:
        # Only after a pinned factor: a free factor is sharded itself, in whole units
        is_pinned = first.pinned and not (sums and first.pinned.is_sum)
        inner = list(majors(rest, sums)) if is_pinned and first.size <= MAX_EQUAL_PARTS else []
        if inner and not any(major.atom.pinned for major in inner):
            yield from inner * first.size
        else:
            yield Major(first, length(rest), tuple(rest))
        return
    for part in first.parts:
        for major in majors(part, sums):
            yield Major(major.atom, major.unit * length(rest), (*major.inner, *rest))
