"""Adapters: what they send and save, the same numbers for every p, by name into a model, and their errors."""

import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import tp_ext
from tests.helpers.on_ranks import on_ranks
from tests.helpers.ranks import run, run_raises
from tp_ext import ColumnParallelLinear, LoRALinear, Part, RowParallelLinear, auto
from tp_ext.checkpoint.gather import gather_full, ranks_of
from tp_ext.model.census import census

pytestmark = pytest.mark.core

close = {"rtol": 1e-12, "atol": 1e-12}
COLUMN, ROW = ColumnParallelLinear, RowParallelLinear
IN, OUT, R, TOKENS = 24, 36, 4, 12
BOTH = pytest.mark.parametrize("kind", [COLUMN, ROW], ids=["column", "row"])
SP = pytest.mark.parametrize("sp", [False, True], ids=["", "sp"])


class Heard(TorchDispatchMode):
    """The collectives that are sent and how many numbers each is given."""

    def __init__(self):
        super().__init__()
        self.sent = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func).split(".")[1]
        if "c10d" in str(func) and name != "wait_tensor":
            self.sent.append((name.removesuffix("_into_tensor").removesuffix("_tensor"), args[0].numel()))
        return func(*args, **(kwargs or {}))


def _sent(group, kind, sp, adapted, trained):
    layer = kind(IN, OUT, group=group, sequence_parallel=sp)
    layer = LoRALinear(layer, R, alpha=1) if adapted else layer.requires_grad_(trained)
    features = IN if kind is COLUMN else IN // group.size()
    x = torch.randn(TOKENS // (group.size() if sp and kind is COLUMN else 1), features, requires_grad=True)
    with Heard() as forward:
        y = layer(x)
    with Heard() as backward:
        y.sum().backward()
    return sorted(forward.sent), sorted(backward.sent)


def _added(more, less):
    more = list(more)
    for one in less:
        more.remove(one)
    return more


@SP
@BOTH
def test_collectives_of_an_adapter_are_r_wide(kind, sp):
    """Beyond what the frozen layer sends anyway; at p = 2, as the table in tp_ext/nn/lora.py has it."""
    wide, own = TOKENS * R, TOKENS * R // 2
    want = {
        (COLUMN, False): ([], [("all_reduce", wide)]),
        (ROW, False): ([("all_reduce", wide)], []),
        (COLUMN, True): (
            [("all_gather", own)],
            [("all_gather", own), ("all_reduce", R * IN), ("reduce_scatter", wide)],
        ),
        (ROW, True): ([("reduce_scatter", wide)], [("all_gather", own), ("all_reduce", OUT * R)]),
    }[kind, sp]
    adapted, frozen = (run(_sent, 2, kind, sp, adapted, False) for adapted in (True, False))
    for one, base in zip(adapted, frozen, strict=True):
        assert tuple(_added(*pair) for pair in zip(one, base, strict=True)) == want
    assert run(_sent, 1, kind, sp, True, False) == [([], [])]


class _Gated(nn.Module):
    """Two column layers of one input, for whose gradient tp_ext.auto has one sum."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(IN)
        self.up, self.gate, self.down = nn.Linear(IN, OUT), nn.Linear(IN, OUT), nn.Linear(OUT, IN)

    def forward(self, x):
        y = self.norm(x)
        return x + self.down(self.up(y).relu() * self.gate(y))


SUBSETS = {
    "before all adapters": (["norm.weight"], []),
    "one A": (["up.lora_A.weight"], []),
    "one B": (["gate.lora_B.weight"], []),
    "A of one, B of the other": (["up.lora_A.weight", "gate.lora_B.weight"], []),
    "norm and a B": (["norm.bias", "up.lora_B.weight"], []),
    "A frozen": (["norm.weight", "up.lora_B.weight"], ["up.lora_A.weight", "gate.lora_A.weight"]),
    "an adapter frozen": (["norm.weight"], ["up.lora_A.weight", "up.lora_B.weight"]),
    "norm frozen": (["gate.lora_A.weight"], ["norm.weight", "norm.bias"]),
}


@on_ranks(2, 3)
@pytest.mark.parametrize("case", SUBSETS)
def test_gradients_of_some_parameters_communicate_alike_on_all_ranks(group, case):
    """In a model of tp_ext.auto: all ranks have the same graph, whatever a caller asks of it."""
    names, frozen = SUBSETS[case]
    torch.manual_seed(0)
    x, dense = torch.randn(TOKENS, IN, dtype=torch.float64), _Gated().double()
    model = auto.apply(auto.plan(dense, (x,), group.size()), copy.deepcopy(dense), group)
    models = model, dense
    assert getattr(model.up, "input_gradient_is_summed_elsewhere", False)
    for name in ("up", "gate", "down"):  # the same adapters at p = 1
        dense.set_submodule(name, COLUMN.from_linear(dense.get_submodule(name), group=None))
    for each in models:
        tp_ext.add_lora(each, targets=["up", "gate", "down"], r=R, alpha=4.0, freeze=False)
    state = {name: torch.randn_like(value) / 6 for name, value in dense.state_dict().items()}
    found = []
    for each in models:
        tp_ext.load_full_state_dict(each, state)
        parameters = dict(each.named_parameters())
        for name in frozen:
            parameters[name].requires_grad_(False)
        layouts = dict(tp_ext.layouts(each))
        grads = torch.autograd.grad(each(x).sin().sum(), [parameters[name] for name in names])
        found.append(
            [gather_full(grad, layouts[n], ranks_of(census(each))) for n, grad in zip(names, grads, strict=True)]
        )
    torch.testing.assert_close(*found, **close)


def _saved(group, kind, sp, adapted, dropout=0.0):
    """Numbers kept for backward, parameters aside; of what is kept twice, once."""
    layer = kind(IN, OUT, group=group, sequence_parallel=sp)
    layer = LoRALinear(layer, R, alpha=1, dropout=dropout) if adapted else layer.requires_grad_(False)
    features = IN if kind is COLUMN else IN // group.size()
    x = torch.randn(TOKENS // (group.size() if sp and kind is COLUMN else 1), features, requires_grad=True)
    parameters = {param.untyped_storage().data_ptr() for param in layer.parameters()}
    kept = {}

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in parameters:
            kept[tensor.untyped_storage().data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = layer(x)
    del y
    return sum(kept.values()), x.numel()


@SP
@BOTH
def test_the_frozen_layer_saves_nothing_and_the_adapter_its_inputs(kind, sp):
    """Its inputs: x for A (dropped out, and then a seed too), and r numbers a token for B, on this rank's tokens."""
    inner = TOKENS * R // (2 if sp else 1)
    assert [kept for kept, _ in run(_saved, 2, kind, sp, False)] == [0, 0]
    for dropout, seed in ((0.0, 0), (0.5, 1)):
        for kept, x in run(_saved, 2, kind, sp, True, dropout):
            assert kept == x + inner + seed


# The same numbers for every p


def _trained(group, sp, dropout):
    """Losses of some steps of a model with adapters everywhere, and its state."""
    options = {"group": group, "sequence_parallel": sp, "dtype": torch.float64}
    tp_ext.manual_seed(5)
    model = nn.ModuleDict(
        {
            "mlp": tp_ext.ParallelMLP(8, 10, activation="geglu", **options),
            "up": COLUMN(8, 9, parts=(4, Part(5, padding=2)), **options),
            "down": ROW(9, 8, parts=(4, Part(5, padding=2)), **options),
        }
    )
    tp_ext.add_lora(model, targets="*", r=3, alpha=6, dropout=dropout)
    first = tp_ext.full_state_dict(model, group=group)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    p, rank = (1, 0) if group is None else (group.size(), group.rank())
    losses = []
    for _ in range(4):
        x = torch.randn(7, 8, dtype=torch.float64)
        x = x.tensor_split(p)[rank] if sp else x
        y = model["down"](model["up"](model["mlp"](x, 7), 7), 7)
        loss = y.square().sum()
        optimizer.zero_grad()
        loss.backward()
        norm = tp_ext.clip_grad_norm_(model, 1.0, group=group)
        optimizer.step()
        losses.append((tp_ext.reduce_from_region(loss, group if sp else None), norm))
    if group is not None:
        tp_ext.debug.check(model, group=group)
    return first, losses, tp_ext.full_state_dict(model, group=group)


@pytest.mark.thinned
@pytest.mark.parametrize("p", [1, 2, 3, 4])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
@SP
def test_initial_weights_masks_and_training_are_those_of_one_process(sp, dropout, p):
    first, losses, last = _trained(None, False, dropout)
    assert first["up.lora_A.weight"].abs().max() <= 8**-0.5 and first["up.lora_A.weight"].std() > 0.4 * 8**-0.5
    assert not any(value.any() for name, value in first.items() if "lora_B" in name)
    assert all(last[name].any() for name in last)
    for one_first, one_losses, one_last in run(_trained, p, sp, dropout):
        assert all(torch.equal(one_first[name], first[name]) for name in first)
        torch.testing.assert_close(one_losses, losses, rtol=1e-10, atol=1e-10)  # after AdamW, which divides
        torch.testing.assert_close(one_last, last, rtol=0, atol=1e-9)


def test_dropout_is_off_in_eval_and_when_merged():
    layer = LoRALinear(COLUMN(4, 4), 2, alpha=1, dropout=0.5)
    nn.init.normal_(layer.lora_B.weight)
    x = torch.randn(3, 4)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


# Torch


def _torch(group, kind):
    layer = LoRALinear(kind(8, 8, group=group, dtype=torch.float64), 2, alpha=1, dropout=0.3)
    nn.init.normal_(layer.lora_B.weight if kind is COLUMN else layer.lora_A.weight)
    layer.eval()
    x = torch.randn(4, layer.base_layer.weight.shape[1], dtype=torch.float64)
    want = layer(x)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), want, **close)
    compiled.train()(x).sum().backward()
    assert torch.equal(copy.deepcopy(layer).eval()(x), layer.eval()(x))
    y = torch.utils.checkpoint.checkpoint(layer.train(), x.requires_grad_(), use_reentrant=False)
    y.sum().backward()
    with torch.autocast("cpu", torch.bfloat16):
        assert layer.float()(x.float()).dtype == torch.bfloat16
    return list(layer.state_dict())


@BOTH
def test_compiled_copied_checkpointed_and_under_autocast(kind):
    want = ["base_layer.weight", "base_layer.bias", "lora_A.weight", "lora_B.weight"]
    assert run(_torch, 2, kind, timeout=120) == [want] * 2


# Into a model


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = tp_ext.ParallelMLP(4, 6)
        self.second = tp_ext.ParallelMLP(4, 6)
        self.second.up = self.first.up  # a layer in two places
        self.again = self.first  # and a block
        self.plain = nn.Linear(4, 4)


def test_add_lora_takes_names_and_ends_of_names():
    for targets, want in (
        ("first.*", ["first.up", "first.down"]),
        ("down", ["first.down", "second.down", "again.down"]),
        (["first.up", "s*.down"], ["first.up", "second.down"]),
    ):
        model = Shared()
        assert tp_ext.add_lora(model, targets=targets, r=2, alpha=4) == want
        trained = {name for name, param in model.named_parameters() if param.requires_grad}
        assert trained and all("lora_" in name for name in trained)


def test_a_shared_module_stays_shared():
    model = Shared()
    base, before = model.first.up, list(model.state_dict())
    names = tp_ext.add_lora(model, targets="up", r=2, alpha=4, freeze=False)
    assert names == ["first.up", "second.up", "again.up"]
    assert isinstance(model.first.up, LoRALinear) and model.first.up.base_layer is base
    assert model.first.up is model.second.up is model.again.up
    assert model.plain.weight.requires_grad and not base.weight.requires_grad
    nn.init.ones_(model.first.up.lora_B.weight)
    weight = base.weight.clone()
    assert tp_ext.merge_lora(model) == names
    assert model.first.up is model.second.up is base and list(model.state_dict()) == before
    torch.testing.assert_close(base.weight - weight, (base.weight - weight)[:1].expand(6, 4))  # once


def test_adapters_are_in_the_mode_of_their_layer():
    model = Shared().eval()
    model.second.train()
    tp_ext.add_lora(model, targets="down", r=2, alpha=4, dropout=0.5)
    assert not any(module.training for module in model.first.down.modules())
    assert all(module.training for module in model.second.down.modules())


# Errors


def _adapted(group):
    model = nn.Sequential(COLUMN(4, 6, group=group))
    tp_ext.add_lora(model, targets="*", r=2, alpha=4)
    nn.init.ones_(model[0].lora_B.weight)
    return model


STATES = {  # what reads the state of one model, and writes it to another
    "state_dict": lambda model, other, _: other.load_state_dict(model.state_dict()),
    "full": lambda model, other, _: tp_ext.load_full_state_dict(other, tp_ext.full_state_dict(model)),
    "checkpoint": lambda model, other, path: (tp_ext.save_checkpoint(path, model), tp_ext.load_checkpoint(path, other)),
    "safetensors": lambda model, other, path: (
        tp_ext.save_safetensors(path, model),
        tp_ext.load_safetensors(path, other),
    ),
    "refit": lambda model, other, _: tp_ext.refit.plan(model, other).run(),
}


def _states(rank, group, how, merged, path):
    """The state of adapters that are merged in the source, in the target, or again apart."""
    x, model, other = torch.randn(3, 4), _adapted(group), _adapted(group)
    want = model(x)
    {"source": model, "target": other, "neither": other}[merged][0].merge()
    if merged == "neither":
        other[0].unmerge()
        STATES[how](model, other, path)
        torch.testing.assert_close(other(x), want)
        return
    before = [param.clone() for param in other.parameters()]
    with pytest.raises(ValueError, match="0: must not be merged where its state is saved or loaded: unmerge"):
        STATES[how](model, other, path)
    assert all(map(torch.equal, other.parameters(), before))


@pytest.mark.parametrize("merged", ["source", "target", "neither"])
@pytest.mark.parametrize("how", STATES)
def test_a_merged_adapter_has_no_state(how, merged, tmp_path):
    tp_ext.debug.simulate(_states, 2, how, merged, tmp_path / "state")


def _errors(group, what):
    layer = COLUMN(4, 4, group=group, device="meta")  # weights would be drawn from the generator of rank 0
    if what == "base":
        LoRALinear(nn.Linear(4, 4), 2, alpha=1)
    elif what == "twice":
        LoRALinear(LoRALinear(layer, 2, alpha=1), 2, alpha=1)
    elif what == "merged":
        adapted = LoRALinear(layer, 2, alpha=1)
        adapted.merge()
        adapted.merge()
    elif what == "not merged":
        LoRALinear(layer, 2, alpha=1).unmerge()
    elif what == "targets":
        tp_ext.add_lora(nn.Sequential(layer), targets=["0", "1.*"], r=2, alpha=1)
    else:
        LoRALinear(layer, **{"r": 2, "alpha": 1, **what})


@pytest.mark.parametrize(
    ("what", "exception", "match"),
    [
        ("base", TypeError, "base: Linear must be a ColumnParallelLinear or a RowParallelLinear"),
        ("twice", TypeError, "base: LoRALinear must be"),
        ("merged", ValueError, "merged: is True already"),
        ("not merged", ValueError, "merged: is False already"),
        ("targets", ValueError, r"targets: '1\.\*' must name a ColumnParallelLinear or RowParallelLinear"),
        ({"r": 0}, ValueError, "r: 0 must be an integer of at least 1"),
        ({"alpha": 0}, ValueError, "alpha: 0 must be a finite number above 0"),
        ({"alpha": "1"}, ValueError, "alpha: '1' must be"),
        ({"dropout": 1.0}, ValueError, r"dropout: 1.0 must be a probability, in \[0, 1\)"),
    ],
    ids=str,
)
def test_errors(what, exception, match):
    run_raises(_errors, 2, exception, match, what, in_turns=what != "targets")
