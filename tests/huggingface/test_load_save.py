"""Models of transformers read by several ranks, compared with one process; and the files that they write, byte by
byte."""

import copy
import functools
import json
import os
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file

import tp_ext
from tests.auto.architectures import build
from tests.helpers import ranks
from tests.helpers.one_plan import run
from tests.helpers.peak_memory import Peak
from tests.helpers.ranks import run_raises
from tp_ext import auto, huggingface
from tp_ext.group import parallel_group

transformers.utils.logging.disable_progress_bar()

KINDS = {  # what each shows
    "llama": "fewer KV heads than 4 ranks",
    "gpt2": "Conv1D with three parts, tied",
    "mixtral": "experts that the files hold one by one",
    "t5": "an encoder and a decoder, three names of one table",
    "falcon-alibi": "a constant that is sliced",
    "bert-mlm": "an encoder, a bias with two names",
    "vit": "images",
}


def _folder(path: Path, name: str = "llama", **attributes: object) -> Path:
    """A tiny model as transformers writes it, in several files."""
    torch.manual_seed(0)
    model, _ = build(name)
    for key, value in attributes.items():
        setattr(model.config, key, value)
    model.save_pretrained(path, max_shard_size="60KB")
    return path


def _files(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir() if not file.name.startswith(".")}


def _round_trip(group, name, path):
    dense = type(build(name)[0]).from_pretrained(path)
    example = build(name)[1]
    model = huggingface.from_pretrained(path, group=group)
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())) and not model.training
    names = ([name for name, _ in one.named_parameters()] for one in (model, dense))
    assert next(names) == next(names)  # optimizers number their state by it
    with torch.no_grad():
        expected, found = dense(**example), model(**example)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-5)
    ours, theirs = path.parent / "ours", path.parent / "theirs"
    if parallel_group(group).rank == 0:
        ours.mkdir()
        (ours / "tokenizer.json").write_text("{}")
    huggingface.save_pretrained(model, ours, max_shard_size="50KB")
    if parallel_group(group).rank == 0:
        (ours / "tokenizer.json").unlink()  # it is still there
        dense.save_pretrained(theirs, max_shard_size="50KB")
        assert _files(ours) == _files(theirs)
        assert len(list(ours.glob("*.safetensors"))) > 1
    return model.tp_ext_plan.fingerprint


@pytest.mark.parametrize(
    ("name", "p"),
    [
        pytest.param(name, p, marks=[] if p == (4 if name == "llama" else 2) else [pytest.mark.exhaustive])
        for name in KINDS
        for p in (2, 4)
    ],
)
def test_logits_and_files_are_those_of_one_process(name, p, tmp_path):
    path = _folder(tmp_path / "model", name)
    fingerprints = ranks.run(_round_trip, p, name, path)  # each rank plans for itself
    assert len(set(fingerprints)) == 1


def test_one_process_needs_no_group(tmp_path):
    path = _folder(tmp_path)
    ids = torch.arange(10).view(2, 5)
    found = huggingface.from_pretrained(path, group=None)(input_ids=ids)
    expected = transformers.LlamaForCausalLM.from_pretrained(path)(input_ids=ids)
    assert torch.equal(found.logits, expected.logits)


def _generates(group, path, sequence_parallel):
    dense = transformers.LlamaForCausalLM.from_pretrained(path)
    model = huggingface.from_pretrained(path, group=group, sequence_parallel=sequence_parallel)
    ids = torch.arange(4, 14).view(2, 5)
    norms = []
    for one in (dense, model):
        one(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        norms.append(tp_ext.clip_grad_norm_(one, 1.0, group=group if one is model else None))
    torch.testing.assert_close(*norms, rtol=1e-5, atol=0)
    assert any(one.kind == "reduce-scatter" for one in model.tp_ext_plan.collectives) == sequence_parallel
    kinds = ({"do_sample": False}, {"do_sample": True, "top_k": 9}, {"num_beams": 3, "do_sample": False})
    for options in kinds:
        outputs = []
        for one in (dense, model):
            torch.manual_seed(3)
            outputs.append(one.generate(ids, max_new_tokens=6, pad_token_id=0, eos_token_id=None, **options))
        assert torch.equal(*outputs), options


@pytest.mark.parametrize(("p", "sequence_parallel"), [(3, False), (2, True)])
def test_generate_gives_the_tokens_of_one_process(p, sequence_parallel, tmp_path):
    run(_generates, p, _folder(tmp_path), sequence_parallel)


def _samples(group, path):
    """Tokens and the next number where each rank has a generator of its own, by the model and by a copy of it."""
    model, rank = huggingface.from_pretrained(path, group=group), dist.get_rank(group)
    options = {"max_new_tokens": 6, "pad_token_id": 0, "eos_token_id": None, "do_sample": True}
    found = []
    for one, beams in ((model, 1), (copy.deepcopy(model), 2)):
        torch.manual_seed(3 + rank)
        found.append((one.generate(torch.arange(4, 14).view(2, 5), num_beams=beams, **options), torch.rand(1).item()))
    return found


def test_ranks_with_other_generators_sample_the_tokens_of_rank_0(tmp_path):
    path = _folder(tmp_path)
    dense = transformers.LlamaForCausalLM.from_pretrained(path)
    options = {"max_new_tokens": 6, "pad_token_id": 0, "eos_token_id": None, "do_sample": True}
    results = run(_samples, 2, path)
    for i, beams in enumerate((1, 2)):
        torch.manual_seed(3)
        tokens = dense.generate(torch.arange(4, 14).view(2, 5), num_beams=beams, **options)
        following = torch.rand(1).item()
        assert torch.equal(results[0][i][0], tokens) and torch.equal(results[1][i][0], tokens)
        assert results[0][i][1] == following
        assert results[1][i][1] == torch.rand(1, generator=torch.Generator().manual_seed(4)).item()


def _reads(group, path):
    """Bytes of tensors that a rank reads, its share, and its peak."""
    taken, preadv = [], os.preadv
    counted = mock.patch("os.preadv", lambda *args: taken.append(preadv(*args)) or taken[-1])
    shapes = functools.partial(auto.plan, prove="shapes")  # the proof by values has weights of its own, within budget=
    with counted, mock.patch("tp_ext.auto.plan", shapes), Peak() as peak:
        model = huggingface.from_pretrained(path, group=group)
    share = sum(one.numel() * one.element_size() for one in model.parameters())
    largest = max(one.numel() * one.element_size() for one in model.parameters())
    return sum(taken), share, peak.most, largest, str(model.dtype)


def test_a_rank_reads_its_bytes_and_holds_little_more(tmp_path):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=512, intermediate_size=512, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=8, dtype="bfloat16",
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path)
    total = (tmp_path / "model.safetensors").stat().st_size
    by_columns = 2 * 2 * 512 * 512 * 2  # o_proj and down_proj: rows' slices of 256 bytes, so whole rows are read
    for taken, share, peak, largest, dtype in run(_reads, 4, tmp_path):
        assert dtype == "torch.bfloat16"
        assert taken == share + by_columns * 3 // 4 and share <= 1.01 * total / 4 + 5 * 512 * 2
        assert peak <= share + 4 * 2 * largest  # one tensor's shard, or a block of whole rows


def _as_half(group, path):
    model = huggingface.from_pretrained(path, group=group, dtype=torch.bfloat16, attn_implementation="eager")
    return str(model.lm_head.weight.dtype), model.config._attn_implementation, model.model.rotary_emb.inv_freq.dtype


def test_dtype_and_configuration_are_overridden(tmp_path):
    for found in run(_as_half, 2, _folder(tmp_path)):
        assert found == ("torch.bfloat16", "eager", torch.float32)


def _load(group, path, **options):
    huggingface.from_pretrained(path, group=group, **options)


def _changed(path: Path, change) -> None:
    """Writes a folder's tensors as one file, changed."""
    tensors = {name: t for file in path.glob("*.safetensors") for name, t in load_file(file).items()}
    for file in (*path.glob("*.safetensors"), path / "model.safetensors.index.json"):
        file.unlink()
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def _moved(path: Path) -> None:
    """Makes the index name another file for a tensor."""
    index = path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    files = sorted(set(content["weight_map"].values()))
    content["weight_map"][Q] = next(name for name in files if name != content["weight_map"][Q])
    index.write_text(json.dumps(content))


Q = "model.layers.0.self_attn.q_proj.weight"
WRONG = {
    "missing": (lambda path: _changed(path, lambda t: t.pop(Q)), KeyError, rf"missing \['{Q}'\], unexpected \[\]"),
    "unexpected": (lambda path: _changed(path, lambda t: t.update(x=torch.ones(2))), KeyError, "unexpected .'x'."),
    "shape": (
        lambda path: _changed(path, lambda t: t.update({Q: torch.ones(2, 3)})), ValueError,
        rf"{Q}. has shape \(2, 3\) in .* and must have \(64, 64\), that of the configuration",
    ),
    "no configuration": (lambda path: (path / "config.json").unlink(), FileNotFoundError, "config.json"),
    "no weights": (
        lambda path: [file.unlink() for file in path.glob("model*")], FileNotFoundError, "must have 'model."),
    "a file is missing": (lambda path: next(path.glob("*.safetensors")).unlink(), FileNotFoundError, "No such file"),
    "a file is cut off": (
        lambda path: os.truncate(next(path.glob("*.safetensors")), 500), ValueError, "must be a whole safetensors file",
    ),
    "class": (
        lambda path: (path / "config.json").write_text('{"architectures": ["Mine"]}'), ValueError,
        "is of the class 'Mine'; pass model_class=",
    ),
    "no JSON": (
        lambda path: (path / "config.json").write_text("{architectures"), ValueError,
        r"model/config.json' must be JSON: Expecting property name",
    ),
    "no object": (
        lambda path: (path / "config.json").write_text("[1]"), ValueError, "must be a JSON object, not list",
    ),
    "no model": (
        lambda path: (path / "config.json").write_text('{"architectures": ["Trainer"]}'), ValueError,
        "is of the class 'Trainer'; pass model_class=, one of transformers",
    ),
    "a class that is no name": (
        lambda path: (path / "config.json").write_text('{"architectures": [3]}'), ValueError,
        r"config.json' has architectures \[3\], which must be a list of names; or pass model_class=",
    ),
    "a name that is no list": (
        lambda path: (path / "config.json").write_text('{"architectures": "LlamaForCausalLM"}'), ValueError,
        "has architectures 'LlamaForCausalLM', which must be a list of names",
    ),
    "no class": (
        lambda path: (path / "config.json").write_text("{}"), ValueError, "has architectures None, which must",
    ),
    **{
        f"{key} = {value!r}": (
            lambda path, key=key, value=value: (path / "config.json").write_text(
                json.dumps({**json.loads((path / "config.json").read_text()), key: value})
            ),
            ValueError, rf"model/config.json' must describe a {name}; transformers: {words}",
        )
        for key, value, name, words in (
            ("dtype", "float99", "LlamaForCausalLM", "AttributeError: module 'torch' has no attribute 'float99'"),
            ("hidden_act", "nope", "LlamaForCausalLM", "KeyError: 'nope'"),
            ("num_attention_heads", "four", "LlamaForCausalLM", "(?s:.*)'num_attention_heads' expected int, got str"),
            ("architectures", ["PreTrainedModel"], "PreTrainedModel", "AttributeError"),
        )
    },
    "a damaged generation configuration": (
        lambda path: (path / "generation_config.json").write_text("[1]"), ValueError,
        "model/generation_config.json' must be a JSON object, not list",
    ),
    "another file than the index names": (
        _moved, ValueError, rf"{Q}. must be in 'model-0000.-of-.*', as .*index.json' has it, and is not",
    ),
    "quantized": (
        lambda path: (path / "config.json").write_text(
            json.dumps({**json.loads((path / "config.json").read_text()), "quantization_config": {"bits": 4}})
        ), ValueError, "has quantized weights",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_folders_are_refused_on_all_ranks(kind, tmp_path):
    damage, error, match = WRONG[kind]
    damage(_folder(tmp_path / "model"))
    run_raises(_load, 2, error, match, tmp_path / "model", in_turns=False, strict=True)


def _load_on_one_rank_only(group, path):
    if dist.get_rank(group):
        path = path / "elsewhere"
    huggingface.from_pretrained(path, group=group)


def test_an_error_of_one_rank_is_raised_on_all(tmp_path):
    path = _folder(tmp_path / "model")
    run_raises(_load_on_one_rank_only, 2, FileNotFoundError, "config.json", path, in_turns=False)


def _load_on_one_rank_by_itself(group, path):
    if group.rank() == 0:
        assert huggingface.from_pretrained(path, group=None).tp_ext_plan.p == 1


def test_one_rank_of_a_job_loads_a_model_of_one_process(tmp_path):
    ranks.run(_load_on_one_rank_by_itself, 2, _folder(tmp_path / "model"))


def test_tied_tensors_must_be_equal(tmp_path):
    path = _folder(tmp_path / "model", tie_word_embeddings=True)
    _changed(path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}))
    run_raises(_load, 2, ValueError, "are one tensor in the model and must be equal", path, in_turns=False)


def test_wrong_arguments_are_refused(tmp_path):
    path = _folder(tmp_path)
    match = r"config_overrides: \['widht'\] must be attributes of LlamaConfig"
    run_raises(_load, 2, ValueError, match, path, in_turns=False, widht=3)
    with pytest.raises(TypeError, match="group: must be given, or mesh"):
        huggingface.from_pretrained(path)
    for wrong, words in {
        "path": "path: 3 must be the path", "mesh": "mesh: int must be a DeviceMesh", "dtype": "dtype: 3 must",
        "model_class": "model_class: 3 must be a class of", "example": "example: int must be a dict",
    }.items():  # fmt: skip
        with pytest.raises(TypeError, match=words):
            huggingface.from_pretrained(**{"path": path, "group": None, wrong: 3})
    with pytest.raises(ValueError, match="device: 'far' must be a device"):
        huggingface.from_pretrained(path, group=None, device="far")
    with pytest.raises(FileNotFoundError, match=r"path: 'owner/name' must be a folder here, .*snapshot_download"):
        huggingface.from_pretrained("owner/name", group=None)
    model = huggingface.from_pretrained(path, group=None)
    for value in (None, 1.5, True):
        with pytest.raises(TypeError, match=f"max_shard_size: {value} must be a number of bytes, or text"):
            huggingface.save_pretrained(model, path, value)
    with pytest.raises(TypeError, match="path: 3 must be the path"):
        huggingface.save_pretrained(model, 3)
    with pytest.raises(ValueError, match="max_shard_size: 'big' must be a positive number of bytes"):
        huggingface.save_pretrained(model, path, "big")
    with pytest.raises(ValueError, match="max_shard_size: 0 must"):
        huggingface.save_pretrained(model, path, 0)
    with pytest.raises(TypeError, match="model: Linear must be a PreTrainedModel"):
        huggingface.save_pretrained(torch.nn.Linear(2, 2), path)


def _saves_by_itself(group, path):
    huggingface.from_pretrained(path, group=group).save_pretrained(path)


def _forward_with_peft(group, path):
    model = huggingface.from_pretrained(path, group=group)
    model.peft_config = {}
    model(input_ids=torch.ones(1, 2, dtype=torch.long))


def _resizes(group, path):
    model = huggingface.from_pretrained(path, group=group)
    before = {name: (type(model.get_submodule(name.rpartition(".")[0])), one) for name, one in model.named_parameters()}
    try:
        model.resize_token_embeddings(100)
    finally:
        for name, (kind, one) in before.items():
            assert type(model.get_submodule(name.rpartition(".")[0])) is kind and model.get_parameter(name) is one
        assert model.config.vocab_size != 100


@pytest.mark.parametrize("tied", [False, True])
def test_resizing_after_sharding_is_refused_before_anything_changes(tied, tmp_path):
    path = _folder(tmp_path, tie_word_embeddings=tied)
    if tied:
        _changed(path, lambda t: t.pop("lm_head.weight"))
    match = "resize_token_embeddings: the model is sharded; resize before sharding"
    run_raises(_resizes, 2, RuntimeError, match, path, in_turns=False)


def test_what_knows_of_no_shards_is_refused(tmp_path):
    path = _folder(tmp_path)
    run_raises(_saves_by_itself, 2, RuntimeError, "call tp_ext.huggingface.save_pretrained", path, in_turns=False)
    run_raises(
        _forward_with_peft, 2, RuntimeError, "has adapters of PEFT, .* use tp_ext.add_lora", path, in_turns=False
    )


def _save_again(group, path):
    model = huggingface.from_pretrained(path, group=group)
    huggingface.save_pretrained(model, path, "40KB")
    again = huggingface.from_pretrained(path, group=group)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), again.parameters(), strict=True))


def test_a_model_is_saved_over_the_files_it_was_read_from(tmp_path):
    path = _folder(tmp_path / "model")
    before = {name: t for file in path.glob("*.safetensors") for name, t in load_file(file).items()}
    run(_save_again, 2, path)
    after = {name: t for file in path.glob("*.safetensors") for name, t in load_file(file).items()}
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    shutil.rmtree(path)
