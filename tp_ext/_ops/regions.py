"""Regions: the operators of :mod:`tp_ext.regions`, which documents the first seven, on a group given by its name.

C++: csrc/autograd/regions.cpp, kv_replicas.cpp, coalesced.cpp.
"""

from collections.abc import Sequence

from torch import Tensor

from tp_ext._ops.binding import Sizes, direct_operator, operator


@direct_operator
def copy_to_region(x: Tensor, group: str) -> Tensor:
    """Returns x; dx = sum over ranks of dy. Communicates: backward, one all-reduce."""


@direct_operator
def reduce_from_region(x: Tensor, group: str) -> Tensor:
    """Returns the sum of x over the ranks; dx = dy. Communicates: forward, one all-reduce."""


@direct_operator
def scatter_to_region(x: Tensor, group: str, dim: int = -1, sizes: Sizes = None) -> Tensor:
    """Returns this rank's slice of ``dim``; dx = the ranks' dy concatenated. Communicates: backward, one all-gather."""


@direct_operator
def gather_from_region(x: Tensor, group: str, dim: int = -1, sizes: Sizes = None) -> Tensor:
    """Concatenates the ranks' x along ``dim``; dx = this rank's slice of dy. Communicates: forward, one all-gather."""


@direct_operator
def all_gather_region(x: Tensor, group: str, dim: int = 0, sizes: Sizes = None) -> Tensor:
    """Concatenates the ranks' x along ``dim``; dx = this rank's slice of the sum of dy over the ranks.

    Communicates: forward, one all-gather; backward, one reduce-scatter.
    """


@direct_operator
def reduce_scatter_region(x: Tensor, group: str, dim: int = 0, sizes: Sizes = None) -> Tensor:
    """Returns this rank's slice along ``dim`` of the sum of x over the ranks; dx = the ranks' dy, concatenated.

    Communicates: forward, one reduce-scatter; backward, one all-gather.
    """


@operator
def all_to_all_region(
    x: Tensor, group: str, split_dim: int, concat_dim: int, split_sizes: Sizes = None, concat_sizes: Sizes = None
) -> Tensor:
    """Sends slice k of ``split_dim`` to rank k and concatenates what arrives along ``concat_dim``.

    Communicates: one all-to-all forward, one backward (the inverse exchange).
    """


@operator
def copy_replicas_to_region(
    x: Tensor,
    group: str,
    local_starts: Sequence[int],
    lengths: Sequence[int],
    full_starts: Sequence[int],
    full_size: int,
) -> Tensor:
    """Returns x, some of whose rows are replicas on several ranks; backward sums each of them over its replicas.

    Args:
        x: ``[rows, ..]``.
        local_starts, lengths, full_starts: rows ``local_starts[i]``, ``lengths[i]`` of them, are rows
            ``full_starts[i]``, .. of the full tensor.
        full_size: rows of the full tensor.

    Communicates: backward, one all-reduce of ``[full_size, ..]``. Conjugate: :func:`reduce_replicas_from_region`.
    """


@operator
def reduce_replicas_from_region(
    x: Tensor,
    group: str,
    local_starts: Sequence[int],
    lengths: Sequence[int],
    full_starts: Sequence[int],
    full_size: int,
) -> Tensor:
    """Returns x with each replicated row summed over its replicas; dx = dy.

    Arguments as :func:`copy_replicas_to_region`, its conjugate. Communicates: forward, one all-reduce of
    ``[full_size, ..]``.
    """


@operator
def copy_to_region_coalesced(xs: Sequence[Tensor], group: str, replicas: Sequence[int] = ()) -> list[Tensor]:
    """Returns xs, each through :func:`copy_to_region` or :func:`copy_replicas_to_region`.

    Args:
        replicas: the rows of each tensor that are summed; the encoding is that of csrc/autograd/coalesced.cpp. Default:
            all rows of all tensors.

    Communicates: backward, once all gradients are computed, one all-reduce per dtype.
    """
