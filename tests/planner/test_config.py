"""Workloads of configurations of transformers: parameters of its models, and what is refused."""

import json

import pytest
import torch

from tests.planner.test_values import LLAMA_70B
from tp_ext import planner
from tp_ext.planner.config import _FAMILIES

# Distinct sizes, so that no two of them can be mixed up
SIZES = {"num_hidden_layers": 3, "hidden_size": 48, "num_attention_heads": 6, "intermediate_size": 104}
SIZES |= {"vocab_size": 134, "max_position_embeddings": 38}
GROUPED = SIZES | {"num_key_value_heads": 2}
WIDE = GROUPED | {"head_dim": 20}
GPT2 = {"n_layer": 3, "n_embd": 48, "n_head": 6, "n_positions": 38, "vocab_size": 134}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 22}
SPARSE = WIDE | EXPERTS | {"num_experts": 5, "decoder_sparse_step": 2, "mlp_only_layers": [1], "num_hidden_layers": 6}
LATENT = {"q_lora_rank": 26, "kv_lora_rank": 14, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 18}
DEEPSEEK = SIZES | EXPERTS | LATENT | {"n_routed_experts": 4, "n_shared_experts": 2, "first_k_dense_replace": 1}
DEEPSEEK |= {"n_group": 2, "topk_group": 1, "num_key_value_heads": 6}
FALCON = {name: size for name, size in SIZES.items() if name != "intermediate_size"}
MODELS = {
    "llama": [GROUPED, WIDE, GROUPED | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}],
    "mistral": [WIDE],
    "granite": [GROUPED],
    "smollm3": [GROUPED],
    "phi3": [GROUPED],
    "qwen2": [GROUPED],
    "qwen3": [WIDE],
    "gemma": [WIDE, WIDE | {"tie_word_embeddings": False}],
    "gemma2": [WIDE],
    "gemma3_text": [WIDE],
    "olmo": [GROUPED],
    "olmo2": [GROUPED],
    "mixtral": [GROUPED | {"num_local_experts": 5}],
    "qwen2_moe": [SPARSE | {"shared_expert_intermediate_size": 34, "head_dim": 8}],
    "qwen3_moe": [SPARSE],
    "deepseek_v2": [DEEPSEEK, DEEPSEEK | {"q_lora_rank": None}],
    "deepseek_v3": [DEEPSEEK],
    "gpt2": [GPT2, GPT2 | {"n_inner": 104}],
    "gpt_bigcode": [GPT2, GPT2 | {"multi_query": False}],
    "gpt_neo": [
        {"num_layers": 2, "num_heads": 6, "hidden_size": 48, "max_position_embeddings": 38, "vocab_size": 134}
        | {"attention_types": [[["global", "local"], 1]]}
    ],
    "opt": [SIZES | {"ffn_dim": 104}, SIZES | {"ffn_dim": 104, "enable_bias": False}],
    "bloom": [{"n_layer": 3, "hidden_size": 48, "n_head": 6, "vocab_size": 134}],
    "gpt_neox": [SIZES, SIZES | {"attention_bias": False}],
    "gptj": [GPT2 | {"rotary_dim": 4}],
    "phi": [GROUPED],
    "falcon": [
        FALCON,
        FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 104},
        FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
        FALCON | {"multi_query": False, "parallel_attn": False, "bias": True, "alibi": True},
    ],
    "starcoder2": [GROUPED, GROUPED | {"use_bias": False}],
}


@pytest.mark.parametrize("kind, options", [(kind, options) for kind in _FAMILIES for options in MODELS[kind]])
def test_parameters_are_those_of_the_model(kind, options, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(kind, pad_token_id=0, bos_token_id=1, eos_token_id=2, **options)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    config.save_pretrained(tmp_path)
    got = planner.from_config(tmp_path, seq=16)
    assert got.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert planner.predict(got, planner.cluster("cpu", 2), planner.Layout(tp=2), 2).step_time > 0


def test_a_published_model_whose_config_leaves_the_tied_head_to_its_default():
    sizes = {"num_hidden_layers": 28, "hidden_size": 3072, "num_attention_heads": 16, "head_dim": 256}
    gemma = {"model_type": "gemma", "intermediate_size": 24576, "vocab_size": 256000, **sizes}
    for config in (gemma, {"model_type": "paligemma", "text_config": gemma, "vision_config": {}}):
        assert planner.from_config(config, seq=8192).parameters == 8_537_680_896  # google/gemma-7b


def test_a_config_file_or_its_folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B))
    assert planner.from_config(tmp_path) == planner.from_config(tmp_path / "config.json")
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match="must be a JSON object, not list"):
        planner.from_config(tmp_path)


def without(name):
    return {key: value for key, value in LLAMA_70B.items() if key != name}


@pytest.mark.parametrize(
    "config, error, says",
    [
        (3, TypeError, "config: 3 must be a path or a dict"),
        ("/nowhere/config.json", ValueError, "config: '/nowhere/config.json' must be a file of JSON"),
        ({"model_type": "t5"}, ValueError, "config: model_type 't5' must be one of bloom, .*planner.trace"),
        ({"model_type": ["llama"]}, ValueError, r"config: model_type \['llama'\] must be one of bloom"),
        ({"model_type": "llama"}, ValueError, "of model_type 'llama' must have one of the keys num_hidden_layers"),
        (without("intermediate_size"), ValueError, "must have one of the keys intermediate_size"),
        (LLAMA_70B | {"num_hidden_layers": "80"}, ValueError, "num_hidden_layers: '80' must be an integer"),
        (LLAMA_70B | {"hidden_size": 8190}, ValueError, "hidden: 8190 must be a multiple of heads, 64"),
        (SIZES | {"model_type": "phi", "qk_layernorm": True}, ValueError, "qk_layernorm True of model_type 'phi' must"),
        (SIZES | {"model_type": "opt", "ffn_dim": 9, "word_embed_proj_dim": 8}, ValueError, "word_embed_proj_dim 8 of"),
        (DEEPSEEK | {"model_type": "deepseek_v3", "attention_bias": True}, ValueError, "attention_bias True of"),
    ],
)
def test_bad_input(config, error, says):
    with pytest.raises(error, match=says):
        planner.from_config(config, seq=128)
