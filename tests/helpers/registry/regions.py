"""Regions, programs on a mesh, and functions of a model."""

import torch
from torch import nn

import tp_ext
from tests.helpers.registry.bytes import A2A, AG, AR, RS, E, F, H, N, S, Sent
from tests.helpers.registry.entries import HIDDEN
from tests.helpers.registry.rules import Subject, key, module
from tests.mesh_program.subjects import mapped, mapped_sum, product


def _subject(name, **options):
    def make(group):
        at = key(group)
        return lambda x: getattr(tp_ext, name)(x, at, **options)

    return make


def _coalesced(group):
    model = nn.Sequential(tp_ext.RowParallelLinear(HIDDEN, HIDDEN, group=group, sequence_parallel=True))
    tp_ext.coalesce_gradients(model)
    return model


def _norm_of_gradients(name):
    def make(group):
        layer, at = tp_ext.RMSNorm(HIDDEN, group=group), key(group)

        def f(x):
            layer.weight.grad = None
            layer.to(x.dtype).weight.grad = x
            options = {"max_norm": 1.0} if name == "clip_grad_norm_" else {}
            return getattr(tp_ext, name)(layer, **options, group=at)

        return f

    return make


_SAME, _ROWS = tp_ext.P(), tp_ext.P("x")
SUBJECTS = {
    "copy_to_region": Subject(_subject("copy_to_region")),
    "reduce_from_region": Subject(_subject("reduce_from_region"), times_p=True),
    "scatter_to_region": Subject(_subject("scatter_to_region"), y_dim=-1),
    "gather_from_region": Subject(_subject("gather_from_region"), x_dim=-1),
    "all_gather_region": Subject(_subject("all_gather_region"), x_dim=0),
    "reduce_scatter_region": Subject(_subject("reduce_scatter_region"), y_dim=0, times_p=True),
    "all_to_all_region": Subject(_subject("all_to_all_region", split_dim=0, concat_dim=1), x_dim=1, y_dim=0),
    "matmul_2d": Subject(product, x_dim=-1, y_dim=-1),
    "spmd": Subject(mapped_sum),
    "psum": Subject(mapped("psum", _SAME, _SAME), times_p=True),
    "pmean": Subject(mapped("pmean", _SAME, _SAME)),
    "pmax": Subject(mapped("pmax", _SAME, _SAME)),
    "pmin": Subject(mapped("pmin", _SAME, _SAME)),
    "pvary": Subject(mapped("pvary", _SAME, _ROWS)),
    "psum_scatter": Subject(mapped("psum_scatter", _SAME, _ROWS), y_dim=0, times_p=True),
    "all_gather": Subject(mapped("all_gather", _ROWS, _ROWS), x_dim=0),
    "all_to_all": Subject(mapped("all_to_all", _ROWS, _ROWS, 0, 1), x_dim=1, y_dim=0),
    "ppermute": Subject(
        mapped("ppermute", _ROWS, _ROWS, [(0, 1), (1, 0)], unsharded=lambda x: x.roll(len(x) // 2, 0)),
        x_dim=0,
        y_dim=0,
    ),
    "coalesce_gradients": Subject(module(_coalesced), x_dim=-1, y_dim=0),
    "grad_norm": Subject(_norm_of_gradients("grad_norm"), (HIDDEN,)),
    "clip_grad_norm_": Subject(_norm_of_gradients("clip_grad_norm_"), (HIDDEN,)),
}


def _region(name, forward, backward, *args):
    def make(g):
        x = torch.randn(N, H, requires_grad=True)
        return lambda: getattr(tp_ext, name)(x, g, *args)

    return Sent(name, make, forward, backward)


def _norm(g):
    model = tp_ext.ParallelMLP(H, F, group=g)
    model(torch.ones(2, H)).sum().backward()
    return lambda: tp_ext.clip_grad_norm_(model, 1.0)


def _full(g):
    model = tp_ext.ColumnParallelLinear(H, F, group=g)
    return lambda: tp_ext.full_state_dict(model)["weight"]


SENT = {
    "copy_to": _region("copy_to_region", [], [(AR, S)]),
    "reduce_from": _region("reduce_from_region", [(AR, S)], []),
    "scatter_to": _region("scatter_to_region", [], [(AG, S)]),
    "gather_from": _region("gather_from_region", lambda p: [(AG, p * S)], []),
    "all_gather": _region("all_gather_region", lambda p: [(AG, p * S)], lambda p: [(RS, p * S)]),
    "reduce_scatter": _region("reduce_scatter_region", [(RS, S)], [(AG, S)]),
    "all_to_all": _region("all_to_all_region", [(A2A, S)], [(A2A, S)], 0, 1),
    "clip_grad_norm_": Sent("clip_grad_norm_", _norm, [(AR, 8)]),
    "full_state_dict": Sent("full_state_dict", _full, [(AG, F * H * E), (AG, F * E), (AR, 16)]),
}
