"""Models of transformers, sharded without a change: read from, and written to, their own files.

Only this package imports transformers."""

from tp_ext.checkpoint.expert_names import from_published_experts, to_published_experts
from tp_ext.huggingface.adapters import disable_adapters, load_adapter, save_adapter
from tp_ext.huggingface.context import context_inputs, context_parallel
from tp_ext.huggingface.load import from_pretrained
from tp_ext.huggingface.prepare import prepare, share_batches
from tp_ext.huggingface.save import save_pretrained
from tp_ext.huggingface.trainer import Trainer, trainer_for
from tp_ext.huggingface.weight_source import WeightSource, weight_source

__all__ = [
    "Trainer",
    "WeightSource",
    "context_inputs",
    "context_parallel",
    "disable_adapters",
    "from_pretrained",
    "from_published_experts",
    "load_adapter",
    "prepare",
    "save_adapter",
    "save_pretrained",
    "share_batches",
    "to_published_experts",
    "trainer_for",
    "weight_source",
]
