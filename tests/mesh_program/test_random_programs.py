"""Random programs on a mesh have the values and gradients of an interpreter of all ranks in one process."""

import pytest
import torch

import tp_ext
from tests.helpers import ranks
from tests.helpers.meshes import mesh_of
from tests.mesh_program.programs import ARGUMENTS, N, draw, interpret, run

MESHES = [{"x": 1, "y": 1}, {"x": 2, "y": 1}, {"x": 1, "y": 3}, {"x": 2, "y": 2}]
SEEDS = 50


def _compare(group, sizes, seeds, compiled):
    mesh = mesh_of(*sizes.values(), names=tuple(sizes))
    for seed in seeds:
        in_specs, steps, out_spec = draw(seed, sizes)
        torch.manual_seed(seed)
        values = [torch.randn(N, N, dtype=torch.float64, requires_grad=True) for _ in range(ARGUMENTS)]
        mapped = tp_ext.spmd(mesh, in_specs=tuple(in_specs), out_specs=out_spec)(lambda *v, steps=steps: run(steps, v))
        if compiled:
            mapped = torch.compile(mapped, fullgraph=True, backend="aot_eager")
        found, want = mapped(*values), interpret(in_specs, steps, out_spec, values, sizes)
        weights = torch.randn_like(want)
        both = [torch.autograd.grad((one * weights).sum(), values, materialize_grads=True) for one in (found, want)]
        program = f"seed {seed}: {in_specs} {steps} {out_spec}"
        torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12, msg=lambda m, p=program: f"{p}\n{m}")
        for one, other in zip(*both, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11, msg=lambda m, p=program: f"{p}\n{m}")


@pytest.mark.parametrize("sizes", MESHES, ids=lambda sizes: "x".join(map(str, sizes.values())))
def test_values_and_gradients(sizes):
    ranks.run(_compare, sizes["x"] * sizes["y"], sizes, range(SEEDS), False, timeout=300)


def test_compiled():
    ranks.run(_compare, 2, {"x": 2, "y": 1}, range(3), True, timeout=300)
