"""Full weights for inference engines: tensor for tensor those of the files that transformers writes."""

import copy
import sys
import types
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import tp_ext
from tests.auto.architectures import build
from tests.helpers import simulated
from tests.helpers.meshes import mesh_of
from tests.helpers.one_plan import run
from tests.helpers.peak_memory import Peak
from tp_ext import auto, huggingface
from tp_ext.huggingface import weight_source
from tp_ext.huggingface.weight_source import _class_of_source

transformers.utils.logging.disable_progress_bar()
KINDS = {
    "llama": "fewer KV heads than 4 ranks",
    "gpt2": "Conv1D with three parts, tied",
    "phi3": "fused q, k, v and gate, up",
    "mixtral": "experts that the files hold one by one",
    "qwen3_moe": "experts under other names",
    "t5": "an encoder and a decoder, three names of one table",
    "bert-mlm": "a bias with two names",
    "vit": "images",
}
TARGETS = ["q_proj", "down_proj"]


def _made(name):
    torch.manual_seed(0)
    if name != "llama of 4 layers":
        return build(name)
    model, example = build("llama")
    model.config.num_hidden_layers = 4
    return transformers.LlamaForCausalLM(model.config), example


def _sharded(name, group):
    model, example = _made(name)
    p = 1 if group is None else dist.get_world_size(group)
    return auto.apply(auto.plan(model, example, p), model, group)


def _in_files(model, path):
    model.save_pretrained(path)
    return {name: tensor for file in Path(path).glob("*.safetensors") for name, tensor in load_file(file).items()}


def _check(source, expected, dtype=None):
    pairs = list(source)
    assert [(meta.name, meta.dtype, meta.shape) for meta in source.metadata()] == [
        (name, tensor.dtype, tuple(tensor.shape)) for name, tensor in pairs
    ]
    found = dict(pairs)
    assert len(found) == len(pairs)
    assert found.keys() == expected.keys(), sorted(found.keys() ^ expected.keys())
    for name, tensor in expected.items():
        wanted = tensor if dtype is None else tensor.to(dtype)
        assert found[name].dtype == wanted.dtype and found[name].is_contiguous(), name
        assert torch.equal(found[name], wanted), name
        assert found[name].untyped_storage().nbytes() == found[name].nbytes  # nothing else is kept with it


def _of_files(group, name, expected):
    model = _sharded(name, group)
    source = weight_source(model)
    _check(source, expected)
    _check(weight_source(model, dtype=torch.bfloat16), expected, torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    passes = iter(source)
    first, second = next(passes), next(passes)
    passes.close()  # broken off
    assert torch.equal(first[1], 2 * expected[first[0]]) and torch.equal(second[1], 2 * expected[second[0]])
    _check(source, {key: 2 * value if value.is_floating_point() else value for key, value in expected.items()})


@pytest.mark.parametrize("p", [1, 2, pytest.param(4, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", KINDS)
def test_tensors_are_those_of_the_files(name, p, tmp_path):
    simulated.run(_of_files, p, name, _in_files(_made(name)[0], tmp_path))


def _llama_parts(model):
    base = model.model
    model.pipeline_parts = lambda: (base.embed_tokens, base.layers, [base.norm, model.lm_head])
    return model


def _over_axes(group, name, how, expected):
    sizes = (2, 1, 1, 2) if how.startswith("pp") else (1, 2, 1, 2)
    mesh = mesh_of(*sizes)
    model = _sharded(name, mesh["tp"])
    if how == "fsdp":
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh["dp"])
        model = fully_shard(model, mesh=mesh["dp"])
    elif how == "ddp":
        model = DistributedDataParallel(model, process_group=mesh["dp"].get_group())
    elif how == "zero":
        model = tp_ext.parallelize(_llama_parts(model), mesh, loss=nn.functional.mse_loss, zero=2)
    elif how == "pp":
        model = tp_ext.parallelize(_llama_parts(model), mesh, loss=nn.functional.mse_loss, microbatches=2)
    else:  # two stages on a rank
        options = {"schedule": "Interleaved1F1B", "microbatches": 2, "loss": nn.functional.mse_loss}
        model = tp_ext.parallel.pipeline_stages(_llama_parts(model), mesh["pp"], **options).stages
    _check(weight_source(model, mesh=None if how in ("zero", "pp") else mesh), expected)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("mixtral", "fsdp"),
        ("llama", "ddp"),
        ("llama", "zero"),
        ("mixtral", "pp"),
        ("llama of 4 layers", "pp, 2 a rank"),
    ],
)
def test_over_data_and_pipeline_axes(name, how, tmp_path):
    run(_over_axes, 4, name, how, _in_files(_made(name)[0], tmp_path), timeout=120)


def _with_adapters(model):
    torch.manual_seed(1)
    tp_ext.add_lora(model, targets=TARGETS, r=4, alpha=8.0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_B.weight"):
                tp_ext.manual_seed(2)
                layout = dict(tp_ext.layouts(model))[name]
                full = torch.randn(layout.full_shape(parameter.shape), generator=torch.Generator().manual_seed(3))
                parameter.copy_(layout.shard(full) if layout else full)
    return model


def _adapters(group, path):
    mesh = mesh_of(1, 2, 1, 2)
    model = _with_adapters(_sharded("llama", mesh["tp"]))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    sources = weight_source(model, mesh=mesh), weight_source(model, merge_adapters=False, mesh=mesh)
    merged, plain = (dict(source) for source in sources)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    both = copy.deepcopy(model)
    huggingface.save_adapter(model, path / "adapter")
    tp_ext.merge_lora(both)
    huggingface.save_pretrained(both, path / "merged", mesh=mesh)
    _check(sources[0], load_file(path / "merged" / "model.safetensors"))
    base = _made("llama")[0].state_dict()
    adapter = load_file(path / "adapter" / "adapter_model.safetensors")
    _check(sources[1], base | adapter)
    assert list(plain)[-len(adapter) :] == [name for name in plain if name in adapter]
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    sharded = fully_shard(model, mesh=mesh["dp"])
    _check(weight_source(sharded), merged)
    _check(weight_source(sharded, merge_adapters=False), plain)


def test_adapters_are_merged_to_the_bits_of_merge_lora_and_the_model_stays(tmp_path):
    run(_adapters, 4, tmp_path, timeout=120)


class Block(nn.Module):
    def __init__(self, group, experts=None):
        super().__init__()
        self.attention = tp_ext.ParallelAttention(16, 4, num_kv_heads=2, group=group)
        ffn = {"group": group, "expert_group": experts}
        self.mlp = tp_ext.ParallelMoE(16, 12, 4, 2, **ffn)


def _ours(group):
    mesh = mesh_of(1, 2, 1, 2, names=("pp", "ep", "cp", "tp"))
    torch.manual_seed(0)
    model = Block(mesh["tp"], mesh["ep"])
    expected = tp_ext.full_state_dict(model, mesh=mesh)
    _check(weight_source(model, mesh=mesh), expected)
    sizes = (16, 8, 8)
    wanted = {"attention.qkv.weight": ["q", "k", "v"]}
    q, k, v = expected["attention.qkv.weight"].split(sizes)
    others = {name: value for name, value in expected.items() if name not in wanted}
    _check(weight_source(model, names=wanted, mesh=mesh), {"q": q, "k": k, "v": v, **others})
    renamed = weight_source(model, names=lambda name: f"model.{name}", mesh=mesh)
    _check(renamed, {f"model.{name}": value for name, value in expected.items()})


def test_models_of_our_layers_with_experts_on_other_ranks_and_names_of_ones_own():
    run(_ours, 4)


def _quantised(group):
    model = _sharded("llama", group)
    tp_ext.low_precision.quantize_(model, "int8")
    dense = _made("llama")[0]
    expected = dense.state_dict()
    found = dict(weight_source(model, dtype=torch.float32))
    assert found.keys() == expected.keys()
    errors = [(found[name] - expected[name]).abs().max() / expected[name].abs().max() for name in expected]
    assert 0 < max(errors) < 0.01
    with pytest.raises(ValueError, match=r"dtype: must be given, since '.*q_proj.weight_packed' is a weight in 8 bits"):
        weight_source(model)
    return found


def test_quantised_weights_are_dequantised_to_the_same_bits_for_every_p():
    one, two = simulated.run(_quantised, 1)[0], simulated.run(_quantised, 2)
    for rank in two:
        assert all(torch.equal(one[name], rank[name]) for name in one)


def _peak(group):
    model = _sharded("mixtral", group)
    source = weight_source(model)
    largest = max(tensor.numel() for tensor in tp_ext.full_state_dict(model).values()) * 4
    with Peak() as peak:
        iterated = iter(source)
        while True:
            try:
                next(iterated)
            except StopIteration:
                break
    return peak.most / largest


def test_memory_is_that_of_one_stack_of_experts():
    # The stack, what it is gathered from, and one expert; all tensors of a layer are six times as much
    assert max(simulated.run(_peak, 2)) < 3


def test_a_changed_model_needs_a_new_source():
    model = _sharded("llama", None)
    source, base = weight_source(model), weight_source(model, merge_adapters=False)
    _with_adapters(model)
    assert len(list(source)) == len(source.metadata())
    with pytest.raises(ValueError, match=r"lora_A.weight' must be as it was when the source was made"):
        next(iter(base))
    model.double()
    with pytest.raises(ValueError, match="must be as it was when the source was made: make a new source"):
        next(iter(source))


@dataclass(frozen=True)
class ParamMeta:
    name: str
    dtype: torch.dtype
    shape: tuple
    owners: tuple | None = field(default=None, kw_only=True)


class BaseWithMethods(ABC):
    """The interface of vLLM's WeightSource in its first versions."""

    @abstractmethod
    def metadata(self): ...

    @abstractmethod
    def __iter__(self): ...


class BaseWithAttribute(ABC):
    """That of vLLM 0.33."""

    def __init_subclass__(cls):
        assert isinstance(vars(cls).get("metadata", cached_property(len)), cached_property)

    @property
    @abstractmethod
    def metadata(self): ...

    def iter_full(self):
        raise NotImplementedError


@pytest.mark.parametrize("base", [BaseWithMethods, BaseWithAttribute])
def test_where_vllm_can_be_imported_it_is_a_source_of_vllm(base, monkeypatch):
    name = "vllm.distributed.weight_transfer.base"
    fake = types.ModuleType(name)
    fake.WeightSource, fake.ParamMeta = base, ParamMeta
    model = _sharded("llama", None)
    assert not isinstance(weight_source(model), base)
    for parent in ("vllm", "vllm.distributed", "vllm.distributed.weight_transfer"):
        monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
    monkeypatch.setitem(sys.modules, name, fake)
    _class_of_source.cache_clear()
    try:
        source = weight_source(model)
    finally:
        _class_of_source.cache_clear()
    assert isinstance(source, base) and isinstance(source, huggingface.WeightSource)
    assert all(isinstance(meta, ParamMeta) for meta in source.metadata())
    assert source.metadata() is source.metadata and isinstance(source.metadata, list)
    assert [pair[0] for pair in source.iter_full()] == [meta.name for meta in source.metadata]
    _check(source, model.state_dict())


WRONG = {
    "no model": (lambda model: weight_source(3), TypeError, "module: 3 must be a module, or a list"),
    "no dtype": (lambda model: weight_source(model, dtype="bfloat16"), TypeError, "dtype: 'bfloat16' must be a float"),
    "integers": (lambda model: weight_source(model, dtype=torch.int8), TypeError, "dtype: torch.int8 must be a float"),
    "no flag": (lambda model: weight_source(model, merge_adapters=1), TypeError, "merge_adapters"),
    "no names": (lambda model: weight_source(model, names=3), TypeError, "names: 3 must be a dict or a function"),
    "unknown name": (
        lambda model: weight_source(model, names={"x.weight": "y"}), ValueError,
        r"names: \['x.weight'\] must be names of the model's tensors"),
    "one name of two": (
        lambda model: weight_source(model, names={"lm_head.weight": "model.norm.weight"}), ValueError,
        "names: '.*' and '.*' must have names of their own, not both 'model.norm.weight'"),
    "one name of all": (
        lambda model: weight_source(model, names=lambda name: "w"), ValueError, "must have names of their own"),
    "no name": (lambda model: weight_source(model, names=lambda name: None), TypeError, "names: of '.*' it must give"),
    "too many parts": (
        lambda model: weight_source(model, names={"lm_head.weight": ["a", "b"]}), ValueError,
        r"names: 'lm_head.weight' has 1 parts and must have as many names"),
    "no mesh": (lambda model: weight_source(model, mesh=3), TypeError, "mesh"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments(case):
    call, error, match = WRONG[case]
    with pytest.raises(error, match=match):
        call(_sharded("llama", None))


def _differing(group):
    model = _sharded("llama", group)
    with pytest.raises(ValueError, match=r"dtype, names: .* must be the same on all ranks"):
        weight_source(model, dtype=torch.bfloat16 if dist.get_rank(group) else None)
    with pytest.raises(ValueError, match=r"names: \['x'\] must be names"):
        weight_source(model, names={"x": "y"} if dist.get_rank(group) else None)


def test_arguments_that_differ_between_ranks_are_an_error_on_all():
    run(_differing, 2)


def test_an_adapter_of_a_tied_weight_is_not_merged():
    model = _sharded("gpt2", None)
    tp_ext.add_lora(model, targets="lm_head", r=2, alpha=2.0)
    with pytest.raises(ValueError, match=r"merge_adapters: 'lm_head.weight' is another layer's weight"):
        weight_source(model)
