"""Comparison of the tensors that must be the same bits on every rank of a group: replicated parameters and buffers,
copied KV heads, and their gradients. A checksum per tensor is compared first, in one exchange; values are communicated
only for tensors that differ.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tp_ext._checksum import bits_of, checksum
from tp_ext._object_collectives import all_gather_objects
from tp_ext.group import Group, global_ranks, parallel_group, process_group
from tp_ext.model.census import Census, census
from tp_ext.model.module import ParallelModule
from tp_ext.parallel.ddp_guard import mesh_ranks
from tp_ext.sharding import Layout, Sharding

PartKey = tuple[str, int, int]
"""(name, index of the part, its start in the full tensor); part -1 is the whole tensor."""


class TensorDigest(NamedTuple):
    """A digest of a tensor that a rank holds, for the other ranks; ``varied``: its elements are not all alike."""

    checksum: int
    shape: tuple[int, ...]
    dtype: str
    varied: bool


class ComparedTensor(NamedTuple):
    """A parameter or buffer with its name, its layer, its sharding over the group of the comparison, its layout."""

    name: str
    tensor: Tensor
    layer: ParallelModule | None
    sharding: Sharding | None
    layout: Layout


def assert_replicated(model_or_tensor: nn.Module | Tensor, *, group: Group) -> None:
    """Asserts that what should be replicated over ``group`` is the same bits on all its ranks (so NaNs agree, 0.0 and
    -0.0 differ).

    For a model it compares every parameter and buffer without a sharding, the KV heads that several ranks hold, and the
    gradients of both, which are complete when ``backward()`` has returned; for a tensor, the tensor. Over a group other
    than a layer's own, such as the data axis, the layer's shards are replicated, too. Tensors that FSDP2 has sharded
    over the ranks of ``group`` are skipped.

    Communicates: one exchange of 100 bytes per tensor; a second one, of the values, if one differs. Under FSDP2 copied
    KV heads are gathered over the data axis first, so all ranks of the mesh must call it.

    Raises:
        TypeError: neither a module nor a tensor.
        AssertionError: the same on every rank: the name, the ranks that differ, the first index, both values.
    """
    if not isinstance(model_or_tensor, nn.Module | Tensor):
        raise TypeError(f"model_or_tensor: {type(model_or_tensor).__name__} must be a module or a tensor")
    name, p, _ = parallel_group(group)
    if p == 1:
        return
    if isinstance(model_or_tensor, nn.Module):
        table = compared_tensors(census(model_or_tensor, assumed=parallel_group(group)), group)
        tensors = {key: part for entry in table for key, part in replicated_parts(entry, group)}
    else:
        tensors = {("tensor", -1, 0): local_tensor(model_or_tensor)}
    digests = all_gather_objects(dict(zip(tensors, tensor_digests(tensors.values()), strict=True)), process_group(name))
    sentences, different = describe_missing(digests), differing_keys(digests)
    # A tensor that a rank lacks is said first; the values of others would not explain it
    if different and not sentences:
        sentences = describe_differences(different[:1], tensors, digests, name)
    if sentences:
        others = f"; {len(different) - 1} more tensors differ" if len(different) > 1 else ""
        raise AssertionError(sentences[0] + others)


def compared_tensors(model: Census, group: Group) -> list[ComparedTensor]:
    """Returns every parameter and buffer of the model once, except those that are sharded over another group with some
    of this group's ranks, which cannot be compared over this group."""
    table = []
    ranks = global_ranks(group)
    layers: dict[int, ParallelModule] = {}
    for layer in model.layers.values():  # inner ones come later
        layers |= dict.fromkeys(map(id, (*layer.parameters(), *layer.buffers())), layer)
    for name, tensor in (*model.model.named_parameters(), *model.model.named_buffers()):
        layout = model.resolve(name).layout
        shared: Sharding | None = None
        for sharding, other in layout:
            members = other.ranks
            if members == ranks:
                shared = sharding
            elif len(set(members) & set(ranks)) > 1:
                break
        else:
            table.append(ComparedTensor(name, tensor, layers.get(id(tensor)), shared, layout))
    return table


def replicated_parts(entry: ComparedTensor, group: Group) -> Iterator[tuple[PartKey, Tensor]]:
    """Yields the parts of a parameter or buffer, and of its gradient, that other ranks of the group must hold, too."""
    _, p, rank = parallel_group(group)
    for name, tensor in ((entry.name, entry.tensor), *gradients(entry.name, entry.tensor)):
        if tensor.is_meta or is_sharded_by_fsdp2(tensor, group):
            continue
        if entry.sharding is None:
            yield (name, -1, 0), local_tensor(tensor)
        elif any(part.has_copies for part in entry.sharding.parts):
            tensors = parts_of_shard(tensor, entry.sharding, rank, p)
            for index, shares in enumerate(entry.sharding.shares_of_parts(rank, p)):
                for share, values in zip(shares, tensors, strict=False):
                    # Cut in the place of queries, ranks hold different ranges of units: compared unit by unit
                    length = share.part.unit if share.part.queries else max(share.length, 1)
                    for i, unit in enumerate(values.split(length, entry.sharding.dim)):
                        if share.part.has_copies:
                            yield (name, index, share.full_start + i * length), unit


def parts_of_shard(tensor: Tensor, sharding: Sharding, rank: int, p: int) -> Iterator[Tensor]:
    """Yields the local tensor's share of each part, without padding; nothing if its length does not match."""
    if tensor.dim() <= sharding.dim or tensor.shape[sharding.dim] != sharding.local_size(rank, p):
        return
    whole = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
    for part in sharding.local_parts(rank, p):
        yield whole.narrow(sharding.dim, part.local_start, part.length)


def gradients(name: str, param: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yields the gradients of a parameter with their names: ``grad``, and ``main_grad`` of fused accumulation."""
    for kind in ("grad", "main_grad"):
        gradient = getattr(param, kind, None)
        if isinstance(gradient, Tensor):
            yield f"{name}.{kind}", gradient


def parameter_of(name: str) -> str:
    """Returns the name of a gradient's parameter; a parameter's name as it is."""
    return name.removesuffix(".grad").removesuffix(".main_grad")


def local_tensor(tensor: Tensor) -> Tensor:
    """Returns the local storage of the tensor; of a sparse gradient its dense form."""
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
    return local.to_dense() if local.is_sparse else local


def is_sharded_by_fsdp2(tensor: Tensor, group: Group) -> bool:
    """Returns whether FSDP2 has sharded the tensor over ranks of the group, which then hold different slices."""
    return isinstance(tensor, DTensor) and len(set(mesh_ranks(tensor)) & set(global_ranks(group))) > 1


def tensor_digests(tensors: Iterable[Tensor]) -> list[TensorDigest]:
    """Returns the digests of all tensors, with one copy to the host per device."""
    tensors = list(tensors)
    numbers = [checksum(bits_of(tensor)) for tensor in tensors]
    on_host: dict[int, list[int]] = {}
    for device in {tensor.device for tensor in tensors}:
        here = [i for i, tensor in enumerate(tensors) if tensor.device == device]
        on_host |= dict(zip(here, torch.stack([numbers[i] for i in here]).tolist(), strict=True))
    return [
        TensorDigest(on_host[i][0], tuple(tensor.shape), str(tensor.dtype), bool(on_host[i][1]))
        for i, tensor in enumerate(tensors)
    ]


def describe_missing(held: list[dict[PartKey, TensorDigest]]) -> list[str]:
    """Returns a sentence for each whole tensor that not all ranks have."""
    sentences = []
    for key in dict.fromkeys(key for of_rank in held for key in of_rank):
        ranks = [rank for rank, of_rank in enumerate(held) if key not in of_rank]
        if ranks and key[1] < 0:
            sentences.append(f"{key[0]}: must be replicated; missing on ranks {ranks} of {len(held)}")
    return sentences


def differing_keys(held: list[dict[PartKey, TensorDigest]]) -> list[PartKey]:
    """Returns the keys whose holders differ; the same on every rank, so that all take part in further communication."""
    keys = dict.fromkeys(key for of_rank in held for key in of_rank)
    return [key for key in keys if len({of_rank[key] for of_rank in held if key in of_rank}) > 1]


def describe_differences(
    keys: list[PartKey], tensors: dict[PartKey, Tensor], held: list[dict[PartKey, TensorDigest]], group: str
) -> list[str]:
    """Returns a sentence for each difference, the same on every rank. Communicates the tensors to every rank."""
    mine = [tensors[key].cpu() if key in tensors else None for key in keys]
    everyone = all_gather_objects(mine, process_group(group))
    return [
        _sentence(key, {r: value for r, of_rank in enumerate(everyone) if (value := of_rank[i]) is not None}, held)
        for i, key in enumerate(keys)
    ]


def _sentence(key: PartKey, values: dict[int, Tensor], held: list[dict[PartKey, TensorDigest]]) -> str:
    seen = {rank: held[rank][key] for rank in values}
    usual = Counter(seen.values()).most_common(1)[0][0]  # the lowest rank's among equally frequent ones
    same, other = ([r for r in seen if (seen[r] == usual) is alike] for alike in (True, False))
    name = key[0] + (f" (part {key[1]}, from {key[2]} on, which several ranks hold)" if key[1] >= 0 else "")
    start = f"{name}: must be the same on ranks {sorted(seen)}; ranks {other} differ from {same}"
    a, b = values[other[0]], values[same[0]]
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{start}: {a.dtype} {tuple(a.shape)}, not {b.dtype} {tuple(b.shape)}"
    # By bits, since NaN differs from itself as a number
    wide = bits_of(a).numel() // max(a.numel(), 1)
    first = int((bits_of(a) != bits_of(b)).nonzero()[0]) // wide
    index = [int(i) for i in torch.unravel_index(torch.tensor(first), a.shape)] if a.dim() else []
    x, y = (t.reshape(-1)[first] for t in (a, b))
    shown = [repr(t.item()) for t in (x, y)]
    if shown[0] == shown[1]:  # NaNs of different bits
        shown = [f"{text} (bits {bits_of(t).tolist()})" for text, t in zip(shown, (x, y), strict=True)]
    count = int((bits_of(a) != bits_of(b)).view(-1, wide).any(1).sum())
    return (
        f"{start}, first at index {tuple(index)}: {shown[0]}, not {shown[1]} ({count} of {math.prod(a.shape)} elements)"
    )
