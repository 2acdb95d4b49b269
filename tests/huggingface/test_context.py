"""Models of transformers with the tokens of each sequence cut over ranks: they train as one process, in fp64."""

import copy

import pytest
import torch
import torch.distributed as dist
import transformers

import tp_ext
from tests.auto.compare import only_doubles
from tests.helpers.meshes import mesh_of
from tests.helpers.one_plan import run
from tests.helpers.ranks import run_raises
from tests.huggingface.test_composition import STEPS, check_gradients, check_state, made, optimizer_of, sharded
from tp_ext import huggingface

BATCH, SEQ = 2, 11


def _ids(step):
    ids = torch.randint(4, 100, (BATCH, SEQ), generator=torch.Generator().manual_seed(step))
    labels = ids.clone()
    labels[0, :4] = -100
    return ids, labels


def _trains(group, name, context, tp):
    mesh = mesh_of(1, 1, group.size() // tp, tp)
    dense = made(name)
    model = huggingface.context_parallel(sharded(copy.deepcopy(dense), mesh["tp"]), context=context)
    layout = tp_ext.ContextLayout(batch=BATCH, seq=SEQ, group=mesh["cp"])
    optimizers = [optimizer_of(one) for one in (model, dense)]
    with only_doubles():
        for step in range(STEPS):
            for optimizer in optimizers:
                optimizer.zero_grad()
            ids, labels = _ids(step)
            loss = model(**huggingface.context_inputs(layout, ids, labels)).loss
            loss.backward()
            tp_ext.parallel.sum_gradients(model.parameters(), mesh["cp"])
            expected = dense(input_ids=ids, labels=labels, use_cache=False).loss
            expected.backward()
            total = loss.detach().clone()
            dist.all_reduce(total, group=mesh["cp"].get_group())
            assert total.item() == pytest.approx(expected.item(), rel=1e-9)
            for optimizer in optimizers:
                optimizer.step()
        check_gradients(model, {name: p.grad for name, p in dense.named_parameters(remove_duplicate=False)})
    check_state(model, dense, mesh=mesh)


@pytest.mark.parametrize(
    ("name", "context", "tp"), [("llama", "ring", 2), ("mistral", "all_gather", 1), ("gemma2", "ulysses", 1)]
)
def test_training_is_that_of_whole_sequences(name, context, tp):
    run(_trains, 2 * tp, name, context, tp, timeout=120)


def _call(group, how):
    model = huggingface.context_parallel(made("llama"))
    layout = tp_ext.ContextLayout(batch=BATCH, seq=SEQ, group=group)
    ids = _ids(0)[0]
    inputs = huggingface.context_inputs(layout, ids)
    changes = {"mask": {"attention_mask": torch.ones(BATCH, SEQ)}, "cache": {"use_cache": True}}
    model(**{**inputs, **changes.get(how, {how: None})})


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("layout", "layout: must be given; call the model with context_inputs"),
        ("position_ids", "position_ids: must be those of the layout"),
        ("mask", "attention_mask: must be left out over a context group"),
        ("cache", "use_cache: must be left out over a context group"),
    ],
)
def test_what_attention_over_ranks_does_not_know_is_refused_before_it_sends(how, words):
    run_raises(_call, 2, ValueError, words, how)


def test_wrong_models_and_arguments_are_refused():
    config = made("llama").config
    config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    with pytest.raises(ValueError, match="must not depend on the length of a sequence, and is 'dynamic'"):
        huggingface.context_parallel(transformers.LlamaForCausalLM(config))
    with pytest.raises(ValueError, match=r"must not drop out over a context group, and has p = 0\.1"):
        huggingface.context_parallel(transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_embd=12)))
    config = made("llama").config
    config.attention_dropout = 0.25
    with pytest.raises(ValueError, match=r"self_attn must not drop out over a context group, and has p = 0\.25"):
        huggingface.context_parallel(transformers.LlamaForCausalLM(config))
    with pytest.raises(ValueError, match="context: 'star' must be one of ring"):
        huggingface.context_parallel(made("llama"), context="star")
    with pytest.raises(TypeError, match="model: Linear must be a PreTrainedModel"):
        huggingface.context_parallel(torch.nn.Linear(2, 2))
    ids, layout = _ids(0)[0], tp_ext.ContextLayout(batch=BATCH, seq=SEQ, group=None)
    with pytest.raises(ValueError, match=r"labels: shape \(2, 3\) must be \(2, 11\), by the layout"):
        huggingface.context_inputs(layout, ids, ids[:, :3])
    with pytest.raises(ValueError, match="gradient_reduction: 'max' must be 'sum' or 'mean'"):
        huggingface.context_inputs(layout, ids, gradient_reduction="max")
    with pytest.raises(ValueError, match="layout: must be one of batch= and seq="):
        huggingface.context_inputs(tp_ext.ContextLayout([11, 11], group=None), ids)
    with pytest.raises(TypeError, match="layout: int must be a ContextLayout"):
        huggingface.context_inputs(3, ids)


def test_alone_it_is_the_model_itself_and_its_files_name_no_attention_of_ours(tmp_path):
    dense, (ids, labels) = made("llama"), _ids(0)
    model = huggingface.context_parallel(copy.deepcopy(dense))
    layout = tp_ext.ContextLayout(batch=BATCH, seq=SEQ, group=None)
    loss = model(**huggingface.context_inputs(layout, ids, labels, gradient_reduction="mean")).loss
    torch.testing.assert_close(loss, dense(input_ids=ids, labels=labels).loss)
    huggingface.save_pretrained(model, tmp_path, group=None)
    assert "tp_ext" not in (tmp_path / "config.json").read_text()
