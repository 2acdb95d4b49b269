"""Options of a layer that is built which concern its ranks: its shares, on which all ranks of its group must agree, and
how activations lie."""

import functools
import hashlib
import time
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.distributed import ProcessGroup
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from tp_ext import common_generator
from tp_ext._object_collectives import all_gather_objects
from tp_ext.group import ParallelGroup, process_group
from tp_ext.invariance import current_blocks
from tp_ext.share_sizes import Shares, current_shares, ratios, refuse_in_shares, using_shares

_MOST = dist.AllreduceOptions()
_MOST.reduceOp = dist.ReduceOp.MAX
_numbers: dict[str, int] = {}  # of comparisons, by the name of the group


class FirstCall:
    """The attribute that torch asks for at each call of a module. A layer that has not met the other ranks finds it in
    its class and meets them; all others find a None of their own, and pay nothing.

    [Note: a layer without shares meets the others once]
    """

    def __get__(self, layer: Any, owner: type) -> Any:
        return self if layer is None else functools.partial(_meet_and_call, layer)


def _meet_and_call(layer: Any, *args: Any, **kwargs: Any) -> Any:
    meet_once(layer)
    return layer._call_impl(*args, **kwargs)


def meet_once(layer: Any) -> None:
    """Compares the shares of a layer that was built without any with those of the other ranks, unless it, or a layer
    inside, has met them.

    Raises:
        ValueError: on all ranks: another rank has built the layer with shares.
    """
    if "_compiled_call_impl" in layer.__dict__:
        return
    if any(module.tp_group == layer.tp_group for module in layer.modules() if "has_met" in module.__dict__):
        need_not_meet(layer)  # a layer inside has met them when its weights were drawn
    elif _check_same(layer.tp_group, None):
        layer.has_met = True
        need_not_meet(layer)


def need_not_meet(layer: Any) -> None:
    """Notes that a layer has nothing, or nothing more, to compare with the other ranks at its first call or draw."""
    # torch's own attribute: that of a layer that has been compiled stays. The oldest torch traces no `setdefault` here
    if "_compiled_call_impl" not in layer.__dict__:
        layer._compiled_call_impl = None


def know_that_they_agree(model: nn.Module) -> None:
    """Notes that the ranks have compared what the layers inside are made by: they need not meet."""
    for layer in model.modules():
        # Of any class above it: dropout, too, which meets them where it draws
        if any(isinstance(vars(cls).get("_compiled_call_impl"), FirstCall) for cls in type(layer).__mro__):
            need_not_meet(layer)


def take_shares(layer: Any, activations: str) -> None:
    """Sets the shares of a layer that is built, from the context; see :func:`layer_shares` for the errors."""
    if (shares := layer_shares(layer.tp_group)) is not None or layer.tp_group.size == 1:
        need_not_meet(layer)
    if shares is not None:
        refuse_in_shares(
            weight_group=layer.weight_group.size > 1 and f"{layer.weight_group.size} ranks",
            activations=activations == "hidden" and activations,
            tokens=current_blocks() is not None and not shares.tokens and "False",
        )
        layer.shares, layer.token_shares = shares.weights, shares.weights if shares.tokens else None


def shares_of(layer: Any) -> AbstractContextManager[None]:
    """Returns the context in which layers that are built around or next to this one have its shares."""
    weights = getattr(layer, "shares", None)
    return using_shares(None if weights is None else Shares(weights, layer.token_shares is not None))


def layer_shares(group: ParallelGroup) -> Shares | None:
    """Returns the shares of a layer over this group that is built now; None: equal ones.

    Communicates: in a context, over a group of several ranks, an all-reduce of two numbers; over a group of NCCL alone
    a text by the group's store.

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


def _check_same(group: ParallelGroup, shares: Shares | None) -> bool:
    """Returns False where the ranks cannot communicate now."""
    if torch.compiler.is_compiling() or _is_recorded():
        return False
    with _disable_current_modes():  # others than these do not matter
        if not common_generator.can_meet(torch.device("cpu")):
            return False
    try:
        ranks = process_group(group.name)
    except (ValueError, RuntimeError, KeyError):  # destroyed, or never made: nothing will communicate over it
        return True
    if dist.get_backend(ranks) == "fake":  # of one process
        return True
    exact, text = "", "None"
    if shares is not None:
        exact = repr((ratios(shares.weights), bool(shares.tokens)))
        text = f"{list(shares.weights)}{'' if shares.tokens else ', tokens=False'}"
    if common_generator.device_of(ranks).type != "cpu":
        of_ranks = _by_store(ranks, exact, text)
    elif _differ(ranks, exact):
        of_ranks = [(exact, text) for exact, text in all_gather_objects((exact, text), ranks)]
    else:
        return True
    if len({exact for exact, _ in of_ranks}) > 1:
        texts = [f"{text} on rank {rank}" for rank, (_, text) in enumerate(of_ranks)]
        raise ValueError(f"shares: must be the same on all ranks of a group, and are {'; '.join(texts)}")
    return True


def _is_recorded() -> bool:
    """Returns whether a call is of fakes, or recorded, perhaps on one rank alone. A mode that counts or prints, which
    one rank alone may have, does not matter."""
    infrastructure = FakeTensorMode, FunctionalTensorMode, ProxyTorchDispatchMode
    return any(
        isinstance(mode, infrastructure) or type(mode).__module__.startswith("tp_ext.")
        for mode in _get_current_dispatch_mode_stack()
    )


def _differ(ranks: ProcessGroup, exact: str) -> bool:
    number = int.from_bytes(hashlib.sha256(exact.encode()).digest()[:7], "big") if exact else 0
    # No mode of the caller sees it: it is no work of the model
    with (
        common_generator.not_counted(),
        torch._C._DisableFuncTorch(),
        torch._C.DisableTorchFunction(),
        _disable_current_modes(),
    ):
        # MAX of the negative is the least: one all-reduce for both
        extremes = torch.tensor([number, -number])
        ranks.allreduce([extremes], _MOST).wait()
        return bool(extremes.sum())


def _by_store(ranks: ProcessGroup, exact: str, text: str) -> list[tuple[str, str]]:
    """Returns the shares of all ranks, which cannot communicate without their devices."""
    name, store = ranks.group_name, common_generator.store_of(ranks)
    number = _numbers[name] = _numbers.get(name, 0) + 1
    keys = [f"tp_ext.shares.{name}.{number}.{rank}" for rank in range(ranks.size())]
    store.set(keys[ranks.rank()], f"{exact}\n{text}")
    if not _are_there(store, keys, store.timeout.total_seconds()):
        raise RuntimeError(f"shares: not all ranks of the group have built or called this layer in {store.timeout}")
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
