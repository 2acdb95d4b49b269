"""The shared experts of an expert layer, whose GEMMs run while the tokens of the other experts are exchanged.

::

    exchange of the tokens     during   h = x W_up^T
    experts; activation of h
    exchange of the results    during   z = act(h) W_down^T
    y = weighted sum of the results + z, a partial sum over the tensor-parallel group

In backward each exchange runs during the GEMMs of the gradients of the same linear. Both blocks have the same x and add
to the same sum, so the shared one needs no collective of its own.
"""

import torch
from torch import Tensor

from tp_ext import _ops
from tp_ext.nn.mlp import ParallelMLP, is_plain
from tp_ext.nn.moe.experts import ParallelExperts
from tp_ext.nn.moe.token_exchange import Linear, TokenExchange
from tp_ext.nn.parallel_linear import ParallelLinear, main_grad_of


def can_overlap(shared: torch.nn.Module) -> bool:
    """Returns whether the block and its linears are the original ones without hooks: others (LoRA, FSDP2 on the block
    alone) are called as they are, with collectives of their own. It must be the same on all ranks of ``group``; global
    hooks, which profilers have on one rank, do not matter.
    """
    return isinstance(shared, ParallelMLP) and is_plain(shared, ParallelMLP) and shared.is_plain()


def routed_and_shared(
    exchange: TokenExchange, experts: ParallelExperts, shared: ParallelMLP, x: Tensor, weights: Tensor
) -> Tensor:
    """Returns y of both blocks, without the bias of ``shared.down``; partial sums over ``group``.

    Args:
        x: ``[tokens, hidden]``, all tokens of ``group``, as they enter the sharded work.
        weights: ``[tokens, top_k]``.

    Communicates: the two all-to-alls of the exchange.
    """
    rows, h = exchange.dispatch(x, _linear(shared.up, x))
    rows = experts(rows, exchange.counts)
    assert h is not None
    activate = _ops.gated_act if shared.gated else _ops.bias_act
    h = activate(h, shared.up.parameter("bias"), shared.activation)
    y, z = exchange.combine(rows, weights, _linear(shared.down, h))
    assert z is not None
    return y + z


def _linear(layer: ParallelLinear, x: Tensor) -> Linear:
    weight = layer.parameter("weight")
    layer.check_shape(weight)
    return Linear(x, weight, main_grad_of(weight) if layer.grad_accumulation_fusion else None)
