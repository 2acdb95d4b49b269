"""Products of matrices sharded on both dims over the axes of a mesh; the result is sharded like the operands."""

import math
from typing import Literal

from torch import Tensor

from tp_ext import _ops
from tp_ext.group import Group, ParallelGroup, parallel_group
from tp_ext.invariance import refuse_call
from tp_ext.sharding import split_sizes

Algorithm = Literal["gather", "summa"]

_GATHERED_BYTES = 64 << 20
"""Size of the gathered operands from which SUMMA is chosen: a bound of memory, since the times hardly differ."""


def matmul_2d(
    a: Tensor,
    b: Tensor,
    row_group: Group,
    column_group: Group,
    *,
    shape: tuple[int, int, int] | None = None,
    algorithm: Algorithm | None = None,
) -> Tensor:
    """Multiplies two matrices whose rows are sharded over ``row_group`` and columns over ``column_group``: c = a b.

    c is sharded like a and b, so that it can be the operand of a next product, and rank (i, j) of an (x, y) mesh holds
    1 / (x y) of every matrix and of its gradient: da = dc b^T, db = a^T dc.

    Args:
        a: ``[.., m/x, k/y]``; dims before the last two are the same on all ranks.
        b: ``[k/x, n/y]``.
        row_group, column_group: the groups of the ranks that share columns, and rows: ``mesh["x"]`` and ``mesh["y"]``.
        shape: m, k and n of the full matrices; needed where a group does not divide one of them, which is then split as
            by ``torch.tensor_split``. Default: all ranks have shards of one shape.
        algorithm: ``"gather"``: both operands are gathered for one product, y times a's shard and x times b's in
            memory. ``"summa"``: panels of k are broadcast, two at a time, the next ones under the present product;
            memory does not grow with the mesh, and half types are rounded once for each panel (van de Geijn and Watts,
            "SUMMA", 1997). Default: SUMMA from 64 MiB of gathered operands on.

    Communicates: forward, a over ``column_group`` and b over ``row_group`` (all-gathers, or broadcasts of panels);
    backward, the same again, and each gradient to its owner (reduce-scatters, or rings). An axis of one rank is free.

    Raises:
        TypeError: a and b differ in dtype, or are not floating.
        ValueError: a or b is not the shard of this rank; no such ``algorithm``.
    """
    refuse_call("matmul_2d", "leave the context for it")
    rows, columns = parallel_group(row_group), parallel_group(column_group)
    if algorithm not in (None, "gather", "summa"):
        raise ValueError(f"algorithm: {algorithm!r} must be 'gather', 'summa' or None")
    if a.dim() < 2 or b.dim() != 2:
        raise ValueError(f"a, b: shapes {tuple(a.shape)} and {tuple(b.shape)} must be [.., m/x, k/y] and [k/x, n/y]")
    m, k, n = shape or (a.shape[-2] * rows.size, a.shape[-1] * columns.size, b.shape[-1] * columns.size)
    _check("a", a, (m, rows), (k, columns))
    _check("b", b, (k, rows), (n, columns))
    if algorithm is None:
        batch = math.prod(a.shape[:-2])
        gathered = k * (batch * -(-m // rows.size) + -(-n // columns.size)) * a.element_size()
        algorithm = "summa" if gathered > _GATHERED_BYTES else "gather"
    return _ops.matmul_2d(a, b, rows.name, columns.name, k, algorithm == "summa")


def _check(name: str, x: Tensor, *dims: tuple[int, ParallelGroup]) -> None:
    """Raises a ValueError unless the last two dims of x are this rank's shares of these lengths."""
    shares = tuple(split_sizes(length, group.size)[group.rank] for length, group in dims)
    if tuple(x.shape[-2:]) != shares:
        full, ranks = tuple(length for length, _ in dims), tuple(group.size for _, group in dims)
        raise ValueError(
            f"{name}: shape {tuple(x.shape)} must end in {shares}, this rank's shard of {full} on {ranks} ranks; give "
            "shape=(m, k, n), the full lengths, if the ranks' shards differ"
        )
