"""Names of expert layers in published files: converted in memory; written to and read from safetensors, each rank its
own experts and shards.
"""

import os
from unittest import mock

import pytest
import safetensors.torch
import torch
from torch.distributed.fsdp import fully_shard

import tp_ext
from tests.helpers import ranks
from tests.helpers.meshes import mesh_of
from tests.helpers.on_ranks import on_ranks
from tp_ext.debug import count_collectives
from tp_ext.huggingface import from_published_experts, to_published_experts
from tp_ext.parallel import expert_modules

EXPECTED = {
    "mixtral": {"gate.weight", "experts.0.w1.weight", "experts.2.w3.weight", "experts.1.w2.weight"},
    "qwen3_moe": {"gate.weight", "experts.0.gate_proj.weight", "experts.2.down_proj.weight"},
    "deepseek_v3": {"gate.e_score_correction_bias", "experts.1.up_proj.weight", "shared_experts.gate_proj.weight"},
}
NAMES = ("dp", "ep", "tp")


class Model(torch.nn.Module):
    def __init__(self, **modules):
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x):
        return self.mlp(self.norm(x))


def made(family, sizes=None, ffn=5, experts=3, **options):
    """A norm, an expert layer and a module whose name is that of a router, on a mesh or in one process."""
    torch.manual_seed(0)
    mesh = mesh_of(*sizes, names=NAMES) if sizes else dict.fromkeys(NAMES)
    deepseek = family == "deepseek_v3"
    options = {
        "router": tp_ext.RouterConfig("sigmoid" if deepseek else "softmax", correction_bias=deepseek),
        "shared_experts": int(deepseek),
        **options,
    }
    layer = tp_ext.ParallelMoE(4, ffn, experts, 2, group=mesh["tp"], expert_group=mesh["ep"], **options)
    if deepseek and layer.router.e_score_correction_bias is not None:
        layer.router.e_score_correction_bias.copy_(torch.arange(experts))
    return Model(norm=tp_ext.RMSNorm(4, group=mesh["tp"]), router=torch.nn.Linear(2, 2), mlp=layer)


def of_one_process(family, **options):
    return tp_ext.full_state_dict(made(family, **options))


def cleared(model):
    with torch.no_grad():
        for value in [*model.parameters(), *model.buffers()]:
            value.fill_(3e9)
    return model


def assert_same(found, want):
    assert found.keys() == want.keys()
    assert all(torch.equal(found[name], want[name]) and found[name].dtype == want[name].dtype for name in want)


# In memory


@pytest.mark.parametrize("family", EXPECTED)
@on_ranks(4)
def test_published_names_and_back(group, family):
    state = of_one_process(family)
    published = to_published_experts(state, family)
    assert {f"mlp.{name}" for name in EXPECTED[family]} | {"norm.weight", "router.weight"} <= set(published)
    assert not any("mlp.router" in name or "up_weight" in name for name in published)
    gate = published["mlp.experts.1.w1.weight" if family == "mixtral" else "mlp.experts.1.gate_proj.weight"]
    assert torch.equal(gate, state["mlp.experts.up_weight"][1, :5])
    model = cleared(made(family, (1, 2, 2)))
    tp_ext.load_full_state_dict(model, from_published_experts(published, family))
    found = tp_ext.full_state_dict(model)
    assert_same(found, state)


# Files


def _written(group, path, family, sizes, size):
    model = made(family, sizes)
    with count_collectives() as counts:
        tp_ext.save_safetensors(path, model, expert_names=family, max_shard_size=size)
    return max((row.payload for row in counts.rows if row.kind in ("gather", "all_to_all")), default=0)


def _read(group, path, family, sizes):
    model = cleared(made(family, sizes))
    tp_ext.load_safetensors(path, model, expert_names=family)
    return tp_ext.full_state_dict(model)


def in_files(folder):
    state = {}
    for file in folder.glob("*.safetensors"):
        state |= safetensors.torch.load_file(file)
    return state


@pytest.mark.parametrize(
    ("family", "saved", "loaded", "size"),
    [
        ("mixtral", (1, 2, 2), (1, 3, 1), None),
        ("qwen3_moe", (1, 3, 1), (1, 1, 3), 200),
        ("deepseek_v3", (1, 2, 1), (1, 2, 2), 200),
        ("deepseek_v3", (1, 1, 3), (1, 1, 2), None),
        ("mixtral", (2, 2, 1), (2, 1, 2), None),
    ],
)
def test_files_of_published_names(family, saved, loaded, size, tmp_path):
    """They hold the bits of one process, at any (ep, tp). No collective moves more than one expert's matrix, padded to
    6 rows of features, or the shared gate and up projections."""
    want = of_one_process(family)
    published = {name: value.contiguous() for name, value in to_published_experts(want, family).items()}
    most = ranks.run(_written, torch.Size(saved).numel(), tmp_path, family, saved, size)
    assert_same(in_files(tmp_path), published)
    assert max(most) <= (12 if family == "deepseek_v3" else 6) * 4 * 4
    for found in ranks.run(_read, torch.Size(loaded).numel(), tmp_path, family, loaded):
        assert_same(found, want)


def _bytes_read(group, path, sizes):
    model, taken, preadv = cleared(made("mixtral", sizes, ffn=512)), [], os.preadv
    with mock.patch("os.preadv", lambda *args: taken.append(preadv(*args)) or taken[-1]):
        tp_ext.load_safetensors(path, model, expert_names="mixtral")
    return sum(taken), sum(param.nbytes for param in model.parameters())


@pytest.mark.parametrize("sizes", [(1, 3, 1), (1, 2, 2)])
def test_a_rank_reads_its_own_experts_and_shards(sizes, tmp_path):
    whole = made("mixtral", ffn=512)
    tp_ext.save_safetensors(tmp_path, whole, expert_names="mixtral")
    results = ranks.run(_bytes_read, torch.Size(sizes).numel(), tmp_path, sizes)
    assert all(taken == own for taken, own in results)
    experts = sum(param.nbytes for param in whole.mlp.experts.parameters())
    others = sum(param.nbytes for param in whole.parameters()) - experts
    assert sum(taken for taken, _ in results) == experts + len(results) * others


def _sharded_by_fsdp2(group, path, sizes):
    mesh = mesh_of(*sizes, names=NAMES)
    results = []
    for action in ("save", "load"):
        model = made("deepseek_v3", sizes)
        for experts in expert_modules(model):
            fully_shard(experts, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        if action == "save":
            tp_ext.save_safetensors(path, model, expert_names="deepseek_v3")
            continue
        tp_ext.load_safetensors(path, cleared(model), expert_names="deepseek_v3")
        results.append(tp_ext.full_state_dict(model))
    return results[0]


@pytest.mark.parametrize("sizes", [(2, 2, 1), (2, 1, 2)])
def test_under_fsdp2(sizes, tmp_path):
    want = of_one_process("deepseek_v3")
    for found in ranks.run(_sharded_by_fsdp2, 4, tmp_path, sizes):
        assert_same(found, want)
    assert_same(in_files(tmp_path), to_published_experts(want, "deepseek_v3"))


def _stages(group, path):
    mesh = mesh_of(2, 1, 1, 1)
    for action in (tp_ext.save_safetensors, tp_ext.load_safetensors):
        whole = made("qwen3_moe")
        stage = Model(**{name: getattr(whole, name) for name in (("norm", "router"), ("mlp",))[group.rank()]})
        action(
            path, stage if action is tp_ext.save_safetensors else cleared(stage), mesh=mesh, expert_names="qwen3_moe"
        )
    return stage.state_dict()


def test_stages_of_a_pipeline(tmp_path):
    want = of_one_process("qwen3_moe")
    first, second = ranks.run(_stages, 2, tmp_path)
    assert_same(first | second, want)
    assert_same(in_files(tmp_path), to_published_experts(want, "qwen3_moe"))


def test_tied_layers_are_written_once(tmp_path):
    model = torch.nn.ModuleDict({name: made("mixtral").mlp for name in ("one", "two")})
    for name in ("up_weight", "down_weight"):
        setattr(model["two"].experts, name, getattr(model["one"].experts, name))
    tp_ext.save_safetensors(tmp_path, model, expert_names="mixtral")
    assert "two.experts.0.w1.weight" not in in_files(tmp_path)
    again = torch.nn.ModuleDict({name: cleared(made("mixtral").mlp) for name in ("one", "two")})
    tp_ext.load_safetensors(tmp_path, again, expert_names="mixtral")
    assert_same(dict(again.state_dict()), dict(model.state_dict()))


def _from_transformers(group, path, family, prefix):
    mesh = mesh_of(1, 2, 2, names=NAMES)
    deepseek = family == "deepseek_v3"
    layer = tp_ext.ParallelMoE(
        16,
        12,
        3,
        2,
        group=mesh["tp"],
        expert_group=mesh["ep"],
        shared_experts=int(deepseek),
        router=tp_ext.RouterConfig("sigmoid" if deepseek else "softmax", correction_bias=deepseek),
    )
    holder = layer
    for name in reversed(prefix.split(".")):
        inner, holder = holder, torch.nn.Module()
        holder.add_module(name, inner)
    tp_ext.load_safetensors(path, holder, expert_names=family, strict=False)
    return tp_ext.full_state_dict(layer)


def _model_of_transformers(family):
    import transformers

    common = {
        "vocab_size": 7, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
        "num_experts_per_tok": 2, "intermediate_size": 12, "moe_intermediate_size": 12, "head_dim": 8,
    }  # fmt: skip
    if family == "mixtral":
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(**common, num_local_experts=3))
    if family == "qwen3_moe":
        return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**common, num_experts=3))
    ranks_of_mla = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
    experts = {"n_routed_experts": 3, "n_shared_experts": 1, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1}
    return transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**common | ranks_of_mla | experts))


@pytest.mark.parametrize("family", EXPECTED)
def test_files_that_transformers_writes(family, tmp_path):
    """A rank's experts come out of the files as transformers' own stacked tensors."""
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = _model_of_transformers(family)
    block = model.model.layers[0].mlp
    if family == "deepseek_v3":
        block.gate.e_score_correction_bias.uniform_()
    model.save_pretrained(tmp_path)
    prefix = "model.layers.0." + ("block_sparse_moe" if family == "mixtral" else "mlp")
    assert f"{prefix}.gate.weight" in in_files(tmp_path)
    for found in ranks.run(_from_transformers, 4, tmp_path, family, prefix):
        assert torch.equal(found["router.weight"], block.gate.weight)
        assert torch.equal(found["experts.up_weight"], block.experts.gate_up_proj)
        assert torch.equal(found["experts.down_weight"], block.experts.down_proj)
        if family == "deepseek_v3":
            shared = block.shared_experts
            joined = torch.cat([shared.gate_proj.weight, shared.up_proj.weight])
            assert torch.equal(found["shared.up.weight"], joined)
            assert torch.equal(found["shared.down.weight"], shared.down_proj.weight)
            assert torch.equal(found["router.e_score_correction_bias"], block.gate.e_score_correction_bias)


# Errors


def test_another_family_is_refused():
    for convert in (to_published_experts, from_published_experts):
        with pytest.raises(ValueError, match="family: 'gpt' must be one of"):
            convert({}, "gpt")


def _without_names(group, path, action, family, options):
    model = made(family, (1, 2, 1), **options)
    (tp_ext.save_safetensors if action == "save" else tp_ext.load_safetensors)(path, model, expert_names=family)


UNNAMED = {
    "family": ("gpt", {}, "expert_names: 'gpt' must be one of"),
    "bias": ("mixtral", {"bias": True}, "'mixtral' has no name for 'mlp.experts.down_bias'; experts must be gated and"),
    "gelu": ("qwen3_moe", {"activation": "gelu"}, "'qwen3_moe' has no name for 'mlp.experts.up_weight'"),
    "shared": ("mixtral", {"shared_experts": 1}, "no name for 'mlp.shared.up.weight'; .* and none shared"),
}


@pytest.mark.parametrize("what", UNNAMED)
def test_experts_without_a_name_are_refused(what, tmp_path):
    """On all ranks, which agree on it before the first file."""
    family, options, message = UNNAMED[what]
    ranks.run_raises(_without_names, 2, ValueError, message, tmp_path, "save", family, options, in_turns=False)
    tp_ext.save_safetensors(tmp_path, made(family, **options))
    ranks.run_raises(_without_names, 2, ValueError, message, tmp_path, "load", family, options, in_turns=False)


def _load(group, path, strict=True):
    tp_ext.load_safetensors(path, made("mixtral", (1, 2, 1)), expert_names="mixtral", strict=strict)


WRONG = {
    "another family": (
        KeyError,
        r"missing keys \['mlp.experts.0.w1.weight', .*unexpected keys \['mlp.experts.0.down_pro",
    ),
    "an expert less": (KeyError, r"missing keys \['mlp.experts.2.w1.weight', 'mlp.experts.2.w2.weight', 'mlp.exp"),
    "not strict": (
        KeyError,
        r"has only some of the entries of 'mlp.experts.up_weight', and lacks \['mlp.experts.2.w1",
    ),
    "an expert more": (KeyError, r"missing keys \[\], unexpected keys \['mlp.experts.3.w1.weight'\]"),
    "another shape": (ValueError, r"'mlp.experts.1.w3.weight' has shape \(6, 4\) and must have \(5, 4\)"),
    "stacked": (ValueError, "has 'mlp.router.weight', and with expert_names='mixtral' must have 'mlp.gate.weight'"),
}


@pytest.mark.parametrize("what", WRONG)
def test_files_that_do_not_fit_are_named_on_all_ranks(what, tmp_path):
    state = of_one_process("mixtral")
    published = to_published_experts(state, "qwen3_moe" if what == "another family" else "mixtral")
    if what in ("an expert less", "not strict"):
        published = {name: value for name, value in published.items() if "experts.2" not in name}
    elif what == "an expert more":
        published["mlp.experts.3.w1.weight"] = torch.ones(5, 4)
    elif what == "another shape":
        published["mlp.experts.1.w3.weight"] = torch.ones(6, 4)
    elif what == "stacked":
        published = state
    safetensors.torch.save_file({k: v.clone() for k, v in published.items()}, tmp_path / "model.safetensors")
    ranks.run_raises(_load, 2, *WRONG[what], tmp_path, what != "not strict", in_turns=False)
