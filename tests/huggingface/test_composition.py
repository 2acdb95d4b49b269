"""Sharded models of transformers on more axes than one: losses, every gradient and the parameters after three steps of
AdamW are those of one process, in fp64."""

import copy

import pytest
import torch
import transformers
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import tp_ext
from tests.auto.architectures import build
from tests.auto.compare import only_doubles
from tests.helpers.meshes import mesh_of
from tests.helpers.one_plan import run
from tp_ext import auto, huggingface

transformers.utils.logging.disable_progress_bar()

STEPS = 3
CLOSE = {"rtol": 1e-9, "atol": 1e-9}


def made(name, seed=0):
    """A tiny model in fp64, the same in every process."""
    torch.manual_seed(seed)
    model = build(name)[0].double()
    with torch.no_grad():
        for parameter in model.parameters():  # ones and zeros would hide errors
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return model


def batch(step, rows=4):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(4, 100, (rows, 5), generator=generator)


def loss_of(model, ids):
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def sharded(model, group, sequence_parallel=False):
    ids = batch(0, 3)
    example, p = {"input_ids": ids, "labels": ids, "use_cache": False}, tp_ext.group.parallel_group(group).size
    return auto.apply(auto.plan(model, example, p, sequence_parallel=sequence_parallel), model, group)


def wrapped(model, how, mesh):
    if how == "ddp":
        return DistributedDataParallel(model, process_group=mesh["dp"].get_group())
    base = model.base_model
    for block in getattr(base, "layers", None) or base.h:
        fully_shard(block, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def trained(model, steps=range(STEPS), optimizer=None):
    """Trains in one process; the losses, and the gradients of the last step."""
    optimizer, losses = optimizer or optimizer_of(model), []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, batch(step))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return losses, {name: parameter.grad for name, parameter in model.named_parameters(remove_duplicate=False)}


def check_gradients(model, expected):
    layouts = dict(tp_ext.layouts(model))
    for name, parameter in model.named_parameters():
        found = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        wanted = layouts[name].shard(expected[name]) if layouts.get(name) else expected[name]
        torch.testing.assert_close(found, wanted, **CLOSE, msg=name)


def check_state(model, dense, **axes):
    state, expected = tp_ext.full_state_dict(model, **axes), dense.state_dict()
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, **CLOSE, msg=name)


def _data_parallel(group, name, how, path, sequence_parallel=False):
    """On 2 x 2 ranks; with a path the model is read from it. 5 tokens on 2 ranks: uneven shards."""
    mesh = mesh_of(1, 2, 1, 2)
    with only_doubles():
        dense = made(name)
        if path is None:
            model = sharded(copy.deepcopy(dense), mesh["tp"], sequence_parallel)
        else:
            dense = type(dense).from_pretrained(path).train()
            model = huggingface.from_pretrained(path, mesh=mesh).train()
        whole = wrapped(model, how, mesh)
        optimizer = optimizer_of(model)
        expected, gradients = trained(dense)
        own = mesh["dp"].get_local_rank()
        for step in range(STEPS):
            optimizer.zero_grad()
            with tp_ext.debug.count_collectives() as counts:
                loss = loss_of(whole, batch(step).chunk(2)[own])
            assert bool(counts.select(group=mesh["tp"], kind="reduce_scatter").number) == sequence_parallel
            loss.backward()
            optimizer.step()
            total = loss.detach().clone()
            torch.distributed.all_reduce(total, group=mesh["dp"].get_group())
            assert total.item() / 2 == pytest.approx(expected[step], rel=1e-9)
        check_gradients(model, gradients)
        check_state(model, dense, mesh=mesh)


@pytest.mark.parametrize(("name", "how"), [("gpt2", "fsdp"), pytest.param("t5", "ddp", marks=pytest.mark.exhaustive)])
def test_data_parallel(name, how):
    run(_data_parallel, 4, name, how, None, timeout=120)


@pytest.mark.parametrize(
    ("name", "how"), [pytest.param("llama", "fsdp", marks=pytest.mark.exhaustive), ("gpt2", "ddp")]
)
def test_data_parallel_with_sharded_tokens(name, how):
    run(_data_parallel, 4, name, how, None, True, timeout=120)


def test_from_pretrained_over_a_mesh(tmp_path):
    made("qwen3").save_pretrained(tmp_path)
    run(_data_parallel, 4, "qwen3", "fsdp", tmp_path, timeout=120)


def _saved(group, name, path):
    """Trains one step on two ranks, and writes a checkpoint and an export."""
    model = sharded(made(name), group)
    optimizer = optimizer_of(model)
    with only_doubles():
        trained(model, [0], optimizer)
    tp_ext.save_checkpoint(path / "checkpoint", model, optimizer, group=group)
    tp_ext.save_safetensors(path / "export", model, group=group)


def _resumed(group, name, path, how):
    """Goes on from the checkpoint on any number of ranks; reads the export."""
    dp = 2 if how == "fsdp" else 1
    mesh = mesh_of(1, dp, 1, group.size() // dp)
    model = sharded(made(name, seed=1), mesh["tp"])
    if how == "fsdp":
        wrapped(model, how, mesh)
    optimizer = optimizer_of(model)
    tp_ext.load_checkpoint(path / "checkpoint", model, optimizer, mesh=mesh)
    dense, own = made(name), mesh["dp"].get_local_rank()
    with only_doubles():
        its = optimizer_of(dense)
        trained(dense, [0], its)
        after_first = copy.deepcopy(dense)
        expected, gradients = trained(dense, range(1, STEPS), its)
        for step in range(1, STEPS):
            optimizer.zero_grad()
            loss = loss_of(model, batch(step).chunk(dp)[own])
            loss.backward()
            optimizer.step()
    if dp == 1:
        assert loss.item() == pytest.approx(expected[-1], rel=1e-9)
    check_gradients(model, gradients)
    check_state(model, dense, mesh=mesh)
    other = auto.apply(model.tp_ext_plan, made(name, seed=2), mesh["tp"])
    tp_ext.load_safetensors(path / "export", other, mesh=mesh)
    check_state(other, after_first, mesh=mesh)


@pytest.mark.parametrize(
    ("name", "onto"), [("llama", [(1, "")]), pytest.param("gpt2", [(3, ""), (4, "fsdp")], marks=pytest.mark.exhaustive)]
)
def test_a_checkpoint_goes_on_at_any_number_of_ranks(name, onto, tmp_path):
    run(_saved, 2, name, tmp_path, timeout=120)
    for p, how in onto:
        run(_resumed, p, name, tmp_path, how, timeout=120)
