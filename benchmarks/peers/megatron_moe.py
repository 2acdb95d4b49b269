"""Megatron-core's expert layer (SequentialMLP, all-gather dispatcher) over an expert group of gloo ranks, on the CPU.

Its all-to-all dispatcher makes CUDA streams, and without Transformer Engine its router (0.16.1) uses a name that is not
defined, which is set here.
"""

import functools
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.peers.layers import enter_megatron


@functools.cache
def megatron_moe(group: Any, hidden: int, ffn: int, experts: int, choices: int) -> Any:
    """A layer of SwiGLU experts over the group, in fp32, that takes ``[tokens, hidden]``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the packages for GPUs that it looks for
        from megatron.core import parallel_state
        from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
        from megatron.core.transformer.moe import moe_utils
        from megatron.core.transformer.spec_utils import build_module
        from megatron.core.transformer.transformer_config import TransformerConfig

    ranks = group.size()
    sizes = {"expert_model_parallel_size": ranks, "expert_tensor_parallel_size": 1}
    parallel_state.initialize_model_parallel(1, **sizes)
    enter_megatron(group)
    moe_utils.te_general_gemm = None
    config = TransformerConfig(
        num_layers=1,
        hidden_size=hidden,
        moe_ffn_hidden_size=ffn,
        num_attention_heads=1,
        num_moe_experts=experts,
        moe_router_topk=choices,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="allgather",
        gated_linear_unit=True,
        activation_func=F.silu,
        bias_activation_fusion=False,
        add_bias_linear=False,
        use_cpu_initialization=True,
        params_dtype=torch.float32,
        **sizes,
    )
    return build_module(get_moe_module_spec(use_te=False, num_experts=experts, moe_grouped_gemm=False), config=config)


def set_weights(layer: Any, router: Tensor, up: Tensor, down: Tensor, first: int) -> list[list[Tensor]]:
    """Gives the layer the weights of the router and of its experts, ``first`` and following; returns its parameters for
    each of the three."""
    own = list(layer.experts.local_experts)
    held = [[layer.router.weight], [one.linear_fc1.weight for one in own], [one.linear_fc2.weight for one in own]]
    with torch.no_grad():
        for params, values in zip(held, (router[None], up[first:], down[first:]), strict=True):
            for param, value in zip(params, values, strict=False):
                param.copy_(value)
    return held
