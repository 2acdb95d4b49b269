"""Keyword arguments of a map, in the places of the specs."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves


def by_position(
    function: Callable[..., Any], args: tuple[Any, ...], keywords: Mapping[str, Any], one_spec: bool
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments in the order of the parameters, and the keywords of parameters without a place.

    Args:
        function: that is mapped.
        args, keywords: of the call.
        one_spec: whether one spec is for all arguments.

    Raises:
        TypeError: the function has no signature, does not take these arguments, or has no place, and so no spec, for a
            tensor.
    """
    try:
        signature = inspect.signature(function)
    except ValueError as error:
        name = getattr(function, "__name__", type(function).__name__)
        raise TypeError(f"spmd: {name} has no signature, so {list(keywords)} must be positional arguments") from error
    bound = signature.bind(*args, **keywords)
    places = [
        name
        for name, parameter in signature.parameters.items()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    count = max((places.index(name) + 1 for name in bound.arguments if name in places), default=0)
    bound.apply_defaults()  # of parameters before the last one that is given
    ordered = bound.args if len(args) > len(places) else bound.args[:count]
    named = bound.kwargs
    if not one_spec:
        for name, value in named.items():
            if any(isinstance(leaf, Tensor) for leaf in tree_leaves(value)):
                raise TypeError(
                    f"spmd: the keyword argument {name!r} has tensors and must have a place among the function's "
                    "parameters, by which in_specs gives it a spec; or use one P for all"
                )
    return ordered, {name: named[name] for name in named if name in keywords}
