"""Options of a layer that is built which concern its ranks: its shares, on which all ranks of its group must agree, and
how activations lie."""

import hashlib
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from tp_ext import common_generator
from tp_ext._object_collectives import all_gather_objects
from tp_ext.group import ParallelGroup, process_group
from tp_ext.invariance import current_blocks
from tp_ext.share_sizes import Shares, current_shares, ratios, refuse_in_shares, using_shares

_MOST = dist.AllreduceOptions()
_MOST.reduceOp = dist.ReduceOp.MAX
_numbers: dict[str, int] = {}  # of comparisons over a store, by the name of the group


def take_shares(layer: Any, activations: str) -> None:
    """Sets the shares of a layer that is built, from the context; see :func:`layer_shares` for the errors."""
    if (shares := layer_shares(layer.tp_group)) is not None:
        refuse_in_shares(
            weight_group=layer.weight_group.size > 1 and f"{layer.weight_group.size} ranks",
            activations=activations == "hidden" and activations,
            tp_invariant=current_blocks(),
        )
        layer.shares, layer.token_shares = shares.weights, shares.weights if shares.tokens else None


def shares_of(layer: Any) -> AbstractContextManager[None]:
    """Returns the context in which layers that are built around or next to this one have its shares."""
    weights = getattr(layer, "shares", None)
    return using_shares(None if weights is None else Shares(weights, layer.token_shares is not None))


def layer_shares(group: ParallelGroup) -> Shares | None:
    """Returns the shares of a layer over this group that is built now; None: equal ones.

    Communicates: over a group of several ranks one all-reduce of two numbers, in or out of a context: a rank outside
    cannot know that others are inside. Where the group cannot communicate on the CPU, a text by its store.
    :func:`tp_ext.debug.count_collectives` does not count it.

    Raises:
        ValueError: on all ranks: they differ between ranks, or are not as many as the ranks.
    """
    if group.size == 1:
        return None
    shares = current_shares()
    _check_same(group, shares)
    if shares is not None and len(shares.weights) != group.size:
        raise ValueError(
            f"shares: {list(shares.weights)} are {len(shares.weights)} weights, and must be one for each rank of the "
            f"group, p = {group.size}"
        )
    return shares


def _check_same(group: ParallelGroup, shares: Shares | None) -> None:
    if torch.compiler.is_compiling() or not common_generator.can_meet(torch.device("cpu")):
        return
    try:
        ranks = process_group(group.name)
    except (ValueError, RuntimeError, KeyError):  # destroyed, or never made: nothing will communicate over it
        return
    if dist.get_backend(ranks) == "fake":  # of one process
        return
    exact, text = "", "None"
    if shares is not None:
        exact = repr((ratios(shares.weights), bool(shares.tokens)))
        text = f"{list(shares.weights)}{'' if shares.tokens else ', tokens=False'}"
    # A backend of GPUs alone would need the device of a layer that is not built yet
    if common_generator.device_of(ranks).type != "cpu":
        of_ranks = _by_store(ranks, exact, text)
    elif _differ(ranks, exact):
        of_ranks = [(exact, text) for exact, text in all_gather_objects((exact, text), ranks)]
    else:
        return
    if len({exact for exact, _ in of_ranks}) > 1:
        texts = [f"{text} on rank {rank}" for rank, (_, text) in enumerate(of_ranks)]
        raise ValueError(f"shares: must be the same on all ranks of a group, and are {'; '.join(texts)}")


def _differ(ranks: ProcessGroup, exact: str) -> bool:
    number = int.from_bytes(hashlib.sha256(exact.encode()).digest()[:7], "big") if exact else 0
    with common_generator.not_counted(), torch._C._DisableFuncTorch():
        # MAX of the negative is the least: one all-reduce for both
        extremes = torch.tensor([number, -number])
        ranks.allreduce([extremes], _MOST).wait()
    return bool(extremes.sum())


def _by_store(ranks: ProcessGroup, exact: str, text: str) -> list[tuple[str, str]]:
    name, store = ranks.group_name, common_generator.store_of(ranks)
    number = _numbers[name] = _numbers.get(name, 0) + 1
    store.set(f"tp_ext.shares.{name}.{number}.{ranks.rank()}", f"{exact}\n{text}")
    values = [store.get(f"tp_ext.shares.{name}.{number}.{rank}").decode() for rank in range(ranks.size())]
    if number > 1:  # all have written this one, so all have read the last
        store.delete_key(f"tp_ext.shares.{name}.{number - 1}.{ranks.rank()}")
    return [(exact, text) for exact, _, text in (value.partition("\n") for value in values)]


def check_activations(activations: str, sequence_parallel: bool) -> None:
    """Raises a ValueError unless ``activations`` is one of the two, and "hidden" comes without sequence parallelism."""
    if activations not in ("replicated", "hidden"):
        raise ValueError(f"activations: {activations!r} must be 'replicated' or 'hidden'")
    if activations == "hidden" and sequence_parallel:
        raise ValueError(
            "activations: 'hidden' must not be combined with sequence_parallel=True, which shards them on dim 0"
        )
