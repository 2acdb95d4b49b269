"""Reasons that forbid a sharding."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tp_ext.auto.record.dims import Atom

TOKENS = "tokens"  # no name of a parameter: the key of differences that sums over tokens make


@dataclass
class Problem:
    """Why modules or parameters must stay whole.

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
