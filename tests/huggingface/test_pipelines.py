"""Pipelines of sharded models of transformers, by the lines of docs/guide/huggingface.md: losses, gradients and
parameters are those of one process, in fp64."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F

import tp_ext
from tests.auto.architectures import build
from tests.auto.compare import only_doubles
from tests.auto.test_planner import EXAMPLE, Model
from tests.helpers.meshes import mesh_of
from tests.helpers.one_plan import run, run_raises
from tests.huggingface.test_composition import (
    STEPS,
    batch,
    check_gradients,
    check_state,
    made,
    sharded,
    trained,
)
from tp_ext import auto
from tp_ext.parallel.pipeline.steps import PipelineShapeWarning

MICROBATCHES = 2


def llama_parts(model):
    model.pipeline_parts = lambda: (model.model.embed_tokens, model.model.layers, [model.model.norm, model.lm_head])


def gpt2_parts(model):
    base = model.transformer

    class Positions(type(base.wpe)):
        """Adds the embedding of the positions to that of the tokens."""

        def forward(self, x):
            return x + super().forward(torch.arange(x.shape[1], device=x.device))

    base.wpe.__class__ = Positions
    model.pipeline_parts = lambda: ([base.wte, base.wpe, base.drop], base.h, [base.ln_f, model.lm_head])


def llama_keywords(model, ids):
    return {
        "position_embeddings": model.model.rotary_emb(
            model.lm_head.weight, torch.arange(ids.shape[1]).expand(ids.shape)
        )
    }


MODELS = {"llama": (llama_parts, llama_keywords), "gpt2": (gpt2_parts, lambda model, ids: {})}


def next_tokens(ids):
    return F.pad(ids[:, 1:], (0, 1), value=-100)


def cross_entropy(logits, target):
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def _staged(group, name, schedule):
    mesh = mesh_of(2, 1, 1, 2)
    dense = made(name)
    model = sharded(copy.deepcopy(dense), mesh["tp"])
    add_parts, keywords = MODELS[name]
    add_parts(model)
    warnings.simplefilter("error", PipelineShapeWarning)
    with only_doubles():
        expected, gradients = trained(dense)
        steps = tp_ext.parallel.pipeline_stages(
            model, mesh["pp"], schedule=schedule, microbatches=MICROBATCHES, loss=cross_entropy
        )
        optimizer = torch.optim.AdamW(steps.parameters(), lr=1e-2)
        for step in range(STEPS):
            optimizer.zero_grad()
            ids = batch(step)
            steps.step(ids, target=next_tokens(ids), return_outputs=False, **keywords(model, ids))
            assert steps.loss.item() == pytest.approx(expected[step], rel=1e-9)
            optimizer.step()
        for stage in steps.stages:
            check_gradients(stage, gradients)
        check_state(steps.stages, dense, mesh=mesh)


@pytest.mark.parametrize(
    ("name", "schedule"), [("llama", "1F1B"), pytest.param("gpt2", "GPipe", marks=pytest.mark.exhaustive)]
)
def test_a_pipeline_of_sharded_stages(name, schedule):
    run(_staged, 4, name, schedule, timeout=120)


class DropsOutside(Model):
    """Its own forward drops out, between two modules."""

    def forward(self, ids, labels):
        x = F.dropout(self.table(ids), 0.1, self.training)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())

    def pipeline_parts(self):
        return self.table, self.blocks, [self.norm, self.head]


def _drops_outside():
    return DropsOutside(), EXAMPLE


def _llama():
    model, example = build("llama")
    base = model.model
    model.pipeline_parts = lambda: (base.embed_tokens, base.layers, [base.norm, model.lm_head])
    return model, example


def _outside(group, make, sequence_parallel):
    mesh, (model, example) = mesh_of(1, 1, 1, 2), make()
    auto.apply(auto.plan(model, example, 2, sequence_parallel=sequence_parallel), model, mesh["tp"])
    tp_ext.parallel.pipeline_stages(model, mesh["pp"], microbatches=1, loss=cross_entropy)


@pytest.mark.parametrize(
    ("make", "name", "sequence_parallel"), [(_drops_outside, "DropsOutside", False), (_llama, "LlamaForCausalLM", True)]
)
def test_code_between_the_parts_that_the_plan_needs_is_refused(make, name, sequence_parallel):
    match = f"model: '{name}' must be in one of the parts of pipeline_parts.*: its sharding by tp_ext.auto"
    run_raises(_outside, 2, ValueError, match, make, sequence_parallel)
