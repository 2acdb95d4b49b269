"""Models of transformers as exports on three ranks, which do not share their heads evenly."""

import pytest
import torch
import torch.distributed as dist

import tp_ext
from tests.export.test_export import SECONDS, export, folder_of_all
from tests.helpers.on_ranks import on_ranks

VOCAB, MAX_SEQ = 96, 80
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
}
ONE_HEAD = SIZES | {"num_key_value_heads": 1}
CAUSAL = {
    "Llama": ONE_HEAD,
    "Qwen2": ONE_HEAD,
    "Qwen3": ONE_HEAD | {"head_dim": 16},
    "GPT2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": VOCAB, "n_positions": 128},
    "Phi3": SIZES | {"pad_token_id": 0},
    "Gemma2": ONE_HEAD | {"head_dim": 16},
    "Mistral": ONE_HEAD,
    "OPT": SIZES | {"ffn_dim": 128, "word_embed_proj_dim": 64},
}
ENCODERS = {"Bert": SIZES, "ViT": SIZES | {"image_size": 32, "patch_size": 8}}


def load(name, sizes, task, group):
    """The model on the ranks of the group."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = getattr(transformers, task).from_config(getattr(transformers, f"{name}Config")(**sizes))
    files = folder_of_all(group)
    if group.rank() == 0:
        model.save_pretrained(files)
    dist.barrier(group)
    return tp_ext.huggingface.from_pretrained(str(files), group=group, dtype=torch.float32).eval()


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", list(CAUSAL))
@on_ranks(3, backend="gloo", timeout=SECONDS)
def test_greedy_tokens(group, name):
    model, folder = load(name, CAUSAL[name], "AutoModelForCausalLM", group), folder_of_all(group)
    ids = torch.randint(VOCAB, (1, 5), generator=torch.Generator().manual_seed(1))
    manifest = export(model, {"input_ids": ids}, folder, generate=True, max_seq=MAX_SEQ)
    assert manifest["bits"] in ("eager", "inductor")
    text = model.generate(input_ids=ids, max_new_tokens=64, do_sample=False, pad_token_id=0, eos_token_id=None)
    assert text.shape[1] == 69
    assert torch.equal(tp_ext.load_exported(folder, group).generate(ids, max_new_tokens=64), text)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", list(ENCODERS))
@on_ranks(3, backend="gloo", timeout=SECONDS)
def test_hidden_states(group, name):
    model, folder = load(name, ENCODERS[name], "AutoModel", group), folder_of_all(group)
    generator = torch.Generator().manual_seed(1)
    example = {"input_ids": torch.randint(VOCAB, (2, 7), generator=generator)}
    if name == "ViT":
        example = {"pixel_values": torch.randn(2, 3, 32, 32, generator=generator)}
    export(model, example, folder)
    hidden, *_ = tp_ext.load_exported(folder, group)(**example)
    torch.testing.assert_close(hidden, model(**example)[0], rtol=1e-5, atol=1e-6)
