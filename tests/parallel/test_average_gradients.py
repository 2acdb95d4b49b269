"""Training of a model with experts over data, expert and tensor axes against one process: each way of combining
gradients, norms, full state dicts, checkpoints, checks."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import tp_ext
from tests.helpers import ranks
from tests.helpers.meshes import mesh_of
from tests.helpers.on_ranks import on_ranks
from tp_ext import ParallelMoE, RouterConfig
from tp_ext.parallel import average_gradients, expert_modules, ignore_experts

NAMES = ("dp", "ep", "tp")
LAYOUTS = [(2, 2, 1), (1, 2, 2), (1, 4, 1), (2, 1, 2)]
CLOSE = {"rtol": 1e-11, "atol": 1e-12}
CONFIG = RouterConfig(balance_loss=0.1, z_loss=0.01)


class Net(nn.Module):
    """Two expert layers between a norm and a linear of torch."""

    def __init__(self, mesh=None, sequence_parallel=False):
        super().__init__()
        dp, ep, tp = (None, None, None) if mesh is None else (mesh[name] for name in NAMES)
        options = {"group": tp, "expert_group": ep, "data_groups": [dp], "router": CONFIG, "dtype": torch.float64}
        self.norm = tp_ext.RMSNorm(4, group=tp, dtype=torch.float64)
        self.first = ParallelMoE(4, 6, 5, 2, bias=True, shared_experts=1, **options)
        self.second = ParallelMoE(4, 5, 6, 3, capacity=1.2, activation="gelu", **options)
        self.head = nn.Linear(4, 3, dtype=torch.float64)

    def forward(self, x):
        x = self.norm(x)
        x = x + self.first(x)
        return self.head(x + self.second(x))


def loss_of(output, net):
    return output.square().mean() + tp_ext.router_loss(net)


def steps(net, model, batches, combine=lambda: None):
    """Three steps with clipping; the losses and the norms."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    results = []
    for x in batches:
        loss = loss_of(model(x), net)
        loss.backward()
        combine()
        results += [loss.detach(), tp_ext.clip_grad_norm_(net, 0.5)]
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(results), optimizer


def batches_of(data, size):
    torch.manual_seed(3)
    return [x.view(size, -1, 4)[data] for x in torch.randn(3, 12, 4, dtype=torch.float64)]


def net_of(mesh=None):
    torch.manual_seed(1)
    return Net(mesh)


def prepared(mesh, how):
    """The net, the model to call and what combines gradients after backward."""
    net = net_of(mesh)
    data = mesh["dp", "ep"]._flatten("data")
    if how == "ddp":
        ignore_experts(net)
        experts = expert_modules(net)
        model = DistributedDataParallel(net, process_group=data.get_group())
        return net, model, lambda: [average_gradients(one, mesh["dp"]) for one in experts]
    if how == "fsdp2":
        for one in expert_modules(net):
            fully_shard(one, mesh=mesh["dp"])
        fully_shard(net, mesh=data)
        return net, net, lambda: None
    return net, net, lambda: average_gradients(net, [mesh["dp"], mesh["ep"]])


def _trained(group, sizes, how):
    mesh = mesh_of(*sizes, names=NAMES)
    net, model, combine = prepared(mesh, how)
    data = mesh["dp"].get_local_rank() * mesh["ep"].size() + mesh["ep"].get_local_rank()
    results, _ = steps(net, model, batches_of(data, sizes[0] * sizes[1]), combine)
    full = tp_ext.full_state_dict(model)
    first = tp_ext.full_state_dict(model, rank0_only=True)
    tp_ext.debug.check(net)
    replica = how == "average_gradients" and mesh["dp"].get_local_rank()  # a job of its own, as far as is known
    assert bool(first) == (
        group.rank() == 0 or bool(replica and mesh["ep"].get_local_rank() == 0 == mesh["tp"].get_local_rank())
    )
    assert not first or all(torch.equal(first[name], value) for name, value in full.items())
    return results, full


@pytest.fixture(scope="module")
def one_process():
    net = net_of()
    results, _ = steps(net, net, batches_of(0, 1))
    return results, net.state_dict()


@pytest.mark.parametrize("how", ["average_gradients", "ddp", "fsdp2"])
@pytest.mark.parametrize("sizes", LAYOUTS)
def test_three_steps(sizes, how, one_process):
    want, state = one_process
    found = ranks.run(_trained, 4, sizes, how)
    means = torch.stack([results for results, _ in found]).mean(0)
    torch.testing.assert_close(means[::2], want[::2], **CLOSE)
    for results, full in found:
        torch.testing.assert_close(results[1::2], want[1::2], **CLOSE)
        assert full.keys() == state.keys()
        for name, value in full.items():
            torch.testing.assert_close(value, state[name], **CLOSE)


def _initial(group, sizes):
    return tp_ext.full_state_dict(net_of(mesh_of(*sizes, names=NAMES)))


def test_initial_weights_are_the_same_bits_in_every_layout():
    want = net_of().state_dict()
    for sizes in LAYOUTS:
        for full in ranks.run(_initial, 4, sizes):
            assert full.keys() == want.keys() and all(torch.equal(full[name], want[name]) for name in want)


def _saved(group, sizes, how, path):
    mesh = mesh_of(*sizes, names=NAMES)
    net, model, combine = prepared(mesh, how)
    data = mesh["dp"].get_local_rank() * mesh["ep"].size() + mesh["ep"].get_local_rank()
    _, optimizer = steps(net, model, batches_of(data, sizes[0] * sizes[1]), combine)
    tp_ext.save_checkpoint(path, net, optimizer)
    state = tp_ext.full_optimizer_state_dict(net, optimizer)
    return tp_ext.full_state_dict(net), {name: one["momentum_buffer"] for name, one in state["state"].items()}


def _loaded(group, sizes, how, path):
    net, _, _ = prepared(mesh_of(*sizes, names=NAMES), how)
    with torch.no_grad():
        for param in net.parameters():
            param.zero_()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    tp_ext.load_checkpoint(path, net, optimizer)
    state = tp_ext.full_optimizer_state_dict(net, optimizer)
    return tp_ext.full_state_dict(net), {name: one["momentum_buffer"] for name, one in state["state"].items()}


@pytest.mark.parametrize(
    "before, after",
    [
        (((2, 2, 1), "fsdp2"), ((1, 2, 2), "average_gradients")),
        (((1, 2, 2), "average_gradients"), ((1, 4, 1), "fsdp2")),
        (((1, 4, 1), "fsdp2"), ((1, 1, 3), "average_gradients")),
        (((1, 3, 1), "average_gradients"), ((2, 1, 2), "fsdp2")),
        (((2, 2, 1), "average_gradients"), ((1, 1, 1), "average_gradients")),
    ],
)
def test_a_checkpoint_of_one_layout_in_another(before, after, tmp_path):
    (one, how), (other, other_how) = before, after
    path = tmp_path / "checkpoint"
    saved = ranks.run(_saved, torch.Size(one).numel(), one, how, path)[0]
    for loaded in ranks.run(_loaded, torch.Size(other).numel(), other, other_how, path):
        for want, found in zip(saved, loaded, strict=True):
            assert want.keys() == found.keys() and all(torch.equal(want[name], found[name]) for name in want)


def _flattened(group):
    mesh = mesh_of(2, 2, 1, names=NAMES)
    average_gradients(net_of(mesh), mesh["dp", "ep"]._flatten("data"))


def _mesh(group):
    mesh_of(2, 2, 1, names=NAMES)["dp", "ep"]._flatten("data")


def test_a_flattened_data_axis_is_refused():
    ranks.run(_mesh, 4)  # groups are made by all ranks at once, and what follows is called by one after the other
    ranks.run_raises(_flattened, 4, ValueError, r"data_groups: ranks .* share .* pass the axes of the mesh one by one")


def _plain_ddp(group):
    mesh = mesh_of(2, 2, 1, names=NAMES)
    DistributedDataParallel(net_of(mesh), process_group=mesh["dp", "ep"]._flatten("data").get_group())


def test_ddp_of_the_experts_over_all_data_ranks_is_refused():
    ranks.run(_mesh, 4)
    ranks.run_raises(_plain_ddp, 4, ValueError, "would overwrite and average first.experts")


@on_ranks(4)
def test_a_gradient_of_another_kind_on_one_rank_of_two_axes_is_an_error_of_all(group):
    """The ranks of the other row do not take their mean, nor wait for this one at the other axis."""
    # The message, and the gradients before and after it, where the last of four ranks has main_grad alone.
    mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    net(torch.full((1, 2), group.rank() + 1.0)).sum().backward()
    before = [param.grad.clone() for param in net.parameters()]
    if group.rank() == 3:
        net[1].bias.main_grad = torch.zeros(1)
    with pytest.raises(ValueError) as error:
        average_gradients(net, [mesh["dp"], mesh["ep"]])
    torch.distributed.barrier(group)
    after = [param.grad for param in net.parameters()]
    assert "main_grad of parameter 3, of shape (1,), must be alike on all ranks" in str(error.value)
    assert all(map(torch.equal, before, after))
