"""What a sharded state dict holds: every kind of entry, of every optimizer, of a stage of a pipeline."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.nn.parallel import DistributedDataParallel

import tp_ext
from tests.helpers import ranks
from tests.helpers.models import FP64

pytestmark = pytest.mark.core
CLOSE = {"rtol": 1e-12, "atol": 1e-12}  # sums over ranks in another order


class Odd(nn.Module):
    """Frozen parameters, buffers, extra state of numbers and tensors, an empty parameter, one number."""

    def __init__(self, group):
        super().__init__()
        self.up = tp_ext.ColumnParallelLinear(3, 7, group=group, **FP64)
        self.down = tp_ext.RowParallelLinear(7, 3, group=group, **FP64)
        self.plain = nn.Linear(3, 3, **FP64)
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.empty = nn.Parameter(torch.empty(0, 4, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros(2))
        self.plain.requires_grad_(False)
        self.extra = {"calls": 0, "history": [torch.zeros(2)], "nothing": {}}

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state

    def forward(self, x):
        self.seen += 1
        self.extra["calls"] += 1
        self.extra["history"][0] += 1
        return self.plain(self.down(self.up(x))) * self.scale


def _odd(group, make, steps):
    torch.manual_seed(steps)
    model = Odd(group)
    optimizer = make(model)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 3, dtype=torch.float64)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def _two_groups(model):
    groups = [{"params": [model.up.weight], "lr": 0.3}, {"params": [model.scale, model.plain.weight], "foo": "bar"}]
    return torch.optim.AdamW([*groups, {"params": [model.down.bias], "betas": (0.5, 0.6)}], lr=0.1)


MAKE = {
    "AdamW foreach": lambda m: torch.optim.AdamW(m.parameters(), foreach=True, amsgrad=True),
    "AdamW fused": lambda m: torch.optim.AdamW(m.parameters(), fused=True),
    "AdamW, lr a tensor": lambda m: torch.optim.AdamW(m.parameters(), lr=torch.tensor(0.01), foreach=False),
    "groups": _two_groups,
    "SGD": lambda m: torch.optim.SGD(m.parameters(), 0.1, momentum=0.9),
    "SGD without state": lambda m: torch.optim.SGD(m.parameters(), 0.1),
    "NAdam": lambda m: torch.optim.NAdam(m.parameters()),
    "ASGD": lambda m: torch.optim.ASGD(m.parameters()),
}


def _save_odd(group, path):
    for name, make in MAKE.items():
        model, optimizer = _odd(group, make, 2)
        optimizer.param_groups[0]["initial_lr"] = 0.125  # as schedulers do
        tp_ext.save_checkpoint(path / name, model, optimizer)


def _load_odd(group, path, names):
    found = {}
    for name in names:
        model, optimizer = _odd(group, MAKE[name], 0)
        model.extra = {"calls": -1, "history": [torch.zeros(2) - 1], "nothing": {}}
        tp_ext.load_checkpoint(path / name, model, optimizer)
        state = tp_ext.full_optimizer_state_dict(model, optimizer)
        found[name] = tp_ext.full_state_dict(model), state, model.extra
    return found


def test_every_optimizer_and_every_entry(tmp_path):
    ranks.run(_save_odd, 2, tmp_path)
    saved = ranks.run(_load_odd, 2, tmp_path, list(MAKE))[0]
    for name, make in MAKE.items():
        model, optimizer = _odd(None, make, 2)
        optimizer.param_groups[0]["initial_lr"] = 0.125
        want = tp_ext.full_optimizer_state_dict(model, optimizer)
        _, state, extra = saved[name]
        assert want.keys() == state.keys() and want["state"].keys() == state["state"].keys()
        for key, entry in want["state"].items():
            torch.testing.assert_close(state["state"][key], entry, **CLOSE)
        assert state["param_groups"] == want["param_groups"]
        assert extra["calls"] == 2 and extra["history"][0].tolist() == [2, 2]
    some = ["AdamW foreach", "AdamW, lr a tensor", "groups", "SGD without state", "ASGD"]  # every kind of entry
    for one in ranks.run(_load_odd, 3, tmp_path, some):
        for name in some:  # the same bits at another number of ranks
            torch.testing.assert_close(one[name][0], saved[name][0], rtol=0, atol=0)
            torch.testing.assert_close(one[name][1]["state"], saved[name][1]["state"], rtol=0, atol=0)


def _stage(group, path, load):
    """Each rank is a stage of a pipeline: names of its own, no tensor parallelism."""
    torch.manual_seed(group.rank() + 10 * load)
    model = nn.ModuleDict({f"layer{group.rank()}": tp_ext.ColumnParallelLinear(3, 4, group=None, **FP64)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5 if load else 0.1 * group.rank())
    (tp_ext.load_checkpoint if load else tp_ext.save_checkpoint)(path, model, optimizer)
    return model.state_dict(), optimizer.param_groups[0]["lr"]


def test_stages_of_a_pipeline_have_names_of_their_own(tmp_path):
    path = tmp_path / "saved"
    saved = ranks.run(_stage, 3, path, False)
    for (state, lr), (want, want_lr) in zip(ranks.run(_stage, 3, path, True), saved, strict=True):
        assert lr == want_lr
        torch.testing.assert_close(state, want, rtol=0, atol=0)
    ranks.run_raises(_stage, 2, KeyError, "missing keys .., unexpected keys .*layer2", path, True, in_turns=False)


def _wrapped(group, path):
    full = {
        "0.weight": torch.randn(5, 3),
        "0.bias": torch.randn(5),
        "1.weight": torch.randn(3, 5),
        "1.bias": torch.ones(3),
    }
    model = nn.Sequential(tp_ext.ColumnParallelLinear(3, 5, group=group), tp_ext.RowParallelLinear(5, 3, group=group))
    tp_ext.load_full_state_dict(model, full)
    model[0] = checkpoint_wrapper(model[0])
    whole = DistributedDataParallel(model, process_group=dist.new_subgroups(1)[0])
    tp_ext.save_checkpoint(path, whole, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5))
    return full


def test_wrappers_leave_no_trace(tmp_path):
    """DDP and checkpoint_wrapper; one file for torch.load is made of it by torch."""
    want = ranks.run(_wrapped, 2, tmp_path / "saved")[0]
    dcp_to_torch_save(tmp_path / "saved", tmp_path / "one.pt")
    found = torch.load(tmp_path / "one.pt")
    torch.testing.assert_close(found["model"], want, rtol=0, atol=0)
    assert found["optimizer"]["param_groups.0.weight.momentum"] == 0.5


def _meta(group):
    with torch.device("meta"):
        tp_ext.sharded_state_dict(tp_ext.RMSNorm(3, group=group))


def _foreign(group):
    model = tp_ext.ColumnParallelLinear(3, 4, group=group)
    tp_ext.sharded_state_dict(model, torch.optim.SGD(nn.Linear(5, 7).parameters()))


def _factored(group):
    model = tp_ext.ColumnParallelLinear(3, 4, group=group)
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.state[model.weight]["row"] = torch.ones(2)
    tp_ext.sharded_state_dict(model, optimizer)


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (_meta, "module: 'weight' is on the meta device and must have values"),
        (_foreign, r"optimizer: a parameter of shape \(7, 5\) must be one of the module's"),
        (_factored, r"optimizer: state 'row' of 'weight' has shape \(2,\) and must have .* \(2, 3\)"),
    ],
)
def test_values_that_cannot_be_saved_are_named(fn, message):
    ranks.run_raises(fn, 2, ValueError, message)


def test_buffers_that_are_not_dense_are_named(tmp_path):
    scales, zeros = torch.ones(3), torch.zeros(3)
    per_channel = torch.quantize_per_channel(torch.ones(3, 4), scales, zeros, 0, torch.qint8)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    module = nn.Linear(2, 2)
    for buffer, form in (
        (torch.eye(3).to_sparse(), "torch.sparse_coo"),
        (torch.eye(3).to_sparse_csr(), "torch.sparse_csr"),
        (per_channel, "quantized"),
        (nested, "nested"),
    ):
        module.register_buffer("odd", buffer)
        with pytest.raises(TypeError, match=f"module: 'odd' is a {form} tensor and must be a dense one"):
            tp_ext.save_checkpoint(tmp_path / "saved", module)
    module.odd = torch.ones(1, 4).expand(3, 4)
    tp_ext.save_checkpoint(tmp_path / "saved", module)  # which is loaded where each element has memory
    with pytest.raises(ValueError, match="module: 'odd' is expanded and must have memory for each element"):
        tp_ext.load_checkpoint(tmp_path / "saved", module)
    module.odd = torch.zeros(3, 4)
    tp_ext.load_checkpoint(tmp_path / "saved", module)
    assert module.odd.eq(1).all()
