"""A model as the stages of a pipeline over a mesh, next to the same model in one process, whose gradients the stages
take over: so their training is that of the unsharded model, without a schedule.
"""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import tp_ext
from tests.helpers.models import RichModel

PARTS = (("embedding", "norm1"), ("attention", "norm2"), ("mlp", "column"), ("row", "last", "head", "scale"))
IDS = torch.arange(14).view(2, 7) * 5 % 13
CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def optimizer_of(params):
    """Two groups of parameters; eps keeps a gradient that is zero but for rounding from being a whole step."""
    params = list(params)
    groups = [
        {"params": [q for q in params if q.dim() > 1], "weight_decay": 0.1},
        {"params": [q for q in params if q.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.01, eps=1e-4)


def dense(seed=7, tied=False):
    torch.manual_seed(seed)
    model = RichModel(tied=tied)
    del model.calls
    model.register_buffer("calls", torch.zeros(()), persistent=False)
    return model, optimizer_of(model.parameters())


def stages(mesh, *, both_ends=False, tied=False, seed=7):
    """This rank's stages, under FSDP2 if the mesh has several data ranks: one, or with ``both_ends`` the outer two of
    four on the first rank and the inner two on the second, as in a V schedule; and their optimizer."""
    torch.manual_seed(seed)
    whole = RichModel(mesh["tp"], tied=tied)
    if tied and mesh["pp"].size() > 1:
        whole.head.weight = nn.Parameter(whole.embedding.weight.detach().clone())
    pp, rank = mesh["pp"].size(), mesh["pp"].get_local_rank()
    width = len(PARTS) // pp
    held = [PARTS[rank], PARTS[3 - rank]] if both_ends else [sum(PARTS[rank * width : (rank + 1) * width], ())]
    made = [nn.ModuleDict({name: getattr(whole, name) for name in names}) for names in held]
    if tied and "head" in made[-1] and pp > 1:
        tp_ext.declare_tied(made[-1], {"head.weight": "embedding.weight"})
    if mesh["dp"].size() > 1:
        for stage in made:
            for part in stage.values():
                fully_shard(part, mesh=mesh["dp"])
    return made, optimizer_of(param for stage in made for param in stage.parameters())


def backward(model):
    """The gradients of the unsharded model."""
    model.zero_grad()
    tp_ext.vocab_parallel_cross_entropy(model(IDS), IDS.roll(1).flatten(), None, vocab_size=13).backward()


def take_gradients(made, model):
    """Gives the stages their shards of the gradients of the unsharded model."""
    for stage in made:
        table = dict(tp_ext.layouts(stage))
        for name, param in stage.named_parameters():
            grad = table[name].shard(model.get_parameter(name).grad).clone()
            if isinstance(param, DTensor):
                grad = distribute_tensor(grad, param.device_mesh, param.placements, src_data_rank=None)
            param.grad = grad


def step(made, optimizer, model, its_optimizer, mesh):
    """One step of the stages and of the unsharded model, clipped; the norms are the same."""
    backward(model)
    take_gradients(made, model)
    want = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    torch.testing.assert_close(tp_ext.grad_norm(made, float("inf"), mesh=mesh).isfinite(), torch.tensor(True))
    torch.testing.assert_close(tp_ext.clip_grad_norm_(made, 0.5, mesh=mesh), want, **CLOSE)
    optimizer.step()
    its_optimizer.step()
