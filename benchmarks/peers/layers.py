"""The same tensor-parallel layers as others implement them, each from full weights: plain torch, torch's DTensor,
Megatron-core, and a hand-written autograd.Function in Python.

Every class has the methods of `Plain`. Weights are full, the rows of a column layer in the order of the ranks
(`rank_order`), so that every rank's consecutive slice is its shard.
"""

import atexit
import contextlib
import functools
import logging
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

from benchmarks.lib.interleave import megatron_on_cpu
from tp_ext import Sharding


def rank_order(weight: Tensor, parts: tuple[int, ...], p: int) -> Tensor:
    """Rows q | k | v, each sharded by itself, as q_0 | k_0 | v_0 | q_1 | .. for p ranks."""
    sharding = Sharding(0, parts)
    return torch.cat([sharding.shard(weight, rank, p) for rank in range(p)])


class Plain:
    """Plain torch in one process; also the layers that `WithDTensor` distributes."""

    p = 1

    def linear(self, weight: Tensor, bias: Tensor | None) -> nn.Linear:
        out, into = weight.shape
        layer = nn.Linear(into, out, bias is not None, device="meta").to_empty(device="cpu")
        layer.load_state_dict({"weight": weight} | ({} if bias is None else {"bias": bias}))
        return layer

    def column(self, weight: Tensor, bias: Tensor | None = None) -> nn.Module:
        return self.linear(weight, bias)

    def row(self, weight: Tensor, bias: Tensor | None = None) -> nn.Module:
        return self.linear(weight, bias)

    def embedding(self, weight: Tensor) -> nn.Module:
        return nn.Embedding.from_pretrained(weight.clone(), freeze=False)

    def head(self, embedding: nn.Module) -> nn.Module:
        """Tied; its logits are for `loss`."""
        layer = self.linear(embedding.weight.detach(), None)
        layer.weight = embedding.weight
        return layer

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits, target)

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """The context of forward and backward."""
        yield


class WithDTensor(Plain):
    """parallelize_module with torch's styles; vocabulary and loss sharded, too."""

    def __init__(self, group: Any) -> None:
        self.p = group.size()
        self.mesh = DeviceMesh.from_group(group, "cpu")

    def column(self, weight: Tensor, bias: Tensor | None = None) -> nn.Module:
        return parallelize_module(self.linear(weight, bias), self.mesh, ColwiseParallel())

    def row(self, weight: Tensor, bias: Tensor | None = None) -> nn.Module:
        return parallelize_module(self.linear(weight, bias), self.mesh, RowwiseParallel())

    def embedding(self, weight: Tensor) -> nn.Module:
        style = RowwiseParallel(input_layouts=Replicate())
        return parallelize_module(super().embedding(weight), self.mesh, style)

    def head(self, embedding: nn.Module) -> nn.Module:
        layer = self.linear(embedding.weight.full_tensor().detach(), None)
        style = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
        layer = parallelize_module(layer, self.mesh, style)
        layer.weight = embedding.weight
        return layer

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits, target)

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        with loss_parallel():
            yield


class _WithoutBias(nn.Module):
    """Megatron's linears return (y, bias or None)."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


@functools.cache
def enter_megatron(group: Any) -> Any:
    """megatron.core.tensor_parallel; for the rest of the process a CPU is its current GPU, and it does not warn."""
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # of the missing GPU
    context = megatron_on_cpu.megatron(group)
    atexit.register(context.__exit__, None, None, None)
    return context.__enter__()


class WithMegatron(Plain):
    """Megatron-core's classes in fp32; its async input-gradient all-reduce is on by default."""

    def __init__(self, group: Any) -> None:
        self.p = group.size()
        self.m = enter_megatron(group)
        self.config = megatron_on_cpu.layer_config(group, dtype=torch.float32)

    def filled(self, layer: nn.Module, bias: Tensor | None) -> nn.Module:
        if bias is not None:
            own = layer.bias.numel()
            start = dist.get_rank() * own if own < bias.numel() else 0
            layer.bias.data.copy_(bias[start : start + own])
        return _WithoutBias(layer)

    def init(self, weight: Tensor) -> Any:
        return lambda full: full.data.copy_(weight)

    def column(self, weight: Tensor, bias: Tensor | None = None) -> nn.Module:
        layer = self.m.ColumnParallelLinear(
            weight.shape[1],
            weight.shape[0],
            config=self.config,
            init_method=self.init(weight),
            bias=bias is not None,
            gather_output=False,
        )
        return self.filled(layer, bias)

    def row(self, weight: Tensor, bias: Tensor | None = None) -> nn.Module:
        layer = self.m.RowParallelLinear(
            weight.shape[1],
            weight.shape[0],
            config=self.config,
            init_method=self.init(weight),
            bias=bias is not None,
            input_is_parallel=True,
            skip_bias_add=False,
        )
        return self.filled(layer, bias)

    def embedding(self, weight: Tensor) -> nn.Module:
        return self.m.VocabParallelEmbedding(*weight.shape, init_method=self.init(weight), config=self.config)

    def head(self, embedding: nn.Module) -> nn.Module:
        layer = self.column(embedding.weight.new_zeros(self.p * len(embedding.weight), embedding.weight.shape[1]))
        layer.layer.weight = embedding.weight
        return layer

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        return self.m.vocab_parallel_cross_entropy(logits, target).mean()


class _Column(torch.autograd.Function):
    """The fastest version in Python: one Function, ProcessGroup's method, all-reduce of dx during the GEMM of dw."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grads
        x, weight = ctx.saved_tensors
        dx = dy @ weight
        work = ctx.group.allreduce(dx)
        flat = dy.flatten(0, -2)
        dw = flat.t() @ x.flatten(0, -2)
        db = flat.sum(0)
        work.wait()
        return dx, dw, db, None


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        y = x @ weight.t()
        group.allreduce(y).wait()
        return y if bias is None else y.add_(bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grads
        x, weight = ctx.saved_tensors
        flat = dy.flatten(0, -2)
        return dy @ weight, flat.t() @ x.flatten(0, -2), flat.sum(0), None


class _PythonLinear(nn.Module):
    def __init__(self, function: Any, weight: Tensor, bias: Tensor | None, group: Any) -> None:
        super().__init__()
        self.function, self.group = function, group
        self.weight = nn.Parameter(weight.clone())
        self.bias = None if bias is None else nn.Parameter(bias.clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(x, self.weight, self.bias, self.group)


class InPython(Plain):
    """Column and row linear only."""

    def __init__(self, group: Any) -> None:
        self.group, self.p, self.rank = group, group.size(), group.rank()

    def column(self, weight: Tensor, bias: Tensor | None = None) -> nn.Module:
        own = None if bias is None else bias.chunk(self.p)[self.rank]
        return _PythonLinear(_Column, weight.chunk(self.p)[self.rank], own, self.group)

    def row(self, weight: Tensor, bias: Tensor | None = None) -> nn.Module:
        return _PythonLinear(_Row, weight.chunk(self.p, 1)[self.rank], bias, self.group)


def local(tensor: Tensor) -> Tensor:
    """This rank's shard, DTensor or not."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
