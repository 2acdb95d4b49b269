"""Compares the gradients of a sharded model with those of the unsharded one."""

import torch
from torch import nn

import tp_ext


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
