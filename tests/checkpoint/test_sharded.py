"""Sharded state through torch.distributed.checkpoint: with a data axis under FSDP2 or DDP, at other numbers of ranks,
in the unsharded model, with every optimizer, asynchronously.
"""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import tp_ext
from tests.helpers import ranks
from tests.helpers.meshes import mesh_of
from tests.helpers.models import FP64, model_and_optimizer, train
from tests.helpers.on_ranks import on_ranks

pytestmark = pytest.mark.core
CLOSE = {"rtol": 1e-12, "atol": 1e-12}  # sums over ranks in another order


class Wide(nn.Module):
    """Fits 8 ranks: 8 heads, of which one attention has 1 KV head and one has 4; nothing divides by 3."""

    def __init__(self, group=None):
        super().__init__()
        options = FP64 | {"group": group}
        self.embedding = tp_ext.VocabParallelEmbedding(19, 16, pad_to_multiple_of=8, **options)
        self.copied = tp_ext.ParallelAttention(16, 8, num_kv_heads=1, head_dim=2, rope=100.0, **options)
        self.grouped = tp_ext.ParallelAttention(16, 8, num_kv_heads=4, head_dim=2, qk_norm=True, **options)
        self.mlp = tp_ext.ParallelMLP(16, 13, activation="swiglu", **options)
        self.norm = tp_ext.RMSNorm(16, 1e-6, **options)
        self.head = tp_ext.VocabParallelLMHead(16, 19, pad_to_multiple_of=8, **options)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        x = self.embedding(ids)
        for block in (self.copied, self.grouped, self.mlp):
            x = x + block(x)
        return self.head(self.norm(x)).flatten(0, 1)


def _wide(group, seed=0):
    torch.manual_seed(seed)
    model = Wide(group)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)


def _save_wide(group, path):
    model, optimizer = _wide(group)
    train(model, optimizer, group, 3, vocab_size=19)
    tp_ext.save_checkpoint(path, model, optimizer)


def _resume_wide(group, path):
    model, optimizer = _wide(group, seed=1)
    tp_ext.load_checkpoint(path, model, optimizer)
    return train(model, optimizer, group, 3, vocab_size=19)


@pytest.mark.parametrize("others", [(1, 3), pytest.param((8,), marks=pytest.mark.exhaustive)], ids=str)
def test_saved_at_4_goes_on_at_other_numbers_of_ranks(others, tmp_path):
    ranks.run(_save_wide, 4, tmp_path / "4")
    want = train(*_wide(None), None, 6, vocab_size=19)[3:]
    for q in others:
        for losses in ranks.run(_resume_wide, q, tmp_path / "4"):
            torch.testing.assert_close(losses, want, **CLOSE)


# A data axis


def _laid_out(sizes, kind, seed):
    """A model on a mesh of (dp, tp), its optimizer and tensor-parallel group."""
    mesh = mesh_of(*sizes, names=("dp", "tp"))
    group = mesh["tp"].get_group()
    model, _ = model_and_optimizer(group, seed=seed)
    if kind == "fsdp":
        fully_shard(model.mlp, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    elif kind == "ddp":
        model = DistributedDataParallel(model, process_group=mesh["dp"].get_group())
    # Fused: DTensor looks for the sharding of one operator, not of many for each shape
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, fused=True), group


def _save_laid_out(group, sizes, kind, path):
    model, optimizer, tp = _laid_out(sizes, kind, 7)
    train(model, optimizer, tp, 3)
    tp_ext.save_checkpoint(path, model, optimizer, rank=group.rank())
    return train(model, optimizer, tp, 2)


def _load_laid_out(group, sizes, kind, path):
    model, optimizer, tp = _laid_out(sizes, kind, 8)
    assert tp_ext.load_checkpoint(path, model, optimizer) == {"rank": 0}
    assert all(param.grad is None for param in model.parameters())
    return train(model, optimizer, tp, 2)


def _elements(path):
    """How many elements each tensor has, and how many were written for it."""
    metadata = tp_ext.CheckpointReader(path).read_metadata()
    entries = {k: v for k, v in metadata.state_dict_metadata.items() if hasattr(v, "chunks")}
    stored = [index for index in metadata.storage_data if index.fqn in entries]
    assert len(stored) == sum(len(entry.chunks) for entry in entries.values())
    return {k: v.size.numel() for k, v in entries.items()}, {
        k: sum(chunk.sizes.numel() for chunk in v.chunks) for k, v in entries.items()
    }


@pytest.mark.parametrize(
    ("kind", "others"),
    [
        ("fsdp", [((1, 3), "plain")]),
        ("ddp", [((2, 1), "fsdp")]),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (
                ("fsdp", [((1, 4), "plain"), ((4, 1), "ddp")]),
                ("ddp", [((4, 1), "fsdp"), ((1, 3), "plain")]),
                ("fsdp", [((1, 2), "plain"), ((1, 3), "fsdp"), ((2, 2), "fsdp")]),
                ("ddp", [((1, 2), "plain"), ((1, 3), "ddp"), ((2, 2), "ddp")]),
            )
        ),
    ],
    ids=["fsdp", "ddp", "fsdp on 4", "ddp on 4 and 3", "fsdp again", "ddp again"],
)
def test_saved_on_2_x_2_goes_on_at_other_axes_and_unsharded(kind, others, tmp_path):
    model, optimizer = model_and_optimizer(None)
    want = train(model, optimizer, None, 5)[3:]
    path = tmp_path / "saved"
    for losses in ranks.run(_save_laid_out, 4, (2, 2), kind, path):
        torch.testing.assert_close(losses, want, **CLOSE)
    elements, written = _elements(path)
    assert elements == written  # each once, though most ranks hold much of it too
    for sizes, how in others:
        for losses in ranks.run(_load_laid_out, torch.Size(sizes).numel(), sizes, how, path):
            torch.testing.assert_close(losses, want, **CLOSE)
    torch.testing.assert_close(_plain(path), want, **CLOSE)


def _plain(path):
    """Losses of the unsharded model, loaded by torch alone: it knows nothing of tensor parallelism."""
    model, optimizer = model_and_optimizer(None, seed=8)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer, options=options)}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)
    return train(model, optimizer, None, 2)


# Asynchronously


@pytest.mark.parametrize("writer", [False, True], ids=["staged by DCP", "staged by the writer"])
@on_ranks(2, backend="gloo")
def test_an_asynchronous_save_has_the_state_of_the_moment_of_the_call(group, writer, tmp_path):
    path = tmp_path / "saved"
    model, optimizer = model_and_optimizer(group)
    train(model, optimizer, group, 1)
    own = dist.new_group(backend="gloo")  # its collectives must not mix with the training's
    state = tp_ext.sharded_state_dict(model, optimizer)
    where = {"storage_writer": dcp.FileSystemWriter(path)} if writer else {"checkpoint_id": path}
    saving = dcp.async_save(state, process_group=own, **where)
    want = train(model, optimizer, group, 3)
    saving.result()
    model, optimizer = model_and_optimizer(group, seed=8)
    tp_ext.load_checkpoint(path, model, optimizer)
    assert torch.equal(train(model, optimizer, group, 3), want)
