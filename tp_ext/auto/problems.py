"""What forbids a sharding."""

from __future__ import annotations

from dataclasses import dataclass

from tp_ext.auto.dims import Atom


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
