"""Integers of torch's own modules that must be local: known, where those of a user's code are searched for."""

from __future__ import annotations

from typing import Any

from torch import nn

from tp_ext.auto.search.choose import local_length


def known_integers(localized: Any, rank: int) -> dict[str, dict[str, tuple[int, int]]]:
    """Returns the numbers of groups of group norms and convolutions that are sharded: module -> {name: (full, local)}.

    A group norm over the wrong number of groups has results of the right shape; and of modules of one class with the
    same number some are sharded and others are not.

    Args:
        localized: the parts of the local model (:class:`~tp_ext.auto.search.localize.Localized`). rank: whose it is.
    """
    integers: dict[str, dict[str, tuple[int, int]]] = {}
    sizes = localized.sizes(rank)
    modules = dict(localized.model.named_modules(remove_duplicate=False))
    for name, function, tensors in localized.record.python_calls:
        module = modules[name]
        if function != "group_norm" or type(module).forward is not nn.GroupNorm.forward:
            continue
        statistics = tensors[-1]
        if id(statistics) in localized.local:
            local = local_length(localized.record.dims_of(statistics)[1], sizes)
            integers[name] = {"num_groups": (module.num_groups, local)}
    for name, module in modules.items():
        sharding = localized.shardings.get(f"{name}.weight")
        if isinstance(module, nn.modules.conv._ConvNd) and module.groups > 1 and sharding is not None:
            local = module.groups * sharding.local_size(rank, localized.p) // sharding.size
            integers[name] = {"groups": (module.groups, local)}
    return integers
