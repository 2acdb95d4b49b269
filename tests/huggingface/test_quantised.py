"""from_pretrained(quantize=): what quantize_ gives afterwards, layer by layer, and errors that end all ranks alike."""

import pytest
import torch
import transformers

import tp_ext
from tests.helpers import simulated
from tp_ext.low_precision import quantize_

SIZES = {"vocab_size": 101, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
IDS = torch.arange(24).view(2, 12) % 101


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2, pad_token_id=0)
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


def _read(group, folder, kind):
    from tp_ext import huggingface

    model = huggingface.from_pretrained(folder, group=group, quantize=kind, block=16)
    state = tp_ext.full_state_dict(model)
    other = huggingface.from_pretrained(folder, group=group)
    names = quantize_(other, kind, block=16)
    expected = tp_ext.full_state_dict(other)
    assert state.keys() == expected.keys() and all(torch.equal(state[k], v) for k, v in expected.items())
    mask = torch.ones_like(IDS[:, :4])
    tokens = model.generate(IDS[:, :4], attention_mask=mask, max_new_tokens=6, do_sample=False)
    with torch.no_grad():
        logits = model(input_ids=IDS).logits
    return names, state, logits, tokens


@pytest.mark.parametrize("kind", [pytest.param("int8", marks=pytest.mark.exhaustive), "int4"])
def test_reads_what_quantising_gives(folder, kind):
    names, state, logits, tokens = _read(None, folder, kind)
    assert len(names) == 14 and "lm_head" not in names and "lm_head.weight" in state
    for found_names, found, others, found_tokens in simulated.run(_read, 2, folder, kind):
        assert found_names == names and torch.equal(found_tokens, tokens)
        assert found.keys() == state.keys() and all(torch.equal(found[k], v) for k, v in state.items())
        torch.testing.assert_close(others, logits, rtol=1e-4, atol=1e-5)


def _fail(group, folder, kind):
    from tp_ext import huggingface

    try:
        huggingface.from_pretrained(folder, group=group, quantize=kind, block=16)
    except ValueError as error:
        return str(error)
    return "nothing"


@pytest.mark.thinned(1)
@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("layer", ["layers.0.self_attn.q_proj", "layers.0.mlp.down_proj", "layers.1.mlp.down_proj"])
def test_weights_that_are_not_finite(folder, tmp_path, kind, layer):
    """On the last rank alone: of a column linear, after which the others meet at row linears; of the last of these."""
    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    model.model.get_submodule(layer).weight.data[-1, -1] = float("inf")
    model.save_pretrained(tmp_path)
    messages = simulated.run(_fail, 2, tmp_path, kind)
    assert len(set(messages)) == 1 and f"{layer}.weight': must be finite" in messages[0], messages


def test_a_quantised_model_is_not_exported(folder, tmp_path):
    from tp_ext import huggingface

    model = huggingface.from_pretrained(folder, group=None, quantize="int8")
    with pytest.raises(ValueError, match=r"model: 'model.layers.0.self_attn.q_proj' was quantised"):
        huggingface.save_pretrained(model, tmp_path / "export")
    with pytest.raises(ValueError, match="block: 48 must divide the 64 inputs"):
        huggingface.from_pretrained(folder, group=None, quantize="int4", block=48)
