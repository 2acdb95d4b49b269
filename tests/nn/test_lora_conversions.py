"""Conversions in place, of layers whose weights are computed, tied, on meta, converted or wrapped: right or refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize, prune, spectral_norm, weight_norm

import tp_ext
from tests.helpers.on_ranks import on_ranks
from tp_ext.low_precision import float8, quantize_


class Half(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2


def _masked(layer: nn.Module, name: str) -> None:
    prune.custom_from_mask(layer, name, torch.arange(getattr(layer, name).numel()).view(getattr(layer, name).shape) % 2)


def _tied(model: nn.Module) -> None:
    model[1].weight = model[0].weight


STATES: dict[str, Callable[[Any], Any]] = {
    "weight_norm": lambda model: weight_norm(model[0]),
    "spectral_norm": lambda model: spectral_norm(model[0]),
    "pruned": lambda model: _masked(model[0], "weight"),
    "parametrized": lambda model: parametrize.register_parametrization(model[0], "weight", Half()),
    "pruned bias": lambda model: _masked(model[0], "bias"),
    "parametrized bias": lambda model: parametrize.register_parametrization(model[0], "bias", Half()),
    "tied": _tied,
    "meta": lambda model: model.to("meta"),
    "int8": lambda model: quantize_(model, "int8"),
}
CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "quantize_": lambda model: quantize_(model, "int8", filter=lambda name, _: name == "0"),
    "float8": lambda model: float8(model, filter=lambda name, _: name == "0"),
    "from_linear": lambda model: tp_ext.ColumnParallelLinear.from_linear(model[0], group=None),
    "head": lambda model: tp_ext.VocabParallelLMHead.from_linear(model[0], group=None),
    "merge_lora": lambda model: (
        tp_ext.add_lora(model, targets=["0", "1"], r=2, alpha=4.0),
        nn.init.ones_(model[0].lora_B.weight),
        tp_ext.merge_lora(model),
    ),
}
COMPUTED, LEFT_OUT = "weight: must be a parameter, and is computed", "must have a linear to"
COMPUTED_BIAS = r"linear.bias: must be a parameter, and is computed"
ERRORS: dict[tuple[str, str], str] = {
    **{
        (state, how): COMPUTED
        for state in list(STATES)[:4]
        for how in ("quantize_", "from_linear", "head", "merge_lora")
    },
    **{
        (state, how): COMPUTED_BIAS for state in ("pruned bias", "parametrized bias") for how in ("from_linear", "head")
    },
    **{("tied", how): LEFT_OUT for how in ("quantize_", "float8")},
    ("tied", "merge_lora"): "0: its weight is another layer's, too",
    ("meta", "quantize_"): "0.weight: is on meta, and must have values",
    ("int8", "quantize_"): "0.weight: must not be quantised already",
    ("int8", "float8"): "must not be converted or quantised already",
    ("int8", "merge_lora"): "its weight was quantised",
    **{("int8", how): COMPUTED for how in ("from_linear", "head")},
}


@pytest.mark.parametrize("how", CONVERSIONS)
@pytest.mark.parametrize("state", STATES)
def test_conversions_are_right_or_refused(state: str, how: str) -> None:
    torch.manual_seed(0)
    # From dense layers, or of ours
    makes = (
        nn.Linear if how in ("from_linear", "head") else lambda *sizes: tp_ext.ColumnParallelLinear(*sizes, group=None)
    )
    model, x = nn.Sequential(makes(32, 32), makes(32, 32)), torch.randn(3, 32)
    STATES[state](model)
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    if (state, how) in ERRORS:
        with pytest.raises(ValueError, match=ERRORS[state, how]):
            CONVERSIONS[how](model)
        if how != "merge_lora":
            assert names == [name for name, _ in model.named_parameters(remove_duplicate=False)]
        return
    expected = model(x) if state != "meta" else x
    layer = CONVERSIONS[how](model)
    if state == "meta":
        return
    y = layer(x) if how in ("from_linear", "head") else model(x)
    if how == "merge_lora":
        assert (y - expected).abs().max() > 0.01  # merged, and the next forward has it
    else:
        bound = {"quantize_": 0.03, "float8": 0.2}.get(how, 1e-6)
        torch.testing.assert_close(
            y, model[0](x) if how in ("from_linear", "head") else expected, atol=bound, rtol=bound
        )


@on_ranks(2)
def test_what_changes_parameters_is_refused_in_wrappers(group: Any) -> None:
    def make() -> nn.Sequential:
        return nn.Sequential(*(tp_ext.ColumnParallelLinear(32, 32, group=None) for _ in range(2)))

    def adapt(model: nn.Module) -> None:
        tp_ext.add_lora(model, targets="*", r=2, alpha=4.0)

    for convert in (adapt, lambda model: quantize_(model, "int8")):
        model = DistributedDataParallel(make())
        with pytest.raises(ValueError, match="model: has DistributedDataParallel inside"):
            convert(model)
        sharded: Any = make()
        fully_shard(sharded)
        with pytest.raises(ValueError, match=r"sharded by FSDP2|DTensor"):
            convert(sharded)
