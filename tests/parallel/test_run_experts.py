"""parallelize of models with experts: training over all axes is that of one process, and wrong groups are refused."""

import functools

import pytest
import torch
from torch import nn

import tp_ext
from tests.helpers import ranks
from tests.helpers.dtypes import default_dtype
from tests.helpers.meshes import mesh_of
from tests.helpers.models import GPT, Block

NAMES = ("pp", "dp", "ep", "cp", "tp")
VOCAB, HIDDEN, BATCH, SEQ, STEPS = 11, 8, 8, 7, 2
CLOSE = {"rtol": 1e-10, "atol": 1e-11}
SEQUENCE = tp_ext.RouterConfig(balance_loss=0.5, z_loss=0.1, balance_over="sequence")
WHOLE = tp_ext.RouterConfig(balance_loss=0.5, z_loss=0.1)


def gpt(mesh=None, router=SEQUENCE, sp=False, **options):
    tp, cp, ep, dp = (None,) * 4 if mesh is None else (mesh[name] for name in ("tp", "cp", "ep", "dp"))
    parallel = {"group": tp, "sequence_parallel": sp}
    experts = {"expert_group": ep, "data_groups": dp, "context_group": cp, "router": router, "shared_experts": 1}
    experts |= {"ffn_hidden_size": 6, "num_experts": 5, "top_k": 2, **options}
    attention = {"num_heads": 2, "rope": 100.0, "context_group": cp}
    block = functools.partial(Block, HIDDEN, attention, experts, **parallel)
    return GPT(VOCAB, HIDDEN, block, norm=None, **parallel)


def batch(step):
    """The batch of all ranks, whose valid tokens are unevenly distributed over them."""
    ids = torch.randint(VOCAB, (BATCH, SEQ), generator=torch.Generator().manual_seed(step))
    target = ids.roll(-1, 1)
    target[:, -1] = -100
    target[0] = target[3, :4] = -100
    return ids, target


def loss_over(group):
    def loss(logits, target):
        return tp_ext.vocab_parallel_cross_entropy(logits, target.flatten(), group, vocab_size=VOCAB, reduction="sum")

    return loss


def one_process(router, **options):
    """Losses, norms and parameters of training with the whole batch, the losses of routers added by hand."""
    tp_ext.manual_seed(5)
    model = gpt(router=router, **options)
    tp_ext.reset_parameters(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
    found = []
    for step in range(STEPS):
        ids, target = batch(step)
        loss = loss_over(None)(model(ids, batch_size=BATCH), target) / (target != -100).sum()
        (loss + tp_ext.router_loss(model)).backward()
        found += [loss.detach(), nn.utils.clip_grad_norm_(model.parameters(), 0.3)]
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(found), {name: value.detach() for name, value in model.state_dict().items()}


def _trains(group, sizes, microbatches, router, sp, options, layer):
    with default_dtype(torch.float64):
        mesh = mesh_of(*sizes, names=NAMES)
        with torch.device("meta"):
            model = gpt(mesh, router, sp, **layer)
        run = tp_ext.parallelize(
            model, mesh, microbatches=microbatches, loss=loss_over(mesh["tp"]), reduction="sum", seed=5, **options
        )
        optimizer = run.optimizer(torch.optim.AdamW, lr=0.01, eps=1e-4, fused=options.get("zero", 0) > 1)
        layout = tp_ext.ContextLayout(batch=BATCH // run.data_size // microbatches, seq=SEQ, group=mesh["cp"])
        found = []
        for step in range(STEPS):
            own = [layout.shard(one.chunk(run.data_size)[run.data_rank], 1) for one in batch(step)]
            keywords = {"layout": layout} if layout.group.size > 1 else {"batch_size": layout.batch}
            found += [run.step(*own, **keywords), run.clip_grad_norm_(0.3)]
            optimizer.step()
            optimizer.zero_grad()
        tp_ext.debug.check(run.state, mesh=mesh)
        want, want_state = one_process(router, **layer)
        torch.testing.assert_close(torch.stack(found), want, **CLOSE)
        torch.testing.assert_close(dict(tp_ext.full_state_dict(run.state, mesh=mesh)), want_state, **CLOSE)


CASES = {
    "experts": ((1, 1, 2, 1, 1), 2, SEQUENCE, False, {"recompute": "selective"}),
    "data and experts": ((1, 2, 2, 1, 1), 1, WHOLE, False, {"recompute": "full"}),
    "experts and tensors": ((1, 1, 2, 1, 2), 1, WHOLE, True, {"zero": 3}),
    "experts over context": ((1, 1, 2, 2, 1), 2, SEQUENCE, False, {"zero": 2}),
    "data, experts and ZeRO": ((1, 2, 2, 1, 1), 2, SEQUENCE, False, {"zero": 3}),
    "pipeline": ((2, 1, 2, 1, 1), 2, SEQUENCE, False, {}),
    "pipeline and ZeRO": ((2, 1, 2, 1, 1), 4, SEQUENCE, False, {"zero": 2, "schedule": "GPipe"}),
    "experts on every rank": ((1, 1, 2, 1, 1), 2, tp_ext.RouterConfig(), False, {"expert_group": None}),
    "whole experts": ((1, 2, 1, 1, 1), 2, SEQUENCE, False, {"zero": 1}),
}


@pytest.mark.parametrize("case", CASES)
def test_training_with_experts_is_that_of_one_process(case):
    sizes, microbatches, router, sp, options = CASES[case]
    layer = {name: options[name] for name in options if name == "expert_group"}
    options = {name: value for name, value in options.items() if name not in layer}
    arguments = sizes, microbatches, router, sp, options, layer
    ranks.run(_trains, torch.Size(sizes).numel(), *arguments, timeout=180)


def _refused(group, wrong):
    mesh = mesh_of(1, 2, 2, 1, 1, names=NAMES)
    groups = {"expert_group": mesh["ep"], "data_groups": mesh["dp"], "router": WHOLE} | wrong.get("layer", {})
    groups = {
        name: mesh[value] if isinstance(value, str) and value in NAMES else value for name, value in groups.items()
    }
    layer = tp_ext.ParallelMoE(4, 4, 4, 2, group=mesh["tp"], **groups)
    options = {"loss": loss_over(None)} | wrong.get("options", {})
    if "fsdp" in wrong:
        model, fsdp = nn.Sequential(layer, nn.Linear(4, 4)), {name: mesh[axis] for name, axis in wrong["fsdp"].items()}
        tp_ext.parallel.pipeline_stages(model, mesh["pp"], microbatches=1, loss=loss_over(None), fsdp=fsdp)
    tp_ext.parallelize(layer, mesh, **options)


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        (
            {"layer": {"expert_group": "dp", "data_groups": "ep"}},
            r"model: expert_group of 'experts', ranks \[.*\], must be mesh\['ep'\]",
        ),
        (
            {"layer": {"data_groups": None}},
            r"model: data_groups and expert_group of '' are the ranks .* must be the data axes of the mesh, \[\[",
        ),
        ({"layer": {"gradient_reduction": "sum"}}, "model: gradient_reduction of '', 'sum', must be 'mean'"),
        (
            {"options": {"zero": 1}},
            "zero: 1 must be 0, 2 or 3 for a model whose experts are sharded over several ranks",
        ),
        (
            {"options": {"zero": 3, "recompute": "selective"}},
            "recompute: 'selective' must be None or 'full' with zero = 3 for a model whose experts are sharded over",
        ),
        ({"fsdp": {"mesh": "ep"}}, r"fsdp: mesh holds the ranks \[.*\], which have different experts"),
        ({"fsdp": {"mesh": "dp", "expert_mesh": "ep"}}, r"fsdp: expert_mesh holds the ranks \[.*\], which have"),
    ],
    ids=["expert_group", "data_groups", "gradient_reduction", "zero 1", "selective", "mesh", "expert_mesh"],
)
def test_experts_over_other_ranks_are_refused(wrong, match):
    ranks.run_raises(_refused, 4, ValueError, match, wrong, in_turns=False)


def _no_data_axis(group):
    mesh = mesh_of(2, 1, names=("ep", "tp"))
    layer = tp_ext.ParallelMoE(4, 4, 4, 2, group=mesh["tp"], expert_group=mesh["ep"])
    tp_ext.parallelize(layer, mesh, loss=loss_over(None), zero=2)


def test_fsdp_needs_a_data_axis_other_than_that_of_experts():
    match = "zero: 2 and 3 need a mesh with the axis 'dp' or 'cp', of any number of ranks"
    ranks.run_raises(_no_data_axis, 2, ValueError, match, in_turns=False)


def _drawn(group, ep):
    mesh = tp_ext.init_mesh("cpu", ep=ep, tp=2)
    loss = tp_ext.vocab_parallel_cross_entropy(torch.zeros(2, 3), torch.tensor([0, 1]), None, mean_over=mesh)
    return mesh.mesh_dim_names, tuple(mesh.shape), loss.item()


def test_init_mesh_has_an_expert_axis_if_it_is_given():
    for names, shape, loss in ranks.run(_drawn, 4, 2):
        assert (names, shape) == (NAMES, (1, 1, 2, 1, 2)) and loss == pytest.approx(1.0986123)
    assert ranks.run(_drawn, 2, 1)[0][:2] == (NAMES, (1, 1, 1, 1, 2))
