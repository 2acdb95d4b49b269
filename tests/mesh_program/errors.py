"""Bad input of programs on a mesh, for tests/repo/test_errors.py: the call, the exception, a part of its message."""

import torch
from torch import ones
from torch.distributed.device_mesh import DeviceMesh

import tp_ext
from tp_ext.mesh_program.varying import VaryingValueError


def mapped(function, spec=None, **options):
    """A map over the ranks, called with ones [4, 3] in shards of two rows."""
    mesh = DeviceMesh.from_group(torch.distributed.group.WORLD, "cpu", mesh_dim_names=("x",))
    specs = {"in_specs": spec or tp_ext.P("x"), "out_specs": tp_ext.P("x")} | options
    return tp_ext.spmd(mesh, **specs)(function)(ones(4, 3))


PROGRAMS = [
    ("spmd(3, in_specs=P(), out_specs=P())", TypeError, "mesh: int must be a DeviceMesh"),
    (
        "spmd(init_mesh('cpu'), in_specs=P('z'), out_specs=P())",
        ValueError,
        "in_specs: axis 'z' .* must be one of the axes of mesh",
    ),
    ("spmd(init_mesh('cpu'), in_specs=P(), out_specs=3)", TypeError, "out_specs: 3 must be a tp_ext.P, or a tuple"),
    ("spmd(init_mesh('cpu'), in_specs=P(), out_specs=P(), check=1)", TypeError, "check: 1 must be True or False"),
    ("mapped(lambda x: x, P(None, None, 'x'))", ValueError, r"in_specs: P\(None, None, 'x'\) has 3 dims .* most 2"),
    ("mapped(lambda x: x, (P('x'), P()))", ValueError, "in_specs: 2 specs must be as many as the values, 1"),
    ("mapped(lambda x: x, P('x').dtensor())", TypeError, "in_specs: a Tensor must be a DTensor, by P"),
    (
        "mapped(lambda x: x + 1, out_specs=P())",
        VaryingValueError,
        r"out_specs: P\(\) must name axis 'x', along which the",
    ),
    (
        "mapped(lambda x: x * x.sum().item())",
        VaryingValueError,
        "item: the value varies along 'x', and a Python number",
    ),
    (
        "mapped(lambda x: ones(3).add_(x[0]))",
        VaryingValueError,
        "add_: the tensor .* does not vary along 'x', and the value",
    ),
    ("mapped(lambda x: psum(x, 'q'))", ValueError, r"psum: axis 'q' must be one of the axes of the map, \('x',\)"),
    ("mapped(lambda x: pmean(x, 0))", TypeError, "pmean: axis 0 must be the name of an axis"),
    ("mapped(lambda x: pmax(['x'], 'x'))", TypeError, "pmax: x, a str, must be a tensor"),
    ("mapped(lambda x: pmin(['x'], 'x'))", TypeError, "pmin: x, a str, must be a tensor"),
    ("mapped(lambda x: pvary(x, ('x', 'x')))", ValueError, "pvary: axis .* must name each axis once"),
    ("mapped(lambda x: psum_scatter(x, ('x',), sizes=[1, 1]))", TypeError, "must be the name of one axis"),
    ("mapped(lambda x: all_gather(x, 'x', 5))", IndexError, "dim: 5 must be in"),
    ("mapped(lambda x: all_gather(x, 'x', 0.5))", TypeError, "all_gather: dim: 0.5 must be an integer"),
    ("mapped(lambda x: psum_scatter(x, 'x', sizes='ab'))", TypeError, "psum_scatter: sizes 'ab' must be a list"),
    ("mapped(lambda x: psum_scatter(x, 'x', sizes=[1.0, 1]))", ValueError, "psum_scatter: sizes: 1.0 must be an int"),
    (
        "mapped(lambda x: all_to_all(x, ('x',), 0, 1, [2, 0]))",
        TypeError,
        "all_to_all with sizes: axis .* must be the name",
    ),
    (
        "mapped(lambda x: ppermute(x, 'x', [(0, 2)]))",
        ValueError,
        r"perm \[\(0, 2\)\] must name each destination once, in 0",
    ),
    (
        "mapped(lambda x: ppermute(x, 'x', [(0.5, 1)]))",
        TypeError,
        r"ppermute: perm \[\(0.5, 1\)\] must be a list of pairs",
    ),
    ("mapped(lambda x: ppermute(x, 'x', [0, 1]))", TypeError, r"ppermute: perm \[0, 1\] must be a list of pairs"),
    ("mapped(lambda x: ppermute(x, 'x', [(0, 1, 2)]))", TypeError, r"ppermute: perm .* must be a list of pairs"),
    ("mapped(lambda x: axis_random('x', -1))", ValueError, "axis_random: seed -1 must not be negative"),
    ("mapped(lambda x: axis_random('x', 0.5))", TypeError, "axis_random: seed 0.5 must be an integer"),
    ("P(['x'])", TypeError, r"P: \['x'\] must be the name of an axis, a tuple of names or None"),
    ("matmul_2d(ones(2, 2), ones(4, 2), None, g, algorithm='ring')", ValueError, "algorithm: 'ring' must be 'gather'"),
    ("matmul_2d(ones(2), ones(2, 2), None, g)", ValueError, r"a, b: shapes \(2,\) and \(2, 2\) must be"),
    ("matmul_2d(ones(2, 2), ones(3, 2), None, g)", ValueError, r"b: shape \(3, 2\) must end in \(4, 2\), this rank's"),
    ("matmul_2d(ones(2, 2), ones(4, 2), None, g, shape=(2, 6, 4))", ValueError, r"a: shape \(2, 2\) must end in"),
    ("matmul_2d(ones(2, 2), ones(4, 2).double(), None, g)", TypeError, "b: dtype Double must be that of a, Float"),
    ("axis_size('x')", ValueError, "axis_size: axis 'x' needs a running map, tp_ext.spmd"),
    ("axis_index('x')", ValueError, "axis_index: axis 'x' needs a running map"),
    ("P(3)", TypeError, "P: 3 must be the name of an axis, a tuple of names or None"),
    ("P('x', 'x')", ValueError, r"P: \('x', 'x'\) must name each axis once"),
]
