"""Files that lack tensors of a model, or have others: initialised and ignored as transformers does, for every p."""

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file

import tp_ext
from tests.auto.architectures import build
from tests.helpers.one_plan import run, run_raises
from tp_ext import huggingface

transformers.utils.logging.disable_progress_bar()

MEMBERS = {  # name of the saved model; its part that is saved; class; overrides; missing; unexpected
    "reward model": (
        "llama", "", transformers.LlamaForSequenceClassification, {"num_labels": 1}, ["score.weight"],
        ["lm_head.weight"],
    ),
    "token classifier": (
        "bert-mlm", "", transformers.BertForTokenClassification, {"num_labels": 3},
        ["classifier.bias", "classifier.weight"], ["cls.predictions.bias", "cls.predictions.transform."],
    ),
    "base model from the file of its head": ("llama", "", transformers.LlamaModel, {}, [], ["lm_head.weight"]),
    "causal model from the file of its base": (
        "llama", "model", transformers.LlamaForCausalLM, {}, ["lm_head.weight"], []),
    "tied bias": ("bert-mlm", "bert", transformers.BertForMaskedLM, {}, ["cls.predictions.bias"], []),
}  # fmt: skip


def _folder(path: Path, name: str, part: str) -> Path:
    torch.manual_seed(0)
    model = build(name)[0]
    model.config.pad_token_id = 0
    model.get_submodule(part).save_pretrained(path)
    return path


def _loaded(group, path, cls, overrides, seed):
    """The full state, the generator's next number, warnings; a loss is finite after a step."""
    p, rank = dist.get_world_size(group), dist.get_rank(group)
    torch.manual_seed(seed if rank == 0 else seed + 100)
    before = torch.get_rng_state()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = huggingface.from_pretrained(path, group=group, model_class=cls, **overrides)
    assert rank == 0 or torch.equal(torch.get_rng_state(), before)
    draw = torch.rand(1)
    model.config.use_cache = False
    output = model.train()(input_ids=torch.arange(1, 11).view(2, 5))
    output[0].float().square().mean().backward()
    assert all(one.grad is not None for one in model.parameters()), p
    texts = [str(one.message) for one in caught if "path:" in str(one.message)]
    return tp_ext.full_state_dict(model), draw, texts


@pytest.mark.parametrize("member", MEMBERS)
def test_missing_tensors_are_those_of_one_process_with_one_warning(member, tmp_path):
    name, part, cls, overrides, missing, unexpected = MEMBERS[member]
    path = _folder(tmp_path, name, part)
    torch.manual_seed(7)
    expected = cls.from_pretrained(path, **overrides).state_dict()
    draw = torch.rand(1)
    for p in (2, 3) if part == "model" else (2,):
        results = run(_loaded, p, path, cls, overrides, 7)
        for state, *_ in results:
            assert state.keys() == expected.keys()
            assert [key for key in expected if not torch.equal(state[key], expected[key])] == []
        assert torch.equal(results[0][1], draw)  # the generator goes on as in one process
        texts = [texts for _, _, texts in results]
        assert [len(one) for one in texts] == [1] + [0] * (p - 1)
        assert all(one in texts[0][0] for one in (cls.__name__, *missing, *unexpected)), texts
        assert ("no file has" in texts[0][0]) == bool(missing)
        assert ("does not have" in texts[0][0]) == bool(unexpected)


def _load(group, path, **options):
    huggingface.from_pretrained(path, group=group, **options)


def test_strict_refuses_missing_and_unexpected_tensors(tmp_path):
    path = _folder(tmp_path, "llama", "")
    match = r"LlamaForSequenceClassification: missing \['score.weight'\], unexpected \['lm_head.weight'\]"
    options = {"model_class": transformers.LlamaForSequenceClassification, "strict": True}
    run_raises(_load, 2, KeyError, match, path, **options)
    with pytest.raises(TypeError, match="strict: 1 must be True or False"):
        huggingface.from_pretrained(path, group=None, strict=1)


Q = "model.layers.0.self_attn.q_proj.weight"


def _as_integers(path):
    tensors = load_file(path / "model.safetensors")
    save_file({**tensors, Q: tensors[Q].int()}, path / "model.safetensors", metadata={"format": "pt"})


def _as_fp8(path, scales):
    """Block FP8 as it is published, without quantization_config."""
    tensors = load_file(path / "model.safetensors")
    others = {f"{Q}_scale_inv": torch.ones(1, 1)} if scales else {}
    tensors = {**tensors, Q: tensors[Q].to(torch.float8_e4m3fn), **others}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def _as_pickle(path):
    torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()
    (path / "training_args.bin").touch()


WRONG = {
    "integers": (_as_integers, ValueError, rf"integers.: .{Q}. has dtype torch.int32 and must be of the kind"),
    "FP8": (lambda path: _as_fp8(path, True), ValueError, f"{Q}_scale_inv' is a part of a quantised weight"),
    "FP8 without scales": (
        lambda path: _as_fp8(path, False), ValueError, f"{Q}' has dtype torch.float8_e4m3fn and must be of the kind",
    ),
    "a pickle": (
        _as_pickle, FileNotFoundError, r"it has \['pytorch_model.bin'\], which are not read: load them by transf"),
}  # fmt: skip


def test_integers_and_pickles_are_refused(tmp_path):
    for kind, (damage, error, match) in WRONG.items():
        path = _folder(tmp_path / kind, "llama", "")
        damage(path)
        run_raises(_load, 2, error, match, path)


class Tagged(transformers.LlamaForSequenceClassification):
    """A model whose constructor and initialisation say which weights do not decay, as Mamba's do."""

    def __init__(self, config):
        super().__init__(config)
        for name, param in self.named_parameters():
            param.tag = name

    def _init_weights(self, module):
        super()._init_weights(module)
        for param in module.parameters(recurse=False):
            param._no_weight_decay = True


def _tags(group, path):
    model = huggingface.from_pretrained(path, group=group, model_class=Tagged, num_labels=1)
    sharded = sum(layout != () for _, layout in tp_ext.layouts(model))
    named = dict(model.named_parameters())
    return sharded, all(param.tag == name for name, param in named.items()), named["score.weight"]._no_weight_decay


def test_attributes_that_a_model_puts_on_its_parameters(tmp_path):
    path = _folder(tmp_path / "model", "llama", "")
    for sharded, *tagged in run(_tags, 2, path):
        assert sharded > 4 and tagged == [True, True]
