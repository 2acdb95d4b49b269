"""The workload of a ``config.json`` of transformers."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tp_ext._checks import check_bool, check_int, check_path
from tp_ext.checkpoint.files.plain_values import read_json
from tp_ext.planner.workload import Workload, check_layers, transformer


class _Family(NamedTuple):
    """The differences between a ``model_type`` and Llama, as its configuration class and its modelling file have them.

    Attributes:
        form: arguments of :func:`transformer`. tied: the default of ``tie_word_embeddings``.
        bias: linears that have one: always, or as a key of the configuration says, with its default.
        only: keys of the configuration, each with the only value of which the operators are known.
    """

    form: Mapping[str, Any] = {}
    bias: Mapping[str, Any] = {}
    tied: bool = False
    only: Mapping[str, Any] = {}


def _blocks(bias: Any) -> dict[str, Any]:
    return dict.fromkeys(("qkv", "out", "mlp"), bias)


_ATTENTION: dict[str, Any] = dict.fromkeys(("qkv", "out"), ("attention_bias", False))
_LLAMA = {**_ATTENTION, "mlp": ("mlp_bias", False)}
_GPT = {"gated": False, "positions": True}
_ROPE = {"gated": False, "rope": True}
_OF_GPT2 = _Family(_GPT, _blocks(True), tied=True, only={"add_cross_attention": False})
# Read from transformers 5.23; tests/planner/test_config.py compares the parameters with its models
_FAMILIES = {
    "llama": _Family(bias=_LLAMA),
    "mistral": _Family(),
    "granite": _Family(bias=_LLAMA),
    "smollm3": _Family(bias=_LLAMA, tied=True),
    "phi3": _Family(),
    "qwen2": _Family(bias={"qkv": True}),
    "qwen3": _Family({"qk_norm": "head"}, _ATTENTION),
    "gemma": _Family(bias=_ATTENTION, tied=True),
    "gemma2": _Family({"norms": 4}, _ATTENTION, tied=True),
    "gemma3_text": _Family({"norms": 4, "qk_norm": "head"}, _ATTENTION, tied=True),
    "olmo": _Family({"norm": "plain"}, _ATTENTION),
    "olmo2": _Family({"qk_norm": "all"}, _ATTENTION),
    "mixtral": _Family(),
    "qwen2_moe": _Family({"shared_gate": True}, {"qkv": ("qkv_bias", True)}),
    "qwen3_moe": _Family({"qk_norm": "head"}, _ATTENTION),
    "deepseek_v2": _Family(only={"attention_bias": False, "mlp_bias": False}),
    "deepseek_v3": _Family(only={"attention_bias": False}),
    "gpt2": _OF_GPT2,
    "gpt_bigcode": _OF_GPT2,
    "gpt_neo": _Family(_GPT, {"out": True, "mlp": True}, tied=True),
    "opt": _Family(
        _GPT,
        _blocks(("enable_bias", True)),
        tied=True,
        only={"do_layer_norm_before": True, "layer_norm_elementwise_affine": True, "_remove_final_layer_norm": False},
    ),
    "bloom": _Family({"gated": False, "embedding_norm": True}, _blocks(True), tied=True),
    "gpt_neox": _Family(_ROPE, {**dict.fromkeys(("qkv", "out"), ("attention_bias", True)), "mlp": True}),
    "gptj": _Family({**_ROPE, "norms": 1}, {"mlp": True, "head": True}),
    "phi": _Family({**_ROPE, "norms": 1}, {**_blocks(True), "head": True}, only={"qk_layernorm": False}),
    "falcon": _Family(_ROPE, _blocks(("bias", False)), tied=True),
    "starcoder2": _Family(_ROPE, _blocks(("use_bias", True)), tied=True),
}
_LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def from_config(config: str | os.PathLike[str] | Mapping[str, Any], seq: int | None = None) -> Workload:
    """Returns the workload of a model of transformers, from its ``config.json``; no weights are read.

    Of a configuration with a ``text_config`` that alone counts; one without ``model_type`` counts as Llama's. Sliding
    windows count as attention to all tokens; layers of multi-token prediction are left out.

    Args:
        config: the path of a ``config.json`` or of the folder that holds it, or its dict.
        seq: tokens of a sequence; None: ``max_position_embeddings``.

    Raises:
        TypeError: no path and no dict. ValueError: no such file, no JSON object, a configuration without the sizes of a
            decoder, or a ``model_type`` or a value of which the operators are not known: :func:`trace` reads those.
    """
    if not isinstance(config, Mapping):
        check_path("a path or a dict", config=config)
        path = Path(config)
        path = path / "config.json" if path.is_dir() else path
        try:
            config = read_json(path, "config")
        except OSError as error:
            raise ValueError(f"config: {str(path)!r} must be a file of JSON: {error}") from error
    if (nested := config.get("text_config")) is not None:
        if not isinstance(nested, Mapping):
            raise TypeError(f"config: text_config {nested!r} must be a dict")
        config = nested
    kind = config.get("model_type", "llama")
    if not isinstance(kind, str) or kind not in _FAMILIES:
        raise ValueError(
            f"config: model_type {kind!r:.100} must be one of {', '.join(sorted(_FAMILIES))}; of other models "
            "planner.trace reads the operators"
        )
    family = _FAMILIES[kind]

    def first_of(*names: str, default: Any = None) -> Any:
        value = next((config[name] for name in names if config.get(name) is not None), default)
        if value is None:
            raise ValueError(f"config: of model_type {kind!r} must have one of the keys {', '.join(names)}")
        return value

    def flag(name: str, default: bool) -> bool:
        value = default if config.get(name) is None else config[name]
        check_bool(**{f"config: {name}": value})
        return bool(value)

    def count(name: str) -> int:
        value = 0 if config.get(name) is None else config[name]
        named: dict[str, Any] = {f"config: {name}": value}
        check_int(least=0, **named)
        return int(value)

    layers = first_of("num_hidden_layers", "n_layer", "num_layers")
    hidden = first_of("hidden_size", "n_embd", "n_embed")
    heads = first_of("num_attention_heads", "n_head", "num_heads")
    check_int(least=1, num_hidden_layers=layers, hidden_size=hidden)
    check_layers("num_hidden_layers", layers)
    for key, value in {**family.only, "word_embed_proj_dim": hidden}.items():
        if config.get(key, value) not in (None, value):
            raise ValueError(
                f"config: {key} {config[key]!r} of model_type {kind!r} must be {value!r}; of others planner.trace "
                "reads the operators"
            )
    form = dict(family.form)
    if form.get("positions"):  # all rows of the table, of which a sequence may use a part; OPT's have two more
        form["positions"] = first_of("max_position_embeddings", "n_positions")
        check_int(least=1, max_position_embeddings=form["positions"])
        form["positions"] += 2 * (kind == "opt")
    if kind == "falcon":
        form["rope"] = not flag("alibi", False)
        two = 2 if flag("new_decoder_architecture", False) else 1
        form["norms"] = first_of("num_ln_in_parallel_attn", default=two) if flag("parallel_attn", True) else 2
    kv_heads = first_of("num_key_value_heads", "num_kv_heads", default=heads)
    if kind in ("falcon", "gpt_bigcode") and not flag("new_decoder_architecture", False):
        kv_heads = 1 if flag("multi_query", True) else heads
    has_bias = {
        name: flag(*rule) if isinstance(rule, tuple) else rule  # a key and its default
        for name, rule in family.bias.items()
    }
    experts = first_of("num_local_experts", "n_routed_experts", "num_experts", default=0)
    before, step = count("first_k_dense_replace"), count("decoder_sparse_step") or 1
    plain = () if config.get("mlp_only_layers") is None else config["mlp_only_layers"]
    if not isinstance(plain, list | tuple) or not all(isinstance(i, int) for i in plain):
        raise TypeError(f"mlp_only_layers: {plain!r} must be a list of numbers of layers")
    return transformer(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        # The default of GPT's configurations; of others the width depends on the model
        ffn=first_of(
            "intermediate_size",
            "n_inner",
            "ffn_dim",
            "ffn_hidden_size",
            default=None if form.get("gated", True) else 4 * hidden,
        ),
        vocab=first_of("vocab_size"),
        seq=first_of("max_position_embeddings", "n_positions", "seq_length") if seq is None else seq,
        tied=flag("tie_word_embeddings", family.tied),
        bias=tuple(name for name, has in has_bias.items() if has),
        experts=experts,
        top_k=first_of("num_experts_per_tok") if experts else 0,
        expert_ffn=config.get("moe_intermediate_size"),
        shared=count("n_shared_experts"),
        shared_ffn=count("shared_expert_intermediate_size") or None,
        dense_layers=[i for i in range(layers) if i < before or i in plain or (i + 1) % step],
        mla={name: count(name) for name in _LATENT} if count("kv_lora_rank") else None,
        head_dim=config.get("head_dim"),
        name=kind,
        **form,
    )
