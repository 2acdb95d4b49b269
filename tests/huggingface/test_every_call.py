"""Calls that everybody makes of a model of transformers: the default cache, one token, masks, caches given back, where
the example of the plan has none of these and ranks have fewer KV heads than the model, or copies of one."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import tp_ext
from tests.helpers.simulated import run
from tp_ext.huggingface.load import example_of
from tp_ext.model.layouts import layouts_of

MODELS = {  # class, layers, heads, KV heads, ranks
    "copies of KV heads": ("Llama", 2, 4, 2, 4),
    "sizes that coincide": ("Phi3", 1, 4, 2, 2),
    "uneven heads": ("Phi3", 1, 6, 3, 2),
    "groups of queries": ("Qwen3", 1, 8, 2, 2),
}
IDS = torch.randint(1, 96, (2, 7), generator=torch.Generator().manual_seed(3))
LEFT, RIGHT = (torch.ones(2, 7, dtype=torch.long) for _ in range(2))
LEFT[1, :2] = RIGHT[1, 5:] = 0
CALLS: dict[str, dict[str, Any]] = {
    "default cache": {"input_ids": IDS},
    "labels": {"input_ids": IDS, "labels": IDS},
    "padding on the left": {"input_ids": IDS, "attention_mask": LEFT, "labels": IDS},
    "padding on the right": {"input_ids": IDS, "attention_mask": RIGHT, "use_cache": False},
    "one token": {"input_ids": IDS[:, :1], "use_cache": False},
    "one token, cache": {"input_ids": IDS[:, :1]},
    "one token, mask": {"input_ids": IDS[:, :1], "attention_mask": RIGHT[:, :1]},
    "positions": {"input_ids": IDS, "position_ids": torch.arange(7).expand(2, 7), "labels": IDS},
    "hidden states": {"input_ids": IDS, "output_hidden_states": True},
    "some logits": {"input_ids": IDS, "logits_to_keep": 2},
}


def _model(kind: str, layers: int, heads: int, kv_heads: int) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=96, hidden_size=8 * heads, intermediate_size=44, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, pad_token_id=0, bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    return getattr(transformers, f"{kind}ForCausalLM")(config).double()


def _layouts(model: nn.Module) -> dict[str, Any]:
    return {f"{name}.{key}": layout for name, m in model.named_modules() for key, layout in layouts_of(m).items()}


def _results(model: nn.Module, call: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The outputs, and the gradients of all parameters."""
    output = model(**call)
    results = {"logits": output.logits, **dict(enumerate(output.get("hidden_states") or ()))}
    if output.loss is not None:
        results["loss"] = output.loss
    model.zero_grad(set_to_none=True)
    output.logits.pow(2).mean().backward() if output.loss is None else output.loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: result.detach() for name, result in results.items()}, gradients


def _with_caches(model: nn.Module, cache: Callable[[Any], Any] | None) -> list[Tensor]:
    """Logits of seven tokens, then of one and of two more with the cache given back, and tokens of ``generate``."""
    given = {} if cache is None else {"past_key_values": cache(model.config)}
    with torch.no_grad():
        first = model(input_ids=IDS, **given)
        second = model(input_ids=IDS[:, :1], past_key_values=first.past_key_values)
        third = model(input_ids=IDS[:, 2:4], past_key_values=second.past_key_values)
        tokens = model.generate(IDS, attention_mask=LEFT, max_new_tokens=3, do_sample=False)
    return [first.logits, second.logits, third.logits, tokens]


def _compare(group: Any, kind: str, layers: int, heads: int, kv_heads: int, p: int) -> None:
    dense = _model(kind, layers, heads, kv_heads)
    model = copy.deepcopy(dense)
    plan = tp_ext.auto.plan(model, example_of(model), p)
    assert any("q_proj" in name or "qkv_proj" in name for name in plan.shardings)
    tp_ext.auto.apply(plan, model, group)
    layouts = _layouts(model)
    for name, call in CALLS.items():
        (outputs, gradients), (wanted, full) = _results(model, call), _results(dense, call)
        shards = {key: layouts[key].shard(g) if key in layouts else g for key, g in full.items()}
        assert all(torch.allclose(outputs[key], wanted[key], 1e-6, 1e-9) for key in wanted), name
        assert all(torch.allclose(gradients[key], shards[key], 1e-5, 1e-7) for key in {**shards, **gradients}), name
    for cache in (None, lambda config: transformers.StaticCache(config=config, max_cache_len=12)):
        for logits, expected in zip(_with_caches(model, cache), _with_caches(dense, cache), strict=True):
            torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("kind", MODELS)
def test_calls_that_the_example_lacks(kind):
    run(_compare, MODELS[kind][-1], *MODELS[kind])


@pytest.mark.parametrize("kind", ["T5", "Bart"])
def test_generates_from_an_encoder_where_the_example_has_labels(kind: str) -> None:
    torch.manual_seed(0)
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "decoder_start_token_id": 1}
    sizes: dict[str, Any] = {
        "T5": {"d_kv": 4, "d_ff": 50, "num_layers": 2, "num_heads": 6, "dropout_rate": 0.0},
        "Bart": {"encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 6, "decoder_attention_heads": 6,
                 "encoder_ffn_dim": 50, "decoder_ffn_dim": 50, "dropout": 0.0, "forced_eos_token_id": None},
    }[kind]  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(vocab_size=96, d_model=24, **ids, **sizes)
    dense = getattr(transformers, f"{kind}ForConditionalGeneration")(config).double()
    plan = tp_ext.auto.plan(dense, {"input_ids": IDS, "labels": IDS}, 2)

    def texts(model: nn.Module) -> list[Tensor]:
        model.eval()
        options = [{}, {"num_beams": 2}, {"use_cache": False}, {"attention_mask": RIGHT}]
        return [model.generate(IDS, max_new_tokens=5, do_sample=False, **chosen) for chosen in options]

    expected = texts(dense)

    def sharded(group: Any) -> list[Tensor]:
        model = copy.deepcopy(dense)
        tp_ext.auto.apply(plan, model, group)
        return texts(model)

    for result in run(sharded, 2):
        assert all(map(torch.equal, result, expected))
