"""Adapters in the files of PEFT: read by p ranks, next to the merged model in one process; written byte by byte."""

import json
import re
import shutil

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file

import tp_ext
from tests.auto.architectures import build
from tests.auto.compare import only_doubles
from tests.helpers.one_plan import run
from tp_ext import huggingface

transformers.utils.logging.disable_progress_bar()
R, ALPHA = 6, 9
LAYERS = [
    f"model.layers.{i}.{name}" for i in (0, 1) for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj")
]
IDS = torch.arange(4, 18).view(2, 7)


@pytest.fixture
def folder(tmp_path):
    """A model, and an adapter of PEFT's format for it, in fp64."""
    torch.manual_seed(0)
    model = build("llama")[0].double()
    model.save_pretrained(tmp_path / "model")
    tensors = {}
    for name in LAYERS:
        linear = model.get_submodule(name)
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(R, linear.in_features).double()
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(linear.out_features, R).double()
    (tmp_path / "adapter").mkdir()
    save_file(tensors, tmp_path / "adapter" / "adapter_model.safetensors", metadata={"format": "pt"})
    _set(tmp_path / "adapter")
    return tmp_path


def _set(adapter, **options):
    config = {
        "peft_type": "LORA", "r": R, "lora_alpha": ALPHA, "lora_dropout": 0.0, "bias": "none", "use_dora": False,
        "target_modules": ["q_proj", "k_proj", "down_proj"], "rank_pattern": {}, "qalora_group_size": 16, **options,
    }  # fmt: skip
    (adapter / "adapter_config.json").write_text(json.dumps(config))


def _merged(folder, scaling):
    """The logits of the model in one process, with the adapter added to its weights."""
    dense = transformers.LlamaForCausalLM.from_pretrained(folder / "model")
    tensors = load_file(folder / "adapter" / "adapter_model.safetensors")
    with torch.no_grad():
        for name in LAYERS:
            a, b = (tensors[f"base_model.model.{name}.lora_{factor}.weight"] for factor in "AB")
            dense.get_submodule(name).weight += scaling * (b @ a)
        return dense(input_ids=IDS).logits


def _uses(group, folder):
    whole = None if dist.get_world_size(group) == 1 else group
    model = huggingface.from_pretrained(folder / "model", group=whole)
    assert huggingface.load_adapter(model, folder / "adapter") == sorted(LAYERS)
    assert {name for name, one in model.named_parameters() if one.requires_grad} == {
        f"{name}.lora_{factor}.weight" for name in LAYERS for factor in "AB"
    }
    with torch.no_grad():
        logits = model(input_ids=IDS).logits
    huggingface.save_adapter(model, folder / "saved")
    huggingface.load_adapter(model, folder / "saved")  # into the layers that are there
    optimizer = torch.optim.SGD((one for one in model.parameters() if one.requires_grad), lr=0.1)
    with only_doubles():
        model.train()(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    optimizer.step()
    huggingface.save_adapter(model, folder / "trained")
    return logits, model.get_submodule(LAYERS[0]).scaling


def _trained_alone(folder, scaling):
    """The factors after a step in one process, by plain torch."""
    dense = transformers.LlamaForCausalLM.from_pretrained(folder / "model").train().requires_grad_(False)
    tensors = load_file(folder / "adapter" / "adapter_model.safetensors")
    for name in LAYERS:
        a, b = (tensors[f"base_model.model.{name}.lora_{factor}.weight"].requires_grad_() for factor in "AB")
        add = lambda module, args, out, a=a, b=b: out + scaling * F.linear(F.linear(args[0], a), b)  # noqa: E731
        dense.get_submodule(name).register_forward_hook(add)
    with only_doubles():
        dense(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    return {name: (tensor - 0.1 * tensor.grad).detach() for name, tensor in tensors.items()}


@pytest.mark.parametrize("p", [*(pytest.param(p, marks=pytest.mark.exhaustive) for p in (1, 2)), 3])
def test_an_adapter_computes_what_it_does_merged_and_is_saved_bit_for_bit(p, folder):
    for rslora, scaling in ((False, ALPHA / R), (True, ALPHA / R**0.5)):
        _set(folder / "adapter", use_rslora=rslora)
        shutil.rmtree(folder / "saved", ignore_errors=True)
        for logits, own in run(_uses, p, folder):
            assert own == pytest.approx(scaling, rel=1e-15)
            torch.testing.assert_close(logits, _merged(folder, scaling), rtol=1e-9, atol=1e-9)
        trained = load_file(folder / "trained" / "adapter_model.safetensors")
        for name, expected in _trained_alone(folder, scaling).items():
            torch.testing.assert_close(trained[name], expected, rtol=1e-9, atol=1e-12)
        saved, given = (folder / name / "adapter_model.safetensors" for name in ("saved", "adapter"))
        assert saved.read_bytes() == given.read_bytes()
        config = json.loads((folder / "saved" / "adapter_config.json").read_text())
        assert config["target_modules"] == ["down_proj", "k_proj", "q_proj"] and config["task_type"] == "CAUSAL_LM"
        assert config["r"] == R and config["lora_alpha"] == pytest.approx(scaling * R)


def _trained(group, folder):
    model = huggingface.from_pretrained(folder / "model", group=group)
    tp_ext.add_lora(model, targets=["layers.0.*.v_proj", "up_proj"], r=4, alpha=8.0)
    with torch.no_grad():
        for name, one in model.named_parameters():
            if name.endswith("lora_B.weight"):
                one.fill_(0.01)
        huggingface.save_adapter(model, folder / "trained")
        return model(input_ids=IDS).logits


def test_peft_reads_a_saved_adapter_and_writes_what_is_read(folder):
    peft = pytest.importorskip("peft")
    logits = run(_trained, 2, folder)[0]
    dense = transformers.LlamaForCausalLM.from_pretrained(folder / "model")
    model = peft.PeftModel.from_pretrained(dense, folder / "trained", autocast_adapter_dtype=False)
    torch.testing.assert_close(model(input_ids=IDS).logits, logits, rtol=1e-9, atol=1e-9)
    shutil.rmtree(folder / "adapter")
    model.save_pretrained(folder / "adapter")
    name = "adapter_model.safetensors"
    assert (folder / "adapter" / name).read_bytes() == (folder / "trained" / name).read_bytes()
    again = huggingface.from_pretrained(folder / "model", group=None)
    assert len(huggingface.load_adapter(again, folder / "adapter")) == 3
    torch.testing.assert_close(again(input_ids=IDS).logits, logits, rtol=1e-9, atol=1e-9)


def _change(adapter, change):
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


A = f"base_model.model.{LAYERS[0]}.lora_A.weight"
REFUSED = {
    "DoRA": (lambda path: _set(path, use_dora=True), ValueError, r"must have base_model.model..*.lora_magnitude"),
    "ranks by layer": (lambda path: _set(path, rank_pattern={"q_proj": 3}), ValueError, r"must have \(3, 64\)"),
    "biases": (lambda path: _set(path, bias="some"), ValueError, "has bias = 'some', which must be"),
    "another kind": (lambda path: _set(path, peft_type="IA3"), ValueError, "must be of peft_type 'LORA', not 'IA3'"),
    "an option of the future": (lambda path: _set(path, twist=2), ValueError, "has twist = 2, which must not be set"),
    "other base weights": (
        lambda path: _set(path, init_lora_weights="pissa_niter_4"), ValueError, "'pissa_niter_4', which changes"),
    "no scale": (lambda path: _set(path, lora_alpha=None), ValueError, "has lora_alpha = None, which must"),
    "no JSON": (lambda path: (path / "adapter_config.json").write_text("{"), ValueError, "config.json' must be JSON: "),
    "no configuration": (lambda path: (path / "adapter_config.json").unlink(), FileNotFoundError, "adapter_config"),
    "no tensors": (lambda path: (path / "adapter_model.safetensors").unlink(), FileNotFoundError, "adapter_model"),
    "other tensors": (
        lambda path: _change(path, lambda t: t.update({"base_model.model.lm_head.weight": torch.ones(2)})), ValueError,
        r"has \['base_model.model.lm_head.weight'\]; all must be base_model.model.<layer>.lora_A.weight"),
    "half an adapter": (lambda path: _change(path, lambda t: t.pop(A)), ValueError, f"must have {A}"),
    "another rank": (
        lambda path: _change(path, lambda t: t.update({A: torch.ones(5, 64)})), ValueError,
        rf"q_proj.lora_A.weight' has shape \(5, 64\) in .* must have \({R}, 64\)"),
    "another layer": (
        lambda path: _change(path, lambda t: t.update({A.replace("q_proj", "x_proj"): t.pop(A)})), ValueError,
        "self_attn.x_proj', which does not exist in the model"),
    "no linear layer": (
        lambda path: _change(path, lambda t: t.update({A.replace("q_proj", "rotary_emb"): t.pop(A)})), ValueError,
        "has an adapter of "),
}  # fmt: skip


def _refusals(group, folder, names):
    """The errors of one model for each damaged folder; it stays as it is."""
    model, found = huggingface.from_pretrained(folder / "model", group=group), []
    kinds = [type(module) for module in model.modules()]
    for name in names:
        try:
            huggingface.load_adapter(model, folder / name)
        except Exception as error:
            found.append((type(error), str(error)))
        assert [type(module) for module in model.modules()] == kinds
        assert all(one.requires_grad for one in model.parameters())
    return found


def test_other_adapters_are_refused_on_all_ranks_before_anything_changes(folder):
    for name, (damage, _, _) in REFUSED.items():
        damage(shutil.copytree(folder / "adapter", folder / name))
    first, second = run(_refusals, 2, folder, list(REFUSED))
    assert first == second
    for name, (kind, message) in zip(REFUSED, first, strict=True):
        _, error, match = REFUSED[name]
        assert kind is error and re.search(match, message), (name, message)


def test_models_that_cannot_be_saved_as_one_adapter_are_refused(folder):
    model = huggingface.from_pretrained(folder / "model", group=None)
    with pytest.raises(ValueError, match=r"adapters must be of one dropout, .* it has dropouts \[\]"):
        huggingface.save_adapter(model, folder / "saved")
    huggingface.load_adapter(model, folder / "adapter")
    model.get_submodule(LAYERS[0]).merge()
    with pytest.raises(ValueError, match="not merged; it has merged ones"):
        huggingface.save_adapter(model, folder / "saved")
    with pytest.raises(TypeError, match="path: 3 must be the path of a folder"):
        huggingface.load_adapter(model, 3)
    with pytest.raises(TypeError, match=r"model: int must be an nn\.Module"):
        huggingface.save_adapter(3, folder)
