"""Norms and dropout."""

import torch
from torch import nn

import tp_ext
from tests.helpers.registry.bytes import AR, SP, E, H, Saved, Sent, called
from tests.helpers.registry.entries import HIDDEN, Case
from tests.helpers.registry.rules import Subject, key

CASES = {
    "rms_norm": Case("RMSNorm", (HIDDEN,), call={}, keeps_dtype=True),
    "layer_norm": Case("LayerNorm", (HIDDEN,), call={}, keeps_dtype=True),
    "dropout": Case("Dropout", (0.3,), dropout=True, keeps_dtype=True),
}


ERRORS = [
    ("RMSNorm((), group=g)", ValueError, r"normalized_shape: \(\) must be one or more integers"),
    ("LayerNorm([4, 0], group=g)", ValueError, r"normalized_shape: \[4, 0\] must be"),
    ("RMSNorm(4, group=g)(ones(3, 5))", ValueError, r"x: shape \(3, 5\) must end in normalized_shape = \(4,\)"),
    (
        "RMSNorm(4, group=g, **sp)(ones(3, 4), ones(4))",
        ValueError,
        r"residual: shape \(4,\) must be that of x, \(3, 4\)",
    ),
    (
        "LayerNorm(4, group=g)(ones(3, 4), ones(2, 4))",
        ValueError,
        r"residual: shape \(2, 4\) must be that of x, \(3, 4\)",
    ),
    (
        "RMSNorm(4, group=g)(ones(3, 4), ones(3, 4).double())",
        TypeError,
        "residual: dtype Double must be that of x, Float",
    ),
    (
        "LayerNorm(4, group=g)(ones(3, 4), ones(3, 4).half())",
        TypeError,
        "residual: dtype Half must be that of x, Float",
    ),
    ("LayerNorm((3, 4), group=g)(ones(4))", ValueError, r"x: shape \(4,\) must end in"),
    ("LayerNorm(4, group=g)(ids)", TypeError, "x: dtype Long must be a floating"),
    ("RMSNorm(4, group=g)(ids)", TypeError, "x: dtype .*must be a floating"),
    ("Dropout(1.5, group=g)", ValueError, r"p: 1.5 must be a probability, in \[0, 1\]: that of dropping an element"),
    ("Dropout('half')", ValueError, "p: 'half' must be a probability"),
    ("dropout(ones(4), -0.1)", ValueError, "p: -0.1 must be a probability"),
    ("dropout(ones(4), dim=1, group=g)", IndexError, r"dim: 1 must be in \[-1, 1\)"),
    ("dropout(ones(4), dim=0, group=g, sizes=[1, 2])", ValueError, r"sizes: \[1, 2\] must have one length per rank"),
    ("dropout(ones(4), bias=ones(3))", ValueError, r"bias: shape \[3\] must be .*4"),
    ("dropout(ones(4), residual=ones(3))", ValueError, r"residual: shape \[3\] must be .*4"),
    ("Dropout(0.5, group=g, **sp)(ones(4, 2), total_tokens=5)", ValueError, "total_tokens: 5 gives .* 4"),
]


def _drop(group):
    at = key(group)

    def f(x):
        torch.manual_seed(6)
        return tp_ext.dropout(x, 0.5, group=at, dim=0)

    return f


SUBJECTS = {"dropout": Subject(_drop, x_dim=0, y_dim=0)}
SENT = {
    "rms norm": Sent("RMSNorm", called(tp_ext.RMSNorm, H), []),
    "rms norm sp": Sent("RMSNorm", called(tp_ext.RMSNorm, H, own=True, **SP), [], [(AR, H * E)]),
    "layer norm sp": Sent("LayerNorm", called(tp_ext.LayerNorm, H, own=True, **SP), [], [(AR, H * E), (AR, H * E)]),
    "dropout sp": Sent("Dropout", called(tp_ext.Dropout, 0.1, own=True, **SP), []),
}
SAVED = {
    "rms norm": Saved("RMSNorm", lambda **o: tp_ext.RMSNorm(H, **o), lambda z: z.n_sp * (z.h * z.e + 4)),
    "layer norm": Saved("LayerNorm", lambda **o: tp_ext.LayerNorm(H, **o), lambda z: z.n_sp * (z.h * z.e + 8)),
    "dropout": Saved(
        "Dropout",
        lambda dtype, **o: tp_ext.Dropout(0.1, **o),
        lambda z: 8,  # a seed
        call=lambda module, x: module(x, residual=x),
    ),
}


class RMSNorm(nn.RMSNorm):
    def __init__(self, n, eps=None, elementwise_affine=True, *, dtype=None, device=None, **_cut):
        super().__init__(n, eps, elementwise_affine, dtype=dtype, device=device)


class LayerNorm(nn.LayerNorm):
    def __init__(self, n, eps=1e-5, elementwise_affine=True, bias=True, *, dtype=None, device=None, **_cut):
        super().__init__(n, eps, elementwise_affine, bias, dtype=dtype, device=device)


class Dropout(nn.Module):
    def __init__(self, p, **_cut):
        super().__init__()
        assert not p

    def forward(self, x, residual=None, total_tokens=None):
        return x if residual is None else x + residual


def dropout(x, p, training=True, *, bias=None, residual=None, **_cut):
    assert not p
    x = x if bias is None else x + bias
    return x if residual is None else x + residual


PLAIN = {"RMSNorm": RMSNorm, "LayerNorm": LayerNorm, "Dropout": Dropout, "dropout": dropout}


def draw_norm(r):
    if r.random() < 0.25:
        return None
    kind = r.choice(("RMSNorm", "LayerNorm"))
    eps = r.choice((1e-2, 0.1))  # not smaller: 1 / sqrt(eps) is what rounding grows by where a row is almost zero
    return {"kind": kind, "eps": eps, "affine": r.random() < 0.85, "bias": r.random() < 0.7}


def make_norm(options, hidden, place):
    if options is None:
        return nn.Identity()
    more = {"bias": options["bias"]} if options["kind"] == "LayerNorm" else {}
    return getattr(place.kit, options["kind"])(hidden, options["eps"], options["affine"], **more, **place.parallel)


OFF = {"affine": True, "dropout": 0.0}
