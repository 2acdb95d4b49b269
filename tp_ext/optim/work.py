"""The work of a step of Muon: which rank orthogonalizes which matrix, and what the ranks exchange for it.

Letters of shapes: a matrix is [m, n]; s = min(m, n) is the side of its Gram matrix and of the factor of its result.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tp_ext.mesh import DataAxes
from tp_ext.optim.exchange import Exchange, ExchangedTensor
from tp_ext.optim.matrices import Chunk, HeldChunk, ShardOf
from tp_ext.optim.newton_schulz import (
    adjusted_lr,
    cost,
    gram_dtype,
    gram_factor,
    gram_matrix,
    orthogonalized,
    times_factor,
)


class MuonOptions(NamedTuple):
    """The options that say how the ranks share the work.

    Attributes:
        axes: the axes of the ranks that share the work.
        device: on which they communicate and orthogonalize.
        dtype: that of the orthogonalization.
        form: "auto", "gather" or "gram".
        bucket_bytes: the bytes of matrices that are exchanged at a time.
        in_blocks: whether bits must not depend on the number of ranks.
    """

    axes: DataAxes
    device: torch.device
    dtype: torch.dtype
    form: str
    bucket_bytes: int
    in_blocks: bool


class Matrix(NamedTuple):
    """A matrix and where it is.

    Attributes:
        param: the index of its parameter.
        chunk: its chunk of the full tensor.
        sources: the chunks that make it up -> the ranks that can provide each.
        holders: the chunks that ranks hold of it -> those ranks.
    """

    param: int
    chunk: Chunk
    sources: dict[Chunk, tuple[int, ...]]
    holders: dict[Chunk, tuple[int, ...]]

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.chunk.sizes[-2:]
        return rows, columns

    @property
    def tall(self) -> bool:
        return self.shape[0] > self.shape[1]

    def candidates(self) -> Sequence[int]:
        """Returns the ranks that may orthogonalize it: those that hold all of it, or any of it."""
        # A rank that holds all of it needs to receive nothing
        return self.holders.get(self.chunk) or sorted({rank for ranks in self.holders.values() for rank in ranks})


class Assigned(NamedTuple):
    """A matrix and the rank that orthogonalizes it.

    Attributes:
        matrix: the matrix.
        owner: the rank.
        gram: whether the ranks send Gram matrices, not their chunks.
        senders: the rank that sends each chunk.
    """

    matrix: Matrix
    owner: int
    gram: bool
    senders: dict[Chunk, int]


def find_matrices(reports: Sequence[Sequence[ShardOf]], names: Sequence[str]) -> list[Matrix]:
    """Returns the matrices of all parameters, from the shards of all ranks.

    Raises:
        ValueError: the ranks have different parameters, or do not hold each element of a matrix; the same on every
            rank.
    """
    for rank, shards in enumerate(reports):
        kinds = [(shard.shape, shard.matrices) for shard in shards]
        if kinds != (first := [(shard.shape, shard.matrices) for shard in reports[0]]):
            raise ValueError(
                f"params: the parameters with gradients must be the same on all ranks; the first has "
                f"{len(first)} of shapes {[shape for shape, _ in first]}, rank {rank} has {len(kinds)} of shapes "
                f"{[shape for shape, _ in kinds]}"
            )
    matrices = []
    for index, first_shard in enumerate(reports[0]):
        for chunk in first_shard.matrices:
            sources: dict[Chunk, list[int]] = {}
            holders: dict[Chunk, list[int]] = {}
            for rank, shards in enumerate(reports):
                for held_chunk in shards[index].held:
                    # A matrix is a part of a parameter (q of q | k | v), a rank's chunk a part of both
                    if common := held_chunk.chunk.within(chunk):
                        holders.setdefault(common, []).append(rank)
                        if held_chunk.owned:
                            sources.setdefault(common, []).append(rank)
            # Sources alone, without copies: their sizes add up to the matrix
            if (numel := sum(source.numel for source in sources)) != chunk.numel:
                raise ValueError(
                    f"params: {names[index]} of full shape {first_shard.shape}: the ranks must hold each of the "
                    f"{chunk.numel} elements of {tuple(chunk.sizes)} at {tuple(chunk.offsets)}, and hold {numel}"
                )
            matrices.append(
                Matrix(
                    index,
                    chunk,
                    {source: tuple(ranks) for source, ranks in sources.items()},
                    {part: tuple(ranks) for part, ranks in holders.items()},
                )
            )
    return matrices


def buckets(matrices: Sequence[Matrix], steps: Sequence[int], options: MuonOptions) -> Iterator[list[Assigned]]:
    """Yields the matrices with their owners, in buckets of at least ``bucket_bytes``; the same on every rank.

    In each bucket the matrix that costs most goes first, to the candidate with the least work so far.
    """
    bucket: list[Matrix] = []
    for index, matrix in enumerate(matrices):
        bucket.append(matrix)
        full = sum(matrix.chunk.numel for matrix in bucket) * options.dtype.itemsize >= options.bucket_bytes
        if full or index == len(matrices) - 1:
            yield _assigned(bucket, steps, options)
            bucket = []


def _assigned(bucket: Sequence[Matrix], steps: Sequence[int], options: MuonOptions) -> list[Assigned]:
    # Anew in each bucket: its collectives wait for the slowest owner of this bucket
    load = [0] * options.axes.size
    tasks: dict[int, Assigned] = {}
    # Ties by index and by rank: all ranks compute the same assignment, without communication
    by_cost = sorted(range(len(bucket)), key=lambda i: (-cost(bucket[i].shape, steps[bucket[i].param], False), i))
    for index in by_cost:
        matrix = bucket[index]
        owner = min(matrix.candidates(), key=lambda rank: (load[rank], rank))
        tasks[index] = task = _with_owner(matrix, owner, options)
        load[owner] += cost(matrix.shape, steps[matrix.param], task.gram)
    return [tasks[index] for index in range(len(bucket))]


def _with_owner(matrix: Matrix, owner: int, options: MuonOptions) -> Assigned:
    # The owner has the matrix: nothing to collect, so its Gram matrix would save nothing
    if owner in matrix.holders.get(matrix.chunk, ()):
        return Assigned(matrix, owner, False, {matrix.chunk: owner})
    senders = {
        # Of several copies the one whose path to the owner has fewest axes
        chunk: min(ranks, key=lambda rank: (_distance(options.axes, rank, owner), rank))
        for chunk, ranks in matrix.sources.items()
    }
    short = min(matrix.shape)
    # Gram matrices of chunks add up only if each chunk spans the whole short side
    has_full_side = all(chunk.sizes[-1 if matrix.tall else -2] == short for chunk in (*matrix.sources, *matrix.holders))
    others = {rank for ranks in matrix.holders.values() for rank in ranks} - {owner}
    of_gram = short**2 * gram_dtype(options.dtype).itemsize * (len({*senders.values()} - {owner}) + len(others))
    numbers = [chunk.numel for chunk, rank in senders.items() if rank != owner]
    numbers += [chunk.numel for chunk, ranks in matrix.holders.items() for rank in ranks if rank != owner]
    smaller = of_gram < sum(numbers) * options.dtype.itemsize
    return Assigned(
        matrix, owner, has_full_side and (options.form == "gram" or (options.form == "auto" and smaller)), senders
    )


def _distance(axes: DataAxes, a: int, b: int) -> int:
    """Returns the number of axes along which a tensor goes from one rank to the other."""
    return sum(x != y for x, y in zip(axes.place(a), axes.place(b), strict=True))


class Sent(NamedTuple):
    """The meaning of an item of an exchange: a chunk of a matrix of the bucket, or None for its Gram matrix or
    factor."""

    matrix: int
    chunk: Chunk | None


class MatrixBucket:
    """The matrices that the ranks exchange at a time.

    Args:
        assigned: the matrices, the same list on every rank.
        shards: this rank's shard of each parameter.
        options: those by which the ranks share the work.

    Attributes:
        params: the indices of their parameters.
    """

    def __init__(self, assigned: Sequence[Assigned], shards: Sequence[ShardOf], options: MuonOptions) -> None:
        self.assigned, self.options = assigned, options
        self.rank = options.axes.rank
        self.params = sorted({task.matrix.param for task in assigned})
        self.own: list[dict[Chunk, HeldChunk]] = []  # this rank's chunks of each matrix
        for task in assigned:
            held = shards[task.matrix.param].held
            self.own.append({common: h for h in held if (common := h.chunk.within(task.matrix.chunk))})
        self.collected: list[Sent] = []
        self.distributed: list[Sent] = []
        to_owner: list[ExchangedTensor] = []
        from_owner: list[ExchangedTensor] = []
        for index, task in enumerate(assigned):
            square = (min(task.matrix.shape),) * 2
            if task.gram:
                wide = gram_dtype(options.dtype)
                holders = {rank for ranks in task.matrix.holders.values() for rank in ranks}
                # One sum per rank, whatever the number of its chunks
                for rank in sorted({*task.senders.values()}):
                    to_owner.append(ExchangedTensor(rank, (task.owner,), square, wide))
                    self.collected.append(Sent(index, None))
                # The factor, [s, s], by which each holder multiplies its own chunks
                from_owner.append(ExchangedTensor(task.owner, tuple(sorted(holders)), square, wide))
                self.distributed.append(Sent(index, None))
                continue
            for chunk, rank in task.senders.items():
                to_owner.append(ExchangedTensor(rank, (task.owner,), chunk.sizes, options.dtype))
                self.collected.append(Sent(index, chunk))
            for chunk, ranks in task.matrix.holders.items():
                from_owner.append(ExchangedTensor(task.owner, ranks, chunk.sizes, options.dtype))
                self.distributed.append(Sent(index, chunk))
        self.collect = Exchange(to_owner, options.axes, options.device)
        self.distribute = Exchange(from_owner, options.axes, options.device)

    def step(
        self, params: Sequence[Tensor], updates: Mapping[int, Tensor], param_options: Sequence[Mapping[str, Any]]
    ) -> None:
        """Subtracts from the local parameters the orthogonalized matrices times the learning rates.

        Args:
            params: this rank's local parameters.
            updates: the matrices to orthogonalize, as this rank holds them, by parameter.
            param_options: of each parameter.

        Communicates: an all-to-all of matrices or Gram matrices to their owners, along each axis over which ranks hold
        different shards or replicas; another of the results.
        """
        contributions = {
            index: self._contribution(sent, updates)
            for index, sent in enumerate(self.collected)
            if self.collect.items[index].source == self.rank
        }
        results = self._results(self.collect(contributions), param_options)
        shares = {}
        for index, sent in enumerate(self.distributed):
            if self.distribute.items[index].source == self.rank:
                result, origin = results[sent.matrix], self.assigned[sent.matrix].matrix.chunk.offsets
                shares[index] = result if sent.chunk is None else sent.chunk.view(result, origin)
        for index, tensor in self.distribute(shares).items():
            sent = self.distributed[index]
            task = self.assigned[sent.matrix]
            group = param_options[task.matrix.param]
            lr = adjusted_lr(group["lr"], group["adjust_lr_fn"], *task.matrix.shape)
            for chunk, held in self.own[sent.matrix].items():
                # None is the factor, which applies to all chunks of the matrix
                if sent.chunk not in (None, chunk):
                    continue
                value = tensor
                if task.gram:
                    block = _view(updates[task.matrix.param], chunk, held).flatten(0, -2)
                    block = block.to(self.options.device, gram_dtype(self.options.dtype))
                    value = times_factor(block, tensor, task.matrix.tall).view(chunk.sizes)
                target = _view(params[task.matrix.param], chunk, held)
                _subtract(target, value.to(target.device), lr, self.options.in_blocks)

    def _contribution(self, sent: Sent, updates: Mapping[int, Tensor]) -> Tensor:
        """Returns what this rank sends to the owner of a matrix."""
        task = self.assigned[sent.matrix]
        update, own = updates[task.matrix.param], self.own[sent.matrix]
        if sent.chunk is not None:
            return _view(update, sent.chunk, own[sent.chunk]).to(self.options.device, self.options.dtype)
        total: Tensor | None = None
        for chunk in (chunk for chunk, rank in task.senders.items() if rank == self.rank):
            block = (
                _view(update, chunk, own[chunk]).flatten(0, -2).to(self.options.device, gram_dtype(self.options.dtype))
            )
            gram = gram_matrix(block, task.matrix.tall)
            total = gram if total is None else total + gram
        assert total is not None
        return total

    def _results(
        self, collected: Mapping[int, Tensor], param_options: Sequence[Mapping[str, Any]]
    ) -> dict[int, Tensor]:
        """Returns the orthogonalized matrices, or factors, that this rank owns, by their index."""
        assembled: dict[int, Tensor] = {}
        for index, tensor in collected.items():  # in the order of the items, so that sums do not depend on the rank
            sent = self.collected[index]
            task = self.assigned[sent.matrix]
            if sent.chunk is None:
                assembled[sent.matrix] = assembled[sent.matrix] + tensor if sent.matrix in assembled else tensor
                continue
            if sent.chunk == task.matrix.chunk:
                assembled[sent.matrix] = tensor
                continue
            if sent.matrix not in assembled:
                assembled[sent.matrix] = torch.empty(
                    task.matrix.chunk.sizes, dtype=self.options.dtype, device=self.options.device
                )
            sent.chunk.view(assembled[sent.matrix], task.matrix.chunk.offsets).copy_(tensor)
        results = {}
        for index, matrix in assembled.items():
            task = self.assigned[index]
            group = param_options[task.matrix.param]
            coefficients = group["ns_coefficients"], group["ns_steps"], group["eps"]
            if task.gram:
                results[index] = gram_factor(matrix, *coefficients)
            else:
                # View: a matrix of a 3-D parameter is [1, m, n]
                results[index] = orthogonalized(matrix.view(task.matrix.shape), *coefficients).view(
                    task.matrix.chunk.sizes
                )
        return results


def _subtract(target: Tensor, update: Tensor, lr: float, in_blocks: bool) -> None:
    """Subtracts the update times the learning rate."""
    if in_blocks and target.dtype in (torch.bfloat16, torch.float16):
        # torch's add of a multiple rounds the last elements of a tensor of these dtypes otherwise than the others
        target.copy_(target.float() - lr * update.float())
    else:
        target.add_(update, alpha=-lr)


def _view(local: Tensor, chunk: Chunk, held: HeldChunk) -> Tensor:
    """Returns the chunk ``chunk`` of a local tensor, within one that the rank holds."""
    origin = [start - local for start, local in zip(held.chunk.offsets, held.local, strict=True)]
    return chunk.view(local, origin)
