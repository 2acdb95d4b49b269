"""tp_ext.debug finds what was broken on purpose, says the same on every rank, and nothing of a healthy model."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.parametrize import register_parametrization, remove_parametrizations

import tp_ext
from tests.helpers.meshes import once_per_rank
from tests.helpers.on_ranks import on_ranks
from tests.helpers.ranks import RankError, run, run_raises
from tp_ext import debug
from tp_ext.debug import simulate

pytestmark = pytest.mark.core


class Model(nn.Module):
    """Sharded, uneven, padded, copied (one KV head for all ranks), replicated, tied, a buffer, a module of torch."""

    def __init__(self, group, sequence_parallel=False, device=None):
        super().__init__()
        options = {"group": group, "sequence_parallel": sequence_parallel, "device": device}
        self.embedding = tp_ext.VocabParallelEmbedding(13, 8, pad_to_multiple_of=2, **options)
        self.norm = tp_ext.LayerNorm(8, **options)
        self.attention = tp_ext.ParallelAttention(8, 4, num_kv_heads=1, **options)
        self.mlp = tp_ext.ParallelMLP(8, 11, activation="swiglu", **options)
        self.scale = nn.Linear(8, 8, device=device)
        self.head = tp_ext.VocabParallelLMHead(8, 13, pad_to_multiple_of=2, **options)
        self.head.weight = self.embedding.weight
        self.register_buffer("table", torch.arange(6.0, device=device))

    def forward(self, ids):
        x = self.embedding(ids)
        x = x + self.attention(self.norm(x), batch_size=1)
        return self.head(self.scale(x + self.mlp(x)))


def _trained(group, sequence_parallel=False, steps=1):
    model = Model(group, sequence_parallel)
    if sequence_parallel:
        model.scale.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        ids = torch.randint(13, (8,))
        optimizer.zero_grad()
        tp_ext.vocab_parallel_cross_entropy(model(ids), ids, group, vocab_size=13).backward()
        optimizer.step()
    return model


# Healthy models


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sp"])
@on_ranks(1, 2, 4)
def test_nothing_is_found_in_a_healthy_model(group, sequence_parallel):
    model = _trained(group, sequence_parallel)
    debug.assert_replicated(model, group=group)
    debug.check(model, group=group)
    debug.check(copy.deepcopy(model))
    debug.check(model.eval())
    debug.check(model.bfloat16())
    debug.check(nn.Linear(3, 3), group=group)
    debug.assert_replicated(torch.tensor(float("nan")), group=group)
    assert debug.findings(Model(group, device="meta"), group=group) == []


def _inside(group, same):
    """A rank's slice is broadcast to all, under what changes names."""
    model = nn.ModuleDict(
        {
            "checkpointed": checkpoint_wrapper(tp_ext.ParallelMLP(4, 8, group=group)),
            "compiled": torch.compile(tp_ext.ParallelMLP(4, 8, group=group)),
            "parametrized": weight_norm(tp_ext.ColumnParallelLinear(4, 8, group=group)),
            "like": tp_ext.ColumnParallelLinear(4, 8, group=group),
            "ddp": nn.parallel.DistributedDataParallel(tp_ext.ParallelMLP(4, 8, group=group), process_group=_alone()),
        }
    )
    debug.check(model)
    model["plain"] = tp_ext.ColumnParallelLinear(4, 8, group=group)
    register_parametrization(model["plain"], "weight", nn.Tanh())
    remove_parametrizations(model["plain"], "weight")
    debug.check(model)  # which is as it was, and was never tied to the layer of the same size
    for name, param in model.named_parameters():
        if any(part in name for part in ("up.weight", "original1")) and same:
            torch.distributed.broadcast(param.data, 0, group=group)
    return debug.findings(model)


@functools.cache
def _alone():
    groups = [torch.distributed.new_group([rank]) for rank in range(torch.distributed.get_world_size())]
    return groups[torch.distributed.get_rank()]


def test_modules_inside_wrappers_are_found():
    assert run(_inside, 2, False) == [[]] * 2
    found, other = run(_inside, 2, True)
    assert found == other and len(found) == 4 and all("ranks 0 and 1 hold the same bits" in text for text in found)


def test_one_process_needs_no_group():
    assert debug.findings(Model(None)) == []
    debug.assert_replicated(Model(None), group=None)


# check: each defect, on one rank


def _defect(group, defect, rank):
    model = _trained(group, "layer norm" in defect)
    here = group.rank() == rank
    with torch.no_grad():
        model = DEFECTS[defect][0](model, here, group) or model
    debug.check(model, group=group)


def _drift(model, here, group):
    model.norm.weight[3] += 0.25 * here


def _drift_of_copies(model, here, group):
    model.attention.qkv.weight[-4:].view(2, 2, 8)[1, 0, 5] = float(here)  # rows of q, then k, then v


def _drift_of_gradient(model, here, group):
    model.attention.out.bias.grad[1] += here


def _no_gradient(model, here, group):
    if here:
        model.norm.bias.grad = None


def _buffer(model, here, group):
    model.table[0] = float(here)


def _frozen(model, here, group):
    model.mlp.up.weight.requires_grad_(not here)


def _dtype(model, here, group):
    if here:
        model.mlp.double()


def _missing(model, here, group):
    if here:
        model.mlp.down.bias = None


def _shape(model, here, group):
    if here:
        model.mlp.down.weight = nn.Parameter(torch.zeros(8, 9))


def _same(model, here, group):
    """As a broadcast over the ranks does it."""
    for param in model.attention.parameters():
        torch.distributed.broadcast(param.data, 0, group=group)


def _generator(model, here, group):
    if here:
        torch.rand(1)


def _eval(model, here, group):
    model.train(not here)


def _untied(model, here, group):
    if here:
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())


def _came_apart(model, here, group):
    model = Model(group, device="meta").to_empty(device="cpu")
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    model.table.zero_()
    return model


DEFECTS = {
    "drift": (_drift, r"norm.weight: must be the same on ranks \[0, 1, 2, 3\]; ranks \[2\] differ .* \(3,\): 1.2"),
    "copies": (_drift_of_copies, r"attention.qkv.weight \(part 2, .*\): .*ranks \[2\] .* index \(0, 5\): 1.0, not 0.0"),
    "gradient": (_drift_of_gradient, r"attention.out.bias.grad: .*ranks \[2\] differ"),
    "no gradient": (_no_gradient, r"norm.bias.grad: must be replicated; missing on ranks \[2\] of 4"),
    "buffer": (_buffer, r"table: .*ranks \[2\] differ .* index \(0,\): 1.0, not 0.0"),
    "frozen": (_frozen, r"mlp.up.weight: .*requires_grad=True.* on ranks \[0, 1, 3\], .*=False.* on ranks \[2\]"),
    "dtype": (
        _dtype,
        r"mlp.up.weight, mlp.up.bias: torch.float32.*, torch.float64.* on ranks \[2\]",
    ),
    "missing": (_missing, r"1 findings\n- mlp.down.bias: torch.float32.* on ranks \[0, 1, 3\], missing on ranks \[2\]"),
    "shape": (_shape, r"on ranks \[2\]: mlp.down.weight: shape \(8, 9\) must be \(8, 3\), by its sharding at p = 4"),
    "same": (_same, r"attention.qkv.weight: ranks 0 and 1 hold the same bits and should hold different slices"),
    "generator": (_generator, r"default generator of the cpu: .*on ranks \[2\]; seed them alike, with tp_ext.manual"),
    "eval": (_eval, r"1 findings\n- module model, module embedding, module norm and \d+ more: train.*, eval.* \[2\]"),
    "untied": (
        _untied,
        r"head.weight and embedding.weight: one parameter on ranks \[0, 1, 3\], missing on ranks \[2\]",
    ),
    "came apart": (_came_apart, r"1 findings\n- head.weight: was tied .* one of \['embedding.weight'\]"),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_check_finds(defect):
    messages = run_raises(_defect, 4, RuntimeError, DEFECTS[defect][1], defect, 2, in_turns=False)
    assert len(set(messages)) == 1, "not the same on all ranks"


def _plain_norm_under_sp(group):
    """The error that users of other libraries lose weeks to: the gradient is that of this rank's tokens alone."""
    norm = nn.LayerNorm(8)
    mlp = tp_ext.ParallelMLP(8, 12, group=group, sequence_parallel=True)
    model = nn.Sequential(norm, mlp)
    torch.manual_seed(group.rank())  # this rank's tokens
    x = torch.randn(3, 8)
    torch.manual_seed(0)
    debug.check(model)
    model(x).square().sum().backward()
    debug.check(model)


def test_check_finds_a_plain_norm_on_sharded_tokens():
    run_raises(_plain_norm_under_sp, 2, RuntimeError, r"2 findings\n- 0.weight.grad: .*\n- 0.bias.grad", in_turns=False)


def _many(group, count):
    model = nn.ParameterList([nn.Parameter(torch.full((2,), float(group.rank()))) for _ in range(count)])
    calls, exchange = [], torch.distributed.all_gather_object
    torch.distributed.all_gather_object = lambda *args, **group: (calls.append(1), exchange(*args, **group))
    try:
        found = debug.findings(model, group=group)
    finally:
        torch.distributed.all_gather_object = exchange
    return found, len(calls)


def test_a_check_takes_two_exchanges_for_any_number_of_findings():
    assert [calls for _, calls in run(_many, 2, 0)] == [1, 1]
    (found, calls), other = run(_many, 2, 11)
    assert (found, calls) == other and calls == 2 and len(found) == 11
    assert found[0].endswith("first at index (0,): 1.0, not 0.0 (2 of 2 elements)")
    assert found[-1] == "10: must be the same on all ranks that hold it"


@once_per_rank
def _groups(ranks):
    """One of each; they live as long as the ranks do."""
    return [torch.distributed.new_group(pair) for pair in ranks]


def _two_groups(group, drifted, over):
    rank = group.rank()
    pair = _groups(((0, 1), (2, 3)))[rank // 2]
    across = _groups(((0, 2), (1, 3)))[rank % 2]
    model = nn.Sequential(tp_ext.ColumnParallelLinear(4, 4, group=group), tp_ext.ColumnParallelLinear(4, 4, group=pair))
    if rank == drifted:
        model[1].bias.data[0] = 7
    debug.check(model, **({} if over == "own" else {"group": {"whole": group, "pair": pair, "across": across}[over]}))


def test_models_of_several_groups():
    """Over a third group, the data axis, a layer's shards are replicated."""
    for over in ("own", "whole", "pair", "across"):
        run(_two_groups, 4, None, over)
    for over in ("whole", "pair"):  # over them the drifted layer is sharded
        run(_two_groups, 4, 2, over)
    with pytest.raises(RankError, match=r"1.bias: must be the same on ranks \[0, 1\]; ranks \[1\] .*: 7.0") as error:
        run(_two_groups, 4, 2, "across")
    assert sorted(error.value.ranks) == [0, 2]


def _over_one_rank(group, given):
    alone = tp_ext.init_mesh("cpu", tp=1)["tp"] if given else None
    return debug.findings(tp_ext.ColumnParallelLinear(4, 4, group=alone))


def test_layers_over_a_group_of_one_rank_are_no_mistake():
    assert run(_over_one_rank, 2, True) == [[], []]
    assert all("no layer is sharded" in text for (text,) in run(_over_one_rank, 2, False))


def test_a_check_names_ranks_whose_weights_differ():
    run_raises(_differing, 2, RuntimeError, "ranks whose weights differ", in_turns=False)


def _differing(group):
    layer = tp_ext.RowParallelLinear(4, 4, group=group)
    with torch.no_grad():
        layer.bias += group.rank()
    debug.check(layer)


def _quantised(rank, group, weights):
    model = tp_ext.ParallelMLP(16, 32, group=group)
    tp_ext.low_precision.quantize_(model, weights, block=8)
    return tp_ext.debug.findings(model)


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_quantised_layers(weights):
    assert simulate(_quantised, 2, weights) == [[], []]
