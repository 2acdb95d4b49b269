"""Pictures of plans: what they show, from the text and the colours of an SVG."""

import re

import pytest

from tests.auto.architectures import build
from tp_ext import auto
from tp_ext.auto.search.picture import COLOURS


@pytest.fixture(scope="module")
def plan():
    model, example = build("llama")
    return auto.plan(model, example, 2)


def _texts(file) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]+)</text>", file.read_text().replace("&gt;", ">"))


def test_a_layer_shows_its_shards_sums_and_gradients(plan, tmp_path):
    plan.draw(tmp_path / "layer.svg")
    texts = _texts(tmp_path / "layer.svg")
    assert texts[0] == "model.layers.0 on p = 2 ranks: full size -> size on a rank"
    expected = [
        "input_layernorm: LlamaRMSNorm", "all-reduce of its gradient, backward: input_layernorm", "q_proj: Linear",
        "weight 64 x 64 -> 32 x 64", "3 x 5 x 64 -> 3 x 5 x 32", "weight 64 x 64 -> 64 x 32",
        "all-reduce of the sum over ranks, forward: o_proj",
        "all-reduce of its gradient, backward: post_attention_layernorm", "act_fn: SiLUActivation",
        "all-reduce of the sum over ranks, forward: down_proj",
    ]  # fmt: skip
    assert [text for text in expected if text not in texts] == []
    assert sum("all-reduce" in text for text in texts) == 4
    drawn = (tmp_path / "layer.svg").read_text()
    cells = {state: drawn.count(f"fill: {colour}") - 1 for state, colour in COLOURS.items()}  # one in the legend
    assert cells == {"sharded": 7 + 6, "partial": 2, "replicated": 4}


def test_a_plan_from_a_file_draws_the_same_picture(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    for one, name in ((plan, "one.svg"), (auto.Plan.load(tmp_path / "plan.json"), "other.svg")):
        one.draw(tmp_path / name, "model.layers.1.mlp")
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "other.svg").read_bytes()
    assert "q_proj: Linear" not in _texts(tmp_path / "one.svg")
    plan.draw(tmp_path / "one.png")
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")


def test_wrong_arguments_are_refused(plan, tmp_path):
    with pytest.raises(ValueError, match=r"path: '.*x.pdf' must end in .png or .svg"):
        plan.draw(tmp_path / "x.pdf")
    with pytest.raises(ValueError, match=r"module: .model\.layer\.0. must be a module that the plan.s example calls"):
        plan.draw(tmp_path / "x.png", "model.layer.0")
