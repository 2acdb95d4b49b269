"""Experts with the other axes: context parallelism, pipelines whose stages do not see the loss, states from one rank.
Each against one process."""

import pytest
import torch
from torch import nn

import tp_ext
from tests.helpers.meshes import mesh_of
from tests.helpers.on_ranks import on_ranks
from tp_ext import ParallelMoE, RouterConfig
from tp_ext.parallel import average_gradients, pipeline_stages

CLOSE = {"rtol": 1e-12, "atol": 1e-12}
FP64 = {"dtype": torch.float64}
CONFIG = RouterConfig(balance_loss=0.3, z_loss=0.1)
SEQUENCE = RouterConfig(balance_loss=0.3, z_loss=0.1, balance_over="sequence")
HIDDEN, SEQ, BATCH, MICROBATCHES = 8, 9, 4, 2


def experts(index, mesh, tp=None, **options):
    """Another number of experts in each layer."""
    ep = mesh and mesh["ep"]
    more = {"router": CONFIG, "shared_experts": index % 2, "bias": True, **FP64, **options}
    return ParallelMoE(HIDDEN, 6, 3 + 2 * index, 2, group=tp, expert_group=ep, **more)


def compare(net, one, axes):
    """All gradients, after their mean over the data axes, with those of one process."""
    average_gradients(net, axes)
    layouts, want = dict(tp_ext.layouts(net)), dict(one.named_parameters())
    for name, param in net.named_parameters():
        full = want[name].grad
        shard = layouts[name].shard(full) if layouts[name] else full
        torch.testing.assert_close(param.grad, shard, **CLOSE, msg=lambda text, name=name: f"{name}: {text}")


# Context parallelism


class Long(nn.Module):
    """Attention over a context group, and experts."""

    def __init__(self, mesh=None, router=CONFIG):
        super().__init__()
        torch.manual_seed(0)
        tp, cp = (None, None) if mesh is None else (mesh["tp"], mesh["cp"])
        options = {"rope": 100.0, "group": tp, **FP64}
        if cp is not None:
            options |= {"context_group": cp, "context": "all_gather"}
        self.attention = tp_ext.ParallelAttention(HIDDEN, 2, **options)
        self.moe = experts(1, mesh, tp, context_group=cp, router=router)

    def forward(self, x, layout=None):
        call = {"batch_size": BATCH} if layout is None else {"layout": layout}
        x = x + self.attention(x, **call)
        return x + self.moe(x, batch_size=BATCH)


@pytest.mark.parametrize("router", [CONFIG, SEQUENCE], ids=["batch", "sequence"])
@on_ranks(4)
def test_context_and_expert_parallelism(group, router):
    """The losses of routers and all gradients, over cp x ep = 2 x 2; 9 tokens a sequence, so 5 and 4 on the ranks."""
    mesh = mesh_of(2, 2, 1, names=("cp", "ep", "tp"))
    cp, ep = mesh["cp"], mesh["ep"]
    net, one = Long(mesh, router), Long(router=router)
    x, weights = torch.randn(2, 2, BATCH * SEQ, HIDDEN, **FP64)  # of the ranks of ep
    own = ep.get_local_rank()
    layout = tp_ext.ContextLayout(batch=BATCH, seq=SEQ, group=cp)
    y = net(layout.shard(x[own]), layout)
    ((y * layout.shard(weights[own])).sum() * 4 + tp_ext.router_loss(net)).backward()
    whole = torch.cat([one.attention(part, batch_size=BATCH) + part for part in x])
    result = whole + one.moe(whole, batch_size=2 * BATCH)
    ((result * weights.flatten(0, 1)).sum() + tp_ext.router_loss(one)).backward()
    torch.testing.assert_close(layout.unshard(y), result.chunk(2)[own], **CLOSE)
    torch.testing.assert_close(tp_ext.router_loss(net), tp_ext.router_loss(one), **CLOSE)
    compare(net, one, [cp, ep])


# Pipelines


class Block(nn.Module):
    def __init__(self, index, mesh, attach):
        super().__init__()
        self.moe = experts(index, mesh, attach_loss=attach)

    def forward(self, x):
        return x + self.moe(x)


class Deep(nn.Module):
    def __init__(self, mesh=None, attach=None):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(HIDDEN, HIDDEN, **FP64)
        self.blocks = nn.ModuleList(Block(i, mesh, attach) for i in range(4))
        self.last = nn.Linear(HIDDEN, 3, **FP64)

    def pipeline_parts(self):
        return [self.first], self.blocks, [self.last]

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def square(output, target):
    return (output - target).square().mean()


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
@on_ranks(4)
def test_stages_attach_the_losses_of_their_routers(group, schedule):
    mesh = mesh_of(2, 2, names=("pp", "ep"))
    pp, ep = mesh["pp"], mesh["ep"]
    one = Deep()
    made = Deep(mesh, attach=1 / MICROBATCHES)
    x, target = torch.randn(2, BATCH, SEQ, HIDDEN, **FP64), torch.randn(2, BATCH, SEQ, 3, **FP64)  # of the ranks of ep
    run = pipeline_stages(made, pp, schedule=schedule, microbatches=MICROBATCHES, loss=square)
    run.step(x[ep.get_local_rank()], target=target[ep.get_local_rank()])
    microbatches = zip(x.chunk(MICROBATCHES, 1), target.chunk(MICROBATCHES, 1), strict=True)
    for part, goal in microbatches:  # the balance of experts is that of a microbatch on all ranks of ep
        loss = square(one(part.flatten(0, 1)), goal.flatten(0, 1)) + tp_ext.router_loss(one)
        (loss / MICROBATCHES).backward()
    for stage in run.stages:
        compare(stage, one, [ep])


# States


@on_ranks(4)
def test_a_state_that_rank_0_has_alone(group):
    mesh = mesh_of(1, 2, 2, names=("dp", "ep", "tp"))
    one, net = experts(1, None), experts(1, mesh, mesh["tp"])
    with torch.no_grad():
        for param in [*one.parameters(), *net.parameters()]:
            param.normal_()
    optimizers = [torch.optim.AdamW(module.parameters()) for module in (one, net)]
    for module, optimizer in zip((one, net), optimizers, strict=True):
        module(torch.randn(5, HIDDEN, **FP64)).square().sum().backward()
        optimizer.step()
    state = one.state_dict() if group.rank() == 0 else None
    moments = tp_ext.full_optimizer_state_dict(one, optimizers[0]) if group.rank() == 0 else None
    tp_ext.load_full_state_dict(net, state, broadcast_from_rank0=True)
    tp_ext.load_full_optimizer_state_dict(net, optimizers[1], moments, broadcast_from_rank0=True)
    full, states = tp_ext.full_state_dict(net), tp_ext.full_optimizer_state_dict(net, optimizers[1])
    if group.rank() == 0:
        assert full.keys() == state.keys() and states["state"].keys() == moments["state"].keys()
        for name, value in state.items():
            assert torch.equal(full[name], value), name
        for name, held in moments["state"].items():
            assert all(torch.equal(states["state"][name][key], value) for key, value in held.items()), name
