"""What the tests of models under DDP and FSDP2 share: meshes, models of everything we have, their training on a batch
of which each data-parallel rank holds its share, and the same training in one process.
"""

import functools

import torch
from gpt import GPT, GPTConfig
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

import tp_ext
from tests.helpers.dtypes import default_dtype
from tests.helpers.meshes import mesh_of
from tests.helpers.models import RichModel

VOCAB, BATCH, SEQ = 31, 2, 5  # of one microbatch of one data-parallel rank
mesh = functools.partial(mesh_of, names=("dp", "tp"))


def make(kind, group, sequence_parallel):
    tp_ext.manual_seed(3)
    if kind == "rich":
        options = {"ffn": 9, "activation": "gelu_tanh", "dropout": 0.2, "dtype": None}
        return RichModel(group, sequence_parallel, vocab=VOCAB, pad=4, tied=False, **options)
    sizes = {"hidden_size": 12, "num_layers": 2, "num_heads": 3, "num_kv_heads": 1, "ffn_hidden_size": 10}
    return GPT(GPTConfig(VOCAB, **sizes, dropout=0.2, sequence_parallel=sequence_parallel), group)


def wrap(model, how, data_mesh, **options):
    if how == "ddp":
        return DistributedDataParallel(model, process_group=data_mesh.get_group(), **options)
    for child in model.children():
        for one in child if isinstance(child, nn.ModuleList) else [child]:
            if any(True for _ in one.parameters()) and one not in (getattr(model, "head", None), model.embedding):
                fully_shard(one, mesh=data_mesh, **options)
    return fully_shard(model, mesh=data_mesh, **options)


def batch(step, part):
    """ids and targets, the same on every rank."""
    windows = torch.randint(VOCAB, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(100 * step + part))
    return windows[:, :-1].contiguous(), windows[:, 1:].flatten()


def loss_of(model, group, step, part):
    """The loss of one microbatch; masks are drawn from a seed of its own."""
    ids, target = batch(step, part)
    torch.manual_seed(1000 + 100 * step + part)
    return tp_ext.vocab_parallel_cross_entropy(model(ids), target, group, vocab_size=VOCAB)


def optimizer_of(model):
    """eps keeps a gradient that is zero but for rounding from being a whole step. Fused: DTensor looks for the sharding
    of one operator, not of many for each shape."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-4, fused=True)


def dense_training(kind, parts, steps=3, prepare=None):
    """Losses of all microbatches of the joined batch, and the state in the end, of one process without any group."""
    with default_dtype(torch.float64):
        model = make(kind, None, False)
        if prepare:
            prepare(model)
        optimizer, losses = optimizer_of(model), []
        for step in range(steps):
            optimizer.zero_grad()
            for part in range(parts):
                loss = loss_of(model, None, step, part)
                (loss / parts).backward()
                losses.append(loss.item())
            optimizer.step()
        return losses, _state(model)


def wrapped_training(group, kind, how, dp, tp, sequence_parallel, micro, steps=3, prepare=None, **options):
    """(part, loss) of this rank's microbatches in order, and the state in the end. With ``micro`` > 1 microbatches a
    step the gradients are accumulated without communication over the data axis, but for the last."""
    with default_dtype(torch.float64):
        axes = mesh(dp, tp)
        model = make(kind, axes["tp"], sequence_parallel)
        if prepare:
            prepare(model)
        model = wrap(model, how, axes["dp"], **options)
        optimizer, losses = optimizer_of(model), []
        mine = axes["dp"].get_local_rank()
        for step in range(steps):
            optimizer.zero_grad()
            for index in range(micro):
                part, last = mine * micro + index, index == micro - 1
                if isinstance(model, FSDPModule):
                    model.set_requires_gradient_sync(last)
                    loss = _one(model, axes["tp"], step, part, micro)
                elif last:
                    loss = _one(model, axes["tp"], step, part, micro)
                else:
                    with model.no_sync():
                        loss = _one(model, axes["tp"], step, part, micro)
                losses.append((step, part, loss))
            optimizer.step()
        tp_ext.debug.check(model, group=axes["tp"])
        return losses, _state(model, group=axes["tp"])


def _state(model, **group):
    """The full state without the count of forwards: of the microbatches a data-parallel rank computes its share."""
    state = tp_ext.full_state_dict(model, **group)
    state.pop("calls", None)
    return state


def _one(model, group, step, part, micro):
    loss = loss_of(model, group, step, part)
    (loss / micro).backward()
    return loss.item()
