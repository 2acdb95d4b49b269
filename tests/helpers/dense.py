"""What the tests of layers share: activations and gradients cut as the layers cut them, and put together again."""

import torch
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode

from tests.helpers.reference import gathered, talk
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


def small_linear(dtype=torch.float64, features=(6, 8)) -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(*features, dtype=dtype)


def small_layer(group, kind, sp, dtype=torch.float64, **options) -> nn.Module:
    """The same linear, parallel."""
    return kind.from_linear(small_linear(dtype), group=group, sequence_parallel=sp, **options)


def small_input(layer: nn.Module, group, dtype=torch.float64) -> Tensor:
    torch.manual_seed(2)
    return own_input(torch.randn(4, 6, dtype=dtype), layer, group).contiguous().requires_grad_()


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
    zero; what one rank has no gradient for, none has."""
    missing = {name for name, (grad, _) in per_rank[0].items() if grad is None}
    for one in per_rank:
        assert {name for name, (grad, _) in one.items() if grad is None} == missing
    table = {name: sharding for name, (_, sharding) in per_rank[0].items() if name not in missing}
    full = gathered([{name: one[name][0] for name in table} for one in per_rank], table)
    return {name: full.get(name) for name in per_rank[0]}


def heard(run) -> dict[str, int]:
    """The collectives that run() sends, by kind."""
    with CommDebugMode() as counts:
        run()
    return talk(counts)
