"""What must be the same bits on every rank of a group: replicated parameters, buffers, copied KV heads, gradients.
A checksum per tensor is compared first, in one exchange; values are sent only of what differs.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tp_ext._checksum import bits_of, checksum
from tp_ext._object_collectives import gathered
from tp_ext.group import Group, global_ranks, parallel_group, process_group
from tp_ext.nn.module import ParallelModule, sharding_of, shardings
from tp_ext.parallel.ddp_guard import layers_of, mesh_ranks
from tp_ext.sharding import Sharding

Key = tuple[str, int, int]
"""(name, part, where the piece starts in the full tensor); part -1 is the whole tensor."""


class Held(NamedTuple):
    """A piece that a rank holds, as the others see it; ``varied``: its elements are not all alike."""

    checksum: int
    shape: tuple[int, ...]
    dtype: str
    varied: bool


class Entry(NamedTuple):
    """A parameter or buffer: its name, itself, its layer, how it is cut over the group that is looked at."""

    name: str
    tensor: Tensor
    layer: ParallelModule | None
    sharding: Sharding | None


def assert_replicated(model_or_tensor: nn.Module | Tensor, *, group: Group) -> None:
    """Asserts that what should be replicated over ``group`` is the same bits on all its ranks (so NaNs agree, 0.0 and
    -0.0 differ).

    Of a model that is every parameter and buffer without a sharding, the KV heads that several ranks hold, and the
    gradients of both, which are complete when ``backward()`` has returned. Of a tensor it is the tensor. Over another
    group than a layer's own, the data axis, say, the layer's shards are replicated too. What FSDP2 has dealt over the
    ranks of ``group`` is passed over.

    Communicates: one exchange of 100 bytes a tensor; a second one, of the values, if one differs. Under FSDP2 copied
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
        table = entries(model_or_tensor, group)
        pieces = {key: piece for entry in table for key, piece in replicated_pieces(entry, group)}
    else:
        pieces = {("tensor", -1, 0): local(model_or_tensor)}
    held = gathered(dict(zip(pieces, held_pieces(pieces.values()), strict=True)), process_group(name))
    sentences, different = missing(held), differences(held)
    if different and not sentences:
        sentences = explain(different[:1], pieces, held, name)
    if sentences:
        others = f"; {len(different) - 1} more tensors differ" if len(different) > 1 else ""
        raise AssertionError(sentences[0] + others)


def entries(model: nn.Module, group: Group) -> list[Entry]:
    """Every parameter and buffer of the model, each once; not those cut over some of the group's ranks by a layer of
    another group, which can be neither compared nor checked over this one."""
    ranks, layers, cuts, found = global_ranks(group), layers_of(model), dict(shardings(model)), []
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        layer, local_name = layers.get(id(tensor)), name.rpartition(".")[2]
        sharding = cuts[name] if name in cuts else sharding_of(layer, local_name) if layer is not None else None
        cut_over = global_ranks(layer.tp_group.name) if layer is not None and sharding is not None else []
        if cut_over == ranks or len(set(cut_over) & set(ranks)) < 2:
            found.append(Entry(name, tensor, layer, sharding if cut_over == ranks else None))
    return found


def replicated_pieces(entry: Entry, group: Group) -> Iterator[tuple[Key, Tensor]]:
    """Of a parameter or buffer and its gradient what other ranks of the group must hold too."""
    _, p, rank = parallel_group(group)
    for name, tensor in ((entry.name, entry.tensor), (f"{entry.name}.grad", entry.tensor.grad)):
        if tensor is None or tensor.is_meta or dealt(tensor, group):
            continue
        if entry.sharding is None:
            yield (name, -1, 0), local(tensor)
        elif any(part.copies > 1 for part in entry.sharding.parts):
            for index, piece in enumerate(own_pieces(tensor, entry.sharding, rank, p)):
                if entry.sharding.parts[index].copies > 1:
                    yield (name, index, entry.sharding.slices(rank, p)[index].start), piece


def own_pieces(tensor: Tensor, sharding: Sharding, rank: int, p: int) -> Iterator[Tensor]:
    """The local tensor's piece of each part, without padding; none of a tensor that has not the length for it."""
    if tensor.dim() <= sharding.dim or tensor.shape[sharding.dim] != sharding.local_size(rank, p):
        return
    whole = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
    at = 0
    for part, piece in zip(sharding.parts, sharding.slices(rank, p), strict=True):
        yield whole.narrow(sharding.dim, at, piece.stop - piece.start)
        start, stop = part.span(rank, p)
        at += stop - start


def local(tensor: Tensor) -> Tensor:
    """What this rank stores of it."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def dealt(tensor: Tensor, group: Group) -> bool:
    """Whether FSDP2 has dealt it over ranks of the group, which then hold different slices."""
    return isinstance(tensor, DTensor) and len(set(mesh_ranks(tensor)) & set(global_ranks(group))) > 1


def held_pieces(pieces: Iterable[Tensor]) -> list[Held]:
    """Checksums of all, with one copy to the host per device."""
    pieces = list(pieces)
    numbers = [checksum(bits_of(piece)) for piece in pieces]
    on_host: dict[int, list[int]] = {}
    for device in {piece.device for piece in pieces}:
        here = [i for i, piece in enumerate(pieces) if piece.device == device]
        on_host |= dict(zip(here, torch.stack([numbers[i] for i in here]).tolist(), strict=True))
    return [
        Held(on_host[i][0], tuple(piece.shape), str(piece.dtype), bool(on_host[i][1])) for i, piece in enumerate(pieces)
    ]


def missing(held: list[dict[Key, Held]]) -> list[str]:
    """A sentence for each whole tensor that not all ranks have."""
    sentences = []
    for key in dict.fromkeys(key for one in held for key in one):
        ranks = [rank for rank, one in enumerate(held) if key not in one]
        if ranks and key[1] < 0:
            sentences.append(f"{key[0]}: must be replicated; missing on ranks {ranks} of {len(held)}")
    return sentences


def differences(held: list[dict[Key, Held]]) -> list[Key]:
    """Pieces that not all their holders hold alike; the same on every rank, so that all take part in what follows."""
    keys = dict.fromkeys(key for one in held for key in one)
    return [key for key in keys if len({one[key] for one in held if key in one}) > 1]


def explain(keys: list[Key], pieces: dict[Key, Tensor], held: list[dict[Key, Held]], group: str) -> list[str]:
    """A sentence for each difference, the same on every rank. Communicates: the pieces, to every rank."""
    mine = [pieces[key].cpu() if key in pieces else None for key in keys]
    everyone = gathered(mine, process_group(group))
    return [
        _sentence(key, {r: piece for r, one in enumerate(everyone) if (piece := one[i]) is not None}, held)
        for i, key in enumerate(keys)
    ]


def _sentence(key: Key, values: dict[int, Tensor], held: list[dict[Key, Held]]) -> str:
    seen = {rank: held[rank][key] for rank in values}
    usual = Counter(seen.values()).most_common(1)[0][0]  # of equally many the lowest rank's
    same, other = ([r for r in seen if (seen[r] == usual) is alike] for alike in (True, False))
    name = key[0] + (f" (part {key[1]}, from {key[2]} on, which several ranks hold)" if key[1] >= 0 else "")
    start = f"{name}: must be the same on ranks {sorted(seen)}; ranks {other} differ from {same}"
    a, b = values[other[0]], values[same[0]]
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{start}: {a.dtype} {tuple(a.shape)}, not {b.dtype} {tuple(b.shape)}"
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
