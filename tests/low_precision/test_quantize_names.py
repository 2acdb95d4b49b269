"""Arguments that choose layers: other ones on another rank are an error on all ranks, before anything changes."""

import pytest
from torch import nn

import tp_ext
from tests.helpers import ranks
from tp_ext.low_precision import float8, quantize_

BAD = 1


def _fewer(bad):
    return lambda name, layer: not (bad and name.startswith("0"))


def _none(bad):
    return lambda name, layer: not bad


def _raising(bad):
    def choose(name, layer):
        if bad:
            raise ValueError(f"filter of {name}")
        return True

    return choose


NAMED = r"filter: must name the same layers on all ranks, and '0.up' is named on ranks \[0, 2\] alone of the 3 ranks"
TARGETS = r"targets: must name the same layers on all ranks, and '0.down' is named on ranks \[0, 2\] alone"
CALLS = {
    "quantize_": (lambda m, bad: quantize_(m, "int8", filter=_fewer(bad)), NAMED),
    "quantize_, int4": (lambda m, bad: quantize_(m, "int4", block=2, filter=_fewer(bad)), NAMED),
    "quantize_, none": (lambda m, bad: quantize_(m, "int8", filter=_none(bad)), "must have a linear to quantise"),
    "quantize_, an error": (lambda m, bad: quantize_(m, "int8", filter=_raising(bad)), "filter of 0.up"),
    "float8": (lambda m, bad: float8(m, filter=_fewer(bad)), NAMED),
    "float8, none": (lambda m, bad: float8(m, filter=_none(bad)), "must have a linear to convert to float8"),
    "float8, an error": (lambda m, bad: float8(m, filter=_raising(bad)), "filter of 0.up"),
    "add_lora": (
        lambda m, bad: tp_ext.add_lora(m, targets=["up"] if bad else ["up", "down"], r=2, alpha=2.0),
        TARGETS,
    ),
    "add_lora, misspelled": (
        lambda m, bad: tp_ext.add_lora(m, targets="upp" if bad else "up", r=2, alpha=2.0),
        "targets: 'upp' must name",
    ),
}


def _call(group, name):
    model = nn.Sequential(*(tp_ext.ParallelMLP(12, 12, group=group) for _ in range(2)))
    kinds = [type(module) for module in model.modules()]
    try:
        CALLS[name][0](model, group.rank() == BAD)
    finally:
        assert [type(module) for module in model.modules()] == kinds
        assert all(param.requires_grad for param in model.parameters())
        assert all(getattr(module, "float8", None) is None for module in model.modules())


@pytest.mark.parametrize("name", CALLS)
def test_other_layers_on_another_rank(name):
    ranks.run_raises(_call, 3, ValueError, CALLS[name][1], name, in_turns=False)
