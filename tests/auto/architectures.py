"""Tiny random models of the architectures of transformers: causal LMs, encoders, encoder-decoders, vision, speech.

A configuration is the default of its class with small numbers for the attributes that it has (``SMALL``), and some
of its own (``OWN``) where those make no model."""

import dataclasses
import inspect
import os
import warnings
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

VOCAB, HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 144, 64, 112, 4, 2, 16, 2
BATCH, TOKENS = 3, 5  # no factor of a dim of the model
SMALL: dict[str, Any] = {
    **dict.fromkeys(("vocab_size",), VOCAB),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "n_embed", "dim", "embedding_size", "emb_dim"), HIDDEN),
    **dict.fromkeys(("intermediate_size", "ffn_hidden_size", "d_ff", "n_inner", "ffn_dim", "encoder_ffn_dim"), INNER),
    **dict.fromkeys(("decoder_ffn_dim", "hidden_dim", "dff", "d_inner", "ffn_intermediate_size"), INNER),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), INNER),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), HEADS),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), HEADS),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), KV_HEADS),
    "n_head_kv": None,
    **dict.fromkeys(("head_dim", "d_kv", "attention_head_dim"), HEAD_DIM),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers"), LAYERS),
    **dict.fromkeys(("decoder_layers", "num_decoder_layers", "num_encoder_layers"), LAYERS),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 64),
    **dict.fromkeys(("max_source_positions", "max_target_positions"), 64),
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "sep_token_id": 2,
    "cls_token_id": 1,
    "mask_token_id": 3,
    **dict.fromkeys(("attention_dropout", "hidden_dropout", "dropout"), 0.0),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "sliding_window": 3,
}
DROPOUTS = (
    "attention_dropout", "hidden_dropout", "dropout", "dropout_rate", "activation_dropout", "attn_pdrop", "embd_pdrop",
    "resid_pdrop", "hidden_dropout_prob", "attention_probs_dropout_prob", "attn_dropout", "embedding_dropout",
)  # fmt: skip
LATENT = {"kv_lora_rank": 24, "q_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 12}
LATENT |= {"qk_head_dim": ..., "head_dim": ..., "num_key_value_heads": HEADS}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
DELTA = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_chunk_size": 8, "mamba_d_state": 16}
T5 = {"d_model": HIDDEN, "d_kv": 16, "num_heads": 4, "d_ff": INNER, "num_layers": 2, "dropout_rate": 0.0}
IMAGE = {"image_size": 16, "patch_size": 4}
OWN: dict[str, dict[str, Any]] = {  # ...: leave the attribute out
    "codegen": {"rotary_dim": 8, "n_embd": 64, "n_head": 4},
    "gptj": {"rotary_dim": 8},
    "gpt_neo": {
        "attention_types": [[["global", "local"], 1]], "window_size": 3, "layer_types": ..., "intermediate_size": INNER,
    },
    "hunyuan_v1_dense": {**ROPE, "head_dim": 16},
    "hunyuan_v1_moe": {**ROPE, "head_dim": 16, "moe_topk": 2},
    "ministral": ROPE,
    **dict.fromkeys(
        (
            "axk1", "axk2", "bailing_hybrid", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite",
            "glm_moe_dsa", "kimi_linear", "longcat_flash", "youtu", "minicpm3",
        ),
        LATENT,
    ),
    "mamba": {"layer_types": ...},
    "mamba2": {
        "layer_types": ..., "num_heads": 8, "head_dim": 16, "expand": 2, "state_size": 16, "n_groups": 2,
        "chunk_size": 8,
    },
    "falcon_mamba": {"layer_types": ...},
    "jamba": {"layer_types": ..., "use_mamba_kernels": False},
    "bamba": {"layer_types": ..., **MAMBA, "attn_layer_indices": [1]},
    "falcon_h1": {"layer_types": ..., "mamba_d_ssm": 128, **MAMBA},
    "gemma4_text": {"head_dim": ..., "global_head_dim": ...},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "falcon": {"multi_query": True, "new_decoder_architecture": False, "alibi": False},
    "gpt_bigcode": {"multi_query": True},
    "granitemoehybrid": MAMBA,
    "nemotron_h": {
        "mamba_num_heads": 8, "mamba_head_dim": 16, "chunk_size": 8, "ssm_state_size": 16, "mamba_d_conv": 4,
    },
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"), DELTA),
    "recurrent_gemma": {"lru_width": 64, "num_hidden_layers": 3},
    "bigbird_pegasus": {"attention_type": "original_full"}, "big_bird": {"attention_type": "original_full"},
    "helium": {"head_dim": 16}, "longt5": {**T5, "decoder_start_token_id": 0, "pad_token_id": 0, "local_radius": 3,
    "encoder_attention_type": "local"},
    "switch_transformers": {
        **T5, "decoder_start_token_id": 0, "pad_token_id": 0, "num_sparse_encoder_layers": 1,
        "num_sparse_decoder_layers": 1, "num_experts": 4,
    },
}  # fmt: skip


def _ids() -> dict[str, Tensor]:
    ids = torch.randint(4, VOCAB - 16, (BATCH, TOKENS))
    return {"input_ids": ids, "labels": ids}


def _image() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(BATCH, 3, 16, 16)}


def _labelled_image() -> dict[str, Tensor]:
    return {**_image(), "labels": torch.tensor([1, 2, 3])}


def _speech() -> dict[str, Tensor]:
    return {"input_features": torch.randn(BATCH, 10, 16), "labels": _ids()["labels"]}


def _without_labels() -> dict[str, Tensor]:
    return {"input_ids": _ids()["input_ids"]}


# name: (configuration, class of model, its own numbers, arguments of forward); besides causal LMs
MORE: dict[str, tuple[str, str, dict[str, Any], Any]] = {
    "falcon-alibi": ("falcon", "FalconForCausalLM", {
        "multi_query": False, "new_decoder_architecture": False, "alibi": True, "num_kv_heads": 4, "n_head_kv": 4,
    }, _ids),
    "falcon-new": ("falcon", "FalconForCausalLM", {
        "multi_query": False, "new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False,
    }, _ids),
    "bigcode-mha": ("gpt_bigcode", "GPTBigCodeForCausalLM", {"multi_query": False}, _ids),
    "t5": ("t5", "T5ForConditionalGeneration", {**T5, "decoder_start_token_id": 0, "pad_token_id": 0}, _ids),
    "mt5": ("mt5", "MT5ForConditionalGeneration", T5, _ids),
    "umt5": ("umt5", "UMT5ForConditionalGeneration", T5, _ids),
    "longt5": ("longt5", "LongT5ForConditionalGeneration", OWN["longt5"], _ids),
    "switch_transformers": (
        "switch_transformers", "SwitchTransformersForConditionalGeneration", OWN["switch_transformers"], _ids,
    ),
    "bart-s2s": ("bart", "BartForConditionalGeneration", {}, _ids), "mbart-s2s": ("mbart",
    "MBartForConditionalGeneration", {}, _ids), "pegasus-s2s": ("pegasus",
    "PegasusForConditionalGeneration", {}, _ids), "m2m_100": ("m2m_100", "M2M100ForConditionalGeneration", {}, _ids),
    "whisper-s2s": ("whisper", "WhisperForConditionalGeneration", {"num_mel_bins": 10,
    "max_source_positions": 8}, _speech), "bert-mlm": ("bert", "BertForMaskedLM", {}, _ids),
    "roberta-mlm": ("roberta", "RobertaForMaskedLM", {}, _ids), "distilbert": ("distilbert",
    "DistilBertForMaskedLM", {"dim": 64, "hidden_dim": INNER, "n_heads": 4, "n_layers": 2}, _ids),
    "deberta-v2": ("deberta-v2", "DebertaV2ForMaskedLM", {}, _ids), "modernbert": ("modernbert",
    "ModernBertForMaskedLM", {}, _ids), "electra-mlm": ("electra", "ElectraForMaskedLM", {}, _ids),
    "albert": ("albert", "AlbertForMaskedLM", {}, _ids), "vit": ("vit", "ViTForImageClassification", {**IMAGE,
    "num_labels": 10}, _labelled_image), "dinov2": ("dinov2", "Dinov2ForImageClassification", {**IMAGE,
    "num_labels": 10}, _labelled_image), "siglip": ("siglip_vision_model", "SiglipVisionModel", IMAGE, _image),
    "clip-text": ("clip_text_model", "CLIPTextModel", {}, _without_labels),
    "wav2vec2": ("wav2vec2", "Wav2Vec2ForCTC", {
        "conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 4), "num_feat_extract_layers": 2,
        "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2, "feat_extract_norm": "layer",
    }, lambda: {"input_values": torch.randn(BATCH, 400)}),
}  # fmt: skip


def build(name: str, train: bool = False) -> tuple[nn.Module, dict[str, Tensor]]:
    """Returns a tiny model in eval mode, and arguments of its forward; or one in train mode, with each dropout that its
    configuration has, and without LayerDrop, which branches on random numbers."""
    config_name, model_name, own, arguments = MORE.get(name) or (name, CAUSAL.get(name), OWN.get(name, {}), _ids)
    model_name = model_name[0] if isinstance(model_name, tuple | list) else model_name
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cls = CONFIG_MAPPING[config_name]
        config = cls(**_small(cls, own))
        for key in vars(config) if train else ():
            if key in DROPOUTS and (name, key) != ("diffllama", "attention_dropout"):  # which its forward refuses
                setattr(config, key, 0.1)
            elif key.endswith("layerdrop"):
                setattr(config, key, 0.0)
            elif key == "apply_spec_augment":  # its masks are NumPy's, whose generator simulated ranks share
                setattr(config, key, False)
        model = getattr(transformers, model_name)(config).train(train)
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    return model, arguments()


def _attributes(cls: Any, base: Any) -> set[str]:
    names = set(vars(base)) if base is not None else set()
    names |= set(inspect.signature(cls.__init__).parameters) | set(getattr(cls, "attribute_map", {}))
    return names | ({field.name for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set())


def _small(cls: Any, own: dict[str, Any]) -> dict[str, Any]:
    try:
        base = cls()
    except Exception:  # some have no default
        base = None
    known, renamed = _attributes(cls, base), getattr(cls, "attribute_map", {})
    numbers = {k: v for k, v in SMALL.items() if k in known and not (k in renamed and renamed[k] in SMALL)}
    if base is not None:
        for key in list(numbers):  # nothing is turned on that is off by default
            optional = key in ("head_dim", "n_inner") or key.endswith("_lora_rank")
            if (optional and key in vars(base) and getattr(base, key) is None) or (
                key == "sliding_window" and getattr(base, key, None) is None
            ):
                del numbers[key]
        for key in ("layer_types", "mlp_layer_types"):  # each kind of layer once
            kinds = getattr(base, key, None)
            if isinstance(kinds, list) and kinds:
                seen = list(dict.fromkeys(kinds))
                numbers[key] = (seen * LAYERS)[: max(LAYERS, len(seen))]
                for count in ("num_hidden_layers", "n_layer", "num_layers"):
                    if count in numbers:
                        numbers[count] = len(numbers[key])
        for key in ("layer_types", "mlp_layer_types"):
            if key in numbers and "num_hidden_layers" in numbers:
                numbers[key] = (numbers[key] * LAYERS)[: numbers["num_hidden_layers"]]
    numbers |= own
    return {key: value for key, value in numbers.items() if value is not ...}
