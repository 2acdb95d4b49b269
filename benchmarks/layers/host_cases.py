"""Cases of bench_host: small layers of ours and of others, in the process of one rank.

The group is gloo's of one rank, or torch's fake group of 8, whose collectives return at once and change nothing: the
remaining time is the host's for one layer of a rank. Every local shape is 8 x 8, so arithmetic takes next to no time.
"""

import logging
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import tp_ext
from benchmarks.lib.interleave import megatron_on_cpu
from benchmarks.peers import layers as peers

N = 8


@dataclass(frozen=True)
class Case:
    """``call`` gives the output, of the shape of ``grad``; its cost is reported over that of the case ``base``, itself
    one of plain torch. Cases of one family and base compute the same, except for sums over ranks that do not exist.
    """

    family: str
    name: str
    base: str
    call: Callable[[], Tensor]
    grad: Tensor
    inputs: tuple[Tensor, ...]


def start(p: int) -> Any:
    """The process group of this rank."""
    warnings.simplefilter("ignore")  # of Megatron's, and that nobody waits for DTensor's collectives
    logging.disable(logging.WARNING)
    if p == 1:
        store = dist.FileStore(tempfile.NamedTemporaryFile(delete=False).name, 1)  # noqa: SIM115, gloo opens it
        dist.init_process_group("gloo", rank=0, world_size=1, store=store)
    else:
        dist.init_process_group("fake", rank=0, world_size=p, store=FakeStore())
    return dist.group.WORLD


class PythonColumn(torch.autograd.Function):
    """The fastest version in Python: one Function, the group's own method, the sum of dx during the GEMM of dw."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, group: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        dx = dy.mm(weight)
        work = ctx.group.allreduce(dx) if ctx.group else None
        dw, db = dy.t().mm(x), dy.sum(0)
        if work:
            work.wait()
        return dx, dw, db, None


class PythonRow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, group: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        if not group:
            return F.linear(x, weight, bias)
        y = F.linear(x, weight)
        group.allreduce(y).wait()
        return y.add_(bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return dy.mm(weight), dy.t().mm(x), dy.sum(0), None


class PythonCopy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        dx = dy.clone()
        if ctx.group:
            ctx.group.allreduce(dx).wait()
        return dx, None


class PythonReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        y = x.clone()
        if group:
            group.allreduce(y).wait()
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return dy, None


class PythonLinear(nn.Module):
    def __init__(self, function: Any, weight: Tensor, bias: Tensor, group: Any) -> None:
        super().__init__()
        self.function, self.group = function, group if group.size() > 1 else None
        self.weight, self.bias = nn.Parameter(weight.clone()), nn.Parameter(bias.clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(x, self.weight, self.bias, self.group)


def arrived(y: Tensor) -> Tensor:
    """Waits for a collective that DTensor has left pending."""
    if isinstance(y, AsyncCollectiveTensor):
        y.wait()  # gives a tensor without a graph
    return y


def linears(group: Any) -> list[Case]:
    """The slices of the weight are equal on all ranks, so every rank's result is that of its slice alone."""
    p = group.size()
    x, grad = torch.randn(N, N, requires_grad=True), torch.randn(N, N)
    weight, bias = torch.randn(N, N), torch.randn(N)
    w, b = weight.clone().requires_grad_(), bias.clone().requires_grad_()
    plain = peers.Plain().linear(weight, bias)
    others: dict[str, Any] = {"DTensor": peers.WithDTensor(group)}
    if not megatron_on_cpu.MISSING:
        others["Megatron-core"] = peers.WithMegatron(group)
    base = "F.linear"
    cases = [
        Case("linear", base, base, lambda: F.linear(x, w, b), grad, (x, w, b)),
        Case("linear", "nn.Linear", base, lambda: plain(x), grad, (x, *plain.parameters())),
    ]
    for family, dim, function in (("column", 0, PythonColumn), ("row", 1, PythonRow)):
        full = torch.cat([weight] * p, dim)
        full_bias = torch.cat([bias] * p) if dim == 0 else bias
        layers: dict[str, nn.Module] = {"Python Function": PythonLinear(function, weight, bias, group)}
        for name, other in others.items():
            layers[name] = getattr(other, family)(full, full_bias)
        ours: Any = tp_ext.ColumnParallelLinear if dim == 0 else tp_ext.RowParallelLinear
        layers["ours"] = ours.from_linear(peers.Plain().linear(full, full_bias), group=group)
        for name, layer in layers.items():
            inputs = (x, *layer.parameters())
            call = (lambda m=layer: arrived(m(x))) if name == "DTensor" else (lambda m=layer: m(x))
            cases.append(Case(family, name, base, call, grad, inputs))  # type: ignore[misc]
    return cases


def regions(group: Any) -> list[Case]:
    x, grad = torch.randn(N, N, requires_grad=True), torch.randn(N, N)
    base, python = "x.view_as(x)", group if group.size() > 1 else None
    calls: list[tuple[str, str, Callable[[], Tensor]]] = [
        ("region", base, lambda: x.view_as(x)),
        ("copy_to", "Python Function", lambda: PythonCopy.apply(x, python)),
        ("copy_to", "ours", lambda: tp_ext.copy_to_region(x, group)),
        ("reduce_from", "Python Function", lambda: PythonReduce.apply(x, python)),
        ("reduce_from", "ours", lambda: tp_ext.reduce_from_region(x, group)),
    ]
    if not megatron_on_cpu.MISSING:
        megatron = peers.WithMegatron(group).m
        calls[2:2] = [("copy_to", "Megatron-core", lambda: megatron.copy_to_tensor_model_parallel_region(x))]
        calls[5:5] = [("reduce_from", "Megatron-core", lambda: megatron.reduce_from_tensor_model_parallel_region(x))]
    return [Case(family, name, base, call, grad, (x,)) for family, name, call in calls]


class PlainMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(N, N), nn.Linear(N, N)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class PlainAttention(nn.Module):
    """One head of 8 features, the share of a rank of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(N, 3 * N), nn.Linear(N, N)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 1, N).transpose(1, 3).unbind(2)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def blocks(group: Any) -> list[Case]:
    """Norms, MLP and attention against torch's; ours hold a rank's shard."""
    p = group.size()
    x, grad = torch.randn(N, N, requires_grad=True), torch.randn(N, N)
    x3, grad3 = torch.randn(2, 4, N, requires_grad=True), torch.randn(2, 4, N)
    pairs: list[tuple[str, str, nn.Module, nn.Module, bool]] = [
        ("RMSNorm", "nn.RMSNorm", nn.RMSNorm(N), tp_ext.RMSNorm(N, group=group), False),
        ("LayerNorm", "nn.LayerNorm", nn.LayerNorm(N), tp_ext.LayerNorm(N, group=group), False),
        ("MLP", "plain MLP", PlainMLP(), tp_ext.ParallelMLP(N, p * N, group=group), False),
        (
            "attention",
            "plain attention",
            PlainAttention(),
            tp_ext.ParallelAttention(N, p, head_dim=N, group=group),
            True,
        ),
    ]
    cases = []
    for family, base, theirs, ours, batched in pairs:
        with torch.no_grad():
            for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
                mine.copy_(other)
        a, g = (x3, grad3) if batched else (x, grad)
        for name, module in ((base, theirs), ("ours", ours)):
            inputs = (a, *module.parameters())
            cases.append(Case(family, name, base, lambda m=module, a=a: m(a), g, inputs))  # type: ignore[misc]
    return cases


def all_cases(group: Any) -> list[Case]:
    torch.manual_seed(0)
    return [*linears(group), *regions(group), *blocks(group)]
