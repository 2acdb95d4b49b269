"""Every call that saves or loads, in simulated ranks of a process without a process group."""

import functools

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.testing import assert_close

import tp_ext
from tp_ext.debug import simulate

OPTIONS = StateDictOptions(full_state_dict=True)


def _trained(group, seed):
    """A model and its optimizer: of seed 0 after a step, of another one new."""
    torch.manual_seed(seed)
    model = nn.Sequential(tp_ext.ParallelMLP(6, 8, group=group), nn.Linear(6, 6))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if seed == 0:
        model(torch.ones(3, 6)).sum().backward()
        optimizer.step()
    return model, optimizer


def _safetensors(path, model, optimizer, new, new_optimizer, **options):
    tp_ext.save_safetensors(path / "model.safetensors", model, **options)
    tp_ext.load_safetensors(path / "model.safetensors", new)


def _safetensors_again(path, model, optimizer, new, new_optimizer):
    for size in (200, None):
        _safetensors(path, model, optimizer, new, new_optimizer, max_shard_size=size)


def _checkpoint(path, model, optimizer, new, new_optimizer, **options):
    tp_ext.save_checkpoint(path / "saved", model, optimizer, step=1, **options)
    tp_ext.load_checkpoint(path / "saved", new, new_optimizer)


def _asynchronous(path, model, optimizer, new, new_optimizer):
    savings = [
        tp_ext.save_checkpoint(path / name, model, optimizer, asynchronous=True, step=1) for name in ("first", "saved")
    ]
    with torch.no_grad():
        kept = [param.clone() for param in model.parameters()]
        for param in model.parameters():
            param.zero_()
    for saving in savings:
        assert saving.result() is None and saving.done() and saving.exception() is None
    tp_ext.load_checkpoint(path / "saved", new, new_optimizer)
    with torch.no_grad():
        for param, value in zip(model.parameters(), kept, strict=True):
            param.copy_(value)


def _full(path, model, optimizer, new, new_optimizer, **options):
    tp_ext.load_full_state_dict(new, tp_ext.full_state_dict(model, **options), broadcast_from_rank0=bool(options))
    tp_ext.load_full_optimizer_state_dict(new, new_optimizer, tp_ext.full_optimizer_state_dict(model, optimizer))


def _sharded(path, model, optimizer, new, new_optimizer):
    dcp.save(tp_ext.sharded_state_dict(model, optimizer), checkpoint_id=path / "saved")
    tp_ext.load_sharded_state_dict(new, new_optimizer, storage_reader=dcp.FileSystemReader(path / "saved"))


def _reader(path, model, optimizer, new, new_optimizer):
    tp_ext.save_checkpoint(path / "saved", model, optimizer)
    reader = tp_ext.CheckpointReader(path / "saved")
    tp_ext.load_sharded_state_dict(new, new_optimizer, storage_reader=reader)
    reader.close()


def _of_torch(path, model, optimizer, new, new_optimizer):
    state, optimizer_state = get_state_dict(model, optimizer, options=OPTIONS)
    set_state_dict(new, new_optimizer, model_state_dict=state, optim_state_dict=optimizer_state, options=OPTIONS)


def _sharded_of_torch(path, model, optimizer, new, new_optimizer):
    dcp.save(_states(model, optimizer), checkpoint_id=path / "dcp")
    loaded = _states(new, new_optimizer)
    dcp.load(loaded, checkpoint_id=path / "dcp")
    set_state_dict(new, new_optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])


def _states(model, optimizer):
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


CALLS = {
    "safetensors": _safetensors,
    "safetensors again": _safetensors_again,
    "checkpoint": _checkpoint,
    "asynchronous": _asynchronous,
    "full": _full,
    "full on rank 0": functools.partial(_full, rank0_only=True),
    "sharded": _sharded,
    "reader": _reader,
    "of torch": _of_torch,
    "of torch, sharded": _sharded_of_torch,
}


@pytest.mark.parametrize("p", [1, 2, 3])
@pytest.mark.parametrize("call", CALLS)
def test_what_is_saved_is_loaded(call, p, tmp_path):
    def save_and_load(rank, group):
        (model, optimizer), (new, new_optimizer) = _trained(group, 0), _trained(group, 1)
        CALLS[call](tmp_path, model, optimizer, new, new_optimizer)
        assert_close(new.state_dict(), model.state_dict(), rtol=0, atol=0)
        if "safetensors" not in call:
            assert_close(new_optimizer.state_dict()["state"], optimizer.state_dict()["state"], rtol=0, atol=0)
        return {name: tensor.clone() for name, tensor in tp_ext.full_state_dict(model).items()}

    expected = simulate(lambda rank, group: tp_ext.full_state_dict(_trained(group, 0)[0]), 1)[0]
    for state in simulate(save_and_load, p):
        assert_close(state, expected)


@pytest.mark.parametrize(
    "options",
    [{}, {"lr": torch.tensor(0.5)}, {"levels": [1, {"a": 2}]}, {"pairs": ((1, 2), 3)}, {"more.dots": None}],
    ids=lambda options: "".join(options) or "none",
)
def test_a_save_has_the_entries_of_torch(options, tmp_path):
    """Of two groups of parameters: options of one value, and those that have an entry for each of their elements."""
    model, _ = _trained(None, 0)
    params = list(model.parameters())
    groups = [{"params": params[:2], "mark": 7.5, **options}, {"params": params[2:], "lr": 0.25}]
    optimizer = torch.optim.AdamW(groups)
    model(torch.ones(3, 6)).sum().backward()
    optimizer.step()
    tp_ext.save_checkpoint(tmp_path / "ours", model, optimizer)
    dcp.save(tp_ext.sharded_state_dict(model, optimizer), checkpoint_id=tmp_path / "torch", no_dist=True)
    ours, of_torch = (dcp.FileSystemReader(tmp_path / name).read_metadata() for name in ("ours", "torch"))
    assert ours.state_dict_metadata.keys() == of_torch.state_dict_metadata.keys() == ours.planner_data.keys()
    assert ours.planner_data == of_torch.planner_data
    assert set(ours.storage_data) == set(of_torch.storage_data)
    converted = [torch.load(_converted(tmp_path / name), weights_only=True) for name in ("ours", "torch")]
    assert_close(converted[0], converted[1], rtol=0, atol=0)


def _converted(directory):
    file = directory.with_suffix(".pt")
    dcp_to_torch_save(directory, file)
    return file


def test_the_thread_of_torch_is_refused(tmp_path):
    def save(rank, group):
        dcp.async_save(tp_ext.sharded_state_dict(_trained(group, 0)[0]), checkpoint_id=tmp_path / "saved").result()

    with pytest.raises(
        RuntimeError, match=r"'model.0.up.weight' has shards on other ranks .* simulated rank by dcp.save"
    ):
        simulate(save, 2)


def test_an_asynchronous_save_that_fails_raises_in_result(tmp_path):
    (tmp_path / "saved").write_text("a file")

    def save(rank, group):
        tp_ext.save_checkpoint(tmp_path / "saved", _trained(group, 0)[0], asynchronous=True)

    with pytest.raises(RuntimeError, match=r"rank \d raised FileExistsError"):
        simulate(save, 2)


def test_stages_do_not_replace_each_others_export(tmp_path):
    def save(rank, group):
        stage = nn.Linear(2, 2) if rank == 0 else nn.LayerNorm(2, bias=False)
        stage = nn.Sequential(stage) if rank == 0 else nn.Sequential(nn.Identity(), stage)
        tp_ext.save_safetensors(tmp_path / "model.safetensors", stage, group=None)
        torch.distributed.barrier(group)

    with pytest.raises(RuntimeError, match="rank 1 raised OSError") as error:
        simulate(save, 2)
    assert "rank 0 of this job has exported other tensors there" in str(error.value.__cause__.__cause__)
    # Another simulation is another job
    simulate(lambda rank, group: tp_ext.save_safetensors(tmp_path / "model.safetensors", _trained(group, 0)[0]), 2)


def test_adapters_and_models_of_transformers(tmp_path):
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=32,
    )

    def sharded(group):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config)
        plan = tp_ext.auto.plan(model, {"input_ids": torch.arange(8).view(2, 4)}, group.size(), prove=False)
        return tp_ext.auto.apply(plan, model, group)

    def save_and_load(rank, group):
        model, other = sharded(group), sharded(group)
        tp_ext.huggingface.save_pretrained(model, tmp_path / "model")
        loaded = tp_ext.huggingface.from_pretrained(tmp_path / "model", group=group)
        assert_close(tp_ext.full_state_dict(loaded), tp_ext.full_state_dict(model), rtol=0, atol=0)
        names = tp_ext.add_lora(model, targets=["q_proj"], r=2, alpha=4)
        assert names
        tp_ext.huggingface.save_adapter(model, tmp_path / "adapter")
        tp_ext.huggingface.load_adapter(other, tmp_path / "adapter")
        assert_close(tp_ext.full_state_dict(other), tp_ext.full_state_dict(model), rtol=0, atol=0)

    simulate(save_and_load, 2)
