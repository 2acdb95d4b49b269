"""Quantised weights in files: refused by the tensor's name and dtype on all ranks by every way of loading, and nothing
is loaded. Plain dtypes, wider or narrower, are cast as before."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import tp_ext
from tests.helpers.ranks import run, run_raises
from tp_ext.checkpoint.files.saved_dtypes import refuse_quantised

FP8 = torch.float8_e4m3fn
WEIGHT = "0.weight"


def model_of(group, dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(
        tp_ext.ColumnParallelLinear(8, 16, group=group, dtype=dtype),
        tp_ext.RowParallelLinear(16, 8, group=group, dtype=dtype),
    )


def dense():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)).state_dict()


def of(others):
    """The state with other tensors; None: without."""
    state = dense() | others
    return {name: value for name, value in state.items() if value is not None}


CODES = {
    "block FP8": (of({WEIGHT: torch.zeros(16, 8).to(FP8), "0.weight_scale_inv": torch.ones(1, 1)}), "scale_inv"),
    "FP8 without scales": (of({WEIGHT: torch.zeros(16, 8).to(FP8)}), "0.weight' has dtype torch.float8_e4m3fn"),
    "e5m2": (of({WEIGHT: torch.zeros(16, 8).to(torch.float8_e5m2)}), "0.weight' has dtype torch.float8_e5m2 and must"),
    "int8": (of({WEIGHT: torch.zeros(16, 8).char(), "0.SCB": torch.ones(16)}), "'0.SCB' is a part of a quantised"),
    "int8 without scales": (of({WEIGHT: torch.zeros(16, 8).char()}), "0.weight' has dtype torch.int8 and must be of"),
    "bool": (of({"1.bias": torch.zeros(8, dtype=torch.bool)}), "1.bias' has dtype torch.bool and must be of the kind"),
    "ModelOpt": (of({"0.input_scale": torch.ones(())}), "'0.input_scale' is a part of a quantised weight"),
    "compressed-tensors": (of({"0.weight_scale": torch.ones(16, 1)}), "'0.weight_scale' is a part of a quantised"),
    "GPTQ": (
        of({WEIGHT: None, "0.qweight": torch.zeros(1, 16).int(), "0.scales": torch.ones(1, 16)}), "'0.qweight' is a",
    ),
    "NF4": (of({WEIGHT: torch.zeros(64, 1).byte(), "0.weight.absmax": torch.ones(2)}), "'0.weight.absmax' is a part"),
    "MXFP4": (
        of({WEIGHT: None, "0.weight_blocks": torch.zeros(1).byte(), "0.weight_scales": torch.ones(1).byte()}),
        "'0.weight_blocks' is a part",
    ),
}  # fmt: skip


def load(group, way, path, strict):
    model = model_of(group)
    before = [param.detach().clone() for param in model.parameters()]
    try:
        if way == "safetensors":
            tp_ext.load_safetensors(path, model, strict=strict)
        else:
            tp_ext.load_full_state_dict(
                model, torch.load(path, weights_only=True), strict=strict, broadcast_from_rank0=way == "broadcast"
            )
    except Exception:
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)), "partly loaded"
        raise


@pytest.mark.parametrize("way", ["safetensors", "full", "broadcast"])
def test_codes_are_refused(way, tmp_path):
    for name, (state, match) in CODES.items():
        path = tmp_path / f"{name}.{way}"
        save_file(state, path) if way == "safetensors" else torch.save(state, path)
        for strict in (True, False):
            run_raises(load, 2, ValueError, f"{match}.*dequantise the weights", way, path, strict, in_turns=False)


def as_saved(group, path):
    """A checkpoint whose first weight has another dtype."""
    model = model_of(group)
    model[0].weight.data = model[0].weight.data.to(FP8)
    tp_ext.save_checkpoint(path, model)


def load_checkpoint(group, path):
    model = model_of(group)
    before = model[1].weight.detach().clone()
    try:
        tp_ext.load_checkpoint(path, model)
    finally:
        assert torch.equal(model[1].weight, before)


def test_checkpoints(tmp_path):
    run(as_saved, 2, tmp_path / "x")
    match = r"checkpoint: 'model\.0\.weight' has dtype torch\.float8_e4m3fn and must be of the kind of torch\.float32"
    run_raises(load_checkpoint, 2, ValueError, match, tmp_path / "x", in_turns=False)


def test_names_that_plain_models_have():
    model = ["layers.0.up.weight", "layers.0.up.bias", "experts.gate_up_proj", "logit_bias"]
    for other in (
        "logit_scale", "layers.0.scale", "layers.0.layer_scale.lambda1", "layers.0.norm.scale", "norm.scales",
        "attn.k_scale", "text_blocks", "blocks.0.weight", "packed", "layers.0.up.lora_A.weight",
    ):  # fmt: skip
        refuse_quantised([*model, other], model, "path")
    refuse_quantised(["a.weight_scale"], ["prefix.a.weight_scale"], "path")
    for other in (
        "layers.0.up.weight_scale_inv", "layers.0.up.weight_scale_2", "experts.gate_up_proj_scales",
        "experts.gate_up_proj_blocks", "experts.gate_up_proj_scale_inv", "layers.0.up.weight_scales",
        "layers.0.up.weight.quant_state.bitsandbytes__nf4", "layers.0.up.qzeros", "layers.0.up.weight_packed",
    ):  # fmt: skip
        with pytest.raises(ValueError, match="is a part of a quantised weight, which would be dropped"):
            refuse_quantised([*model, other], model, "path")


@pytest.mark.parametrize("saved", [torch.float64, torch.bfloat16, torch.float16])
def test_plain_floats_are_cast(saved, tmp_path):
    state = {name: value.to(saved) for name, value in dense().items()}
    save_file(state, tmp_path / "x.safetensors")
    for way in (
        lambda m: tp_ext.load_safetensors(tmp_path / "x.safetensors", m),
        lambda m: tp_ext.load_full_state_dict(m, state),
    ):
        model = model_of(None)
        way(model)
        assert all(torch.equal(value, state[name].float()) for name, value in model.state_dict().items())
