"""Weights that are gathered ahead are the present ones, and the same on all ranks."""

import gc
from unittest import mock

import torch

from tests.helpers.meshes import mesh_of
from tests.helpers.on_ranks import on_ranks
from tests.model.test_module_two_axes import CLOSE
from tests.model.test_module_two_axes import _mlp as mlp_of


def _write_data(weight):
    weight.data.mul_(2)


def _set_data(weight):
    weight.data = 2 * weight.data


def _write_vector(weight):
    torch.nn.utils.vector_to_parameters(2 * torch.nn.utils.parameters_to_vector([weight]), [weight])


def _write_in_place(weight):
    with torch.no_grad():
        weight.mul_(2)


WRITES = [_write_data, _set_data, _write_vector, _write_in_place]


@on_ranks(4, backend="gloo")
def test_a_weight_that_is_written_after_its_prefetch_is_gathered_again(group):
    mesh = mesh_of(2, 2, names=("x", "y"))
    for write in WRITES:
        mlp, x = mlp_of(mesh)
        for _ in range(3):  # from now on ``down`` is gathered during ``up``
            mlp(x)
        try:
            with mock.patch.object(mlp.down, "forward", side_effect=KeyError):
                mlp(x)  # ends before ``down``
        except KeyError:
            write(mlp.down.weight)
        h, bias = mlp.up(x)
        want = mlp.down(torch.nn.functional.gelu(h + bias))
        torch.testing.assert_close(mlp(x), want, msg=lambda m, w=write: f"{w.__name__}: {m}", **CLOSE)
        if write is _write_data:  # not seen within a forward (docs/guide/mesh.md)
            continue
        hook = mlp.up.register_forward_hook(lambda *_, mlp=mlp, write=write: write(mlp.down.weight))
        found = mlp(x)
        hook.remove()
        torch.testing.assert_close(found, mlp(x), **CLOSE)


@on_ranks(4, backend="gloo")
def test_layers_that_are_collected_at_other_times_on_other_ranks(group):
    """A layer in a cycle of references, replaced: one rank's is collected, the others' are not."""
    mesh = mesh_of(2, 2, names=("x", "y"))
    mlp, x = mlp_of(mesh)
    for _ in range(3):
        mlp(x).sum().backward()
    old, mlp.down = mlp.down, mlp_of(mesh, seed=4)[0].down
    old.me = lambda old=old: old
    del old
    gc.disable()
    try:
        if group.rank() == 0:
            gc.collect()
        mlp(x).sum().backward()
        total = torch.ones(3)
        torch.distributed.all_reduce(total)
    finally:
        gc.enable()
    assert total.tolist() == [4.0] * 3
