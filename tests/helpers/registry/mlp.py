"""The MLP."""

from torch import nn

import tp_ext
from tests.helpers.oracle import ACTIVATIONS, GATED
from tests.helpers.registry.bytes import AR, F, H, S, Saved, Sent, called
from tests.helpers.registry.entries import FFN, HIDDEN, Case, Kind

CASES = {
    "mlp": Case("ParallelMLP", (HIDDEN, FFN), collectives=(2, 3)),
    "mlp_gated": Case("ParallelMLP", (HIDDEN, FFN), {"activation": "swiglu", "bias": False}, collectives=(2, 2)),
}


ERRORS = [
    ('MLP(4, 8, activation="tanh", group=g)', ValueError, "activation: 'tanh' must be one of .*swiglu"),
    ("MLP(4, -8, group=g)", ValueError, "ffn_hidden_size: -8 must be"),
    ('MLP(4, 8, activation="swiglu", group=g)(ones(3, 5))', ValueError, r"x: shape \[3, 5\]"),
]


SENT = {
    "mlp": Sent("ParallelMLP", called(tp_ext.ParallelMLP, H, F, activation="swiglu"), [(AR, S)], [(AR, S)]),
}
SAVED = {
    f"mlp {name}": Saved(
        "ParallelMLP",
        lambda name=name, **o: tp_ext.ParallelMLP(H, F, activation=name, **o),
        lambda z, wide=3 if name in GATED else 2: z.n_sp * z.h * z.e + wide * z.n * F // z.p * z.e,
    )
    for name in ACTIVATIONS
}


class ParallelMLP(nn.Module):
    def __init__(self, hidden, ffn, *, activation="gelu", bias=True, dtype=None, device=None, **_cut):
        super().__init__()
        self.activation = activation
        width = ffn * (2 if activation in GATED else 1)
        self.up = nn.Linear(hidden, width, bias, dtype=dtype, device=device)
        self.down = nn.Linear(ffn, hidden, bias, dtype=dtype, device=device)

    def forward(self, x, total_tokens=None):
        return self.down(ACTIVATIONS[self.activation](self.up(x)))


PLAIN = {"ParallelMLP": ParallelMLP}


def _mlp(r, p, dropout):
    return {"ffn": r.randint(1, 12), "activation": r.choice(list(ACTIVATIONS)), "bias": r.random() < 0.6}


class MLP(nn.Module):
    def __init__(self, options, config, place):
        super().__init__()
        make, self.tell = place.kit.ParallelMLP, place.tell
        kind = {name: options[name] for name in ("activation", "bias")}
        self.mlp = make(config["hidden"], options["ffn"], **kind, **place.linear)

    def forward(self, x):
        return self.mlp(x, **self.tell), None


KINDS = {"mlp": Kind(_mlp, MLP)}
OFF = {"activation": "relu", "bias": False}
