"""Asserts that a sharded model computes what the unsharded one does: results, gradients, buffers; states."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

import tp_ext
from tp_ext.simulation.comparison import NOISE, difference, differences_of_models


def same_values(
    dense: nn.Module, sharded: nn.Module, args: Any = (), kwargs: Any = None, bound: float = 1e-11, **how: Any
) -> None:
    """Runs both, and backward, and compares all that they compute, by this rank's shards.

    Args:
        how: of :func:`tp_ext.simulation.comparison.results_of`."""
    assert_small(differences_of_models(dense, sharded, args, kwargs, **how), bound)


def assert_small(rows: Iterable[tuple[float, str]], bound: float = 1e-11) -> None:
    """Asserts that no tensor differs by more than a bound."""
    wrong = [f"{name} by {error:.1e}" for error, name in rows if error > bound]
    assert not wrong, ", ".join(wrong)


def differences_of_states(dense: nn.Module, sharded: nn.Module) -> list[tuple[float, str]]:
    """Returns how the full state dict differs from the unsharded model's."""
    full, wanted = tp_ext.full_state_dict(sharded), dense.state_dict()
    wanted = {name.replace("_orig_mod.", ""): tensor for name, tensor in wanted.items()}  # as full_state_dict
    if list(full) != list(wanted):
        return [(math.inf, f"the order of the keys {list(full)}, or keys {sorted(full.keys() ^ wanted.keys())}")]
    return [(difference([full[name]], [wanted[name]], NOISE), f"the state {name}") for name in full]


def same_gradients(dense: nn.Module, sharded: nn.Module, **close: float) -> None:
    """Compares the gradients of all parameters, of a sharded one by this rank's shard."""
    of_rank, layouts = dict(sharded.named_parameters()), dict(tp_ext.layouts(sharded))
    for name, parameter in dense.named_parameters():
        expected, gradient = parameter.grad, of_rank[name].grad
        if expected is None or gradient is None:
            assert expected is gradient, name
            continue
        expected = layouts[name].shard(expected) if layouts.get(name) else expected
        torch.testing.assert_close(gradient, expected, **close, msg=name)
