"""Small programs on a mesh with the axes x and y, each next to the same computation in one process.

    torchrun --standalone --nproc-per-node 4 examples/mesh_programs.py --mesh 2 2

prints for each program how far its value and its gradients are from those of one process. The pictures and the
explanations are in docs/guide/gallery.md.
"""

import argparse
import os
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import DeviceMesh
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import tp_ext
from tp_ext import P, lax

ALL = ("x", "y")  # both axes as one: every rank of the mesh
BLOCKS = P("x", "y")  # of a matrix: rows cut over x, columns over y
Program = Callable[..., Tensor]


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


# A product of matrices on all devices, in three ways


def matmul_by_columns(mesh: DeviceMesh) -> Program:
    """Each device has columns of b and computes those of the product."""

    @tp_ext.spmd(mesh, in_specs=(P(), P(None, ALL)), out_specs=P(None, ALL))
    def program(a: Tensor, b: Tensor) -> Tensor:
        return a @ b

    return program


def matmul_by_rows(mesh: DeviceMesh) -> Program:
    """Each device has rows of a and computes those of the product."""

    @tp_ext.spmd(mesh, in_specs=(P(ALL), P()), out_specs=P(ALL))
    def program(a: Tensor, b: Tensor) -> Tensor:
        return a @ b

    return program


def matmul_by_contraction(mesh: DeviceMesh) -> Program:
    """Each device has columns of a and the same rows of b: a part of each element's sum, which psum completes."""

    @tp_ext.spmd(mesh, in_specs=(P(None, ALL), P(ALL)), out_specs=P())
    def program(a: Tensor, b: Tensor) -> Tensor:
        return lax.psum(a @ b, ALL)

    return program


def columns_then_rows(mesh: DeviceMesh) -> Program:
    """Two layers of a network, one communication: the columns of the first product are the rows that the second
    contracts. It is a column-parallel linear, then a row-parallel one."""

    @tp_ext.spmd(mesh, in_specs=(P(), P(None, ALL), P(ALL)), out_specs=P())
    def program(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        return lax.psum((x @ w1).relu() @ w2, ALL)

    return program


# A dot product, its communication written and derived


def dot_by_psum(mesh: DeviceMesh) -> Program:
    """Each device of x has elements of both vectors; the specs and the psum say all that there is to say."""

    @tp_ext.spmd(mesh, in_specs=P("x"), out_specs=P())
    def program(a: Tensor, b: Tensor) -> Tensor:
        return lax.psum((a * b).sum(), "x")

    return program


def dot_by_derived_sharding(mesh: DeviceMesh) -> Program:
    """Only a and b are sharded: torch's DTensor derives that the sum on a device is a part, and completes it when the
    full tensor is asked for."""

    def program(a: Tensor, b: Tensor) -> Tensor:
        full = (DTensor.from_local(t, mesh["x"], [Replicate()], run_check=False) for t in (a, b))
        a, b = (t.redistribute(placements=[Shard(0)]) for t in full)
        return (a * b).sum().full_tensor()

    return program


# Networks


def network_on_two_axes(mesh: DeviceMesh, spec: P = BLOCKS) -> Program:
    """A ReLU network of two layers whose activations and weights are all cut on both axes. Each product gathers a row
    of blocks and a column of blocks; its result is cut as its input, so layers follow one another."""

    def matmul(a: Tensor, b: Tensor) -> Tensor:  # [rows / x, k / y] by [k / x, columns / y]
        return lax.all_gather(a, "y", dim=1) @ lax.all_gather(b, "x", dim=0)

    @tp_ext.spmd(mesh, in_specs=spec, out_specs=spec)
    def program(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        return matmul(matmul(x, w1).relu(), w2)

    return program


def data_parallel_loss(mesh: DeviceMesh) -> Program:
    """Data parallelism: each device has rows of the batch; that the gradient of w is summed needs no line of code."""

    @tp_ext.spmd(mesh, in_specs=(P(), P(ALL)), out_specs=P())
    def program(w: Tensor, batch: Tensor) -> Tensor:
        return lax.pmean((batch @ w).square().mean(), ALL)

    return program


def two_towers(mesh: DeviceMesh) -> Program:
    """Convolutions whose channels are cut over y, a tower on each device, and images over x. The second one sees the
    channels of its own tower, the third those of all: one exchange (Krizhevsky et al., "ImageNet Classification with
    Deep Convolutional Neural Networks", 2012)."""

    @tp_ext.spmd(mesh, in_specs=(P("x"), P("y"), P("y"), P("y")), out_specs=P("x", "y"))
    def program(images: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
        y = F.conv2d(F.conv2d(images, w1).relu(), w2).relu()
        return F.conv2d(lax.all_gather(y, "y", dim=1), w3)

    return program


def pipeline(mesh: DeviceMesh) -> Program:
    """A stage on each device of x. In each tick every stage computes on a microbatch and sends it to the next one; the
    last one's results are those of all but the first ticks, in which the pipeline fills."""

    @tp_ext.spmd(mesh, in_specs=(P(), P("x")), out_specs=P())
    def program(microbatches: Tensor, w: Tensor) -> Tensor:
        stage, stages = lax.axis_index("x"), lax.axis_size("x")
        received, results = torch.zeros_like(microbatches[0]), []
        for tick in range(len(microbatches) + stages - 1):
            first = microbatches[min(tick, len(microbatches) - 1)]
            y = (torch.where(stage == 0, first, received) @ w[0]).tanh()
            results.append(y)
            received = lax.ppermute(y, "x", [(i, i + 1) for i in range(stages - 1)])
        last = torch.where(stage == stages - 1, torch.stack(results[stages - 1 :]), 0.0)
        return lax.psum(last, "x")

    return program


# The same in one process


def dense_pipeline(microbatches: Tensor, w: Tensor) -> Tensor:
    for stage in w:
        microbatches = (microbatches @ stage).tanh()
    return microbatches


Example = tuple[Callable[[DeviceMesh], Program], Program, list[Tensor]]


def examples(x: int, y: int) -> dict[str, Example]:
    """Returns the programs by name: how to make one for a mesh, the same in one process, and arguments."""
    torch.manual_seed(0)
    a, b = random(12, 24), random(24, 48)
    network = [random(12, 24), random(24, 48) / 5, random(48, 24) / 7]
    vectors = [random(48), random(48)]
    towers = [
        random(3 * x, 2, 8, 8),
        random(4 * y, 2, 3, 3),
        random(6 * y, 4, 3, 3) / 6,
        random(2 * y, 6 * y, 3, 3) / 7,
    ]

    def dense_network(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        return (x @ w1).relu() @ w2

    def dense_towers(images: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
        return F.conv2d(F.conv2d(F.conv2d(images, w1).relu(), w2, groups=y).relu(), w3)

    return {
        "matmul by columns": (matmul_by_columns, torch.matmul, [a, b]),
        "matmul by rows": (matmul_by_rows, torch.matmul, [a, b]),
        "matmul by contraction": (matmul_by_contraction, torch.matmul, [a, b]),
        "columns, then rows": (columns_then_rows, dense_network, network),
        "dot by psum": (dot_by_psum, torch.dot, vectors),
        "dot by derived sharding": (dot_by_derived_sharding, torch.dot, vectors),
        "network on two axes": (network_on_two_axes, dense_network, network),
        "data parallelism": (data_parallel_loss, lambda w, batch: (batch @ w).square().mean(), [b, random(24, 24)]),
        "two towers": (two_towers, dense_towers, towers),
        "pipeline": (pipeline, dense_pipeline, [random(4, 3, 6), random(x, 6, 6)]),
    }


def value_and_gradients(program: Program, arguments: list[Tensor]) -> list[Tensor]:
    """Returns the value of a program and the gradients of its arguments."""
    leaves = [one.detach().clone().requires_grad_() for one in arguments]
    value = program(*leaves)
    weights = torch.arange(1.0, value.numel() + 1, dtype=value.dtype).reshape(value.shape) / value.numel()
    return [value.detach(), *torch.autograd.grad((value * weights).sum(), leaves)]


def largest_difference(example: Example, mesh: DeviceMesh) -> float:
    """Returns the largest difference between a program and the computation in one process, in value and gradients."""
    make, dense, arguments = example
    pairs = zip(value_and_gradients(make(mesh), arguments), value_and_gradients(dense, arguments), strict=True)
    return max((found - want).abs().max().item() for found, want in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mesh", type=int, nargs=2, metavar=("X", "Y"), help="ranks along x and y; default: all, 1")
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    sizes = parser.parse_args().mesh or (processes, 1)
    if sizes[0] * sizes[1] != processes:
        parser.error(f"--mesh: {sizes[0]} times {sizes[1]} must be the number of processes, {processes}")
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", tuple(sizes), mesh_dim_names=ALL)
    for name, example in examples(*sizes).items():
        difference = largest_difference(example, mesh)
        if dist.get_rank() == 0:
            print(f"{name:24} differs by {difference:.0e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
