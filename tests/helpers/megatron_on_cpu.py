"""Megatron-core's own classes on gloo ranks without a GPU, for the tests that compare ours with them."""

import contextlib
import importlib.util
import warnings
from importlib import metadata
from unittest import mock

import torch
import torch.nn.functional as F

from tests.helpers import ranks

MISSING = importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None
VERSION = None if MISSING else metadata.version("megatron-core")


def run(fn, p, *args):
    """ranks.run, with time for the first import, some seconds a rank."""
    return ranks.run(fn, p, *args, timeout=180)


@contextlib.contextmanager
def megatron(group):
    """``megatron.core.tensor_parallel``, with Megatron's global state set to ``group``. It allocates on the current GPU
    and forks that one's generator for dropout: here on the CPU, and not at all (no test of these drops anything)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the packages for GPUs that it looks for
        from megatron.core import parallel_state, tensor_parallel

        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel(tensor_model_parallel_size=group.size())
        tracker = tensor_parallel.get_cuda_rng_tracker()
        with (
            mock.patch("torch.cuda.current_device", lambda: torch.device("cpu")),
            mock.patch.object(tracker, "fork", contextlib.nullcontext),
        ):
            yield tensor_parallel


def fill(weight):
    """The initialiser that gives a layer the full ``weight``; Megatron cuts it, by way of fp32."""
    assert torch.equal(weight.float().double(), weight.double())
    return lambda master: master.data.copy_(weight)


def layer_config(group, sp=False, dtype=torch.float64):
    """For single layers. Megatron refuses sequence parallelism on one rank, where it changes nothing."""
    from megatron.core.model_parallel_config import ModelParallelConfig

    p = group.size()
    return ModelParallelConfig(
        tensor_model_parallel_size=p,
        sequence_parallel=sp and p > 1,
        use_cpu_initialization=True,
        params_dtype=dtype,
    )


def block(group, name, weights, *, sp=False, hidden_size, ffn_hidden_size=1, heads=None, gated=False):
    """``"self_attention"`` or ``"mlp"`` of Megatron's GPT without Transformer Engine. ``weights``: the full matrices of
    its first and second linear, in its layout; biases are zero."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

    p = group.size()
    num_heads, num_kv_heads, head_dim = heads or (p, p, 1)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=hidden_size,
        ffn_hidden_size=ffn_hidden_size,
        num_attention_heads=num_heads,
        num_query_groups=num_kv_heads,
        kv_channels=head_dim,
        gated_linear_unit=gated,
        activation_func=F.silu if gated else F.gelu,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        attention_softmax_in_fp32=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=p,
        sequence_parallel=sp and p > 1,
        use_cpu_initialization=True,
        params_dtype=torch.float64,
        init_method=fill(weights[0]),
        output_layer_init_method=fill(weights[1]),
    )
    spec = getattr(get_gpt_layer_local_spec().submodules, name)
    return build_module(spec, config=config, **({"layer_number": 1} if name == "self_attention" else {}))
