"""An MLP sharded on both axes of a (2, 2) mesh, forward and backward, on 4 ranks: ours, FSDP2 with DTensor, JAX.

y = gelu(x W^T) V^T (tanh form) with hidden h, inner size 4 h and 1024 rows in fp32. Rows of x and y are sharded over x,
features over y, the weights over both; so are the gradients. "FSDP2 + DTensor": ``fully_shard`` over x of a
``parallelize_module`` over y. "JAX": XLA's partitioner on four host devices of one process, from shardings of the
arguments and results, if ``jax`` is installed. "no resharding": ``reshard_after_forward=False``; JAX also keeps what it
gathered. "dense" is torch in one process, while the others wait. y and all gradients are compared with dense before any
measurement.

``kept_MiB``: what a rank holds between forward and backward, its shards of the weights and all that backward will use,
x included; of JAX, the arrays of ``jax.vjp``'s pullback on one device. ``step_MiB``: arguments, results and temporaries
of JAX's compiled step on one device, by its ``memory_analysis()``; eager programs have none.
"""

import functools
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import tp_ext
from benchmarks.lib import interleave, report
from benchmarks.lib.harness import TOLERANCE
from benchmarks.lib.report import Record
from tests.helpers import ranks

X, Y = 2, 2
RANKS, ROWS = X * Y, 1024
Results = list[Tensor]


class MLP(nn.Module):
    def __init__(self, h: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(h, 4 * h, bias=False), nn.Linear(4 * h, h, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(x), approximate="tanh"))
        return y


@functools.cache
def inputs(h: int) -> tuple[Tensor, ...]:
    """up, down, x and the gradient of y."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(4 * h, h), (h, 4 * h), (ROWS, h), (ROWS, h)]
    scales = [h**-0.5, (4 * h) ** -0.5, 1.0, 1.0]
    return tuple(torch.randn(shape, generator=generator) * scale for shape, scale in zip(shapes, scales, strict=True))


def step_of(mlp: nn.Module, x: Tensor, grad: Tensor) -> Callable[[], Results]:
    """Forward and backward: y, dx and the gradients of the weights."""
    x = x.clone().requires_grad_()
    tensors = [x, *mlp.parameters()]

    def step() -> Results:
        for tensor in tensors:
            tensor.grad = None
        y = mlp(x)
        y.backward(grad)
        return [y.detach(), *(t.grad for t in tensors if t.grad is not None)]

    return step


@functools.cache
def dense(h: int) -> Callable[[], Results]:
    mlp = MLP(h)
    with torch.no_grad():
        mlp.up.weight.copy_(inputs(h)[0]), mlp.down.weight.copy_(inputs(h)[1])
    return step_of(mlp, *inputs(h)[2:])


@functools.cache
def mesh_on(backend: str) -> Any:
    """On a rank."""
    options = None if backend == "gloo" else dict.fromkeys(("x", "y"), (backend, None))
    return dist.init_device_mesh("cpu", (X, Y), mesh_dim_names=("x", "y"), backend_override=options)


def shard(full: Tensor, mesh: Any, rows: str, columns: str) -> Tensor:
    """This rank's block."""
    for dim, axis in enumerate((rows, columns)):
        full = full.chunk(mesh[axis].size(), dim)[mesh[axis].get_local_rank()]
    return full.contiguous()


def ours(h: int, mesh: Any, **options: Any) -> nn.Module:
    axes: dict[str, Any] = {"group": mesh["y"], "weight_group": mesh["x"], "activations": "hidden", **options}
    mlp = tp_ext.ParallelMLP(h, 4 * h, activation="gelu_tanh", bias=False, **axes)
    tp_ext.load_full_state_dict(mlp, {"up.weight": inputs(h)[0], "down.weight": inputs(h)[1]})
    return mlp


def with_dtensor(h: int, mesh: Any) -> nn.Module:
    mlp = MLP(h)
    with torch.no_grad():
        mlp.up.weight.copy_(inputs(h)[0]), mlp.down.weight.copy_(inputs(h)[1])
    plan = {
        "up": ColwiseParallel(input_layouts=Shard(-1)),
        "down": RowwiseParallel(output_layouts=Shard(-1)),
    }
    mlp = parallelize_module(mlp, mesh["y"], plan)
    for layer in (mlp.up, mlp.down, mlp):
        fully_shard(layer, mesh=mesh["x"])
    return mlp


MODULES: dict[str, Callable[[int, Any], nn.Module]] = {
    "FSDP2 + DTensor": with_dtensor,
    "ours": ours,
    "ours, no resharding": functools.partial(ours, reshard_after_forward=False),
}


@functools.cache
def on_rank(h: int, name: str, backend: str) -> Callable[[], Results]:
    """On a rank: a step, checked."""
    mesh = mesh_on(backend)
    x, grad = (shard(t, mesh, "x", "y") for t in inputs(h)[2:])
    mlp = MODULES[name](h, mesh)
    step = step_of(mlp, x, grad)
    found = [t.full_tensor() if isinstance(t, DTensor) else t for t in step()]
    y, dx, up, down = dense(h)()
    wants = [shard(y, mesh, "x", "y"), shard(dx, mesh, "x", "y"), up / X, down / X]  # FSDP2 averages over x
    if name != "FSDP2 + DTensor":
        wants[2:] = [shard(up, mesh, "y", "x"), shard(down, mesh, "x", "y")]
    for got, want in zip(found, wants, strict=True):
        error = ((got - want).norm() / want.norm()).item()
        assert error <= TOLERANCE[torch.float32], f"{name} is off by {error:.1e} of its norm"
    dist.barrier()
    return step


def kept(mlp: nn.Module, x: Tensor) -> int:
    """Bytes between forward and backward, each storage once."""
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = mlp(x.clone().requires_grad_())
    held = [t.to_local() if isinstance(t, DTensor) else t for t in (*saved, *mlp.parameters())]
    size = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}.values())
    y.sum().backward()
    return size


def kept_on_rank(group: dist.ProcessGroup, h: int, name: str, backend: str) -> int:
    """On a rank: :func:`kept` of a new module."""
    mesh = mesh_on(backend)
    return kept(MODULES[name](h, mesh), shard(inputs(h)[2], mesh, "x", "y"))


@functools.cache
def in_jax(h: int) -> tuple[Callable[[], object], int, int]:
    """The same in JAX, whose devices must be set up before its first import in this process, and its bytes kept and of
    the step."""
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={RANKS}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = Mesh(np.array(jax.devices()).reshape(X, Y), ("x", "y"))
    specs = [P("y", "x"), P("x", "y"), P("x", "y"), P("x", "y")]
    placed = [NamedSharding(mesh, spec) for spec in specs]
    arguments = [jax.device_put(t.numpy(), sharding) for t, sharding in zip(inputs(h), placed, strict=True)]

    def mlp(up: Any, down: Any, x: Any) -> Any:
        return jax.nn.gelu(x @ up.T, approximate=True) @ down.T

    def both(up: Any, down: Any, x: Any, grad: Any) -> Any:
        y, backward = jax.vjp(mlp, up, down, x)
        d_up, d_down, dx = backward(grad)
        return y, dx, d_up, d_down

    jitted = jax.jit(both, out_shardings=(placed[2], placed[2], placed[0], placed[1]))
    compiled = jitted.lower(*arguments).compile()
    for got, want in zip(compiled(*arguments), dense(h)(), strict=True):
        error = float(np.linalg.norm(np.asarray(got) - want.numpy()) / want.norm())
        assert error <= TOLERANCE[torch.float32], f"JAX is off by {error:.1e} of its norm"
    _, pullback = jax.jit(functools.partial(jax.vjp, mlp))(*arguments[:3])
    held = [array.addressable_shards[0].data.nbytes for array in (*arguments[:2], *jax.tree.leaves(pullback))]
    memory = compiled.memory_analysis()
    whole = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    return lambda: jax.block_until_ready(compiled(*arguments)), sum(held), whole


def measure(h: int, seconds: float, block: float) -> list[Record]:
    cores = interleave.cores()
    interleave.pin_ranks(RANKS, cores, len(cores) >= RANKS)
    subjects = {
        "dense, 1 thread": interleave.here(dense(h), 1, cores[:1]),
        "dense, all cores": interleave.here(dense(h), len(cores), cores),
    }
    held = dict.fromkeys(subjects, kept(MLP(h), inputs(h)[2]))
    whole: dict[str, int] = {}
    if importlib.util.find_spec("jax"):
        step, held["JAX"], whole["JAX"] = in_jax(h)
        subjects["JAX"] = interleave.here(step, 1, cores)
    for name in MODULES:
        for backend in interleave.BACKENDS:
            case = f"{name}, {backend}"
            subjects[case] = interleave.on_ranks(RANKS, on_rank, h, name, backend)
            held[case] = max(ranks.run(kept_on_rank, RANKS, h, name, backend))
    times = interleave.take(subjects, seconds, block, turns=3 if seconds else 1)
    return interleave.rows(
        times,
        {"hidden": h},
        lambda of, name: {
            "times_fsdp2": of["FSDP2 + DTensor, gloo"] / of[name],
            "kept_MiB": held[name] / 2**20,
            "step_MiB": whole[name] / 2**20 if name in whole else None,
        },
    )


draw = report.bars(
    f"MLP of {{hidden}} features on {RANKS} ranks", "times_fsdp2", "times as fast as FSDP2 + DTensor over gloo, medians"
)


def main() -> None:
    packages = ["jax"] if importlib.util.find_spec("jax") else []
    report.run(__file__, __doc__, lambda quick: [64] if quick else [256, 512, 1024], measure, draw, *packages)


if __name__ == "__main__":
    main()
