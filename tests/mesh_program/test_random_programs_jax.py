"""Random programs on a mesh have the values and gradients that JAX's ``shard_map`` gives them, if ``jax`` is installed.

Left out are the steps that JAX has not: gradients of ``pmax``, and a gather whose result it takes for invariant.
"""

import importlib.util
import os

import pytest
import torch

import tp_ext
from tests.helpers import ranks
from tests.helpers.meshes import mesh_of
from tests.mesh_program.programs import ARGUMENTS, N, draw, run
from tests.mesh_program.test_random_programs import MESHES

pytestmark = pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="needs jax")
PROGRAMS = 50
NOT_IN_JAX = {"pmax", "gather_invariant"}


def _programs(sizes):
    """The first programs that JAX can express."""
    seeds = (seed for seed in range(10**6) if not NOT_IN_JAX & {kind for kind, *_ in draw(seed, sizes)[1]})
    return [next(seeds) for _ in range(PROGRAMS)]


def _arguments(seed):
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(N, N, dtype=torch.float64, generator=generator) for _ in range(ARGUMENTS)]
    return [one.requires_grad_() for one in drawn]


def _cotangent(shape):
    return torch.arange(shape[0] * shape[1], dtype=torch.float64).cos().view(*shape)


def _ours(group, sizes):
    mesh = mesh_of(*sizes.values(), names=tuple(sizes))
    found = []
    for seed in _programs(sizes):
        in_specs, steps, out_spec = draw(seed, sizes)
        values = _arguments(seed)
        mapped = tp_ext.spmd(mesh, in_specs=tuple(in_specs), out_specs=out_spec)(lambda *v, steps=steps: run(steps, v))
        y = mapped(*values)
        gradients = torch.autograd.grad(y, values, _cotangent(y.shape), materialize_grads=True)
        found.append([y.detach(), *gradients])
    return found


def _jax(sizes):
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={sizes['x'] * sizes['y']}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    import numpy as np
    from jax import lax

    jax.config.update("jax_enable_x64", True)
    calls = {
        "mul": lambda stack, x, axis, argument: x * stack[argument],
        "add": lambda stack, x, axis, argument: x + stack[argument],
        "matmul": lambda stack, x, axis, argument: x @ stack[argument] / N,
        "tanh": lambda stack, x, axis, argument: jax.numpy.tanh(x),
        "transpose": lambda stack, x, axis, argument: x.T,
        "psum": lambda stack, x, axis, argument: lax.psum(x, axis),
        "pmean": lambda stack, x, axis, argument: lax.pmean(x, axis),
        "psum_scatter": lambda stack, x, axis, argument: lax.psum_scatter(
            x, axis, scatter_dimension=argument, tiled=True
        ),
        "all_gather": lambda stack, x, axis, argument: lax.all_gather(x, axis, axis=argument, tiled=True),
        "all_to_all": lambda stack, x, axis, argument: lax.all_to_all(x, axis, argument, 1 - argument, tiled=True),
        "ppermute": lambda stack, x, axis, argument: lax.ppermute(x, axis, argument),
        "index": lambda stack, x, axis, argument: x * (lax.axis_index(axis) + 1),
        "pvary": lambda stack, x, axis, argument: x + 0 * lax.axis_index(axis),  # its pcast refuses values that vary
    }
    devices = np.array(jax.devices()).reshape(*sizes.values())
    mesh, found = jax.sharding.Mesh(devices, tuple(sizes)), []
    for seed in _programs(sizes):
        in_specs, steps, out_spec = draw(seed, sizes)
        values = _arguments(seed)

        def program(*stack, steps=steps):
            stack = list(stack)
            for kind, k, axis, argument in steps:
                stack.append(calls[kind](stack, stack[k], axis, argument))
            return stack[-1]

        specs = [jax.sharding.PartitionSpec(*spec.dims) for spec in (*in_specs, out_spec)]
        mapped = jax.shard_map(program, mesh=mesh, in_specs=tuple(specs[:-1]), out_specs=specs[-1])
        inputs = [value.detach().numpy() for value in values]
        y, pullback = jax.vjp(jax.jit(mapped), *inputs)
        gradients = pullback(_cotangent(y.shape).numpy())
        found.append([torch.from_numpy(np.array(one)) for one in (y, *gradients)])
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("sizes", MESHES, ids=lambda sizes: "x".join(map(str, sizes.values())))
def test_values_and_gradients(sizes):
    want = ranks.run_fresh(_jax, sizes, timeout=1200)
    for found in ranks.run(_ours, sizes["x"] * sizes["y"], sizes, timeout=600):
        for seed, one, other in zip(_programs(sizes), found, want, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11, msg=lambda m, s=seed: f"seed {s}\n{m}")
