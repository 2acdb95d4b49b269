"""Random numbers that differ between the ranks of an axis."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map

from tp_ext.mesh_program.partition_spec import Names
from tp_ext.mesh_program.scope import checked, groups_of
from tp_ext.mesh_program.varying import axes_of, refuse_write, typed


def axis_random(axis: Names, seed: int | Sequence[int], device: torch.device | str | None = None) -> Callable[..., Any]:
    """Returns a function that draws random numbers of this rank's own along the axes.

    ::

        draw = tp_ext.axis_random("x", seed=(0, step))
        noise = draw(torch.randn, 4, 3)
        kept = draw(torch.bernoulli, probabilities)

    ``draw(function, ..)`` calls a function of torch that takes a ``generator``; its seed is made from ``seed`` and the
    rank's :func:`tp_ext.axis_index` (``jax.random.fold_in``). The result varies along the axes. Along other axes the
    numbers are the same, and so they are for the same seed: vary it with the step and the layer.

    Args:
        seed: an integer from 0 on, or several: the same on all ranks.
        device: of the numbers.

    Communicates: nothing.

    Raises:
        TypeError, ValueError: seed is no integer from 0 on; no map has the axis.
    """
    seeds = (seed,) if isinstance(seed, int) else tuple(seed) if isinstance(seed, list | tuple) else (None,)
    if not all(isinstance(one, int) and not isinstance(one, bool) for one in seeds):
        raise TypeError(f"axis_random: seed {seed!r} must be an integer or a sequence of them")
    if any(one < 0 for one in seeds):
        raise ValueError(f"axis_random: seed {seed!r} must not be negative")
    groups = groups_of(axis, "axis_random")
    index = 0
    for group in groups.values():
        index = index * group.size + group.rank
    words = np.random.SeedSequence([*seeds, index]).generate_state(2, np.uint32)
    generator = torch.Generator(device or torch.get_default_device())
    generator.manual_seed(int(words[0]) << 31 | int(words[1]) >> 1)
    own = {name: group.name for name, group in groups.items()} if checked() else {}

    def draw(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if device is not None and not any(isinstance(one, torch.Tensor) for one in args):
            kwargs.setdefault("device", device)
        refuse_write(function, args, kwargs, own)
        found = function(*args, generator=generator, **kwargs)
        return tree_map(lambda one: typed(one, {**axes_of(one), **own}), found)

    return draw
