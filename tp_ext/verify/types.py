"""The types of a model's forward, by :func:`tp_ext.debug.typecheck`, where ``spmd_types`` is installed."""

import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from tp_ext.debug.type_check import typecheck
from tp_ext.random import manual_seed
from tp_ext.simulation import simulate


def type_error(make_model: Any, arguments: Any, dtype: torch.dtype | None, p: int, seed: int) -> str | None:
    """Returns the first type error of a forward, "" if there is none, None without ``spmd_types``.

    Arguments of forward are invariant. A tensor without a type is no error: an operation may have no rule.
    """
    if importlib.util.find_spec("spmd_types") is None:
        return None
    spmd = importlib.import_module("spmd_types")

    def copied(x: Tensor) -> Tensor:
        return x.detach().to(dtype or x.dtype) if x.is_floating_point() else x.clone()

    def check(rank: int, group: Any) -> str:
        manual_seed(seed)
        model = make_model(group)
        model = model if dtype is None else model.to(dtype)
        args, kwargs = tree_map_only(Tensor, copied, arguments)
        try:
            with typecheck(model, group, strict=False):
                for leaf in tree_leaves((args, kwargs)):
                    if isinstance(leaf, Tensor) and leaf.is_floating_point():
                        spmd.assert_type(leaf, {group: spmd.I})
                model(*args, **kwargs)
        except spmd.SpmdTypeError as error:
            return str(error).splitlines()[0]
        return ""

    try:
        return next(filter(None, simulate(check, p, seed=seed)), "")
    except RuntimeError as error:  # of a rule that does not know what the model does
        return str(error).splitlines()[0]
