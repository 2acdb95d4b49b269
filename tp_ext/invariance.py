"""The same bits for every number of ranks: the context in which layers are built so, and its blocks.

[Note: one tree of blocks] says how; C++: csrc/comm/tree_sum.h, csrc/autograd/blocks.h.
"""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

import torch

from tp_ext._build import load
from tp_ext._checks import check_int
from tp_ext.share_sizes import Weights, split_sizes

_blocks: ContextVar[int | None] = ContextVar("invariant_blocks", default=None)


class _ContextCount:
    """The number of contexts entered in this process: compiled code, which cannot use a ContextVar, reads it."""

    count = 0


@contextmanager
def tp_invariant(blocks: int = 8) -> Iterator[None]:
    """Builds layers that compute the same bits for every number of ranks p, up to ``blocks``.

    A sharded dim of n units (heads, features, words; tokens under sequence parallelism) consists of ``blocks`` logical
    blocks; block b is ``[ceil(b n / blocks), ceil((b + 1) n / blocks))``, and each rank holds consecutive blocks, of
    ``torch.tensor_split(range(blocks), p)``, or by the shares of :func:`tp_ext.shares`. Products are computed block by
    block, each on one thread, and what layers sum over ranks is one binary tree over the blocks: neighbours are added
    level by level in fp32 (fp64 for fp64), and the root is rounded once. p = 1 computes the same tree. Losses,
    gradients, states of the optimizer and weights then have the same bits for every p <= ``blocks``, and for every
    number of threads; p need not divide ``blocks``.

    Modules built inside keep their blocks (``layer.invariant_blocks``; None outside of a context). Functions of tensors
    (:func:`vocab_parallel_cross_entropy`, :func:`scatter_to_region`, ..) take the context of the call, functions of
    models (:func:`clip_grad_norm_`, state dicts, checkpoints) the layouts of the parameters. Contexts nest, and the
    inner one holds. Outside, nothing changes.

    Communicates: each sum an all-to-all of nodes of the tree and, where all ranks need it, an all-gather: in fp32 the
    bytes of a ring all-reduce where each rank has one block, at most ``2 log2(blocks)`` nodes per rank else.

    Args:
        blocks: an integer of at least 1; more blocks allow more ranks and make smaller products.

    Raises:
        ValueError: ``blocks`` is no integer of at least 1; in a layer, more ranks than blocks, or an option that has no
            such form, by name.
        RuntimeError: products of matrices are not reproducible in this process: on the CPU ``MKL_CBWR`` must be set,
            to ``AVX512,STRICT`` for instance, before MKL computes its first product; with a GPU
            ``torch.use_deterministic_algorithms(True)`` and ``CUBLAS_WORKSPACE_CONFIG`` are required.

    A fixed tree over fixed blocks: Zhang et al., "Deterministic inference across tensor parallel sizes that eliminates
    training-inference mismatch", arXiv:2511.17826, for inference.
    """
    check_int(least=1, blocks=blocks)
    check_reproducible()
    with using_blocks(blocks):
        yield


def using_blocks(blocks: int | None) -> AbstractContextManager[None]:
    """Returns the context in which functions of tensors have these blocks, for a layer that calls them; of None none:
    compiled code could not enter it."""
    return nullcontext() if blocks is None else _entered(blocks)


@contextmanager
def _entered(blocks: int) -> Iterator[None]:
    token = _blocks.set(blocks)
    _ContextCount.count += 1
    try:
        yield
    finally:
        _ContextCount.count -= 1
        _blocks.reset(token)


def current_blocks() -> int | None:
    """Returns the blocks of the context; None outside of one. Raises NotImplementedError in code that is compiled in
    one."""
    if torch.compiler.is_compiling():
        if _ContextCount.count:
            refuse_compiled()
        return None
    return _blocks.get()


def check_reproducible() -> None:
    """Raises a RuntimeError unless products of matrices have the same bits wherever their operands lie."""
    if not load().products_are_strict():
        raise RuntimeError(
            f"MKL_CBWR: {os.environ.get('MKL_CBWR')!r} must be set to 'AVX512,STRICT', or another value that ends in "
            "',STRICT', before MKL computes its first product, best in the environment of the job: without it a "
            "product depends on the alignment of its operands"
        )
    if not torch.cuda.is_available():
        return
    if not torch.are_deterministic_algorithms_enabled():
        raise RuntimeError("tp_invariant: torch.use_deterministic_algorithms(True) must have been called on a GPU")
    if not os.environ.get("CUBLAS_WORKSPACE_CONFIG"):
        raise RuntimeError("CUBLAS_WORKSPACE_CONFIG: None must be set to ':4096:8' in the environment, for cuBLAS")


class BlocksInShares(int):
    """A number of blocks of a layer whose ranks hold them by shares (:func:`tp_ext.shares`)."""

    shares: Weights | None = None


def blocks_in_shares(blocks: int, shares: Weights | None) -> int:
    """Returns the number of blocks, which knows by which shares ranks hold them; None: equally."""
    if shares is None:
        return blocks
    result = BlocksInShares(blocks)
    result.shares = shares
    return result


def shares_of_blocks(blocks: int) -> Weights | None:
    """Returns the shares by which ranks hold the blocks; None: equally."""
    return blocks.shares if isinstance(blocks, BlocksInShares) else None


def blocks_of_ranks(blocks: int, p: int) -> list[int]:
    """Returns how many blocks each rank holds: as ``torch.tensor_split``, or by the shares of the layer."""
    return split_sizes(int(blocks), p, shares_of_blocks(blocks))


def blocks_of_rank(blocks: int, rank: int, p: int) -> range:
    """Returns the consecutive blocks that a rank holds."""
    sizes = blocks_of_ranks(blocks, p)
    first = sum(sizes[:rank])
    return range(first, first + sizes[rank])


def block_start(n: int, block: int, blocks: int) -> int:
    """Returns the first of n units in a block: ``ceil(block n / blocks)``."""
    return -(-block * n // blocks)


def block_of(unit: int, n: int, blocks: int) -> int:
    """Returns the block in which one of n units lies."""
    return unit * blocks // n


def units_of_rank(n: int, blocks: int, rank: int, p: int) -> tuple[int, int]:
    """Returns [start, stop) of the units in the blocks of a rank."""
    held = blocks_of_rank(blocks, rank, p)
    return block_start(n, held.start, blocks), block_start(n, held.stop, blocks)


def block_sizes(n: int, blocks: int, p: int) -> list[int]:
    """Returns the numbers of units of the ranks."""
    spans = [units_of_rank(n, blocks, rank, p) for rank in range(p)]
    return [stop - start for start, stop in spans]


def refuse_in_blocks(blocks: int | None, **options: object) -> None:
    """Raises a ValueError for the first option that has no form with the same bits for every p, if there are blocks."""
    if blocks is None:
        return
    for name, value in options.items():
        if value is not None and value is not False:
            raise ValueError(f"{name}: {value!r} must not be given in tp_invariant: its sums depend on the ranks")


def check_rows_of_cache(blocks: int | None, x: torch.Tensor) -> None:
    """Raises a ValueError for a call with a cache where the rows of a product depend on their number: on a GPU."""
    if blocks is not None and not x.is_cpu:
        raise ValueError(
            f"cache: must not be given on {x.device.type} in tp_invariant: products of few rows round otherwise there"
        )


def refuse_call(name: str, instead: str) -> None:
    """Raises a ValueError in a context: of a function that has no form with the same bits for every p."""
    if current_blocks() is not None:
        raise ValueError(
            f"{name}: must not be called in tp_invariant, since it adds one partial sum per rank; {instead}"
        )


def check_ranks(blocks: int, p: int) -> None:
    """Raises a ValueError if there are more ranks than blocks."""
    if p > blocks:
        raise ValueError(f"blocks: {blocks} of tp_invariant must be at least the number of ranks, p = {p}")


def refuse_compiled() -> None:
    """Raises a NotImplementedError in compiled code: its elementwise operators round differently from eager ones."""
    if torch.compiler.is_compiling():
        raise NotImplementedError("tp_ext: what is built or called in tp_invariant cannot be compiled")


@contextmanager
def one_thread() -> Iterator[None]:
    """Computes on one thread, for products of torch's own operators: their bits depend on the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
