"""Linear layer with a replicated weight, used for low-rank factors (LoRA's A, MLA's latents)."""

import torch
from torch import Tensor, nn

from tp_ext import _ops
from tp_ext._checks import check_flag
from tp_ext.group import Group
from tp_ext.invariance import refuse_compiled, refuse_in_blocks
from tp_ext.model.module import ParallelModule
from tp_ext.nn.forms import accumulated, local_linear, main_grad_of
from tp_ext.random import Init, torch_linear_init


class ReplicatedLinear(ParallelModule):
    """Linear layer y = x W^T + b with replicated W ``[out, in]`` and b ``[out]``.

    Shapes: x ``[.., in]`` -> y ``[.., out]`` (SP: both ``[tokens_local, ..]``). Communicates: under SP, backward, one
    all-reduce of the gradient of W, and of b.

    Args:
        in_features, out_features, bias: as ``nn.Linear``.
        group: the tensor-parallel group.
        sequence_parallel: x is sharded on dim 0.
        grad_accumulation_fusion: backward adds the gradient of the weight to ``weight.main_grad``, after the sum over
            the ranks; ``weight.grad`` stays None.
        init: initialiser of the weight; default and bias as ``nn.Linear``.
    """

    has_blocks = True
    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: Group,
        sequence_parallel: bool = False,
        grad_accumulation_fusion: bool = False,
        init: Init | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_flag(bias=bias, grad_accumulation_fusion=grad_accumulation_fusion)
        super().__init__(group, sequence_parallel=sequence_parallel)
        refuse_in_blocks(
            self.invariant_blocks,
            sequence_parallel=bool(sequence_parallel),
            grad_accumulation_fusion=bool(grad_accumulation_fusion),
        )
        self.in_features, self.out_features = in_features, out_features
        self.grad_accumulation_fusion = grad_accumulation_fusion
        default = torch_linear_init(in_features)
        init = default if init is None else init
        self.add_parameter("weight", (out_features, in_features), init, device=device, dtype=dtype)
        if bias:
            self.add_parameter("bias", (out_features,), default, device=device, dtype=dtype)
        else:
            self.register_parameter("bias", None)

    def forward(self, x: Tensor, total_tokens: int | None = None, *, has_own_tokens: bool = False) -> Tensor:
        """Computes y from x.

        Args:
            total_tokens: accepted as by the other linears, and not used.
            has_own_tokens: x has this rank's tokens only, in any dim: gradients are summed over the ranks, as under SP.
        """
        if x.dim() == 0 or x.shape[-1] != self.in_features:
            raise ValueError(f"x: shape {tuple(x.shape)} must end in in_features = {self.in_features}")
        # F.linear's own error does not name the argument
        if x.dtype != self.weight.dtype and not torch.is_autocast_enabled(x.device.type):
            raise TypeError(f"x: dtype {x.dtype} must be that of weight, {self.weight.dtype}")
        if self.invariant_blocks is not None:
            # All ranks have all tokens: one product, on one thread
            refuse_compiled()
            refuse_in_blocks(self.invariant_blocks, has_own_tokens=has_own_tokens)
            whole = [0, 0, self.out_features]
            return _ops.block_column_linear(x, self.weight, self.bias, "", False, None, [1], whole)
        if self.grad_accumulation_fusion and not self.is_coalesced("weight"):
            weight = self.parameter("weight", self._entering("weight", self.weight))
        else:
            weight = self.parameter("weight")
        bias = self.parameter("bias")
        # Under SP parameter() sums them
        if has_own_tokens and not self.sequence_parallel:
            weight = _ops.copy_to_region(weight, self.tp_group.name)
            bias = None if bias is None else _ops.copy_to_region(bias, self.tp_group.name)
        return local_linear(x, weight, bias)

    def _entering(self, name: str, value: Tensor) -> Tensor:
        if name != "weight" or not self.grad_accumulation_fusion:
            return value
        return accumulated(value, main_grad_of(value))

    def extra_repr(self) -> str:
        return f"local={tuple(self.weight.shape)}, bias={self.bias is not None}, {self.parallel_repr()}"
