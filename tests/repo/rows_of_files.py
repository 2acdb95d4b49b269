"""Rows of ``test_errors_on_one_rank.py`` of states and files: bad on one rank, an error of all ranks, and nothing has
changed."""

import json
import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import ones

import tp_ext
from tests.repo.rows_of_models import block, converted, foreign, unchanged


def _folder(group, key, make):
    """A folder that rank 0 makes, and its copy for the rank with bad files."""
    names = [tempfile.mkdtemp(prefix=f"{key}_") if group.rank() == 0 else None]
    dist.broadcast_object_list(names, group=group, group_src=0)
    path = Path(names[0])
    if group.rank() == 0:
        make(path / "good")
        shutil.copytree(path / "good", path / "bad")
    dist.barrier(group)
    return path


@contextmanager
def _files(group, bad, make, damage):
    """The path of a folder, which is damaged for the bad rank."""
    path = _folder(group, "one_rank", make)
    try:
        if bad:
            damage(path / "bad")
        yield path / ("bad" if bad else "good")
    finally:
        dist.barrier(group)
        if group.rank() == 0:
            shutil.rmtree(path)


def _write_adapter(path, r=2):
    path.mkdir(parents=True, exist_ok=True)
    factors = {"0.lora_A": (r, 4), "0.lora_B": (6, r)}
    tensors = {f"base_model.model.{name}.weight": torch.ones(shape) for name, shape in factors.items()}
    save_file(tensors, path / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {"peft_type": "LORA", "r": r, "lora_alpha": 1, "bias": "none", "target_modules": ["0"]}
    (path / "adapter_config.json").write_text(json.dumps(config))


def _loads_adapter(damage):
    def call(group, bad):
        from tp_ext.huggingface import load_adapter

        net = block(group)
        with _files(group, bad, _write_adapter, damage) as path, unchanged(net):
            load_adapter(net, path)

    return call


def _cut(name):
    return lambda path: os.truncate(next(path.glob(name)), 20)


def _without(name):
    return lambda path: next(path.glob(name)).unlink()


def _saves(save, make=block, spoil=lambda net: None):
    """A save of a model that is spoilt on the rank: an older save stays."""

    def call(group, bad):
        net = make(group)
        if bad:
            spoil(net)
        names = [tempfile.mkdtemp(prefix="one_rank_") if group.rank() == 0 else None]
        dist.broadcast_object_list(names, group=group, group_src=0)
        try:
            with unchanged(net):
                save(net, Path(names[0]) / "saved", bad)
        finally:
            dist.barrier(group)
            if group.rank() == 0:
                left = os.listdir(names[0])
                shutil.rmtree(names[0])
                assert not [name for name in left if name != "saved.lock" and "lock" not in name], left

    return call


def _save_adapter(net, path, bad):
    from tp_ext.huggingface import save_adapter

    save_adapter(net, path)


def _to_meta(net):
    net[0].to_empty(device="meta")


def _other_entry(net):
    net[1].register_buffer("more", ones(2))


def _one_adapter_less(net):
    net[1] = net[1].base_layer


def _with_adapters(group):
    return block(group, r=2)


def _loads(load, save, damage):
    def call(group, bad):
        net = block(group)
        with _files(group, bad, lambda path: save(path), damage) as path, unchanged(net):
            load(path, net)

    return call


def _write_export(path):
    path.mkdir()
    shapes = {"0.weight": (6, 4), "0.bias": (6,), "1.weight": (4, 6), "1.bias": (4,)}
    save_file({name: torch.ones(shape) for name, shape in shapes.items()}, path / "model.safetensors")


def _state_of(act, spoil):
    def call(group, bad):
        net = block(group)
        optimizer = torch.optim.AdamW(net.parameters())
        net(ones(2, 4)).sum().backward()
        optimizer.step()
        if bad:
            spoil(net, optimizer)
        with unchanged(net, optimizer):
            act(net, optimizer)

    return call


def _write_checkpoint(path):
    state = {"model": block(None).state_dict()}
    dcp.save(state, checkpoint_id=path, no_dist=True)


def _without_a_tensor(path):
    tensors = {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}
    for file in path.glob("model*"):
        file.unlink()
    del tensors["model.norm.weight"]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def _pretrained(damage, **options):
    """A folder of transformers, damaged for the rank."""

    def call(group, bad):
        from tests.auto.architectures import build
        from tp_ext.huggingface import from_pretrained

        def make(path):
            build("llama")[0].save_pretrained(path, max_shard_size="60KB")

        with _files(group, bad, make, damage) as path:
            from_pretrained(path, group=group, **options)

    return call


def _load_sharded(path, net):
    tp_ext.load_sharded_state_dict(net, storage_reader=dcp.FileSystemReader(path))


def _other_config(path):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"hidden_size": 32}))


AGREED = {
    "a missing adapter": (_loads_adapter(_without("*.json")), "adapter_config.json"),
    "a damaged adapter": (_loads_adapter(_cut("*.safetensors")), "must be a whole safetensors file"),
    "another adapter": (_loads_adapter(lambda path: _write_adapter(path, 3)), "path: .* rank 1"),
    "an adapter to be saved": (
        _saves(_save_adapter, _with_adapters, _one_adapter_less),
        "model: .*must be the same on all ranks",
    ),
    "merged adapters to be saved": (
        _saves(_save_adapter, _with_adapters, lambda net: net[0].merge()),
        "model: its adapters must be",
    ),
    "a model of save_safetensors": (
        _saves(lambda net, path, bad: tp_ext.save_safetensors(path, net), spoil=_to_meta),
        "0.weight' is on the meta device",
    ),
    "an entry of save_safetensors": (
        _saves(lambda net, path, bad: tp_ext.save_safetensors(path, net), spoil=_other_entry),
        "1.more",
    ),
    "max_shard_size of save_safetensors": (
        _saves(lambda net, path, bad: tp_ext.save_safetensors(path, net, max_shard_size=50 if bad else None)),
        "max_shard_size",
    ),
    "a file of load_safetensors": (
        _loads(tp_ext.load_safetensors, _write_export, _without("*")),
        "path: .*bad' must have 'model.safetensors'",
    ),
    "a damaged file of load_safetensors": (
        _loads(tp_ext.load_safetensors, _write_export, _cut("*")),
        "must be a whole safetensors file",
    ),
    "a model of save_checkpoint": (
        _saves(lambda net, path, bad: tp_ext.save_checkpoint(path, net), spoil=_to_meta),
        "is on the meta device",
    ),
    "a model of full_state_dict": (converted(tp_ext.full_state_dict, _to_meta), "0.weight' is on the meta device"),
    "an entry of full_state_dict": (converted(tp_ext.full_state_dict, _other_entry), "1.more"),
    "a model of load_full_state_dict": (
        converted(lambda net: tp_ext.load_full_state_dict(net, {}, strict=False, broadcast_from_rank0=True), _to_meta),
        "0.weight' is on the meta device",
    ),
    "an optimizer of full_optimizer_state_dict": (
        _state_of(tp_ext.full_optimizer_state_dict, foreign),
        "optimizer: a parameter of shape",
    ),
    "an optimizer of load_full_optimizer_state_dict": (
        _state_of(
            lambda net, optimizer: tp_ext.load_full_optimizer_state_dict(net, optimizer, {}, broadcast_from_rank0=True),
            foreign,
        ),
        "optimizer: a parameter of shape",
    ),
    "an optimizer of sha256": (
        _state_of(lambda net, optimizer: tp_ext.debug.sha256(net, optimizer), foreign),
        "optimizer: a parameter of",
    ),
    "a model of sha256": (converted(tp_ext.debug.sha256, _to_meta), "0.weight' is on the meta device"),
    "a file of load_sharded_state_dict": (_loads(_load_sharded, _write_checkpoint, _without(".metadata")), "metadata"),
    "a checkpoint": (_loads(tp_ext.load_checkpoint, _write_checkpoint, _without(".metadata")), "must be a checkpoint"),
    "a pretrained model without a file": (_pretrained(_without("model-00001*")), "No such file"),
    "a damaged pretrained model": (_pretrained(_cut("model-00001*")), "must be a whole safetensors file"),
    "a pretrained model without a tensor": (
        _pretrained(_without_a_tensor, strict=False),
        r"path: .* same tensors; those of rank 0 lack \[\], of rank 1 \['model.norm.weight'\]",
    ),
    "another configuration": (_pretrained(_other_config), "has shape .* must have"),
}
