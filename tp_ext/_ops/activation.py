"""Activations with a bias: the operators of the MLP. Formulas: csrc/kernels/activation.h; C++: bias_act, gated_act."""

from torch import Tensor

from tp_ext._ops.binding import direct_operator, primitive
from tp_ext._ops.fake_tensors import like


@direct_operator
def bias_act(x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """Returns act(x + bias), ``[.., n]``; bias ``[n]``; activation: gelu, gelu_tanh, relu, silu."""


@primitive("_bias_act_fwd")
def bias_act_fwd(x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """Computes :func:`bias_act`."""
    return like(x)


@primitive("_bias_act_bwd")
def bias_act_bwd(grad: Tensor, x: Tensor, bias: Tensor | None, activation: str) -> tuple[Tensor, Tensor]:
    """Returns dx and, in x's dtype, dbias, empty without a bias; x + bias is recomputed."""
    return _gradients(x, bias)


@direct_operator
def gated_act(x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """Returns act(gate) * up, ``[.., n]``, of x + bias = ``[.., gate | up]``; activation: swiglu, geglu."""


@primitive("_gated_act_fwd")
def gated_act_fwd(x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """Computes :func:`gated_act`."""
    return x.new_empty([*x.shape[:-1], x.shape[-1] // 2])


@primitive("_gated_act_bwd")
def gated_act_bwd(grad: Tensor, x: Tensor, bias: Tensor | None, activation: str) -> tuple[Tensor, Tensor]:
    """Returns dx and dbias, both with gate | up in the last dim; dbias is empty without a bias."""
    return _gradients(x, bias)


def _gradients(x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    return like(x), x.new_empty(0) if bias is None else like(bias)
