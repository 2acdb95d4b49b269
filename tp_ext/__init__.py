"""Tensor parallelism for PyTorch: regions, layers and loss over a process group, in C++ under plain ``nn.Module``s.

Regions (:mod:`tp_ext.regions`) are differentiable collectives; layers take a ``group`` and hold plain local parameters;
composition (data, pipeline, checkpoints) is torch's own.

The import registers the operators and the backend ``tp_shm``, and wraps functions of torch (:mod:`tp_ext.outside`);
names and modules of the package are imported when they are used.
"""

import importlib.util
from typing import TYPE_CHECKING, Any

from tp_ext import outside as outside
from tp_ext import regions as regions  # and with them all operators
from tp_ext import shm as shm
from tp_ext._build import __version__ as __version__
from tp_ext._build import build_info as build_info
from tp_ext._imports import import_now

if TYPE_CHECKING:
    from tp_ext import auto as auto
    from tp_ext import debug as debug
    from tp_ext import lax as lax
    from tp_ext import low_precision as low_precision
    from tp_ext import optim as optim
    from tp_ext import planner as planner
    from tp_ext import refit as refit
    from tp_ext.checkpoint.directory import load_checkpoint as load_checkpoint
    from tp_ext.checkpoint.directory import save_checkpoint as save_checkpoint
    from tp_ext.checkpoint.files.reader import CheckpointReader as CheckpointReader
    from tp_ext.checkpoint.full import full_state_dict as full_state_dict
    from tp_ext.checkpoint.full import load_full_state_dict as load_full_state_dict
    from tp_ext.checkpoint.full_optimizer import full_optimizer_state_dict as full_optimizer_state_dict
    from tp_ext.checkpoint.full_optimizer import load_full_optimizer_state_dict as load_full_optimizer_state_dict
    from tp_ext.checkpoint.safetensors import load_safetensors as load_safetensors
    from tp_ext.checkpoint.safetensors import save_safetensors as save_safetensors
    from tp_ext.checkpoint.sharded import sharded_state_dict as sharded_state_dict
    from tp_ext.checkpoint.sharded_load import load_sharded_state_dict as load_sharded_state_dict
    from tp_ext.cmake import cmake_prefix_path as cmake_prefix_path
    from tp_ext.context_layout import ContextLayout as ContextLayout
    from tp_ext.export.load import load_exported as load_exported
    from tp_ext.export.write import export_model as export_model
    from tp_ext.invariance import tp_invariant as tp_invariant
    from tp_ext.lax import all_gather as all_gather
    from tp_ext.lax import all_to_all as all_to_all
    from tp_ext.lax import axis_index as axis_index
    from tp_ext.lax import axis_random as axis_random
    from tp_ext.lax import axis_size as axis_size
    from tp_ext.lax import pmax as pmax
    from tp_ext.lax import pmean as pmean
    from tp_ext.lax import pmin as pmin
    from tp_ext.lax import ppermute as ppermute
    from tp_ext.lax import psum as psum
    from tp_ext.lax import psum_scatter as psum_scatter
    from tp_ext.lax import pvary as pvary
    from tp_ext.memory import keep_memory as keep_memory
    from tp_ext.mesh import init_mesh as init_mesh
    from tp_ext.mesh_program.partition_spec import P as P
    from tp_ext.mesh_program.spmd import spmd as spmd
    from tp_ext.model.census import layouts as layouts
    from tp_ext.model.census import shardings as shardings
    from tp_ext.model.coalesce import coalesce_gradients as coalesce_gradients
    from tp_ext.model.coalesce import uncoalesce_gradients as uncoalesce_gradients
    from tp_ext.model.layouts import declare_layouts as declare_layouts
    from tp_ext.model.module import ParallelModule as ParallelModule
    from tp_ext.model.names import name_modules as name_modules
    from tp_ext.model.names import reset_parameters as reset_parameters
    from tp_ext.model.tied import declare_tied as declare_tied
    from tp_ext.nn.attention.attention import ParallelAttention as ParallelAttention
    from tp_ext.nn.attention.kv_cache import KVCache as KVCache
    from tp_ext.nn.attention.kv_cache import LatentKVCache as LatentKVCache
    from tp_ext.nn.attention.latent_attention import ParallelLatentAttention as ParallelLatentAttention
    from tp_ext.nn.attention.rotary import RotaryEmbedding as RotaryEmbedding
    from tp_ext.nn.dropout import Dropout as Dropout
    from tp_ext.nn.dropout import dropout as dropout
    from tp_ext.nn.embedding import VocabParallelEmbedding as VocabParallelEmbedding
    from tp_ext.nn.embedding import VocabParallelLMHead as VocabParallelLMHead
    from tp_ext.nn.linear import ColumnParallelLinear as ColumnParallelLinear
    from tp_ext.nn.linear import RowParallelLinear as RowParallelLinear
    from tp_ext.nn.linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
    from tp_ext.nn.lora import LoRALinear as LoRALinear
    from tp_ext.nn.lora import add_lora as add_lora
    from tp_ext.nn.lora import merge_lora as merge_lora
    from tp_ext.nn.loss import VocabParallelCrossEntropy as VocabParallelCrossEntropy
    from tp_ext.nn.loss import vocab_parallel_cross_entropy as vocab_parallel_cross_entropy
    from tp_ext.nn.mlp import ParallelMLP as ParallelMLP
    from tp_ext.nn.moe.moe import ParallelMoE as ParallelMoE
    from tp_ext.nn.moe.moe import router_loss as router_loss
    from tp_ext.nn.moe.router import RouterConfig as RouterConfig
    from tp_ext.nn.multi_token import MultiTokenPrediction as MultiTokenPrediction
    from tp_ext.nn.multi_token import next_tokens as next_tokens
    from tp_ext.nn.norm import LayerNorm as LayerNorm
    from tp_ext.nn.norm import RMSNorm as RMSNorm
    from tp_ext.nn.sampling import vocab_parallel_argmax as vocab_parallel_argmax
    from tp_ext.nn.sampling import vocab_parallel_sample as vocab_parallel_sample
    from tp_ext.parallel.grad_norm import clip_grad_norm_ as clip_grad_norm_
    from tp_ext.parallel.grad_norm import grad_norm as grad_norm
    from tp_ext.parallel.run import parallelize as parallelize
    from tp_ext.random import manual_seed as manual_seed
    from tp_ext.regions import all_gather_region as all_gather_region
    from tp_ext.regions import all_to_all_region as all_to_all_region
    from tp_ext.regions import copy_to_region as copy_to_region
    from tp_ext.regions import gather_from_region as gather_from_region
    from tp_ext.regions import reduce_from_region as reduce_from_region
    from tp_ext.regions import reduce_scatter_region as reduce_scatter_region
    from tp_ext.regions import scatter_to_region as scatter_to_region
    from tp_ext.sharded_matmul import matmul_2d as matmul_2d
    from tp_ext.sharding import Layout as Layout
    from tp_ext.sharding import Part as Part
    from tp_ext.sharding import Sharding as Sharding
    from tp_ext.share_sizes import shares as shares
    from tp_ext.verify import verify as verify  # the module is called as its function, which type checkers do not know

# The names of each module, as above
_NAMES = {
    "checkpoint.directory": "load_checkpoint save_checkpoint",
    "checkpoint.files.reader": "CheckpointReader",
    "checkpoint.full": "full_state_dict load_full_state_dict",
    "checkpoint.full_optimizer": "full_optimizer_state_dict load_full_optimizer_state_dict",
    "checkpoint.safetensors": "load_safetensors save_safetensors",
    "checkpoint.sharded": "sharded_state_dict",
    "checkpoint.sharded_load": "load_sharded_state_dict",
    "cmake": "cmake_prefix_path",
    "context_layout": "ContextLayout",
    "export.load": "load_exported",
    "export.write": "export_model",
    "lax": "all_gather all_to_all axis_index axis_random axis_size pmax pmean pmin ppermute psum psum_scatter pvary",
    "invariance": "tp_invariant",
    "memory": "keep_memory",
    "mesh": "init_mesh",
    "mesh_program.partition_spec": "P",
    "mesh_program.spmd": "spmd",
    "model.census": "layouts shardings",
    "model.coalesce": "coalesce_gradients uncoalesce_gradients",
    "model.layouts": "declare_layouts",
    "model.module": "ParallelModule",
    "model.names": "name_modules reset_parameters",
    "model.tied": "declare_tied",
    "nn.attention.attention": "ParallelAttention",
    "nn.attention.kv_cache": "KVCache LatentKVCache",
    "nn.attention.latent_attention": "ParallelLatentAttention",
    "nn.attention.rotary": "RotaryEmbedding",
    "nn.dropout": "Dropout dropout",
    "nn.embedding": "VocabParallelEmbedding VocabParallelLMHead",
    "nn.linear": "ColumnParallelLinear RowParallelLinear",
    "nn.linear_cross_entropy": "linear_cross_entropy",
    "nn.lora": "LoRALinear add_lora merge_lora",
    "nn.loss": "VocabParallelCrossEntropy vocab_parallel_cross_entropy",
    "nn.mlp": "ParallelMLP",
    "nn.moe.moe": "ParallelMoE router_loss",
    "nn.moe.router": "RouterConfig",
    "nn.multi_token": "MultiTokenPrediction next_tokens",
    "nn.norm": "LayerNorm RMSNorm",
    "nn.sampling": "vocab_parallel_argmax vocab_parallel_sample",
    "parallel.grad_norm": "clip_grad_norm_ grad_norm",
    "parallel.run": "parallelize",
    "random": "manual_seed",
    "regions": "all_gather_region all_to_all_region copy_to_region gather_from_region "
    "reduce_from_region reduce_scatter_region scatter_to_region",
    "sharded_matmul": "matmul_2d",
    "share_sizes": "shares",
    "sharding": "Layout Part Sharding",
}
_MODULES = {name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names.split()}
__all__ = ["__version__", "auto", "build_info", "debug", "lax", "low_precision", "optim", "planner"]
__all__ += ["refit", "shm", "verify"]
__all__ = sorted([*__all__, *_MODULES])


if not TYPE_CHECKING:  # else any name would be one of the package

    def __getattr__(name: str) -> Any:
        """Imports a public name, or a module of the package, when it is first used."""
        module = f"{__name__}.{name}"
        if name in _MODULES:
            value = getattr(import_now(_MODULES[name]), name)
        elif not name.startswith("__") and importlib.util.find_spec(module) is not None:
            value = import_now(module)
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    """Returns the public names and public modules, not the modules that define the names."""
    modules = {"group", "megatron", "mesh", "parallel", "random", "regions", "sharding"}
    return sorted({*__all__, *modules, *(name for name in globals() if name.startswith("__"))})
