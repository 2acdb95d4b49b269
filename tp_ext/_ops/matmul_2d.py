"""Products of matrices sharded on both dims. C++: csrc/autograd/matmul_2d.cpp."""

from torch import Tensor

from tp_ext._ops.binding import operator


@operator
def matmul_2d(a: Tensor, b: Tensor, rows: str, columns: str, k: int | None = None, summa: bool = False) -> Tensor:
    """Returns ``a b``, ``[.., m_local, n_local]``.

    Args:
        a: ``[.., m_local, k / y]``, its last dim sharded over ``columns``.
        b: ``[k / x, n_local]``, its first dim sharded over ``rows``.
        k: length of the contracted dim, split as by ``torch.tensor_split``; default: as if all shards had a's length.
        summa: broadcasts panels; False: gathers both operands.

    Communicates: forward, an all-gather of a over ``columns`` and one of b over ``rows``; backward, the same, and a
    reduce-scatter of each gradient. SUMMA: broadcasts of panels, and in backward steps of two rings.
    """
