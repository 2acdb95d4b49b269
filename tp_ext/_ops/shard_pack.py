"""Blocks of a collective, one per rank: copies between a tensor sharded along any dim and contiguous memory.

C++: csrc/args/shard_pack.h, csrc/kernels/shard_pack.h; callers: csrc/comm/pack.cpp.
"""

from collections.abc import Sequence

from torch import Tensor

from tp_ext._ops.binding import Sizes, primitive


@primitive("_pack_shards")
def pack_shards(x: Tensor, dim: int, sizes: Sequence[int], padded: bool = True) -> Tensor:
    """Cuts x along ``dim`` into blocks of lengths ``sizes``, one per rank.

    Returns ``[p, *shard]``, each shard as long as the longest and zeros after the shorter ones; not ``padded``, one dim
    with as many elements as x, block after block.
    """
    if not padded:
        return x.new_empty(x.numel())
    shape = list(x.shape)
    shape[dim] = max(sizes)
    return x.new_empty([len(sizes), *shape])


@primitive("_unpack_shards")
def unpack_shards(blocks: Tensor, dim: int, sizes: Sequence[int], shape: Sizes = None) -> Tensor:
    """Concatenates the blocks of :func:`pack_shards` along ``dim``.

    Args:
        blocks: padded, or, if ``shape`` is given, one dim, block after block.
        shape: that of the result.
    """
    if shape is None:
        shape = list(blocks.shape[1:])
        shape[dim] = sum(sizes)
    return blocks.new_empty(shape)
