"""Models over a (2, 2) mesh whose layers use different groups, with a weight that is sharded on two dims, one that is
sharded twice on the same dim, and a foreign module: state, checkpoints, norms and checks are those of one process.
"""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import tp_ext
from tests.helpers import ranks
from tests.helpers.meshes import mesh_of
from tests.helpers.on_ranks import on_ranks
from tp_ext import Layout, Part, Sharding, debug
from tp_ext.random import Normal

pytestmark = pytest.mark.core
MESHES = [(2, 2), (1, 4), (4, 1), (1, 3), (1, 1)]
CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def gathered(weight, layout):
    """The full weight, for replicated work: its gradient is this rank's shard of the full one."""
    for sharding, group in reversed(layout):
        sizes = sharding.local_sizes(group.size)
        joined = tp_ext.gather_from_region(weight, group.name, dim=sharding.dim, sizes=sizes)
        weight = sharding.unshard(joined.split(sizes, sharding.dim))
    return weight


class TwoDims(tp_ext.ParallelModule):
    """A linear whose weight is sharded on both dims; its rows have two parts."""

    def __init__(self, in_features, parts, x, y):
        super().__init__(x)
        layout = Layout((Sharding(0, parts), x), (Sharding(1, [in_features]), y))
        self.add_parameter("weight", (sum(parts), in_features), Normal(), sharding=layout, dtype=torch.float64)

    def forward(self, h):
        return F.linear(h, gathered(self.weight, self.tp_layouts["weight"]))


class Foreign(nn.Module):
    """No ParallelModule: rows sharded over x and the rest again over y, initialised by hand, and declared."""

    def __init__(self, features, x, y):
        super().__init__()
        rows = Sharding(0, [features])
        left = rows.local_size(*_place(x))
        layout = Layout((rows, x), (Sharding(0, [left]), y))
        full = torch.linspace(-1, 1, features * features, dtype=torch.float64).view(features, features).sin()
        self.weight = nn.Parameter(layout.shard(full))
        self.register_buffer("count", torch.zeros(2))
        tp_ext.declare_layouts(self, {"weight": layout})

    def forward(self, h):
        return F.linear(h, gathered(self.weight, self.tp_layouts["weight"]))


def _place(mesh):
    return (0, 1) if mesh is None else (mesh.get_local_rank(), mesh.size())


class Model(nn.Module):
    def __init__(self, x, y):
        super().__init__()
        options = {"dtype": torch.float64}
        self.two = TwoDims(7, (3, 5), x, y)
        self.foreign = Foreign(8, x, y)
        self.column = tp_ext.ColumnParallelLinear(8, 6, group=x, gather_output=True, **options)
        self.row = tp_ext.RowParallelLinear(6, 5, group=y, input_is_parallel=False, **options)
        self.norm = tp_ext.RMSNorm(5, group=x, **options)
        self.attention = tp_ext.ParallelAttention(5, 4, num_kv_heads=1, head_dim=2, group=y, **options)

    def forward(self, h):
        h = self.row(self.column(self.foreign(self.two(h).tanh())).tanh())
        return h + self.attention(self.norm(h))


def made(shape, seed=0):
    """The model over a mesh of this shape and its optimizer; shape None: unsharded, without a group."""
    torch.manual_seed(seed)
    mesh = {"x": None, "y": None} if shape is None else mesh_of(*shape, names=("x", "y"))
    model = Model(mesh["x"], mesh["y"])
    # The gradient of the keys' bias is zero but for rounding, which the default eps would turn into whole steps
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)


def train(model, optimizer, steps):
    """The norms of three orders at each step, after which the gradients are clipped."""
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        h = torch.linspace(0, 3, 2 * 3 * 7, dtype=torch.float64).view(2, 3, 7).add(step).cos()
        model(h).square().sum().backward()
        norms.append([tp_ext.grad_norm(model, order) for order in (1.0, float("inf"))])
        norms[-1].append(tp_ext.clip_grad_norm_(model.parameters() if step else model, 0.5))
        optimizer.step()
    return norms


def _trained(group, shape, path):
    model, optimizer = made(shape)
    initial = tp_ext.full_state_dict(model)
    norms = train(model, optimizer, 2)
    debug.check(model, optimizer=optimizer)
    state = tp_ext.full_state_dict(model)
    first = tp_ext.full_state_dict(model, rank0_only=True)
    assert (
        not first if dist.is_initialized() and dist.get_rank() else all(torch.equal(first[k], state[k]) for k in state)
    )
    if path is not None:
        tp_ext.save_checkpoint(path / "checkpoint", model, optimizer)
        tp_ext.save_safetensors(path / "tensors", model)
        full = tp_ext.full_optimizer_state_dict(model, optimizer, rank0_only=True)
        if not dist.is_initialized() or dist.get_rank() == 0:
            torch.save((first, full), path / "full.pt")
    return initial, norms, state, train(model, optimizer, 1), tp_ext.full_state_dict(model)


def _resumed(group, shape, path):
    results = {}
    for how in ("checkpoint", "full", "broadcast", "safetensors"):
        model, optimizer = made(shape, seed=1)
        if how == "checkpoint":
            tp_ext.load_checkpoint(path / "checkpoint", model, optimizer)
        elif how == "safetensors":
            tp_ext.load_safetensors(path / "tensors", model)
            results[how] = tp_ext.full_state_dict(model)
            continue
        else:
            first = how == "full" or dist.get_rank() == 0
            state, states = torch.load(path / "full.pt") if first else ({}, {})
            tp_ext.load_full_state_dict(model, state, broadcast_from_rank0=how == "broadcast")
            tp_ext.load_full_optimizer_state_dict(model, optimizer, states, broadcast_from_rank0=how == "broadcast")
        before = tp_ext.full_state_dict(model)
        results[how] = before, train(model, optimizer, 1), tp_ext.full_state_dict(model)
    return results


@pytest.mark.parametrize(
    ("trained", "resumed"),
    [([(2, 2), (1, 3)], [(4, 1), (1, 1)]), pytest.param(MESHES, MESHES, marks=pytest.mark.exhaustive)],
    ids=["", "every mesh"],
)
def test_training_and_state_over_two_groups(trained, resumed, tmp_path):
    """Initial weights are equal; norms, trained weights and optimizer state close; a save at (2, 2) loads anywhere."""
    want = _trained(None, None, None)
    for shape in trained:
        path = tmp_path if shape == (2, 2) else None
        for got in ranks.run(_trained, torch.Size(shape).numel(), shape, path):
            assert all(torch.equal(got[0][name], value) for name, value in want[0].items())
            torch.testing.assert_close(got[1:], want[1:], **CLOSE)
            last = got if path else None
        if path:
            saved = last
    for shape in resumed:
        for results in ranks.run(_resumed, torch.Size(shape).numel(), shape, tmp_path):
            tensors = results.pop("safetensors")
            assert all(torch.equal(tensors[name], value) for name, value in saved[2].items())
            for before, norms, after in results.values():
                assert all(torch.equal(before[name], value) for name, value in saved[2].items())
                torch.testing.assert_close((norms, after), (saved[3], saved[4]), **CLOSE)


def _drifted(group, name, rank):
    model, _ = made((2, 2))
    if group.rank() == rank:
        with torch.no_grad():
            model.get_parameter(name).view(-1)[0] += 1
    return debug.findings(model)


@pytest.mark.parametrize(
    ("name", "rank", "ranks_of_it"),
    [("column.weight", 3, "[2, 3]"), ("row.weight", 0, "[0, 2]"), ("norm.weight", 1, "[0, 1]")],
)
def test_check_names_a_parameter_that_drifted(name, rank, ranks_of_it):
    """On a replica along the other axis; all ranks get the same list."""
    found = ranks.run(_drifted, 4, name, rank)
    assert all(one == found[0] for one in found)
    assert any(s.startswith(f"over the ranks {ranks_of_it}: {name}: must be the same") for s in found[0]), found[0]
    assert ranks.run(_drifted, 4, name, None) == [[]] * 4


def _half(group):
    """A layer over all ranks and one over pairs of them, which lie within: neither is an axis across the other."""
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][group.rank() // 2]
    torch.manual_seed(0)
    options = {"dtype": torch.float64}
    model = nn.Sequential(
        tp_ext.ColumnParallelLinear(5, 6, group=group, gather_output=True, **options),
        tp_ext.ColumnParallelLinear(6, 3, group=pair, gather_output=True, **options),
    )
    model(torch.ones(2, 5, dtype=torch.float64)).square().sum().backward()
    full, norm = tp_ext.full_state_dict(model), tp_ext.grad_norm(model)
    first = tp_ext.full_state_dict(model, rank0_only=True)
    for param in model.parameters():
        param.data.zero_()
    tp_ext.load_full_state_dict(model, first, broadcast_from_rank0=True)
    return full, norm, tp_ext.full_state_dict(model), sum(len(one) for one in _owned_chunks(model))


def _owned_chunks(model):
    for value in tp_ext.sharded_state_dict(model)["model"].values():
        yield [chunk for chunk in value.local_chunks if chunk[2]]


def test_a_group_within_another():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6).double(), nn.Linear(6, 3).double())
    per_rank = ranks.run(_half, 4)
    model.load_state_dict(per_rank[0][0])
    model(torch.ones(2, 5, dtype=torch.float64)).square().sum().backward()
    want = nn.utils.get_total_norm([param.grad for param in model.parameters()])
    for full, norm, loaded, _ in per_rank:
        torch.testing.assert_close(norm, want, **CLOSE)
        assert all(torch.equal(loaded[name], value) and torch.equal(full[name], value) for name, value in full.items())
    assert [owned for *_, owned in per_rank] == [4, 4, 2, 2]


def _overlapping(group):
    """On ranks 0 and 1, a model with layers over groups that share these two ranks; None elsewhere."""
    shared, *groups = [dist.new_group(members) for members in ([0, 1], [0, 1, 2], [0, 1, 3])]
    if group.rank() > 1:
        return None
    model = nn.Sequential(*(tp_ext.RMSNorm(4, group=one) for one in groups))
    with pytest.raises(ValueError, match="must be axes of one mesh"):
        tp_ext.debug.findings(model)
    return tp_ext.debug.findings(model, group=shared)


def test_check_over_one_group_needs_no_mesh():
    assert ranks.run(_overlapping, 4) == [[], [], None, None]


class Assigned(tp_ext.ParallelModule):
    """Registers its parameters by itself and assigns their shardings, at once or one by one."""

    def __init__(self, group, at_once):
        super().__init__(group, sequence_parallel=True)
        shardings = {"sharded": Sharding(0, [4]), "replicated": None}
        for name in shardings:
            self.register_parameter(name, nn.Parameter(torch.ones(2)))
        if at_once:
            self.tp_shardings = shardings
        else:
            self.tp_shardings.update(shardings)

    def forward(self):
        return self.parameter("sharded").sum() + self.parameter("replicated").sum()


@pytest.mark.parametrize("at_once", [True, False])
@on_ranks(2)
def test_assigned_shardings_decide_which_gradients_are_summed(group, at_once):
    layer = Assigned(group, at_once)
    layer().backward()
    assert layer.sharded.grad.tolist() == [1, 1] and layer.replicated.grad.tolist() == [2, 2]


def test_declaring_layouts():
    module, layout = nn.Linear(4, 3), Layout((Sharding(0, [3]), None))
    tp_ext.declare_layouts(module, {"weight": layout})
    tp_ext.declare_layouts(module, {"bias": layout})
    assert dict(tp_ext.layouts(module)) == {"weight": layout, "bias": layout}
    assert dict(tp_ext.shardings(module)) == {"weight": Sharding(0, [3]), "bias": Sharding(0, [3])}
    for layouts, error, match in [
        ({"other": layout}, ValueError, r"layouts: 'other' must be .* one of \['weight', 'bias'\]"),
        ({"weight": Sharding(0, [3])}, TypeError, "layouts: 'weight' is Sharding and must be a Layout"),
        ({"weight": Layout((Sharding(0, [Part(5)]), None))}, ValueError, "tensor: shape .* must have 5 elements"),
    ]:
        with pytest.raises(error, match=match):
            tp_ext.declare_layouts(module, layouts)
