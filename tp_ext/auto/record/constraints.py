"""Constraints inside of a model's code, as JAX's ``with_sharding_constraint``."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Protocol

from torch import Tensor

from tp_ext.mesh_program.partition_spec import P


class Recorder(Protocol):
    """A run on fakes that collects constraints."""

    def constrain(self, tensor: Tensor, spec: P) -> None: ...


running: ContextVar[Recorder | None] = ContextVar("running", default=None)


def constraint(x: Tensor, spec: P) -> Tensor:
    """Returns x; inside of :func:`tp_ext.auto.plan` its dims must be sharded as ``spec`` says.

    As in ``h = tp_ext.auto.constraint(h, P("tp", None))``: dim 0 must be sharded, dim 1 and those left out must be
    whole. Outside of a plan it is the identity, also in the sharded model.

    Args:
        x: any tensor of the model's forward.
        spec: for each dim an axis, any name, or None. One axis at most.

    Raises:
        TypeError: ``spec`` is no ``P``. ValueError: it has more dims than x, or several axes; inside of a plan: what it
            asks for conflicts with an operator of the model.
    """
    if not isinstance(spec, P):
        raise TypeError(f"spec: {spec!r} must be a P")
    if not isinstance(x, Tensor):
        raise TypeError(f"x: {type(x).__name__} must be a tensor")
    if len(spec.dims) > x.dim():
        raise ValueError(f"spec: {spec} must have at most the {x.dim()} dims of x, of shape {tuple(x.shape)}")
    if len(spec.axes) > 1:
        raise ValueError(f"spec: {spec} must name one axis at most: a plan has one")
    recorder = running.get()
    if recorder is not None:
        recorder.constrain(x, spec)
    return x
