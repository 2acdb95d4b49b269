"""Options of a plan; of these the hints: what a user says about modules and parameters, by patterns of their names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import nn

from tp_ext.auto.search.integers import Local
from tp_ext.mesh_program.partition_spec import P
from tp_ext.share_sizes import Weights


@dataclass(frozen=True)
class PlanOptions:
    """Options of one plan, as those of :func:`tp_ext.auto.plan`.

    Attributes:
        only: the parameters that may be sharded, with the dim; None: all.
        local: the code of each rank of a plan that is carried out; another call runs with the same.
        shares: the weights of the ranks (:func:`tp_ext.shares`).
    """

    hints: Mapping[str, str | P] = field(default_factory=dict)
    memory_budget: float | None = None
    sequence_parallel: bool | str = False
    invariant_blocks: int | None = None
    only: Mapping[str, int] | None = None
    local: Sequence[Local] = ()
    shares: Weights | None = None


def check_hints(model: nn.Module, hints: Mapping[str, str | P]) -> None:
    """Raises ValueError for a pattern that fits nothing, and for a P of several axes."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    for pattern, value in hints.items():
        if isinstance(value, P) and len(value.axes) > 1:
            raise ValueError(f"hints: {pattern!r} is {value} and must name one axis at most: a plan has one")
        if not any(fits(pattern, name) for name in names):
            raise ValueError(f"hints: {pattern!r} must fit a parameter or a module that has one; none of this model's")


def fits(pattern: str, name: str) -> bool:
    """True if a pattern fits a parameter or a module around it."""
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[:n]), pattern) for n in range(1, len(parts) + 1))


def hint_of(hints: Mapping[str, str | P], name: str) -> str | P | None:
    """The value of the most specific pattern that fits."""
    fitting = [pattern for pattern in hints if fits(pattern, name)]
    # Patterns of equal length by their text, so that the order of the dict does not matter
    return hints[max(fitting, key=lambda pattern: (len(pattern), pattern))] if fitting else None
