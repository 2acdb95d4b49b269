"""Norms and dropout."""

from torch import nn

from tests.helpers.registry.entries import HIDDEN, Case

CASES = {
    "rms_norm": Case("RMSNorm", (HIDDEN,), call={}),
    "layer_norm": Case("LayerNorm", (HIDDEN,), call={}),
    "dropout": Case("Dropout", (0.3,), dropout=True),
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
