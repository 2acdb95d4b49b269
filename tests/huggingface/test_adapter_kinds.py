"""Kinds of adapter files that PEFT writes: read by p ranks to PEFT's logits, and written so that PEFT reads them; some
of them also without PEFT, next to a model with the tensors in its weights."""

import copy
import json

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file

import tp_ext
from tests.auto.architectures import build
from tests.helpers import simulated
from tp_ext import auto, huggingface
from tp_ext.checkpoint.gather import gather_full, ranks_of
from tp_ext.model.census import census

transformers.utils.logging.disable_progress_bar()
R = {"r": 4, "lora_alpha": 6, "init_lora_weights": False}
QV = {"target_modules": ["q_proj", "v_proj"]}
ROWS = {"target_modules": ["q_proj", "o_proj", "down_proj"]}
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
CONV = {"fan_in_fan_out": True}
KINDS = {  # the model, and options of LoraConfig
    "plain": ("llama", QV),
    "rank-stabilised": ("llama", {**ROWS, "use_rslora": True}),
    "rank and alpha patterns": (
        "llama", {**QV, "rank_pattern": {"v_proj": 2}, "alpha_pattern": {"layers.0.self_attn.q_proj": 3}}),
    "patterns, rank-stabilised": ("qwen2", {**QV, "rank_pattern": {r".*\.0\..*q_proj": 3}, "use_rslora": True}),
    "some layers": ("llama", {**ROWS, "layers_to_transform": [1]}),
    "DoRA": ("llama", {**ROWS, "use_dora": True}),
    "DoRA of Phi-3": ("phi3", {"target_modules": ["qkv_proj", "down_proj"], "use_dora": True}),
    "fused layers": ("phi3", {"target_modules": ["qkv_proj", "gate_up_proj", "o_proj"]}),
    "an embedding": ("llama", {"target_modules": ["embed_tokens", "q_proj"]}),
    "a tied embedding": ("tied", {"target_modules": ["embed_tokens"]}),
    "DoRA of an embedding": ("llama", {"target_modules": ["embed_tokens"], "use_dora": True}),
    "saved embedding and head": ("llama", {**QV, "modules_to_save": ["embed_tokens", "lm_head"]}),
    "biases of the layers": ("qwen2", {**QV, "bias": "lora_only"}),
    "all biases": ("qwen2", {**QV, "bias": "all"}),
    "all biases of BERT": ("bert-mlm", {"target_modules": ["query", "dense"], "bias": "all"}),
    "Conv1D": ("gpt2", {"target_modules": ["c_attn"], **CONV}),
    "Conv1D of all kinds": ("gpt2", {"target_modules": ["c_attn", "c_proj", "c_fc"], **CONV, "bias": "lora_only"}),
    "DoRA of Conv1D": ("gpt2", {"target_modules": ["c_attn", "c_proj"], **CONV, "use_dora": True}),
    "GPT-2's table": ("gpt2", {"target_modules": ["wte", "c_fc"], **CONV}),
    "classes of texts": ("bert-classes", {"target_modules": ["query", "value"], "task_type": "SEQ_CLS"}),
    "classes of tokens": ("bert-tokens", {"target_modules": ["query"], "task_type": "TOKEN_CLS"}),
    "classes by a decoder": ("llama-classes", {**QV, "task_type": "SEQ_CLS"}),
    "experts": ("mixtral", {"target_modules": [], "target_parameters": EXPERTS}),
    "experts and layers": ("mixtral", {"target_modules": ["q_proj"], "target_parameters": EXPERTS[1:]}),
}  # fmt: skip
CLASSES = {
    "bert-classes": ("bert-mlm", transformers.BertForSequenceClassification, False),
    "bert-tokens": ("bert-mlm", transformers.BertForTokenClassification, True),
    "llama-classes": ("llama", transformers.LlamaForSequenceClassification, False),
    "tied": ("llama", transformers.LlamaForCausalLM, True),
}
# Each option once, and each family; the others with --exhaustive
BY_DEFAULT = {
    "patterns, rank-stabilised",
    "DoRA of Phi-3",
    "a tied embedding",
    "saved embedding and head",
    "all biases of BERT",
    "Conv1D of all kinds",
    "classes of texts",
    "experts and layers",
}


def made(name):
    torch.manual_seed(0)
    base, cls, by_token = CLASSES.get(name, (name, None, True))
    model, example = build(base)
    if cls is not None:
        model.config.tie_word_embeddings = name == "tied"
        model = cls(model.config).eval()
        labels = example["input_ids"] % 2 if by_token else torch.tensor([0, 1, 0])
        example = {"input_ids": example["input_ids"], "labels": labels}
    with torch.no_grad():
        for parameter in model.parameters():  # biases of zeros would hide errors
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return model, example


def logits_of(model, example):
    with torch.no_grad():
        logits = model(**example).logits
    return getattr(logits, "full", lambda: logits)()  # of ranks that have columns of them


PLANS = {}  # of a model, whose weights are always the same, and a number of ranks


def sharded(group, name):
    model, example = made(name)
    key = name, 1 if group is None else dist.get_world_size(group)
    if key not in PLANS:
        PLANS[key] = auto.plan(model, example, key[1])
    return auto.apply(PLANS[key], model, group), example


def loaded(group, name, path):
    model, example = sharded(group, name)
    huggingface.load_adapter(model, path)
    return model, example


def _read(group, name, path):
    model, example = loaded(group, name, path / "given")
    logits = logits_of(model, example)
    with huggingface.disable_adapters(model):
        base = logits_of(model, example)
    huggingface.save_adapter(model, path / f"saved{dist.get_world_size(group)}")
    huggingface.load_adapter(model, path / f"saved{dist.get_world_size(group)}")  # into the layers that are there
    assert torch.equal(logits_of(model, example), logits)
    model.train()(**example).loss.backward()
    known, layouts = census(model), dict(tp_ext.layouts(model))
    trained = {key: parameter for key, parameter in model.named_parameters() if parameter.requires_grad}
    gradients = {key: gather_full(p.grad, layouts[key], ranks_of(known)) for key, p in trained.items()}
    merged = {} if name in ("tied", "gpt2") else dict(huggingface.weight_source(model))
    return logits, base, torch.equal(base, logits_of(*sharded(group, name))), merged, gradients


def check_gradients(found, expected):
    """Gradients of all factors and replaced tensors are those of one rank, which are taken first."""
    assert found and (not expected or found.keys() == expected.keys())
    for key, gradient in found.items():
        wanted = expected.setdefault(key, gradient)
        assert (gradient - wanted).norm() <= 1e-4 * wanted.norm() + 1e-6, key  # that of a bias of keys is 0


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in BY_DEFAULT else pytest.mark.exhaustive) for kind in KINDS]
)
def test_kinds_of_peft(kind, tmp_path):
    peft = pytest.importorskip("peft")
    name, options = KINDS[kind]
    dense, example = made(name)
    torch.manual_seed(1)
    theirs = peft.get_peft_model(copy.deepcopy(dense), peft.LoraConfig(**R, **options))
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    theirs.eval().save_pretrained(tmp_path / "given")
    expected = logits_of(theirs, example)
    assert (expected - logits_of(dense, example)).abs().max() > 1e-3
    # As an engine would get them: PEFT's own merge
    merged = copy.deepcopy(theirs).merge_and_unload().state_dict()
    gradients = {}
    for p in (1, 2):
        for logits, base, is_base, found, of_rank in simulated.run(_read, p, name, tmp_path):
            torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
            assert is_base
            check_gradients(of_rank, gradients)
            for key, tensor in found.items():
                if key in merged:  # experts have other names in files
                    torch.testing.assert_close(tensor, merged[key], rtol=1e-5, atol=1e-6, msg=key)
            torch.testing.assert_close(base, logits_of(dense, example), rtol=1e-5, atol=1e-5)
        again = peft.PeftModel.from_pretrained(copy.deepcopy(dense), tmp_path / f"saved{p}").eval()
        torch.testing.assert_close(logits_of(again, example), expected, rtol=1e-6, atol=1e-6)
    assert json.loads((tmp_path / "saved2" / "adapter_config.json").read_text())["r"] == 4


# name: the model, options, and the shapes of tensors by layer; written without PEFT
BY_HAND = {
    "patterns": ("llama", {"rank_pattern": {"v_proj": 2}, "alpha_pattern": {"layers.1.*": 3}}, {
        f"model.layers.{i}.self_attn.{name}": {"lora_A.weight": (r, 64), "lora_B.weight": (out, r)}
        for i in (0, 1) for name, r, out in (("q_proj", 4, 64), ("v_proj", 2, 32))}),
    "DoRA": ("llama", {"use_dora": True}, {
        f"model.layers.0.{name}": {
            "lora_A.weight": (4, into), "lora_B.weight": (out, 4), "lora_magnitude_vector": (out,)}
        for name, into, out in (("self_attn.k_proj", 64, 32), ("mlp.down_proj", 112, 64))}),
    "Conv1D and biases": ("gpt2", {"bias": "all"}, {
        "transformer.h.0.attn.c_attn": {"lora_A.weight": (4, 64), "lora_B.weight": (192, 4), "base_layer.bias": (192,)},
        "transformer.h.1.mlp.c_proj": {"lora_A.weight": (4, 256), "lora_B.weight": (64, 4), "base_layer.bias": (64,)},
        "transformer.ln_f": {"bias": (64,)}}),
    "an embedding": ("gpt2", {}, {"transformer.wte": {"lora_embedding_A": (4, 144), "lora_embedding_B": (64, 4)}}),
    "experts": ("mixtral", {"target_parameters": EXPERTS}, {
        "model.layers.0.mlp.experts.base_layer": {"lora_A.weight": (16, 64), "lora_B.weight": (224, 16)},
        "model.layers.0.mlp.experts": {"lora_A.weight": (16, 112), "lora_B.weight": (64, 16)}}),
    "a classifier": ("bert-classes", {"modules_to_save": ["classifier"], "bias": "lora_only"}, {
        "bert.encoder.layer.0.attention.self.query": {
            "lora_A.weight": (4, 64), "lora_B.weight": (64, 4), "base_layer.bias": (64,)},
        "classifier": {"weight": (2, 64), "bias": (2,)}}),
}  # fmt: skip


def _written(path, options, layers, **more):
    generator = torch.Generator().manual_seed(5)
    tensors = {
        f"base_model.model.{layer}.{name}": torch.randn(shape, generator=generator) * 0.2 + (name[5:6] == "m")
        for layer, of_layer in layers.items()
        for name, shape in of_layer.items()
    }
    path.mkdir(exist_ok=True)
    save_file(tensors, path / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, **options, **more}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return {name.removeprefix("base_model.model."): tensor for name, tensor in tensors.items()}


@torch.no_grad()
def _merge(dense, kind, tensors):
    """The model with the tensors in its weights, by the formulas of the papers."""
    _, options, layers = BY_HAND[kind]
    for layer, of_layer in layers.items():
        module = dense.get_submodule(layer.replace(".base_layer", ""))
        for name in of_layer:
            if name.rpartition(".")[2] in ("weight", "bias") and "lora" not in name:
                getattr(module, name.rpartition(".")[2]).copy_(tensors[f"{layer}.{name}"])
        if "lora" not in next(iter(of_layer)):
            continue
        a, b = (tensors[f"{layer}.{name}"] for name in list(of_layer)[:2])
        if kind == "experts":
            weight = module.gate_up_proj if "base_layer" in layer else module.down_proj
            for e in range(4):  # A has the rows of expert e together, B the columns of all experts in turn
                weight[e] += 6 / 4 * b[:, e::4] @ a[4 * e : 4 * e + 4]
            continue
        alpha = 3 if "layers.1" in layer and "alpha_pattern" in options else 6
        delta = alpha / a.shape[0] * (b @ a)
        turned = delta.shape != module.weight.shape or "c_proj" in layer
        weight = module.weight.t() if turned else module.weight
        weight += delta
        if options.get("use_dora"):
            weight *= (tensors[f"{layer}.lora_magnitude_vector"] / weight.norm(dim=1))[:, None]
    return dense


RARE = "Conv1D and biases"  # by default these are PEFT's, above


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.exhaustive if kind == RARE else ()) for kind in BY_HAND]
)
def test_kinds_of_files_are_the_weights_that_they_stand_for(kind, tmp_path):
    name, options, layers = BY_HAND[kind]
    tensors = _written(tmp_path / "given", options, layers)
    dense, example = made(name)
    if name == "gpt2" and "embedding" in kind:  # the head keeps the base's table
        dense.lm_head.weight = torch.nn.Parameter(dense.lm_head.weight.detach().clone())
    expected = logits_of(_merge(dense, kind, tensors), example)
    gradients = {}
    for p in (1, 2):
        for logits, base, is_base, _, of_rank in simulated.run(_read, p, name, tmp_path):
            torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
            assert is_base and (base - expected).abs().max() > 1e-3
            check_gradients(of_rank, gradients)
        found = load_file(tmp_path / f"saved{p}" / "adapter_model.safetensors")
        assert found.keys() == {f"base_model.model.{key}" for key in tensors}
        assert all(torch.equal(found[f"base_model.model.{key}"], tensor) for key, tensor in tensors.items())


LAYER = {"lora_A.weight": (4, 64), "lora_B.weight": (64, 4)}
Q = {"model.layers.0.self_attn.q_proj": LAYER}
REFUSED = {
    "DoRA of experts": (
        "mixtral", {"target_parameters": EXPERTS[1:], "use_dora": True},
        {"model.layers.0.mlp.experts": {"lora_A.weight": (16, 112), "lora_B.weight": (64, 16)}},
        "has use_dora = True for the parameter model.layers.0.mlp.experts.down_proj"),
    "a magnitude without DoRA": ("llama", {}, {
        "model.layers.0.self_attn.q_proj": {**LAYER, "lora_magnitude_vector": (64,)}}, "but use_dora is not set"),
    "a saved module that is tied": (
        "tied", {"modules_to_save": ["embed_tokens"]}, {**Q, "model.embed_tokens": {"weight": (144, 64)}},
        "replaces a tensor that is tied to 'lm_head.weight'"),
    "half a saved module": (
        "bert-classes", {"modules_to_save": ["classifier"]},
        {"bert.encoder.layer.0.attention.self.query": LAYER, "classifier": {"weight": (2, 64)}},
        r"must have base_model.model.classifier.bias, of a module of its modules_to_save"),
    "a bias that is not said": (
        "qwen2", {}, {"model.layers.0.self_attn.q_proj": {**LAYER, "base_layer.bias": (64,)}},
        r"has \['base_model.model.model.layers.0.self_attn.q_proj.base_layer.bias'\]; all must be"),
    "a bias of another layer": (
        "qwen2", {"bias": "lora_only"}, {**Q, "model.layers.0.self_attn.k_proj": {"bias": (32,)}}, "all must be"),
    "a table of other words": ("llama", {}, {**Q, "model.embed_tokens": {"weight": (144, 64)}}, "all must be"),
    "no layers": ("bert-classes", {"modules_to_save": ["classifier"]}, {
        "classifier": {"weight": (2, 64), "bias": (2,)}}, "has no adapter of a layer"),
    "a pattern of no number": ("llama", {"rank_pattern": {"q_proj": "4"}}, Q, r"rank_pattern\['q_proj'\] = '4', which"),
    "no pattern": ("llama", {"alpha_pattern": [3]}, Q, r"has alpha_pattern = \[3\], which must be a dict"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_other_files_are_refused_before_anything_changes(kind, tmp_path):
    name, options, layers, match = REFUSED[kind]
    _written(tmp_path / "given", options, layers)
    model, _ = made(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=match):
        huggingface.load_adapter(model, tmp_path / "given")
    state = model.state_dict()
    assert state.keys() == before.keys() and all(torch.equal(state[key], value) for key, value in before.items())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_dropout_of_the_input_of_a_weight_is_refused_in_training(tmp_path):
    name, options, layers = BY_HAND["Conv1D and biases"]
    _written(tmp_path / "given", options, layers, lora_dropout=0.1)
    model, example = loaded(None, name, tmp_path / "given")
    logits_of(model, example)
    with pytest.raises(ValueError, match=r"lora_dropout: 0.1 acts on inputs, which an adapter of Conv1D"):
        model.train()(**example)


def test_disabled_adapters_in_contexts_that_are_nested_or_end_by_an_error(tmp_path):
    name, options, layers = BY_HAND["a classifier"]
    _written(tmp_path / "given", options, layers)
    model, example = loaded(None, name, tmp_path / "given")
    adapted, base = logits_of(model, example), logits_of(*made(name))
    loss = model(**example).loss
    with pytest.raises(KeyError), huggingface.disable_adapters(model):
        with huggingface.disable_adapters(model):
            assert torch.equal(logits_of(model, example), base)
        assert torch.equal(logits_of(model, example), base)
        raise KeyError
    loss.backward()  # of the forward before
    assert model.classifier.weight.grad is not None
    assert torch.equal(logits_of(model, example), adapted)
    # An adapter that was trained on: the base stays
    with torch.no_grad():
        model.classifier.weight.add_(1)
    with huggingface.disable_adapters(model):
        assert torch.equal(logits_of(model, example), base)


def test_adapters_of_weights_are_not_merged_in_place(tmp_path):
    _written(tmp_path / "given", {**BY_HAND["DoRA"][1]}, BY_HAND["DoRA"][2])
    model, _ = loaded(None, "llama", tmp_path / "given")
    tp_ext.add_lora(model, targets="q_proj", r=2, alpha=2.0)
    with pytest.raises(ValueError, match="must not have adapters of weights"):
        tp_ext.merge_lora(model)
    with pytest.raises(ValueError, match=r"q_proj.lora_A.weight' must be of the file that load_adapter has read"):
        huggingface.save_adapter(model, tmp_path / "saved")


def test_models_without_a_base_are_refused():
    model, _ = made("llama")
    with (
        pytest.raises(ValueError, match="model: LlamaForCausalLM must have adapters"),
        huggingface.disable_adapters(model),
    ):
        pass
    with pytest.raises(TypeError, match=r"model: int must be an nn\.Module"), huggingface.disable_adapters(3):
        pass
    model, example = made("llama")
    auto.apply(auto.plan(model, example, 1), model, None)
    tp_ext.add_lora(model, targets="q_proj", r=2, alpha=2.0)
    model.model.layers[0].self_attn.q_proj.merge()
    with pytest.raises(ValueError, match="must not be merged: unmerge"), huggingface.disable_adapters(model):
        pass
