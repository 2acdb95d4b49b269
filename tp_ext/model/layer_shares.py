"""Options of a layer that is built which concern its ranks: its shares, on which all ranks of its group must agree, and
how activations lie."""

import hashlib
import time
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
_numbers: dict[str, int] = {}  # of comparisons, by the name of the group


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

    Communicates: in a context, over a group of several ranks, a text by the group's store.

    Raises:
        ValueError: on all ranks: they differ between ranks, or are not as many as the ranks.
    """
    if group.size == 1:
        return None
    if (shares := current_shares()) is None:
        return None
    _check_same(group, shares)
    if len(shares.weights) != group.size:
        raise ValueError(
            f"shares: {list(shares.weights)} are {len(shares.weights)} weights, and must be one for each rank of the "
            f"group, p = {group.size}"
        )
    return shares


def _check_same(group: ParallelGroup, shares: Shares) -> None:
    if torch.compiler.is_compiling() or not common_generator.can_meet(torch.device("cpu")):
        return
    try:
        ranks = process_group(group.name)
    except (ValueError, RuntimeError, KeyError):  # destroyed, or never made: nothing will communicate over it
        return
    if (backend := dist.get_backend(ranks)) == "fake":  # of one process
        return
    exact = repr((ratios(shares.weights), bool(shares.tokens)))
    text = f"{list(shares.weights)}{'' if shares.tokens else ', tokens=False'}"
    if backend != "simulated":
        of_ranks = _by_store(ranks, exact, text)
    elif _differ(ranks, exact):  # of simulated ranks one that waits alone is found at once
        of_ranks = [(exact, text) for exact, text in all_gather_objects((exact, text), ranks)]
    else:
        return
    if len({exact for exact, _ in of_ranks}) > 1:
        texts = [f"{text} on rank {rank}" for rank, (_, text) in enumerate(of_ranks)]
        raise ValueError(f"shares: must be the same on all ranks of a group, and are {'; '.join(texts)}")


def _differ(ranks: ProcessGroup, exact: str) -> bool:
    number = int.from_bytes(hashlib.sha256(exact.encode()).digest()[:7], "big")
    with common_generator.not_counted(), torch._C._DisableFuncTorch():
        # MAX of the negative is the least: one all-reduce for both
        extremes = torch.tensor([number, -number])
        ranks.allreduce([extremes], _MOST).wait()
    return bool(extremes.sum())


# [Note: a layer without shares compares nothing]
# Building it is no collective: some ranks of its group may build it alone, or over groups in another order. So only
# ranks in a context compare, by the store of the group; where one is outside, they raise after the store's timeout.
def _by_store(ranks: ProcessGroup, exact: str, text: str) -> list[tuple[str, str]]:
    """Returns the shares of all ranks."""
    name, store = ranks.group_name, common_generator.store_of(ranks)
    number = _numbers[name] = _numbers.get(name, 0) + 1
    keys = [f"tp_ext.shares.{name}.{number}.{rank}" for rank in range(ranks.size())]
    store.set(keys[ranks.rank()], f"{exact}\n{text}")
    if not _are_there(store, keys, store.timeout.total_seconds()):
        raise RuntimeError(f"shares: not all ranks of the group have built this layer with shares in {store.timeout}")
    values = [store.get(key).decode() for key in keys]
    if number > 1:  # all have written this one, so none reads the last any more
        store.delete_key(f"tp_ext.shares.{name}.{number - 1}.{ranks.rank()}")
    return [(exact, text) for exact, _, text in (value.partition("\n") for value in values)]


def _are_there(store: dist.Store, keys: list[str], seconds: float) -> bool:
    end, pause = time.monotonic() + seconds, 1e-4
    while not store.check(keys):
        if time.monotonic() > end:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.01)
    return True


def check_activations(activations: str, sequence_parallel: bool) -> None:
    """Raises a ValueError unless ``activations`` is one of the two, and "hidden" comes without sequence parallelism."""
    if activations not in ("replicated", "hidden"):
        raise ValueError(f"activations: {activations!r} must be 'replicated' or 'hidden'")
    if activations == "hidden" and sequence_parallel:
        raise ValueError(
            "activations: 'hidden' must not be combined with sequence_parallel=True, which shards them on dim 0"
        )
