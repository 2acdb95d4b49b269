"""The types of a tensor on the ranks of a group, and the conversions between them.

====  =========================  ===================================================
type  values of the ranks        gradients
====  =========================  ===================================================
I     the same                   the same
R     the same                   partial: their sum over the ranks is the gradient
S     shards of a dim            shards of the gradient
P     partial: terms of a sum    the same
====  =========================  ===================================================

A type says both, so that a conversion fixes what backward does: the gradient of I is an I, of R a P, of S an S and of P
an R, and the gradient of a conversion from a to b is the one from the gradient of b to that of a. The letters are those
of ``spmd_types``. :data:`CONVERSIONS` is the definition that ``auto`` plans with, that
:func:`tp_ext.debug.typecheck` checks and that transforms of ``torch.func`` differentiate by; the functions are those of
:mod:`tp_ext.regions`.
"""

import enum
from dataclasses import dataclass


class Type(enum.StrEnum):
    """The relation between the values of the ranks, and between their gradients."""

    I = "I"  # noqa: E741, the letter of spmd_types
    R = "R"
    S = "S"
    P = "P"

    @property
    def gradient(self) -> "Type":
        """The type of the gradient of a tensor of this type."""
        return _GRADIENTS.get(self, self)


I, R, S, P = Type  # noqa: E741
_GRADIENTS = {R: P, P: R}


@dataclass(frozen=True)
class Region:
    """A conversion that a function carries out.

    Attributes:
        before, after: the types of its argument and of its result.
        forward: the collective of forward, by the name that ``torch.distributed`` and
            :func:`tp_ext.debug.count_collectives` have for it; empty if there is none.
    """

    name: str
    before: Type
    after: Type
    forward: str = ""

    @property
    def conjugate(self) -> "Region":
        """The region that backward applies to the gradient."""
        return CONVERSIONS[self.after.gradient, self.before.gradient]

    @property
    def backward(self) -> str:
        """The collective of backward; empty if there is none."""
        return self.conjugate.forward


CONVERSIONS = {
    (region.before, region.after): region
    for region in (
        Region("copy_to_region", I, R),
        Region("reduce_from_region", P, I, "all_reduce"),
        Region("scatter_to_region", I, S),
        Region("gather_from_region", S, I, "all_gather"),
        Region("all_gather_region", S, R, "all_gather"),
        Region("reduce_scatter_region", P, S, "reduce_scatter"),
    )
}
"""(type before, type after) -> the region."""

WIRE = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
"""Collective -> the bytes that a rank sends for n bytes of the full tensor, in units of n (p - 1) / p."""
