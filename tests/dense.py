"""What the tests of layers share: activations and gradients cut as the layers cut them, and put together again."""

import torch
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode

from tp_ext import ColumnParallelLinear, RowParallelLinear, Sharding, shardings

Gradients = dict[str, tuple[Tensor | None, Sharding | None]]


def own_tokens(x: Tensor, group) -> Tensor:
    """This rank's rows of x, as sequence parallelism cuts them."""
    return x.tensor_split(group.size())[group.rank()].contiguous()


def addend(full: Tensor, sharding: Sharding, rank: int, p: int) -> Tensor:
    """The rank's slice of the last dim; what several ranks hold is weighted, differently, so that the sum is whole."""
    weights = []
    for part in sharding.parts:
        copy, total = rank % part.copies + 1, part.copies * (part.copies + 1) / 2
        weights.append(torch.full((part.size,), copy / total, dtype=full.dtype))
    return Sharding(-1, sharding.parts).shard(full * torch.cat(weights), rank, p)


def own_input(x: Tensor, layer: nn.Module, group) -> Tensor:
    """What this rank feeds a linear, if x is the unsharded model's."""
    if isinstance(layer, RowParallelLinear):
        return addend(x, layer.tp_shardings["weight"], group.rank(), group.size())
    return own_tokens(x, group) if layer.sequence_parallel else x


def own_output(y: Tensor, layer: nn.Module, group) -> Tensor:
    """The upstream gradient at a linear's output on this rank, if y is the unsharded model's."""
    if isinstance(layer, ColumnParallelLinear):
        return addend(y, layer.tp_shardings["weight"], group.rank(), group.size())
    return own_tokens(y, group) if layer.sequence_parallel else y


def results(layer: nn.Module, x: Tensor, call=None) -> list[Tensor]:
    """y = layer(x), or call(x), and the gradients of its sines: of x and of the parameters."""
    layer.zero_grad()
    x.grad = None
    y = (layer if call is None else call)(x)
    y.sin().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters())]


def gradients(module: nn.Module) -> Gradients:
    """Each parameter's gradient with its sharding, to be sent to the parent."""
    params = dict(module.named_parameters())
    return {name: (params[name].grad, sharding) for name, sharding in shardings(module)}


def full_gradients(per_rank: list[Gradients]) -> dict[str, Tensor | None]:
    """The gradients of the unsharded module. Replicated ones and copies must be the same bits on every rank, padding
    zero."""
    full, p = {}, len(per_rank)
    for name, (_, sharding) in per_rank[0].items():
        locals_ = [g[name][0] for g in per_rank]
        if any(g is None for g in locals_):
            assert all(g is None for g in locals_), name
            full[name] = None
        elif sharding is None:
            assert all(torch.equal(g, locals_[0]) for g in locals_), f"{name}: the ranks differ"
            full[name] = locals_[0]
        else:
            full[name] = sharding.unshard(locals_)
            for rank, local in enumerate(locals_):
                assert torch.equal(sharding.shard(full[name], rank, p), local), f"{name}: copies differ"
    return full


def heard(run) -> dict[str, int]:
    """The collectives that run() sends, by kind."""
    with CommDebugMode() as counts:
        run()
    result: dict[str, int] = {}
    for op, times in counts.get_comm_counts().items():
        plain = str(op).replace("_", "")
        kinds = [k for k in ("allreduce", "allgather", "reducescatter", "alltoall") if k in plain]
        result[kinds[0] if kinds else plain] = result.get(kinds[0] if kinds else plain, 0) + times
    return {kind: times for kind, times in result.items() if times}
