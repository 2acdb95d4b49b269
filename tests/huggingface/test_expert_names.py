"""Names of expert layers in published files, and the way back."""

import pytest
import torch

import tp_ext
from tests.helpers import ranks
from tests.helpers.meshes import mesh_of
from tp_ext.huggingface import from_published_experts, to_published_experts

EXPECTED = {
    "mixtral": {"gate.weight", "experts.0.w1.weight", "experts.2.w3.weight", "experts.1.w2.weight"},
    "qwen3_moe": {"gate.weight", "experts.0.gate_proj.weight", "experts.2.down_proj.weight"},
    "deepseek_v3": {"gate.e_score_correction_bias", "experts.1.up_proj.weight", "shared_experts.gate_proj.weight"},
}


def made(family, **groups):
    torch.manual_seed(0)
    deepseek = family == "deepseek_v3"
    config = tp_ext.RouterConfig("sigmoid" if deepseek else "softmax", correction_bias=deepseek)
    layer = tp_ext.ParallelMoE(4, 5, 3, 2, router=config, shared_experts=int(deepseek), **{"group": None, **groups})
    return torch.nn.ModuleDict({"norm": tp_ext.RMSNorm(4, group=groups.get("group")), "mlp": layer})


def _loaded(group, published, family):
    mesh = mesh_of(1, 2, 2, names=("dp", "ep", "tp"))
    model = made(family, group=mesh["tp"], expert_group=mesh["ep"])
    tp_ext.load_full_state_dict(model, {name: 0 * value for name, value in model_state(family).items()})
    tp_ext.load_full_state_dict(model, from_published_experts(published, family))
    return tp_ext.full_state_dict(model)


def model_state(family):
    return tp_ext.full_state_dict(made(family))


@pytest.mark.parametrize("family", EXPECTED)
def test_published_names_and_back(family):
    state = model_state(family)
    published = to_published_experts(state, family)
    assert {f"mlp.{name}" for name in EXPECTED[family]} | {"norm.weight"} <= set(published)
    assert not any("router" in name or "up_weight" in name for name in published)
    gate = published["mlp.experts.1.w1.weight" if family == "mixtral" else "mlp.experts.1.gate_proj.weight"]
    assert torch.equal(gate, state["mlp.experts.up_weight"][1, :5])
    for found in ranks.run(_loaded, 4, published, family):
        assert found.keys() == state.keys() and all(torch.equal(found[name], state[name]) for name in state)


def test_another_family_is_refused():
    for convert in (to_published_experts, from_published_experts):
        with pytest.raises(ValueError, match="family: 'gpt' must be one of"):
            convert({}, "gpt")
