"""Adapters."""

from torch import nn

import tp_ext
from tests.helpers.registry.bytes import AR, E, F, H, N, S, Saved, Sent, called
from tests.helpers.registry.entries import HIDDEN
from tests.helpers.registry.rules import Subject, module

ERRORS = [
    ("LoRALinear(nn.Linear(4, 4), 2, alpha=1)", TypeError, "base: Linear must be a ColumnParallelLinear"),
    ("LoRALinear(Column(4, 4, group=g), 0, alpha=1)", ValueError, "r: 0 must be"),
    (
        "add_lora(MLP(4, 8, group=g), targets='side', r=2, alpha=1)",
        ValueError,
        r"targets: 'side' must name .*inside the model; it has \['down', 'up'\]",
    ),
    ("add_lora(nn.Linear(4, 4), targets='up', r=2, alpha=1)", ValueError, "targets: 'up' must name"),
    ("merge_lora(nn.Linear(4, 4))", ValueError, "model: Linear must hold a LoRALinear inside"),
]


def _added(group):
    model = nn.Sequential(tp_ext.ColumnParallelLinear(HIDDEN, HIDDEN, group=group))
    tp_ext.add_lora(model, targets="0", r=2, alpha=2.0)
    return model


SUBJECTS = {"LoRALinear": Subject(module(_added), y_dim=-1)}


R = 5  # the rank


def _sent(kind, *args, **options):
    return called(lambda *a, **o: tp_ext.LoRALinear(kind(*a, **o), R, alpha=1), *args, **options)


SENT = {
    "adapter column": Sent("LoRALinear", _sent(tp_ext.ColumnParallelLinear, H, F), [], [(AR, S), (AR, N * R * E)]),
    "adapter row": Sent(
        "LoRALinear",
        _sent(tp_ext.RowParallelLinear, F, H, width=F, cut=True),
        [(AR, S), (AR, N * R * E)],
    ),
}


def _saved(kind, *sizes):
    return lambda **o: tp_ext.LoRALinear(kind(*sizes, **o), R, alpha=1)


SAVED = {
    "adapter column": Saved(
        "LoRALinear",
        _saved(tp_ext.ColumnParallelLinear, H, F),
        lambda z: z.n_sp * z.h * z.e + z.n_sp * R * z.e,
    ),
    "adapter row": Saved(
        "LoRALinear",
        _saved(tp_ext.RowParallelLinear, F, H),
        lambda z: z.n * F // z.p * z.e + z.n_sp * R * z.e,
        "features",
    ),
}
