"""Partition specs: the axes of a mesh over which each dim of a tensor is sharded."""

Names = str | tuple[str, ...]
"""An axis, or several: the first is the outermost."""


class P:
    """A partition spec: for each dim of a tensor the axes over which it is sharded. :func:`tp_ext.spmd` takes them.

    ``P("x", None, ("y", "z"))``: dim 0 is sharded over axis x, dim 1 is not, dim 2 over y and its shards over z. Dims
    that are left out are not sharded: ``P()`` is a replicated tensor. A length that the number of ranks does not divide
    is split as by ``torch.tensor_split``.

    Args:
        dims: an axis, a tuple of axes or None for each dim.

    Attributes:
        dims: the axes of each dim, a tuple each.
        form: ``"full"``: the caller has the full tensor, the same on all ranks. :meth:`local` and :meth:`dtensor`
            return specs of the other forms.

    Raises:
        TypeError: a dim is no name, tuple of names or None. ValueError: an axis occurs twice.
    """

    __slots__ = ("dims", "form")

    def __init__(self, *dims: Names | None) -> None:
        self.dims = tuple(map(_names, dims))
        self.form = "full"
        axes = self.axes
        if len(set(axes)) != len(axes):
            raise ValueError(f"P: {dims} must name each axis once")

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes over which the tensor is sharded, in order of the dims."""
        return tuple(axis for dim in self.dims for axis in dim)

    def local(self) -> "P":
        """Returns the spec of a tensor whose shard on this rank the caller has, or gets."""
        return self._in_form("local")

    def dtensor(self) -> "P":
        """Returns the spec of a ``DTensor``."""
        return self._in_form("dtensor")

    def _in_form(self, form: str) -> "P":
        other = P(*self.dims)
        other.form = form
        return other

    def __eq__(self, other: object) -> bool:
        return isinstance(other, P) and (self.dims, self.form) == (other.dims, other.form)

    def __hash__(self) -> int:
        return hash((self.dims, self.form))

    def __repr__(self) -> str:
        dims = ", ".join(repr(None if not dim else dim[0] if len(dim) == 1 else dim) for dim in self.dims)
        return f"P({dims})" + ("" if self.form == "full" else f".{self.form}()")


def _names(dim: Names | None) -> tuple[str, ...]:
    if dim is None:
        return ()
    names = (dim,) if isinstance(dim, str) else dim
    if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"P: {dim!r} must be the name of an axis, a tuple of names or None")
    return names
