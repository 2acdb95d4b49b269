"""Tensor parallelism for PyTorch: regions, layers and loss over a process group, in C++ under plain ``nn.Module``s.

Regions (:mod:`tp_ext.regions`) are differentiable collectives; layers take a ``group`` and hold plain local parameters;
composition (data, pipeline, checkpoints) is torch's own.
"""

from typing import TYPE_CHECKING

from tp_ext import auto as auto
from tp_ext import debug as debug
from tp_ext import optim as optim
from tp_ext import outside as outside
from tp_ext import shm as shm
from tp_ext import symmetric_memory as symmetric_memory
from tp_ext._build import __version__, build_info
from tp_ext.checkpoint.directory import load_checkpoint, save_checkpoint
from tp_ext.checkpoint.files.reader import CheckpointReader
from tp_ext.checkpoint.full import full_state_dict, load_full_state_dict
from tp_ext.checkpoint.full_optimizer import full_optimizer_state_dict, load_full_optimizer_state_dict
from tp_ext.checkpoint.safetensors import load_safetensors, save_safetensors
from tp_ext.checkpoint.sharded import sharded_state_dict
from tp_ext.checkpoint.sharded_load import load_sharded_state_dict
from tp_ext.context_layout import ContextLayout
from tp_ext.mesh import init_mesh
from tp_ext.mesh_program.axis_random import axis_random
from tp_ext.mesh_program.collectives import (
    all_gather,
    all_to_all,
    axis_index,
    axis_size,
    pmax,
    pmean,
    pmin,
    ppermute,
    psum,
    psum_scatter,
    pvary,
)
from tp_ext.mesh_program.partition_spec import P
from tp_ext.mesh_program.spmd import spmd
from tp_ext.model.census import layouts, shardings
from tp_ext.model.coalesce import coalesce_gradients, uncoalesce_gradients
from tp_ext.model.layouts import declare_layouts
from tp_ext.model.module import ParallelModule
from tp_ext.model.names import name_modules, reset_parameters
from tp_ext.model.tied import declare_tied
from tp_ext.nn.attention.attention import ParallelAttention
from tp_ext.nn.attention.kv_cache import KVCache
from tp_ext.nn.attention.latent_attention import ParallelLatentAttention
from tp_ext.nn.attention.latent_kv_cache import LatentKVCache
from tp_ext.nn.attention.rotary import RotaryEmbedding
from tp_ext.nn.dropout import Dropout, dropout
from tp_ext.nn.embedding import VocabParallelEmbedding, VocabParallelLMHead
from tp_ext.nn.linear import ColumnParallelLinear, RowParallelLinear
from tp_ext.nn.linear_cross_entropy import linear_cross_entropy
from tp_ext.nn.lora import LoRALinear, add_lora, merge_lora
from tp_ext.nn.loss import VocabParallelCrossEntropy, vocab_parallel_cross_entropy
from tp_ext.nn.mlp import ParallelMLP
from tp_ext.nn.moe.moe import ParallelMoE, router_loss
from tp_ext.nn.moe.router import RouterConfig
from tp_ext.nn.norm import LayerNorm, RMSNorm
from tp_ext.nn.sampling import vocab_parallel_argmax, vocab_parallel_sample
from tp_ext.parallel.grad_norm import clip_grad_norm_, grad_norm
from tp_ext.parallel.run import parallelize
from tp_ext.random import manual_seed
from tp_ext.regions import (
    all_gather_region,
    all_to_all_region,
    copy_to_region,
    gather_from_region,
    reduce_from_region,
    reduce_scatter_region,
    scatter_to_region,
)
from tp_ext.sharded_matmul import matmul_2d
from tp_ext.sharding import Layout, Part, Sharding

if TYPE_CHECKING:
    from tp_ext.verify import verify as verify  # the module is called as its function, which type checkers do not know
else:
    from tp_ext import verify as verify

__all__ = [
    "CheckpointReader",
    "ColumnParallelLinear",
    "ContextLayout",
    "Dropout",
    "KVCache",
    "LatentKVCache",
    "LayerNorm",
    "Layout",
    "LoRALinear",
    "P",
    "ParallelAttention",
    "ParallelLatentAttention",
    "ParallelMLP",
    "ParallelMoE",
    "ParallelModule",
    "Part",
    "RMSNorm",
    "RotaryEmbedding",
    "RouterConfig",
    "RowParallelLinear",
    "Sharding",
    "VocabParallelCrossEntropy",
    "VocabParallelEmbedding",
    "VocabParallelLMHead",
    "__version__",
    "add_lora",
    "all_gather",
    "all_gather_region",
    "all_to_all",
    "all_to_all_region",
    "auto",
    "axis_index",
    "axis_random",
    "axis_size",
    "build_info",
    "clip_grad_norm_",
    "coalesce_gradients",
    "copy_to_region",
    "debug",
    "declare_layouts",
    "declare_tied",
    "dropout",
    "full_optimizer_state_dict",
    "full_state_dict",
    "gather_from_region",
    "grad_norm",
    "init_mesh",
    "layouts",
    "linear_cross_entropy",
    "load_checkpoint",
    "load_full_optimizer_state_dict",
    "load_full_state_dict",
    "load_safetensors",
    "load_sharded_state_dict",
    "manual_seed",
    "matmul_2d",
    "merge_lora",
    "name_modules",
    "optim",
    "parallelize",
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "psum",
    "psum_scatter",
    "pvary",
    "reduce_from_region",
    "reduce_scatter_region",
    "reset_parameters",
    "router_loss",
    "save_checkpoint",
    "save_safetensors",
    "scatter_to_region",
    "sharded_state_dict",
    "shardings",
    "shm",
    "spmd",
    "symmetric_memory",
    "uncoalesce_gradients",
    "verify",
    "vocab_parallel_argmax",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_sample",
]


def __dir__() -> list[str]:
    """Returns the public names and public modules, not the modules that define the names."""
    public = {*__all__, "group", "megatron", "mesh", "parallel", "random", "regions", "sharding"}
    return sorted(name for name in globals() if name in public or name.startswith("__"))
