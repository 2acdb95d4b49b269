"""Imports of rank processes, made once by the server that they are forked from.

Frozen: no garbage collection of a rank traverses the objects of torch's modules, or copies their pages.
"""

import gc
import importlib
import os
import shutil

import torch._dynamo.repro.after_aot
import torch._dynamo.testing
import torch._inductor.async_compile
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.debug  # noqa: F401
from _pytest.assertion import install_importhook
from _pytest.config import get_config

import tp_ext
import tp_ext.elastic.elastic_data  # noqa: F401, with refit and checkpoints
from tests.helpers import seeds

if shutil.which("nvidia-smi") is None:  # both ask for GPUs, after which no fork may use one
    importlib.import_module("torch._inductor.compile_fx")
    seeds.cheapen()
install_importhook(get_config())  # an assertion that fails on a rank shows its values
if "TP_EXT_TYPECHECK" in os.environ:
    from tests.helpers import typechecked

    typechecked.install(os.environ["TP_EXT_TYPECHECK"])
gc.collect()
gc.freeze()
